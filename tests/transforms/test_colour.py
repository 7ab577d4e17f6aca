"""ColorJitter: torchvision's meaning, and the same colours however a sample is read."""

from __future__ import annotations

from collections.abc import Callable

import h5py
import numpy as np
import pytest
import torch
from support.foreign import make_file, values
from support.loaders import by_sample, loader_by
from torch.utils.data import DataLoader

from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    ColorJitter,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from h5chunk.transforms.colour import Jitter, jitter_with_torch

N = 60
JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1)
NORMALIZE = Normalize((0.4, 0.5, 0.6), 0.25)
LISTS = {
    "augmented": [RandomResizedCrop(6), RandomHorizontalFlip(), JITTER, NORMALIZE, ToDtype(torch.float16)],
    "alone": [JITTER],
    "erased": [JITTER, RandomErasing(0.7), ToDtype(torch.float32, scale=True)],
}
FIELDS = ["images", "sample_number"]


# torchvision's arithmetic for uint8, as its documentation and functional interface state it; images are (3, H, W)


def gray(image: torch.Tensor) -> torch.Tensor:
    return (0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]).floor()


def blended(image: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    return (image * factor + other * (1 - factor)).clamp(0, 255).floor()


def brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
    return blended(image, torch.zeros(()), factor)


def contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    return blended(image, gray(image).mean(), factor)


def saturation(image: torch.Tensor, factor: float) -> torch.Tensor:
    return blended(image, gray(image), factor)


def hue(image: torch.Tensor, shift: float) -> torch.Tensor:
    """By way of hue, saturation and value from 0 to 1, where 1 becomes 255, and fractions are cut off."""
    high, low = image.amax(0) / 255, image.amin(0) / 255
    red, green, blue = image / 255
    delta = high - low
    by = torch.where(delta == 0, 1, delta)
    sector = torch.where(
        high == red, (green - blue) / by, torch.where(high == green, 2 + (blue - red) / by, 4 + (red - green) / by)
    )
    sector = (sector / 6 + shift) % 1 * 6
    channels = []
    for first in (5, 3, 1):  # value * (1 - saturation * max(0, min(k, 4 - k, 1))), k = (first + 6 * hue) mod 6
        k = (first + sector) % 6
        channels.append(high - delta * torch.minimum(k, 4 - k).clamp(0, 1))
    return (torch.stack(channels) * 255.999 + 1e-9).floor().clamp(0, 255)


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.9, 1.0, 1.7, 20.0])
@pytest.mark.parametrize("step", STEPS)
def test_each_change(step, factor):
    """For all kinds of colours, values differ by at most 1, and few of them."""
    if step == "hue":
        factor = min(factor, 1.0) - 0.5
    shades = torch.tensor([0, 1, 2, 77, 127, 128, 200, 254, 255])
    images = torch.cartesian_prod(shades, shades, shades).T.reshape(3, 27, 27).to(torch.uint8)
    images = torch.stack([images, torch.from_numpy(values((3, 27, 27), np.uint8))])
    found = ColorJitter(**{step: (factor, factor)})(images)
    for image, result in zip(images.double(), found.double(), strict=True):
        distance = (STEPS[step](image, factor) - result).abs()
        assert distance.max() <= 1 and distance.mean() < 0.02


@pytest.mark.parametrize("step", STEPS)
def test_each_change_of_torchvision(step):
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = torch.from_numpy(values((4, 3, 30, 30), np.uint8))
    for factor in (-0.5, -0.2, 0.4) if step == "hue" else (0.0, 0.3, 0.9, 1.7, 20.0):
        expected = getattr(functional, f"adjust_{step}")(images, factor)
        distance = (ColorJitter(**{step: (factor, factor)})(images).int() - expected.int()).abs()
        assert distance.max() <= 1 and distance.float().mean() < 0.03


def drawn(jitter: ColorJitter, draws: Draws) -> np.ndarray:
    table = np.empty((len(draws.samples), 5), np.int32)
    jitter.draw(draws, table)
    return table


def changed(image: torch.Tensor, row: np.ndarray) -> torch.Tensor:
    """The changes in a row of a table, one after another."""
    factors = [*row[1:4].view(np.float32).tolist(), row[4] / (6 << 16)]
    for place in range(4):
        step = row[0] >> 3 * place & 7
        if step < 4:
            image = [*STEPS.values()][step](image, factors[step])
    return image


def test_orders():
    """One change after another, in the order that was drawn: each may enlarge a distance of 1."""
    images = torch.from_numpy(values((48, 3, 8, 9), np.uint8))
    table = drawn(JITTER, Draws(3, 0, np.arange(48)))
    assert len(set(table[:, 0].tolist())) > 15
    expected = torch.stack([changed(image, row) for image, row in zip(images.double(), table, strict=True)])
    jitter_with_torch(images.view(48, 3, 72), table)
    assert (images - expected).abs().max() <= 6 and (images - expected).abs().mean() < 0.02


@pytest.mark.parametrize("shape", [(3, 8, 9), (40, 39, 3), (1, 70, 30), (40, 30)])
def test_native_equals_torch(shape, monkeypatch):
    images = torch.from_numpy(values((13, *shape), np.uint8))
    found, expected = images.clone(), images.clone()
    for jitter in (ColorJitter(0.4, (0, 3), (0, 5), 0.5), ColorJitter(hue=0.3, brightness=3), ColorJitter(contrast=1)):
        change, draws = Jitter(jitter, shape, 2 if shape[-1] == 3 else 0), Draws(1, 0, np.arange(13))
        change(found, draws)
        with monkeypatch.context() as patched:
            patched.setattr("h5chunk.native.available", lambda: False)
            change(expected, draws)
        assert torch.equal(found, expected) and not torch.equal(found, images)


def test_distribution():
    """Over 10 seeds: uniform factors, all orders equally often, and independent of each other."""
    jitter = ColorJitter(0.4, (0.5, 2.0), 3.0, 0.1)
    table = np.concatenate([drawn(jitter, Draws(seed, 1, np.arange(480))) for seed in range(10)])
    numbers = np.column_stack([table[:, 1:4].copy().view(np.float32), table[:, 4] / (6 << 16)])
    for column, (low, high) in zip(numbers.T, ((0.6, 1.4), (0.5, 2.0), (0.0, 4.0), (-0.1, 0.1)), strict=True):
        share = (np.sort(column) - low) / (high - low)
        assert abs(share - np.arange(len(share)) / len(share)).max() < 2.5 / len(share) ** 0.5  # in 1 of 10^5 cases not
    counts = np.unique(table[:, 0], return_counts=True)[1]
    assert len(counts) == 24 and (np.square(counts - 200.0) / 200).sum() < 70
    correlations = np.corrcoef(np.column_stack([numbers, table[:, 0]]).T) - np.eye(5)
    assert abs(correlations).max() < 0.07


def test_one_channel_and_an_axis_of_channels_at_the_end():
    images = torch.from_numpy(values((5, 3, 8, 9), np.uint8))
    for shape in ((5, 8, 9, 3), (5, 1, 24, 9), (5, 24, 9)):
        given = images.permute(0, 2, 3, 1) if shape[-1] == 3 else images.reshape(shape)
        torch.manual_seed(1)
        found = JITTER(given)
        assert found.shape == given.shape and found.dtype == torch.uint8 and not torch.equal(found, given)
        torch.manual_seed(1)
        if shape[-1] == 3:
            assert torch.equal(found, JITTER(images).permute(0, 2, 3, 1))
        else:
            assert torch.equal(found, ColorJitter(0.4, 0.4)(given))
    assert torch.equal(ColorJitter(hue=0.2, saturation=2)(given), given)


@pytest.fixture
def path(tmp_path):
    images = values((N, 3, 9, 12), np.uint8)
    made = make_file(
        tmp_path / "a.h5",
        images=(images, {"chunks": (4, 3, 9, 12)}),
        masks=(images[:, 0].copy(), {"chunks": (8, 9, 12)}),
        floats=(values((N, 3, 4, 4), np.float32), {}),
        pairs=(images[:, :2].copy(), {}),
    )
    with h5py.File(made, "a") as file:
        file["masks"].attrs["axes"] = np.bytes_("NHW")
    return made


@pytest.fixture
def dataset(path):
    return ChunkDataset(path, fields=FIELDS)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("how", [{"resident": True}, {"reader": "h5py"}, {"reuse": True}, {"num_threads": 1}], ids=str)
def test_any_reader(dataset, name, how):
    expected = by_sample(ChunkLoader(dataset, 16, seed=5, transforms=LISTS[name], shuffle=False))
    assert by_sample(loader_by(dataset, 7, seed=5, transforms=LISTS[name], **how)) == expected


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader(dataset, name, num_workers):
    expected = by_sample(ChunkLoader(dataset, 16, seed=5, transforms=LISTS[name]))
    changed = dataset.with_transforms(LISTS[name])
    loader = DataLoader(changed, batch_sampler=ChunkSampler(changed, 16, seed=5), num_workers=num_workers)
    assert by_sample(loader) == expected
    assert by_sample(loader) != expected  # another epoch


def test_it_follows_the_other_transforms(dataset):
    """Geometry is drawn as without ColorJitter, and what comes after it is computed from its result."""
    lists = [LISTS["augmented"], LISTS["augmented"][:3], LISTS["augmented"][:2]]
    changed, jittered, plain = (next(iter(ChunkLoader(dataset, N, seed=5, transforms=own))) for own in lists)
    assert torch.equal(changed[0], ToDtype(torch.float16)(NORMALIZE(jittered[0])))
    expected = plain[0].clone()
    Jitter(JITTER, (3, 6, 6), 0)(expected, Draws(5, 0, plain[1].numpy()))
    assert jittered[0].dtype == torch.uint8 and torch.equal(jittered[0], expected)
    assert not torch.equal(expected, plain[0])


def test_channels_last(dataset):
    transforms = [JITTER, NORMALIZE, ToDtype(torch.bfloat16, channels_last=True)]
    (images, _), (others, _) = (
        next(iter(ChunkLoader(dataset, 8, transforms=own))) for own in (transforms, [JITTER, NORMALIZE])
    )
    assert images.is_contiguous(memory_format=torch.channels_last) and torch.equal(images, others.bfloat16())


@pytest.mark.parametrize(
    ("fields", "transforms", "match"),
    [
        ("images", [NORMALIZE, JITTER], "Normalize.* comes before ColorJitter.*: put crops, resizing and flips first"),
        ("images", [JITTER, RandomCrop(4)], "ColorJitter.* comes before RandomCrop"),
        ("images", [RandomErasing(), JITTER], "RandomErasing.* comes before ColorJitter"),
        ("images", [JITTER, JITTER], "is the second ColorJitter of the list"),
        ("images", [torch.neg, JITTER], "put it first, as its random numbers"),
        ("masks", [JITTER], "which has a mask, whose values are classes: leave it out"),
        ("floats", [JITTER], "is for uint8, not for torch.float32"),
        ("pairs", [RandomCrop(4), JITTER], r"is for images of 1 or 3 channels, but samples have the shape \(2, 4, 4\)"),
    ],
)
def test_lists_and_fields_that_do_not_fit(path, fields, transforms, match):
    dataset = ChunkDataset(path, fields=[fields])
    with pytest.raises(OptionError, match=match):
        ChunkLoader(dataset, 16, transforms=transforms)
    with pytest.raises(OptionError, match=match):
        dataset.with_transforms(transforms)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"brightness": -1}, "brightness is -1: pass numbers at least 0"),
        ({"contrast": (2, 1)}, r"contrast is \(2, 1\): pass numbers at least 0, or an ascending pair"),
        ({"saturation": (1, 2, 3)}, r"saturation is \(1, 2, 3\): pass a number, or a pair"),
        ({"hue": 0.6}, "hue is 0.6: pass numbers from -0.5 to 0.5"),
        ({"hue": "red"}, "hue is 'red': pass a number"),
        ({"brightness": float("nan")}, "brightness is nan"),
    ],
)
def test_arguments(options, match):
    with pytest.raises(OptionError, match=match):
        ColorJitter(**options)


def test_ranges():
    assert ColorJitter(0.25, 2, (0.5, 1), 0.125).ranges == ((0.75, 1.25), (0.0, 3.0), (0.5, 1.0), (-0.125, 0.125))
    assert ColorJitter(0.0, (1, 1), None, 0).ranges == (None,) * 4
    assert ColorJitter(0.25) == ColorJitter((0.75, 1.25)) and hash(JITTER) == hash(ColorJitter(0.4, 0.4, 0.4, 0.1))
