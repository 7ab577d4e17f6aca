"""What a matrix claims is compared with what the file holds and with memory_bytes, before memory is taken."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse
from support.matrix_conversions import Source, run
from support.matrix_files import write_10x, write_h5ad
from support.open_source import open_source

import h5chunk
from h5chunk.errors import SourceError
from h5chunk.sources.matrix.block import MemoryLimit

pytest.importorskip("pyarrow")

MEMORY_BYTES = 32 << 20
MATRIX = scipy.sparse.random(30, 20, 0.3, "csr", random_state=0, data_rvs=lambda n: np.arange(n) % 9 + 1)
HUGE = (2_000_000_000, 10**12, 10**17)


def mtx(rows: int, columns: int, kind: str) -> bytes:
    size = f"{rows} {columns} 1"
    return f"%%MatrixMarket matrix coordinate {kind}\n{size}\n1 1{' 1' * ('pattern' not in kind)}\n".encode()


def npy(array: np.ndarray, **header: Any) -> bytes:
    """A .npy whose header says something else."""
    buffer = io.BytesIO()
    described = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **header}
    np.lib.format.write_array_header_2_0(buffer, described)
    return buffer.getvalue() + array.tobytes()


def npz(form: str, shape: tuple[int, int], indptr: np.ndarray | None = None, **replaced: bytes) -> bytes:
    """A matrix of one entry; ``indptr`` is not written out but packed."""
    one = np.zeros(1, np.int64)
    members = {"data": npy(one + 1), "format": npy(np.array(form)), "shape": npy(np.array(shape))}
    if form == "coo":
        members |= {"row": npy(one), "col": npy(one)}
    else:
        members |= {"indices": npy(one), "indptr": npy(np.array([0, 1]) if indptr is None else indptr)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in (members | replaced).items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def many_members() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number}.npy", b"")
        archive.writestr("format.npy", b"")
        archive.writestr("shape.npy", b"")
    return buffer.getvalue()


def ones_at_the_end(length: int) -> np.ndarray:
    indptr = np.zeros(length, np.int32)
    indptr[-1] = 1
    return indptr


def put(file: h5py.File, name: str, **dataset: Any) -> None:
    attributes = dict(file[name].attrs) if name in file else {}
    if name in file:
        del file[name]
    file.create_dataset(name, **dataset).attrs.update(attributes)


def text_column(file: h5py.File, name: str, count: int) -> None:
    """So many strings, of which the last has 250 bytes and the others none."""
    chunk = min(count, 1 << 16)
    put(file, name, shape=(count,), dtype=h5py.string_dtype(), chunks=(chunk,), compression="gzip")
    for start in range(0, count, chunk):
        file[name][start : start + chunk] = np.full(min(chunk, count - start), "", object)
    file[name][count - 1] = "x" * 250


def h5ad_names(file: h5py.File) -> None:
    """A million rows whose names take little in the file and 256 MB in memory."""
    count = 1 << 20
    put(file, "X/indptr", data=ones_at_the_end(count + 1), compression="gzip")
    for part in ("data", "indices"):
        put(file, f"X/{part}", data=np.ones(1, np.int32))
    file["X"].attrs["shape"] = np.array([count, 20])
    text_column(file, "obs/_index", count)


def h5ad_many_fields(file: h5py.File) -> None:
    h5ad_names(file)
    put(file, "obs/_index", data=np.zeros(1 << 20, "S1"), compression="gzip")
    for number in range(9):
        put(file, f"obs/field{number}", data=np.zeros(1 << 20), compression="gzip")
    file["obs"].attrs["column-order"] = np.array([f"field{number}" for number in range(9)], "S8")


def h5ad_chunks(file: h5py.File) -> None:
    """A chunk of 128 MiB that is packed into a few bytes."""
    put(file, "X/data", shape=(MATRIX.nnz,), maxshape=(None,), dtype="f8", chunks=(1 << 24,), compression="gzip")
    file["X/data"][:] = MATRIX.data


def claimed_shape(file: h5py.File, shape: tuple[int, int]) -> None:
    file["X"].attrs["shape"] = np.array(shape)


def claimed_dense(file: h5py.File, shape: tuple[int, int]) -> None:
    put(file, "X", shape=shape, dtype="u1", chunks=(16, 16), compression="gzip")


def claimed_tenx(file: h5py.File, shape: tuple[int, int]) -> None:
    put(file, "matrix/shape", data=np.array(shape[::-1]))


def write_hdf5(folder: Path) -> dict[str, dict[str, Any]]:
    """HDF5 files that claim much; their options, by their names."""
    changes: list[tuple[str, Any]] = [
        ("names.h5ad", h5ad_names),
        ("fields.h5ad", h5ad_many_fields),
        ("chunks.h5ad", h5ad_chunks),
    ]
    for number, size in enumerate(HUGE[:2]):
        for place, shape in enumerate([(size, 20), (30, size), (size, size)]):
            tag = f"{number}{place}"
            changes.append((f"{tag}.h5ad", partial(claimed_shape, shape=shape)))
            changes.append((f"{tag}-dense.h5ad", partial(claimed_dense, shape=shape)))
            changes.append((f"{tag}.h5", partial(claimed_tenx, shape=shape)))
    for name, change in changes:
        (write_h5ad if name.endswith(".h5ad") else write_10x)(folder / name, MATRIX)
        with h5py.File(folder / name, "r+") as file:
            change(file)
    return {name: {"min_column_count": 1} for name, _ in changes}


def crafted() -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Small files that claim much: name, bytes, options."""
    for number, size in enumerate(HUGE):
        shapes = [(size, 3), (3, size), (size, size)]
        for place, shape in enumerate(shapes):
            tag = f"{number}{place}"
            for kind in ("real general", "pattern general", "integer symmetric"):
                name = f"{tag}-{kind.replace(' ', '-')}"
                yield f"{name}.mtx", mtx(*shape, kind), {"min_column_count": 1}
                yield f"{name}.mtx.gz", gzip.compress(mtx(*shape, kind)), {"min_column_count": 1}
            for form in ("coo", "csr", "csc"):
                yield f"{tag}-{form}.npz", npz(form, shape), {"min_column_count": 1}
            yield f"{tag}-dense.mtx", mtx(*shape, "real general"), {"dense": True}
            yield f"{tag}-turned.mtx", mtx(*shape, "real general"), {"transpose": True, "min_column_count": 1}
            yield f"{tag}.npy", npy(np.ones(1), shape=shape), {}
        yield f"{number}-rows.npy", npy(np.empty(0), shape=(size, 0)), {}
        yield f"{number}-columns.npy", npy(np.empty(0), shape=(0, size)), {}
        yield f"{number}.svm", b"1 %d:1\n" % size, {"min_column_count": 1}
        yield f"{number}-dense.svm", b"1 %d:1\n" % size, {"dense": True}
        yield f"{number}-legal.svm", b"1 %d:1\n" % size, {}
        yield f"{number}-legal.mtx", mtx(3, size, "real general"), {}
        yield f"{number}-legal.csv", b"%d,%d,1\n-%d,5,2\n" % (size, size, size), {}
        entries = f"%%MatrixMarket matrix coordinate real general\n9 9 {size}\n1 1 1\n".encode()
        yield f"{number}-entries.mtx", entries, {}
        yield f"{number}-entries.mtx.gz", gzip.compress(entries), {}
    yield "indptr.npz", npz("csr", (1 << 24, 3), ones_at_the_end((1 << 24) + 1)), {}
    yield "indptr-csc.npz", npz("csc", (3, 1 << 24), ones_at_the_end((1 << 24) + 1)), {"min_column_count": 1}
    yield "members.npz", many_members(), {}
    header = b"\x93NUMPY\x02\x00" + (1 << 24).to_bytes(4, "little") + b" " * (1 << 24)
    yield "header.npz", npz("csr", (1, 1), data=header), {}
    yield "header.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{'descr': '<f8'", {}
    yield "item.npz", npz("csr", (1, 1), data=npy(np.ones(1), descr="|S2147483647")), {}
    yield "rows.svm.gz", gzip.compress(b"1\n" * (8 << 20)), {}
    yield "ids.csv.gz", gzip.compress(b"".join(b"%d,1,1\n" % i for i in range(500_000))), {}
    names = b"".join(b"%d,1,1\n" % i for i in range(100_000))
    yield "wide.csv.gz", gzip.compress(names + b"x" * 256 + b",1,1\n"), {"columns": ["0:str", "1", "2"]}
    yield "alike.csv.gz", gzip.compress(b"1,1,1\n" * (2 << 20)), {"duplicates": "sum", "clip": True}
    yield "line.svm.gz", gzip.compress(b"1" + b" 1:1" * (8 << 20)), {}


CHILD = """
import json, resource, sys
from pathlib import Path
import h5chunk
from h5chunk.errors import H5ChunkError

folder, options = Path(sys.argv[1]), json.loads(Path(sys.argv[1], "options").read_text())
h5chunk.convert(folder / "good.csv", folder / "out.h5")  # starts the threads of all libraries
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
said = {}
for name, given in options.items():
    try:
        h5chunk.convert(folder / name, folder / "out.h5", overwrite=True, **given)
        said[name] = ""
    except H5ChunkError as error:
        said[name] = str(error)
    except BaseException as error:
        said[name] = f"TRACEBACK {type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_no_claim_takes_memory(tmp_path: Path) -> None:
    """More than a hundred files that claim much, in a process that may take 400 MiB more than it has."""
    options: dict[str, dict[str, Any]] = {}
    for name, data, given in crafted():
        (tmp_path / name).write_bytes(data)
        options[name] = {**given, "format": "npy"} if name.endswith(".npy") else given
    options |= write_hdf5(tmp_path)
    (tmp_path / "allowed.mtx").write_bytes(mtx(HUGE[0], 3, "real general"))
    options["allowed.mtx"] = {"memory_bytes": 1 << 40}
    assert len(options) > 150
    (tmp_path / "good.csv").write_text("1,2,3\n")
    (tmp_path / "options").write_text(
        json.dumps({name: {"memory_bytes": MEMORY_BYTES, **given} for name, given in options.items()})
    )
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.keys() == options.keys()
    allowed = said.pop("allowed.mtx")
    assert not {name: text for name, text in said.items() if "TRACEBACK" in text or "the system has less free" in text}
    assert {name for name, text in said.items() if not text} == {name for name in options if "legal" in name}
    refused = [
        text
        for text in said.values()
        if "over the limit of 33,554,432 bytes (32.0 MiB): if this is right, allow" in text
    ]
    assert len(refused) > 70
    assert "the system has less free memory: lower the limit" in allowed


def test_the_error_says_what_it_would_take(tmp_path: Path) -> None:
    (tmp_path / "m.mtx").write_bytes(mtx(HUGE[0], 3, "real general"))
    message = (
        r"m\.mtx: claims 2,000,000,000 rows and 3 columns, which take 112,000,000,000 bytes \(104\.3 GiB\) of "
        r"memory, over the limit of 1,073,741,824 bytes \(1\.0 GiB\): if this is right, allow more "
        r"\(--memory-bytes 105G\)"
    )
    for how in (h5chunk.convert, partial(h5chunk.convert, dry_run=True)):
        with pytest.raises(SourceError, match=message):
            how(tmp_path / "m.mtx", tmp_path / "x.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["m.mtx"]


def test_empty_rows_are_legal_where_they_fit(tmp_path: Path) -> None:
    (tmp_path / "m.mtx").write_bytes(mtx(300_000, 3, "real general"))
    with pytest.raises(SourceError, match=r"--memory-bytes 17M\)"):
        h5chunk.convert(tmp_path / "m.mtx", tmp_path / "x.h5", memory_bytes=16 << 20)
    assert h5chunk.convert(tmp_path / "m.mtx", tmp_path / "x.h5", memory_bytes=17 << 20).num_rows == 300_000


@pytest.mark.parametrize(("ids", "memory_bytes"), [(False, 11 << 20), (True, 22 << 20)])
def test_rows_take_no_more_than_is_said(tmp_path: Path, ids: bool, memory_bytes: int) -> None:
    """The least memory that lets rows pass is about what they take: empty ones, or ids of one entry each."""
    count = 200_000
    num_entries = count if ids else 3
    source = Source(np.arange(num_entries), np.zeros(num_entries, int), None, (count, 1), count // 50, ids)
    with pytest.raises(SourceError, match="claims"):
        run(source, tmp_path / "x.h5", memory_bytes=memory_bytes - (1 << 20))
    tracemalloc.start()
    run(source, tmp_path / "x.h5", memory_bytes=memory_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < memory_bytes * 1.25


def test_what_a_part_of_the_source_takes_is_taken_for_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_bytes(b"".join(b"%d,1,1\n" % i for i in range(1_000_000, 1_600_000)))
    with pytest.raises(SourceError, match=r"claims \d+,\d+ rows and 1 column in the first \d+% of the file") as refusal:
        h5chunk.convert(tmp_path / "r.csv", tmp_path / "x.h5", memory_bytes=32 << 20)
    enough = int(str(refusal.value).rpartition("--memory-bytes ")[2].removesuffix("M)"))
    assert 60 <= enough <= 68
    assert h5chunk.convert(tmp_path / "r.csv", tmp_path / "x.h5", memory_bytes=enough << 20).num_rows == 600_000


def test_a_wide_row_of_a_dense_h5ad_is_read_in_parts(tmp_path: Path) -> None:
    """One row, contiguous, of 32 MiB in 1 MiB of memory."""
    write_h5ad(tmp_path / "m.h5ad", np.zeros((1, 2), np.float32))
    with h5py.File(tmp_path / "m.h5ad", "r+") as file:
        del file["var"], file["X"]
        file["X"] = np.arange(8 << 20, dtype=np.float32).reshape(1, -1) % 2
    source = open_source(tmp_path / "m.h5ad")
    tracemalloc.start()
    assert sum(len(block) for block, _ in source.blocks(1 << 20)) == 4 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_what_is_kept_counts(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path / "x", 100)
    limit.keep("5 names", 60)
    limit.check("4 rows", 40)
    with pytest.raises(SourceError, match=r"claims 5 rows, .* 50 bytes of memory in addition to 60 bytes of names"):
        limit.check("5 rows", 50)
