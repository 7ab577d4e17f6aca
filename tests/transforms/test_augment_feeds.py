"""Augmentation in loaders and data sets: the same draws however a sample is read, and for a mask as for its image."""

from __future__ import annotations

import pickle
import threading
import warnings
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.faults import as_worker
from support.foreign import make_file, values
from support.loaders import by_sample, loader_by
from torch.utils.data import DataLoader

from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import OptionError
from h5chunk.native import available
from h5chunk.transforms import (
    AlternatingFlip,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    per_sample,
)

N = 90
LIST = [RandomResizedCrop(6, antialias=False), RandomHorizontalFlip(), Normalize(0.5, 0.25), RandomErasing()]
FIELDS = ["images", "sample_number"]


@pytest.fixture
def path(tmp_path):
    images = values((N, 3, 9, 12), np.uint8)
    masks = images[:, 0].copy()
    labels = np.arange(N) % 3
    made = make_file(
        tmp_path / "a.h5",
        images=(images, {"chunks": (4, 3, 9, 12)}),
        masks=(masks, {"chunks": (8, 9, 12)}),
        labels=(labels, {}),
    )
    with h5py.File(made, "a") as file:
        file["masks"].attrs["axes"] = np.bytes_("NHW")
    return made


@pytest.fixture
def dataset(path):
    return ChunkDataset(path, fields=FIELDS)


@pytest.fixture
def expected(dataset):
    """The first epoch of seed 5, read in the simplest way."""
    return by_sample(ChunkLoader(dataset, 16, seed=5, transforms=LIST, resident=False, shuffle=False))


@pytest.mark.parametrize(
    "how",
    [{"resident": True}, {"resident": False, "reader": "h5py"}, {"resident": False, "reuse": True}, {"num_threads": 1}],
    ids=str,
)
def test_any_reader(dataset, expected, how):
    assert by_sample(loader_by(dataset, 7, seed=5, transforms=LIST, **how)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader(dataset, expected, num_workers):
    augmented = dataset.with_transforms(LIST)
    loader = DataLoader(augmented, batch_sampler=ChunkSampler(augmented, 16, seed=5), num_workers=num_workers)
    assert by_sample(loader) == expected
    assert by_sample(loader) != expected  # another epoch


def sorted_images(*feeds: Any) -> dict[int, list[bytes]]:
    return {number: sorted(images) for number, images in by_sample(*feeds).items()}


def test_a_repeated_sample_is_drawn_for_anew(dataset):
    """Also of a subset, and alike with every reader, number of ranks and of workers, and after resuming."""
    augmented = dataset.subset(np.arange(5, 85)).with_transforms(LIST)
    some = augmented.with_transforms(None)

    def sampler(**ranks: int) -> ChunkSampler:
        return ChunkSampler(augmented, 8, seed=5, weights=np.where(np.arange(80) % 8 == 0, 30.0, 0.2), **ranks)

    def loader(**ranks: int) -> ChunkLoader:
        return ChunkLoader(some, batch_sampler=sampler(**ranks), transforms=LIST, resident=False)

    expected = sorted_images(loader())
    repeated = [images for images in expected.values() if len(images) > 3]
    assert len(repeated) == 10 and all(len(set(images)) > len(images) - 2 for images in repeated)
    assert sorted_images(ChunkLoader(some, batch_sampler=sampler(), transforms=LIST, resident=True)) == expected
    assert sorted_images(*(loader(rank=rank, world_size=2) for rank in range(2))) == expected
    for num_workers in (0, 2):
        assert sorted_images(DataLoader(augmented, batch_sampler=sampler(), num_workers=num_workers)) == expected
    with loader() as first, loader() as second:
        head = [(images.clone(), numbers.clone()) for _, (images, numbers) in zip(range(4), first, strict=False)]
        second.load_state_dict(first.state_dict())
        assert sorted_images(head, second) == expected


def test_it_goes_to_another_process(dataset, expected):
    augmented = dataset.with_transforms(LIST)
    assert len(augmented[[3, 4]]) == 2  # which starts what a process has for itself
    again = pickle.loads(pickle.dumps(augmented))
    assert by_sample(DataLoader(again, batch_sampler=ChunkSampler(again, 16, seed=5))) == expected


def test_ranks_without_samples(dataset):
    few = dataset.subset(np.arange(3))
    for resident in (False, True):
        samplers = [ChunkSampler(few, 2, rank=rank, world_size=2) for rank in range(2)]
        loaders = [ChunkLoader(few, batch_sampler=each, transforms=LIST, resident=resident) for each in samplers]
        assert len(by_sample(*loaders)) == 3


def test_torchs_loader_with_functions_behind(dataset, expected):
    augmented = dataset.with_transforms([*LIST, lambda image: image + 0])
    assert by_sample(DataLoader(augmented, batch_sampler=ChunkSampler(augmented, 16, seed=5))) == expected


def test_any_number_of_ranks(dataset, expected):
    samplers = [ChunkSampler(dataset, 8, seed=5, rank=rank, world_size=3) for rank in range(3)]
    assert by_sample(*(ChunkLoader(dataset, batch_sampler=each, transforms=LIST) for each in samplers)) == expected


def test_resuming(dataset):
    first, second = (ChunkLoader(dataset, 16, transforms=LIST, resident=False) for _ in range(2))
    whole = [batch for _ in range(2) for batch in first]
    batches = iter(second)
    next(batches), next(batches)
    state = second.state_dict()
    third = ChunkLoader(dataset, 16, transforms=LIST, resident=True)
    third.load_state_dict(state)
    rest = [batch for _ in range(2) for batch in third]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], rest, strict=True))


def test_a_subset_draws_as_the_whole_file(dataset, expected):
    part = dataset.subset(np.arange(1, N, 2))
    found = by_sample(ChunkLoader(part, 16, seed=5, transforms=LIST))
    assert list(found.values()) == [expected[number] for number in range(1, N, 2)]


def test_epochs_and_seeds_differ(dataset, expected):
    loader = ChunkLoader(dataset, 16, seed=5, transforms=LIST)
    assert by_sample(loader) == expected
    assert sum(a != b for a, b in zip(by_sample(loader).values(), expected.values(), strict=True)) > N / 2
    assert by_sample(ChunkLoader(dataset, 16, seed=6, transforms=LIST)) != expected


@pytest.mark.parametrize("resident", [False, True])
def test_an_echo_draws_anew(dataset, resident):
    crops = [RandomResizedCrop(8)]
    found = by_sample(ChunkLoader(dataset, 16, transforms=crops, echo=2, resident=resident))
    assert sum(len(set(images)) == len(images) == 2 for images in found.values()) > 0.8 * N


def test_alternating_flips_in_a_loader(dataset):
    loader = ChunkLoader(dataset, 16, transforms=[AlternatingFlip()])
    epochs = [by_sample(loader) for _ in range(4)]
    assert all(len({one, two}) == 2 for (one,), (two,) in zip(epochs[0].values(), epochs[1].values(), strict=True))
    assert epochs[0] == epochs[2] and epochs[1] == epochs[3]


class TestMasks:
    """Masks of this file are the first channel of their image, so that equal geometry gives equal results."""

    FLIP = RandomHorizontalFlip()

    def check(self, feed: Any) -> None:
        for images, masks in feed:
            assert torch.equal(images[:, 0], masks.to(images.dtype))

    @pytest.mark.parametrize("resident", [False, True])
    def test_equal_lists_give_equal_geometry(self, path, resident):
        crop = RandomResizedCrop(6, interpolation="nearest-exact")
        for first in (crop, RandomCrop(8, padding=2, padding_mode="reflect")):
            lists = {"images": [first, self.FLIP], "masks": [first, self.FLIP, ToDtype(torch.int64)]}
            dataset = ChunkDataset(path, fields=["images", "masks"])
            self.check(ChunkLoader(dataset, 16, transforms=lists, resident=resident))

    def test_what_is_not_geometric_changes_no_draw(self, path):
        """Nor does resizing that is not random; a mask is resized by the nearest pixel, whatever the list says."""
        dataset, crop = ChunkDataset(path, fields=["images", "masks"]), RandomCrop(12, padding=3)
        images = [Resize((18, 24), interpolation="nearest-exact"), crop, self.FLIP, ToDtype(torch.float64)]
        lists = {"images": [*images, RandomErasing(0.0)], "masks": [Resize((18, 24)), crop, self.FLIP]}
        for found, masks in ChunkLoader(dataset, 16, transforms=lists):
            assert torch.equal(found[:, 0], masks.double())

    def test_one_list_that_would_move_images_alone_is_an_error(self, path):
        dataset = ChunkDataset(path, fields=["images", "masks"])
        with pytest.raises(OptionError, match="changes 'images' alone, so 'masks', of the same height and width"):
            ChunkLoader(dataset, 16, transforms=[self.FLIP])
        with pytest.raises(OptionError, match=r"pass a list for each, as in transforms=\{'images': \[...\], 'masks'"):
            ChunkDataset(path, fields=["images", "masks"], transforms=[Resize(6)])
        ChunkLoader(dataset, 16, transforms={"images": [self.FLIP]})
        ChunkLoader(dataset, 16, transforms=[RandomErasing(0.5)])

    def test_with_torchs_loader(self, path):
        lists = {"images": [RandomCrop(6), self.FLIP], "masks": [RandomCrop(6), self.FLIP]}
        dataset = ChunkDataset(path, fields=["images", "masks"], transforms=lists)
        self.check(DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16)))
        self.check(DataLoader(dataset, batch_size=16, shuffle=True))
        image, mask = dataset[5]
        assert torch.equal(image[0], mask)
        self.check(ChunkLoader(dataset, 16))


def test_without_a_chunk_sampler_torch_draws(dataset):
    augmented = dataset.with_transforms([RandomResizedCrop(8)])
    torch.manual_seed(0)
    first, second = augmented[3][0], augmented[3][0]
    torch.manual_seed(0)
    assert torch.equal(augmented[3][0], first) and not torch.equal(first, second)
    before = torch.get_rng_state()
    dataset[3], dataset[[3, 4]]  # where nothing is drawn, the generator stays
    assert torch.equal(torch.get_rng_state(), before)


def test_functions_between(dataset):
    halve = [RandomCrop(6), lambda images: images // 2, Normalize(0.5, 0.5)]
    for images, _ in ChunkLoader(dataset, 16, transforms=halve):
        assert images.shape[1:] == (3, 6, 6) and images.max() <= 0.0 and images.dtype == torch.float32


@pytest.mark.parametrize(
    ("transforms", "match"),
    [
        ([lambda images: images, RandomCrop(6)], "comes after <function.*put it first"),
        ([lambda images: images, per_sample(abs)], "comes after <function.*put it first"),
        ([RandomCrop(20)], "larger than an image of 9 x 12"),
        ({"sample_number": [RandomCrop(6)]}, "is for uint8, not for torch.int64"),
    ],
)
def test_lists_that_cannot_be_computed(dataset, transforms, match):
    with pytest.raises(OptionError, match=match):
        ChunkLoader(dataset, 16, transforms=transforms)


def test_a_matrix_is_no_image(tmp_path):
    file = make_file(tmp_path / "a.h5", X=(values((9, 5), np.float32), {}))
    with h5py.File(file, "a") as opened:
        opened["X"].attrs["scale"] = 1.0
    with pytest.raises(OptionError):
        ChunkLoader(ChunkDataset(file, fields=["X"]), 3, transforms=[RandomCrop(2)])


class Jitter:
    """As torchvision's transforms: one draw for all that it is given."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand(()) * 100


@pytest.mark.skipif(not available(), reason="only native code augments in threads")
def test_threads_are_limited(dataset, monkeypatch):
    """By the caller, or because the ranks of a host or the workers of a DataLoader share its cores."""
    for name in ("h5chunk.machine.available_cores", "os.cpu_count"):
        monkeypatch.setattr(name, lambda: 8)
    before = {*threading.enumerate()}

    def num_threads() -> int:
        started = [each for each in threading.enumerate() if each not in before]
        return 1 + sum(each.name.startswith("h5chunk-augment") for each in started)  # and this thread

    for wanted, how in ((3, {"num_threads": 3}), (1, {"num_threads": 1}), (8, {})):
        with ChunkLoader(dataset, 80, transforms=LIST, **how) as loader:
            next(iter(loader))
            assert num_threads() <= wanted
            assert (num_threads() == 1) == (wanted == 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with ChunkLoader(dataset, 80, transforms=LIST) as loader:
        next(iter(loader))
        assert num_threads() == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    as_worker(monkeypatch, 0, 4)
    augmented = dataset.with_transforms(LIST)
    augmented[range(64)]
    assert num_threads() == 2
    augmented._sample_reader._converters["images"].release()


class TestPerSample:
    def test_draws(self, dataset):
        """They depend on the sample alone, and leave torch's generator as it was."""
        before = torch.get_rng_state()
        transforms = [RandomCrop(6), per_sample(Jitter()), per_sample(Jitter())]
        first, second = (by_sample(ChunkLoader(dataset, size, transforms=transforms)) for size in (16, 7))
        assert first == second and torch.equal(torch.get_rng_state(), before)
        shifts = {
            number: np.frombuffer(image, np.float32) - np.frombuffer(plain, np.uint8)
            for (number, (image,)), (plain,) in zip(
                first.items(), by_sample(ChunkLoader(dataset, 16, transforms=[RandomCrop(6)])).values(), strict=True
            )
        }
        assert all(np.ptp(shift) < 1e-4 for shift in shifts.values())
        assert len({round(float(shift[0]), 4) for shift in shifts.values()}) > 0.9 * N

    def test_generators_of_other_devices_are_left_alone(self, dataset, monkeypatch):
        """`torch.manual_seed` would seed them all."""
        seeded = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        monkeypatch.setattr(torch, "manual_seed", seeded.append)
        with ChunkLoader(dataset, 16, transforms=[per_sample(Jitter())]) as loader:
            next(iter(loader))
        assert not seeded

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_the_generators_of_a_gpu_are_as_before(self, dataset, device):
        torch.cuda.manual_seed_all(5)
        torch.rand(3, device="cuda")
        before = torch.cuda.get_rng_state_all()
        noise = per_sample(lambda image: image + torch.rand(image.shape, device=image.device))
        batches = []
        for _ in range(2):
            with ChunkLoader(dataset, 16, transforms=[noise], device=device) as loader:
                batches.append(next(iter(loader))[0].cpu())
        assert torch.equal(*batches)
        assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))

    def test_of_a_data_set(self, dataset):
        assert dataset.with_transforms(per_sample(Jitter()))[2][0].shape == (3, 9, 12)

    def test_results_of_several_shapes(self, dataset):
        cut = per_sample(lambda image: image[:, : 1 + int(image[0, 0, 0]) % 2])
        with pytest.raises(OptionError, match="differ in shape"):
            list(ChunkLoader(dataset, 16, transforms=[cut]))

    def test_what_cannot_be_called(self):
        with pytest.raises(OptionError, match="per_sample: transform is 3"):
            per_sample(3)


def torchvisions(name: str, **attributes: Any) -> Any:
    """An object of a class that is called so in torchvision."""
    kind = type(name, (Jitter,), attributes)
    kind.__module__ = "torchvision.transforms.v2._geometry"
    return kind()


@pytest.mark.parametrize("name", ["RandomResizedCrop", "ColorJitter", "RandomRotation"])
def test_a_warning_of_transforms_that_draw_once(dataset, name):
    once = torchvisions(name)
    with pytest.warns(UserWarning, match=rf"{name} of torchvision draws once.*use per_sample\({name}"):
        ChunkLoader(dataset, 16, transforms=[once])
    with pytest.warns(UserWarning, match="draws once"):
        ChunkLoader(dataset, 16, transforms=[torchvisions("Compose", transforms=[once])])


def test_no_warning(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = torchvisions("RandomResizedCrop")
        ChunkLoader(dataset, 16, transforms=[per_sample(abs), torchvisions("Normalize"), Jitter()])
        ChunkLoader(dataset, 16, transforms=[per_sample(once)])
        dataset.with_transforms(once)  # of single samples
