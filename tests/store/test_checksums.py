"""Chunks are checked against their checksums as they are read: no flipped bit is trained."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.csr_files import write_csr
from support.faults import small, watch
from support.foreign import make_file
from support.leftovers import end_workers, nothing_is_left
from support.loaders import loader_by
from support.matrices import random_matrix, write
from support.orders import ordered
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FileError, OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.store.hdf5.chunk_table import list_chunks
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.repack.repack import repack

__all__ = ["nothing_is_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

N, CHUNK = 50, 8  # the last chunk has two samples, and room for six more
ROWS = 120
DAMAGED = r"{name}: field '{field}', chunk {chunk} \(samples {first} to {last}\) does not match its checksum .*verify"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and labels as convert writes them."""
    from PIL import Image
    from support.pictures import pixels

    folder = tmp_path_factory.mktemp("images")
    for i in range(N):
        path = folder / "photos" / f"class{i % 3}" / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i, 20, 20)).save(path)
    h5chunk.convert(folder / "photos", folder / "a.h5", chunk_samples=CHUNK, workers=0)
    return folder / "a.h5"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix whose entries lie in several chunks, none of which begins with a row."""
    path = tmp_path_factory.mktemp("matrix") / "m.h5"
    with pytest.MonkeyPatch.context() as patch:
        small(patch, index_chunk_bytes=256)
        return write(path, random_matrix(ROWS, 300, 12), seed=1, shuffled=True)


@pytest.fixture(params=["images", "gzip", "matrix", "gzip matrix"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of its own of each kind."""
    kind = request.param.split()[-1] if "matrix" in request.param else "images"
    source = request.getfixturevalue(kind)
    found = tmp_path / source.name
    if "gzip" in request.param:
        with pytest.MonkeyPatch.context() as patch:
            small(patch, least_filtered_bytes=0, repacked_index_chunk_bytes=256)
            repack(source, found, compression="gzip")
    else:
        found.write_bytes(source.read_bytes())
    return found


def parts_of(path: Path) -> list[str]:
    """Datasets whose values are read."""
    return ["X/indptr", "X/indices", "X/data"] if path.name == "m.h5" else ["images", "labels"]


def flip(path: Path, name: str, chunk: int, at: int = -1) -> None:
    """Flip a bit of a stored chunk in place, as a disk would: the times of the file stay as they were."""
    with h5py.File(path) as file:
        table = list_chunks(file[name])
    chunk %= len(table)
    status = path.stat()
    place = int(table.offsets[chunk]) + at % int(table.sizes[chunk])
    descriptor = os.open(path, os.O_RDWR)
    byte = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([byte[0] ^ 0x10]), place)
    os.close(descriptor)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def message(path: Path, name: str, chunk: int) -> str:
    """What the error says."""
    with h5py.File(path) as file:
        dataset = file[name]
        size = (dataset.chunks or dataset.shape)[0]
        chunk %= -(-len(dataset) // size)
        first, last = chunk * size, min((chunk + 1) * size, len(dataset)) - 1
        if name in ("X/indices", "X/data"):
            indptr = file["X/indptr"][:]
            first, last = (int(np.searchsorted(indptr, each, "right")) - 1 for each in (first, last))
        elif name == "X/indptr":
            last -= 1
    return DAMAGED.format(name=path.name.replace(".", r"\."), field=name, chunk=chunk, first=first, last=last)


def read_loader(path: Path | list[Path], mode: str, **options: Any) -> list[bytes]:
    """All samples, in the order of the file, by a `ChunkLoader`."""
    with loader_by(ChunkDataset(path, checksums=mode), 16, shuffle=False, **options) as loader:
        return [as_bytes(batch) for batch in loader]


def read_dataset(path: Path | list[Path], mode: str, num_workers: int = 0) -> list[bytes]:
    """The same by a `ChunkDataset` in a DataLoader."""
    dataset = ChunkDataset(path, checksums=mode)
    sampler = ChunkSampler(dataset, 16, shuffle=False, num_workers=1)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    return [as_bytes(batch) for batch in loader]


def as_bytes(batch: Any) -> bytes:
    return b"".join((field.to_dense() if field.is_sparse_csr else field).numpy().tobytes() for field in batch)


WAYS: dict[str, Callable[[Path, str], list[bytes]]] = {
    "auto": read_loader,
    "h5py": lambda path, mode: read_loader(path, mode, reader="h5py"),
    "resident": lambda path, mode: read_loader(path, mode, resident=True),
    "reuse": lambda path, mode: read_loader(path, mode, reuse=True, num_threads=1),
    "dataset": read_dataset,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_right_is_read_as_ever(path: Path, way: str) -> None:
    expected = WAYS[way](path, "off")
    assert WAYS[way](path, "first") == WAYS[way](path, "always") == expected


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [0, -1])
def test_a_flipped_bit_is_an_error(path: Path, way: str, chunk: int) -> None:
    """In any field, in the first and in the last chunk: of what is plain, there in what is read of no sample."""
    for name in parts_of(path):
        flip(path, name, chunk)
        for mode in ("first", "always"):
            with pytest.raises(FileError, match=message(path, name, chunk)):
                WAYS[way](path, mode)
        flip(path, name, chunk)  # back
    WAYS[way](path, "first")


@pytest.mark.parametrize("way", WAYS)
def test_off_gives_what_is_there(images: Path, tmp_path: Path, way: str) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    expected = WAYS[way](path, "off")
    flip(path, "images", 0, at=3)
    found = WAYS[way](path, "off")
    assert [one for one, other in zip(expected[0], found[0], strict=True) if one != other] == [expected[0][3]]
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("reader", ["auto", "h5py"])
def test_first_checks_each_chunk_once_and_always_every_time(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    small(monkeypatch, whole_bytes=0)  # labels as well are read of the file each epoch
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    for name, chunk in (("images", 3), ("labels", -1)):
        with (
            loader_by(**ordered(ChunkDataset(path, checksums="first"), 16, window_chunks=1), reader=reader) as first,
            loader_by(**ordered(ChunkDataset(path, checksums="always"), 16, window_chunks=1), reader=reader) as always,
            loader_by(**ordered(path, 16, window_chunks=1), reader=reader) as off,
        ):
            epochs = [[as_bytes(batch) for batch in loader] for loader in (first, always, off)]
            assert epochs[0] == epochs[1] == epochs[2]
            for loader in (first, always, off):
                loader.close()  # what was read ahead is read again
                loader.set_epoch(0)
            flip(path, name, chunk, at=2)
            with pytest.raises(FileError, match=message(path, name, chunk)):
                list(always)
            epochs = [[as_bytes(batch) for batch in loader] for loader in (first, off)]
            assert epochs[0] == epochs[1]
        flip(path, name, chunk, at=2)


def test_sums_are_computed_once_a_chunk(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    watch(monkeypatch, "store.read.checksums.crc32", lambda data, *_: summed.append(len(data)))
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")  # threads in C count nothing
    num_chunks = -(-N // CHUNK)
    with ChunkLoader(ChunkDataset(images, checksums="first"), 16, shuffle=False, num_threads=1) as loader:
        for _ in range(3):
            assert sum(len(batch[0]) for batch in loader) == N
    assert sum(summed) == (9600 + 64) * num_chunks
    summed.clear()
    dataset = ChunkDataset(images, checksums="first")
    for _ in range(2):
        for sample in (0, N - 1, 1):
            dataset[sample]
    assert sum(summed) == 2 * 9600 + num_chunks * 64  # labels are small: all are read at once, and kept
    dataset = ChunkDataset(images, checksums="always")
    summed.clear()
    dataset[0], dataset[1]
    assert sum(summed) == 2 * 9600 + num_chunks * 64


def test_a_single_sample_checks_its_chunk_alone(images: Path, tmp_path: Path) -> None:
    """All of it, though the bit is of another sample."""
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    flip(path, "images", 2, at=-1)
    dataset = ChunkDataset(path, checksums="first")
    dataset[0], dataset[3 * CHUNK]
    for _ in range(2):  # an error does not make it right
        with pytest.raises(FileError, match=message(path, "images", 2)):
            dataset[2 * CHUNK]
    part = dataset.subset([1, 2 * CHUNK + 1])
    with pytest.raises(FileError, match=message(path, "images", 2)):
        part[[0, 1]]
    with ChunkLoader(dataset.subset(np.arange(2 * CHUNK)), 4) as loader:
        assert len(list(loader)) == CHUNK // 2
    with ChunkLoader(dataset.subset([0, 2 * CHUNK]), 4) as loader, pytest.raises(FileError, match="'images', chunk 2"):
        list(loader)


def test_a_file_that_is_rewritten_in_place_with_its_old_times(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    dataset, status = ChunkDataset(path, checksums="always"), path.stat()
    dataset[0]
    with h5py.File(images) as file:
        at = file["images"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(N))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(FileError, match="does not match its checksum"):
        dataset[0]


def test_values_of_a_field_are_checked(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    flip(path, "labels", 1)
    dataset = ChunkDataset(path, fields=["images"], checksums="first")
    with pytest.raises(FileError, match=message(path, "labels", 1)):
        dataset.values("labels")
    with pytest.raises(FileError, match=message(path, "labels", 1)):
        ChunkSampler(dataset, 8, weights="labels")


def test_workers_check(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    flip(path, "images", 4)
    dataset = ChunkDataset(path, checksums="first")
    assert pickle.loads(pickle.dumps(dataset))[0][0].shape == (3, 20, 20)
    sampler = ChunkSampler(dataset, 8, num_workers=2)
    batches = iter(DataLoader(dataset, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(FileError, match=message(path, "images", 4)):
        list(batches)
    end_workers(batches)


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_several_files(images: Path, tmp_path: Path, reader: str) -> None:
    paths = [tmp_path / f"a{i}.h5" for i in range(2)]
    for each in paths:
        each.write_bytes(images.read_bytes())
    with loader_by(ChunkDataset(paths, checksums="first"), 16, reader=reader) as loader:
        assert sum(len(batch[0]) for batch in loader) == 2 * N
    for name in ("images", "labels"):
        flip(paths[1], name, -1)
        with (
            loader_by(ChunkDataset(paths, checksums="first"), 16, reader=reader) as loader,
            pytest.raises(FileError, match=message(paths[1], name, -1)),
        ):
            list(loader)
        with pytest.raises(FileError, match=message(paths[1], name, -1)):
            ChunkDataset(paths, checksums="first")[[0, 2 * N - 1]]
        flip(paths[1], name, -1)


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_several_files_of_a_matrix(matrix: Path, tmp_path: Path, reader: str) -> None:
    paths = [tmp_path / f"{i}" / "m.h5" for i in range(2)]
    for each in paths:
        each.parent.mkdir()
        each.write_bytes(matrix.read_bytes())
    expected = read_loader(paths, "off")
    assert read_loader(paths, "first", reader=reader) == read_dataset(paths, "always") == expected
    for name in parts_of(matrix):
        flip(paths[1], name, -1)
        with pytest.raises(FileError, match=message(paths[1], name, -1)):
            read_loader(paths, "first", reader=reader)
        with pytest.raises(FileError, match=message(paths[1], name, -1)):
            read_dataset(paths, "first")
        flip(paths[1], name, -1)


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_a_row_in_two_chunks_checks_both(matrix: Path, tmp_path: Path, reader: str) -> None:
    path = tmp_path / "m.h5"
    path.write_bytes(matrix.read_bytes())
    with h5py.File(path) as file:
        size, indptr = file["X/indices"].chunks[0], file["X/indptr"][:]
    cut = (indptr[:-1] // size + 1 == (indptr[1:] - 1) // size) & (np.diff(indptr) > 1)
    row = int(np.flatnonzero(cut)[0])
    chunk = int(indptr[row]) // size
    for damaged in (chunk, chunk + 1):
        flip(path, "X/indices", damaged)
        with (
            loader_by(ChunkDataset(path, checksums="first").subset([row]), 1, reader=reader) as loader,
            pytest.raises(FileError, match=message(path, "X/indices", damaged)),
        ):
            list(loader)
        flip(path, "X/indices", damaged)


@pytest.mark.parametrize("mode", ["first", "always"])
def test_files_without_checksums(tmp_path: Path, images: Path, mode: str) -> None:
    theirs = make_file(tmp_path / "b.h5", images=(np.zeros((9, 4), np.uint8), {"chunks": (2, 4)}))
    remedy = rf"checksums is '{mode}', but .*b\.h5 has no checksums of 'images': .* h5chunk repack"
    for make in (ChunkDataset, H5Reader):
        with pytest.raises(OptionError, match=remedy):
            make(theirs, checksums=mode)
    with pytest.raises(OptionError, match=remedy):
        ChunkDataset([images, theirs], fields=["images"], checksums=mode)
    repack(theirs, tmp_path / "c.h5", fields=["images"], window_chunks=2)
    assert ChunkDataset(tmp_path / "c.h5", checksums=mode)[3][0].tolist() == [0] * 4
    with pytest.raises(OptionError, match="has no checksums of 'h5chunk/source_index'"):
        ChunkDataset(images, fields={"numbers": "h5chunk/source_index"}, checksums=mode)


def test_modes_that_are_none(images: Path) -> None:
    with pytest.raises(OptionError, match="checksums is 'sometimes': use off, first or always"):
        ChunkDataset(images, checksums="sometimes")


def test_tables_that_cannot_be(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(images.read_bytes())
    with h5py.File(path, "r+") as file:
        del file["h5chunk/checksums/images"]
        file["h5chunk/checksums/images"] = np.zeros(3, np.uint32)
    with pytest.raises(FileError, match=r"checksums of 'images' are damaged .uint32 .3,. for 7 chunks"):
        ChunkDataset(path, checksums="first")
    ChunkDataset(path)


def test_a_matrix_of_ones_and_one_of_nothing(tmp_path: Path) -> None:
    ones = write(tmp_path / "m.h5", random_matrix(40, 30, 5), pattern=True)
    assert len(read_loader(ones, "always")) == 3
    flip(ones, "X/indices", 0)
    with pytest.raises(FileError, match=message(ones, "X/indices", 0)):
        read_loader(ones, "first")
    write_csr(tmp_path / "n.h5", np.zeros(9, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint8), 5)
    assert read_loader(tmp_path / "n.h5", "first") == read_loader(tmp_path / "n.h5", "off")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("resident", [False, True])
def test_on_a_gpu(path: Path, resident: bool) -> None:
    with ChunkLoader(ChunkDataset(path, checksums="first"), 16, device="cuda", resident=resident) as loader:
        assert sum(len(batch[0]) for batch in loader) in (N, ROWS)
    for name in parts_of(path):
        flip(path, name, -1)
        with (
            pytest.raises(FileError, match=message(path, name, -1)),
            ChunkLoader(ChunkDataset(path, checksums="first"), 16, device="cuda", resident=resident) as loader,
        ):
            list(loader)
        flip(path, name, -1)
