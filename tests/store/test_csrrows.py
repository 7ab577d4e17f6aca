"""Rows of a CSR matrix read by their byte ranges are the rows of the matrix."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.csr_files import write_csr
from support.faults import small
from support.open_fields import OpenField

from h5chunk.errors import FieldError, FileError
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.samples import CsrBuffers


def matrix(num_rows: int, num_columns: int, density: float, seed: int = 0) -> scipy.sparse.csr_matrix:
    """With some empty rows, and values 1 to 255."""
    found = scipy.sparse.random(num_rows, num_columns, density, "csr", random_state=np.random.default_rng(seed))
    found.data = np.random.default_rng(seed).integers(1, 256, found.nnz).astype(np.uint8)
    return found


def open_matrix(
    path: Path, wanted: scipy.sparse.csr_matrix, *, pattern: bool = False, way: str = "direct"
) -> OpenField:
    reader = H5Reader(path)
    assert reader.matrix is not None
    assert (reader.matrix.num_rows, reader.matrix.num_columns) == wanted.shape
    assert (reader.matrix.value_dtype is None) == pattern
    field = OpenField(reader, "X", way)
    assert bool(field.why) == (way == "h5py" and reader.matrix.num_entries > 0), field.why
    return field


def read(field: OpenField, rows: np.ndarray) -> scipy.sparse.csr_matrix:
    """Read rows in the order asked for."""
    indptr, matrix = field.source.indptr_of("X"), field.source.matrix
    starts = np.concatenate(([0], np.cumsum(indptr[rows + 1] - indptr[rows])))
    values = None if matrix.value_dtype is None else np.zeros(starts[-1], matrix.value_dtype)
    room = CsrBuffers(starts, np.zeros(starts[-1], matrix.index_dtype), values)
    field.read_into(rows, room)
    data = np.ones(starts[-1], np.uint8) if room.values is None else room.values
    return scipy.sparse.csr_matrix((data, room.indices, starts), (len(rows), matrix.num_columns))


def check_rows(path: Path, wanted: scipy.sparse.csr_matrix, rows: np.ndarray, *, pattern: bool = False) -> None:
    expected = wanted[rows]
    for way in ("direct", "h5py"):
        found = read(open_matrix(path, wanted, pattern=pattern, way=way), rows)
        assert found.indptr.tolist() == expected.indptr.tolist()
        assert found.indices.tolist() == expected.indices.tolist()
        assert found.data.tolist() == ([1] * expected.nnz if pattern else expected.data.tolist())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 80),
    num_columns=st.sampled_from([1, 200, 300, 70_000]),
    density=st.sampled_from([0.0, 0.02, 0.5]),
    pattern=st.booleans(),
    run_bytes=st.sampled_from([1, 64, 1 << 20]),
    seed=st.integers(0, 3),
)
def test_files_of_ours(tmp_path, monkeypatch, num_rows, num_columns, density, pattern, run_bytes, seed):
    small(monkeypatch, run_bytes=run_bytes, part_bytes=run_bytes)
    wanted = matrix(num_rows, num_columns, min(density, 2000 / num_columns), seed)
    path = tmp_path / "a.h5"
    codes = None if pattern else wanted.data
    write_csr(
        path, wanted.indptr.astype(np.int64), wanted.indices.astype(np.uint64), codes, num_columns, overwrite=True
    )
    rows = np.random.default_rng(seed).permutation(num_rows)
    check_rows(path, wanted, rows, pattern=pattern)
    check_rows(path, wanted, rows[: max(1, num_rows // 3)], pattern=pattern)
    check_rows(path, wanted, np.arange(num_rows), pattern=pattern)


@pytest.mark.parametrize("options", [{}, {"chunks": (64,)}, {"chunks": (50,), "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("value", ["f4", "f8", "i8", "u2"])
def test_files_of_others(tmp_path, options, value):
    wanted = matrix(90, 400, 0.05)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("X").attrs.update({"encoding-type": "csr_matrix", "shape": wanted.shape})
        file.create_dataset("X/indptr", data=wanted.indptr.astype(np.int32))
        file.create_dataset("X/indices", data=wanted.indices.astype(np.int32), **options)
        file.create_dataset("X/data", data=wanted.data.astype(value), **options)
    for seed in range(3):
        check_rows(tmp_path / "a.h5", wanted, np.random.default_rng(seed).permutation(90)[: 30 * seed + 30])


@pytest.mark.parametrize(
    ("indptr", "num_indices", "num_values", "message"),
    [
        ([0, 2, 5], 5, 4, "5 indices, but 4 values"),
        ([0, 3, 4], 5, 5, "runs from 0 to 4 instead of from 0 to 5"),
        ([1, 2, 5], 5, 5, "runs from 1 to 5 instead of from 0 to 5"),
        ([0, 7, 5], 5, 5, "indptr decreases after row 1"),
        ([0, 2, 6], 5, 5, "runs from 0 to 6 instead of from 0 to 5"),
        ([0, 2, 4, 5], 5, 5, "2 rows, but 4 values in indptr instead of 3"),
    ],
)
def test_damaged(tmp_path, indptr, num_indices, num_values, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("X").attrs.update({"encoding-type": "csr_matrix", "shape": [2, 9]})
        file["X/indptr"] = np.array(indptr)
        file["X/indices"], file["X/data"] = np.zeros(num_indices, np.uint8), np.zeros(num_values, np.uint8)
    with pytest.raises(FileError, match=rf"a\.h5: 'X' is damaged: .*{message}"):
        H5Reader(tmp_path / "a.h5").indptr_of("X")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {},
            "not a CSR matrix \\(it has no encoding-type\\): if this is an .h5ad or 10x file",
        ),
        ({"encoding-type": "csc_matrix", "shape": [2, 9]}, "encoding-type 'csc_matrix'"),
        ({"encoding-type": "csr_matrix"}, "damaged: its shape is not stored as two integers"),
        ({"encoding-type": "csr_matrix", "shape": [2, 0]}, "its shape is 2 x 0"),
        ({"encoding-type": "csr_matrix", "shape": [2.5, 9.0]}, "not stored as two integers"),
    ],
)
def test_what_it_says_cannot_be(tmp_path, attributes, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("X").attrs.update(attributes)
        file["X/indptr"], file["X/indices"], file["X/data"] = np.zeros(3, int), np.zeros(0, "u1"), np.zeros(0, "u1")
    with pytest.raises((FieldError, FileError), match=message):
        H5Reader(tmp_path / "a.h5")


def test_no_matrix(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["X/indptr"] = np.zeros(3, int)
    with pytest.raises(
        FieldError, match="'X' is not a CSR matrix: it lacks a one-dimensional numeric dataset 'indices'"
    ):
        H5Reader(tmp_path / "a.h5")


def test_cut_short(tmp_path):
    wanted = matrix(90, 400, 0.2)
    path = tmp_path / "a.h5"
    write_csr(path, wanted.indptr.astype(np.int64), wanted.indices.astype(np.uint64), wanted.data, 400)
    field = open_matrix(path, wanted)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 4)
    with pytest.raises(FileError, match=r"a\.h5: field 'X/(indices|data)', chunk \d+: the file ends"):
        read(field, np.arange(90))


@pytest.mark.parametrize("value", ["a", 0.0, -1.0, [1.0, 2.0], np.inf])
def test_a_scale_that_cannot_be(tmp_path, value):
    """Of a file of ours; in others the name means nothing."""
    wanted = matrix(20, 30, 0.2)
    write_csr(tmp_path / "a.h5", wanted.indptr.astype(np.int64), wanted.indices.astype(np.uint64), wanted.data, 30)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["X"].attrs["scale"] = value
    with pytest.raises(FileError, match="its scale"):
        H5Reader(tmp_path / "a.h5")
