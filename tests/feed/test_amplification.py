"""What a part of the samples reads beside its own: what is said is what is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import watch
from support.foreign import make_file, read_epochs, values
from support.leftovers import nothing_is_left
from support.matrices import random_matrix, write, write_anndata
from support.matrix_sets import WHOLE
from support.matrix_sets import make_set as make_matrices
from support.orders import ordered, read_alone

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler

__all__ = ["nothing_is_left"]

N, CHUNK, SHAPE = 240, 8, (3, 20, 20)
IMAGES = values((N, *SHAPE), np.uint8)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"chunks": (CHUNK, *SHAPE)},
    "gzip": {"chunks": (CHUNK, *SHAPE), "compression": "gzip"},
    "tiles": {"chunks": (CHUNK, 1, 20, 10)},
    "gzip tiles": {"chunks": (CHUNK, 1, 20, 10), "compression": "gzip"},
    "contiguous": {},
}
MATRIX = random_matrix(N, 300, 9)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch, python_threads: None) -> Iterator[list[int]]:
    """Decoded bytes of each run and chunk that threads read."""
    found: list[int] = []
    watch(monkeypatch, "read part", lambda part, files: found.extend(part.jobs(files)["num_bytes"].tolist()))
    watch(monkeypatch, "store.read.engine.BoxReader.decode", lambda *call: found.append(len(call[-1])))
    return found


def make(path: Path, kind: str) -> Path:
    return make_file(path, images=(IMAGES, KINDS[kind]), labels=(np.arange(N), {}))


WANTED = {
    "all": np.arange(N),
    "every third": np.arange(0, N, 3),
    "whole chunks": np.arange(3 * CHUNK, 9 * CHUNK),
    "one in a chunk": np.arange(0, N, CHUNK),
    "one": np.array([77]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", WANTED)
def test_what_a_loader_says_is_what_threads_read(tmp_path: Path, bytes_read: list[int], kind: str, wanted: str) -> None:
    dataset = ChunkDataset(make(tmp_path / "a.h5", kind), fields=["images"]).subset(WANTED[wanted])
    loader = ChunkLoader(**ordered(dataset, 16, window_chunks=3), num_threads=1)
    read_alone(loader)
    assert sum(bytes_read) == loader.read_amplification * len(dataset) * IMAGES[0].nbytes
    chunks = len(np.unique(WANTED[wanted] // CHUNK)) * CHUNK
    times = chunks / len(dataset) if "gzip" in kind or kind == "tiles" else 1  # small pieces are read whole
    assert loader.read_amplification == times
    assert (f"; reads {times:.2f} x the bytes of its samples; " in repr(loader)) == (times > 1)


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_weights_count_as_they_are_drawn(tmp_path: Path, bytes_read: list[int], kind: str) -> None:
    weights = np.where(np.arange(N) % 10 == 0, 10.0, 0.01)
    dataset = ChunkDataset(make(tmp_path / "a.h5", kind), fields=["images"])
    loader = ChunkLoader(**ordered(dataset, 16, weights=weights, window_chunks=12), num_threads=1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        del bytes_read[:]
        read_alone(loader)
        times = sum(bytes_read) / (N * IMAGES[0].nbytes)  # some chunks that windows cut are decoded twice
        assert loader.read_amplification <= times <= 1.15 * loader.read_amplification


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"scaleoffset": 0}])
def test_what_a_dataset_says_is_what_it_reads(
    tmp_path: Path, bytes_read: list[int], wanted: str, filters: dict[str, Any]
) -> None:
    images = np.tile(IMAGES, (1, 4, 4, 4))  # blocks that HDF5 reads are single chunks
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (CHUNK, *images.shape[1:]), **filters}))
    dataset = ChunkDataset(path).subset(WANTED[wanted])
    read_epochs(dataset, ChunkSampler(dataset, 16))
    assert sum(bytes_read) == dataset.read_amplification * len(dataset) * images[0].nbytes
    said = f"reads {dataset.read_amplification:.2f} x their bytes; "
    assert (said in repr(dataset)) == (dataset.read_amplification > 1)
    dataset.close()


def test_plain_samples_are_read_alone(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", images=(IMAGES, {"chunks": (CHUNK, *IMAGES.shape[1:])}))
    dataset = ChunkDataset(path).subset(np.arange(0, N, CHUNK))
    assert dataset.read_amplification == 1 and "x their bytes" not in repr(dataset)


def test_large_samples_are_read_alone(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((40, 200, 200), np.uint8), {"chunks": (4, 200, 200)}))
    assert ChunkDataset(path).subset([3, 17]).read_amplification == 1


@pytest.mark.parametrize("kind", ["ours", "gzip", "set"])
def test_rows_of_a_matrix(tmp_path: Path, bytes_read: list[int], kind: str) -> None:
    matrix, path = MATRIX, tmp_path / "a.h5"
    if kind == "ours":
        write(path, MATRIX, chunk_samples=8)
    elif kind == "gzip":
        write_anndata(path, MATRIX, chunks=(50,), compression="gzip")
    else:
        matrix, path = WHOLE, tmp_path / "set"
        make_matrices(path, "anndata", chunks=(50,), maxshape=(None,), compression="gzip")
    rows = np.arange(0, matrix.shape[0], 7)
    dataset = ChunkDataset(path).subset(rows)
    loader = ChunkLoader(**ordered(dataset, 16, window_chunks=4), num_threads=1)
    read_alone(loader)
    entry_bytes = dataset.new_reader().matrix.entry_bytes
    each = entry_bytes * np.diff(matrix.indptr)[rows].sum()
    padding = 0 if kind == "ours" else 50 * entry_bytes * len(dataset.files)
    assert 0 <= sum(bytes_read) - loader.read_amplification * each < padding + 1  # last chunks are stored in full
    assert (loader.read_amplification == 1) == (kind == "ours") == (dataset.read_amplification == 1)


def test_several_files(tmp_path: Path, bytes_read: list[int]) -> None:
    for number, chunk in enumerate((8, 5, 40)):
        some = slice(80 * number, 80 * (number + 1))
        how = {"chunks": (chunk, *SHAPE), "compression": "gzip"}
        make_file(tmp_path / f"{number}.h5", images=(IMAGES[some], how))
    rows = np.array([0, 1, 100, 239])
    dataset = ChunkDataset(tmp_path).subset(rows)
    loader = ChunkLoader(dataset, 2, num_threads=1)
    read_alone(loader)
    assert loader.read_amplification == (8 + 5 + 40) / 4 == dataset.read_amplification
    assert sum(bytes_read) == 53 * IMAGES[0].nbytes


def test_parts_of_whole_chunks_read_nothing_in_vain(tmp_path: Path) -> None:
    path = make(tmp_path / "a.h5", "gzip")
    assert ChunkDataset(path).read_amplification == 1
    *_, part = ChunkDataset(path).split((0.5, 0.5), stratify="labels")
    assert part.read_amplification > 1.5
    assert ChunkDataset(path).subset([]).read_amplification == 1
