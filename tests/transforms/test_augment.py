"""Augmentation: what each transform does to a batch, alone and together with others, natively and with torch."""

from __future__ import annotations

import enum
import hashlib
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from h5chunk import native
from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    AlternatingFlip,
    CenterCrop,
    Cutout,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from h5chunk.transforms.images import AugmentConverter, fresh

LAST = ToDtype(torch.uint8, channels_last=True)
ALL = [
    AlternatingFlip(),
    CenterCrop(3),
    Cutout(4, value=(1, 2, 3)),
    RandomCrop(8, padding=2, padding_mode="reflect"),
    RandomErasing(0.3, value=0.5),
    RandomHorizontalFlip(0.2),
    RandomResizedCrop((7, 8), antialias=False),
    Resize(9),
    Resize((9, 8)),
]
NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def photos(count: int = 6, height: int = 40, width: int = 33, channels: int = 3) -> torch.Tensor:
    """Smooth pictures with some noise, (count, channels, height, width)."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(count, channels, 6, 6, generator=generator)
    smooth = functional.interpolate(rough, (height, width), mode="bicubic")
    noise = torch.rand(count, channels, height, width, generator=generator) * 0.2
    return ((smooth + noise) * 230).clip(0, 255).to(torch.uint8)


def places(count: int, height: int, width: int) -> torch.Tensor:
    """Pictures whose channels are the row and the column of each pixel."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns]).to(torch.uint8).expand(count, 2, height, width).contiguous()


def augment(
    transforms: list[Any], images: torch.Tensor, *, epoch: int = 0, use: int = 0, axis: int = 0
) -> torch.Tensor:
    converter = AugmentConverter(transforms, images.dtype, tuple(images.shape[1:]), axis, fresh)
    return converter(images, True, Draws(7, epoch, np.arange(len(images)), use))


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_they_are_values(transform):
    assert pickle.loads(pickle.dumps(transform)) == transform == eval(repr(transform))
    assert hash(transform) == hash(eval(repr(transform)))


class TestResizing:
    """Against Pillow and torch: antialiased within 1 of 255, and mostly equal."""

    SIZES: ClassVar = [(20, 16), (80, 66), (40, 11), (7, 33), (2, 3), (40, 33), (200, 5)]

    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_antialiased(self, size):
        images = photos()
        found = Resize(size)(images)
        pillow = [
            np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size[::-1], Image.Resampling.BILINEAR))
            for image in images
        ]
        off = (found.int() - torch.from_numpy(np.stack(pillow)).permute(0, 3, 1, 2).int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 0.001
        exact = functional.interpolate(images.double(), size, mode="bilinear", antialias=True)
        assert (found - exact).abs().max() <= 1.0 + 1e-6  # two roundings of at most a half
        torchs = functional.interpolate(images, size, mode="bilinear", antialias=True)
        assert (found.int() - torchs.int()).abs().max() <= 1

    @pytest.mark.parametrize("size", [(20, 16), (80, 66), (11, 60)], ids=str)
    def test_bilinear(self, size):
        images = photos()
        exact = functional.interpolate(images.double(), size, mode="bilinear")
        assert (Resize(size, antialias=False)(images) - exact).abs().max() <= 1.0 + 1e-6

    @pytest.mark.parametrize("size", [(24, 20), (80, 66), (11, 60)], ids=str)
    def test_nearest(self, size):
        images = photos(height=45, width=34)
        exact = functional.interpolate(images.double(), size, mode="nearest-exact")
        assert torch.equal(Resize(size, interpolation="nearest-exact")(images).double(), exact)

    def test_torchvision_s_names(self):
        """Its interpolations are members of an enumeration, whose values are their names."""
        mode = enum.Enum("InterpolationMode", {"BILINEAR": "bilinear", "NEAREST_EXACT": "nearest-exact"})
        assert Resize(8, mode.BILINEAR) == Resize(8) == Resize(8, "bilinear", antialias=True)
        assert RandomResizedCrop(8, interpolation=mode.NEAREST_EXACT).interpolation == "nearest-exact"

    def test_a_number_is_the_shorter_side(self):
        assert Resize(20)(photos(1, 40, 33)).shape[-2:] == (24, 20)
        assert Resize(20)(photos(1, 33, 40)).shape[-2:] == (20, 24)

    def test_then_the_middle(self):
        images = photos(2, 50, 40)
        whole = Resize(30)(images)  # 37 x 30
        assert torch.equal(augment([Resize(30), CenterCrop((21, 28))], images), whole[:, :, 8:29, 1:29])

    def test_a_crop_that_is_the_whole_image(self):
        images = photos(3, 40, 40)
        crop = RandomResizedCrop(24, scale=(1, 1), ratio=(1, 1))
        assert torch.equal(crop(images), Resize(24)(images))

    def test_of_no_images(self):
        assert augment([RandomResizedCrop(8), Cutout(3)], photos()[:0]).shape == (0, 3, 8, 8)


class TestRandomResizedCrop:
    """Each pixel of these pictures tells where it comes from."""

    def boxes(self, crop: RandomResizedCrop, height: int, width: int) -> np.ndarray:
        """Return about the top, left, height and width of boxes of 400 images: (4, 400)."""
        found = augment([crop], places(400, height, width)).int().flatten(2).numpy()
        low, high = found.min(2), found.max(2)
        return np.concatenate([low, high - low + 1], 1).T

    @pytest.mark.parametrize(("ratio", "size"), [((3.0, 4.0), (9, 1)), ((0.2, 0.3), (1, 9))], ids=["wide", "tall"])
    def test_no_box_of_the_ratio_fits(self, ratio, size):
        """The box in the middle has at least a pixel."""
        found = augment([RandomResizedCrop(2, ratio=ratio)], places(2, *size))
        assert (found.flatten(2) == torch.tensor([size[0] // 2, size[1] // 2])[:, None]).all()

    def test_areas_and_shapes(self):
        size = 200  # more pixels than the boxes have, so that each pixel of a box is in the result
        crop = RandomResizedCrop(size, scale=(0.1, 0.5), ratio=(0.5, 2.0), interpolation="nearest-exact")
        top, left, height, width = self.boxes(crop, 100, 140)
        areas, ratios = height * width / 14_000, width / height
        assert 0.09 < areas.min() < 0.13 and 0.45 < areas.max() < 0.51 and 0.25 < areas.mean() < 0.33
        assert 0.48 < ratios.min() < 0.6 and 1.7 < ratios.max() < 2.05 and abs(np.log(ratios).mean()) < 0.1
        assert top.min() < 5 and left.min() < 5 and (top + height).max() > 95 and (left + width).max() > 135
        assert len({*zip(top.tolist(), left.tolist(), height.tolist(), strict=True)}) > 350

    def test_shapes_that_never_fit_become_the_middle(self):
        crop = RandomResizedCrop(40, scale=(1, 1), ratio=(1, 1), interpolation="nearest-exact")
        top, left, height, width = self.boxes(crop, 20, 40)
        assert {*top} == {0} and {*left} == {10} and {*height} == {20} == {*width}


class TestRandomCrop:
    def test_places(self):
        found = RandomCrop((6, 30))(places(200, 9, 30))
        tops = found[:, 0, 0, 0]
        assert {*tops.tolist()} == {0, 1, 2, 3}
        assert (found[:, 0] == tops[:, None, None] + torch.arange(6)[:, None]).all()
        assert (found[:, 1] == torch.arange(30)).all()

    @pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
    @pytest.mark.parametrize("flip", [False, True])
    def test_padding(self, mode, flip):
        """All crops of the whole padded size are that picture."""
        images, sides = photos(3, 12, 10), (3, 1, 2, 4)  # left, top, right, bottom
        how = {"constant_values": 9} if mode == "constant" else {}
        padded = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 4), (3, 2)), mode=mode, **how)
        crop = RandomCrop((17, 15), padding=sides, padding_mode=mode, fill=9)
        found = augment([crop, RandomHorizontalFlip(1.0 if flip else 0.0)], images).numpy()
        assert (found == (padded[..., ::-1] if flip else padded)).all()

    def test_fill_of_each_channel(self):
        found = RandomCrop(8, padding=(2, 0), fill=(1, 2, 3))(torch.full((1, 3, 8, 4), 9, dtype=torch.uint8))
        assert found[0, :, 0].tolist() == [[value, value, 9, 9, 9, 9, value, value] for value in (1, 2, 3)]

    def test_padding_after_resizing(self):
        images = photos(2, 30, 30)
        found = augment([Resize((20, 20)), RandomCrop(24, padding=2, fill=7)], images)
        assert torch.equal(found, functional.pad(Resize((20, 20))(images), (2, 2, 2, 2), value=7))

    def test_padding_of_what_was_cut(self):
        images = photos(2, 30, 30)
        found = augment([CenterCrop(20), Resize(20), RandomCrop(24, padding=2, fill=7)], images)
        assert torch.equal(found, functional.pad(images[..., 5:25, 5:25], (2, 2, 2, 2), value=7))

    def test_a_flip_before_a_crop_is_seen_by_it(self):
        images = photos(4, 9, 12)
        both = augment([RandomHorizontalFlip(1.0), RandomCrop(6)], images)
        assert torch.equal(both, augment([RandomHorizontalFlip(0.0), RandomCrop(6)], images.flip(-1)))


def test_flips():
    images = photos(400, 2, 5)
    found = augment([RandomHorizontalFlip(0.25)], images)
    flipped = (found == images.flip(-1)).flatten(1).all(1)
    assert torch.equal(found[~flipped], images[~flipped]) and 70 < flipped.sum() < 130


def test_alternating_flips():
    images = photos(400, 2, 5)
    epochs = [(augment([AlternatingFlip()], images, epoch=n) == images.flip(-1)).flatten(1).all(1) for n in range(4)]
    assert 160 < epochs[0].sum() < 240
    assert (
        torch.equal(epochs[0], ~epochs[1]) and torch.equal(epochs[0], epochs[2]) and torch.equal(epochs[1], epochs[3])
    )


class TestErasing:
    def test_cutout(self):
        found = Cutout(4, value=(1, 2, 3))(torch.full((500, 3, 9, 7), 200, dtype=torch.uint8))
        erased = found[:, 0] == 1
        assert torch.equal(found[:, 1] == 2, erased) and torch.equal(found[:, 2] == 3, erased)
        assert {*found.unique().tolist()} == {1, 2, 3, 200}
        heights, widths = erased.any(2).sum(1), erased.any(1).sum(1)
        assert torch.equal(erased.sum((1, 2)), heights * widths)
        assert {*heights.tolist()} == {2, 3, 4} == {*widths.tolist()}  # at an edge a part is outside
        assert erased.any(0).all()

    def test_random_erasing(self):
        found = RandomErasing(0.6, scale=(0.1, 0.2), value=0)(torch.full((500, 1, 30, 30), 9, dtype=torch.uint8))
        areas = (found[:, 0] == 0).float().mean((1, 2))
        assert 260 < (areas > 0).sum() < 340
        assert areas[areas > 0].min() > 0.08 and areas.max() < 0.22

    def test_the_ratio_of_a_box_is_height_over_width(self):
        found = RandomErasing(1.0, (0.02, 0.1), (3, 3), value=0)(torch.full((20, 1, 60, 60), 9, dtype=torch.uint8))
        for image in found[:, 0]:
            height, width = (int((image == 0).any(axis).sum()) for axis in (1, 0))
            assert abs(height - 3 * width) <= 2

    @pytest.mark.parametrize(
        ("transforms", "value"),
        [
            ([Cutout(99, 51), Normalize(0.5, 0.25)], -1.2),  # (51 / 255 - 0.5) / 0.25
            ([Normalize(0.5, 0.25), Cutout(99, 51)], 51),
            ([ToDtype(torch.float32, scale=True), Cutout(99, 0.2), Normalize(0.5, 0.25)], -1.2),
            ([ToDtype(torch.float32), Cutout(99, 0.2), Normalize(0.5, 0.25)], -1.2),
            ([Cutout(99, 51), ToDtype(torch.float32, scale=True)], 0.2),
            ([Cutout(99, 51), ToDtype(torch.float32)], 51),
            ([Cutout(99, 51), ToDtype(torch.float32), Normalize(0.5, 0.25)], 202),
            ([ToDtype(torch.int64), Cutout(99, 51)], 51),
            ([Cutout(99, 51), ToDtype(torch.int64)], 51),
        ],
    )
    def test_values_have_the_units_of_their_place(self, transforms, value):
        assert augment(transforms, photos(1, 3, 3)).unique().tolist() == pytest.approx([value])


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_conversion(dtype, channels_last):
    """As Normalize does for the augmented bytes."""
    images, crop = photos(), [RandomResizedCrop(16), RandomHorizontalFlip()]
    more = (
        [NORMALIZE]
        if dtype is None and not channels_last
        else [NORMALIZE, ToDtype(dtype or torch.float32, channels_last=channels_last)]
    )
    found = augment([*crop, *more], images)
    expected = NORMALIZE(augment(crop, images)).to(found.dtype)
    assert torch.allclose(found, expected, rtol=1e-2 if found.dtype.itemsize == 2 else 1e-5, atol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_channels_at_the_end_and_none():
    images, crop = photos(), [RandomResizedCrop(16), RandomHorizontalFlip(), RandomCrop(16, padding=3), Cutout(3)]
    expected = augment(crop, images)
    last = augment([*crop], images.permute(0, 2, 3, 1).contiguous(), axis=2)
    assert torch.equal(last.permute(0, 3, 1, 2), expected)
    assert torch.equal(augment(crop, images[:, 0].contiguous()), augment(crop, images[:, :1].contiguous())[:, 0])


LISTS = [
    [RandomResizedCrop((24, 30)), RandomHorizontalFlip()],
    [
        RandomResizedCrop(24, interpolation="nearest-exact"),
        RandomCrop(28, padding=4, padding_mode="edge"),
        Cutout(5, 9),
    ],
    [RandomCrop((30, 20)), RandomHorizontalFlip(), NORMALIZE, RandomErasing(0.8)],
    [
        RandomHorizontalFlip(),
        Resize((60, 33)),
        RandomCrop(40, padding=(9, 4), padding_mode="reflect"),
        ToDtype(torch.int64),
    ],
    [Resize((40, 12), antialias=False), NORMALIZE, ToDtype(torch.bfloat16, channels_last=True)],
]


@pytest.mark.skipif(not native.available(), reason="the native library was not built")
@pytest.mark.parametrize("transforms", LISTS, ids=repr)
@pytest.mark.parametrize("axis", [0, 2])
def test_native_equals_torch(transforms, axis, monkeypatch):
    images = photos(10)
    if axis == 2:
        images = images.permute(0, 2, 3, 1).contiguous()
        transforms = [each for each in transforms if not getattr(each, "channels_last", False)]
    found = augment(transforms, images, axis=axis)
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    assert torch.equal(augment(transforms, images, axis=axis), found)


@pytest.mark.parametrize(
    ("transforms", "digest"),
    [
        (
            [RandomResizedCrop((24, 30)), RandomHorizontalFlip(0.3), RandomCrop((9, 8)), RandomErasing(0.7)],
            "17f2b4f71ad3673d",
        ),
        (
            [AlternatingFlip(), RandomResizedCrop(20, (0.9, 1), (2, 7)), Cutout(5), RandomErasing(scale=(0.5, 1))],
            "6463fe1d47229912",
        ),
        (
            [RandomHorizontalFlip(), RandomCrop(30, padding=(3, 4, 5, 6), padding_mode="reflect"), Cutout(40)],
            "416d7e01b14e9a67",
        ),
        ([Resize(31), CenterCrop((20, 23)), AlternatingFlip()], "aa1c718d8d046b55"),
        ([CenterCrop(25), Resize((50, 20)), RandomCrop(40, padding=20)], "f60c782a62d387de"),
    ],
    ids=repr,
)
def test_draws_are_the_same_in_every_version(transforms, digest):
    """The geometry of 500 images of one size and of several: an epoch that is resumed must go on as it began."""
    converter = AugmentConverter(transforms, torch.uint8, (3, 40, 33), 0, fresh)
    rng = np.random.default_rng(0)
    draws = Draws(2**63 + 5, 3, rng.integers(0, 1 << 40, 500), use=2)
    sizes = (np.array([40]), np.array([33])), rng.integers(26, 400, (2, 500), np.uint16)
    tables = b"".join(converter.drawing.table(*each, draws).tobytes() for each in sizes)
    assert hashlib.sha256(tables).hexdigest().startswith(digest)


def test_many_channels():
    images = torch.arange(256).to(torch.uint8).view(1, 256, 1, 1).expand(2, 256, 4, 5).contiguous()
    for transforms in ([RandomResizedCrop((6, 7))], [RandomCrop((6, 7), padding=2, padding_mode="edge")]):
        assert torch.equal(augment(transforms, images), images[:, :, :1, :1].expand(2, 256, 6, 7))
        last = augment(transforms, images.permute(0, 2, 3, 1).contiguous(), axis=2)
        assert torch.equal(last, images[:, :, 0, 0].view(2, 1, 1, 256).expand(2, 6, 7, 256))


def test_draws_depend_on_seed_epoch_use_and_sample():
    images = photos(1).expand(64, -1, -1, -1).contiguous()
    found = [augment([RandomResizedCrop(9)], images, epoch=epoch, use=use) for epoch, use in ((0, 0), (1, 0), (0, 1))]
    every = torch.cat(found).flatten(1).unique(dim=0)
    assert len(every) > 180  # of 192


def test_called_as_functions_they_draw_from_torch():
    images, crop = photos(), RandomResizedCrop(9)
    torch.manual_seed(0)
    first, second = crop(images), crop(images)
    torch.manual_seed(0)
    assert torch.equal(crop(images), first) and not torch.equal(first, second)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomResizedCrop(0), "size is 0: pass a whole number from 1 to 16384"),
        (lambda: RandomResizedCrop((1, 2, 3)), "pass a number, or height and width"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), r"scale is \(0.5, 0.1\): pass two numbers above 0"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 2)), "the lower first, at most 1"),
        (lambda: RandomResizedCrop(8, interpolation="cubic"), "pass one of bilinear, nearest-exact"),
        (lambda: RandomCrop(8, padding=(1, 2, 3)), "pass a number, or 2 or 4 of them"),
        (lambda: RandomCrop(8, padding=-1), "padding is -1"),
        (lambda: RandomCrop(8, padding_mode="wrap"), "pass one of constant, reflect, edge"),
        (lambda: RandomCrop(8, fill=256), "fill is 256"),
        (lambda: Resize(8, antialias=2), "Resize: antialias is 2: pass True or False"),
        (lambda: RandomHorizontalFlip(1.5), "p is 1.5: pass a probability"),
        (lambda: RandomErasing(value="random"), "value is 'random': pass a number, or one per channel"),
        (lambda: Cutout(0), "size is 0"),
        (lambda: augment([RandomCrop(41)], photos()), "an image of 40 x 33: put a Resize before it"),
        (lambda: augment([CenterCrop(41)], photos()), "larger than an image of 40 x 33.* pass a smaller size"),
        (lambda: augment([RandomCrop(8, 33, padding_mode="reflect")], photos()), "too short to reflect 33 pixels"),
        (lambda: augment([NORMALIZE, RandomCrop(8)], photos()), "comes after Normalize.*put crops"),
        (lambda: augment([Cutout(8), RandomHorizontalFlip()], photos()), "comes after Cutout"),
        (lambda: augment([Resize(8), RandomResizedCrop(4)], photos()), "only one transform may resize"),
        (lambda: augment([RandomCrop(40, padding=4), Resize(8)], photos()), "would resize the padding"),
        (lambda: augment([RandomCrop(8, 1), RandomCrop(8, 1)], photos()), "cannot pad.*: leave out its"),
        (lambda: augment([CenterCrop(8), RandomCrop(8, 1)], photos()), "CenterCrop.* has cropped: put the"),
        (lambda: augment([RandomCrop(8, 1, fill=(1, 2))], photos()), "fill has 2 values for 3 channels"),
        (lambda: augment([Cutout(8, (1, 2))], photos()), "value has 2 values for 3 channels"),
        (lambda: augment([RandomCrop(8)], photos().float()), "is for uint8, not for torch.float32"),
        (lambda: augment([RandomCrop(8)], torch.zeros(3, 9, dtype=torch.uint8)), r"samples have the shape \(9,\)"),
        (lambda: augment([Resize(3)], torch.zeros(1, 257, 4, 4, dtype=torch.uint8)), "at most 256 channels"),
        (lambda: augment([Resize(100)], photos(1, 300, 1)), "30000 pixels long, more than 16384"),
        (lambda: augment([RandomCrop(4), LAST], photos()[:, 0]), "channels_last needs samples"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(OptionError, match=match):
        make()
