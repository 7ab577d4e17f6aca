"""Every layout that HDF5 allows is read as HDF5 reads it, by every reader, or refused: none gives other values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import odd_files as odd
import pytest
from odd_files import LATEST, N, make

from h5chunk import ChunkDataset, ChunkLoader, info, verify
from h5chunk.errors import OptionError
from h5chunk.sources.sparse import hdf5calls
from h5chunk.tools.repack.repack import repack

DIRECT, HDF5, REFUSED = "read directly", "through HDF5", "refused"
WHOLE, PARTS, LARGER = {"chunks": (4, 5, 7)}, {"chunks": (8, 3, 3)}, {"chunks": (64, 5, 7), "maxshape": (None, 5, 7)}


def partial_plain(chunks: dict[str, Any], *filters: Any) -> Callable[[Path], None]:
    return lambda path: make(path, partial_plain=True, filters=filters, **chunks)


def indexed(maxshape: tuple[int | None, ...]) -> Callable[[Path], None]:
    return lambda path: make(path, file=LATEST, maxshape=maxshape, **PARTS)


FILTERS = {
    "shuffle": [odd.SHUFFLE],
    "Bitshuffle without a compressor": [odd.BITSHUFFLE],
    "Bitshuffle with LZ4": [odd.BITSHUFFLE_LZ4],
    "gzip": [odd.GZIP],
    "Fletcher-32": [odd.FLETCHER32],
    "LZ4": [odd.LZ4],
    "shuffle, gzip and Fletcher-32": [odd.SHUFFLE, odd.GZIP, odd.FLETCHER32],
}
CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    **{
        f"{how} edge chunks left plain, {name}": (DIRECT, partial_plain(chunks, *filters))
        for how, chunks in {"whole-sample": WHOLE, "partial-sample": PARTS, "larger": LARGER}.items()
        for name, filters in FILTERS.items()
    },
    "edge chunks left plain, n-bit": (HDF5, partial_plain(PARTS, odd.NBIT)),
    "extensible array along the first axis": (DIRECT, indexed((None, 5, 7))),
    "extensible array along another axis": (HDF5, indexed((N, None, 7))),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that a field is read through HDF5."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loaded(path: Path, reader: str, rows: int) -> np.ndarray:
    with quiet():
        loader = ChunkLoader(path, rows, shuffle=False, reader=reader)
    [(images,)] = list(loader)
    return images.numpy()


def check(path: Path, how: str, tmp_path: Path) -> None:
    """All that reads a file gives what h5py does, in the way that is promised."""
    with h5py.File(path) as file:
        expected = file["images"][...]
    found = {reader: loaded(path, reader, len(expected)) for reader in ("auto", "h5py")}
    if how == DIRECT:
        found["direct"] = loaded(path, "direct", len(expected))
    else:
        with quiet(), pytest.raises(OptionError, match="cannot be read directly"):
            ChunkLoader(path, 4, reader="direct")
    with suppress_not_mapped():
        found["mapped"] = loaded(path, "mapped", len(expected))
    dataset = ChunkDataset(path)
    found["data set"] = np.stack([np.asarray(dataset[row][0]) for row in range(len(expected))])
    repack(path, tmp_path / "repacked.h5")
    with h5py.File(tmp_path / "repacked.h5") as file:
        found["repacked"] = file["images"][...]
    for reader, values in found.items():
        assert values.tobytes() == expected.astype(expected.dtype.newbyteorder("=")).tobytes(), reader
    assert verify(path).ok and verify(tmp_path / "repacked.h5").ok


@contextmanager
def suppress_not_mapped() -> Iterator[None]:
    """Only what lies in one run can be mapped."""
    try:
        yield
    except OptionError as error:
        assert "cannot be mapped" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_every_reader_gives_what_h5py_gives(tmp_path, name):
    how, maker = CASES[name]
    maker(tmp_path / "a.h5")
    check(tmp_path / "a.h5", how, tmp_path)


def test_info_says_that_partial_chunks_are_plain(tmp_path):
    make(tmp_path / "a.h5", partial_plain=True, filters=[odd.GZIP], **PARTS)
    assert "gzip (not in partial chunks at the edges)" in str(info(tmp_path / "a.h5"))
    make(tmp_path / "b.h5", filters=[odd.GZIP], **PARTS)
    assert "partial chunks" not in str(info(tmp_path / "b.h5"))


def test_a_build_that_hides_functions_of_hdf5_decodes_through_it(tmp_path, monkeypatch):
    make(tmp_path / "a.h5", partial_plain=True, filters=[odd.SHUFFLE], **PARTS)
    monkeypatch.setattr(hdf5calls, "_call", lambda *_: None)
    check(tmp_path / "a.h5", HDF5, tmp_path)
