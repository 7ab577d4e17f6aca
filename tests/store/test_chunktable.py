"""The chunk table is what HDF5 says of each chunk, for every layout."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.faults import small
from support.foreign import make_file, values
from support.new_datasets import SHAPE, create

from h5chunk.errors import FileError
from h5chunk.store.hdf5.chunk_table import KEPT_CHUNKS, ChunkTable, NotDirect, list_chunks

LATEST = {"libver": "latest"}

LAYOUTS = {
    "whole samples": ({}, {"chunks": (4, 3, 6)}),
    "one chunk": ({}, {"chunks": SHAPE}),
    "pieces of samples": ({}, {"chunks": (10, 2, 4)}),
    "larger than the data": ({}, {"chunks": (64, 3, 8), "maxshape": (None, 3, None)}),
    "user block": ({"userblock_size": 2048}, {"chunks": (4, 3, 6)}),
    "fixed array": (LATEST, {"chunks": (4, 3, 6)}),
    "extensible array": (LATEST, {"chunks": (4, 3, 6), "maxshape": (None, 3, 6)}),
    "btree of version 2": (LATEST, {"chunks": (4, 3, 6), "maxshape": (None, 3, None)}),
    "gzip": ({}, {"chunks": (4, 3, 6), "compression": "gzip"}),
    "gzip, latest": (LATEST, {"chunks": (4, 3, 6), "compression": "gzip"}),
    "gzip, user block": ({"userblock_size": 512}, {"chunks": (5, 3, 6), "compression": "gzip"}),
    "shuffle and fletcher32": ({}, {"chunks": (4, 2, 6), "shuffle": True, "fletcher32": True}),
}


def check_table(table: ChunkTable, dataset: h5py.Dataset) -> None:
    """Each chunk is as HDF5's own look-up has it."""
    grid = [math.ceil(length / chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True)]
    assert len(table) == math.prod(grid)
    assert (table.offsets.dtype, table.sizes.dtype, table.filter_masks.dtype) == (np.int64, np.int64, np.uint32)
    assert table.chunk_shape == dataset.chunks
    stored = Path(dataset.file.filename).read_bytes()
    for place, scaled in enumerate(np.ndindex(*grid)):
        start = tuple(s * c for s, c in zip(scaled, dataset.chunks, strict=True))
        info = dataset.id.get_chunk_info_by_coord(start)  # HDF5 1.14.2 leaves the user block out of its offset
        if info.byte_offset is None:
            assert (table.offsets[place], table.sizes[place], table.filter_masks[place]) == (-1, 0, 0)
            continue
        mask, data = dataset.id.read_direct_chunk(start)
        assert (table.filter_masks[place], table.sizes[place]) == (mask, len(data)) == (info.filter_mask, info.size)
        assert stored[table.offsets[place] :][: len(data)] == data


def test_long_tables_are_listed_once_for_each_version_of_a_file(tmp_path):
    shape, options = (KEPT_CHUNKS, 2), {"chunks": (1, 2)}
    path = make_file(tmp_path / "a.h5", x=(values(shape, np.uint8), options))
    tables = []
    for _ in range(2):
        with h5py.File(path) as file:
            tables.append(list_chunks(file["x"]))
    assert tables[0] is tables[1] and not tables[0].offsets.flags.writeable
    make_file(tmp_path / "b.h5", file={"userblock_size": 4096}, x=(values(shape, np.uint8), options)).replace(path)
    with h5py.File(path) as file:
        table = list_chunks(file["x"])
        assert table is not tables[0] and (table.offsets == tables[0].offsets + 4096).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    file_options, options = LAYOUTS[layout]
    path = make_file(tmp_path / "a.h5", file=file_options, x=(values(SHAPE, np.uint8), options))
    with h5py.File(path) as file:
        table = list_chunks(file["x"])
        check_table(table, file["x"])
        assert (table.offsets >= 0).all()


@pytest.mark.parametrize("latest", [True, False])
def test_stored_bytes_lie_there(tmp_path, latest):
    """The offsets count from the start of the file, user block included."""
    data = values((16, 5), np.uint8)
    options = LATEST if latest else {}
    path = make_file(tmp_path / "a.h5", file={"userblock_size": 1024, **options}, x=(data, {"chunks": (4, 5)}))
    with h5py.File(path) as file:
        table = list_chunks(file["x"])
    stored = path.read_bytes()
    for place, (offset, size) in enumerate(zip(table.offsets, table.sizes, strict=True)):
        assert stored[offset : offset + size] == data[4 * place : 4 * place + 4].tobytes()


def test_implicit_index(tmp_path):
    create(tmp_path / "a.h5", early=True, data=values(SHAPE, np.uint8), libver=("v110", "v110"))
    with h5py.File(tmp_path / "a.h5") as file:
        table = list_chunks(file["x"])
        check_table(table, file["x"])
    assert table.is_one_run


def test_chunks_that_were_never_written(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        some = file.create_dataset("some", SHAPE, "u1", chunks=(4, 3, 6))
        some[8:12] = 1
        some[36] = 1
        file.create_dataset("none", SHAPE, "u1", chunks=(4, 3, 6))
        file.create_dataset("contiguous", SHAPE, "u1")
    with h5py.File(tmp_path / "a.h5") as file:
        table = list_chunks(file["some"])
        check_table(table, file["some"])
        assert np.flatnonzero(table.offsets >= 0).tolist() == [2, 9]
        for name in ("none", "contiguous"):
            assert (list_chunks(file[name]).offsets == -1).all()
            assert not list_chunks(file[name]).is_one_run


def test_what_was_never_written_takes_no_room(tmp_path):
    """A file that is shorter than a dataset of the fill value alone is whole."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (100, 500), "u1", fillvalue=7)
    with h5py.File(tmp_path / "a.h5") as file:
        assert list_chunks(file["images"]).sizes.tolist() == [0]


def test_skipped_filters(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (8, 5), "u1", chunks=(4, 5), compression="gzip")
        made.id.write_direct_chunk((0, 0), b"a" * 20, filter_mask=1)
        made[4:] = 7
        table = list_chunks(made)
        check_table(table, made)
    assert table.filter_masks.tolist() == [1, 0]


@pytest.mark.parametrize("userblock_size", [0, 512])
def test_contiguous(tmp_path, userblock_size):
    data = values(SHAPE, ">i4")
    path = make_file(tmp_path / "a.h5", file={"userblock_size": userblock_size}, x=(data, {}))
    with h5py.File(path) as file:
        table = list_chunks(file["x"])
    assert (len(table), table.chunk_shape, table.sizes.tolist()) == (1, SHAPE, [data.nbytes])
    assert path.read_bytes()[table.offsets[0] :][: data.nbytes] == data.tobytes()
    assert table.is_one_run


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3), "maxshape": (None, 3)}])
def test_no_samples(tmp_path, options):
    path = make_file(tmp_path / "a.h5", x=(values((0, 3), np.uint8), options))
    with h5py.File(path) as file:
        assert len(list_chunks(file["x"])) == (1 if not options else 0)
        assert not list_chunks(file["x"]).is_one_run


@pytest.mark.parametrize(
    ("offsets", "sizes", "expected"),
    [
        ([100, 120, 140], [20, 20, 20], True),
        ([100], [20], True),
        ([100, 140, 120], [20, 20, 20], False),
        ([100, 120, 141], [20, 20, 20], False),
        ([-1, 19, 39], [20, 20, 20], False),
        ([100, -1, 140], [20, 20, 20], False),
        ([100, 120, 140], [20, 19, 20], False),
        ([100, 120, 140], [20, 20, 19], False),
        ([], [], False),
    ],
)
def test_one_run(offsets, sizes, expected):
    table = ChunkTable.unwritten((4 * len(sizes), 5), (4, 5))
    table.offsets[:], table.sizes[:] = offsets, sizes
    assert table.is_one_run is expected


def damage(path, old: bytes, new: bytes) -> None:
    """Replace what is in the file once."""
    stored = path.read_bytes()
    assert stored.count(old) == 1
    path.write_bytes(stored.replace(old, new))


@pytest.mark.parametrize("address", [1 << 20, 1 << 40, (1 << 63) + 8, (1 << 64) - 16])
def test_a_chunk_beyond_the_end_is_an_error(tmp_path, address):
    path = make_file(tmp_path / "a.h5", x=(values((16, 5), np.uint8), {"chunks": (4, 5)}))
    with h5py.File(path) as file:
        offset = int(list_chunks(file["x"]).offsets[2])
    damage(path, offset.to_bytes(8, "little"), address.to_bytes(8, "little"))
    with h5py.File(path) as file, pytest.raises(FileError, match=r"a\.h5: '/x' .*chunk.*damaged"):
        list_chunks(file["x"])


def test_pickles(tmp_path):
    path = make_file(tmp_path / "a.h5", x=(values(SHAPE, np.uint8), {"chunks": (4, 3, 6), "compression": "gzip"}))
    with h5py.File(path) as file:
        table = list_chunks(file["x"])
    copy = pickle.loads(pickle.dumps(table))
    for field in dataclasses.fields(table):
        np.testing.assert_array_equal(getattr(copy, field.name), getattr(table, field.name))


def test_chunks_that_hdf5_lists_at_wrong_places_are_no_others(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:  # an extensible array, its axis not the first
        file.create_dataset("x", data=np.arange(6).reshape(2, 3), chunks=(1, 1), maxshape=(2, None))
        with pytest.raises(NotDirect, match="wrong offsets"):
            list_chunks(file["x"])


def test_many_chunks_are_listed_in_parts(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.arange(60).reshape(12, 5), chunks=(1, 2))
        whole = list_chunks(dataset)
        small(monkeypatch, numbers_at_a_time=7)
        parts = list_chunks(dataset)
    for name in ("offsets", "sizes", "filter_masks"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
