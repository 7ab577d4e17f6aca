"""info and bench of several files: each of them, all of them together, and why they are not one data set."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.bench_reports import QUICK, check_report, little_memory
from support.commands import check_error, run
from support.file_sets import EVEN, UNEVEN, make_set, total
from support.foreign import make_file, values
from support.leftovers import nothing_is_left
from support.matrix_sets import make_set as make_matrices
from support.pictures import pixels, save

import h5chunk
from h5chunk.errors import FieldError, FileError
from h5chunk.store.read.files import open_reader
from h5chunk.tools.bench.bench import DISK
from h5chunk.tools.info.report import SHOWN, FileInfo, FolderInfo
from h5chunk.tools.measure.disk import FileReads, large, merge
from h5chunk.tools.measure.machine import NotMeasured

__all__ = ["nothing_is_left"]


def test_info_of_a_folder(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", EVEN)
    found = h5chunk.info(tmp_path / "set")
    assert isinstance(found, FolderInfo)
    assert [each.path for each in found.files] == [str(path) for path in paths]
    assert found.num_bytes == sum(path.stat().st_size for path in paths)
    assert found.num_samples == tuple(count for count, _ in EVEN) and found.chunk_samples == (8, 8, 8, 8)
    assert (found.broken, found.mismatch, found.is_shuffled) == ({}, "", False)
    text = str(found)
    assert text.startswith(f"{tmp_path / 'set'}: 4 files, ")
    assert "one data set: 149 samples of images (uint8 3 x 5 x 6), labels (int64); not shuffled together" in text
    assert "samples per chunk: 8 in 4 files" in text and f"{paths[3]}: 37 samples, " in text
    assert json.loads(found.to_json())["total_samples"] == 149
    same = [h5chunk.info(path) for path in (str(tmp_path / "set" / "*.h5"), paths)]
    assert [each.num_samples for each in same] == [found.num_samples] * 2


def test_info_of_one_file_is_of_that(tmp_path: Path) -> None:
    (path,) = make_set(tmp_path / "set", [(10, 2)])
    assert isinstance(h5chunk.info(path), FileInfo)
    assert isinstance(h5chunk.info(tmp_path / "set"), FolderInfo)
    with pytest.raises(FileError, match=r"none.h5: no such file"):
        h5chunk.info(tmp_path / "none.h5")


def test_info_of_files_that_do_not_agree(tmp_path: Path) -> None:
    make_set(tmp_path / "set", [(10, 2), (9, 3)])
    make_file(tmp_path / "set" / "t.h5", images=(values((5, 3, 5, 6), "f4"), {}), labels=(np.arange(5), {}))
    found = h5chunk.info(tmp_path / "set")
    assert "t.h5: field 'images' has the dtype float32, but in" in found.mismatch
    assert found.num_samples == () and f"not one data set: {found.mismatch}" in str(found)
    (tmp_path / "set" / "u.h5").write_text("no HDF5")
    found = h5chunk.info(tmp_path / "set")
    assert list(found.broken) == [str(tmp_path / "set" / "u.h5")] and len(found.files) == 3
    assert "cannot be opened: " in str(found) and "4 files" in str(found)


def test_info_of_matrices_and_many(tmp_path: Path) -> None:
    make_matrices(tmp_path / "set")
    assert "one data set: 203 samples of X (sparse row of 300)" in str(h5chunk.info(tmp_path / "set"))
    make_set(tmp_path / "many", [(2, 1)] * (SHOWN + 3))
    assert "3 more (--json lists all)" in str(h5chunk.info(tmp_path / "many"))


def test_info_command(tmp_path: Path) -> None:
    make_set(tmp_path / "set", EVEN)
    result = run("info", tmp_path / "set")
    assert (result.exit_code, result.stderr) == (0, "") and "149 samples" in result.stdout
    assert len(json.loads(run("info", tmp_path / "set", "--json").stdout)["files"]) == 4
    (tmp_path / "empty").mkdir()
    check_error(run("info", tmp_path / "empty"), "no file in this folder ends in")
    check_error(run("info", tmp_path / "*.h5"), "no file matches this pattern")


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_bench_of_a_folder(tmp_path: Path, sizes, options) -> None:
    make_set(tmp_path / "set", sizes, **options)
    report = h5chunk.bench(tmp_path / "set", cold=False, **QUICK)
    check_report(report, {DISK})
    assert (report.path, report.num_samples) == (str(tmp_path / "set"), total(sizes))


def test_bench_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files whose chunks differ; what fits in memory is not all of them."""
    make_set(tmp_path / "set", UNEVEN)
    little_memory(monkeypatch, 20_000)
    report = h5chunk.bench(tmp_path / "set", cold=False, **QUICK | {"batch_size": 2})
    check_report(report, {DISK, "resident=True"})
    assert 40 < report.measured_samples < total(UNEVEN) and "no more fit in memory" in report.notes[0]


def test_bench_from_the_disk(tmp_path: Path) -> None:
    make_set(tmp_path / "set", EVEN)
    report = h5chunk.bench(str(tmp_path / "set" / "s*.h5"), **QUICK)
    check_report(report, {DISK} if report.figure("limits", DISK).samples_per_s is None else set())


def test_what_bench_cannot_measure(tmp_path: Path) -> None:
    make_matrices(tmp_path / "set")
    with pytest.raises(FieldError, match="has a sparse matrix, which bench cannot measure"):
        h5chunk.bench(tmp_path / "set", **QUICK)
    check_error(run("bench", tmp_path / "*.h5"), "no file matches this pattern")


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_located_bytes_are_those_of_all_files(tmp_path: Path, options) -> None:
    paths = make_set(tmp_path / "set", UNEVEN, **options)
    reads = FileReads(open_reader(paths))
    expected = 0
    for path in paths:
        with h5py.File(path) as file:
            expected += sum(file[name].id.get_storage_size() for name in ("images", "labels"))
    firsts = [each.first_sample for each in reads.stored]
    assert reads.num_bytes == expected
    assert firsts == sorted(firsts) and firsts[-1] < total(UNEVEN)
    runs, content = merge(reads.stored), [path.read_bytes() for path in paths]
    buffer = np.zeros(max(each.size for each in runs), np.uint8)
    seen = [0] * len(paths)
    for each in runs:
        reads.read(each, buffer)
        assert buffer[: each.size].tobytes() == content[each.file][each.offset : each.offset + each.size]
        seen[each.file] += each.size
    assert [count > 0 for count in seen] == [length > 0 for length, _ in UNEVEN]
    assert reads.cached_share(large(reads.stored)) > 0.5  # just read
    with suppress(NotMeasured):  # of a file system in memory
        reads.drop(large(reads.stored))
        assert reads.cached_share(large(reads.stored)) < 0.5
    reads.close()


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", EVEN)
    reader = open_reader(paths)
    paths[-1].unlink()
    with pytest.raises(FileError, match=rf"{paths[-1].name}: cannot be opened: No such file"):
        FileReads(reader)


def test_info_of_splits_names_one_of_them(tmp_path: Path) -> None:
    for number in range(30):
        save(tmp_path / "photos" / ("train" if number < 20 else "val") / "a" / f"{number}.png", pixels(number))
    h5chunk.convert(tmp_path / "photos", tmp_path / "all.h5")
    text = str(h5chunk.info(tmp_path / "all.h5"))
    subset = 'data.subset(data.values("split") == "train")'
    data = h5chunk.ChunkDataset(tmp_path / "all.h5")
    assert subset in text and len(eval(subset, {"data": data})) == 20
    h5chunk.convert(tmp_path / "photos", tmp_path / "set", split_files=True)
    found = h5chunk.info(tmp_path / "set")
    assert "each file is a split (train, val)" in str(found) and found.files[0].chunk_cache.code in str(found)
    created: dict[str, h5chunk.ChunkLoader] = {}
    exec("\n".join(found.code), created)
    with created["loader"] as loader:
        assert sum(len(labels) for images, labels in loader) == 20
