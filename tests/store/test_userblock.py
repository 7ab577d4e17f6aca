"""Files with a user block, as MATLAB v7.3 writes them, give what h5py reads, whatever HDF5 says of their chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.faults import small
from support.foreign import make_file, values
from support.loaders import loader_by
from support.repack_files import check_same
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FileError
from h5chunk.store.hdf5 import chunk_table
from h5chunk.store.hdf5.chunk_table import list_chunks
from h5chunk.tools.repack.repack import repack

N, SHAPE = 50, (50, 6, 4)
FIELDS = {
    "plain": {"chunks": (8, 6, 4)},
    "pieces": {"chunks": (16, 3, 4)},
    "gzip": {"chunks": (8, 6, 4), "compression": "gzip"},
    "gzip_pieces": {"chunks": (7, 4, 3), "compression": "gzip", "shuffle": True},
    "contiguous": {},
}


def make_matlab(path: Path, block: int, **options: Any) -> Path:
    """A file with every layout behind a user block."""
    data = {name: (values(SHAPE, "u1", seed), each) for seed, (name, each) in enumerate(FIELDS.items())}
    make_file(path, file={"userblock_size": block, **options}, number=(np.arange(N), {}), **data)
    with path.open("r+b") as file:
        file.write((b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")[:block])
    return path


def check_reads(path: Path, tmp_path: Path) -> None:
    """Every reader, and a repacked copy, has what h5py reads."""
    with h5py.File(path) as file:
        expected = {name: file[name][()] for name in FIELDS}
    names = ["number", *FIELDS]
    dataset = h5chunk.ChunkDataset(path, fields=names)
    batches = [
        *loader_by(h5chunk.ChunkDataset(path, fields=names), 10, reader="direct"),
        *DataLoader(dataset, 10),
    ]
    assert sorted(torch.cat([numbers for numbers, *_ in batches]).tolist()) == sorted([*range(N), *range(N)])
    for numbers, *batch in batches:
        for name, found in zip(FIELDS, batch, strict=True):
            np.testing.assert_array_equal(np.asarray(found), expected[name][np.asarray(numbers)], name)
    assert h5chunk.verify(path).ok
    repack(path, tmp_path / "new.h5")
    check_same(path, tmp_path / "new.h5")
    assert h5chunk.verify(tmp_path / "new.h5").ok
    assert (tmp_path / "new.h5").read_bytes()[:128] == path.read_bytes()[:128]


leaves_out_user_block = chunk_table.leaves_out_user_block


@pytest.fixture
def list_otherwise(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes HDF5 list chunks at other offsets."""

    def change(shift: Callable[[h5py.Dataset], int]) -> None:
        def visit(dataset: h5py.Dataset, note: Callable[[h5py.h5d.StoreInfo], None]) -> None:
            def moved(chunk: h5py.h5d.StoreInfo) -> None:
                note(chunk._replace(byte_offset=chunk.byte_offset + shift(dataset)))

            dataset.id.chunk_iter(moved)

        monkeypatch.setattr(chunk_table, "_visit_chunks", visit)
        leaves_out_user_block.cache_clear()

    yield change
    leaves_out_user_block.cache_clear()


@pytest.fixture
def old_library(list_otherwise: Callable[..., None]) -> None:
    """HDF5 as it was in 1.14.2, if it is a later one."""
    if not leaves_out_user_block():
        list_otherwise(lambda dataset: -dataset.file.userblock_size)
    assert leaves_out_user_block()


@pytest.mark.parametrize("block", [512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_readers_agree_with_h5py(tmp_path, block, libver):
    check_reads(make_matlab(tmp_path / "a.mat", block, libver=libver), tmp_path)


@pytest.mark.parametrize("block", [512, 8192])
def test_old_library(tmp_path, block, old_library):
    check_reads(make_matlab(tmp_path / "a.mat", block), tmp_path)


@pytest.mark.parametrize("name", ["plain", "pieces", "gzip"])
@pytest.mark.parametrize("block", [0, 512])
def test_chunks_that_lie_elsewhere_are_an_error(tmp_path, block, name, list_otherwise):
    path = make_matlab(tmp_path / "a.mat", block)
    list_otherwise(lambda dataset: -8)
    message = rf"a\.mat: '/{name}': HDF5 reads other bytes for its chunk \d than the file has at \d+.*another version"
    with h5py.File(path) as file, pytest.raises(FileError, match=message):
        list_chunks(file[name])


def test_large_chunks_are_compared_by_their_first_elements(tmp_path, list_otherwise, monkeypatch):
    small(monkeypatch, compared_bytes=10)
    path = make_matlab(tmp_path / "a.mat", 512)
    with h5py.File(path) as file:
        for name in FIELDS:
            list_chunks(file[name])
    list_otherwise(lambda dataset: -8)
    with h5py.File(path) as file:
        list_chunks(file["gzip"])  # would have to be read whole
        with pytest.raises(FileError, match="HDF5 reads other bytes for its chunk 0 "):
            list_chunks(file["plain"])


class Moved:
    """A dataset of which HDF5 says that it lies elsewhere."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __getattr__(self, name: str) -> Any:
        return Moved(self._item.id) if name == "id" else getattr(self._item, name)

    def get_offset(self) -> int:
        return self._item.get_offset() + 8


@pytest.mark.parametrize("block", [0, 512])
def test_contiguous_data_that_lie_elsewhere_are_an_error(tmp_path, block):
    data = {"x": (values((30,), ">f4"), {}), "y": (np.arange(7), {})}
    path = make_file(tmp_path / "a.h5", file={"userblock_size": block}, **data)
    with h5py.File(path) as file:
        assert len(list_chunks(file["x"])) == 1
        with pytest.raises(FileError, match="'/x': HDF5 reads other bytes"):
            list_chunks(Moved(file["x"]))


def test_a_file_that_is_open_for_writing_is_not_compared(tmp_path):
    """What HDF5 keeps in its cache is not in the file yet."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", data=np.arange(20), chunks=(5,))
        x[:5] = 7
        assert len(list_chunks(x)) == 4
