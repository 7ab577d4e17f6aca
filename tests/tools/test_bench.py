"""bench: every figure is there or says why not, for any file; nothing is left behind. No figure is judged."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.bench_reports import NAMES, QUICK, check_report, little_memory
from support.commands import check_error, on_terminal, run
from support.foreign import make_file, make_images, values
from support.leftovers import nothing_is_left

import h5chunk
from h5chunk.errors import FieldError, FileError, OptionError, TrustError
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.bench.bench import verdict
from h5chunk.tools.measure.disk import ByteRange, FileReads, locate, merge
from h5chunk.tools.measure.machine import thread_counts
from h5chunk.tools.measure.stages import (
    CACHED,
    DATALOADER,
    DISK,
    LIMITS,
    LOADER,
    MEMORY,
    READERS,
    TO_DEVICE,
    Figure,
    Stage,
)

__all__ = ["nothing_is_left"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_images(tmp_path / "a.h5", 100, 4, (3, 20, 20))


def test_report(path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    report = h5chunk.bench(path, progress=lambda *call: calls.append(call), **QUICK)
    check_report(report, {DISK} if report.figure(LIMITS, DISK).samples_per_s is None else set())
    assert (report.num_samples, report.sample_bytes, report.stored_bytes) == (100, 1200, 120000)
    assert (report.batch_size, report.device, report.measured_samples) == (16, "cpu", 100)
    assert any("small" in note for note in report.notes)
    direct = report.figure(READERS, "direct")
    assert direct.limit == CACHED and report.figure(LIMITS, CACHED).limit == MEMORY
    assert direct.samples_per_s == direct.bytes_per_s / 1200
    assert direct.ratio == direct.samples_per_s / report.figure(LIMITS, CACHED).samples_per_s
    assert {(stage, total) for stage, _, total in calls} == {("bench", 100)}
    done = [call[1] for call in calls]
    assert done == sorted(done) and done[-1] <= 100


def test_workers_and_fields(tmp_path: Path) -> None:
    path = make_file(
        tmp_path / "a.h5", x=(values((50, 7), "f4"), {"chunks": (5, 7)}), y=(np.arange(50), {}), z=(np.arange(3), {})
    )
    report = h5chunk.bench(path, fields=["x", "y"], cold=False, budget_s=0.2, workers=[1, 0, 1])
    assert [each.name for each in report.figures if each.group == DATALOADER] == ["0 workers", "1 worker"]
    assert report.fields == ["x", "y"] and report.sample_bytes == 36
    assert report.figure(LIMITS, DISK).note == "not requested"
    assert h5chunk.bench(path, fields={"a": "z"}, cold=False, **QUICK).num_samples == 3


FILES = {
    "one sample": ((1, 5), {}),
    "contiguous": ((40, 5), {}),
    "compressed": ((40, 50), {"chunks": (4, 50), "compression": "gzip"}),
    "one chunk": ((40, 5), {"chunks": (40, 5)}),
    "larger chunk than data": ((5, 5), {"chunks": (40, 5), "maxshape": (None, 5)}),
}


@pytest.mark.parametrize("name", FILES)
def test_any_file(tmp_path: Path, name: str) -> None:
    shape, options = FILES[name]
    check_report(
        h5chunk.bench(make_file(tmp_path / "a.h5", images=(values(shape, "u1"), options)), cold=False, **QUICK), {DISK}
    )


def test_where_byte_ranges_cannot_be_read(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((40, 6, 6), "i2"), {"chunks": (8, 6, 6), "scaleoffset": 9}))
    report = h5chunk.bench(path, cold=False, **QUICK)
    check_report(report, {DISK, "direct"})
    assert "scale" in report.figure(READERS, "direct").note


def test_strings_are_for_the_dataset_only(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((40, 6), "u1"), {}), names=(values((40,), "S4"), {}))
    report = h5chunk.bench(path, fields=["names", "images"], cold=False, **QUICK)
    check_report(report, {DISK, "direct", "h5py", "reuse=False", "reuse=True", "resident=True"})
    assert "'names' holds strings" in report.figure(READERS, "h5py").note


def test_bytes_in_other_files(tmp_path: Path) -> None:
    make_images(tmp_path / "b.h5", 40, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((40, 50), "u1")
        layout[:] = h5py.VirtualSource(tmp_path / "b.h5", "images", (40, 50))
        file.create_virtual_dataset("images", layout)
    with pytest.raises(TrustError, match="'images' is a view of other files"):
        h5chunk.bench(tmp_path / "a.h5", **QUICK)


def test_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (40, 50), "u1", chunks=(4, 50))
    check_report(h5chunk.bench(tmp_path / "a.h5", **QUICK), {DISK, CACHED})


def test_more_than_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_images(tmp_path / "a.h5", 1000, 4, (3, 20, 20))
    little_memory(monkeypatch, 1_000_000)
    report = h5chunk.bench(path, cold=False, **QUICK)
    check_report(report, {DISK, "resident=True"})
    assert report.measured_samples == 416  # whole chunks within half of it
    assert "the first 416 samples" in report.notes[0] and "fit in memory" in report.notes[0]
    with pytest.raises(OptionError, match=r"so a batch takes up .* are free: use a smaller batch_size"):
        h5chunk.bench(path)


def test_tmpfs_cannot_be_dropped() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = make_images(Path(folder) / "a.h5", 100, 4, (3, 20, 20))
        report = h5chunk.bench(path, **QUICK)
        check_report(report, {DISK})
        assert "stays in the page cache" in report.figure(LIMITS, DISK).note


def test_what_cannot_be(tmp_path: Path, path: Path) -> None:
    empty = make_file(tmp_path / "empty.h5", images=(values((0, 5), "u1"), {}), x=(values((5, 0), "u1"), {}))
    for fields, message in (("images", "has no samples"), ("x", "samples have no bytes"), ("y", "has no dataset 'y'")):
        with pytest.raises(FieldError, match=message):
            h5chunk.bench(empty, fields=[fields])
    for options in ({"batch_size": 0}, {"budget_s": 0}, {"budget_s": float("nan")}, {"workers": [-1]}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} (is|has) "):
            h5chunk.bench(path, **options)
    for device in ("tpu", "mps", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(OptionError, match=f"device is '{device}'.*pass 'cpu'"):
            h5chunk.bench(path, device=device)
    (tmp_path / "text.h5").write_text("hello")
    for name in ("text.h5", "none.h5"):
        with pytest.raises(FileError, match=name):
            h5chunk.bench(tmp_path / name)


def test_damaged_chunk(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((40, 500), "u1"), {"chunks": (4, 500), "compression": "gzip"}))
    stored = locate(H5Reader(path))
    with path.open("r+b") as file:
        file.seek(stored[3].offset)
        file.write(bytes(stored[3].size))
    for workers in (0, 1):
        with pytest.raises(FileError, match=r"a\.h5: .*(cannot be read|damaged)"):
            h5chunk.bench(path, cold=False, **QUICK | {"workers": [workers]})
    check_error(run("bench", path, "--no-cold", "--workers", 1), f"error: {path}: ")  # without the worker's traceback


def test_command(path: Path, tmp_path: Path) -> None:
    options = ["--budget", "0.2s", "--workers", 0, "--batch-size", 16]
    result = run("bench", path, *options, "--no-cold", "--fields", "images")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{path}: 100 samples of 1.2 KiB (images)\nbatches of 16 to cpu; ")
    report = json.loads(run("bench", path, *options, "--json").stdout)
    assert {"path", "figures", "verdict", "notes", "device", "num_cores", "versions"} <= set(report)
    assert [(each["group"], each["name"]) for each in report["figures"]] == NAMES
    assert set(report["figures"][0]) == set(Figure.__dataclass_fields__)
    check_error(run("bench", tmp_path / "none.h5"), "no such file")
    check_error(run("bench", path, "--device", "tpu"), "device is 'tpu'")
    check_error(run("bench", path, "--fields", "labels"), "has no dataset 'labels'")
    for arguments in (("--batch-size", 0), ("--budget", 0), ("--workers", -1)):
        assert run("bench", path, *arguments).exit_code == 1


def test_bar(path: Path) -> None:
    output, drawn = on_terminal("bench", path, "--budget", "0.2", "--workers", 0)
    assert "measuring: " in drawn and "\r" not in output and "Slowest stage" in output


def test_ratios_are_to_the_lowest_limit() -> None:
    stage = Stage(LOADER, "a", 1, limits=(CACHED, TO_DEVICE, DISK), rates=[4.0])
    ours = stage.figure({CACHED: 10.0, TO_DEVICE: 5.0, MEMORY: 2.0})
    assert (ours.limit, ours.ratio) == (TO_DEVICE, 0.8)
    assert stage.figure({MEMORY: 8.0}).limit == MEMORY and stage.figure({}).limit is None


def verdict_of(
    ours: float, disk: float = 0.0, not_direct: str = "", compressed: bool = False, fits: bool = True
) -> str:
    figures = [Figure(LIMITS, CACHED, 100.0, 1.0), Figure(LIMITS, DISK, disk, 1.0) if disk else Figure(LIMITS, DISK)]
    loader = Stage(LOADER, "reuse=False", 1, limits=(CACHED,), rates=[ours]).figure({CACHED: 100.0})
    return verdict([*figures, loader], not_direct=not_direct, compressed=compressed, fits=fits)


def test_verdicts() -> None:
    assert "reading the page cache. ChunkLoader reaches 0.90 times its rate" in verdict_of(90.0)
    assert "ChunkLoader itself (50 samples/s, 0.50 times the rate of page-cache read)" in verdict_of(50.0)
    assert "decompression" in verdict_of(50.0, compressed=True)
    assert "which reads in one thread" in verdict_of(50.0, not_direct="why")
    assert "the disk (10 samples/s)" in verdict_of(90.0, disk=10.0, fits=False)
    assert "first epoch reads from disk, which limits it to 10" in verdict_of(90.0, disk=10.0)
    assert "unknown" in verdict([], not_direct="", compressed=False, fits=True)


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("options", [{}, {"chunks": (3, 5, 6)}, {"chunks": (3, 2, 6)}, {"compression": "gzip"}])
def test_located_bytes_are_the_fields(tmp_path: Path, options: dict) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((20, 5, 6), "u1"), options), labels=(np.arange(20), {}))
    stored = locate(H5Reader(path))
    num_bytes = sum(each.size for each in stored)
    with h5py.File(path) as file:
        assert num_bytes == sum(file[name].id.get_storage_size() for name in ("images", "labels"))
    assert sum(run.size for run in merge(stored)) == num_bytes
    firsts = [each.first_sample for each in stored]
    assert firsts == sorted(firsts)
    if options == {"chunks": (3, 5, 6)}:
        with closing(FileReads(H5Reader(path))) as reads:
            head = reads.head(4)
        assert sum(each.size for each in head) == 2 * (3 * 30 + 3 * 8)
    if options == {"chunks": (3, 2, 6)}:  # chunks of the same samples that follow each other are read at once
        assert firsts == sorted([*range(0, 20, 3)] * 2)


def test_reads_end(path: Path) -> None:
    reads = FileReads(H5Reader(path))
    runs = merge(reads.stored)
    assert reads.rate(runs, 3, 60, again=False) > 0 and reads.num_read == len(runs)
    with pytest.raises(FileError, match="cut short"):
        reads.rate([ByteRange(0, path.stat().st_size, 10)], 1, 60, again=False)
    reads.close()


def test_too_few_samples_for_a_verdict(path: Path) -> None:
    few = h5chunk.bench(path, **{**QUICK, "batch_size": 1 << 20})
    assert "are fewer than two batches of 1048576" in few.verdict and "smaller batch_size" in few.verdict
    assert "fewer" not in h5chunk.bench(path, **QUICK).verdict
