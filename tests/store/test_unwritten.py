"""Datasets that were never written, or not in full, are legal: verify and info say so, and do not call them damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from support.odd_files import set_fill_undefined

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError, UnsupportedError
from h5chunk.store.hdf5 import guard
from h5chunk.store.read import scan

UNDEFINED = "0, because there is no fill value"


def make(path: Path, shape: tuple[int, ...], *, fill_time: int | None = None, rows: int = 0, **options) -> Path:
    """A file with ``images`` of which these first rows are written."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("images", shape, **options, fill_time=fill_time)
        dataset[:rows] = 1
    return path


CHUNKED = {"dtype": "f4", "chunks": (5, 4)}
CASES = {  # options; chunks stored, never written; what they read as
    "contiguous": ({"dtype": "u1"}, 0, 1, "0"),
    "contiguous, fill value": ({"dtype": "i2", "fillvalue": -3}, 0, 1, "-3"),
    "chunks": (CHUNKED, 0, 12, "0.0"),
    "some chunks": ({**CHUNKED, "rows": 12, "fillvalue": 2.5}, 3, 9, "2.5"),
    "compressed": ({**CHUNKED, "rows": 5, "compression": "gzip"}, 1, 11, "0.0"),
    "fill time never": ({**CHUNKED, "rows": 5, "fill_time": "never"}, 1, 11, UNDEFINED),
    "strings": ({"dtype": "S4", "fillvalue": b"ab", "chunks": (5, 4)}, 0, 12, "'ab'"),
    "in full": ({**CHUNKED, "rows": 60}, 12, 0, ""),
    "contiguous, in full": ({"dtype": "u1", "rows": 60}, 1, 0, ""),
}


def report(path: Path) -> dict:
    """The report of verify as JSON, once it ended well."""
    result = CliRunner().invoke(main, ["verify", str(path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] and not found["problems"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_verify_and_info(tmp_path: Path, name: str) -> None:
    options, stored, unwritten, value = CASES[name]
    path = make(tmp_path / "a.h5", (60, 4), **options)
    (field,) = report(path)["fields"]
    assert (field["num_chunks"], field["num_checked"]) == (stored, stored)
    assert (field["num_unwritten"], field["reads_as"]) == (unwritten, value)
    (dataset,) = h5chunk.info(path).datasets
    assert (dataset.num_unwritten, dataset.reads_as) == (unwritten, value)
    for text in (str(h5chunk.verify(path)), str(h5chunk.info(path, show_all=True))):
        assert (f"never written (reads as {value})" in text) == bool(unwritten)
        assert bool(re.search(rf" {unwritten} chunks (were )?never", text)) == bool(stored and unwritten)
    assert ("not fully written" in str(h5chunk.verify(path))) == bool(unwritten)
    with h5py.File(path) as file:
        if value and value != UNDEFINED:
            found = file["images"][-1, 0]
            assert repr(found.decode() if isinstance(found, bytes) else found.item()) == value


@pytest.mark.parametrize("chunks", [None, (5,)])
@pytest.mark.parametrize("never", [False, True])
def test_no_fill_value_at_all(tmp_path: Path, chunks: tuple[int, ...] | None, never: bool) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    set_fill_undefined(properties)
    if chunks:
        properties.set_chunk(chunks)
    if never:
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((20,))
        h5py.h5d.create(file.id, b"images", h5py.h5t.NATIVE_UINT16, space, properties)
    (field,) = report(tmp_path / "a.h5")["fields"]
    assert field["reads_as"] == (UNDEFINED if never else "an error, because there is no fill value")
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5")
    if never:
        assert int(dataset[3][0]) == 0
    else:
        with pytest.raises(FileError, match="cannot be read"):
            dataset[3]


def test_one_value_and_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("one", (), "u1")
        file["none"], file["empty"], file["zero"] = h5py.Empty("u1"), np.zeros((0, 3)), 0
    fields = {each["field"]: each["num_unwritten"] for each in report(tmp_path / "a.h5")["fields"]}
    assert fields == {"one": 1, "none": 0, "empty": 0, "zero": 0}


HUGE = {
    "contiguous": ({"shape": (1 << 27,), "dtype": "u1"}, 0, 1),
    "chunks": ({"shape": (1000, 1 << 20), "dtype": "u1", "chunks": (1, 1 << 20)}, 0, 1000),
    "few of many": (
        {"shape": (1000, 1 << 20), "dtype": "u1", "chunks": (1, 1 << 20), "compression": "gzip", "rows": 2},
        2,
        998,
    ),
    "one chunk": ({"shape": (1, 1 << 29), "dtype": "u1", "chunks": (1, 1 << 29)}, 0, 1),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_readers_refuse_is_not_damaged(tmp_path: Path, name: str) -> None:
    """Its chunks are checked all the same."""
    options, stored, unwritten = HUGE[name]
    path = make(tmp_path / "a.h5", **options)
    found = report(path)
    assert [(each["num_checked"], each["num_unwritten"]) for each in found["fields"]] == [(stored, unwritten)]
    assert any("ever written" in note for note in found["notes"])
    with pytest.raises(UnsupportedError, match="ever written"):
        h5chunk.ChunkDataset(path)
    if stored:
        with h5py.File(path) as file:
            offset = file["images"].id.get_chunk_info(1).byte_offset
        data = bytearray(path.read_bytes())
        data[offset + 20] ^= 255
        path.write_bytes(data)
        (bad,) = h5chunk.verify(path).bad
        assert bad.chunk == 1


@pytest.mark.usefixtures("in_process")  # so that the patch is seen
def test_more_chunks_than_a_table_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scan, guard):
        monkeypatch.setattr(module, "SLACK_CHUNKS", 50)
    path = make(tmp_path / "a.h5", (100,), dtype="u1", chunks=(1,), rows=2)
    found = report(path)
    assert [(each["num_checked"], each["num_unwritten"]) for each in found["fields"]] == [(0, 98)]
    assert any("is not checked (98 of its chunks were never written" in note for note in found["notes"])


def test_a_chunk_with_a_checksum_must_be_there(class_folder, tmp_path: Path) -> None:
    """A file that h5chunk packed has all of its chunks; a chunk that is missing is damage."""
    h5chunk.convert(class_folder(), tmp_path / "a.h5", chunk_samples=3, workers=0)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        shape, chunks = file["images"].shape, file["images"].chunks
        del file["images"]
        file.create_dataset("images", shape, "u1", chunks=chunks)
    found = h5chunk.verify(tmp_path / "a.h5")
    assert not found.ok and {each.problem for each in found.bad} == {"was never written, although it has a checksum"}


def test_a_pattern_of_ones_is_in_full(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item\n1,1\n1,2\n2,2\n")
    h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5")
    assert "not fully written" not in str(h5chunk.verify(tmp_path / "a.h5"))


def test_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "a.h5", (60, 4), **CHUNKED)
    make(tmp_path / "b.h5", (60, 4), **CHUNKED, rows=60)
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert result.exit_code == 0 and "a.h5: " in result.stdout
    assert result.stdout.count("1 dataset not fully written") == 1
