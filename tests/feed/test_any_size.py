"""Images of any size in batches: decoded, cropped and resized, with every reader."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from support.leftovers import in_fork
from support.loaders import loader_by
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import native
from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    CenterCrop,
    ColorJitter,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from h5chunk.transforms.colour import Jitter

SQUARE = [Resize(24), CenterCrop(20)]
RANDOM = [RandomResizedCrop(16), RandomHorizontalFlip()]


def picture(height, width, seed):
    values = np.random.default_rng(seed).integers(0, 256, (2, 3, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of other sizes, kinds, colours and orientations, in two classes."""
    folder = tmp_path_factory.mktemp("any") / "photos"
    for name in "ab":
        (folder / name).mkdir(parents=True)
    for number in range(40):
        image, how = picture(28 + number, 90 - number, number), {}
        kind = ("jpg", "png", "jpg", "webp")[number % 4]
        if number % 8 == 2:
            how["exif"] = Image.Exif()
            how["exif"][0x0112] = 1 + number // 8 + number % 3
        if kind == "jpg":
            image = image.convert(("RGB", "L", "CMYK")[number % 3])
            how |= {"quality": 95, "subsampling": 0, "progressive": number % 5 == 0}
        image.save(
            folder / "ab"[number % 2] / f"{number}.{kind}", **({"lossless": True} if kind == "webp" else {}), **how
        )
    return folder


@pytest.fixture(scope="module")
def kept(photos):
    h5chunk.convert(photos, photos.parent / "kept.h5", keep_encoded=True, chunk_samples=4)
    return photos.parent / "kept.h5"


@pytest.fixture(scope="module")
def raw(photos):
    h5chunk.convert(photos, photos.parent / "raw.h5", keep_size=True, chunk_samples=4)
    return photos.parent / "raw.h5"


def all_batches(data, size=8, epoch_of=1, **options):
    with loader_by(data, size, **options) as loader:
        for _ in range(epoch_of - 1):
            list(loader)
        return [tuple(each.clone() for each in batch) for batch in loader]


def test_samples_are_decoded_upright_in_rgb(photos, kept):
    dataset = h5chunk.ChunkDataset(kept)
    for number, name in enumerate(dataset.source_names):
        expected = np.asarray(ImageOps.exif_transpose(Image.open(photos / name)).convert("RGB"))
        found = dataset[number][0].permute(1, 2, 0).numpy()
        assert np.abs(found.astype(int) - expected).max() <= 3, name


@pytest.mark.parametrize("transforms", [SQUARE, RANDOM], ids=["square", "random"])
def test_encoded_and_raw_give_the_same(kept, raw, transforms):
    for (one, labels), (other, others) in zip(
        all_batches(kept, transforms=transforms), all_batches(raw, transforms=transforms), strict=True
    ):
        assert torch.equal(labels, others) and one.shape[1:] == other.shape[1:] and one.dtype == torch.uint8
        assert (one.int() - other.int()).abs().max() <= 3


@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_colours_change_after_the_crop(kept, num_workers):
    jitter, fields = ColorJitter(0.4, 0.4, 0.4, 0.1), ["images", "sample_number"]
    dataset = h5chunk.ChunkDataset(kept, fields=fields).with_transforms([*RANDOM, jitter, Normalize(0.5, 0.25)])
    if num_workers is None:
        changed = all_batches(dataset, seed=3)
    else:
        sampler = h5chunk.ChunkSampler(dataset, 8, seed=3, num_workers=0)
        changed = list(DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers))
    plain = all_batches(dataset.with_transforms(RANDOM), seed=3)
    for (images, numbers), (expected, others) in zip(changed, plain, strict=True):
        Jitter(jitter, (3, 16, 16), 0)(expected, Draws(3, 0, numbers.numpy()))
        assert torch.equal(numbers, others) and torch.equal(images, Normalize(0.5, 0.25)(expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_they_are_mixed(kept, num_workers):
    dataset = h5chunk.ChunkDataset(kept, transforms=[*RANDOM, Normalize(0.5, 0.25), MixUp(num_classes=2)])
    loader = DataLoader(
        dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8, seed=3, num_workers=0), num_workers=num_workers
    )
    plain = all_batches(kept, seed=3, transforms=[*RANDOM, Normalize(0.5, 0.25)])
    for mixed, others, (before, labels) in zip(loader, all_batches(dataset, seed=3), plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mixed, others, strict=True))
        share = float(mixed[1][(labels != labels.roll(1)).nonzero()[0, 0], labels[(labels != labels.roll(1))][0]])
        assert torch.allclose(mixed[0], before * share + before.roll(1, 0) * (1 - share), atol=1e-5)


def test_result_is_that_of_pillow(photos, raw):
    dataset = h5chunk.ChunkDataset(raw, fields=["images", "sample_number"])
    for images, numbers in all_batches(dataset, transforms=[Resize((20, 30))]):
        for image, name in zip(images, dataset.source_names[numbers], strict=True):
            expected = ImageOps.exif_transpose(Image.open(photos / name)).convert("RGB")
            expected = np.asarray(expected.resize((30, 20), Image.Resampling.BILINEAR))
            assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


@pytest.mark.parametrize("options", [{"reuse": True}, {"resident": True}, {"reader": "h5py"}, {"num_threads": 1}])
def test_all_ways_of_reading_agree(kept, options):
    how = {"transforms": [*RANDOM, Normalize(0.5, 0.25), ToDtype(torch.float16, channels_last=True)], "epoch_of": 2}
    expected, found = all_batches(kept, **how), all_batches(kept, **how, **options)
    assert len(found) == len(expected) == 5
    assert all(
        torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert found[0][0].is_contiguous(memory_format=torch.channels_last)


def test_other_fields_of_batches_that_are_begun_ahead(kept):
    data = h5chunk.ChunkDataset(kept, fields=["images", "sample_number"])
    how = {"transforms": {"images": SQUARE, "sample_number": [ToDtype(torch.float32)]}}
    for (images, numbers), (others, also) in zip(
        all_batches(data, **how), all_batches(data, reuse=True, **how), strict=True
    ):
        assert torch.equal(images, others) and torch.equal(numbers, also)


def test_echoes_are_drawn_again(kept):
    batches = all_batches(kept, size=20, transforms=RANDOM, echo=2)
    assert len(batches) == 4 and not torch.equal(batches[0][0], batches[1][0])


def test_repeats_of_a_sample_are_drawn_anew(kept):
    data = h5chunk.ChunkDataset(kept, fields=["images", "sample_number"])
    sampler = h5chunk.ChunkSampler(data, 10, weights=np.eye(1, 40, 7)[0])
    batches = all_batches(data, None, batch_sampler=sampler, transforms=RANDOM)
    assert {number for _, numbers in batches for number in numbers.tolist()} == {7}
    assert len({image.numpy().tobytes() for images, _ in batches for image in images}) > 35


def test_a_position_is_resumed_and_left(kept):
    data = h5chunk.ChunkDataset(kept, fields=["images", "sample_number"])
    whole = all_batches(data, transforms=RANDOM)
    assert sorted(torch.cat([numbers for _, numbers in whole]).tolist()) == list(range(40))
    with (
        h5chunk.ChunkLoader(data, 8, transforms=RANDOM) as first,
        h5chunk.ChunkLoader(data, 8, transforms=RANDOM) as other,
    ):
        for number, _ in enumerate(first, 1):
            if number == 2:
                break
        other.load_state_dict(first.state_dict())
        rest = [tuple(each.clone() for each in batch) for batch in other]
        again = [tuple(each.clone() for each in batch) for batch in first]
    assert [numbers.tolist() for _, numbers in rest] == [numbers.tolist() for _, numbers in whole[2:]]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(rest, whole[2:], strict=True))
    assert len(again) in (3, 5)


def test_ranks_share_the_images(kept):
    data, seen = h5chunk.ChunkDataset(kept, fields=["images", "sample_number"]), []
    for rank in range(2):
        sampler = h5chunk.ChunkSampler(data, 4, rank=rank, world_size=2)
        seen += [
            n
            for _, numbers in all_batches(data, None, batch_sampler=sampler, transforms=SQUARE)
            for n in numbers.tolist()
        ]
    assert sorted(seen) == list(range(40))


def test_several_files_and_subsets(photos, kept, raw, tmp_path):
    h5chunk.convert(photos, tmp_path / "shards", keep_encoded=True, shards=3, chunk_samples=4)
    data = h5chunk.ChunkDataset(tmp_path / "shards", fields=["images", "sample_number"])
    assert len(data) == 40
    part = data.subset(np.arange(5, 30, 3))
    found = all_batches(part, transforms=SQUARE, shuffle=False)
    one = {name: number for number, name in enumerate(h5chunk.ChunkDataset(kept).source_names)}
    alike = all_batches(h5chunk.ChunkDataset(kept), transforms=SQUARE, shuffle=False)
    images = torch.cat([batch[0] for batch in alike])
    for own, numbers in found:
        for image, name in zip(own, part.source_names[numbers.numpy()], strict=True):
            assert torch.equal(image, images[one[name]])


@pytest.mark.parametrize("workers", [0, 2])
def test_data_set_in_a_data_loader(kept, workers):
    dataset = h5chunk.ChunkDataset(kept, transforms=[*RANDOM, Normalize(0.5, 0.25)])
    sampler = h5chunk.ChunkSampler(dataset, 8, num_workers=0)
    found = list(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    expected = all_batches(kept, transforms=[*RANDOM, Normalize(0.5, 0.25)])
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, expected, strict=True))


def test_batches_of_other_sizes_name_the_remedy(kept):
    for transforms in (None, [Normalize(0.5, 0.5)], [Resize(24)], [RandomHorizontalFlip()]):
        with pytest.raises(OptionError, match=r"differ in size.*RandomResizedCrop"):
            h5chunk.ChunkLoader(kept, 8, transforms=transforms)
    dataset = h5chunk.ChunkDataset(kept)
    with pytest.raises(FieldError, match=r"differ in size.*RandomResizedCrop"):
        next(iter(DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 8))))


def change(path, tmp_path, dataset, change_it):
    copy = tmp_path / "changed.h5"
    copy.write_bytes(path.read_bytes())
    with h5py.File(copy, "r+") as file:
        values = file[dataset][()]
        change_it(values)
        file[dataset][...] = values
    return copy


def test_a_broken_image_is_named(kept, tmp_path):
    dataset = h5chunk.ChunkDataset(kept)
    names = dataset.source_names.tolist()
    number = next(n for n, name in enumerate(names) if name.endswith(".jpg"))
    with h5py.File(kept) as file:
        start, stop = file["images/offsets"][number : number + 2]
    broken = change(kept, tmp_path, "images/data", lambda data: data[(start + stop) // 2 : stop].fill(0))
    with pytest.raises(FileError, match=rf"changed.h5: {names[number]} cannot be decoded"):
        all_batches(broken, transforms=SQUARE)
    with pytest.raises(FileError, match="does not match its checksum"):
        all_batches(h5chunk.ChunkDataset(broken, checksums="first"), transforms=SQUARE)
    broken = change(kept, tmp_path, "images/data", lambda data: data[start:stop].fill(0))
    with pytest.raises(FileError, match=rf"changed.h5: {names[number]} cannot be decoded: its bytes are not an image"):
        all_batches(broken, transforms=SQUARE)


@pytest.mark.parametrize("height", [7, 1 << 15, 1 << 31])
def test_sizes_that_lie_are_errors(kept, tmp_path, height):
    def lie(heights):
        heights[3] = height

    lying = change(kept, tmp_path, "images/heights", lie)
    with pytest.raises(FileError, match=r"but the HDF5 file records|more than|at most .* pixels can be decoded"):
        all_batches(lying, transforms=SQUARE)
    with pytest.raises(FileError, match=r"but the HDF5 file records|more than|at most .* pixels can be decoded"):
        h5chunk.ChunkDataset(lying)[3]


def test_offsets_that_lie_are_errors(kept, raw, tmp_path):
    def lie(offsets):
        offsets[5] = 1 << 40

    for path in (kept, raw):
        with pytest.raises(FileError, match="is damaged"):
            all_batches(change(path, tmp_path, "images/offsets", lie), transforms=SQUARE)
    with pytest.raises(FileError, match="is damaged: image"):
        all_batches(change(raw, tmp_path, "images/widths", lambda widths: widths.fill(9)), transforms=SQUARE)


def test_large_jpegs_are_scaled_while_they_are_decoded(tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    smooth = picture(640, 512, 1)
    smooth.save(folder / "a.jpg", quality=95)
    h5chunk.convert(folder, tmp_path / "p.h5", keep_encoded=True)
    ((found,),) = all_batches(tmp_path / "p.h5", transforms=[Resize((40, 32))])
    expected = np.asarray(Image.open(folder / "a.jpg").resize((32, 40), Image.Resampling.BILINEAR))
    assert np.abs(found[0].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 4


def test_an_image_of_one_pixel(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(4):
        encoded = io.BytesIO()
        picture(8, 8, number).save(encoded, "JPEG", quality=95, subsampling=0)
        data = bytearray(encoded.getvalue())
        size = data.index(b"\xff\xc0") + 5
        data[size : size + 4] = b"\0\1\0\1"  # the first pixel of the block
        (tmp_path / "photos" / "a" / f"{number}.jpg").write_bytes(data)
    h5chunk.convert(tmp_path / "photos", tmp_path / "a.h5", keep_encoded=True)
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["images", "sample_number"])
    ((images, numbers),) = all_batches(dataset, size=4, transforms=[Resize((1, 1))])
    for image, number in zip(images, numbers.tolist(), strict=True):
        assert torch.equal(image, dataset[number][0])


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    """JPEG of all kinds of subsampling and colours; they are scaled while they are decoded to a small size."""
    folder = tmp_path_factory.mktemp("jpegs")
    (folder / "photos").mkdir()
    for number in range(48):
        image = picture(201 + 7 * number % 50, 120 + 11 * number % 90, number)
        image = image.convert("L" if number % 7 == 3 else "RGB")
        how = {"quality": 60 + number, "progressive": number % 5 == 0, "restart_marker_rows": number % 2}
        image.save(folder / "photos" / f"{number}.jpg", subsampling=number % 3, **how)
    h5chunk.convert(folder / "photos", folder / "jpegs.h5", keep_encoded=True)
    return folder / "jpegs.h5"


@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_all_decoders_agree(jpegs, tmp_path, monkeypatch, color):
    if color == "gray":
        h5chunk.convert(jpegs.parent / "photos", tmp_path / "gray.h5", keep_encoded=True, color="gray")
    path, found = (jpegs if color == "rgb" else tmp_path / "gray.h5"), {}
    lists = [Resize(24), CenterCrop(20)], [RandomResizedCrop(32, scale=(0.02, 0.5))], [CenterCrop(100)]
    for name, missing in (
        ("libjpeg-turbo", {}),
        ("simplejpeg", {"native.jpeg.load": lambda _: None}),
        ("Pillow", {"sources.decode_any.simplejpeg": None}),
    ):
        for each, value in missing.items():
            monkeypatch.setattr(f"h5chunk.{each}", value)
        with h5chunk.ChunkLoader(path, 8, transforms=lists[0]) as loader:
            assert (f"JPEG by {name}" in repr(loader)) == (native.available() or name != "libjpeg-turbo")
            assert ('pip install "h5chunk[jpeg]"' in repr(loader)) == (name == "Pillow")
        found[name] = [batch[0] for each in lists for batch in all_batches(path, transforms=each)]
    for one, other, third in zip(*found.values(), strict=True):
        assert torch.equal(one, other)
        assert one.float().std() > 20 and (one.float() - third.float()).abs().mean() <= 2  # which does not scale


def test_memory_is_limited(kept):
    with pytest.raises(OptionError, match="memory_bytes"):
        h5chunk.ChunkLoader(kept, 8, transforms=SQUARE, memory_bytes=1000)


def test_grey_images(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "g.h5", keep_encoded=True, color="gray")
    ((images, _), *_) = all_batches(tmp_path / "g.h5", transforms=SQUARE)
    assert images.shape == (8, 1, 20, 20)
    data = h5chunk.ChunkDataset(tmp_path / "g.h5")
    name = data.source_names[0]
    expected = np.asarray(ImageOps.exif_transpose(Image.open(photos / name)).convert("L"))
    assert np.abs(data[0][0][0].numpy().astype(int) - expected).max() <= 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_no_decoding_threads(kept):
    """It raises an error, where it would wait for them forever."""

    def go_on() -> None:
        with pytest.raises(H5ChunkError, match="start a new iteration"):
            next(batches)

    with h5chunk.ChunkLoader(kept, 2, transforms=SQUARE, resident=False) as loader:
        batches = iter(loader)
        next(batches)
        assert in_fork(go_on) == 0
        list(batches)


def test_small_jpegs_of_all_kinds_are_decoded_like_pillow(tmp_path):
    """Exactly: all subsamplings, progressive or not, with and without restart markers, in three kinds of colours."""
    (tmp_path / "photos").mkdir()
    restarts = {}, {"restart_marker_blocks": 1}, {"restart_marker_rows": 1}
    for number in range(360):
        image = picture(4 + number % 37, 4 + number % 31, number).convert(("L", "RGB", "CMYK")[number % 3])
        how = {"subsampling": number // 3 % 3, "progressive": number // 9 % 2 == 1, **restarts[number // 18 % 3]}
        image.save(tmp_path / "photos" / f"{number}.jpg", quality=30 + number % 60, **how)
    h5chunk.convert(tmp_path / "photos", tmp_path / "a.h5", keep_encoded=True)
    data = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["images", "sample_number"])
    for images, numbers in all_batches(data, size=90, transforms=[CenterCrop(4)]):
        for image, name in zip(images, data.source_names[numbers], strict=True):
            whole = np.asarray(Image.open(tmp_path / "photos" / name).convert("RGB"))
            top, left = (round((side - 4) / 2) for side in whole.shape[:2])
            assert np.array_equal(image.permute(1, 2, 0), whole[top : top + 4, left : left + 4]), name


@pytest.mark.parametrize("progressive", [False, True])
def test_a_small_file_that_claims_to_be_huge_is_an_error(tmp_path, progressive):
    (tmp_path / "photos").mkdir()
    picture(16, 16, 0).save(tmp_path / "photos" / "0.jpg", progressive=progressive)
    h5chunk.convert(tmp_path / "photos", tmp_path / "a.h5", keep_encoded=True)

    def claim(data):
        start = data.tobytes().index(b"\xff\xc2" if progressive else b"\xff\xc0") + 5
        data[start : start + 4] = [0xFF, 0xDC] * 2  # 65,500 x 65,500

    bomb = change(tmp_path / "a.h5", tmp_path, "images/data", claim)
    for read in (lambda: all_batches(bomb, transforms=SQUARE), lambda: h5chunk.ChunkDataset(bomb)[0]):
        with pytest.raises(FileError, match=r"0\.jpg cannot be decoded: Image size"):
            read()
    (tmp_path / "photos" / "1.jpg").write_bytes(h5py.File(bomb)["images/data"][()].tobytes())
    with pytest.raises(H5ChunkError, match=r"1\.jpg: has more pixels than the limit"):
        h5chunk.convert(tmp_path / "photos", tmp_path / "b.h5", keep_encoded=True)


@pytest.mark.parametrize("form", ["kept", "raw"])
def test_images_have_no_values(form, request):
    dataset = h5chunk.ChunkDataset(request.getfixturevalue(form))
    for use in (
        lambda: dataset.values("images"),
        lambda: h5chunk.ChunkSampler(dataset, 4, weights="images"),
        lambda: dataset.split((0.5, 0.5), stratify="images"),
    ):
        with pytest.raises(FieldError, match="field 'images' has samples that differ in size: name a field with one"):
            use()


def test_several_samples_are_a_tuple(kept):
    dataset = h5chunk.ChunkDataset(kept, transforms=lambda image: image[:, :20, :20])
    assert type(dataset[3]) is type(dataset[[3, 4]]) is tuple
    assert dataset[[3, 4]][0].shape == (2, 3, 20, 20)
