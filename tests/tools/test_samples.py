"""Samples of several fields of any type: written, continued, and read by all that reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.loaders import loader_by
from support.sample_sources import FIELDS, MemorySource, check_samples, job_of, values_of, write

import h5chunk
from h5chunk.errors import OutputError, SampleError, SourceError, WorkerError
from h5chunk.sample_source import SampleField
from h5chunk.tools.convert.samples import is_complete

COUNT = 83
COLUMNS = {"score": np.linspace(0, 1, COUNT), "labels": np.arange(COUNT) % 3, "kind": np.arange(COUNT) % 2}
CATEGORIES = {"labels": ["a", "b", "c"], "kind": ["odd", "even"]}


@pytest.mark.parametrize("chunk_samples", [None, 1, 5, 83])
def test_all_fields_are_there_with_any_number_of_workers(tmp_path: Path, chunk_samples: int | None) -> None:
    source = MemorySource(COUNT, columns=COLUMNS, categories=CATEGORIES, named=True)
    for workers in (0, 3):
        report = write(source, tmp_path / f"{workers}.h5", chunk_samples=chunk_samples, workers=workers)
        assert report.counts == {"read": COUNT} and report.layout.sample_bytes == 140
    path = tmp_path / "0.h5"
    assert path.read_bytes() == (tmp_path / "3.h5").read_bytes()
    check_samples(path, range(COUNT))
    with h5py.File(path) as file:
        order = file["h5chunk/source_index"][()]
        assert order.tolist() != sorted(order.tolist())
        for name, values in COLUMNS.items():
            np.testing.assert_array_equal(file[name][()], values[order])
        assert {file[name].chunks[0] for name in (*FIELDS, *COLUMNS)} == {report.layout.chunk_samples}
        assert file["depth"].attrs["axes"] == b"NHW" and "axes" not in file["age"].attrs
        assert file["h5chunk/class_names"][()].tolist() == [b"a", b"b", b"c"]
        assert file["h5chunk/categories/kind"][()].tolist() == [b"odd", b"even"]
        assert "kind" not in file["h5chunk"].attrs
    assert h5chunk.verify(path).ok


def test_without_names_or_columns(tmp_path: Path) -> None:
    write(MemorySource(COUNT), tmp_path / "x.h5", shuffle=False)
    check_samples(tmp_path / "x.h5", range(COUNT))
    with h5py.File(tmp_path / "x.h5") as file:
        assert "source_names" not in file["h5chunk"] and set(file) == {*FIELDS, "h5chunk"}
    assert h5chunk.verify(tmp_path / "x.h5").ok


@pytest.mark.parametrize("bad", [[0], [82], [3, 40, 41, 82], list(range(1, 83))])
@pytest.mark.parametrize("chunk_samples", [4, 64])
def test_samples_that_are_left_out(tmp_path: Path, bad: list[int], chunk_samples: int) -> None:
    """The last good ones take their places, in all fields."""
    source = MemorySource(COUNT, columns=COLUMNS, bad=bad, named=True)
    options: dict[str, Any] = {"chunk_samples": chunk_samples, "on_error": "skip"}
    report = write(source, tmp_path / "x.h5", workers=2, **options)
    check_samples(tmp_path / "x.h5", [i for i in range(COUNT) if i not in bad])
    assert len(report.skipped) == len(bad) and report.num_samples == COUNT - len(bad)
    assert h5chunk.verify(tmp_path / "x.h5").ok
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["score"][()], COLUMNS["score"][file["h5chunk/source_index"][()]])
    with pytest.raises(SampleError, match=r"sample .*: cannot be read .*--on-error skip"):
        write(source, tmp_path / "y.h5")


def test_large_fields_move_when_gaps_are_closed(tmp_path: Path) -> None:
    """The second and third field take more than what moves in one piece, and begin further to the front then."""
    fields = {
        "one": SampleField((64, 50), np.dtype(np.float64)),
        "two": SampleField((64, 50), np.dtype(np.int32)),
        "three": SampleField((64, 40), np.dtype(np.int32)),
        "tiny": SampleField((), np.dtype(np.int8)),
    }
    source = MemorySource(200, fields=fields, bad=range(0, 200, 3))
    write(source, tmp_path / "x.h5", on_error="skip", chunk_samples=2)
    check_samples(tmp_path / "x.h5", [i for i in range(200) if i % 3], fields)
    assert h5chunk.verify(tmp_path / "x.h5").ok


@pytest.mark.parametrize("bad", [[0], [1, 5], [19], range(0, 20, 3), range(1, 19)])
def test_the_order_of_the_source_outlives_skipped_samples(tmp_path: Path, bad: Sequence[int]) -> None:
    source = MemorySource(20, columns={"n": np.arange(20)}, bad=bad)
    write(source, tmp_path / "x.h5", on_error="skip", chunk_samples=3, shuffle=False)
    good = [i for i in range(20) if i not in bad]
    check_samples(tmp_path / "x.h5", good)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["n"][()].tolist() == file["h5chunk/source_index"][()].tolist() == good
    assert h5chunk.verify(tmp_path / "x.h5").ok


# ---- what is continued


def test_a_writer_that_was_killed_is_continued(tmp_path: Path) -> None:
    source = MemorySource(600, columns={"n": np.arange(600)}, kill_at=599)
    options: dict[str, Any] = {"chunk_samples": 10, "shuffle": False}
    with pytest.raises(WorkerError):
        write(source, tmp_path / "x.h5", workers=2, **options)
    source.kill_at = None
    write(source, tmp_path / "x.h5", **options)
    assert 0 < len(source.counted) < 600
    check_samples(tmp_path / "x.h5", range(600))
    write(MemorySource(600, columns={"n": np.arange(600)}), tmp_path / "whole.h5", **options)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    job = job_of(source, tmp_path / "x.h5", **options)
    assert is_complete(job, 1) and not is_complete(job_of(source, tmp_path / "x.h5", chunk_samples=20), 1)


def test_a_source_without_identity_starts_anew_and_says_so(tmp_path: Path) -> None:
    source = MemorySource(600, kill_at=599, resumable=False)
    said: list[str] = []
    with pytest.raises(WorkerError):
        write(source, tmp_path / "x.h5", shuffle=False, workers=1, notify=said.append)
    assert said == ["the finished work is discarded, because changes in this source cannot be detected"]
    assert list(tmp_path.iterdir()) == []
    source.kill_at = None
    write(source, tmp_path / "x.h5", shuffle=False)
    assert len(source.counted) == 600 and not is_complete(job_of(source, tmp_path / "x.h5", shuffle=False), 1)
    with pytest.raises(OutputError, match="exists"):
        write(source, tmp_path / "x.h5", shuffle=False)


def test_shards(tmp_path: Path) -> None:
    source = MemorySource(COUNT, bad=[7], named=True)
    report = write(source, tmp_path / "x", chunk_samples=5, on_error="skip", shards=3)
    assert len(list((tmp_path / "x").iterdir())) == 3 and report.num_samples == COUNT - 1
    dataset = h5chunk.ChunkDataset(tmp_path / "x", fields=["age", "depth"])
    ages = sorted(int(age) for age, _ in dataset)
    assert ages == sorted(int(values_of(i, FIELDS)["age"]) for i in range(COUNT) if i != 7)
    assert h5chunk.verify(tmp_path / "x").ok


# ---- what a file can hold


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "0 samples"),
        ({"fields": {}}, "0 fields"),
        ({"fields": {"a/b": FIELDS["age"]}}, "'a/b' cannot be the name of a field"),
        ({"fields": {"h5chunk": FIELDS["age"]}}, "'h5chunk' cannot be the name of a field"),
        ({"fields": {"x": SampleField((0, 3), np.dtype("u1"))}}, "field 'x' has type uint8 and shape .0, 3."),
        ({"fields": {"x": SampleField((), np.dtype(object))}}, "field 'x' has type object"),
        ({"fields": {"x": SampleField((), np.dtype("c8"))}}, "field 'x' has type complex64"),
        ({"columns": {"x": np.zeros(5, "M8[s]")}}, "field 'x' has type datetime64"),
        ({"columns": {"x": np.zeros(4)}}, "column 'x' has shape .4,. for 5 samples"),
        ({"columns": {"age": np.zeros(5)}}, "column 'age' .* has the name of a field"),
    ],
)
def test_what_no_file_can_hold(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        job_of(MemorySource(**{"count": 5, **change}), tmp_path / "x.h5")


# ---- who reads it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    source = MemorySource(COUNT, columns={"n": np.arange(COUNT)}, options={"fields": ["image", "depth", "age"]})
    write(source, tmp_path / "x.h5", chunk_samples=8)
    return tmp_path / "x.h5"


def samples_by_number(batches: Any) -> dict[int, list[np.ndarray]]:
    """The fields of each sample by its number, which is the last field."""
    found = {}
    for *fields, numbers in batches:
        for place, number in enumerate(numbers.tolist()):
            found[number] = [np.asarray(field[place]) for field in fields]
    return found


def test_all_fields_are_read_by_default(path: Path, tmp_path: Path) -> None:
    assert list(h5chunk.ChunkDataset(path).fields) == ["image", "depth", "age"]
    write(MemorySource(5, columns={"n": np.arange(5)}), tmp_path / "y.h5")
    assert list(h5chunk.ChunkDataset(tmp_path / "y.h5").fields) == [*FIELDS, "n"]


def test_codes_outside_of_the_categories_are_found(tmp_path: Path) -> None:
    source = MemorySource(4, columns={"kind": np.array([0, -1, 2, 1])}, categories={"kind": ["odd", "even"]})
    write(source, tmp_path / "x.h5", shuffle=False)
    assert "kind: sample 2 has the label 2, but there are 2 categories" in str(h5chunk.verify(tmp_path / "x.h5"))


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_fields_are_loaded(path: Path, reader: str) -> None:
    dataset = h5chunk.ChunkDataset(path, fields=["depth", "image", "age", "n"])
    found = samples_by_number(loader_by(dataset, 16, seed=1, reader=reader))
    assert sorted(found) == list(range(COUNT))
    for number, (depth, image, age) in found.items():
        expected = values_of(number, FIELDS)
        np.testing.assert_array_equal(depth, expected["depth"])
        np.testing.assert_array_equal(image, expected["image"])
        assert age == expected["age"]


def test_fields_are_read_one_by_one_and_by_a_dataloader(path: Path) -> None:
    dataset = h5chunk.ChunkDataset(path, fields=["word", "depth", "n"])
    words, depth, number = dataset[3]
    expected = values_of(int(number), FIELDS)
    assert list(words) == [word.decode() for word in expected["word"].tolist()]
    np.testing.assert_array_equal(depth, expected["depth"])
    dataset = h5chunk.ChunkDataset(path, fields=["depth", "n"])
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8), num_workers=2)
    assert sorted(samples_by_number(loader)) == list(range(COUNT))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"compression": "gzip"}, {"chunk_samples": 3}])
def test_it_is_repacked(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    h5chunk.repack(path, tmp_path / "y.h5", **options)
    check_samples(tmp_path / "y.h5", range(COUNT))
    assert h5chunk.verify(tmp_path / "y.h5").ok


def test_damage_in_any_field_is_found(path: Path) -> None:
    for name in FIELDS:
        data = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            offset = file[name].id.get_chunk_info(1).byte_offset
        data[offset] ^= 1
        broken = path.with_name("broken.h5")
        broken.write_bytes(data)
        report = h5chunk.verify(broken)
        assert not report.ok and [(bad.field, bad.chunk) for bad in report.bad] == [(name, 1)]


def test_info_tells_of_all_fields(path: Path) -> None:
    info = h5chunk.info(path)
    assert {each.name: each.dtype for each in info.datasets} == {
        "depth": "float32", "image": "uint8", "age": "int64", "word": "|S3", "n": "int64",
    }  # fmt: skip
    assert "83 samples" in str(info) and all(each.verdict.startswith("good") for each in info.datasets)


def test_columns_of_tables_and_strings(tmp_path):
    rows = np.zeros(4, [("pt", ">f4"), ("p4", "f4", (2,))])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(3):
            rows["pt"] = number
            file[f"s{number}/table"], file[f"s{number}/name"] = rows, f"name {number}"
    patterns = ["*/table.pt", "*/name"]
    h5chunk.convert(tmp_path / "a.h5", tmp_path / "b.h5", samples=patterns, shuffle=False)
    dataset = h5chunk.ChunkDataset(tmp_path / "b.h5", fields=["table.pt", "name"])
    assert [(pt.tolist(), name) for pt, name in dataset] == [([float(n)] * 4, f"name {n}") for n in range(3)]
