"""ChunkDataset and ChunkSampler in torch's DataLoader: any start method, any number of workers, one result."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.faults import as_worker, through_hdf5
from support.foreign import make_file, make_images, values
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Subset, default_collate, get_worker_info

import h5chunk
import h5chunk.transforms
from h5chunk.errors import FileError, WorkerError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sampler import ChunkSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

N = 203


@pytest.fixture
def path(tmp_path):
    labels = np.arange(N, dtype=np.int64)
    images = values((N, 3, 4, 5), np.uint8)
    return make_file(
        tmp_path / "a.h5",
        images=(images, {"chunks": (4, 3, 4, 5)}),
        labels=(labels, {"chunks": (4,)}),
        names=(values((N,), "S3"), {}),
    )


def epoch(loader: DataLoader) -> list[list]:
    """An epoch's batches as lists, so that they can be compared."""
    return [[field.tolist() if isinstance(field, torch.Tensor) else field for field in batch] for batch in loader]


def make_loader(path, num_workers=0, context=None, dataset_options=None, sampler_options=None, **options) -> DataLoader:
    dataset = ChunkDataset(path, **(dataset_options or {}))
    sampler = ChunkSampler(dataset, 16, window_chunks=4, num_workers=6, seed=1, **(sampler_options or {}))
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, multiprocessing_context=context, **options
    )


@pytest.mark.parametrize(
    ("context", "num_workers"),
    [("fork", 2), ("fork", 3), ("spawn", 1), pytest.param("forkserver", 3, marks=pytest.mark.nightly)],
)
def test_workers_give_the_same_batches(path, context, num_workers):
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    alone = make_loader(path)
    expected = [epoch(alone), epoch(alone)]
    loader = make_loader(path, num_workers, context, persistent_workers=True, timeout=120)
    assert [epoch(loader), epoch(loader)] == expected
    assert sorted(label for _, labels in expected[0] for label in labels) == list(range(N))


def test_used_before_a_fork(path):
    loader = make_loader(path, 2, "fork")
    before = loader.dataset[[5, 9]]
    expected = epoch(make_loader(path))
    assert epoch(loader) == expected
    assert all(a.equal(b) for a, b in zip(loader.dataset[[5, 9]], before, strict=True))


def lies_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes belong to a mapping of shared memory of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split()[1][3] == "s"
    raise AssertionError("not mapped")


def test_default_collate_copies_nothing(path):
    images, labels = next(iter(make_loader(path, 1, "fork")))
    assert lies_in_shared_memory(images) and lies_in_shared_memory(labels)
    assert shared_inode(images) == shared_inode(labels)  # both came in one buffer
    assert images.shape == (16, 3, 4, 5) and images.dtype == torch.uint8
    assert not lies_in_shared_memory(next(iter(make_loader(path)))[0])


def test_memory_of_workers_is_used_again_but_never_while_it_is_held(path):
    expected = epoch(make_loader(path))
    loader = make_loader(path, 1, "fork", persistent_workers=True)
    held = list(loader)  # all of an epoch at once
    assert [[field.tolist() for field in batch] for batch in held] == expected
    views = [images[3:5, 1] for images, _ in held]
    wanted = [view.clone() for view in views]
    del held
    for _ in loader:
        pass
    assert all(view.equal(clone) for view, clone in zip(views, wanted, strict=True))
    del views
    inodes = {shared_inode(images) for _ in range(4) for images, _ in loader}
    assert len(inodes) < 20  # of 52 batches


def shared_inode(tensor: torch.Tensor) -> str:
    """The shared memory that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split()[4]
    raise AssertionError("not mapped")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_way_of_collating(path, num_workers):
    expected = epoch(make_loader(path))
    context = "fork" if num_workers else None
    assert epoch(make_loader(path, num_workers, context, collate_fn=h5chunk.collate)) == expected
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 16, window_chunks=4, num_workers=6, seed=1)
    loader = DataLoader(
        dataset, sampler=sampler, batch_size=None, num_workers=num_workers, multiprocessing_context=context
    )
    assert epoch(loader) == expected


def by_hand(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate_fn as people write them."""
    assert isinstance(batch, list) and isinstance(batch[0], tuple)
    images = torch.stack([image for image, _ in batch])
    return images, torch.tensor([int(label) for _, label in batch])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_gets_samples(path, num_workers):
    context = "fork" if num_workers else None
    assert epoch(make_loader(path, num_workers, context, collate_fn=by_hand)) == epoch(make_loader(path))


def by_falling_labels(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate_fn that changes the list."""
    batch.sort(key=lambda sample: int(sample[1]), reverse=True)
    batch.append(batch[0])
    batch[1] = batch[2]
    return default_collate(batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_may_change_its_list(path, num_workers):
    context = "fork" if num_workers else None
    for (_, labels), (_, plain) in zip(
        make_loader(path, num_workers, context, collate_fn=by_falling_labels), make_loader(path), strict=True
    ):
        falling = sorted(plain.tolist(), reverse=True)
        assert labels.tolist() == [falling[0], falling[2], *falling[2:], falling[0]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_as_dicts(path, num_workers):
    dataset = ChunkDataset(path, fields={"pixel_values": "images", "labels": "labels"})
    context = "fork" if num_workers else None

    def as_dict(batch):
        return dict(zip(dataset.fields, h5chunk.collate(batch), strict=True))

    loader = DataLoader(dataset, 16, num_workers=num_workers, multiprocessing_context=context, collate_fn=as_dict)
    for first, batch in zip(range(0, N, 16), loader, strict=True):
        expected = dataset[first : first + 16]
        assert batch["pixel_values"].equal(expected[0]) and batch["labels"].equal(expected[1])


class Own(ChunkDataset):
    """With samples of its own."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image.float() + 1, "label": label + 100}


class OwnBatches(Own):
    def __getitems__(self, indices):
        return super().__getitems__(indices)


@pytest.mark.parametrize("kind", [Own, OwnBatches])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_own_getitem_is_called(path, num_workers, kind):
    dataset = kind(path)
    sampler = ChunkSampler(dataset, 16, window_chunks=4, num_workers=6, seed=1)
    how = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    for loader in (DataLoader(dataset, batch_sampler=sampler, **how), DataLoader(dataset, 16, **how)):
        batches = list(loader)
        assert all(batch["image"].dtype == torch.float32 for batch in batches)
        assert sorted(int(label) - 100 for batch in batches for label in batch["label"]) == list(range(N))
    loader = DataLoader(Subset(dataset, [7, 5]), 2, **how)
    assert next(iter(loader))["label"].tolist() == [dataset[i]["label"] for i in (7, 5)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_own_getitem_gets_the_random_numbers_of_the_sampler(path, num_workers):
    """As all samples of a batch do without it."""

    class Cropped(ChunkDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)

    def images(kind: type[ChunkDataset]) -> list[torch.Tensor]:
        dataset = kind(path, transforms=[h5chunk.transforms.RandomCrop((2, 2))])
        sampler = ChunkSampler(dataset, 16, seed=1)
        context = "fork" if num_workers else None
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, multiprocessing_context=context)
        return [batch[0] for _ in range(2) for batch in loader]

    assert all(own.equal(other) for own, other in zip(images(Cropped), images(ChunkDataset), strict=True))


def test_code_for_trees_finds_the_tensors(path):
    """In samples, in the list that a collate_fn gets, and in what a worker collated."""
    dataset = ChunkDataset(path)
    assert type(dataset[3]) is tuple
    batch = dataset.__getitems__([3, 4])
    for tree in (dataset[3], batch[0], batch, dataset.with_transforms(brighten)[3], Subset(dataset, [3])[0]):
        found = tree_map_only(torch.Tensor, lambda value: value.float() / 2, tree)
        assert {value.dtype for value in tree_leaves(found)} == {torch.float32}

    def halved(samples):
        return tree_map_only(torch.Tensor, lambda value: value.float() / 2, default_collate(samples))

    for images, labels in make_loader(path, 1, "fork", collate_fn=halved):
        assert images.dtype == labels.dtype == torch.float32
    with h5chunk.ChunkLoader(path, 16) as loader:
        assert all(type(each) is tuple for each in loader)


def test_a_transform_can_be_assigned(path):
    dataset = ChunkDataset(path)
    plain = dataset[5]
    dataset.transforms = brighten
    assert dataset[5][0].equal(plain[0].float() + 1) and dataset.transforms is brighten
    dataset.transforms = {"labels": [lambda label: label + 1]}
    assert dataset[[5, 6]][1].tolist() == dataset.with_transforms(None)[[5, 6]][1].add(1).tolist()
    dataset.target_transform = None
    with pytest.raises(h5chunk.OptionError, match="target_transform would never be called: assign dataset"):
        dataset.target_transform = brighten
    dataset.transform = brighten  # by its name in torchvision, as timm's create_loader does
    assert dataset[5][0].equal(plain[0].float() + 1) and dataset.transforms is brighten
    own = Own(path)
    own.target_transform = own.transform = brighten
    with pytest.raises(h5chunk.OptionError, match="use another name for them"):
        own.transforms = brighten
    with pytest.raises(h5chunk.OptionError, match="Wrong defines a transform, which would never be called"):

        class Wrong(ChunkDataset):
            def transform(self, image):
                return image


def test_a_chunk_sampler_as_sampler_names_batch_sampler(path):
    dataset = ChunkDataset(path)
    for options in ({}, {"batch_size": 4}):
        with pytest.raises(h5chunk.OptionError, match="pass it as batch_sampler"):
            next(iter(DataLoader(dataset, sampler=ChunkSampler(dataset, 16), **options)))


def brighten(image: torch.Tensor) -> torch.Tensor:
    return image.float() + 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_transform(path, num_workers):
    context = "fork" if num_workers else None
    loader = make_loader(path, num_workers, context, dataset_options={"transforms": brighten})
    plain = make_loader(path)
    for (images, labels), (raw, same) in zip(loader, plain, strict=True):
        assert images.equal(raw.float() + 1)
        assert labels.equal(same)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_subset(path, num_workers):
    wanted = [5, 9, 1, 100, 42]
    subset = Subset(ChunkDataset(path), wanted)
    context = "fork" if num_workers else None
    loader = DataLoader(subset, batch_size=2, num_workers=num_workers, multiprocessing_context=context)
    assert [int(label) for _, labels in loader for label in labels] == wanted


class Told(ChunkDataset):
    """Gives the cache in this worker, instead of samples."""

    def __getitems__(self, indices):
        super().__getitems__(indices)
        worker = get_worker_info()
        return [(worker.id if worker else -1, self.cache.nbytes)]


def told_caches(path, num_workers, interleave=6, **options) -> dict[int, int]:
    dataset = Told(path, **options)
    dataset[0]  # the main process opens it first, with the whole cache
    sampler = ChunkSampler(dataset, 4, window_chunks=2, num_workers=interleave)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        collate_fn=list,
    )
    return dict(told for batch in loader for told in batch)


def test_workers_share_the_cache(path, monkeypatch):
    through_hdf5(monkeypatch)
    chunk_bytes = 4 * 60
    assert told_caches(path, 0) == {-1: (6 * 2 + 1 + 1) * chunk_bytes}  # windows, the short chunk's filler, one more
    assert told_caches(path, 2) == {0: 8 * chunk_bytes, 1: 8 * chunk_bytes}
    assert told_caches(path, 3) == dict.fromkeys(range(3), 6 * chunk_bytes)


def test_a_number_of_workers_that_does_not_divide_is_told(tmp_path, monkeypatch):
    dataset = ChunkDataset(make_images(tmp_path / "b.h5", 400, 4, (60,), compression="gzip"))
    ChunkSampler(dataset, 4, window_chunks=2, num_workers=6)
    as_worker(monkeypatch, 0, 4)
    told = r"num_workers is 4, which does not divide 6, .* so 2 workers .*num_workers=4"
    with pytest.warns(UserWarning, match=told):
        dataset.cache  # noqa: B018
    assert dataset.cache.nbytes // (4 * 60) == 7  # each worker sees three of the six windows of two chunks


def test_workers_that_read_straight_share_nothing(tmp_path, monkeypatch):
    dataset = ChunkDataset(make_images(tmp_path / "b.h5", 80, 4, (40_000,)))
    ChunkSampler(dataset, 4, window_chunks=2, num_workers=6)
    as_worker(monkeypatch, 0, 4)
    assert dataset.cache.nbytes == 0  # and no warning


def test_the_recommendation_is_shared_without_a_sampler(tmp_path, class_folder, monkeypatch):
    through_hdf5(monkeypatch)
    path = tmp_path / "b.h5"
    h5chunk.convert(class_folder(200, height=6, width=6), path, workers=0, chunk_samples=1)
    dataset = Told(path)
    whole = dataset.header.cache.nbytes
    loader = DataLoader(dataset, batch_size=20, num_workers=2, multiprocessing_context="fork", collate_fn=list)
    assert dict(told for batch in loader for told in batch) == {0: -(-whole // 2), 1: -(-whole // 2)}


def test_full_shared_memory(path, monkeypatch):
    def full(_: int) -> torch.UntypedStorage:
        raise RuntimeError("unable to allocate shared memory(shm) for file </a>: No space left on device (28)")

    loader = make_loader(path, 1, "fork")
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(WorkerError, match=r"/dev/shm has no room for a batch of .*--shm-size=8g.*ChunkLoader"):
        next(iter(loader))


def test_errors_of_workers_keep_their_type(path, tmp_path):
    """As torch sends them: the class is called again with a longer message."""
    dataset = ChunkDataset(path)
    make_images(tmp_path / "b.h5", N, 4).replace(path)
    try:
        dataset[0]
    except FileError:
        sent = pickle.loads(pickle.dumps(ExceptionWrapper(where="in a worker")))
    with pytest.raises(FileError, match=r"replaced or changed since it was first opened"):
        sent.reraise()
