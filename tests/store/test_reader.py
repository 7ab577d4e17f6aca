"""Rows of anybody's HDF5 file, and files that cannot be read."""

from __future__ import annotations

import os
import pickle
import shutil

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.foreign import chunk_table, counted, make_file, make_images, values
from support.open_fields import OpenField

from h5chunk import ChunkDataset
from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.reader import H5Reader

__all__ = ["counted"]

N = 37  # with chunks of 4, 8 or 10 the last chunk is short

LAYOUTS = {
    "contiguous": {},
    "auto-chunked": {"chunks": True},
    "whole samples": {"chunks": (4, 3, 6, 5)},
    "one sample a chunk": {"chunks": (1, 3, 6, 5)},
    "pieces of samples": {"chunks": (10, 2, 4, 3)},
    "larger than the data": {"chunks": (64, 3, 8, 5), "maxshape": (None, 3, None, 5)},
    "gzip": {"chunks": (8, 3, 6, 5), "compression": "gzip"},
    "lzf": {"chunks": (8, 3, 6, 5), "compression": "lzf"},
    "shuffle and fletcher32": {"chunks": (8, 3, 6, 5), "shuffle": True, "fletcher32": True},
    "gzip auto-chunked": {"chunks": True, "compression": "gzip"},
    "resizable": {"maxshape": (None, 3, 6, 5)},
    "early": {"chunks": (8, 3, 6, 5)},
}
DTYPES = [
    *("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?", "S5"),
    *(">u2", ">i4", ">i8", ">f2", ">f4", ">f8"),
]
ROWS = [[0], [N - 1], [3, 1, 2], list(range(N)), list(range(N))[::-1], [5, 5, 0, 36, 5, 35], [], [36, 0] * 9]


def check_reader(reader: H5Reader, expected: dict[str, np.ndarray]) -> None:
    """The reader gives what NumPy would."""
    assert list(reader.fields) == list(expected)
    for name, data in expected.items():
        field = reader.fields[name]
        assert field.dtype == data.dtype.newbyteorder("=")
        assert field.sample_shape == data.shape[1:]
        for way in ("auto", "h5py"):
            opened = OpenField(reader, name, way) if reader.num_samples else None
            assert opened is None or bool(opened.why) == (way == "h5py"), opened.why
            for rows in ROWS:
                rows = [row for row in rows if row < len(data)]
                found = read_rows(reader, name, np.array(rows, np.int64)) if opened is None else opened.read(rows)
                np.testing.assert_array_equal(found, data[rows])
    numbers = np.arange(reader.num_samples)
    assert {name: read_rows(reader, name, numbers).tolist() for name in expected} == {
        name: data.tolist() for name, data in expected.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    data = values((N, 3, 6, 5), np.uint8)
    reader = H5Reader(make_file(tmp_path / "a.h5", images=(data, LAYOUTS[layout])))
    check_reader(reader, {"images": data})


@pytest.mark.parametrize("options", [{}, {"chunks": True}, {"chunks": (8,), "compression": "gzip"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_scalar_fields(tmp_path, dtype, options):
    data = values((N,), dtype)
    reader = H5Reader(make_file(tmp_path / "a.h5", x=(data, options)), {"x": "x"})
    check_reader(reader, {"x": data})


def test_enum(tmp_path):
    kind = h5py.enum_dtype({"cat": 0, "dog": 1}, basetype="u1")
    data = np.arange(N, dtype=np.uint8) % 2
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=data, dtype=kind)
    check_reader(H5Reader(tmp_path / "a.h5", {"x": "x"}), {"x": data})


@pytest.mark.parametrize("num_samples", [0, 1])
@pytest.mark.parametrize("options", [{}, {"chunks": (4, 2), "maxshape": (None, 2)}])
def test_few_samples(tmp_path, num_samples, options):
    data = values((num_samples, 2), np.float32)
    reader = H5Reader(make_file(tmp_path / "a.h5", images=(data, options)))
    assert (reader.num_samples, reader.chunk_samples >= 1) == (num_samples, True)
    check_reader(reader, {"images": data})


def test_several_fields_in_groups(tmp_path):
    data = {"x": values((N, 40), "f4"), "y": values((N,), ">i8"), "name": values((N, 2), "S7")}
    path = make_file(
        tmp_path / "a.h5",
        file={"userblock_size": 1024},
        train__x=(data["x"], {"chunks": (8, 40)}),
        train__deep__y=(data["y"], {"chunks": (5,), "compression": "gzip"}),
        name=(data["name"], {}),
    )
    reader = H5Reader(path, {"x": "train/x", "y": "/train/deep/y", "name": "name"})
    assert (reader.main.name, reader.chunk_samples) == ("x", 8)
    check_reader(reader, data)


def test_newest_file_format(tmp_path):
    data = values((N, 9), np.uint8)
    path = make_file(tmp_path / "a.h5", file={"libver": "latest"}, images=(data, {"chunks": (4, 9)}))
    check_reader(H5Reader(path), {"images": data})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 299), max_size=60),
    chunk_samples=st.integers(1, 310),
    width=st.sampled_from([1, 100, 30_000]),
    cache=st.sampled_from([0, 1 << 10, 1 << 20]),
    lzf=st.booleans(),
    way=st.sampled_from(["auto", "h5py"]),
)
def test_any_rows_of_any_chunks(tmp_path, rows, chunk_samples, width, cache, lzf, way):
    data = values((300, width), np.uint8)
    options = {"chunks": (chunk_samples, width), "maxshape": (None, width)}
    path = make_file(tmp_path / "a.h5", images=(data, {**options, **({"compression": "lzf"} if lzf else {})}))
    field = OpenField(H5Reader(path), "images", way)
    field.cache.limit_bytes = cache
    np.testing.assert_array_equal(field.read(rows), data[rows])
    np.testing.assert_array_equal(field.read(rows[::-1]), data[rows[::-1]])


# What is read


@pytest.mark.parametrize("num_rows", [120, 400])  # two or three of a chunk of eight, and all
@pytest.mark.parametrize("limit", [0, 1 << 20, 1 << 30])
@pytest.mark.parametrize("lzf", [False, True])
def test_a_request_reads_each_chunk_once(tmp_path, counted, lzf, limit, num_rows):
    path = make_images(tmp_path / "a.h5", 400, 8, (20_000,), **({"compression": "lzf"} if lzf else {}))
    field = OpenField(H5Reader(path), "images", "h5py")
    field.cache.limit_bytes = limit
    rows = np.random.default_rng(0).permutation(400)[:num_rows]
    field.read(rows)
    times = [sum(offset == start for offset, _ in counted[-1].reads) for start in chunk_table(path)]
    assert max(times) == 1
    assert sum(times) == len(np.unique(rows // 8))


def test_contiguous_needs_no_cache(tmp_path):
    reader = H5Reader(make_file(tmp_path / "a.h5", images=(values((N, 5), "u1"), {})))
    assert reader.main.grid.cache_for(100) == CacheSettings(1, 0)
    assert 1 <= reader.chunk_samples <= N


# Processes and files


def test_a_reader_travels(tmp_path):
    data = values((N, 5), "u1")
    reader = H5Reader(make_file(tmp_path / "a.h5", images=(data, {"chunks": (4, 5)})))
    check_reader(reader, {"images": data})
    check_reader(pickle.loads(pickle.dumps(reader)), {"images": data})


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"scaleoffset": 0}])
def test_closing_one_of_two(tmp_path, options):
    data = values((N, 5), "u1")
    path = make_file(tmp_path / "a.h5", images=(data, {"chunks": (4, 5), **options}))
    one, two = ChunkDataset(path), ChunkDataset(path)
    for each in (one, two, one):
        for dataset in (one, two):
            np.testing.assert_array_equal(dataset[list(range(N))][0], data)
        each.close()


@pytest.mark.parametrize("options", [{}, {"scaleoffset": 0}])
def test_closing_lets_go_of_the_file(tmp_path, options):
    path = make_images(tmp_path / "a.h5", 20, 4, (5000,), **options)
    dataset = ChunkDataset(path)
    dataset[3]
    assert str(path) in open_paths()
    dataset.close()
    assert str(path) not in open_paths()


def open_paths() -> set[str]:
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        pytest.skip("no /proc")
    return {os.path.realpath(f"{folder}/{fd}") for fd in os.listdir(folder)}


@pytest.mark.parametrize("change", ["replaced", "appended", "same size"])
def test_a_file_that_changed_is_an_error(tmp_path, change):
    path = make_images(tmp_path / "a.h5", 20, 4)
    reader = H5Reader(path)
    if change == "replaced":
        shutil.copy2(path, tmp_path / "b.h5")
        (tmp_path / "b.h5").replace(path)
    elif change == "appended":
        with h5py.File(path, "a") as file:
            file["more"] = np.arange(1000)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(FileError, match=r"a\.h5: the file was replaced or changed since it was first opened: open"):
        read_rows(reader, "images", np.array([0]))


def test_a_file_that_is_gone(tmp_path):
    path = make_images(tmp_path / "a.h5", 20, 4)
    reader = H5Reader(path)
    path.unlink()
    with pytest.raises(FileError, match=r"a\.h5: the file was removed since it was first opened: put it back"):
        read_rows(reader, "images", np.array([0]))


# Bad input


def check_refused(kind: type[H5ChunkError], match: str, *args: object) -> None:
    with pytest.raises(kind, match=match) as caught:
        H5Reader(*args)
    assert "\n" not in str(caught.value)
    assert str(args[0]) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not HDF5", b"\0" * 10_000, b"PK\x03\x04" + b"x" * 4000])
def test_not_hdf5(tmp_path, content):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    check_refused(FileError, "not an HDF5 file", path)


def test_missing_file_and_folder(tmp_path):
    check_refused(FileError, "no such file", tmp_path / "a.h5")
    check_refused(FileError, "not a regular file", tmp_path)


@pytest.mark.parametrize("keep", [0.999, 0.5])
def test_truncated(tmp_path, keep):
    path = make_images(tmp_path / "a.h5", 2000, 8)
    with open(path, "r+b") as file:  # noqa: PTH123
        file.truncate(int(path.stat().st_size * keep))
    check_refused(FileError, "cut short", path)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            None,
            FieldError,
            "has no dataset 'images'; it has .*numbers.*: name the fields to read with fields=\\[",
        ),
        ({"x": "nothing"}, FieldError, "has no dataset 'nothing'; it has .*group/inner"),
        ({"x": "group/nothing"}, FieldError, "has no dataset 'group/nothing'"),
        ({"x": "numbers/inner"}, FieldError, "numbers/inner"),
        ({"x": "group"}, FieldError, "'group' is a group: name a dataset in it"),
        ({"x": "single"}, FieldError, "'single' is a single value"),
        ({"x": "null"}, FieldError, "'null' is a single value|'null' is empty"),
        ({"x": "compound", "x/b": "numbers"}, OptionError, "fields has 'x' and its column 'x/b': name only one"),
        ({"x": "compound/c"}, FieldError, "has no dataset 'compound/c'"),
        ({"x": "numbers", "y": "longer"}, FieldError, "fields differ in length .'numbers' has 10, 'longer' has 11"),
        ({"x": "dangling"}, FieldError, "dangling"),
        ({"x": "outside"}, FieldError, "outside"),
    ],
)
def test_what_cannot_be_a_field(tmp_path, fields, kind, message):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["numbers"], file["longer"] = np.arange(10), np.arange(11)
        file["group/inner"] = np.arange(10)
        file["single"] = 3
        file["null"] = h5py.Empty("f4")
        file["text"] = ["a", "b"]
        file["compound"] = np.zeros(10, [("a", "i4"), ("b", "f4")])
        file["complex"] = np.zeros(10, "c8")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["outside"] = h5py.ExternalLink("nowhere.h5", "/x")
    check_refused(kind, message, path, fields)


def test_no_fields(tmp_path):
    with pytest.raises(OptionError, match="fields is empty: name at least one dataset"):
        H5Reader(make_images(tmp_path / "a.h5", 3, 1), {})


def test_a_file_without_datasets(tmp_path):
    h5py.File(tmp_path / "a.h5", "w").close()
    check_refused(FieldError, "it has no datasets at all", tmp_path / "a.h5")


def test_the_error_of_a_missing_dataset_names_first_what_may_be_meant(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in (*"abcdefghij", "obs/kind/codes", "obs/kind/categories"):
            file[name] = np.arange(3)
    with pytest.raises(FieldError, match=r"it has obs/kind/categories, obs/kind/codes, a, b, c, d, e, f, \.\.\.: name"):
        H5Reader(tmp_path / "a.h5", {"kind": "kind"})
