"""Broken inputs: each is an error of ours that says what is wrong, and none is a crash."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pytest
import scipy.sparse
from support.faults import small
from support.matrix_files import entries, write_10x, write_h5ad
from support.open_source import open_source

from h5chunk.errors import SourceError
from h5chunk.store.hdf5.strings import POINTER, FileBytes, read_strings

RNG = np.random.default_rng(0)
RATINGS = b"userId,movieId,rating\n" + b"1,2,3\n" * 5000
MTX = b"%%MatrixMarket matrix coordinate "
REAL = MTX + b"real general\n"


def npz(drop: str = "", store: bool = False, **members: Any) -> bytes:
    """A .npz of 3 rows and 4 columns with some members changed; bytes are the whole .npy."""
    base = {
        "data": np.array([1.0, 2, 3]),
        "indices": np.array([0, 3, 1], np.int32),
        "indptr": np.array([0, 2, 2, 3], np.int32),
        "shape": np.array([3, 4]),
        "format": np.array(b"csr"),
    }
    base |= members
    base.pop(drop, None)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED if store else zipfile.ZIP_DEFLATED) as archive:
        for name, value in base.items():
            archive.writestr(f"{name}.npy", value if isinstance(value, bytes) else npy(value))
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def coo(**members: Any) -> bytes:
    base = {"row": np.array([0, 1, 2]), "col": np.array([3, 0, 1]), "format": np.array("coo")}
    return npz(**{**base, **members})


def claiming(size: int) -> bytes:
    """A .npz whose directory says that indices unpack to this size."""
    data = bytearray(npz())
    at = data.index(b"indices.npy", data.index(b"PK\x01\x02")) - 46
    data[at + 24 : at + 28] = size.to_bytes(4, "little")
    return bytes(data)


def overlapping() -> bytes:
    """A .npz whose directory says that indices take more bytes than the file has."""
    data = bytearray(npz())
    at = data.index(b"indices.npy", data.index(b"PK\x01\x02")) - 46
    data[at + 20 : at + 24] = len(data).to_bytes(4, "little")
    return bytes(data)


def flipped(data: bytes) -> bytes:
    """One byte in the middle changed."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


TEXT: dict[str, tuple[str, bytes, str]] = {
    "empty": ("r.csv", b"", r"is empty \(0 bytes\)"),
    "blanks": ("r.csv", b" \n\n", "contains only blanks"),
    "comments": ("r.csv", b"# one\n# two\n", "has no line of data"),
    "header only": ("r.csv", b"userId,movieId,rating\n", "no line of data below its header"),
    "rubbish": (
        "r.csv",
        RNG.bytes(5000),
        "zero byte: it is not text, or damaged, or in another encoding, such as --encoding utf-16-le",
    ),
    "rubbish later": ("r.csv", RATINGS + RATINGS[22:] * 20 + b"\n1\x002,3,4\n", "line 105003: contains a zero byte"),
    "rubbish without zeros": ("r.csv", RATINGS + b"\xff\x80,\xfe\n" * 9, "line 5002: 2 columns where"),
    "return and quote": ("r.csv", b'1,2,3\n1,"a"\r2,3\n1,2,3\n', "line 2: contains a carriage return"),
    "old Macintosh": ("r.csv", b"1,2,3\r4,5,6\r", "end with carriage returns"),
    "HTML": ("r.csv", b"<!DOCTYPE html>\n<html>\n", "this is a web page or XML"),
    "duplicate header": ("r.csv", b"userId,movieId,movieId\n1,2,3\n", "line 1: two columns are called 'movieId'"),
    "one column": ("r.csv", b"1\n2\n", "line 1: only one column"),
    "long id": ("r.csv", b"a,b,1\n" * 3 + b"a," + b"x" * 257 + b",1\n", "line 4: column takes 257 bytes"),
    "cut gz": ("r.csv.gz", gzip.compress(RNG.bytes(9000).hex().encode())[:-900], "cut short: its gzip stream"),
    "flipped gz": ("r.csv.gz", flipped(gzip.compress(RATINGS)), "gzip stream is damaged"),
    "gz of rubbish": ("r.csv.gz", gzip.compress(bytes(10)), "line 1: contains a zero byte"),
    "cut bzip2": ("r.csv.bz2", bz2.compress(RATINGS)[:-9], "cut short: its bzip2 stream"),
    "cut xz": ("r.csv.xz", lzma.compress(RATINGS)[:-9], "cut short: its xz stream"),
    "flipped xz": ("r.csv.xz", flipped(lzma.compress(RATINGS)), "xz stream is damaged"),
    "cut zstd": ("r.csv.zst", pyarrow.compress(RATINGS, "zstd", asbytes=True)[:-9], "cannot be read: Truncated"),
    "empty mtx": ("m.mtx", b"\n", "contains only blank"),
    "no banner": ("m.mtx", b"3 3 1\n1 1 1\n", "line 1: must be '%%MatrixMarket"),
    "dense": ("m.mtx", b"%%MatrixMarket matrix array real general\n1 1\n1\n", "layout is 'array', but only coordinate"),
    "complex": ("m.mtx", MTX + b"complex general\n1 1 1\n1 1 1 0\n", "its values are 'complex'"),
    "hermitian": (
        "m.mtx",
        MTX + b"real hermitian\n1 1 1\n1 1 1\n",
        "its symmetry is 'hermitian', but only general, symmetric or skew-symmetric are supported",
    ),
    "no size": ("m.mtx", REAL + b"% more\n", "ends before the line with the numbers"),
    "bad size": ("m.mtx", REAL + b"3 -3 1\n1 1 1\n", "line 2: must be numbers of rows"),
    "huge claim": ("m.mtx", REAL + b"9 9 99999999999\n1 1 1\n", "line 2: claims 99999999999 entries but the file has"),
    "not square": ("m.mtx", MTX + b"real symmetric\n2 3 1\n1 1 1\n", "is symmetric, but has 2 rows and 3 columns"),
    "cut mtx": ("m.mtx", REAL + b"9 9 3\n1 1 1\n2 2 2\n", "cut short: 2 entries but line 2 claims 3"),
    "too many": ("m.mtx", REAL + b"9 9 1\n1 1 1\n2 2 2\n", "more entries than the 1"),
    "row 0": ("m.mtx", REAL + b"9 9 2\n\n1 1 1\n0 1 1\n", "line 5: row 0 is out of range 1 to 9: '0 1 1'"),
    "column 10": ("m.mtx", REAL + b"9 9 1\n1 10 1\n", "line 3: column 10 is out of range 1 to 9"),
    "negative": ("m.mtx", REAL + b"9 9 1\n-1 1 1\n", "row -1 is out of range"),
    "mtx NaN": ("m.mtx", REAL + b"9 9 1\n7 8 NaN\n", "line 3: the value at row 7, column 8 is nan"),
    "real in integer": ("m.mtx", MTX + b"integer general\n9 9 1\n1 1 2.5\n", "must be row, column and a value .int64"),
    "too few words": ("m.mtx", REAL + b"9 9 2\n1 1 1\n1 1\n", "line 4: must be row, column and a value .* is '1 1'"),
    "both triangles": ("m.mtx", MTX + b"real symmetric\n2 2 2\n1 2 1\n2 1 1\n", "both sides of the diagonal"),
    "skew diagonal": (
        "m.mtx",
        MTX + b"real skew-symmetric\n2 2 1\n1 1 1\n",
        "line 3: is skew-symmetric, so that the diagonal",
    ),
    "no label": ("m.svm", b"1 1:2\n3:4\n", "line 2: must start with a label"),
    "label NaN": ("m.svm", b"nan 1:2\n", "line 1: must start with a label that is a finite number"),
    "many labels": ("m.svm", b"1,2 1:2\n", "a finite number: '1,2 1:2'"),
    "no pair": ("m.svm", b"1 1:2 5\n", "'5' must be index:value"),
    "three parts": ("m.svm", b"1 1:2:3\n", "column '1' has the value '2:3'"),
    "negative index": ("m.svm", b"1 1:2\n1 -3:2\n", "line 2: '-3:2' must be index:value, with an index of at least 1"),
    "index in words": ("m.svm", b"1 x:2\n", "'x:2' must be index:value"),
    "svm NaN": ("m.svm", b"1 4:nan\n", "column '4' has the value 'nan', which is not a finite number"),
    "label inf": ("m.svm", b"1 1:2\n\n-1e999 1:2\n", "line 3: must start with a label"),
    "label like Python": ("m.svm", b"1_0 1:2\n", "finite number: '1_0 1:2'"),
    "svm inf": ("m.svm", b"1 4:1e999\n", "column '4' has the value '1e999'"),
    "svm comments": ("m.svm", b"# one\n", "has no rows"),
}

ARRAYS: dict[str, tuple[str, bytes, str]] = {
    "index out of range": ("m.npz", npz(indices=np.array([0, 4, 1])), "column 4 in row 0 is out of range: there are 4"),
    "negative index": ("m.npz", npz(indices=np.array([0, 3, -1])), "column -1 in row 2 is out of range"),
    "huge index": ("m.npz", npz(indices=np.array([0, 3, 1 << 63], np.uint64)), "column 9223372036854775808 in row 2"),
    "csc row": ("m.npz", npz(format=np.array("csc"), shape=np.array([3, 3])), "row 3 in column 0 is out of range"),
    "indptr falls": ("m.npz", npz(indptr=np.array([0, 3, 2, 3])), "indptr falls from 3 to 2 at row 1"),
    "indptr starts": ("m.npz", npz(indptr=np.array([1, 2, 2, 3])), "indptr starts with 1"),
    "indptr negative": ("m.npz", npz(indptr=np.array([0, -2, 2, 3])), "indptr falls from 0 to -2"),
    "indptr overshoots": (
        "m.npz",
        npz(indptr=np.array([0, 2, 9, 9])),
        "indptr says that row 1 ends at entry 9, but there are only 3",
    ),
    "indptr ends early": ("m.npz", npz(indptr=np.array([0, 1, 1, 2])), "indptr ends at 2 but .*indices has 3"),
    "indptr too long": ("m.npz", npz(indptr=np.array([0, 2, 2, 3, 3])), "indptr has 5 numbers but must have 4"),
    "float indptr": ("m.npz", npz(indptr=np.array([0.0, 2, 2, 3])), "indptr has the type float64 but must be whole"),
    "float indices": ("m.npz", npz(indices=np.array([0.0, 1, 2])), "indices has the type float64"),
    "lengths": ("m.npz", npz(data=np.array([1.0, 2])), "data has 2 values but .*indices has 3 numbers"),
    "objects": ("m.npz", npz(data=np.array([1, None, "x"], object)), "data contains Python objects"),
    "pickled format": ("m.npz", npz(format=np.array(["csr"], object)), "format contains Python objects"),
    "complex": ("m.npz", npz(data=np.array([1j, 2, 3])), "data holds complex numbers"),
    "dates": ("m.npz", npz(data=np.array([1, 2, 3], "M8[s]")), "data has the type datetime64"),
    "words": ("m.npz", npz(data=np.array(["a", "b", "c"])), "data has the type <U1"),
    "NaN": ("m.npz", npz(data=np.array([1, 2, np.nan])), "the value at row 2, column 1 is nan"),
    "inf": ("m.npz", npz(data=np.array([1, np.inf, 1], "f4")), "the value at row 0, column 3 is inf"),
    "two dimensions": ("m.npz", npz(data=np.ones((3, 1))), "data has 2 dimensions"),
    "shape of three": ("m.npz", npz(shape=np.array([3, 4, 5])), "'shape' is .3, 4, 5. but must be two"),
    "negative shape": ("m.npz", npz(shape=np.array([-3, 4])), "'shape' is .-3, 4."),
    "bsr": ("m.npz", npz(format=np.array("bsr")), "format is 'bsr' but must be csr, csc or coo"),
    "no indptr": ("m.npz", npz(drop="indptr"), "has no member 'indptr', which format csr needs"),
    "no npy": ("m.npz", npz(data=b"rubbish" * 9), "data is not a .npy array"),
    "npy header": (
        "m.npz",
        npz(data=npy(np.ones(3)).replace(b"descr", b"[[[[[")),
        "data is not a .npy array: Header does not",
    ),
    "short member": ("m.npz", npz(data=npy(np.ones(3))[:-1]), "data claims 24 bytes but the archive has 23"),
    "long member": ("m.npz", npz(data=npy(np.ones(3)) + b"x"), "data claims 24 bytes but the archive has 25"),
    "impossible ratio": (
        "m.npz",
        claiming(1 << 30),
        "'indices.npy' claims that .* bytes decompress to 1073741824, which is impossible",
    ),
    "overlapping": (
        "m.npz",
        overlapping(),
        r"its members claim \d+ bytes, but the file has \d+, so they overlap",
    ),
    "cut zip": ("m.npz", npz()[:-30], "damaged, or not an .npz"),
    "flipped zip": ("m.npz", npz(store=True).replace(npy(np.array([1.0, 2, 3]))[-16:], bytes(16)), "Bad CRC-32"),
    "coo row": ("m.npz", coo(row=np.array([0, 1, 3])), "row 3 in entry 2 is out of range: there are 3 rows"),
    "coo column": ("m.npz", coo(col=np.array([0, -1, 2])), "column -1 in row 1 is out of range"),
    "coo lengths": ("m.npz", coo(col=np.array([0, 1])), "col has 2 numbers but .*row has 3"),
    "npy objects": ("m.npy", npy(np.array([[None]], object)), "contains Python objects"),
    "npy one dimension": ("m.npy", npy(np.ones(3)), "has 1 dimensions but a matrix has two"),
    "npy cut": ("m.npy", npy(np.ones((3, 3)))[:-1], "has 199 bytes but its shape .3, 3. needs 200"),
    "npy claim": ("m.npy", npy(np.ones((3, 3))).replace(b"(3, 3), ", b"(9999, 999999), "), "no .npy array|needs"),
    "npy NaN": ("m.npy", npy(np.array([[0, 1], [np.nan, 0]])), "the value at row 1, column 0 is nan"),
    "npy complex": ("m.npy", npy(np.ones((2, 2), complex)), "holds complex numbers"),
    "npy text": ("m.npy", npy(np.array([["a"]])), "has the type <U1 but values"),
    "npy version": ("m.npy", b"\x93NUMPY\x09\x00" + bytes(90), "version .9, 0. of the .npy format"),
}
CASES = {f"text: {name}": case for name, case in TEXT.items()} | {
    f"array: {name}": case for name, case in ARRAYS.items()
}


@pytest.mark.parametrize("case", CASES)
def test_broken_files_are_named_errors(tmp_path, case):
    name, data, message = CASES[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=f"(?s)^{tmp_path}/{name}.*({message})"):
        entries(open_source(tmp_path / name, kind={"npz": "npz", "npy": "npy"}.get(name[-3:])), 1 << 16)


def test_indices_out_of_proportion_are_refused(tmp_path, monkeypatch):
    zeros = np.zeros(1 << 18, np.int32)
    members = {"data": np.ones(1 << 18), "indices": zeros, "indptr": np.array([0, 0, 0, 1 << 18])}
    (tmp_path / "m.npz").write_bytes(npz(**members))
    assert len(entries(open_source(tmp_path / "m.npz"))[0]) == 1 << 18
    small(monkeypatch, free_bytes=1 << 19)
    with pytest.raises(
        SourceError, match=r"'indices.npy' unpacks to 1048704 bytes, \d+ times .* implausible for indices"
    ):
        open_source(tmp_path / "m.npz")


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    small(monkeypatch, max_line_bytes=1 << 20)
    (tmp_path / "r.csv.gz").write_bytes(gzip.compress(b"1,2,3\n4,5," + b"6" * (2 << 20)))
    with pytest.raises(SourceError, match="line 2: longer than the limit of 1048576 bytes"):
        entries(open_source(tmp_path / "r.csv.gz"))


def test_each_has_a_message_of_its_own():
    messages = [message for _, _, message in CASES.values()]
    assert len(set(messages)) == len(messages) > 80


# HDF5: each breaks a good file
def make_h5ad(path: Path) -> Path:
    matrix = scipy.sparse.random(20, 10, 0.3, random_state=0, format="csr")
    return write_h5ad(path, matrix)


def put(file: h5py.File, name: str, value: Any, **options: Any) -> None:
    """Another dataset in the place of one."""
    attributes = dict(file[name].attrs) if name in file else {}
    if name in file:
        del file[name]
    dataset = file.create_dataset(name, data=value, **options)
    dataset.attrs.update(attributes)


def link(file: h5py.File, name: str, target: Any) -> None:
    del file[name]
    file[name] = target


def external(file: h5py.File) -> None:
    del file["X/data"]
    file.create_dataset("X/data", (60,), "f8", external=[("/etc/passwd", 0, 480)])


def virtual(file: h5py.File) -> None:
    del file["X/data"]
    layout = h5py.VirtualLayout((60,), "f8")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (60,))
    file.create_virtual_dataset("X/data", layout)


def unwritten(file: h5py.File) -> None:
    del file["X/data"]
    file.create_dataset("X/data", (60,), "f8", chunks=(10,))


def huge(file: h5py.File) -> None:
    for name in ("data", "indices"):
        del file[f"X/{name}"]
        file.create_dataset(f"X/{name}", (1 << 40,), "i4", chunks=(1 << 20,), compression="gzip")


def short_chunk(file: h5py.File) -> None:
    import zlib

    del file["X/data"]
    dataset = file.create_dataset("X/data", (60,), "f8", chunks=(60,), compression="gzip")
    dataset.id.write_direct_chunk((0,), zlib.compress(bytes(16)))


def long_chunk(file: h5py.File) -> None:
    import zlib

    short_chunk(file)
    file["X/data"].id.write_direct_chunk((0,), zlib.compress(bytes(1 << 20)))


def unzippable_chunk(file: h5py.File) -> None:
    short_chunk(file)
    file["X/data"].id.write_direct_chunk((0,), b"rubbish")


def unknown_filter(file: h5py.File) -> None:
    del file["X/data"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((60,))
    plist.set_filter(4242, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file["X"].id, b"data", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((60,)), plist)
    file["X/data"].id.write_direct_chunk((0,), bytes(480))


def bad_checksum(file: h5py.File) -> None:
    put(file, "X/data", np.ones(60), fletcher32=True, chunks=(60,))
    file["X/data"].id.write_direct_chunk((0,), bytes(480) + b"abcd")


def categorical(file: h5py.File, code: int) -> None:
    file["obs"].create_group("c").attrs["encoding-type"] = "categorical"
    file["obs/c/codes"] = np.full(20, code, np.int8)
    file["obs/c/categories"] = ["a", "b"]
    file["obs"].attrs["column-order"] = ["c"]


def changed(name: str, index: int, value: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[name][index] = value

    return change


H5AD: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "soft link": (
        lambda f: link(f, "X/data", h5py.SoftLink("/obs/_index")),
        "'X/data' is a soft link to '/obs/_index'",
    ),
    "soft linked X": (lambda f: link(f, "X", h5py.SoftLink("/obs")), "'X' is a soft link to '/obs'"),
    "external link": (
        lambda f: link(f, "X/data", h5py.ExternalLink("a.h5", "x")),
        "'X/data' is an external link to 'x'",
    ),
    "external storage": (external, "'X/data' has its values in another file, '/etc/passwd'"),
    "virtual dataset": (virtual, "'X/data' is a view of other files, such as '/tmp/other.h5'"),
    "never written": (unwritten, "X/data: 6 of its chunks were never written"),
    "huge claim": (huge, "'X/data' claims 4.0 TiB, but only 0 bytes were ever written"),
    "short chunk": (short_chunk, "X/data', chunk 0 is damaged .gzip gives 16 bytes, but 480 are expected"),
    "long chunk": (long_chunk, "chunk 0 is damaged .gzip: does not decode into 480 bytes"),
    "rubbish chunk": (unzippable_chunk, "chunk 0 is damaged .gzip: does not decode into 480 bytes"),
    "bad checksum": (bad_checksum, "chunk 0 is damaged .fletcher32: the checksum of 480 bytes is 00000000, but"),
    "unknown filter": (unknown_filter, "compressed with filter 4242 .*: rewrite it with another filter"),
    "words for values": (lambda f: put(f, "X/data", ["a"] * 60), "X/data has the type .* but values must be"),
    "complex values": (lambda f: put(f, "X/data", np.ones(60, complex)), "X/data holds complex numbers"),
    "compound values": (lambda f: put(f, "X/data", np.zeros(60, "i4,f4")), "X/data has the type .* but values must be"),
    "two dimensions": (lambda f: put(f, "X/data", np.ones((60, 1))), "must have 1 dimensions"),
    "no indices": (lambda f: f.__delitem__("X/indices"), "has no 'indices'"),
    "shorter data": (lambda f: put(f, "X/data", np.ones(59)), "data has 59 values but .*indices has 60"),
    "float indices": (lambda f: put(f, "X/indices", np.ones(60)), "indices has the type float64"),
    "index": (changed("X/indices", 59, 10), "X/indices: column 10 in row .* is out of range: there are 10"),
    "indptr": (changed("X/indptr", 0, 1), "X/indptr starts with 1"),
    "NaN": (changed("X/data", 0, np.nan), "X/data: the value at row 0, column . is nan"),
    "encoding": (lambda f: f["X"].attrs.__setitem__("encoding-type", "bsr"), "X: has AnnData's encoding 'bsr'"),
    "shape": (lambda f: f["X"].attrs.__setitem__("shape", [20, 10, 3]), "'shape' must be two numbers"),
    "no shape": (lambda f: f["X"].attrs.__delitem__("shape"), "has no attribute 'shape'"),
    "rows": (lambda f: f["X"].attrs.__setitem__("shape", [21, 10]), "indptr has 21 numbers but must have 22"),
    "names": (lambda f: put(f, "obs/_index", np.array([b"a"] * 19)), "obs/_index: has 19 values but the matrix has 20"),
    "long names": (lambda f: put(f, "obs/_index", ["x" * 257] * 20), "string 0 has 257 bytes, but the limit is 256"),
    "no X": (lambda f: f.__delitem__("X"), "no matrix 'X'; it has no matrices"),
    "codes": (lambda f: categorical(f, 2), "code 2 of row 0 is out of range for 2"),
    "negative codes": (lambda f: categorical(f, -2), "code -2 of row 0 is out of range for 2"),
    "field": (
        lambda f: (put(f, "obs/n", np.arange(3)), f["obs"].attrs.__setitem__("column-order", ["n"])),
        "obs/n: has 3 values but the matrix has 20",
    ),
}


@pytest.mark.parametrize("case", H5AD)
def test_broken_anndata(tmp_path, case):
    path = make_h5ad(tmp_path / "m.h5ad")
    with h5py.File(path, "a") as file:
        assert file["X/data"].shape == (60,)
        H5AD[case][0](file)
    with pytest.raises(SourceError, match=f"(?s)^{path}.*{H5AD[case][1]}"):
        entries(open_source(path))


def test_damaged_hdf5_never_crashes_and_mostly_tells(tmp_path):
    good = make_h5ad(tmp_path / "m.h5ad").read_bytes()
    rng = np.random.default_rng(1)
    told = 0
    for place in rng.integers(0, len(good), 150).tolist():
        data = bytearray(good)
        data[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "m.h5ad").write_bytes(bytes(data))
        try:
            entries(open_source(tmp_path / "m.h5ad"))
        except SourceError as error:
            assert str(error).startswith(str(tmp_path))
            told += 1
    for size in rng.integers(1, len(good), 20).tolist():
        (tmp_path / "m.h5ad").write_bytes(good[:size])
        with pytest.raises(SourceError):
            entries(open_source(tmp_path / "m.h5ad"))
    assert told


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (24, 481, "chunk 0 has 481 stored bytes, which is impossible for 480 bytes of data"),
        (24, 1 << 30, "claims 1073741824 stored bytes, but"),
        (48, 1 << 61, "beyond|damaged"),
    ],
)
def test_damaged_chunk_tables(tmp_path, where, value, message):
    path = make_h5ad(tmp_path / "m.h5ad")
    with h5py.File(path, "a") as file:
        put(file, "X/data", np.arange(60.0), chunks=(60,))
    data = bytearray(path.read_bytes())
    at = data.index(
        b"TREE\x01\x00\x01\x00" + b"\xff" * 16 + (480).to_bytes(4, "little")
    )  # the B-tree of the chunks: key 0 starts with the size, its child is the address
    width = 4 if where == 24 else 8
    data[at + where : at + where + width] = value.to_bytes(width, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(SourceError, match=f"^{path}.*({message})"):
        entries(open_source(path))


def test_damaged_string_heaps_are_errors(tmp_path):
    good = make_h5ad(tmp_path / "m.h5ad").read_bytes()
    at = good.index(b"GCOL")
    for place, value in ((at, b"X"), (at + 4, b"\x09"), (at + 8, b"\xff" * 8), (at + 24, b"\xff" * 8)):
        data = bytearray(good)
        data[place : place + len(value)] = value
        (tmp_path / "m.h5ad").write_bytes(bytes(data))
        try:
            names = open_source(tmp_path / "m.h5ad").row_names
            assert names.tolist() == [str(i).encode() for i in range(20)]  # another heap than that of the names
        except SourceError as error:
            assert str(error).startswith(str(tmp_path))


def heap(*texts: bytes) -> bytes:
    """A collection of a global heap."""
    objects = b"".join(
        struct.pack("<HH4xQ", number, 1, len(text)) + text + bytes(-len(text) % 8)
        for number, text in enumerate(texts, 1)
    )
    return struct.pack("<4sB3xQ", b"GCOL", 1, 16 + len(objects)) + objects


@pytest.mark.parametrize(
    ("pointers", "message"),
    [
        ([(2, 0, 1), (3, 0, 2), (0, 99, 9)], None),
        ([(3, 0, 1)], "element 0 is not in the heap"),
        ([(2, 0, 1), (2, 0, 7)], "element 1 is not in the heap"),
        ([(2, 0, 1), (1, 32, 1)], "its heap is damaged .collections overlap"),
        ([(2, 8, 1)], "its heap is damaged"),
        ([(2, 1 << 60, 1)], "beyond the end of the file"),
        ([(257, 0, 1)], "string 0 has 257 bytes, but the limit is 256"),
    ],
)
def test_heaps(tmp_path, pointers, message):
    inner = heap(b"z")
    (tmp_path / "heap").write_bytes(heap(b"ab", b"abc" if message is None or "overlap" not in message else inner))
    data = (tmp_path / "heap").read_bytes()
    if message and "overlap" in message:
        pointers[1] = (1, data.index(inner, 1), 1)
    with (tmp_path / "heap").open("rb") as file:
        source = FileBytes(file.fileno(), len(data), SourceError)
        if message is None:
            assert read_strings(source, np.array(pointers, POINTER)).tolist() == [b"ab", b"abc", b""]
            return
        with pytest.raises(SourceError, match=message):
            read_strings(source, np.array(pointers, POINTER))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.__delitem__("matrix/barcodes"), "no group with barcodes and indptr"),
        (
            lambda f: put(f, "matrix/shape", np.array([10, 20, 1])),
            "must be two numbers, those of features and barcodes",
        ),
        (lambda f: put(f, "matrix/shape", np.array([9, 20])), "column 9 in row|has 10 names but the matrix has 9"),
        (lambda f: put(f, "matrix/barcodes", np.array([b"a"] * 3)), "has 3 names but the matrix has 20 barcodes"),
        (lambda f: put(f, "matrix/shape", np.array([-1, 20])), "shape .* is invalid"),
    ],
)
def test_broken_tenx(tmp_path, change, message):
    path = write_10x(tmp_path / "m.h5", scipy.sparse.random(20, 10, 0.5, random_state=0, format="csr"))
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(SourceError, match=f"^{path}.*({message})"):
        entries(open_source(path, kind="10x"))


@pytest.mark.parametrize("name", ["m.csv", "m.npz", "m.npy", "m.h5ad", "m.mtx", "m.svm", "m.h5"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_no_regular_file(tmp_path, name, make):
    make(tmp_path / name)
    kind = {"svm": "libsvm", "h5": "10x"}.get(name[2:], name[2:])
    for form in (None, kind):
        with pytest.raises(SourceError, match=name):
            open_source(tmp_path / name, kind=form)


@pytest.mark.parametrize("kind", ["csv", "npz", "mtx", "libsvm", "h5ad", "10x", "npy"])
@pytest.mark.parametrize("data", [b"x", RNG.bytes(3000), b"\x89HDF\r\n\x1a\n" + bytes(3000), b"PK\x03\x04" + bytes(99)])
def test_the_wrong_format_is_an_error(tmp_path, kind, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(SourceError, match=f"^{tmp_path}/file"):
        entries(open_source(tmp_path / "file", kind=kind))
