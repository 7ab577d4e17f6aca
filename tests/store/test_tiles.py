"""Rows of chunks that hold parts of samples, read by byte ranges: exactly what HDF5 gives."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from support.faults import small, watch
from support.foreign import make_file, values
from support.loaders import loader_by
from support.open_fields import direct_field, open_field
from support.orders import ordered

import h5chunk
from h5chunk.errors import FileError

FILTERS = [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True, "fletcher32": True}]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    chunks = [data.draw(st.integers(1, length)) for length in shape]
    axis = data.draw(st.integers(1, len(shape) - 1))
    spare = {} if chunks[axis] < shape[axis] else {"maxshape": (None,) * len(shape)}
    chunks[axis] += 3 if spare else 0  # larger than the samples: only its front is data
    options = data.draw(st.sampled_from(FILTERS))
    dtype = data.draw(st.sampled_from(["u1", "i2", "f4", "f8"]))
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path = make_file(tmp_path_factory.mktemp("tiles") / "a.h5", x=(x, {"chunks": tuple(chunks), **spare, **options}))
    rows = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=20)))  # the same ones again
    for native in "10":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("H5CHUNK_NATIVE", native)
            for field in (direct_field(path), open_field(path, way="h5py")):
                assert field.read(rows).tobytes() == x[rows].tobytes()
                assert field.read(np.arange(shape[0])).tobytes() == x.tobytes()
                assert field.read_all().tobytes() == x.tobytes()


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("chunks", [(7, 2, 3, 6), (16, 3, 5, 2), (50, 1, 1, 1), (1, 3, 2, 2)], ids=str)
def test_the_loader_gives_what_hdf5_gives(tmp_path: Path, chunks: tuple[int, ...], options: dict) -> None:
    images, labels = values((50, 3, 5, 6), "u1"), np.arange(50)
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": chunks, **options}), labels=(labels, {}))
    for window in (1, 3):
        found = []
        for reader in ("direct", "h5py"):
            with loader_by(**ordered(path, 16, window_chunks=window), reader=reader) as loader:
                found.append([[each.tolist() for each in batch] for _ in range(2) for batch in loader])
        assert found[0] == found[1]
        for pixels, numbers in h5chunk.ChunkLoader(path, 16):
            assert (pixels.numpy() == images[numbers.numpy()]).all()


@pytest.mark.usefixtures("python_threads")
def test_each_chunk_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values((32, 4, 4), "u1")
    path = make_file(tmp_path / "a.h5", x=(x, {"chunks": (8, 2, 2), "compression": "gzip"}))
    field = direct_field(path)
    decoded: list[np.ndarray] = []
    watch(monkeypatch, "decode chunk", after=lambda *call: decoded.append(call[-1].copy()))
    for rows in (range(5), range(5, 19), range(19, 32)):  # windows that cut bands
        field.read(rows)
    assert len(decoded) == 16 and sum(map(np.sum, decoded)) == x.sum()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_large_chunks_are_left_to_hdf5_if_they_must_be_decoded(tmp_path: Path, monkeypatch, options: dict) -> None:
    small(monkeypatch, max_decoded_bytes=31)
    x = values((32, 4, 4), "u1")
    field = open_field(make_file(tmp_path / "a.h5", x=(x, {"chunks": (8, 2, 2), **options})))
    assert ("its chunks have 32 bytes" in field.why) == bool(options)
    assert field.read(range(32)).tobytes() == x.tobytes()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_chunk_never_written(tmp_path: Path, options: dict) -> None:
    x = np.full((32, 4, 4), 9, "u1")
    x[:8], x[20, :2] = 1, 2
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", x.shape, "u1", chunks=(8, 2, 2), fillvalue=9, **options)
        made[:8], made[20, :2] = 1, 2
    for rows in (range(32), [31, 3, 20, 21]):
        assert direct_field(tmp_path / "a.h5").read(rows).tobytes() == x[rows].tobytes()


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    x = values((32, 4, 4), "u1")
    path = make_file(tmp_path / "a.h5", x=(x, {"chunks": (8, 2, 2)}))
    field = direct_field(path)
    os.truncate(path, path.stat().st_size - 100)
    for _ in range(2):
        with pytest.raises(FileError, match=r"field 'x', chunk .*cut short"):
            field.read(range(32))
