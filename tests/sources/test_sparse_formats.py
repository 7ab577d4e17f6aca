"""What the blocks of every format add up to is the matrix that was written, as scipy sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.matrix_files import dense, entries, opened, write_10x, write_h5ad
from support.open_source import open_source

import h5chunk
from h5chunk.errors import SourceError
from h5chunk.sources.open import find_kind

DTYPES = ["u1", "i2", "i4", "i8", "f4", "f8", "?"]


@st.composite
def matrices(draw: Any, dtypes: Any = DTYPES) -> scipy.sparse.coo_matrix:
    """Matrices with duplicates, empty rows and columns, and zeros that are kept."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    count = draw(st.integers(0, 40))
    seed = draw(st.integers(0, 1 << 30))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 100, count)
    values = values % 2 if dtype.kind == "b" else values / 4 if dtype.kind == "f" else values
    where = rng.integers(0, shape[0], count), rng.integers(0, shape[1], count)
    return scipy.sparse.coo_matrix((values.astype(dtype), where), shape)


def total(matrix: scipy.sparse.coo_matrix) -> np.ndarray:
    result = np.zeros(matrix.shape)
    np.add.at(result, (matrix.row, matrix.col), matrix.data.astype(float))
    return result


def save_npz(path: Path, matrix: scipy.sparse.coo_matrix, form: str) -> None:
    if form != "coo":
        data = matrix.data
        order = np.lexsort((matrix.col, matrix.row) if form == "csr" else (matrix.row, matrix.col))
        major, minor = (matrix.row, matrix.col) if form == "csr" else (matrix.col, matrix.row)
        counts = np.bincount(major, minlength=matrix.shape[form == "csc"])
        pointers = np.concatenate([[0], np.cumsum(counts)])
        kind = getattr(scipy.sparse, f"{form}_matrix")
        matrix = kind(matrix.shape, dtype=data.dtype)
        matrix.data, matrix.indices, matrix.indptr = data[order], minor[order], pointers
    scipy.sparse.save_npz(path, matrix)


def write_npz(form: str) -> Callable[[Path, Any], Path]:
    def write(folder: Path, matrix: Any) -> Path:
        save_npz(folder / "m.npz", matrix, form)
        return folder / "m.npz"

    return write


def write_npy(order: Any) -> Callable[[Path, Any], Path]:
    def write(folder: Path, matrix: Any) -> Path:
        values = total(matrix)
        kind = matrix.dtype if values.max(initial=0) <= 100 and matrix.dtype.kind != "b" else np.float64
        np.save(folder / "m.npy", np.asarray(values.astype(kind), order=order))
        return folder / "m.npy"

    return write


def write_mtx(name: str) -> Callable[[Path, Any], Path]:
    def write(folder: Path, matrix: Any) -> Path:
        scipy.io.mmwrite(folder / "m.mtx", matrix.astype(np.float64 if matrix.dtype.kind == "f" else np.int64))
        text = (folder / "m.mtx").read_bytes()
        opened(folder / name, text)
        return folder / name

    return write


def write_csv(form: str) -> Callable[[Path, Any], Path]:
    def write(folder: Path, matrix: Any) -> Path:
        lines = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.astype(float).tolist(), strict=True)
        text = "".join(form.format(*line) + "\n" for line in lines)
        (folder / "m.csv").write_text("userId,movieId,rating,timestamp\n" + text)
        return folder / "m.csv"

    return write


def write_libsvm(folder: Path, matrix: Any) -> Path:
    rows: list[list[str]] = [[str(i)] for i in range(matrix.shape[0])]
    for i, j, value in zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.astype(float).tolist(), strict=True):
        rows[i].append(f"{j + 1}:{value!r}")
    (folder / "m.svm").write_text("# made\n" + "\n".join(" ".join(row) for row in rows))
    return folder / "m.svm"


FORMATS = {
    "csr": write_npz("csr"),
    "csc": write_npz("csc"),
    "coo": write_npz("coo"),
    "npy": write_npy("C"),
    "npy by columns": write_npy("F"),
    "mtx": write_mtx("n.mtx"),
    "mtx.gz": write_mtx("n.mtx.gz"),
    "libsvm": write_libsvm,
    "csv": write_csv("{},{},{},1234"),
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(matrix=matrices(), max_bytes=st.sampled_from([1, 1 << 12, 1 << 22]))
def test_blocks_add_up_to_the_matrix(name, matrix, max_bytes):
    if name == "csv" and not matrix.nnz:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = FORMATS[name](Path(folder), matrix)
        kind = "npy" if path.suffix == ".npy" else find_kind(path).kind
        source = open_source(path, kind=kind)
        assert source.kind == kind
        for size, expected in zip(source.shape, matrix.shape, strict=True):
            assert size in (None, expected)
        assert (dense(source, max_bytes, matrix.shape) == total(matrix)).all()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    matrix=matrices(["f4", "i4", "u1"]),
    form=st.sampled_from(["csr", "csc", "dense"]),
    layer=st.sampled_from([None, "raw", "counts"]),
    compression=st.sampled_from([None, "gzip", "lzf"]),
    max_bytes=st.sampled_from([1, 1 << 20]),
)
def test_anndata_adds_up(matrix, form, layer, compression, max_bytes):
    matrix = matrix.tocsr()
    wanted = matrix.toarray() if form == "dense" else matrix.asformat(form)
    blank = scipy.sparse.csr_matrix(matrix.shape, dtype="f4")
    options = {None: {}, "raw": {"raw": wanted}, "counts": {"layers": {"counts": wanted}}}[layer]
    with tempfile.TemporaryDirectory() as folder:
        path = write_h5ad(
            Path(folder) / "m.h5ad", wanted if layer is None else blank, compression=compression, **options
        )
        source = open_source(path, layer=layer)
        assert source.kind == find_kind(path).kind == "h5ad"
        assert source.shape == matrix.shape
        assert source.row_names.tolist() == [str(i).encode() for i in range(matrix.shape[0])]
        assert (dense(source, max_bytes) == matrix.toarray()).all()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(matrix=matrices(["i4"]), version=st.sampled_from([2, 3]), max_bytes=st.sampled_from([1, 1 << 20]))
def test_tenx_adds_up(matrix, version, max_bytes):
    matrix = matrix.tocsr()
    with tempfile.TemporaryDirectory() as folder:
        path = write_10x(Path(folder) / "m.h5", matrix, version=version)
        source = open_source(path)
        assert source.kind == find_kind(path).kind == "10x"
        assert source.shape == matrix.shape
        assert source.row_names[0] == b"CELL-0" and source.column_names[-1] == f"ENSG{matrix.shape[1] - 1}".encode()
        assert (dense(source, max_bytes) == matrix.toarray()).all()


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
def test_symmetric_matrices_are_given_whole(tmp_path, symmetry):
    matrix = np.random.default_rng(0).integers(-9, 9, (30, 30)).astype(float)
    matrix = {"general": matrix, "symmetric": matrix + matrix.T, "skew-symmetric": matrix - matrix.T}[symmetry]
    scipy.io.mmwrite(tmp_path / "m.mtx", scipy.sparse.coo_matrix(matrix), symmetry=symmetry)
    assert symmetry.encode() in (tmp_path / "m.mtx").read_bytes().splitlines()[0]
    assert (dense(open_source(tmp_path / "m.mtx"), 1) == matrix).all()


def test_the_other_triangle_will_do(tmp_path):
    source = opened(tmp_path / "m.mtx", b"%%MatrixMarket matrix coordinate integer symmetric\n2 2 2\n1 2 5\n2 2 7\n")
    assert dense(source).tolist() == [[0, 5], [5, 7]]


def test_patterns_have_no_values(tmp_path):
    text = b"%%MatrixMarket matrix coordinate pattern general\n%\n\n 3  4 2\n\n1\t2\n  3 4 \n"
    rows, columns, values = entries(opened(tmp_path / "m.mtx", text))
    assert (rows.tolist(), columns.tolist(), values) == ([0, 2], [1, 3], None)


def test_whole_numbers_of_a_matrix_market_stay_whole(tmp_path):
    big = (1 << 62) + 1
    text = f"%%MatrixMarket matrix coordinate integer general\r\n1 1 1\r\n1 1 {big}\r\n"
    assert entries(opened(tmp_path / "m.mtx", text.encode()))[2].tolist() == [big]


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_a_row_longer_than_a_block(tmp_path, form):
    matrix = scipy.sparse.random(3, 2000, 0.9, random_state=0, format=form)
    scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    blocks = list(open_source(tmp_path / "m.npz").blocks(1))
    assert len(blocks) > 15
    assert (dense(open_source(tmp_path / "m.npz"), 1) == matrix.toarray()).all()


def test_libsvm_rows_labels_queries_and_comments(tmp_path):
    text = b"+1 qid:3 2:0.5 5:-1e+1 # first 0:9\r\n\r\n# no row 0:1\n-1\n  2 qid:4\t1:+.5  \n"
    source = opened(tmp_path / "train.txt", text)
    assert (source.kind, source.shape) == ("libsvm", (3, None))
    assert source.row_fields["labels"].tolist() == [1, -1, 2]
    assert source.row_fields["labels"].dtype == np.int64
    rows, columns, values = entries(source)
    assert (rows.tolist(), columns.tolist(), values.tolist()) == ([0, 0, 2], [1, 4, 0], [0.5, -10, 0.5])


def test_libsvm_from_zero_is_noticed_wherever_it_shows(tmp_path):
    text = b"1 3:1\n" * 5000 + b"0.5 0:2\n"
    source = opened(tmp_path / "m.svm.gz", text)
    rows, columns, _ = entries(source, 1)
    assert set(columns[:-1].tolist()) == {3}
    assert (rows[-1], columns[-1]) == (5000, 0)
    assert source.row_fields["labels"].tolist() == [1.0] * 5000 + [0.5]
    assert source.notes == ["an index is 0, so that indices count from 0"]
    assert "index 1 became column 0" in opened(tmp_path / "one.svm", b"1 2:1\n").notes[0]


def test_the_first_index_of_libsvm_can_be_given(tmp_path):
    (tmp_path / "m.svm").write_bytes(b"1 2:1\n0 3:2\n")
    for first, width in (("0", 4), ("1", 3), ("auto", 3)):
        report = h5chunk.convert(tmp_path / "m.svm", tmp_path / f"{first}.h5", first_index=first)
        assert report.num_columns == width and ("--first-index 0" in str(report)) == (first == "auto")
    (tmp_path / "zero.svm").write_bytes(b"1 2:1\n0 0:2\n")
    with pytest.raises(SourceError, match=r"line 2: .*index:value, with an index of at least 1"):
        h5chunk.convert(tmp_path / "zero.svm", tmp_path / "x.h5", first_index="1")


def test_npy_of_a_version_with_long_headers(tmp_path):
    with (tmp_path / "m.npy").open("wb") as file:
        np.lib.format.write_array(file, np.eye(3), version=(2, 0))
    assert (dense(open_source(tmp_path / "m.npy", kind="npy")) == np.eye(3)).all()


def test_numbers_in_the_other_order_of_bytes(tmp_path):
    matrix = scipy.sparse.random(9, 5, 0.5, random_state=0, format="csr")
    np.savez(
        tmp_path / "m.npz",
        data=matrix.data.astype(">f4"),
        indices=matrix.indices.astype(">u2"),
        indptr=matrix.indptr.astype(">i8"),
        shape=np.array(matrix.shape, ">i4"),
        format=np.array("csr"),
    )
    assert (dense(open_source(tmp_path / "m.npz")) == matrix.toarray().astype("f4")).all()
    np.save(tmp_path / "m.npy", matrix.toarray().astype(">f8"))
    assert (dense(open_source(tmp_path / "m.npy", kind="npy")) == matrix.toarray()).all()


def test_unsigned_integers_as_mmwrite_stores_them(tmp_path):
    matrix = scipy.sparse.csr_matrix(np.array([[1, 0, 1 << 63], [0, 3, 0]], "u8"))
    scipy.io.mmwrite(tmp_path / "m.mtx", matrix)
    assert "unsigned-integer" in (tmp_path / "m.mtx").read_text().splitlines()[0]
    assert entries(open_source(tmp_path / "m.mtx"))[2].tolist() == [1, 1 << 63, 3]
    with pytest.raises(SourceError, match="row 0, column 2: value 9223372036854775808 is not exact"):
        h5chunk.convert(tmp_path / "m.mtx", tmp_path / "m.h5")
    (tmp_path / "m.mtx").write_text("%%MatrixMarket matrix coordinate unsigned-integer general\n1 1 1\n1 1 -2\n")
    with pytest.raises(SourceError, match="line 3: the value -2 is negative, but the values are unsigned"):
        h5chunk.convert(tmp_path / "m.mtx", tmp_path / "m.h5")


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_parts_of_a_matrix_without_its_format(tmp_path, form):
    """As np.savez of the attributes saves them; nothing is guessed if they do not show the format."""
    matrix = scipy.sparse.random(20, 12, 0.3, form, random_state=0)
    names = ("row", "col") if form == "coo" else ("indices", "indptr")
    parts = {name: getattr(matrix, name) for name in ("data", *names)}
    np.savez(tmp_path / "m.npz", **parts, shape=matrix.shape)
    assert find_kind(tmp_path / "m.npz").kind == "npz"
    assert (dense(open_source(tmp_path / "m.npz")) == matrix.toarray()).all()
    if form != "coo":
        for problem, broken in (
            ("but has no member 'shape': save the matrix with scipy.sparse.save_npz", parts),
            ("does not show whether it is CSR or CSC", {**parts, "shape": [len(matrix.indptr) - 1] * 2}),
        ):
            np.savez(tmp_path / "m.npz", **broken)
            with pytest.raises(SourceError, match=problem):
                h5chunk.convert(tmp_path / "m.npz", tmp_path / "m.h5")
        with pytest.raises(SourceError, match=r"look like the parts of a sparse matrix: save it with scipy"):
            h5chunk.convert(parts, tmp_path / "m.h5")


@pytest.mark.parametrize(
    ("text", "queries", "notes"),
    [
        ("3 qid:1 1:0.5 3:1\n# a comment\n2 qid:1 2:2\n1 qid:22 1:1\n", [1, 1, 22], ""),
        ("3 qid:7 1:1\n0 1:2\n1\n", [7, -1, -1], "2 rows without qid have -1"),
        ("3 1:1\n", None, ""),
    ],
)
def test_query_ids_of_svmlight_are_a_field(tmp_path, text, queries, notes):
    (tmp_path / "m.svm").write_text(text)
    report = h5chunk.convert(tmp_path / "m.svm", tmp_path / "m.h5", shuffle=False)
    assert ("qid" in report.fields) == (queries is not None) and notes in str(report)
    if queries is not None:
        dataset = h5chunk.ChunkDataset(tmp_path / "m.h5", fields=["X", "qid"])
        assert [int(dataset[i][1]) for i in range(3)] == queries


def test_a_query_id_that_is_no_number_is_named(tmp_path):
    (tmp_path / "m.svm").write_text("3 qid:1 1:1\n3 qid:a 1:1\n")
    with pytest.raises(SourceError, match=r"m.svm, line 2: 'qid:a' must be a whole number"):
        h5chunk.convert(tmp_path / "m.svm", tmp_path / "m.h5")
