"""Rows read by their byte ranges are what HDF5 reads."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damaged_chunks import FILTERS, damage, half_smooth, no_imagecodecs
from support.faults import small, watch
from support.foreign import make_file, values
from support.new_datasets import create
from support.open_fields import OpenField, direct_field, open_field

from h5chunk import native
from h5chunk.errors import FileError
from h5chunk.plan.order import Order
from h5chunk.store.hdf5 import ranges
from h5chunk.store.hdf5.chunk_table import list_chunks
from h5chunk.store.hdf5.ranges import MAX_VECTORS, RUN_BYTES
from h5chunk.store.read.engine import BoxReader
from h5chunk.store.read.field_readers import field_readers, read_rows, scratch_bytes
from h5chunk.store.read.reader import H5Reader

__all__ = ["no_imagecodecs"]

N = 37
SHAPE = (N, 3, 5)
LATEST = {"libver": "latest"}
V110 = {"libver": ("v110", "v110")}

LAYOUTS = {
    "contiguous": ({}, {}),
    "contiguous, user block": ({"userblock_size": 1024}, {}),
    "btree": ({}, {"chunks": (4, 3, 5)}),
    "one sample a chunk": ({}, {"chunks": (1, 3, 5)}),
    "one chunk": ({}, {"chunks": SHAPE}),
    "larger than the data": ({}, {"chunks": (64, 3, 5), "maxshape": (None, 3, 5)}),
    "user block": ({"userblock_size": 512}, {"chunks": (4, 3, 5)}),
    "fixed array": (LATEST, {"chunks": (4, 3, 5)}),
    "extensible array": (LATEST, {"chunks": (4, 3, 5), "maxshape": (None, 3, 5)}),
    "btree of version 2": (LATEST, {"chunks": (4, 3, 5), "maxshape": (None, 9, None)}),
}
DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?"]
ROWS = [[0], [N - 1], [3, 1, 2], list(range(N)), list(range(N))[::-1], [36, 0], [4, 5, 7, 3, 8], list(range(0, N, 2))]


def offset_of(path: Path, chunk: int) -> int:
    with h5py.File(path) as file:
        return int(list_chunks(file["x"]).offsets[chunk])


def is_one_run(path: Path) -> bool:
    with h5py.File(path) as file:
        return list_chunks(file["x"]).is_one_run


def check_direct(path: Path, data: np.ndarray, rows: list[int], field: OpenField | None = None) -> None:
    """Byte ranges give what HDF5 does, which is the data."""
    found = (field or direct_field(path)).read(rows)
    reference = open_field(path, way="h5py").read(rows)
    assert found.tobytes() == reference.tobytes() == data[rows].tobytes()


def runs_of(field: OpenField, rows: np.ndarray) -> list[tuple[int, int, int]]:
    """The offset, the rows and the bytes of each run that is read for some rows, none beside the next in memory."""
    out = np.empty((len(rows), field.reader.row_bytes), np.uint8)
    jobs = np.concatenate([part.jobs(field.files) for part in field.tasks(rows, np.arange(len(rows))[::-1], out)])
    return [(int(job["offset"]), int(job["count"]), int(job["num_bytes"])) for job in jobs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    file_options, options = LAYOUTS[layout]
    data = values(SHAPE, np.uint8)
    path = make_file(tmp_path / "a.h5", file=file_options, x=(data, options))
    for rows in ROWS:
        check_direct(path, data, rows)


@pytest.mark.parametrize("early", [True, False])
def test_implicit_index(tmp_path, early):
    data = values(SHAPE, np.uint8)
    create(tmp_path / "a.h5", early, SHAPE, (4, 3, 5), data, **V110)
    for rows in ROWS:
        check_direct(tmp_path / "a.h5", data, rows)
    assert is_one_run(tmp_path / "a.h5")


@pytest.mark.parametrize("options", [{}, {"chunks": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_scalar_fields(tmp_path, dtype, options):
    data = values((N,), dtype)
    path = make_file(tmp_path / "a.h5", x=(data, options))
    for rows in ROWS:
        check_direct(path, data, rows)


def test_enum(tmp_path):
    data = np.arange(N, dtype=np.uint8) % 2
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=data, dtype=h5py.enum_dtype({"cat": 0, "dog": 1}, basetype="u1"))
    check_direct(tmp_path / "a.h5", data, ROWS[2])


def test_scattered_chunks(tmp_path):
    """Chunks that were written out of order, with other things between them."""
    data = values(SHAPE, np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", SHAPE, "u1", chunks=(4, 3, 5))
        for chunk in (9, 2, 3, 4, 0, 8, 1, 6, 7, 5):
            made[4 * chunk : 4 * chunk + 4] = data[4 * chunk : 4 * chunk + 4]
            file.create_dataset(f"between{chunk}", data=np.zeros(100 * chunk))
    assert not is_one_run(tmp_path / "a.h5")
    for rows in ROWS:
        check_direct(tmp_path / "a.h5", data, rows)


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3, 5)}, {"chunks": (4, 2, 5)}, {"compression": "gzip"}])
def test_places_may_leave_others_out(tmp_path, options):
    data = values(SHAPE, np.uint8)
    path = make_file(tmp_path / "a.h5", x=(data, options))
    field = direct_field(path)
    rows, places = np.array([5, 6, 9]), np.array([4, 0, 2])
    out = np.full((6, 15), 77, np.uint8)
    for part in field.tasks(rows, places, out):
        part(field.files)
    assert out[places].tobytes() == data[rows].tobytes() and (out[[1, 3, 5]] == 77).all()


def test_more_rows_than_one_call_takes(tmp_path, python_threads):
    num_rows = 2 * MAX_VECTORS + 7
    data = values((num_rows, 3), np.uint8)
    path = make_file(tmp_path / "a.h5", x=(data, {}))
    field = direct_field(path)
    assert max(count for _, count, _ in runs_of(field, np.arange(num_rows))) == MAX_VECTORS
    check_direct(path, data, list(range(num_rows)))
    check_direct(path, data, list(range(5, num_rows)))


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 300_000)}])
def test_long_runs_are_cut(tmp_path, options, python_threads):
    data = values((20, 300_000), np.uint8)
    path = make_file(tmp_path / "a.h5", x=(data, options))
    sizes = [num_bytes for *_, num_bytes in runs_of(direct_field(path), np.arange(20))]
    assert sum(sizes) == data.nbytes and max(sizes) < RUN_BYTES + 300_000
    check_direct(path, data, list(range(20))[::-1])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 199), min_size=1, max_size=200, unique=True),
    chunk_samples=st.integers(0, 201),
    run_rows=st.sampled_from([1, 3, 1000]),
)
def test_runs(tmp_path, monkeypatch, python_threads, rows, chunk_samples, run_rows):
    """Each row once, each run neighbours in the file, no longer than it may be, no shorter than it must be."""
    small(monkeypatch, run_bytes=4 * run_rows)
    options = {"chunks": (chunk_samples, 2), "maxshape": (None, 2)} if chunk_samples else {}
    data = values((200, 2), np.int16)
    path = make_file(tmp_path / "a.h5", x=(data, options))
    field = direct_field(path)
    numbers = np.array(rows, np.int64)
    chunk, within = np.divmod(np.sort(numbers), chunk_samples or 200)
    offsets = [offset_of(path, number) + 4 * int(row) for number, row in zip(chunk, within, strict=True)]
    runs = runs_of(field, np.sort(numbers))
    assert [start + 4 * row for start, count, _ in runs for row in range(count)] == offsets
    assert all(num_bytes == 4 * count <= 4 * run_rows for _, count, num_bytes in runs)
    if run_rows == 1000:
        assert all(one + size != two for (one, _, size), (two, _, _) in itertools.pairwise(runs))
    check_direct(path, data, rows, field)


# Compressed chunks


def encoded(path: Path, shape: tuple[int, ...] = SHAPE, chunk: int = 4, dtype: object = "u1", **options) -> np.ndarray:
    data = half_smooth(shape, dtype)
    make_file(path, x=(data, {"chunks": (chunk, *shape[1:]), "maxshape": (None, *shape[1:]), **options}))
    return data


@pytest.mark.parametrize("chunk", [1, 4, 37, 64])
@pytest.mark.parametrize("name", FILTERS)
def test_filters(tmp_path, name, chunk):
    data = encoded(tmp_path / "a.h5", chunk=chunk, **FILTERS[name])
    field = direct_field(tmp_path / "a.h5")
    assert not field.reader.is_raw
    for rows in ROWS:
        check_direct(tmp_path / "a.h5", data, rows)
        check_direct(tmp_path / "a.h5", data, rows, field)  # chunks that are kept do not change
    np.testing.assert_array_equal(field.read_all(), data)


def test_filters_that_were_left_out(tmp_path):
    """These files have what the tests need: chunks that were compressed, and others as they were."""
    encoded(tmp_path / "a.h5", (200, 100), **FILTERS["lzf"])
    with h5py.File(tmp_path / "a.h5") as file:
        masks: list[tuple[int, int]] = []
        file["x"].id.chunk_iter(lambda chunk: masks.append((chunk.filter_mask, chunk.size)))
    assert (1, 400) in masks and min(masks) < (0, 400)


@pytest.mark.parametrize("name", ["gzip, shuffle, fletcher32", "zstd, shuffle, fletcher32", "blosc lz4", "bitshuffle"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_with_all_types(tmp_path, dtype, name):
    for number, shape in enumerate([(N,), (N, 13), (N, 3, 50)]):
        path = tmp_path / f"{number}.h5"
        data = encoded(path, shape, dtype=dtype, **FILTERS[name])
        for rows in ROWS[2:]:
            check_direct(path, data, rows)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 199), min_size=1, max_size=200, unique=True),
    chunk=st.integers(1, 220),
    part_bytes=st.sampled_from([1, 1000, 1 << 22]),
    kept=st.sampled_from([1, 8]),
    name=st.sampled_from(["gzip", "lzf, shuffle, fletcher32", "zstd"]),
)
def test_any_rows_of_compressed_chunks(tmp_path, monkeypatch, rows, chunk, part_bytes, kept, name):
    small(monkeypatch, decoded_part_bytes=part_bytes, kept_chunks=kept)
    data = encoded(tmp_path / "a.h5", (200, 30), chunk, "i2", **FILTERS[name])
    field = direct_field(tmp_path / "a.h5")
    check_direct(tmp_path / "a.h5", data, rows, field)
    check_direct(tmp_path / "a.h5", data, rows[::-1], field)


@pytest.fixture
def decoded(monkeypatch, python_threads):
    """A list that grows with each chunk that is decoded."""
    return watch(monkeypatch, "decode chunk")


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(("chunk", "batch"), [(8, 16), (8, 5), (50, 7), (13, 20), (4, 100), (200, 10)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_that_cut_chunks(tmp_path, decoded, chunk, batch, shuffle, num_threads):
    """Each chunk is decoded once, but for the one that fills the gap of a short one at the end of the file."""
    data = encoded(tmp_path / "a.h5", (203, 40), chunk, **FILTERS["gzip"])
    field = direct_field(tmp_path / "a.h5")
    order = Order(203, chunk, batch, window_chunks=1, interleave=4, shuffle=shuffle)
    with ThreadPoolExecutor(num_threads) as threads:
        found, done = [], []
        for window in order.windows():
            found.append((window.samples, np.zeros((len(window.samples), 40), np.uint8)))
            parts = field.tasks(window.rows, window.destinations, found[-1][1])
            done += [threads.submit(part, field.files) for part in parts]
        for each in done:
            each.result()
    for samples, out in found:
        np.testing.assert_array_equal(out, data[samples])
    if num_threads == 1:
        assert len(decoded) <= order.num_chunks + (1 if shuffle and 203 % chunk else 0)


@pytest.mark.skipif(not native.available(), reason="the native library was not built")
def test_a_chunk_that_one_thread_decodes_is_not_yet_used_by_native_threads(tmp_path, monkeypatch):
    data = encoded(tmp_path / "a.h5", **FILTERS["gzip"])
    field, found, decode = direct_field(tmp_path / "a.h5"), [], BoxReader.decode

    def decode_slowly(reader, files, block, values):
        for byte in (1, 2):  # until a decoder is done, its memory may have anything
            values[:] = byte
            found.append(field.read([1, 2]))
        decode(reader, files, block, values)

    monkeypatch.setattr(BoxReader, "decode", decode_slowly)
    assert field.read([0]).tobytes() == data[:1].tobytes()
    assert [each.tobytes() for each in found] == [data[1:3].tobytes()] * 2


def test_chunks_that_are_kept_are_forgotten(tmp_path, decoded):
    data = encoded(tmp_path / "a.h5", **FILTERS["gzip"])
    field = direct_field(tmp_path / "a.h5")
    for _ in range(2):
        check_direct(tmp_path / "a.h5", data, [1, 2], field)
    assert len(decoded) == 1
    field.cache._lock.acquire()  # as if a thread held it that a fork has left behind
    field.cache.forget()
    check_direct(tmp_path / "a.h5", data, [1, 2], field)
    assert len(decoded) == 2
    for _ in range(2):  # what no other window needs is not kept
        check_direct(tmp_path / "a.h5", data, [8, 9, 10, 11], field)
    assert len(decoded) == 4


@pytest.mark.parametrize("name", ["gzip", "lz4"])
def test_a_chunk_that_is_used_in_part_is_kept(tmp_path, name):
    data = encoded(tmp_path / "a.h5", **FILTERS[name])
    field = direct_field(tmp_path / "a.h5")
    check_direct(tmp_path / "a.h5", data, [1, 2], field)
    damage(tmp_path / "a.h5", 0)
    assert field.read([0, 3]).tobytes() == data[[0, 3]].tobytes()
    field.cache.forget()
    with pytest.raises(FileError, match="chunk 0 is damaged"):
        field.read([1])


DAMAGED = ["gzip", "fletcher32", "gzip, shuffle, fletcher32", "zstd", "lz4", "blosc lz4", "bitshuffle", "lzf"]


@pytest.mark.parametrize("rows", [range(8, 12), [9]])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_chunks(tmp_path, name, rows):
    path = tmp_path / "a.h5"
    data = encoded(path, (N, 300), **FILTERS[name])
    damage(path, 2)
    field = direct_field(path)
    for _ in range(2):  # what is kept is no damaged chunk
        with pytest.raises(FileError, match=r"a\.h5: field 'x', chunk 2 is damaged ."):
            field.read(rows)
    with pytest.raises(FileError, match=r"a\.h5: field 'x', chunk 2 is damaged"):
        field.read_all()
    assert field.read([3, 2, 14, 36]).tobytes() == data[[3, 2, 14, 36]].tobytes()
    with pytest.raises(FileError, match=r"a\.h5: field 'x', chunk 2 cannot be read"):
        open_field(path, way="h5py").read(rows)


@pytest.mark.parametrize("rows", [range(8, 12), [9]])
def test_a_compressed_file_cut_short_while_it_is_open(tmp_path, rows):
    path = tmp_path / "a.h5"
    data = encoded(path, (N, 300), **FILTERS["shuffle"])
    field = direct_field(path)
    with path.open("r+b") as file:
        file.truncate(offset_of(path, 2) + 700)
    with pytest.raises(FileError, match=r"a\.h5: field 'x', chunk 2: the file ends .*cut short"):
        field.read(np.array(rows))
    field.read(np.arange(8))
    assert data.shape == (N, 300)


def test_a_stored_chunk_of_more_than_it_can_be(tmp_path):
    encoded(tmp_path / "a.h5", (N, 300), **FILTERS["gzip"])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["x"].id.write_direct_chunk((8, 0), bytes(1 << 20))
    with pytest.raises(
        FileError, match=r"a\.h5: '/x' is damaged: its chunk 2 has 1048576 stored bytes, which is impossible"
    ):
        direct_field(tmp_path / "a.h5")


def test_memory_that_decoding_takes(tmp_path):
    encoded(tmp_path / "a.h5", (N, 300), **FILTERS["gzip"])
    fields = [direct_field(tmp_path / "a.h5").reader]
    assert scratch_bytes(fields, 1) < scratch_bytes(fields, 4) and scratch_bytes(fields, 1) % 1200 == 0
    assert not scratch_bytes([direct_field(make_file(tmp_path / "b.h5", x=(values(SHAPE, "u1"), {}))).reader], 4)


def test_huge_compressed_chunks_are_not_direct(tmp_path, monkeypatch):
    small(monkeypatch, max_decoded_bytes=1199)
    data = encoded(tmp_path / "a.h5", (N, 300), **FILTERS["gzip"])
    why = "its chunks have 1.2 KiB, but threads decode chunks of at most 1.2 KiB"
    assert open_field(tmp_path / "a.h5").why == why
    assert open_field(tmp_path / "a.h5").read(range(N)).tobytes() == data.tobytes()
    make_file(tmp_path / "b.h5", x=(values((N, 300), "u1"), {"chunks": (4, 300)}))
    direct_field(tmp_path / "b.h5")  # plain ones may be of any size


OWN = ("gzip", "lzf", "shuffle", "fletcher32")  # are decoded without imagecodecs


@pytest.mark.parametrize("name", [name for name in FILTERS if not name.startswith(OWN)])
def test_without_imagecodecs(tmp_path, no_imagecodecs, name):
    data = encoded(tmp_path / "a.h5", **FILTERS[name])
    field = open_field(tmp_path / "a.h5")
    assert re.search(r'needs imagecodecs.*pip install "h5chunk\[codecs\]"', field.why)
    assert field.read(range(N)).tobytes() == data.tobytes()


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3)}, {"chunks": (5, 3), "maxshape": (None, 3)}])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_whole_field(tmp_path, options, scattered):
    data = values((N, 3), "i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data.shape, "i4", **options)
        chunk = options["chunks"][0] if scattered and options else N
        for start in reversed(range(0, N, chunk)):
            made[start : start + chunk] = data[start : start + chunk]
            file[f"between{start}"] = np.zeros(start)
    field = direct_field(tmp_path / "a.h5")
    assert is_one_run(tmp_path / "a.h5") == (not scattered or not options)
    np.testing.assert_array_equal(field.read_all(), data)


# What goes wrong while reading


def vectors_at(table: int, count: int) -> np.ndarray:
    """Addresses and lengths of the buffers of a call of preadv, (count, 2)."""
    return np.frombuffer((ctypes.c_size_t * (2 * count)).from_address(table), np.uintp).reshape(count, 2)


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("most_bytes", [1, 7, 15, 16, 100])
def test_short_reads(tmp_path, monkeypatch, most_bytes):
    data = values(SHAPE, np.uint8)
    path = make_file(tmp_path / "a.h5", x=(data, {"chunks": (4, 3, 5)}))
    calls = []

    def short(descriptor, table, count, offset):
        calls.append(offset)
        if len(calls) % 3 == 0:
            ctypes.set_errno(4)  # a signal came
            return -1
        given = os.pread(descriptor, min(most_bytes, int(vectors_at(table, count)[:, 1].sum())), offset)
        left = given
        for address, length in vectors_at(table, count).tolist():
            ctypes.memmove(address, left[:length], min(length, len(left)))
            left = left[length:]
        return len(given)

    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    monkeypatch.setattr(ranges, "_preadv", short)
    for rows in ROWS:
        check_direct(path, data, rows)
    assert len(calls) > len(ROWS)


def test_short_reads_of_a_whole_field(tmp_path, monkeypatch):
    data = values((1000,), np.int32)
    path = make_file(tmp_path / "a.h5", x=(data, {}))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:111]], offset))
    np.testing.assert_array_equal(direct_field(path).read_all(), data)


@pytest.mark.parametrize("layout", ["contiguous", "btree"])
@pytest.mark.parametrize("cut", ["a row", "between rows"])
def test_a_file_cut_short_while_it_is_open(tmp_path, layout, cut):
    data = values((N, 3000), np.uint8)
    options = {} if layout == "contiguous" else {"chunks": (4, 3000)}
    path = make_file(tmp_path / "a.h5", x=(data, options))
    field = direct_field(path)
    length = offset_of(path, 0) + 18 * 3000 + (1000 if cut == "a row" else 0)
    with path.open("r+b") as file:
        file.truncate(length)
    chunk = 0 if layout == "contiguous" else 4
    out = np.zeros_like(data)
    with pytest.raises(FileError, match=rf"a\.h5: field 'x', chunk {chunk}: the file ends .*cut short"):
        field.read_into(np.arange(N), out)
    np.testing.assert_array_equal(out[:18], data[:18])
    with pytest.raises(FileError, match=rf"a\.h5: field 'x', chunk {chunk}: .*cut short"):
        field.read_all()


def test_the_chunk_that_is_named_is_the_one_that_is_lacking(tmp_path, monkeypatch):
    """Also in a run longer than one call takes, and where only the rest of a call is lacking."""
    num_rows = 2 * MAX_VECTORS
    path = make_file(tmp_path / "a.h5", x=(values((4 * num_rows, 3), np.uint8), {"chunks": (num_rows, 3)}))
    field = direct_field(path)
    with path.open("r+b") as file:
        file.truncate(offset_of(path, 3) + 3 * (num_rows - 1))
    with pytest.raises(FileError, match="chunk 3: the file ends"):
        field.read(np.arange(3 * num_rows, 4 * num_rows))


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("whole", [False, True])
def test_an_error_of_the_system_names_file_field_and_chunk(tmp_path, monkeypatch, whole):
    path = make_file(tmp_path / "a.h5", x=(values((N, 3), np.uint8), {"chunks": (4, 3)}))
    field = direct_field(path)

    def fail(*_):
        raise OSError(5, "Input/output error")

    def fail_in_c(*_):
        ctypes.set_errno(5)
        return -1

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(ranges, "_preadv", fail_in_c)
    match = rf"a\.h5: field 'x', chunk {0 if whole else 5}: cannot be read: Input/output error"
    with pytest.raises(FileError, match=match):
        if whole:
            field.read_all()
        else:
            field.read(np.array([21]))


# What others write in an unusual way


@pytest.mark.parametrize("dtype", [">u2", ">i4", ">i8", ">f2", ">f4", ">f8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3, 5)}, {"chunks": (4, 2, 5), "compression": "gzip"}])
def test_big_endian(tmp_path, dtype, options):
    data = values(SHAPE, dtype)
    path = make_file(tmp_path / "a.h5", x=(data, options))
    assert direct_field(path).stored.dtype == data.dtype.newbyteorder("=")
    for rows in ROWS:
        check_direct(path, data.astype(data.dtype.newbyteorder("=")), rows)


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}, {"dtype": ">i4"}, {"fill_time": "never"}])
@pytest.mark.parametrize("chunks", [None, (4, 3, 5), (4, 2, 5)])
@pytest.mark.parametrize("written", [0, 17])
def test_parts_never_written(tmp_path, chunks, filters, written):
    if chunks is None and "compression" in filters:
        pytest.skip("only chunks can be compressed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", SHAPE, chunks=chunks, fillvalue=7, **{"dtype": "i4", **filters})
        made[:written] = np.arange(15).reshape(3, 5)
    with h5py.File(tmp_path / "a.h5") as file:
        data = file["x"][:].astype("i4")
    if "fill_time" in filters and not (chunks is None and written):
        data[written + 3 - (written - 1) % 4 if written else 0 :] = 0  # nothing is defined there: zeros, each time
    for rows in ROWS:
        assert direct_field(tmp_path / "a.h5").read(rows).tobytes() == data[rows].tobytes()


def test_integers_of_less_than_their_bytes(tmp_path):
    """12 bits, shifted by 4: h5py says uint16, and HDF5 shifts them back."""
    kind = h5py.h5t.STD_U16LE.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((N,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(N, dtype=np.uint16))
    assert direct_field(tmp_path / "a.h5").stored.dtype == np.uint16
    check_direct(tmp_path / "a.h5", np.arange(N, dtype=np.uint16), ROWS[3])


@pytest.mark.parametrize("dtype", ["u1", ">f4"])
def test_compact(tmp_path, dtype):
    data = values(SHAPE, dtype)
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        kind, space = h5py.h5t.py_create(data.dtype), h5py.h5s.create_simple(SHAPE)
        h5py.h5d.create(file.id, b"x", kind, space, compact).write(h5py.h5s.ALL, h5py.h5s.ALL, data)
    for rows in ROWS:
        check_direct(tmp_path / "a.h5", data.astype(data.dtype.newbyteorder("=")), rows)


# What is left to HDF5


@pytest.mark.parametrize("chunks", [(4, 3, 5), (4, 2, 5)])
def test_filters_that_only_hdf5_has(tmp_path, chunks):
    data = values(SHAPE, "i2")
    field = open_field(make_file(tmp_path / "a.h5", x=(data, {"chunks": chunks, "scaleoffset": 0})))
    assert "scale" in field.why
    for rows in ROWS:
        check_direct(tmp_path / "a.h5", data, rows, field)


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 3), "maxshape": (None, 3)}])
def test_an_empty_dataset(tmp_path, options):
    path = make_file(tmp_path / "a.h5", x=(values((0, 3), "u1"), options))
    assert field_readers(H5Reader(path, {"x": "x"})) == ({}, {})
    assert read_rows(H5Reader(path, {"x": "x"}), "x", np.empty(0, np.int64)).shape == (0, 3)


def test_external_and_virtual_are_not_direct(tmp_path):
    data = values(SHAPE, np.uint8)
    other = make_file(tmp_path / "other.h5", x=(data, {}))
    layout = h5py.VirtualLayout(SHAPE, "u1")
    layout[:] = h5py.VirtualSource(other, "x", SHAPE)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", data=data, external=[(str(tmp_path / "raw"), 0, data.nbytes)])
    for name, reason in {"virtual": "view of other files", "external": "other files"}.items():
        field = open_field(tmp_path / "a.h5", name)
        assert reason in field.why
        for rows in ROWS:
            assert field.read(rows).tobytes() == data[rows].tobytes()


def test_a_link_into_another_file_is_not_direct(tmp_path):
    """Its offsets are those of the other file."""
    data = values(SHAPE, np.uint8)
    make_file(tmp_path / "other.h5", x=(data, {"chunks": (4, 3, 5)}))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("other.h5", "x")
        file["inner"] = data
        file["soft"] = h5py.SoftLink("/inner")
        file["padding"] = np.zeros(10_000)
    assert "link" in open_field(tmp_path / "a.h5").why
    for field in (open_field(tmp_path / "a.h5"), direct_field(tmp_path / "a.h5", "soft")):
        assert field.read(ROWS[2]).tobytes() == data[ROWS[2]].tobytes()
