"""HoldOut: each row's entries are parted in two, in the same way by whatever way they come."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from support.loaders import loader_by
from support.matrices import dense, random_matrix, write, write_anndata
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import OptionError
from h5chunk.transforms import L2, Binarize, Csr, Dense, HoldOut

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MATRIX = random_matrix(200, 300, 12, seed=3)
ROWS = torch.from_numpy(MATRIX.toarray()).float()


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "m.h5", MATRIX, chunk_samples=8)


def epoch_of(batches, numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all rows, in the order of the file."""
    both = [[dense(part).cpu().float() for part in batch[0]] for batch in batches]
    inputs, targets = (torch.cat(parts) for parts in zip(*both, strict=True))
    order = torch.from_numpy(np.concatenate(numbers)).argsort()
    return inputs[order], targets[order]


def loaded(data, *transforms, batch_size=32, seed=0, **options):
    loader = loader_by(data, batch_size, seed=seed, transforms=list(transforms), **options)
    with loader:
        numbers = list(loader.order.batches())
        return epoch_of(loader, numbers)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.29])
def test_a_fraction_is_held_out(path, fraction):
    inputs, targets = loaded(path, HoldOut(fraction))
    assert torch.equal(inputs + targets, ROWS) and not (inputs * targets).any()
    counts = (ROWS != 0).sum(1)
    assert torch.equal((targets != 0).sum(1), torch.tensor([int(n * fraction + 1e-9) for n in counts.tolist()]))


WAYS = {
    "csr": {"transforms": [Csr()]},
    "double": {"transforms": [Dense(torch.float64)]},
    "h5py": {"reader": "h5py", "resident": False},
    "direct": {"resident": False, "batch_size": 7, "seed": 5},
    "resident": {"resident": True, "batch_size": 50},
    "reuse": {"reuse": True, "resident": False, "batch_size": 200},
    "gpu": pytest.param({"device": "cuda"}, marks=NEEDS_GPU),
    "gpu csr": pytest.param({"device": "cuda", "transforms": [Csr()]}, marks=NEEDS_GPU),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_holds_out_the_same(path, way):
    options = dict(way)
    expected = loaded(path, HoldOut(0.3, seed=7))
    found = loaded(path, HoldOut(0.3, seed=7), *options.pop("transforms", ()), **options)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(loaded(path, HoldOut(0.3, seed=8))[1], expected[1])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("layout", [Dense(), Csr()])
def test_a_dataset_holds_out_the_same(path, workers, layout):
    dataset = ChunkDataset(path, fields=["X", "sample_number"], transforms=[HoldOut(0.3, seed=7), layout])
    loader = DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 32), num_workers=workers)
    batches = list(loader)
    found = epoch_of(batches, [batch[1].numpy() for batch in batches])
    assert all(map(torch.equal, found, loaded(path, HoldOut(0.3, seed=7))))
    sample = dataset[5]
    assert len(sample) == 2 and torch.equal(sample[0].inputs.to_dense(), found[0][5]) and sample[1] == 5


@pytest.mark.parametrize("each_epoch", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_epoch_without_a_sampler(path, each_epoch, num_workers):
    dataset = ChunkDataset(path, transforms=[HoldOut(0.5, each_epoch=each_epoch)])
    loader = DataLoader(dataset, 32, num_workers=num_workers, persistent_workers=num_workers > 0)
    epochs = [torch.cat([targets for ((_, targets),) in loader]) for _ in range(3)]
    assert torch.equal(epochs[0], epochs[1]) != each_epoch and torch.equal(epochs[1], epochs[2]) != each_epoch
    assert torch.equal(dataset[range(200)][0].targets, dataset[range(200)][0].targets) != each_epoch


def test_each_epoch_draws_anew_and_alike_for_both_ways(path):
    epochs = {}
    for each_epoch in (False, True):
        hold_out = HoldOut(0.5, each_epoch=each_epoch)
        with ChunkLoader(path, 64, shuffle=False, transforms=[hold_out]) as loader:
            epochs[each_epoch] = [torch.cat([rows.targets for (rows,) in loader]) for _ in range(3)]
        dataset = ChunkDataset(path, transforms=[hold_out])
        sampler = ChunkSampler(dataset, 64, shuffle=False)
        for epoch in range(3):
            targets = torch.cat([targets for ((_, targets),) in DataLoader(dataset, batch_sampler=sampler)])
            assert torch.equal(targets, epochs[each_epoch][epoch])
    assert torch.equal(epochs[False][0], epochs[False][1])
    assert not torch.equal(epochs[True][0], epochs[True][1])
    assert torch.equal(epochs[True][0], epochs[False][0])


def test_ranks_hold_out_the_same(path):
    expected = loaded(path, HoldOut(0.3))
    for rank in range(3):
        dataset = ChunkDataset(path)
        sampler = ChunkSampler(dataset, 16, rank=rank, world_size=3)
        numbers = list(sampler.order.batches())
        with ChunkLoader(dataset, batch_sampler=sampler, transforms=[HoldOut(0.3)]) as loader:
            for (batch,), rows in zip(loader, numbers, strict=True):
                assert all(torch.equal(part, whole[rows]) for part, whole in zip(batch, expected, strict=True))


def test_what_is_before_and_after(path):
    inputs, targets = loaded(path, Binarize(100), HoldOut(0.25), L2())
    likes = (ROWS >= 100).float()
    assert torch.equal(((inputs > 0) | (targets > 0)).float(), likes)
    assert torch.equal((targets > 0).sum(1), (likes.sum(1) * 0.25).long())
    for part in (inputs, targets):
        lengths = part.norm(dim=1)
        assert torch.allclose(lengths[lengths > 0], torch.ones(1))
    functions = loaded(path, HoldOut(0.25), lambda batch: batch * 2)
    assert torch.equal(functions[0] + functions[1], ROWS * 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_function_of_a_batch_and_dense_files(tmp_path, path):
    expected = loaded(path, HoldOut(0.3))
    assert all(map(torch.equal, HoldOut(0.3)(ROWS), expected))
    parts = HoldOut(0.3)(ROWS.to_sparse_csr())
    assert all(torch.equal(part.to_dense(), whole) for part, whole in zip(parts, expected, strict=True))
    with h5py.File(path) as file:
        assert file["X/indices"].shape == (MATRIX.nnz,)
    others = write_anndata(tmp_path / "a.h5", MATRIX)
    assert all(map(torch.equal, loaded(others, HoldOut(0.3)), expected))
    np.save(tmp_path / "x.npy", MATRIX.toarray())
    h5chunk.convert(tmp_path / "x.npy", tmp_path / "d.h5", format="npy", dense=True, shuffle=False)
    assert all(map(torch.equal, loaded(tmp_path / "d.h5", HoldOut(0.3)), expected))


def test_labels_come_after_both(tmp_path):
    labels = np.arange(200)
    path = write(tmp_path / "m.h5", MATRIX, fields={"labels": labels})
    for (inputs, targets), numbers in ChunkLoader(
        ChunkDataset(path, fields=["X", "labels"]), 64, transforms=[HoldOut(0.5)]
    ):
        assert torch.equal(inputs + targets, ROWS[numbers])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: HoldOut(), "last is None: pass one of the two"),
        (lambda: HoldOut(0.5, last=1), "last is 1: pass one of the two"),
        (lambda: HoldOut(1.0), "fraction is 1.0"),
        (lambda: HoldOut(last=0), "last is 0"),
        (lambda: HoldOut(0.5, seed=-1), "seed is -1"),
        (lambda: HoldOut(last=1, each_epoch=True), "last is not random"),
    ],
)
def test_arguments_that_make_no_sense(make, match):
    with pytest.raises(OptionError, match=match):
        make()


@pytest.mark.parametrize(
    ("transforms", "match"),
    [
        ([HoldOut(0.5), HoldOut(0.5)], "twice, or after a function"),
        ([lambda batch: batch, HoldOut(0.5)], "twice, or after a function"),
        ([HoldOut(last=1)], "needs entries in the order of time.*--time-order"),
    ],
)
def test_places_that_do_not_fit(path, transforms, match):
    with pytest.raises(OptionError, match=match):
        ChunkLoader(path, 8, transforms=transforms)


def test_images_have_no_entries(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.zeros((9, 3, 4, 4), np.uint8)
    with pytest.raises(OptionError, match="field 'images', which is not a matrix"):
        ChunkLoader(tmp_path / "x.h5", 3, transforms=[HoldOut(0.5)])
    with pytest.raises(OptionError, match="is not a matrix"):
        ChunkLoader(tmp_path / "x.h5", 3, transforms=[lambda batch: batch, HoldOut(0.5)])
