"""A CSR group as format.py's docstring specifies it, read with plain h5py and with AnnData; and its planning."""

from __future__ import annotations

import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.csr_files import write_csr
from support.csr_specification import check_csr_file
from support.faults import small

from h5chunk.errors import FileError, OptionError
from h5chunk.plan.csr import CODE, ROW_CHUNK_BYTES, plan_csr
from h5chunk.store.format.header import read_header, read_matrix
from h5chunk.store.format.spec import create_file
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.write.csr import CsrWriter, csr_spec
from h5chunk.store.write.new_file import NewFile

ATTRIBUTES = {"seed": 3, "shuffled": True, "options": {}}

sp = pytest.importorskip("scipy.sparse")


def matrix(num_rows: int, num_columns: int, density: float = 0.2, seed: int = 0) -> sp.csr_matrix:
    """Random codes 1..255, sorted, with some empty rows."""
    rng = np.random.default_rng(seed)
    dense = (rng.random((num_rows, num_columns)) < density) * rng.integers(1, 256, (num_rows, num_columns))
    dense[rng.random(num_rows) < 0.2] = 0
    return sp.csr_matrix(dense.astype(np.uint8))


def write(path: Path, it: sp.csr_matrix, pattern: bool = False, **options: object) -> None:
    codes = None if pattern else it.data
    write_csr(path, it.indptr, it.indices.astype(np.uint64), codes, it.shape[1], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "density"), [(1, 1, 1), (40, 30, 0), (300, 256, 0.2), (300, 257, 0.2), (9, 70_000, 0.5)]
)
def test_it_reads_back(tmp_path: Path, num_rows: int, num_columns: int, density: float, pattern: bool) -> None:
    expected = matrix(num_rows, num_columns, density)
    write(tmp_path / "x.h5", expected, pattern, fields={"labels": np.arange(num_rows)}, chunk_samples=7)
    if pattern:
        expected.data[:] = 1
    found = check_csr_file(tmp_path / "x.h5")
    assert found.shape == expected.shape and (found != expected).nnz == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["labels"][()].tolist() == list(range(num_rows))
        assert file["labels"].chunks == (min(7, num_rows),)


@pytest.mark.parametrize("pattern", [False, True])
def test_anndata_reads_it(tmp_path: Path, pattern: bool) -> None:
    io = pytest.importorskip("anndata.io")
    expected = matrix(50, 300)
    write(tmp_path / "x.h5", expected, pattern, scale=2.0)
    if pattern:
        expected.data[:] = 1
    with h5py.File(tmp_path / "x.h5") as file:
        assert (io.read_elem(file["X"]) != expected).nnz == 0
        backed = io.sparse_dataset(file["X"])
        assert backed.shape == expected.shape and (backed[3:9] != expected[3:9]).nnz == 0


def test_many_chunks_are_one_run_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, index_chunk_bytes=512)
    expected = matrix(200, 300)
    write(tmp_path / "x.h5", expected)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["X/indices"].chunks == (256,) and file["h5chunk/checksums/X/data"].size > 10
    assert (check_csr_file(tmp_path / "x.h5") != expected).nnz == 0


def test_a_pattern_stores_no_values(tmp_path: Path) -> None:
    it = matrix(1000, 200)
    write(tmp_path / "with.h5", it)
    write(tmp_path / "without.h5", it, pattern=True)
    saved = (tmp_path / "with.h5").stat().st_size - (tmp_path / "without.h5").stat().st_size
    assert saved > 0.9 * it.nnz


def test_parts_of_any_size_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, index_chunk_bytes=100)
    it = matrix(60, 40)
    layout = plan_csr(60, 40, it.nnz)
    digests = []
    for step in (1, 7, 100, 10_000):
        with NewFile(tmp_path / f"{step}.h5") as new:
            new.allocate(csr_spec(layout, scale=1.0, attributes=ATTRIBUTES, fields={}, tables={}))
            writer = CsrWriter(new, layout)
            for start in range(0, it.nnz, step):
                part = slice(start, start + step)
                writer.append(it.indices[part].astype(np.uint8), it.data[part])
            writer.finish(np.diff(it.indptr))
            new.commit()
        digests.append(zlib.crc32((tmp_path / f"{step}.h5").read_bytes()))
    assert len(set(digests)) == 1


def test_what_is_missing_or_of_another_type_is_noticed(tmp_path: Path) -> None:
    layout = plan_csr(2, 300, 4)
    with NewFile(tmp_path / "x.h5") as new:
        new.allocate(csr_spec(layout, scale=1.0, attributes=ATTRIBUTES, fields={}, tables={}))
        writer = CsrWriter(new, layout)
        with pytest.raises(TypeError, match="indices have the dtype uint8"):
            writer.append(np.zeros(1, np.uint8), np.ones(1, np.uint8))
        with pytest.raises(TypeError):
            writer.append(np.zeros(1, np.uint16), None)
        with pytest.raises(TypeError, match="2 values"):
            writer.append(np.zeros(1, np.uint16), np.ones(2, np.uint8))
        writer.append(np.zeros(1, np.uint16), np.ones(1, np.uint8))
        with pytest.raises(ValueError, match="rows have 3 entries, but 1 of 4 were written"):
            writer.finish(np.array([1, 2]))
        with pytest.raises(ValueError, match="rows have 4 entries, but 1 of 4 were written"):
            writer.finish(np.array([2, 2]))
    assert not (tmp_path / "x.h5").exists()


def test_the_header_and_the_matrix_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "x.h5", matrix(30, 20), scale=2.5, seed=7, shuffled=True, chunk_samples=4)
    with open_file(tmp_path / "x.h5") as file:
        header, found = read_header(file), read_matrix(file)
    assert header is not None and (header.num_samples, header.chunk_samples, header.seed) == (30, 4, 7)
    assert found is not None
    assert (found.kind, found.num_rows, found.num_columns, found.scale, found.pattern) == ("csr", 30, 20, 2.5, False)


def test_files_without_a_matrix_have_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        assert read_matrix(file) is None
        file.create_group("h5chunk")
        assert read_matrix(file) is None


SPOILT = {
    "kind": lambda f: f["h5chunk"].attrs.modify("kind", np.bytes_("coo")),
    "no data": lambda f: f["X"].pop("data"),
    "short indptr": lambda f: (f["X"].pop("indptr"), f["X"].create_dataset("indptr", data=np.zeros(5, np.int64))),
    "wide data": lambda f: (f["X"].pop("data"), f["X"].create_dataset("data", (f["X/indices"].size,), "i4")),
    "wide indices": lambda f: (f["X"].pop("indices"), f["X"].create_dataset("indices", (f["X/data"].size,), "i4")),
    "end of indptr": lambda f: f["X/indptr"].__setitem__(30, 10**9),
    "start of indptr": lambda f: f["X/indptr"].__setitem__(0, 1),
    "scale": lambda f: f["X"].attrs.modify("scale", np.nan),
    "shape": lambda f: f["X"].attrs.modify("shape", np.array([30, 0])),
    "rows": lambda f: f["X"].attrs.modify("shape", np.array([31, 20])),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_cannot_be_is_an_error_of_ours(tmp_path: Path, how: str) -> None:
    write(tmp_path / "x.h5", matrix(30, 20))
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        SPOILT[how](file)
    with open_file(tmp_path / "x.h5") as file, pytest.raises(FileError, match=r"x\.h5: its matrix is damaged"):
        read_matrix(file)


@given(
    num_rows=st.integers(1, 10**7),
    num_columns=st.integers(1, 10**6),
    per_row=st.floats(0, 5000),
    pattern=st.booleans(),
)
def test_the_plan(num_rows: int, num_columns: int, per_row: float, pattern: bool) -> None:
    layout = plan_csr(
        num_rows, num_columns, int(num_rows * min(per_row, num_columns)), value_dtype=None if pattern else CODE
    )
    size = layout.chunk_samples
    assert 1 <= size <= num_rows and (size == num_rows or size & (size - 1) == 0)
    assert size == 1 or size * layout.sample_bytes <= ROW_CHUNK_BYTES
    assert 1 <= layout.window_chunks <= layout.num_chunks
    assert 1 <= layout.chunk_entries <= max(1, layout.num_entries)
    assert layout.chunk_entries * layout.index_dtype.itemsize <= 1 << 20
    assert layout.cache.nslots >= 1


def test_the_size_of_a_chunk_that_is_asked_for() -> None:
    assert plan_csr(100, 10, 50, chunk_samples=7).chunk_samples == 7
    assert plan_csr(5, 10, 50, chunk_samples=7).chunk_samples == 5
    with pytest.raises(OptionError, match="chunk_samples is 0"):
        plan_csr(100, 10, 50, chunk_samples=0)


def test_num_bytes_is_near_that_of_the_file(tmp_path: Path) -> None:
    for pattern in (False, True):
        layout = plan_csr(1000, 300, 700_000, value_dtype=None if pattern else CODE)
        spec = csr_spec(layout, scale=1.0, attributes=ATTRIBUTES, fields={}, tables={})
        create_file(tmp_path / "x.h5", spec)
        real = (tmp_path / "x.h5").stat().st_size
        assert real <= spec.num_bytes <= real + 20_000
