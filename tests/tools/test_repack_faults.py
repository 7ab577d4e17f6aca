"""What repack refuses, damaged files, full disks, kills: a named error each, and the old output as it was."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.conversions import linux
from support.faults import failure, small, watch
from support.jobs import crash, in_children_too
from support.repack_files import check_same, make_everything

from h5chunk.cli import main
from h5chunk.errors import FieldError, FileError, H5ChunkError, OutputError
from h5chunk.plan.permutation import permutation
from h5chunk.tools.repack.options import RepackOptions
from h5chunk.tools.repack.repack import repack

OLD = b"what stood there"


def make_file(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        images = np.random.default_rng(0).integers(0, 256, (90, 20, 10), np.uint8)
        file.create_dataset("images", data=images, **options)
        file["names"] = [f"{i}" for i in range(90)]
    return path


def check_refused(source: Path, error: type[Exception], message: str, **options: Any) -> None:
    """An error that says why; the old output stays, and nothing is left beside it."""
    folder = source.parent / "out"
    folder.mkdir(exist_ok=True)
    (folder / "out.h5").write_bytes(OLD)
    with pytest.raises(error) as raised:
        repack(source, folder / "out.h5", overwrite=True, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert os.listdir(folder) == ["out.h5"] and (folder / "out.h5").read_bytes() == OLD


# ---------------------------------------------------------------------------------------------------------- refusals


def refuse_external_link(file: h5py.File) -> str:
    file["there"] = h5py.ExternalLink("other.h5", "/x")
    return "'there' is a link into another file, which is not followed"


def refuse_virtual(file: h5py.File) -> str:
    layout = h5py.VirtualLayout((90,), "i4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (90,))
    file.create_virtual_dataset("view", layout)
    return "'view' is a virtual dataset, which may read other files"


def refuse_external_storage(file: h5py.File) -> str:
    file.create_dataset("g/out", (90,), "i4", external=[("/etc/passwd", 0, 360)])
    return "'g/out' has values in other files, which are not opened"


def refuse_group_of_our_name(file: h5py.File) -> str:
    file["h5chunk/x"] = 1
    return "has a group /h5chunk that h5chunk did not write"


def refuse_regions(file: h5py.File) -> str:
    file.attrs["region"] = file["images"].regionref[3:5]
    return "'@region' refers to regions of datasets, whose samples a shuffle would move"


def refuse_region_dataset(file: h5py.File) -> str:
    file["regions"] = np.array([file["images"].regionref[3:5]], h5py.regionref_dtype)
    return "'regions' (1 object) refers to regions of datasets, whose samples a shuffle would move"


def refuse_columns(file: h5py.File) -> str:
    make_sparse(file, "csc_matrix", np.zeros(71, np.int32))
    return "'m' is a matrix in compressed columns, whose rows cannot be permuted"


def refuse_falling_pointers(file: h5py.File) -> str:
    make_sparse(file, "csr_matrix", np.array([*[0, 5, 3], *[7] * 88]))
    return "'m/indptr' is damaged: its values must begin with 0 and never decrease (row 1)"


def refuse_pointers_elsewhere(file: h5py.File) -> str:
    make_sparse(file, "csr_matrix", np.array([*range(7), *[6] * 84]))
    return "'m/indptr' is damaged: its last value is 6, but it must be 7"


def refuse_short_pointers(file: h5py.File) -> str:
    make_sparse(file, "csr_matrix", np.arange(5))
    return "'m' is damaged (7 values, 7 indices and 5 pointers"


def make_sparse(file: h5py.File, kind: str, indptr: np.ndarray) -> None:
    group = file.create_group("m")
    group.attrs["encoding-type"], group.attrs["shape"] = kind, (90, 70)
    group["data"], group["indices"], group["indptr"] = np.ones(7), np.arange(7), indptr


@pytest.mark.parametrize(
    "make",
    [
        refuse_external_link, refuse_virtual, refuse_external_storage, refuse_group_of_our_name,
        refuse_regions, refuse_region_dataset, refuse_columns, refuse_falling_pointers,
        refuse_pointers_elsewhere, refuse_short_pointers,
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(tmp_path: Path, make: Callable[[h5py.File], str]) -> None:
    source = make_file(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        message = make(file)
    check_refused(source, H5ChunkError, message, shuffle=True)


def leave_wide(file: h5py.File) -> None:
    file.create_dataset("b", (90, 200 << 20), "u1", chunks=(1, 1 << 20))[0, 0] = 1


def leave_filter(file: h5py.File) -> None:
    file.create_dataset("b", data=np.arange(900).reshape(90, 10), chunks=(9, 10), scaleoffset=0)


def leave_broken(file: h5py.File) -> None:
    """The index of the chunks of ``b`` is overwritten afterwards."""
    file.create_dataset("b", data=np.arange(900), chunks=(7,), compression="gzip")


@pytest.mark.parametrize(
    "make",
    [
        refuse_external_link, refuse_virtual, refuse_external_storage, refuse_short_pointers, refuse_columns,
        leave_wide, leave_filter, leave_broken,
    ],
)  # fmt: skip
@pytest.mark.parametrize("linked", [False, True])
def test_other_datasets_cannot_hinder_those_that_are_named(
    tmp_path: Path, make: Callable[[h5py.File], object], linked: bool
) -> None:
    source, out = make_file(tmp_path / "a.h5"), tmp_path / "b.h5"
    with h5py.File(source, "r+") as file:
        make(file)
        if linked and "b" in file:
            file["c"], file["refs"] = file["b"], np.array([file["b"].ref, file["images"].ref], h5py.ref_dtype)
    if make is leave_broken:
        data = source.read_bytes()
        source.write_bytes(data.replace(b"TREE\x01", b"TREX\x01"))  # the B-trees of chunks
    report = repack(source, out, fields=["images"])
    assert [field.name for field in report.fields] == ["images"]
    with h5py.File(out) as new, h5py.File(source) as old:
        assert new["images"].chunks == (90, 20, 10)
        np.testing.assert_array_equal(new["images"], old["images"])
        missing = {name for name in old if name not in new}
    assert all(any(f"{name!r} is left out" in note for note in report.notes) for name in missing - {"c"})
    assert not missing or not {"refs", "names"} & missing


@pytest.mark.parametrize("make", [refuse_external_link, refuse_virtual, refuse_external_storage])
def test_a_named_dataset_that_is_elsewhere_is_an_error_that_says_so(
    tmp_path: Path, make: Callable[[h5py.File], str]
) -> None:
    source = make_file(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        error = make(file)
        file["soft"] = h5py.SoftLink("/images")
    with pytest.raises(FieldError, match=f"a.h5: {error}"):
        repack(source, tmp_path / "b.h5", fields=[error.split("'")[1]])
    with pytest.raises(FieldError, match="'soft' is a link to '/images': name that dataset"):
        repack(source, tmp_path / "b.h5", fields=["soft"])


def test_regions_are_kept_in_their_order(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        file["regions"] = np.array([file["images"].regionref[3:5, 2], h5py.RegionReference()], h5py.regionref_dtype)
        file.attrs["region"] = file["images"].regionref[7, 1:3]
    repack(source, tmp_path / "b.h5")
    check_same(source, tmp_path / "b.h5")


def test_references_to_what_was_deleted_are_said(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        file["gone"] = 1
        file.attrs["to"] = file["gone"].ref
        del file["gone"]
    report = repack(source, tmp_path / "b.h5")
    assert report.notes == [
        "the root, attribute 'to' referred to an object that cannot be read or no longer exists, and is now empty"
    ]
    with h5py.File(tmp_path / "b.h5") as file:
        assert not file.attrs["to"]


def test_comments_are_missed(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    with h5py.File(source, "r+") as file:
        h5py.h5o.set_comment(file["images"].id, b"nice")
    report = repack(source, tmp_path / "b.h5")
    assert report.notes == ["the comment on 'images', which h5py cannot read, is left out"]


# ------------------------------------------------------------------------------------------------------ paths, disks


def test_the_source_itself(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    before = source.read_bytes()
    (tmp_path / "link.h5").symlink_to(source)
    os.link(source, tmp_path / "hard.h5")
    for out in ("a.h5", "link.h5", "hard.h5"):
        with pytest.raises(OutputError, match="is also the source: write to another file"):
            repack(source, tmp_path / out, overwrite=True)
    assert source.read_bytes() == before


@linux
def test_killed_when_it_was_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command finds its work done; another one, or one of a file that changed, finds that something exists."""
    source, path, tuned = make_file(tmp_path / "a.h5"), tmp_path / "b.h5", tmp_path / "t.json"
    tuned.write_text('{"window_chunks": 3}')
    options: dict[str, Any] = {"shuffle": True, "compression": "gzip"}
    whole = repack(source, tmp_path / "whole.h5", **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch(patch, "sync folder", failure(KeyboardInterrupt))
        repack(source, path, **options)
    data = path.read_bytes()
    report = repack(source, path, memory_bytes=1 << 28, **options)
    assert report.already_complete and "already complete" in str(report)
    same = {"path": whole.path, "seconds": whole.seconds, "already_complete": False}
    assert replace(report, **same) == whole
    for other in ({"seed": 1}, {"cache": (1, 2, 0.5)}, {"tuned": tuned}, {"window_chunks": 2}, {}):
        if not other:
            os.utime(source)
        with pytest.raises(OutputError, match="exists: use --overwrite"):
            repack(source, path, **{**options, **other})
    assert path.read_bytes() == data == (tmp_path / "whole.h5").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5", "t.json", "whole.h5"]


def test_an_output_that_exists(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    (tmp_path / "b.h5").write_bytes(OLD)
    with pytest.raises(OutputError, match=r"exists: use --overwrite \(overwrite=True\) to replace it"):
        repack(source, tmp_path / "b.h5")
    assert (tmp_path / "b.h5").read_bytes() == OLD
    repack(source, tmp_path / "b.h5", overwrite=True)
    check_same(source, tmp_path / "b.h5")
    with pytest.raises(OutputError, match=r"its folder .* does not exist"):
        repack(source, tmp_path / "no" / "b.h5")


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "no such file"), (b"", "not an HDF5 file"), (b"text" * 500, "not an HDF5 file")],
)
def test_no_hdf5_file(tmp_path: Path, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / "a.h5").write_bytes(data)
    check_refused(tmp_path / "a.h5", FileError, message)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    source.write_bytes(source.read_bytes()[:-100])
    check_refused(source, FileError, "cut short")


@pytest.mark.usefixtures("in_process")
def test_a_small_disk_is_noticed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_file(tmp_path / "a.h5")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=20_000))
    watch(monkeypatch, "tools.repack.repack.create_replica", failure(AssertionError("written")))
    for options in ({}, {"shuffle": True, "compression": "gzip", "chunk_samples": 30}):
        check_refused(
            source, OutputError, "of disk space, but 19.5 KiB are free: free space, or write elsewhere", **options
        )


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "compression": "gzip"}])
def test_a_disk_that_fails_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None, options: dict[str, Any]
) -> None:
    source = make_file(tmp_path / "a.h5")
    small(monkeypatch, min_memory_bytes=0, step_bytes=1000, table_bytes=0)

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", fail)
    check_refused(source, OutputError, "space left on device" if "compression" not in options else "is full", **options)


LIMITED = """
import resource, signal, sys
from h5chunk.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
main(sys.argv[2:])
"""


@pytest.mark.parametrize("limit", [0, 3000, 20_000])
def test_files_of_limited_size(tmp_path: Path, limit: int) -> None:
    source = make_file(tmp_path / "a.h5")
    (tmp_path / "b.h5").write_bytes(OLD)
    command = [sys.executable, "-c", LIMITED, str(limit), "repack", str(source), str(tmp_path / "b.h5"), "--overwrite"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    old = h5py.version.hdf5_version_tuple < (2,)  # crashes on a full disk, in a child process
    assert re.search("cannot be written|needs" + "|crashes HDF5" * old, result.stderr)
    assert (tmp_path / "b.h5").read_bytes() == OLD and sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5"]


# --------------------------------------------------------------------------------------------------- kills, crashes

KILLED = """
import os, signal, sys
from h5chunk.tools.repack.repack import repack
def told(stage, done, total):
    if done >= total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
repack(sys.argv[1], sys.argv[2], overwrite=True, shuffle=True, progress=told)
"""


@pytest.mark.parametrize("part", [0, 0.3, 1])
def test_killed_in_the_middle(tmp_path: Path, part: float) -> None:
    source, out = make_file(tmp_path / "a.h5"), tmp_path / "b.h5"
    out.write_bytes(OLD)
    command = [sys.executable, "-c", KILLED, str(source), str(out), str(part)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert out.read_bytes() == OLD
    repack(source, out, overwrite=True, shuffle=True)
    check_same(source, out, permutation(90, 0))
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5"]


@pytest.mark.parametrize("part", [0, 0.5])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, part: float) -> None:
    def told(stage: str, done: int, total: int | None) -> None:
        if total is not None and done >= part * total:
            raise KeyboardInterrupt

    check_refused(make_file(tmp_path / "a.h5"), KeyboardInterrupt, "", progress=told)


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")

    def told(stage: str, done: int, total: int | None) -> None:
        os.utime(source, (1, 1))

    check_refused(source, FileError, "changed while it was read. Run repack again", progress=told)


def test_a_crash_of_hdf5_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_file(tmp_path / "a.h5")
    for where in ("tools.repack.repack.create_replica", "tools.repack.repack.survey_file"):
        in_children_too(monkeypatch, where, crash)
        check_refused(source, FileError, "this file crashes HDF5 (SIGSEGV): it is damaged")


# ------------------------------------------------------------------------------------------------------ damaged data


def test_claims_are_not_believed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("images", (1 << 40, 1 << 10), "u1", chunks=(1 << 10, 1 << 10))
        images[0] = 1
    check_refused(tmp_path / "a.h5", FileError, "'images' has 1073741824 chunks, but only 1 were ever written")


@pytest.mark.parametrize("chunks", [(10, 20, 10), (10, 7, 10)], ids=str)
def test_a_damaged_chunk_is_named(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    source = make_file(tmp_path / "a.h5", chunks=chunks, compression="gzip", fletcher32=True)
    places: list[int] = []
    with h5py.File(source) as file:
        file["images"].id.chunk_iter(lambda chunk: places.append(chunk.byte_offset + chunk.size // 2))
    data = bytearray(source.read_bytes())
    data[places[2]] ^= 16
    source.write_bytes(data)
    check_refused(source, FileError, "a.h5: '/images', chunk 2 is damaged (fletcher32: ")
    check_refused(source, FileError, "a.h5: '/images', chunk 2 is damaged (fletcher32: ", shuffle=True)


@pytest.mark.skipif(h5py.version.hdf5_version_tuple < (2,), reason="HDF5 before 2.0 decodes it without an error")
def test_a_damaged_chunk_that_hdf5_decodes_is_named(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5", chunks=(10, 20, 10), scaleoffset=0)
    places: list[int] = []
    with h5py.File(source) as file:
        file["images"].id.chunk_iter(lambda chunk: places.append(chunk.byte_offset))
    data = bytearray(source.read_bytes())
    data[places[3]] = 255
    source.write_bytes(data)
    check_refused(source, FileError, "a.h5: '/images', chunk 3 cannot be read: ")


def test_mutated_files_give_an_error_or_a_file(tmp_path: Path) -> None:
    source = make_everything(tmp_path / "a.h5", 20)
    data = source.read_bytes()
    rng = np.random.default_rng(0)
    counts = {"file": 0, "error": 0}
    for _ in range(12):
        mutated = bytearray(data)
        for place in rng.integers(0, len(data), rng.choice([1, 4, 16])):
            mutated[place] = rng.integers(0, 256)
        (tmp_path / "b.h5").write_bytes(mutated)
        try:
            repack(tmp_path / "b.h5", tmp_path / "c.h5", overwrite=True)
            counts["file"] += 1
        except H5ChunkError:
            counts["error"] += 1
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert all(counts.values())


# -------------------------------------------------------------------------------------------------- the command line


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    (tmp_path / "tuned.json").write_text('{"window_chunks": 3}')
    result = run(
        "repack", source, tmp_path / "b.h5", "--shuffle", "--seed", 4, "--compression", "lzf", "--memory-bytes", "64M",
        "--tuned", tmp_path / "tuned.json", "--fields", "images", "--chunk-samples", 30, "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert (report["seed"], report["window_chunks"], report["chunk_samples"]) == (4, 3, 30)
    check_same(source, tmp_path / "b.h5", permutation(90, 4))
    result = run("repack", source, tmp_path / "c.h5", "--keep", "names")
    assert result.stdout.startswith(f"{tmp_path / 'c.h5'}: 90 samples of 'images'")
    assert "  copied unchanged: 1 other dataset" in result.stdout
    result = run("repack", source, tmp_path / "c.h5")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "exists: use --overwrite" in result.stderr
    assert run("repack", source, tmp_path / "c.h5", "--overwrite", "--quiet").output == ""


def test_options_of_the_command_are_those_of_the_function() -> None:
    names = {parameter.name for parameter in main.commands["repack"].params} - {"quiet", "as_json"}
    parameters = {*inspect.signature(repack).parameters, *RepackOptions.names()}
    assert names == parameters - {"progress", "path", "source", "cache", "options"} | {"file", "output"}


def test_progress_counts_bytes(tmp_path: Path) -> None:
    source = make_file(tmp_path / "a.h5")
    told: list[tuple[str, int, int | None]] = []
    for options in ({}, {"shuffle": True}, {"compression": "gzip"}):
        told.clear()
        repack(source, tmp_path / "b.h5", overwrite=True, progress=lambda *each: told.append(each), **options)
        assert told[0][1] == 0 and told[-1][1] == told[-1][2] and {stage for stage, _, _ in told} == {"repack"}
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][2] == 90 * 200 + 90 * 16


def test_convert_takes_the_chunk_size_that_a_tuner_found(class_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text('{"chunk_samples": 7, "window_chunks": 3}')
    folder = class_folder(20)
    result = run("convert", folder, tmp_path / "a.h5", "--tuned", tmp_path / "tuned.json", "--workers", 0)
    assert result.stderr == f"note: {tmp_path}/tuned.json: convert does not use window_chunks, which only repack uses\n"
    given = ("--chunk-samples", 4, "--workers", 0)
    assert run("convert", folder, tmp_path / "b.h5", "--tuned", tmp_path / "tuned.json", *given).exit_code == 0
    with h5py.File(tmp_path / "a.h5") as a, h5py.File(tmp_path / "b.h5") as b:
        assert (a["images"].chunks[0], b["images"].chunks[0]) == (7, 4)
    (tmp_path / "tuned.json").write_text('{"chunk_samples": 0}')
    result = run("convert", folder, tmp_path / "c.h5", "--tuned", tmp_path / "tuned.json")
    assert result.exit_code == 1 and "chunk_samples is 0" in result.stderr


# --------------------------------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize("options", [{"shuffle": True}, {"chunk_samples": 7}, {"compression": "gzip"}])
@pytest.mark.parametrize("damaged", ["images", "names"])
def test_damaged_values_get_no_new_checksums(tmp_path: Path, damaged: str, options: dict[str, Any]) -> None:
    source, again = tmp_path / "ours.h5", tmp_path / "again.h5"
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (90, 20, 10), np.uint8)
        file["names"] = np.arange(90)
    repack(tmp_path / "theirs.h5", source, window_chunks=2, chunk_samples=10)
    repack(source, again, **options)
    with h5py.File(source) as file:
        place = file[damaged].id.get_chunk_info(3).byte_offset + 5
    with source.open("r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 4]))
    check_refused(source, FileError, f"chunk 3 of {damaged!r} does not match its checksum", **options)
    with h5py.File(source, "r+") as file:
        del file[f"h5chunk/checksums/{damaged}"]
    repack(source, tmp_path / "out" / "out.h5", overwrite=True, **options)
