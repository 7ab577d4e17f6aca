"""A sparse matrix in several files: its rows are those of the whole, by every reader, whoever wrote the files."""

from __future__ import annotations

import os
import pickle
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import watch
from support.foreign import make_file, values
from support.leftovers import WAIT_S, in_fork, nothing_is_left
from support.loaders import loader_by
from support.matrices import LAYOUTS, check_epoch, dense, write, write_anndata
from support.matrix_sets import CUTS, WHOLE, make_set
from support.orders import ordered
from torch.utils.data import DataLoader

from h5chunk.errors import FieldError, FileError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.store.read.files import open_reader

__all__ = ["nothing_is_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def rows_of(numbers: Any) -> np.ndarray:
    return WHOLE[numbers].toarray()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 203), max_size=5),
    kind=st.sampled_from(["ours", "anndata", "gzip"]),
    chunk_samples=st.sampled_from([None, 1, 7, 32]),
    sparse=st.sampled_from(["dense", "csr"]),
    reader=st.sampled_from(["direct", "h5py"]),
    resident=st.booleans(),
    batch_size=st.integers(1, 60),
)
def test_rows_are_those_of_the_whole(
    tmp_path_factory, cuts, kind, chunk_samples, sparse, reader, resident, batch_size
) -> None:
    folder = tmp_path_factory.mktemp("sets") / "set"
    options: dict[str, Any] = {"chunk_samples": chunk_samples} if kind == "ours" else {}
    if kind == "gzip":
        options = {"chunks": (50,), "maxshape": (None,), "compression": "gzip"}
    make_set(folder, "ours" if kind == "ours" else "anndata", (0, *sorted(cuts), 203), **options)
    how = {"reader": reader, "resident": resident, "transforms": [LAYOUTS[sparse]()]}
    with loader_by(**ordered(folder, batch_size, window_chunks=2), **how) as loader:
        for _ in range(2):
            check_epoch(loader, WHOLE.toarray().astype(float), sparse=sparse, tolerance=1e-6)
    dataset = ChunkDataset(folder, transforms=LAYOUTS[sparse]())
    numbers = np.random.default_rng(batch_size).integers(-203, 203, 30)
    np.testing.assert_array_equal(dense(dataset[numbers][0]), rows_of(numbers % 203))
    dataset.close()


@pytest.mark.parametrize("sparse", ["dense", "csr"])
@pytest.mark.parametrize("options", [{}, {"pattern": True}, {"scale": 2.0}])
def test_through_workers(tmp_path: Path, sparse: str, options: dict[str, Any]) -> None:
    make_set(tmp_path / "set", chunk_samples=8, **options)
    expected = WHOLE.toarray() / options.get("scale", 1)
    if "pattern" in options:
        expected = (expected > 0).astype(float)
    dataset = ChunkDataset(tmp_path / "set", transforms=LAYOUTS[sparse]())
    assert dataset[7][0].to_dense().tolist() == expected[7].tolist()  # the file is open before the fork
    sampler = ChunkSampler(dataset, 16, seed=3)
    numbers = list(ChunkSampler(ChunkDataset(tmp_path / "set"), 16, seed=3))
    found = [dense(batch) for (batch,) in DataLoader(dataset, batch_sampler=sampler, num_workers=2)]
    for batch, some in zip(found, numbers, strict=True):
        np.testing.assert_array_equal(batch, expected[some])
    dataset.close()


def test_labels_subsets_and_ranks(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", chunk_samples=4)
    for path, (start, stop) in zip(paths, pairwise(CUTS), strict=True):
        with h5py.File(path, "r+") as file:
            file["labels"] = np.arange(start, stop)
    dataset = ChunkDataset(paths)
    assert dataset.fields == ("X", "labels")
    wanted = np.flatnonzero(np.arange(203) % 3 == 0)
    for data in (dataset, dataset.subset(wanted)):
        seen: list[int] = []
        for rank in range(2):
            with ChunkLoader(**ordered(data, 8, rank=rank, world_size=2, lanes=4, seed=1)) as loader:
                for rows, labels in loader:
                    np.testing.assert_array_equal(rows, rows_of(labels.numpy()))
                    seen += labels.tolist()
        assert sorted(seen) == (list(range(203)) if data is dataset else wanted.tolist())
    with ChunkLoader(**ordered(dataset, 50, weights=(np.arange(203) == 17).astype(float))) as loader:
        assert [labels.tolist() for _, labels in loader] == [[17] * 50] * 4 + [[17] * 3]


def test_in_a_fork_and_pickled(tmp_path: Path) -> None:
    make_set(tmp_path / "set")
    dataset = ChunkDataset(tmp_path / "set")
    numbers = [202, 0, 40, 41]
    assert dataset[numbers][0].tolist() == rows_of(numbers).tolist()
    assert in_fork(lambda: np.testing.assert_array_equal(dataset[numbers][0], rows_of(numbers))) == 0
    assert pickle.loads(pickle.dumps(dataset))[numbers][0].tolist() == rows_of(numbers).tolist()


def test_in_a_fork_while_a_thread_opens_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is not there in the fork, and what it holds is held for ever."""
    make_set(tmp_path / "set")
    dataset, opening, go_on = ChunkDataset(tmp_path / "set"), threading.Event(), threading.Event()
    assert dataset[[0]][0].tolist() == rows_of([0]).tolist()

    def wait(*_: object, **__: object) -> None:
        if threading.current_thread() is thread and not opening.is_set():
            opening.set()
            go_on.wait(WAIT_S)

    watch(monkeypatch, "store.read.open_files.open_descriptor", wait)
    thread = threading.Thread(target=lambda: dataset[[202]])
    thread.start()
    assert opening.wait(WAIT_S)
    assert in_fork(lambda: np.testing.assert_array_equal(dataset[[0, 202]][0], rows_of([0, 202]))) == 0
    go_on.set()
    thread.join()
    dataset.close()


def test_indptr_is_that_of_the_whole(tmp_path: Path) -> None:
    reader = open_reader(make_set(tmp_path / "set"))
    assert reader.indptr_of("X").tolist() == WHOLE.indptr.tolist() and reader.indptr_of("X").dtype == np.int64
    assert (reader.matrix.num_rows, reader.matrix.num_entries) == (203, WHOLE.nnz)


def test_memory_is_bounded(tmp_path: Path) -> None:
    make_set(tmp_path / "set", chunk_samples=4)
    with ChunkLoader(tmp_path / "set", 8, memory_bytes=200_000, num_threads=1) as loader:
        check_epoch(loader, WHOLE.toarray().astype(float), sparse="dense", tolerance=1e-6)


def other_scale(path: Path) -> None:
    write(path, WHOLE[:9], scale=2.0)


def other_columns(path: Path) -> None:
    write(path, WHOLE[:9, :280])


def narrow_columns(path: Path) -> None:
    write(path, WHOLE[:9, :200])


def a_pattern(path: Path) -> None:
    write(path, WHOLE[:9], pattern=True)


def theirs(path: Path) -> None:
    write_anndata(path, scipy.sparse.csr_matrix(WHOLE[:9], dtype=np.float32))


def dense_rows(path: Path) -> None:
    make_file(path, X=(values((9, 300), np.uint8), {}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_scale, r"b.h5: field 'X' has the scale 2.0, but in .*a.h5 it is 1.0: .* with the same --scale"),
        (other_columns, r"b.h5: field 'X' has the num columns 280, but in .*a.h5 it is 300: .*fields="),
        (narrow_columns, r"b.h5: field 'X' has the num columns 200, but"),
        (a_pattern, r"b.h5: field 'X' has the value dtype none \(all values are 1\), but in .*a.h5 it is uint8"),
        (theirs, r"b.h5: field 'X' has the index dtype int"),
        (dense_rows, r"b.h5: field 'X' is dense rows, but in .*a.h5 it is a sparse matrix"),
    ],
)
def test_matrices_must_agree(tmp_path: Path, make: Any, message: str) -> None:
    write(tmp_path / "a.h5", WHOLE[:20])
    make(tmp_path / "b.h5")
    with pytest.raises(FieldError, match=message):
        ChunkDataset(tmp_path)


def test_a_file_that_is_replaced_or_damaged(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", cuts=(0, 100, 203))
    dataset = ChunkDataset(paths)
    with ChunkLoader(paths, 16) as loader:
        write(tmp_path / "new.h5", WHOLE[:103])
        os.replace(tmp_path / "new.h5", paths[1])
        with pytest.raises(FileError, match=r"m1.h5: the file was replaced or changed"):
            list(loader)
    with pytest.raises(FileError, match=r"m1.h5: the file was replaced or changed"):
        dataset[[1, 150]]
    with h5py.File(paths[1], "r+") as file:
        file["X/indptr"][5] = 1 << 40
    with pytest.raises(FileError, match=r"m1.h5: 'X' is damaged: indptr decreases after row 5"):
        ChunkDataset(paths)[[150]]
    dataset.close()


def test_columns_are_checked(tmp_path: Path) -> None:
    paths = make_set(tmp_path / "set", cuts=(0, 100, 203))
    with h5py.File(paths[1], "r+") as file:
        file["X/indices"][3] = 300
    with ChunkLoader(paths, 16) as loader, pytest.raises(FileError, match="it has an entry in column 300 of 300"):
        list(loader)
    assert torch.equal(ChunkDataset(paths)[[1]][0], torch.tensor(rows_of([1]), dtype=torch.float32))
