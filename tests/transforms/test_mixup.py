"""MixUp and CutMix: torchvision's meaning, and the same batches however they are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import make_file, values
from support.loaders import loader_by
from torch.utils.data import ConcatDataset, DataLoader, Subset

from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    CutMix,
    MixUp,
    Normalize,
    RandomChoice,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from h5chunk.transforms.mixing import Blend, seeds_of_batches

N, CLASSES = 90, 7
MIXUP = MixUp(alpha=0.4, num_classes=CLASSES)
CHOICE = RandomChoice([CutMix(num_classes=CLASSES), MIXUP])
NORMALIZE = Normalize((0.4, 0.5, 0.6), 0.25)
LISTS = {
    "mixup": [RandomResizedCrop(8), RandomHorizontalFlip(), NORMALIZE, MIXUP],
    "cutmix": [CutMix(alpha=0.5, num_classes=CLASSES)],
    "choice": [NORMALIZE, ToDtype(torch.bfloat16), CHOICE],
}


@pytest.fixture
def path(tmp_path):
    images, labels = values((N, 3, 9, 12), np.uint8), np.arange(N) % CLASSES
    chunks = {"chunks": (4, 3, 9, 12)}
    return make_file(
        tmp_path / "a.h5", images=(images, chunks), labels=(labels, {}), scores=(values((N, 4), np.float32), {})
    )


@pytest.fixture
def dataset(path):
    return ChunkDataset(path, fields=["images", "labels", "sample_number"])


def epoch(feed: Any) -> list[tuple[torch.Tensor, ...]]:
    """The batches of an epoch, in the order of their first samples."""
    batches = [tuple(part.clone() for part in batch) for batch in feed]
    return sorted(batches, key=lambda batch: int(batch[2][0]))


def assert_equal(ones: Any, others: Any) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("how", [{"resident": True}, {"reader": "h5py"}, {"reuse": True}, {"as_dict": True}], ids=str)
def test_any_reader(dataset, name, how):
    expected = epoch(ChunkLoader(dataset, 16, seed=5, transforms=LISTS[name]))
    feed = loader_by(dataset, 16, seed=5, transforms=LISTS[name], **how)
    found = epoch(map(dict.values, feed) if "as_dict" in how else feed)
    assert_equal(found, expected)
    plain = epoch(ChunkLoader(dataset, 16, seed=5, transforms=LISTS[name][:-1]))
    assert any(not torch.equal(images, others) for (images, *_), (others, *_) in zip(found, plain, strict=True))
    for (images, labels, _), (others, numbers, _) in zip(found, plain, strict=True):
        assert (
            images.dtype == others.dtype and labels.dtype == torch.float32 and labels.shape == (len(numbers), CLASSES)
        )
        own, before = (torch.nn.functional.one_hot(each, CLASSES).float() for each in (numbers, numbers.roll(1)))
        share = float((labels * own).sum(1)[numbers != numbers.roll(1)][0])
        assert torch.allclose(labels, own * share + before * (1 - share), atol=1e-6)
        mean = others * share + others.roll(1, 0) * (1 - share)
        is_cut = (images == others) | (images == others.roll(1, 0))
        assert is_cut.all() or torch.allclose(images.float(), mean.float(), atol=0.02)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(("num_workers", "as_dict"), [(0, False), (2, False), (0, True), (2, True)])
def test_torchs_loader(path, dataset, name, num_workers, as_dict):
    """Functions of single samples come before."""
    transforms = [NORMALIZE, CHOICE] if name == "choice" else LISTS[name]  # a data set rounds to float32 first
    expected = epoch(ChunkLoader(dataset, 16, seed=5, transforms=transforms))
    mixed = ChunkDataset(path, fields=list(dataset.fields), as_dict=as_dict, transforms=transforms)
    loader = DataLoader(mixed, batch_sampler=ChunkSampler(mixed, 16, seed=5), num_workers=num_workers)
    assert_equal(epoch(map(dict.values, loader) if as_dict else loader), expected)


def torchvisions(transform: MixUp | CutMix, height: int, width: int) -> tuple[float, ...]:
    """The weight of a sample's own label, and the box of pixels, as torchvision's documentation states them."""
    own = float(torch.distributions.Beta(transform.alpha, transform.alpha).sample())
    if isinstance(transform, MixUp):
        return (own,)
    column, row = int(torch.randint(width, ())), int(torch.randint(height, ()))
    half = 0.5 * math.sqrt(1 - own)
    left, right = max(column - int(half * width), 0), min(column + int(half * width), width)
    top, bottom = max(row - int(half * height), 0), min(row + int(half * height), height)
    return 1 - (right - left) * (bottom - top) / (width * height), top, left, bottom - top, right - left


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_distribution(kind, alpha):
    """Over 10 seeds. By chance, the greatest distance of two cumulative distributions is 0.08 in 1 of 10^5 cases."""
    transform, count, batch = kind(alpha=alpha, num_classes=3), 200, torch.zeros(2, 3, 24, 40)
    draws, found = [], []
    for seed in range(10):
        torch.manual_seed(seed)
        draws += [torchvisions(transform, 24, 40) for _ in range(count)]
        seeds = seeds_of_batches(Draws(seed, 0, np.arange(7 * count)), [7] * count)
        blends = [transform.blend(np.random.RandomState(own), batch, 0) for own in seeds]
        found += [(share, *(box or ())) for share, box in blends]
    assert len(set(found)) > 0.9 * len(found) or kind is CutMix
    for ones, others in zip(np.array(found).T, np.array(draws).T, strict=True):
        numbers = np.unique([ones, others])
        steps = [np.searchsorted(np.sort(each), numbers, side="right") for each in (ones, others)]
        assert abs(steps[0] - steps[1]).max() < 0.08 * len(found)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_torchvision_s_own(kind, monkeypatch):
    """The same results for the same weight, or box."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images, labels, box = torch.rand(5, 3, 8, 9), torch.tensor([0, 3, 3, 1, 2]), (1, 2, 3, 4)
    share = 0.3 if kind is MixUp else 1 - 12 / 72
    theirs, ours = getattr(v2, kind.__name__)(num_classes=4), kind(num_classes=4)
    drawn = {"lam": share, "lam_adjusted": share, "box": (2, 1, 6, 4)}
    monkeypatch.setattr(type(theirs), "make_params", lambda *_: drawn)
    monkeypatch.setattr(kind, "blend", lambda *_: Blend(share, None if kind is MixUp else box))
    for found, expected in zip(ours(images, labels), theirs(images, labels), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_random_choice():
    choice, batch = RandomChoice([CutMix(num_classes=3), MixUp(num_classes=3)], p=[3, 1]), torch.zeros(2, 3, 24, 40)
    seeds = seeds_of_batches(Draws(0, 0, np.arange(1000)), [1] * 1000)
    are_cut = [choice.blend(np.random.RandomState(own), batch, 0).box is not None for own in seeds]
    assert abs(sum(are_cut) - 750) < 60


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_arithmetic(dtype, axis):
    """Also in channels_last, and of labels."""
    images = torch.rand(5, 3, 8, 9).mul(200).to(dtype).contiguous(memory_format=torch.channels_last)
    images = images if axis == 0 else images.permute(0, 2, 3, 1)
    labels = torch.tensor([0, 3, 3, 1, 2])
    for transform in (MixUp(num_classes=4), CutMix(alpha=0.2, num_classes=4)):
        if dtype == torch.uint8 and isinstance(transform, MixUp):
            continue
        torch.manual_seed(3)
        found, soft = transform(images, labels)
        torch.manual_seed(3)
        random = np.random.RandomState(torch.randint(1 << 32, (2,)).numpy())
        share, box = transform.blend(random, images, axis)
        own, before = images.double(), images.roll(1, 0).double()
        expected = own * share + before * (1 - share)
        if box is not None:
            top, left, height, width = box
            rows, columns = (torch.arange(side) for side in (8, 9))
            inside = ((rows >= top) & (rows < top + height))[:, None] & (columns >= left) & (columns < left + width)
            expected = torch.where(inside if axis == 0 else inside[:, :, None], before, own)
            assert 0 < inside.sum() < 72
        assert found.dtype == dtype and found.stride() == images.stride()
        exact = dtype == torch.uint8 or box is not None
        assert torch.allclose(
            found.double(), expected, rtol=0 if exact else 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        )
        classes = torch.nn.functional.one_hot(labels, 4)
        assert torch.allclose(soft, classes * share + classes.roll(1, 0) * (1 - share))


def test_one_sample_or_none():
    rows, labels = torch.rand(1, 5), torch.tensor([2])
    for images in (rows, torch.rand(1, 3, 4, 4)):
        found, soft = MIXUP(images, labels)
        assert torch.equal(found, images) and soft.tolist() == [[0, 0, 1, 0, 0, 0, 0]]
        found, soft = MIXUP(images[:0], labels[:0])
        assert found.shape == images[:0].shape and soft.shape == (0, CLASSES)


def batches_by_first(*feeds: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    return {int(batch[2][0]): batch for feed in feeds for batch in epoch(feed)}


@pytest.mark.parametrize("name", LISTS)
def test_ranks_and_resuming(dataset, name):
    def loader(rank: int = 0, world_size: int = 1) -> ChunkLoader:
        sampler = ChunkSampler(dataset, 8, seed=5, rank=rank, world_size=world_size, window_chunks=4)
        return ChunkLoader(dataset, batch_sampler=sampler, transforms=LISTS[name])

    whole = epoch(loader())
    with loader() as first, loader() as second:
        head = [tuple(part.clone() for part in batch) for _, batch in zip(range(4), first, strict=False)]
        second.load_state_dict(first.state_dict())
        rest = epoch(second)
        assert_equal(sorted([*head, *rest], key=lambda batch: int(batch[2][0])), whole)
        assert_different(epoch(first), whole)
    alone = batches_by_first(loader())
    shared = batches_by_first(loader(0, 2), loader(1, 2))
    equal = [key for key in shared if key in alone and torch.equal(shared[key][2], alone[key][2])]
    assert_equal([shared[key] for key in equal] or whole, [alone[key] for key in equal] or whole)


def assert_different(ones: Any, others: Any) -> None:
    """Batches begin with the same samples in another epoch only by chance."""
    assert len(ones) == len(others)
    assert not any(torch.equal(one[1], other[1]) for one, other in zip(ones, others, strict=True))


def test_epochs_seeds_and_echoes_differ(dataset):
    def shares(**options: Any) -> list[float]:
        transforms = [NORMALIZE, MixUp(num_classes=CLASSES)]
        with ChunkLoader(dataset, 16, shuffle=False, transforms=transforms, **options) as loader:
            return [float(labels.square().sum()) for _ in range(2) for _, labels, _ in loader]

    found = [*shares(seed=1), *shares(seed=2), *shares(echo=2, seed=3)]
    assert len(found) == 2 * 6 * 2 + 2 * 12 and len(set(found)) == len(found)


def test_your_own_order(dataset):
    """A batch of one sample is mixed with itself, and an empty last one stays empty."""
    lists = [[3, 4, 5], [8], [9, 3]]
    feed = ChunkLoader(dataset, batch_sampler=lists, seed=5, transforms=LISTS["choice"])
    (images, labels, _), (one, its_label, _), (pair, soft, _) = feed
    plain, _, _ = next(iter(ChunkLoader(dataset, batch_sampler=[[8]], transforms=LISTS["choice"][:-1])))
    assert torch.equal(one, plain) and its_label.tolist() == [[0, 1, 0, 0, 0, 0, 0]]
    assert len(images) == len(labels) == 3 and len(pair) == len(soft) == 2
    mixed = dataset.with_transforms(LISTS["cutmix"])
    assert mixed[[8]][1].tolist() == its_label.tolist() and torch.equal(mixed[[8]][0][0], dataset[8][0])
    assert mixed[[]][1].shape == (0, CLASSES) and mixed[[8, 9]][1].shape == (2, CLASSES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_strings_beside_them(tmp_path, num_workers):
    names = np.array([f"n{number}" for number in range(N)], "S3")
    fields = {"images": (values((N, 3, 9, 12), np.uint8), {}), "labels": (np.arange(N) % CLASSES, {})}
    path = make_file(tmp_path / "b.h5", **fields, names=(names, {}))
    mixed = ChunkDataset(
        path, fields=["images", "names", "labels"], transforms=[CutMix(num_classes=7, labels="labels")]
    )
    for images, found, labels in DataLoader(mixed, batch_size=16, num_workers=num_workers):
        assert images.dtype == torch.uint8 and len(images) == len(found) == len(labels)
        assert all((soft[int(name[1:]) % CLASSES] > 0) for name, soft in zip(found, labels, strict=True))


def test_repeated_samples(dataset):
    """Batches that begin with a repeated sample are mixed differently, and alike for both ways of reading."""
    weights, transforms = np.where(np.arange(N) % 8 == 0, 30.0, 0.2), [NORMALIZE, MixUp(num_classes=CLASSES)]
    mixed = dataset.with_transforms(transforms)
    loader, other = (ChunkSampler(data, 4, seed=5, weights=weights) for data in (dataset, mixed))
    expected = list(ChunkLoader(dataset, batch_sampler=loader, transforms=transforms))
    assert_equal(list(DataLoader(mixed, batch_sampler=other)), expected)
    first = [int(numbers[0]) for _, _, numbers in expected]
    shares = [labels[labels > 0].min().item() for _, labels, _ in expected if labels.max() < 1]
    assert len(set(first)) < len(first) and len(set(shares)) == len(shares)


def test_functions_come_before(dataset):
    def brighter(images: torch.Tensor) -> torch.Tensor:
        return images + 1

    transforms = {"images": [NORMALIZE, brighter, MIXUP], "labels": lambda labels: labels + 1}
    with pytest.raises(OptionError, match="a label is 7, but num_classes is 7"):
        epoch(ChunkLoader(dataset, 16, transforms=transforms))
    transforms["images"][-1] = MixUp(alpha=0.4, num_classes=8)
    expected = epoch(ChunkLoader(dataset, 16, transforms=transforms))
    mixed = dataset.with_transforms(transforms)
    assert_equal(epoch(DataLoader(mixed, batch_sampler=ChunkSampler(mixed, 16))), expected)
    plain = epoch(ChunkLoader(dataset, 16, transforms=[NORMALIZE, MIXUP]))
    for (images, *_), (others, *_) in zip(expected, plain, strict=True):
        assert torch.allclose(images, others + 1, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "num_classes"), [("u1", 256), ("u1", 1000), ("i1", 128), ("u2", 70000), ("u4", 10), ("u8", 10)]
)
def test_integers_of_labels(tmp_path, dtype, num_classes):
    """The number of classes need not fit in them."""
    own = np.array([0, 3, 3, 9], dtype)
    made = make_file(tmp_path / "a.h5", images=(values((4, 3, 2, 2), np.uint8), {}), labels=(own, {}))
    with ChunkLoader(made, 1, shuffle=False, transforms=[CutMix(num_classes=num_classes)]) as loader:
        assert [labels.argmax().item() for _, labels in loader] == own.tolist()


def test_labels_with_a_number_per_class(path):
    dataset = ChunkDataset(path, fields=["scores", "images", "sample_number"])
    transforms = {"images": [NORMALIZE, MixUp(labels="scores")]}
    found = epoch(ChunkLoader(dataset, 16, transforms=transforms))
    for scores, images, numbers in found:
        plain = dataset[numbers.tolist()][0]
        share = float(((scores - plain.roll(1, 0)) / (plain - plain.roll(1, 0)))[0, 0])
        assert torch.allclose(scores, plain * share + plain.roll(1, 0) * (1 - share), atol=1e-3)
        assert images.shape == (len(numbers), 3, 9, 12)


@pytest.mark.parametrize("functions", [[], [torch.neg]], ids=["", "function"])
def test_single_samples_are_refused(dataset, functions):
    """Those that torch's ConcatDataset reads would never be mixed; its Subset reads batches."""
    mixed = dataset.with_transforms([NORMALIZE, *functions, MIXUP])
    for others in (DataLoader(ConcatDataset([mixed, mixed]), batch_size=16), DataLoader(mixed, batch_size=None)):
        with pytest.raises(OptionError, match=r"sample 0 is read alone, .*MixUp.* mixes batches: read batches"):
            next(iter(others))
    (_, soft, _), hard = next(iter(DataLoader(Subset(mixed, range(16)), 16))), dataset[range(16)][1]
    assert soft.shape == (16, CLASSES) and not torch.equal(soft, torch.nn.functional.one_hot(hard, CLASSES).float())
    assert mixed[[]][1].shape == (0, CLASSES)


def test_a_loader_of_the_loader_s_attributes(dataset):
    """As Accelerate makes one to skip batches."""
    for functions in ([], [torch.neg]):
        loader = ChunkLoader(dataset, 16, seed=5, transforms=[NORMALIZE, *functions, MIXUP])
        others = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
        found = epoch(others)
        assert found[0][1].shape == (16, CLASSES)
        loader.set_epoch(0)
        assert functions or assert_equal(found, epoch(loader)) is None


@pytest.mark.parametrize(
    ("transforms", "match"),
    [
        ([MIXUP], "MixUp computes means, but the samples are torch.uint8: put Normalize"),
        ([MIXUP, NORMALIZE], "put it last, after Normalize"),
        ([NORMALIZE, MIXUP, MIXUP], "put it last"),
        ({"images": [NORMALIZE, MIXUP], "scores": [MIXUP]}, r"a batch is mixed once: pass RandomChoice\(\[...\]\)"),
        ({"labels": [CutMix(num_classes=3, labels="labels")]}, "is in the list of its labels"),
        ({"labels": [CutMix(num_classes=3)]}, "in the list of its labels, 'labels': put it in that of the images"),
        ([CutMix()], "'labels' has one integer per sample, so pass num_classes="),
        ([CutMix(num_classes=3)], "a label is [3-6], but num_classes is 3, so that labels are from 0 to 2"),
        ([CutMix(num_classes=3, labels="scores")], "labels have 4 numbers per sample: pass num_classes=4"),
        ([CutMix(num_classes=3, labels="class")], "labels is not one of the fields 'images', 'labels', 'scores'"),
        ({"labels": [CutMix(num_classes=3, labels="images")]}, r"but 'images' has uint8\[3, 9, 12\]: pass labels="),
        ({"scores": [CutMix(num_classes=CLASSES, labels="labels")]}, r"CutMix is for images.*\(4,\): pass MixUp"),
        ({"images": [CutMix(num_classes=CLASSES)], "labels": [torch.Tensor.float]}, "mixes integer labels"),
    ],
)
def test_lists_and_fields_that_cannot_be_mixed(path, transforms, match):
    dataset = ChunkDataset(path, fields=["images", "labels", "scores"])
    with pytest.raises(OptionError, match=match):
        list(ChunkLoader(dataset, 16, transforms=transforms))
    with pytest.raises(OptionError, match=match):
        mixed = dataset.with_transforms(transforms)
        list(DataLoader(mixed, batch_sampler=ChunkSampler(mixed, 16)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MixUp(alpha=0), "MixUp: alpha is 0: pass a positive number"),
        (lambda: CutMix(alpha="1"), "CutMix: alpha is '1'"),
        (lambda: MixUp(num_classes=0), "MixUp: num_classes"),
        (lambda: MixUp(labels=1), "MixUp: labels is 1"),
        (lambda: RandomChoice([]), "pass a list of MixUp and CutMix"),
        (lambda: RandomChoice([NORMALIZE, MIXUP]), "pass a list of MixUp and CutMix"),
        (lambda: RandomChoice([MIXUP, CutMix(num_classes=3)]), "num_classes or labels differ"),
        (lambda: RandomChoice([MIXUP], p=[0]), r"p is \[0\]"),
        (lambda: RandomChoice([MIXUP], p=[1, 2]), r"for each of the 1 transforms"),
        (lambda: MIXUP(torch.zeros(3, 1, 2, 2), torch.zeros(4, dtype=torch.long)), "3 samples, but 4 labels"),
        (lambda: MIXUP(torch.eye(3).to_sparse(), torch.zeros(3).long()), r"sparse_coo torch.float32\[3, 3\]"),
    ],
)
def test_arguments(make, match):
    with pytest.raises(OptionError, match=match):
        make()


def test_labels_that_come_first(path):
    dataset = ChunkDataset(path, fields=["labels", "images"])
    with pytest.raises(OptionError, match=r"takes the second field for the labels, .* as in labels='labels'"):
        dataset.with_transforms({"images": [CutMix(num_classes=3)]})


def test_only_field(path):
    with pytest.raises(OptionError, match="'images' is the only field: add their field"):
        ChunkLoader(ChunkDataset(path, fields=["images"]), 16, transforms=[NORMALIZE, MIXUP])


def test_a_subclass_that_makes_samples_is_refused(path):
    class Own(ChunkDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)

    mixed = Own(path).with_transforms([CutMix(num_classes=CLASSES)])
    with pytest.raises(OptionError, match=r"overrides __getitem__.*call it in the collate_fn"):
        next(iter(DataLoader(mixed, batch_size=4)))
