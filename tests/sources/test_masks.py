"""Images with masks: the numbers of a mask stay what they are, and lie on their image pixel by pixel."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pytest
from click.testing import CliRunner
from PIL import Image
from support.pictures import HEIGHT, WIDTH, mask_of, palette, pixels, save

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OptionError, SampleError, SourceError
from h5chunk.sources.decode import decode, pillow_limits
from h5chunk.sources.kinds import ImageOptions


def make_pairs(root: Path, count: int = 6, place: str = "{part}/{number:03d}{suffix}", first: int = 0) -> Path:
    """Image i has the pixels ``pixels(i)``, its mask ``mask_of(i)``; the images are .bmp, the masks palette .png."""
    for number in range(first, first + count):
        split, label = ("val", "train")[number % 3 > 0], "ab"[number % 2]
        for part, suffix in (("images", ".bmp"), ("masks", ".png")):
            path = root / place.format(part=part, number=number, suffix=suffix, split=split, label=label)
            save(path, pixels(number, HEIGHT, WIDTH) if part == "images" else palette(mask_of(number)))
    return root


def check_pairs(path: Path, count: int = 6, mask: str = "masks") -> h5chunk.ChunkDataset:
    """Each sample has the image and the mask of the number in its name."""
    dataset = h5chunk.ChunkDataset(path)
    assert dataset.fields[:2] == ("images", mask) and len(dataset) == count
    for index, name in enumerate(dataset.source_names.tolist()):
        number = int(Path(name).stem)
        np.testing.assert_array_equal(dataset[index][0], pixels(number, HEIGHT, WIDTH).transpose(2, 0, 1))
        np.testing.assert_array_equal(dataset[index][1], mask_of(number))
    return dataset


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("place", "fields", "first"),
    [
        ("{part}/{number:03d}{suffix}", ("images", "masks"), "images/000.bmp"),
        ("{part}/{label}/{number:03d}{suffix}", ("images", "masks", "labels"), "images/a/000.bmp"),
        ("{split}/{part}/{number:03d}{suffix}", ("images", "masks"), "train/images/001.bmp"),
        ("{part}/{split}/{label}/{number:03d}{suffix}", ("images", "masks", "labels"), "images/train/a/002.bmp"),
    ],
)
def test_folders_side_by_side(tmp_path: Path, place: str, fields: tuple[str, ...], first: str, packed: bool) -> None:
    source = make_pairs(tmp_path / "data", place=place)
    if packed:
        source = Path(shutil.make_archive(str(tmp_path / "data"), "zip", source))
    report = h5chunk.convert(source, tmp_path / "x.h5", workers=0, chunk_samples=4)
    dataset = check_pairs(tmp_path / "x.h5")
    assert dataset.fields == fields and min(dataset.source_names) == first
    if "split" in place:
        assert report.fields["split"] == "|S5"
        assert [name.split("/")["{split}" in place.split("/")[1]] for name in dataset.source_names] == [
            *dataset.values("split")
        ]
    with h5chunk.ChunkLoader(tmp_path / "x.h5", 6, shuffle=False) as loader:
        images, masks, *_ = next(iter(loader))
    assert images.shape == (6, 3, HEIGHT, WIDTH) and masks.shape == (6, HEIGHT, WIDTH)


def test_folders_of_other_names(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "data")
    (root / "masks").rename(root / "SegmentationClass")
    (root / "images").rename(root / "JPEGImages")
    h5chunk.convert(root, tmp_path / "x.h5", workers=0)
    check_pairs(tmp_path / "x.h5")
    (root / "SegmentationClass").rename(root / "truth")
    h5chunk.convert(root, tmp_path / "y.h5", workers=0, mask_column="truth")
    check_pairs(tmp_path / "y.h5", mask="truth")
    for path in list((root / "truth").iterdir()):
        path.rename(path.with_stem(f"{path.stem}_mask"))
    h5chunk.convert(root, tmp_path / "z.h5", workers=0, mask_column="truth")
    check_pairs(tmp_path / "z.h5", mask="truth")
    with pytest.raises(SourceError, match="has no folder 'lies' of masks beside a folder of images \\(folders: 'JPEG"):
        h5chunk.convert(root, tmp_path / "w.h5", mask_column="lies")
    save(root / "depth" / "000.png", mask_of(0))
    with pytest.raises(
        SourceError, match="contains the folders 'JPEGImages', 'depth', 'truth': name all folders of masks"
    ):
        h5chunk.convert(root, tmp_path / "w.h5", mask_column="truth")


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "data")
    save(root / "masks" / "extra.png", mask_of(0))
    save(root / "loose.png", mask_of(0))
    ignored = h5chunk.convert(root, tmp_path / "x.h5", workers=0).ignored
    assert ignored == [
        "1 mask in 'masks' without an image, such as extra.png",
        "1 image outside of the paired folders, such as loose.png",
    ]
    (root / "masks" / "003.png").unlink()
    with pytest.raises(
        SourceError, match=r"1 of 6 images, such as images/003\.bmp, have no counterpart in 'masks': add"
    ):
        h5chunk.convert(root, tmp_path / "y.h5", workers=0)
    report = h5chunk.convert(root, tmp_path / "y.h5", workers=0, on_error="skip")
    assert report.skipped == [("images/003.bmp", "has no image in 'masks'")]
    check_pairs(tmp_path / "y.h5", 5)
    save(root / "masks" / "002.bmp", palette(mask_of(2)))
    with pytest.raises(
        SourceError, match=r"masks/002\.(bmp|png) and masks/002\.(bmp|png) would be paired with the same file"
    ):
        h5chunk.convert(root, tmp_path / "z.h5", on_error="skip")
    (root / "masks" / "002.bmp").unlink()
    save(root / "images" / "002.png", pixels(2, HEIGHT, WIDTH))
    with pytest.raises(SourceError, match=r"images/002\.bmp and images/002\.png would be paired with the same file"):
        h5chunk.convert(root, tmp_path / "z.h5", on_error="skip")


def manifest_of(root: Path, path: Path, *columns: str) -> Path:
    """Lists all pairs, with the path of the mask in each of these columns."""
    names = sorted(file.stem for file in (root / "images").iterdir())
    lines = [f"images/{name}.bmp,{int(name)}" + f",masks/{name}.png" * len(columns) for name in names]
    path.write_text("\n".join([",".join(("path", "number", *columns)), *lines]) + "\n")
    return path


def test_columns_of_a_manifest(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "data")
    manifest = manifest_of(root, tmp_path / "list.csv", "mask", "shown")
    report = h5chunk.convert(root, tmp_path / "x.h5", manifest=manifest, workers=0, chunk_samples=4, mask_column="mask")
    assert report.notes == ["columns with paths of images became image fields: 'mask', 'shown'"]
    dataset = check_pairs(tmp_path / "x.h5", mask="mask")
    assert dataset.fields == ("images", "mask", "shown") and dataset[0][2].shape == (3, HEIGHT, WIDTH)  # in its colours
    assert dataset.values("number").tolist() == [int(Path(name).stem) for name in dataset.source_names]
    h5chunk.convert(root, tmp_path / "y.h5", manifest=manifest, workers=0, mask_column=("shown",), columns=("number",))
    check_pairs(tmp_path / "y.h5", mask="shown")
    with pytest.raises(OptionError, match=r"list\.csv: has no column 'truth': it has path, number, mask, shown"):
        h5chunk.convert(root, tmp_path / "z.h5", manifest=manifest, mask_column="truth")
    manifest.write_text(manifest.read_text().replace("masks/004.png", "masks/999.png", 1))
    with pytest.raises(SourceError, match=r"list\.csv, line 6: masks/999\.png does not exist in"):
        h5chunk.convert(root, tmp_path / "z.h5", manifest=manifest)


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_one_geometry_for_image_and_mask(tmp_path: Path, fit: str) -> None:
    """The grey value of each block of the image says the number that its mask has there."""
    for number in range(3):
        numbers = np.kron(np.random.default_rng(number).integers(0, 2, (5, 7)) * 7, np.ones((16, 16))).astype(np.uint8)
        save(tmp_path / "data" / "images" / f"{number}.png", numbers * 30)
        save(tmp_path / "data" / "masks" / f"{number}.png", palette(numbers))
    h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", size=(48, 48), fit=fit, color="gray", workers=0)
    for image, mask in h5chunk.ChunkDataset(tmp_path / "x.h5"):
        near = np.abs(image[0].numpy().astype(int) - 30 * mask.numpy().astype(int)) < 15
        assert near.mean() > 0.85 and {*mask.unique().tolist()} <= {0, 7}  # but for edges, which are smooth


def test_like_and_repair(tmp_path: Path) -> None:
    root, path = make_pairs(tmp_path / "data"), tmp_path / "x.h5"
    h5chunk.convert(root, path, workers=0, chunk_samples=4)
    more = make_pairs(tmp_path / "more", 4, first=6)
    (more / "masks").rename(more / "annotations")  # also a usual name
    h5chunk.convert(more, tmp_path / "y.h5", like=path, workers=0)
    assert len(h5chunk.ChunkDataset([path, tmp_path / "y.h5"])) == 10
    damaged = bytearray(path.read_bytes())
    stored = mask_of(int(Path(h5chunk.ChunkDataset(path).source_names[0]).stem)).tobytes()
    damaged[damaged.index(stored)] ^= 255
    path.write_bytes(damaged)
    report = h5chunk.verify(path, repair=root)
    assert [(chunk.field, chunk.chunk) for chunk in report.repaired] == [("masks", 0)] and not report.bad
    check_pairs(path, 6)


def test_work_on_a_changed_mask_is_not_reused(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "data")
    (root / "masks" / "005.png").write_bytes(b"broken")
    with pytest.raises(SampleError, match=r"images/005\.bmp: masks/005\.png is not an image in a known format"):
        h5chunk.convert(root, tmp_path / "x.h5", workers=0, chunk_samples=1, shuffle=False)
    save(root / "masks" / "002.png", mask_of(7))
    save(root / "masks" / "005.png", mask_of(5))
    h5chunk.convert(root, tmp_path / "x.h5", workers=0, chunk_samples=1, shuffle=False)
    np.testing.assert_array_equal(h5chunk.ChunkDataset(tmp_path / "x.h5")[2][1], mask_of(7))


def test_masks_of_data_sets_in_python(tmp_path: Path) -> None:
    pairs = [(Image.fromarray(pixels(i, HEIGHT, WIDTH)), palette(mask_of(i))) for i in range(4)]
    h5chunk.convert([{"image": image, "mask": mask} for image, mask in pairs], tmp_path / "x.h5", shuffle=False)
    h5chunk.convert(pairs, tmp_path / "y.h5", shuffle=False, mask_column="field1")
    for path in (tmp_path / "x.h5", tmp_path / "y.h5"):
        for number, (image, mask) in enumerate(h5chunk.ChunkDataset(path)):
            np.testing.assert_array_equal(image, pixels(number, HEIGHT, WIDTH).transpose(2, 0, 1))
            np.testing.assert_array_equal(mask, mask_of(number))
    with pytest.raises(OptionError, match="mask_column is 'field2', but the fields of images are field0, field1"):
        h5chunk.convert(pairs, tmp_path / "z.h5", mask_column="field2")
    with pytest.raises(OptionError, match="mask_column is 'mask', but no field contains images: leave out"):
        h5chunk.convert([{"number": 1}], tmp_path / "z.h5", mask_column="mask")
    h5chunk.convert([{"image": pairs[0][0], "mask": pairs[0][0]}], tmp_path / "w.h5", mask_column=())  # of faces
    assert h5chunk.ChunkDataset(tmp_path / "w.h5")[0][1].shape == (3, HEIGHT, WIDTH)


SHAPE = (3, HEIGHT, WIDTH)
PHOTO = [Image.fromarray(pixels(i, HEIGHT, WIDTH)) for i in range(5)]
GREY = [photo.convert("L") for photo in PHOTO]
MASK = [Image.fromarray(mask_of(i)) for i in range(5)]
PALETTE = [palette(mask_of(i)) for i in range(5)]
FIELDS_OF = [  # images by field, and those that are masks
    ({"field0": PHOTO, "field1": PALETTE}, {"field1"}),
    ({"field0": PHOTO, "field1": MASK}, {"field1"}),
    ({"field0": PHOTO, "field1": [mask.point(lambda v: v > 3, "1") for mask in MASK]}, {"field1"}),
    ({"field0": [GREY[0], *PHOTO[1:]], "field1": PALETTE}, {"field1"}),
    ({"field0": GREY, "field1": MASK}, {"field1"}),
    ({"image": PHOTO, "label": [mask.convert("RGB") for mask in MASK]}, {"label"}),
    ({"annotation": MASK, "image": PHOTO}, {"annotation"}),
    ({"image": PHOTO, "gt_instances": PALETTE, "trimap": MASK}, {"gt_instances", "trimap"}),
    ({"label": PALETTE}, {"label"}),
    ({"field0": GREY, "field1": GREY[::-1]}, set()),
    ({"field0": PHOTO, "field1": PHOTO[::-1]}, set()),
    ({"field0": GREY, "field1": PHOTO}, set()),
    ({"field0": MASK, "field1": MASK[::-1]}, set()),
    ({"field0": [photo.quantize(256) for photo in PHOTO], "field1": [photo.quantize(256) for photo in PHOTO]}, set()),
]


def samples_of(fields: dict[str, list[Image.Image]]) -> list[Any]:
    rows = [dict(zip(fields, images, strict=True)) for images in zip(*fields.values(), strict=True)]
    return [tuple(row.values()) for row in rows] if "field0" in fields else rows


@pytest.mark.parametrize("number", range(len(FIELDS_OF)))
def test_masks_are_found_by_what_they_are(tmp_path: Path, number: int) -> None:
    fields, masks = FIELDS_OF[number]
    report = h5chunk.convert(samples_of(fields), tmp_path / "x.h5", shuffle=False, workers=0)
    assert report.shapes == {name: (HEIGHT, WIDTH) if name in masks else SHAPE for name in report.shapes}
    said = [note for note in report.notes if "mask_column" in note]
    assert len(said) == bool(masks) and all(repr(name) in said[0] for name in masks)
    with h5py.File(tmp_path / "x.h5") as file:
        for name in masks:
            expected = [np.asarray(image.convert("L") if image.mode == "RGB" else image) for image in fields[name]]
            np.testing.assert_array_equal(file[name], expected)
    report = h5chunk.convert(samples_of(fields), tmp_path / "y.h5", mask_column="none", workers=0)
    assert set(report.shapes.values()) == {SHAPE}
    if not masks:  # a further file gets what was found in the first one
        more = {"field0": PHOTO, "field1": PALETTE}
        report = h5chunk.convert(samples_of(more), tmp_path / "more.h5", like=tmp_path / "x.h5", workers=0)
        assert set(report.shapes.values()) == {SHAPE}


@pytest.mark.parametrize("name", ["label", "annotation", "segmentation_mask", "image2"])
def test_columns_of_tables_that_are_masks(tmp_path: Path, name: str) -> None:
    def cells(images: list[Image.Image]) -> list[dict[str, Any]]:
        return [{"bytes": encoded(image), "path": None} for image in images]

    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": cells(PHOTO), name: cells(PALETTE)}), tmp_path / "t.parquet")
    options: dict[str, Any] = {"size": (5, 7), "fit": "stretch", "workers": 0}
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", shuffle=False, **options)
    expected = [MASK[i].resize((7, 5), Image.Resampling.NEAREST) for i in range(5)]
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file[name], [np.asarray(mask) for mask in expected])
    result = CliRunner().invoke(
        main, ["convert", f"{tmp_path}/t.parquet", f"{tmp_path}/y.h5", "--mask-column", "none", "--json"]
    )
    assert json.loads(result.stdout)["shapes"][name] == [*SHAPE]


def test_what_may_be_a_mask_is_asked_for(tmp_path: Path) -> None:
    small = [mask.resize((WIDTH // 2, HEIGHT // 2), Image.Resampling.NEAREST) for mask in PALETTE]
    colours = [mask.convert("RGB") for mask in PALETTE]
    options: dict[str, Any] = {"size": (6, 6), "fit": "crop", "workers": 0}
    for fields, reason in (
        ({"field0": PHOTO, "field1": small}, "'field1' looks like a mask, but is 6 x 9 where 'field0' is 12 x 18"),
        ({"field0": PHOTO, "field1": colours}, "'field1' may be a mask, whose classes resizing or grey would mix"),
        ({"field0": MASK, "field1": MASK}, "'field1' may be a mask, whose classes resizing or grey would mix"),
        ({"image": PHOTO, "label": PHOTO}, "'label' may be a mask, whose classes resizing or grey would mix"),
    ):
        with pytest.raises(SourceError, match=rf"{reason}: .*--mask-column none \(in Python, mask_column=\(\)\)"):
            h5chunk.convert(samples_of(fields), tmp_path / "z.h5", **options)
        if fields["field1" if "field1" in fields else "label"] is colours:
            with pytest.raises(SourceError, match=reason):
                h5chunk.convert(samples_of(fields), tmp_path / "z.h5", color="gray", workers=0)
        h5chunk.convert(samples_of(fields), tmp_path / "x.h5", mask_column=(), overwrite=True, **options)
    report = h5chunk.convert(samples_of({"image": PHOTO, "label": colours}), tmp_path / "y.h5", workers=0)
    assert report.shapes["label"] == SHAPE  # exact, as nothing is resized


def test_an_array_beside_an_image_that_is_resized_or_rotated(tmp_path: Path) -> None:
    arrays = [np.asarray(mask) for mask in MASK]
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = [Image.open(io.BytesIO(encoded(image, "JPEG", exif=exif))) for image in PHOTO]
    for images, options in ((PHOTO, {"size": (6, 6), "fit": "stretch"}), (rotated, {})):
        with pytest.raises(SourceError, match=r"'mask' is an array of the size of its image, .*Image\.fromarray"):
            h5chunk.convert(samples_of({"image": images, "mask": arrays}), tmp_path / "x.h5", workers=0, **options)
    h5chunk.convert(samples_of({"image": PHOTO, "mask": arrays}), tmp_path / "x.h5", workers=0)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    with pillow_limits(1 << 20):
        return np.asarray(decode(data, ImageOptions(), is_mask=True).image)


NUMBERS = mask_of(3)
KEPT: dict[str, Callable[[], bytes]] = {
    "palette": lambda: encoded(palette(NUMBERS)),
    "palette of 4 bits": lambda: encoded(palette(NUMBERS), bits=4),
    "palette with a transparent colour": lambda: encoded(palette(NUMBERS), transparency=0),
    "gif": lambda: encoded(palette(NUMBERS), "GIF"),
    "grey": lambda: encoded(Image.fromarray(NUMBERS)),
    "16 bits": lambda: encoded(Image.fromarray(NUMBERS.astype(np.uint16))),
    "16 bits tiff": lambda: encoded(Image.fromarray(NUMBERS.astype(np.uint16)), "TIFF"),
    "float tiff": lambda: encoded(Image.fromarray(NUMBERS.astype(np.float32)), "TIFF"),
    "equal channels": lambda: encoded(Image.fromarray(NUMBERS).convert("RGB")),
    "opaque": lambda: encoded(Image.fromarray(NUMBERS).convert("RGBA")),
    "grey and opaque": lambda: encoded(Image.fromarray(NUMBERS).convert("LA")),
    "pgm": lambda: encoded(Image.fromarray(NUMBERS), "PPM"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_numbers_that_are_kept(kind: str) -> None:
    np.testing.assert_array_equal(decoded(KEPT[kind]()), NUMBERS)


def test_one_bit_is_0_and_1() -> None:
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(NUMBERS > 3))), NUMBERS > 3)


def test_grey_of_few_bits() -> None:
    """A grey PNG of 2 bits: 5 x 1 pixels of the numbers 0, 1, 2, 3, 1. Pillow shows them as 0, 85, 170, 255, 85."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 1, 2, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes([0, 0b00011011, 0b01000000])))
    assert decoded(b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")).tolist() == [[0, 1, 2, 3, 1]]


LARGE = NUMBERS.astype(np.uint16) + 300
COLOURS = Image.fromarray(pixels(0))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            encoded(Image.fromarray(LARGE)),
            "a mask with the class number 30., but only integers from 0 to 255 are supported",
        ),
        (
            encoded(Image.fromarray(NUMBERS + np.float32(0.5)), "TIFF"),
            r"a mask with the class number \d.5, but only integers",
        ),
        (
            encoded(Image.fromarray(NUMBERS - np.float32(5)), "TIFF"),
            "a mask with the class number -2.0, but only integers",
        ),
        (encoded(COLOURS), r"a colour mask \(RGB\): replace each colour by a class number"),
        (encoded(COLOURS.convert("RGBA")), r"a colour mask \(RGBA\)"),
        (encoded(Image.merge("LA", [Image.fromarray(NUMBERS)] * 2)), "a mask with transparent pixels"),
        (
            b"P5 2 2 7\n\0\1\2\3",
            "a mask of mode L whose class numbers would change: save it",
        ),
        (encoded(COLOURS.convert("CMYK"), "TIFF"), "a mask of mode CMYK"),
    ],
)
def test_numbers_that_are_not_kept(data: bytes, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        decoded(data)


def test_sizes_that_differ_in_a_pair(tmp_path: Path) -> None:
    save(tmp_path / "images" / "1.png", pixels(1, 12, 18))
    save(tmp_path / "masks" / "1.png", mask_of(1, 12, 17))
    message = (
        r"images/1\.png: masks/1\.png is 12 x 17 but the image is 12 x 18: resize the mask to the size of its image$"
    )
    for size in ({}, {"size": (6, 6), "fit": "crop"}):
        with pytest.raises(SampleError, match=message):
            h5chunk.convert(tmp_path, tmp_path / "x.h5", workers=0, **size)


@pytest.mark.parametrize(
    ("orientation", "shape", "upright", "message"),
    [
        (6, (12, 18), (18, 12), None),
        (6, (12, 18), (12, 18), r"is 12 x 18 but the image is 18 x 12: .* after its EXIF orientation is applied"),
        (3, (12, 18), (12, 18), r"EXIF rotates the image but not masks/1\.png, and their sizes do not show"),
        (6, (12, 12), (12, 12), r"EXIF rotates the image but not masks/1\.png"),
    ],
)
def test_turned_images(tmp_path: Path, orientation: int, shape: Any, upright: Any, message: str | None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "data" / "images").mkdir(parents=True)
    Image.fromarray(pixels(1, *shape)).save(tmp_path / "data" / "images" / "1.jpg", exif=exif)
    save(tmp_path / "data" / "masks" / "1.png", mask_of(1, *upright))
    if message is not None:
        with pytest.raises(SampleError, match=message):
            h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", workers=0)
        return
    h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", workers=0)
    image, mask = h5chunk.ChunkDataset(tmp_path / "x.h5")[0]
    assert tuple(image.shape[1:]) == tuple(mask.shape) == upright


@pytest.mark.parametrize("ending", [".seg", "_label", "-gt"])
def test_masks_by_the_ends_of_their_names(tmp_path: Path, ending: str) -> None:
    for number in range(2):
        save(tmp_path / "data" / f"{number}.png", pixels(number, HEIGHT, WIDTH))
        save(tmp_path / "data" / f"{number}{ending}.png", palette(mask_of(number)))
    h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", workers=0)
    check_pairs(tmp_path / "x.h5", 2)


def test_jpeg_masks_are_told(tmp_path: Path) -> None:
    save(tmp_path / "data" / "images" / "1.png", pixels(1, 12, 18))
    save(tmp_path / "data" / "masks" / "1.jpg", mask_of(1, 12, 18))
    report = h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", workers=0)
    assert report.notes[1:] == ["masks are JPEG files, which do not preserve class numbers exactly: save masks as PNG"]
    assert [*report.fields] == ["images", "masks"] and report.counts == {"RGB": 1, "L mask": 1}


def test_masks_in_gif(tmp_path: Path) -> None:
    source = make_pairs(tmp_path / "data")
    for path in sorted((source / "masks").iterdir()):
        Image.open(path).save(path.with_name(f"{path.stem}_mask.gif"))
        path.unlink()
    h5chunk.convert(source, tmp_path / "x.h5", workers=0)
    check_pairs(tmp_path / "x.h5")


@pytest.mark.parametrize("packed", [False, True])
def test_masks_beside_their_images(tmp_path: Path, packed: bool) -> None:
    source = make_pairs(tmp_path / "data", place="{part}/{label}/{number:03d}{suffix}")
    for path in sorted(source.glob("masks/*/*")):
        path.rename(source / "images" / path.parent.name / f"{path.stem}_mask.png")
    for path in sorted((source / "masks").iterdir()):
        path.rmdir()
    (source / "masks").rmdir()
    source = Path(shutil.make_archive(str(tmp_path / "data"), "zip", source)) if packed else source / "images"
    report = h5chunk.convert(source, tmp_path / "x.h5", workers=0)
    assert check_pairs(tmp_path / "x.h5").classes == ("a", "b")
    assert "a/000_mask.png are the masks of the images beside them" in str(report)


def test_several_masks_of_an_image_or_few_masks(tmp_path: Path) -> None:
    for name in ("1.png", "1_mask.png", "1_mask_1.png"):
        save(tmp_path / "data" / name, pixels(0))
    with pytest.raises(SourceError, match=r"1_mask\.png and 1_mask_1\.png look like two masks of one image"):
        h5chunk.convert(tmp_path / "data", tmp_path / "x.h5")
    (tmp_path / "data" / "1_mask_1.png").unlink()
    for number in range(2, 4):
        save(tmp_path / "data" / f"{number}.png", pixels(0))
    assert h5chunk.convert(tmp_path / "data", tmp_path / "x.h5").num_samples == 4, "most images have none"
