"""Every layout that HDF5 allows is read as HDF5 reads it, by every reader, or refused: none gives other values."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch
from support import odd_files as odd
from support.loaders import loader_by
from support.odd_files import CASES, DIRECT, HDF5, PARTS, REFUSED, Case, make
from torch.utils.data import default_collate

from h5chunk import ChunkDataset, info, verify
from h5chunk.errors import FileError, H5ChunkError, OptionError
from h5chunk.plan.repack import MemoryShares
from h5chunk.store.hdf5 import chunk_table
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.rewrite.raw_rows import RawRows
from h5chunk.tools.repack.repack import repack


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that a field is read through HDF5."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def as_numpy(values: torch.Tensor) -> np.ndarray:
    """h5py reads bfloat16 as float32."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def loaded(path: Path, reader: str, trusted: bool = False) -> np.ndarray:
    with quiet():
        loader = loader_by(ChunkDataset(path, trusted=trusted), 8, shuffle=False, reader=reader)
    batches = [as_numpy(images) for (images,) in loader]
    return np.concatenate(batches) if batches else np.empty(0, np.uint16)


def data_set(path: Path, trusted: bool = False) -> np.ndarray:
    dataset = ChunkDataset(path, trusted=trusted)
    rows = np.arange(len(dataset))
    if not len(rows):
        return np.empty(0, np.uint16)
    [images] = default_collate(dataset.__getitems__(rows[::-1].tolist()))
    singly = np.stack([as_numpy(dataset[row][0]) for row in rows])
    np.testing.assert_array_equal(as_numpy(images)[::-1], singly)
    return singly


def rows_of(path: Path, trusted: bool = False) -> np.ndarray:
    """Read all rows from the last to the first."""
    reader = H5Reader(path, {"images": "images"}, trusted=trusted)
    rows = np.arange(reader.num_samples)[::-1].copy()
    out = read_rows(reader, "images", rows)
    if reader.fields["images"].dtype.names:
        return as_numpy(torch.from_numpy(out.view("i2")).view(torch.bfloat16))[::-1]
    return out[::-1]


def in_h5py(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        found = file["images"][()]
    return found.astype(found.dtype.newbyteorder("="))


def repacked(path: Path) -> np.ndarray:
    new = path.with_name("repacked.h5")
    repack(path, new)
    assert verify(new).ok
    return in_h5py(new)


def moved(path: Path) -> np.ndarray:
    """What repack moves: the bytes of elements, as a type of the same bytes."""
    with h5py.File(path) as file:
        dataset = file["images"]
        kind = np.empty(1, f"V{dataset.id.get_type().get_size()}").dtype
        out = np.empty(dataset.shape, kind)
        shares = MemoryShares(8 << 20, 1)
        with closing(RawRows(dataset, shares, path.parent)) as rows:
            rows.read(0, len(out), out.view(np.uint8).reshape(len(out), -1))
        with h5py.File(path.with_name("moved.h5"), "w") as new:
            h5py.h5d.create(new.id, b"images", dataset.id.get_type(), h5py.h5s.create_simple(dataset.shape)).write(
                h5py.h5s.ALL, h5py.h5s.ALL, out, dataset.id.get_type()
            )
    return in_h5py(path.with_name("moved.h5"))


def readers(trusted: bool) -> dict[str, Callable[[Path], np.ndarray]]:
    def by(reader: str) -> Callable[[Path], np.ndarray]:
        return lambda path: loaded(path, reader, trusted)

    return {name: by(name) for name in ("auto", "h5py", "direct")} | {
        "data set": lambda path: data_set(path, trusted),
        "rows": lambda path: rows_of(path, trusted),
    }


@pytest.mark.usefixtures("in_process")  # the tests below open such files in children
@pytest.mark.parametrize("case", [case for case in CASES if case.how != REFUSED], ids=str)
def test_what_is_read_is_what_h5py_reads(tmp_path, case):
    path = tmp_path / "a.h5"
    case.make(path)
    check(path, case)


def check(path: Path, case: Case) -> None:
    expected = in_h5py(path)
    all_readers = readers(case.trusted)
    for name, read in ({"rows": all_readers["rows"]} if expected.dtype.kind == "S" else all_readers).items():
        try:
            values = read(path)
        except OptionError as error:
            assert name == "direct" and case.how == HDF5, error
            assert "cannot be read directly" in str(error)
        else:
            assert name != "direct" or case.how == DIRECT
            assert values.dtype == expected.dtype and values.tobytes() == expected.tobytes(), name
    if not case.trusted:
        assert verify(path).ok
    if not case.trusted and expected.size and not is_unwritten(path):
        assert moved(path).tobytes() == expected.tobytes()


def is_unwritten(path: Path) -> bool:
    with h5py.File(path) as file:
        return not file["images"].id.get_storage_size()


FIRST = {case.row: case for case in reversed(CASES) if not case.trusted and case.variant != "undefined"}


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_repack_keeps_what_h5py_reads(tmp_path, case):
    path = tmp_path / "a.h5"
    case.make(path)
    try:
        values = repacked(path)
    except H5ChunkError:
        assert case.how == REFUSED
    else:
        expected = in_h5py(path)
        assert values.tobytes() == expected.tobytes() or (values.dtype == object and not values.any())


@pytest.mark.parametrize("case", [case for case in CASES if case.how == REFUSED], ids=str)
def test_what_is_refused_is_an_error_or_what_h5py_reads(tmp_path, case):
    path = tmp_path / "a.h5"
    case.make(path)
    for name, read in readers(case.trusted).items():
        try:
            values = read(path)
        except H5ChunkError:
            continue
        assert name not in ("auto", "direct")
        assert values.tobytes() == in_h5py(path).tobytes(), name


WRITE = """
import sys, h5py
with h5py.File(sys.argv[1], "r+", libver="latest") as file:
    if sys.argv[2] == "swmr":
        file.swmr_mode = True
    print("open", flush=True)
    sys.stdin.read()
"""
OPEN = "open for writing, or for SWMR, in another process or in this one"


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8)])
def test_repack_copies_other_data_sets_of_a_file_with_small_addresses(tmp_path, sizes):
    odd.make_small(tmp_path / "a.h5", sizes, odd.WHOLE)
    assert repacked(tmp_path / "a.h5").tobytes() == odd.DATA.tobytes()
    with h5py.File(tmp_path / "repacked.h5") as file:
        assert file["beside"][()].tolist() == list(range(100))


@contextmanager
def open_elsewhere(path: Path, how: str) -> Iterator[None]:
    """Another process has it open for writing."""
    command = [sys.executable, "-c", WRITE, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "open\n"
        yield
        writer.stdin.close()


@pytest.mark.parametrize("how", ["plain", "swmr"])
def test_a_file_that_another_process_writes_is_refused(tmp_path, how):
    make(tmp_path / "a.h5", file=odd.LATEST, **odd.WHOLE)
    with open_elsewhere(tmp_path / "a.h5", how):
        for read in (*readers(False).values(), repacked, verify, info):
            with pytest.raises(FileError, match=r"locked|a program is writing to the file"):
                read(tmp_path / "a.h5")
    check(tmp_path / "a.h5", Case("", "", DIRECT, make))


@pytest.mark.parametrize("mode", ["r+", "swmr writer", "swmr reader"])
def test_a_file_that_this_process_writes_is_refused(tmp_path, mode):
    """Its values may be in memory alone."""
    make(tmp_path / "a.h5", file=odd.LATEST, **odd.WHOLE)
    reads = mode == "swmr reader"
    with h5py.File(tmp_path / "a.h5", "r" if reads else "r+", libver="latest", swmr=reads) as file:
        if mode == "swmr writer":
            file.swmr_mode = True
        for read in (*readers(False).values(), repacked, verify, info):
            with pytest.raises(FileError, match="in this process: close it first"):
                read(tmp_path / "a.h5")
        if not reads:
            file["images"][...] = 3
    check(tmp_path / "a.h5", Case("", "", DIRECT, make))


def test_promises_list_these_layouts():
    text = (Path(__file__).parents[2] / "scripts" / "PROMISES.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    promised = {row[0]: row[1] for row in rows if len(row) == 2 and row[1] in (DIRECT, HDF5, REFUSED)}
    assert promised == {case.row: case.how for case in CASES} | {OPEN: REFUSED}
    assert len({(case.row, case.how) for case in CASES}) == len(promised) - 1


MATRIX = scipy.sparse.random(41, 30, 0.2, format="csr", random_state=0, data_rvs=lambda n: np.arange(n) % 99 + 1)
MATRICES = {
    "partial chunks left unfiltered, shuffle": {"chunks": (13,), "filters": [odd.SHUFFLE], "partial_plain": True},
    "partial chunks left unfiltered, gzip": {
        "chunks": (999,),
        "maxshape": (None,),
        "filters": [odd.GZIP],
        "partial_plain": True,
    },
    "scattered": {"chunks": (13,), "maxshape": (None,), "file": odd.LATEST},
    "user block": {"file": {"userblock_size": 512}},
    "big-endian": {"kind": h5py.h5t.STD_I32BE, "chunks": (13,), "filters": [odd.SHUFFLE]},
    "20 bits from bit 5": {"kind": odd.bits(h5py.h5t.STD_I32LE, 20, 5)},
    "n-bit": {"kind": odd.bits(h5py.h5t.STD_I32LE, 20, 5), "chunks": (13,), "filters": [odd.NBIT]},
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(tmp_path, name):
    path, new = tmp_path / "a.h5", tmp_path / "b.h5"
    odd.make_matrix(path, MATRIX, **MATRICES[name])
    repack(path, new)
    expected = MATRIX.toarray()
    for each in (path, new):
        assert verify(each).ok
        for reader in ("auto", "h5py"):
            np.testing.assert_array_equal(loaded(each, reader), expected)
        np.testing.assert_array_equal(np.stack([row.numpy() for (row,) in ChunkDataset(each)]), expected)


def test_repack_does_not_shuffle_by_pointers_of_unusual_bits(tmp_path):
    odd.make_matrix(tmp_path / "a.h5", MATRIX, kind=odd.bits(h5py.h5t.STD_I32LE, 20, 5))
    with pytest.raises(FileError, match="unusual precision"):
        repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True)


def test_info_says_that_partial_chunks_are_plain(tmp_path):
    make(tmp_path / "a.h5", partial_plain=True, filters=[odd.GZIP], **PARTS)
    assert "gzip (not in partial chunks at the edges)" in str(info(tmp_path / "a.h5", show_all=True))
    make(tmp_path / "b.h5", filters=[odd.GZIP], **PARTS)
    assert "partial chunks" not in str(info(tmp_path / "b.h5", show_all=True))


def test_a_build_that_hides_functions_of_hdf5_decodes_through_it(tmp_path, monkeypatch):
    make(tmp_path / "a.h5", partial_plain=True, filters=[odd.SHUFFLE], **PARTS)
    monkeypatch.setattr(chunk_table, "_ask_library", lambda *_: None)
    check(tmp_path / "a.h5", Case("", "", HDF5, make))


@pytest.mark.parametrize("size", [60, 80])
def test_verify_finds_a_chunk_of_another_length(tmp_path, size):
    [case] = [case for case in CASES if case.row.startswith("a chunk whose decoded") and case.variant == f"{size}"]
    case.make(tmp_path / "a.h5")
    assert "its chunk 2 has" in str(verify(tmp_path / "a.h5"))
