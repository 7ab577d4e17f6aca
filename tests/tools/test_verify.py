"""Every flipped bit is found and named, and what can be repaired becomes what it was, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.csr_files import write_csr
from support.faults import small
from support.flipped_bits import flip, places
from support.foreign import make_file, make_images, values
from support.matrix_files import write_h5ad

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FieldError, FileError, OptionError, OutputError
from h5chunk.tools.repack.repack import repack

QUIET = {"workers": 0}
MATRIX = scipy.sparse.random(300, 70, 0.1, random_state=0, format="csr")
MATRIX.sort_indices()


@pytest.fixture
def images(class_folder, tmp_path: Path) -> Path:
    h5chunk.convert(class_folder(), tmp_path / "a.h5", chunk_samples=3, **QUIET)
    return tmp_path / "a.h5"


@pytest.fixture
def source(images: Path) -> Path:
    return images.parent / "photos"


def write_matrix(path: Path, indices: np.ndarray | None = None, pattern: bool = False, code: int = 7) -> Path:
    indices = MATRIX.indices if indices is None else indices
    codes = None if pattern else np.full(MATRIX.nnz, code, "u1")
    write_csr(path, MATRIX.indptr.astype("i8"), indices.astype("u1"), codes, 70, overwrite=True)
    return path


def named(path: Path, **options: object) -> set[tuple[str, int]]:
    return {(each.field, each.chunk) for each in h5chunk.verify(path, **options).bad}


def make_kind(kind: str, folder: Path, tmp_path: Path) -> Path:
    kind, _, packed = kind.partition(", ")
    path = tmp_path / f"{kind}.h5"
    if kind == "images":
        h5chunk.convert(folder, path, chunk_samples=3, **QUIET)
    elif kind == "dense":
        scipy.sparse.save_npz(tmp_path / "m.npz", (MATRIX > 0).astype("u1"))
        h5chunk.convert(tmp_path / "m.npz", path, dense=True, chunk_samples=32)
    else:
        write_matrix(path, pattern=kind == "pattern")
    if packed:
        repack(path, tmp_path / "packed.h5", compression="gzip")
        return tmp_path / "packed.h5"
    return path


@pytest.mark.parametrize("kind", ["images", "images, gzip", "csr", "csr, gzip", "pattern", "dense"])
def test_a_bit_in_every_chunk_is_named(class_folder, tmp_path: Path, kind: str) -> None:
    path = make_kind(kind, class_folder(), tmp_path)
    report = h5chunk.verify(path)
    assert (
        report.ok and not report.notes and report.by_h5chunk and {each.method for each in report.fields} >= {"checksum"}
    )
    rng = np.random.default_rng(0)
    all_of_them = places(path)
    assert all_of_them
    for name, chunk, offset, size in all_of_them:
        at, bit = offset + int(rng.integers(size)), int(rng.integers(8))
        flip(path, at, bit)
        assert named(path) == {(name, chunk)}
        flip(path, at, bit)
    for _, _, offset, size in all_of_them:
        flip(path, offset + int(rng.integers(size)))
    assert named(path) == {(name, chunk) for name, chunk, _, _ in all_of_them}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bits(images: Path, data: st.DataObject) -> None:
    copy = shutil.copy(images, images.with_name("copy.h5"))
    chunks = places(copy)
    hit = data.draw(st.sets(st.sampled_from(chunks), max_size=4))
    for _, _, offset, size in hit:
        flip(copy, offset + data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    report = h5chunk.verify(copy)
    assert {(each.field, each.chunk) for each in report.bad} == {(name, chunk) for name, chunk, _, _ in hit}
    report = h5chunk.verify(copy, repair=images.parent / "photos")
    assert report.ok and len(report.repaired) == len(hit) and copy.read_bytes() == images.read_bytes()


def test_samples_are_named(images: Path) -> None:
    [_, (name, chunk, offset, size), *_] = places(images)
    flip(images, offset + 1)
    [bad] = h5chunk.verify(images).bad
    assert (bad.field, bad.chunk, bad.first_sample, bad.last_sample) == (name, chunk, 3, 5)
    assert (bad.offset, bad.num_bytes) == (offset, size) and bad.expected != bad.actual
    assert f"images, chunk 1, samples 3 to 5: does not match its checksum (expected {bad.expected:08x}" in str(bad)


def test_rows_of_a_matrix_are_named(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "a.h5")
    with h5py.File(path) as file:
        offset = file["X/indices"].id.get_chunk_info(0).byte_offset
    flip(path, offset)
    [bad] = h5chunk.verify(path).bad
    assert (bad.field, bad.first_sample, bad.last_sample) == ("X/indices", 0, 299)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.__setitem__(MATRIX.indptr[10] + 1, i[MATRIX.indptr[10]]), "row 10 has a column twice"),
        (lambda i: i.__setitem__(MATRIX.indptr[20], 70), "row 20 has a column outside of the 70 columns"),
        (
            lambda i: i.__setitem__(slice(*MATRIX.indptr[5:7]), i[slice(*MATRIX.indptr[5:7])][::-1]),
            "row 5 do not ascend",
        ),
    ],
)
def test_columns_of_a_row(tmp_path: Path, monkeypatch, change, message: str) -> None:
    indices = MATRIX.indices.copy()
    change(indices)
    path = write_matrix(tmp_path / "a.h5", indices)
    for part_bytes in (1 << 20, 16):
        small(monkeypatch, scanned_part_bytes=part_bytes)
        report = h5chunk.verify(path)
        assert not report.ok and not report.bad and any(message in each for each in report.problems)


@pytest.mark.parametrize("chunk_entries", [7, 100])
def test_columns_at_the_border_of_chunks(tmp_path: Path, chunk_entries: int) -> None:
    """Of a matrix of others, in small chunks: order is free, but a column may come once."""
    for spoil, ok in ((False, True), (True, False)):
        matrix = MATRIX.copy()
        if spoil:  # across a border, if chunks are of 7
            row = int(np.flatnonzero((matrix.indptr[:-1] % 7 == 6) & (np.diff(matrix.indptr) > 1))[0])
            matrix.indices[matrix.indptr[row] + 1] = matrix.indices[matrix.indptr[row]]
        path = tmp_path / f"{spoil}.h5"
        with h5py.File(path, "w") as file:
            group = file.create_group("X")
            group.attrs.update({"encoding-type": "csr_matrix", "shape": matrix.shape})
            group["indptr"] = matrix.indptr
            group.create_dataset("indices", data=matrix.indices, chunks=(chunk_entries,))
            group.create_dataset("data", data=matrix.data, chunks=(chunk_entries,))
        report = h5chunk.verify(path)
        assert report.ok == ok and (ok or f"row {row} has a column twice" in report.problems[0])


def test_unsorted_rows_of_others(tmp_path: Path) -> None:
    matrix = MATRIX.copy()
    for first, last in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True):
        matrix.indices[first:last] = matrix.indices[first:last][::-1].copy()
    matrix.has_sorted_indices = False
    path = write_h5ad(tmp_path / "a.h5ad", matrix, compression="gzip")
    assert h5chunk.verify(path).ok
    with h5py.File(path, "r+") as file:
        first = int(matrix.indptr[12])
        file["X/indices"][first + 2] = file["X/indices"][first]
    assert h5chunk.verify(path).problems == ("X: row 12 has a column twice",)


def test_zero_codes_and_scale(tmp_path: Path) -> None:
    assert "is stored as 0" in h5chunk.verify(write_matrix(tmp_path / "a.h5", code=0)).problems[0]
    for value, message in ((np.nan, "is not finite"), (np.inf, "is not finite"), (0, "is stored as 0")):
        floats = np.full(MATRIX.nnz, 1.5, "f4")
        floats[70] = value
        path = tmp_path / "f.h5"
        write_csr(path, MATRIX.indptr.astype("i8"), MATRIX.indices.astype("u1"), floats, 70, overwrite=True)
        [problem] = h5chunk.verify(path).problems
        assert f"the value of entry 70 {message}" in problem
    path = write_matrix(tmp_path / "b.h5")
    with h5py.File(path, "r+") as file:
        file["X"].attrs["scale"] = np.nan
    assert "its scale is nan" in h5chunk.verify(path).problems[0]


def turn(part: np.ndarray) -> None:
    part[:] = part[::-1].copy()


def spoil_header(change) -> str:
    def run(path: Path) -> str:
        with h5py.File(path, "r+") as file:
            change(file)
        report = h5chunk.verify(path)
        assert not report.ok
        return " ".join((*report.problems, *map(str, report.bad)))

    return run


def drop(name: str):
    return lambda file: file.__delitem__(name)


def put(name: str, place: int, value: int):
    return lambda file: file[name].__setitem__(place, value)


def replace(name: str, value: np.ndarray):
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("h5chunk/checksums/images"), "'images' has no checksums"),
        (drop("labels"), "checksums of 'labels', but no such dataset"),
        (replace("h5chunk/checksums/images", np.zeros(3, "u4")), "has 7 chunks, but 3 checksums"),
        (replace("h5chunk/checksums/images", np.zeros(7, "f4")), "float32 (7,), not a list of uint32"),
        (put("h5chunk/source_index", 3, -1), "source_index contains the negative index -1"),
        (lambda f: f["h5chunk/source_index"].__setitem__(3, f["h5chunk/source_index"][4]), "of the source twice"),
        (replace("h5chunk/source_index", np.arange(3)), "source_index has the shape (3,) for 20 samples"),
        (put("h5chunk/source_name_ends", 19, 5), "source_name_ends does not divide the names"),
        (put("labels", 4, 3), "sample 4 has the label 3, but there are 3 classes"),
        (lambda f: f["h5chunk"].attrs.modify("chunk_samples", np.int64(5)), "samples in chunks of 5"),
        (
            put("h5chunk/checksums/images", 2, 1),
            "chunk 2, samples 6 to 8: does not match its checksum (expected 00000001",
        ),
    ],
)
def test_what_lies_beside_the_data(images: Path, change, message: str) -> None:
    assert message in spoil_header(change)(images)


def test_files_of_others(tmp_path: Path) -> None:
    path = make_images(tmp_path / "a.h5", 40, 4, compression="gzip")
    report = h5chunk.verify(path)
    assert report.ok and not report.by_h5chunk and "as far as can be seen without checksums" in str(report)
    assert [(each.num_checked, each.method) for each in report.fields] == [(10, "decoding")]
    for name, chunk, offset, size in places(path):
        flip(path, offset + size - 2)  # in the checksum of gzip
        assert named(path) == {(name, chunk)}
        flip(path, offset + size - 2)


def test_all_sorts_of_datasets(tmp_path: Path) -> None:
    path = make_file(
        tmp_path / "a.h5",
        contiguous=(values((30, 5), "f4"), {}),
        deep__parts=(values((30, 50), "u2"), {"chunks": (7, 9), "compression": "lzf", "fletcher32": True}),
        scaled=(np.arange(30), {"chunks": (7,), "scaleoffset": 0}),
        text=(np.array(["a", "bc"], object), {"dtype": h5py.string_dtype()}),
        packed=(np.array(["a", "bc"], object), {"dtype": h5py.string_dtype(), "compression": "gzip"}),
    )
    with h5py.File(path, "r+") as file:
        file["single"], file["null"] = 5, h5py.Empty("f4")
        file.create_dataset("empty", (0, 3), "u1", maxshape=(None, 3))
        file.create_dataset("unwritten", (30,), "u1", chunks=(7,))
        file["link"] = h5py.SoftLink("/single")
    report = h5chunk.verify(path)
    assert report.ok and len(report.notes) == 1 and "'link' is a soft link" in report.notes[0]
    counts = {each.field: each.num_chunks for each in report.fields}
    assert counts["deep/parts"] == 30 and counts["scaled"] == 5 and counts["unwritten"] == counts["empty"] == 0


def test_rows_of_chunks_of_parts(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", x=(values((30, 50), "u2"), {"chunks": (7, 9), "fletcher32": True}))
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info_by_coord((7, 18)).byte_offset
    flip(path, offset)
    [bad] = h5chunk.verify(path).bad
    assert (bad.chunk, bad.first_sample, bad.last_sample) == (8, 7, 13) and "fletcher32" in bad.problem
    assert "--accept" not in str(h5chunk.verify(path))  # it has no checksums of h5chunk


def test_quick_says_what_it_read(images: Path, in_process: None, monkeypatch) -> None:
    small(monkeypatch, quick_chunks=4)
    report = h5chunk.verify(images, quick=True)
    assert report.ok and {each.num_checked for each in report.fields} == {4}
    assert "4 of the 7 chunks of 'images' were read (0, 2, 4, ..., 6)" in report.notes
    flip(images, places(images)[6][2])
    assert named(images, quick=True) == {("images", 6)}
    flip(images, places(images)[6][2])
    flip(images, places(images)[1][2])
    assert named(images, quick=True) == set() and named(images) == {("images", 1)}


def test_a_file_that_is_cut(images: Path) -> None:
    os.truncate(images, images.stat().st_size - 1)
    with pytest.raises(FileError, match="cut short"):
        h5chunk.verify(images)


def test_bytes_that_the_disk_does_not_give(images: Path, in_process: None, monkeypatch) -> None:
    import h5chunk.store.hdf5.ranges

    _, _, offset, size = places(images)[2]
    preadv = os.preadv

    def failing(descriptor, buffers, at):
        if at < offset + size and at + len(buffers[0]) > offset:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(h5chunk.store.hdf5.ranges.os, "preadv", failing)
    report = h5chunk.verify(images)
    assert [(each.field, each.chunk, each.problem) for each in report.bad] == [("images", 2, "Input/output error")]


def test_labels_without_a_class(tmp_path: Path) -> None:
    """A code of -1 is no class, in files of AnnData and of data sets in Python alike."""
    categories = pd.Categorical([None, "a", "b", "a", "b"] * 10)
    obs = pd.DataFrame({"labels": categories}, index=[f"cell {i}" for i in range(50)])
    cells = anndata.AnnData(scipy.sparse.random(50, 20, 0.2, "csr", np.float32), obs)
    cells.write_h5ad(tmp_path / "m.h5ad")
    h5chunk.convert(tmp_path / "m.h5ad", tmp_path / "m.h5")
    data = h5chunk.ChunkDataset(tmp_path / "m.h5", fields=["labels"])
    assert min(int(data[i][0]) for i in range(50)) == -1 and h5chunk.verify(tmp_path / "m.h5").ok


# Repairing


def test_only_what_gives_the_checksum_is_written(images: Path, source: Path) -> None:
    whole = images.read_bytes()
    for _, _, offset, _ in places(images)[:2]:
        flip(images, offset + 5)
    damaged = images.read_bytes()
    with h5py.File(images) as file:
        ends = [0, *file["h5chunk/source_name_ends"][:]]
        name = bytes(file["h5chunk/source_names"][ends[4] : ends[5]]).decode()
    kept = (source / name).read_bytes()
    from support.pictures import pixels

    Image.fromarray(pixels(999)).save(source / name)
    report = h5chunk.verify(images, repair=source)
    assert [each.chunk for each in report.repaired] == [0] and [each.chunk for each in report.bad] == [1]
    assert "not repaired: the source gives" in report.bad[0].problem and "it has changed" in report.bad[0].problem
    (source / name).unlink()
    assert "is no longer in the source" in h5chunk.verify(images, repair=source).bad[0].problem
    (source / name).write_bytes(kept)
    assert images.read_bytes() not in (whole, damaged)
    assert h5chunk.verify(images, repair=source).ok and images.read_bytes() == whole


def test_from_an_archive(images: Path, source: Path) -> None:
    whole = images.read_bytes()
    archive = shutil.make_archive(str(images.parent / "photos"), "zip", images.parent, "photos")
    flip(images, places(images)[3][2])
    flip(images, places(images)[-1][2])
    assert h5chunk.verify(images, repair=archive).ok and images.read_bytes() == whole


def test_fields_of_a_manifest(class_folder, tmp_path: Path) -> None:
    folder = class_folder()
    manifest = tmp_path / "m.csv"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    manifest.write_text("path,age\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names)))
    h5chunk.convert(folder, tmp_path / "a.h5", manifest=manifest, chunk_samples=3, **QUIET)
    whole = (tmp_path / "a.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5") as file:
        at = [file[name].id.get_chunk_info(1).byte_offset for name in ("images", "age")]
    for offset in at:
        flip(tmp_path / "a.h5", offset)
    report = h5chunk.verify(tmp_path / "a.h5", repair=folder)
    assert [each.field for each in report.repaired] == ["images"] and "add --manifest" in report.bad[0].problem
    assert h5chunk.verify(tmp_path / "a.h5", repair=folder, manifest=manifest).ok
    assert (tmp_path / "a.h5").read_bytes() == whole


def test_what_cannot_be_repaired(tmp_path: Path, source: Path) -> None:
    path = write_matrix(tmp_path / "m.h5")
    flip(path, places(path)[0][2])
    damaged = path.read_bytes()
    with pytest.raises(FileError, match="contains a matrix, whose chunks cannot be rebuilt one by one: convert"):
        h5chunk.verify(path, repair=source)
    other = make_images(tmp_path / "o.h5", 40, 4, fletcher32=True)
    flip(other, places(other)[0][2])
    with pytest.raises(FileError, match="was not written by h5chunk"):
        h5chunk.verify(other, repair=source)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "options", [{"keep_encoded": True}, {"keep_size": True}, {"keep_encoded": True, "max_side": 20}]
)
def test_kept_images_and_their_tables(tmp_path: Path, monkeypatch, options: dict[str, object]) -> None:
    small(monkeypatch, image_chunk_bytes=1000)
    rng = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / f"photos/class{number % 3}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10 + number, 30 - number, 3), np.uint8)).save(path)
    h5chunk.convert(tmp_path / "photos", tmp_path / "a.h5", **options, **QUIET)
    whole = (tmp_path / "a.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5") as file:
        data = file["images/data"]
        assert data.id.get_num_chunks() > 3
        places = [data.id.get_chunk_info(number).byte_offset for number in (0, 2, data.id.get_num_chunks() - 1)]
        places += [file[f"images/{name}"].id.get_offset() for name in ("offsets", "heights", "widths", "orientations")]
    for offset in places:
        flip(tmp_path / "a.h5", offset)
    report = h5chunk.verify(tmp_path / "a.h5", repair=tmp_path / "photos")
    assert report.ok and len(report.repaired) == 7 and (tmp_path / "a.h5").read_bytes() == whole


# Accepting


def change(path: Path, name: str, row: int, value: object) -> None:
    with h5py.File(path, "r+") as file:
        file[name][row] = value


def test_values_changed_on_purpose_are_accepted(images: Path) -> None:
    change(images, "labels", 4, (int(h5chunk.ChunkDataset(images)[4][1]) + 1) % 3)
    change(images, "images", 0, 3)
    report = h5chunk.verify(images)
    assert "on purpose, h5chunk verify" in str(report) and "--accept images --accept labels" in str(report)
    assert f"if they are damaged, h5chunk verify {images} --repair SOURCE" in str(report)
    report = h5chunk.verify(images, accept=["labels"])
    assert report.accepted == ("labels: 1 of 7 chunks had changed",) and {each.field for each in report.bad} == {
        "images"
    }
    result = CliRunner().invoke(main, ["verify", str(images), "--accept", "images"])
    assert result.exit_code == 0 and "accepted: images: 1 of 7 chunks had changed" in result.output
    assert len(list(h5chunk.ChunkDataset(images, checksums="always"))) == 20


def test_an_interrupted_acceptance_is_continued(images: Path, monkeypatch) -> None:
    import h5chunk.tools.verify.accept as accept

    with h5py.File(images, "r+") as file:
        file["images"][...] = 0
    write = accept.write_at

    def broken(descriptor: int, data: bytes, offset: int) -> None:
        write(descriptor, data[:8], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accept, "write_at", broken)
    with pytest.raises(OutputError, match="No space left"):
        h5chunk.verify(images, accept=["images"])
    assert len(h5chunk.verify(images).bad) == 5
    monkeypatch.undo()
    assert h5chunk.verify(images, accept=["images"]).ok


def test_a_renamed_field_is_missed_and_accepted(images: Path) -> None:
    with h5py.File(images, "r+") as file:
        file.move("labels", "targets")
    assert "no such dataset: was it renamed?" in str(h5chunk.verify(images))
    assert "'labels'" in str(h5chunk.info(images).notes)
    for checksums in ("first", "always"):
        with pytest.raises(OptionError, match="has checksums of 'labels', which does not exist"):
            h5chunk.ChunkDataset(images, checksums=checksums)
    assert h5chunk.ChunkDataset(images, fields=["images"], checksums="first")[0][0].shape
    report = h5chunk.verify(images, accept=["labels", "targets"])
    assert report.ok and set(report.accepted) == {
        "labels no longer exists, so its checksums are deleted", "targets: 7 of 7 chunks had no checksums"
    }  # fmt: skip
    assert sorted(path.name for path in images.parent.iterdir()) == ["a.h5", "photos"]
    assert len(h5chunk.ChunkDataset(images, fields=["images", "targets"], checksums="always")) == 20


def test_what_is_wrong_is_not_accepted(images: Path) -> None:
    change(images, "labels", 4, 9)
    with pytest.raises(
        FileError, match="only if the structure of the file is right, but labels: sample 4 has the label 9"
    ):
        h5chunk.verify(images, accept=["labels"])
    change(images, "labels", 4, 0)
    with pytest.raises(FieldError, match="has no field 'nope', and no checksums of one"):
        h5chunk.verify(images, accept=["nope"])
    with pytest.raises(OptionError, match="accept reads all chunks"):
        h5chunk.verify(images, accept=["labels"], quick=True)
    with h5py.File(images, "r+") as file:
        del file["labels"]
        file["labels"] = np.zeros(20, int)
    with pytest.raises(FileError, match=r"labels has the shape .*delete h5chunk/checksums/NAME, and write another"):
        h5chunk.verify(images, accept=["labels"])
    with h5py.File(images, "r+") as file:
        del file["h5chunk/checksums/labels"]
    h5chunk.repack(images, images.with_name("b.h5"))
    assert h5chunk.verify(images.with_name("b.h5")).ok


# The command


def test_on_the_command_line(images: Path, source: Path) -> None:
    def run(*arguments: object, code: int) -> str:
        result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output

    assert "whole" in run(images, code=0)
    flip(images, places(images)[1][2])
    assert "DAMAGED: 1 bad chunk\n" in run(images, code=1) and "bad: images, chunk 1" in run(images, code=1)
    found = json.loads(run(images, "--json", code=1))
    assert not found["ok"] and found["bad"][0]["first_sample"] == 3
    assert "whole, after repairing 1 chunk" in run(images, "--repair", source, code=0)
    assert "of 7 chunks" not in run(images, "--quick", code=0)
    run(images.with_name("nothing.h5"), code=1)
