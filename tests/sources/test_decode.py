"""Each kind of image: exact pixels against Pillow, or the exact refusal."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, ImageOps, features
from support.pictures import pixels

import h5chunk
from h5chunk.errors import OptionError, SampleError
from h5chunk.sources.any_size import make_any_image
from h5chunk.sources.decode import decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.decode_any import decode_any
from h5chunk.sources.kinds import ImageOptions

KEEP, GRAY, RGB = (ImageOptions(color=color) for color in ("keep", "gray", "rgb"))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, options: ImageOptions = RGB) -> Image.Image:
    with pillow_limits(options.max_pixels):
        return decode(data, options)[0]


def notes(data: bytes, options: ImageOptions = RGB) -> tuple[str, ...]:
    with pillow_limits(options.max_pixels):
        return decode(data, options)[1]


def check_refused(data: bytes, reason: str, options: ImageOptions = RGB) -> None:
    with pytest.raises(SampleError, match=reason):
        decoded(data, options)


def check_same(image: Image.Image, expected: Image.Image | np.ndarray) -> None:
    if isinstance(expected, Image.Image):
        assert image.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def png(header: tuple[int, int, int, int], rows: bytes, *extra: tuple[bytes, bytes], late: bytes = b"") -> bytes:
    """A PNG made by hand: (width, height, bit depth, colour type), filtered rows, further chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    parts = [(b"IHDR", struct.pack(">2I5B", *header, 0, 0, 0)), *extra, (b"IDAT", zlib.compress(rows))]
    parts += [(b"eXIf", late)] if late else []
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in [*parts, (b"IEND", b"")])


def exif(orientation: int) -> Image.Exif:
    result = Image.Exif()
    result[0x0112] = orientation
    return result


# ---- what becomes of each mode


def alpha_images() -> dict[str, Image.Image]:
    rgba = Image.fromarray(pixels(1, channels=4))
    la = Image.merge("LA", (Image.fromarray(pixels(2, channels=1)), Image.fromarray(pixels(3, channels=1))))
    return {"RGBA": rgba, "LA": la}


def palette_image(transparent: bool = False) -> Image.Image:
    image = Image.fromarray(pixels(4)).quantize(16)
    if transparent:
        image.info["transparency"] = 3
    return image


def test_rgb_is_kept() -> None:
    image = Image.fromarray(pixels(1))
    for kind, options in (("PNG", {}), ("BMP", {}), ("PPM", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        data = encoded(image, kind, **options)
        check_same(decoded(data), image)
        assert notes(data) == ("RGB",)
    check_same(decoded(encoded(image, "JPEG")), Image.open(io.BytesIO(encoded(image, "JPEG"))))


def test_grey_to_rgb_repeats_and_rgb_to_grey_is_pillows() -> None:
    grey = Image.fromarray(pixels(1, channels=1))
    check_same(decoded(encoded(grey)), np.stack([np.asarray(grey)] * 3, axis=-1))
    check_same(decoded(encoded(grey), GRAY), grey)
    check_same(decoded(encoded(grey), KEEP), grey)
    color = Image.fromarray(pixels(1))
    check_same(decoded(encoded(color), GRAY), color.convert("L"))
    check_same(decoded(encoded(color), KEEP), color)


def test_one_bit_becomes_0_and_255() -> None:
    bits = Image.fromarray(pixels(1, channels=1)).point(lambda v: 255 * (v > 99), "1")
    values = np.asarray(bits).astype(np.uint8) * 255
    assert set(np.unique(values)) == {0, 255}
    check_same(decoded(encoded(bits)), np.stack([values] * 3, axis=-1))
    check_same(decoded(encoded(bits), GRAY), values)
    check_same(decoded(encoded(bits), KEEP), values)
    assert notes(encoded(bits)) == ("1",)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_dropped_or_kept(mode: str) -> None:
    image = alpha_images()[mode]
    colors = np.asarray(image)[..., :-1]
    check_same(decoded(encoded(image)), np.repeat(colors, 3, axis=-1) if mode == "LA" else colors)
    check_same(decoded(encoded(image), KEEP), image)
    check_same(decoded(encoded(image), GRAY), image.convert("L"))
    assert notes(encoded(image)) == (mode,)


@pytest.mark.parametrize("transparent", [False, True])
def test_palette_is_looked_up(transparent: bool) -> None:
    image = palette_image(transparent)
    data = encoded(image, transparency=3) if transparent else encoded(image)
    assert Image.open(io.BytesIO(data)).mode == "P"
    plain = palette_image()
    check_same(decoded(data), plain.convert("RGB"))
    check_same(decoded(data, GRAY), plain.convert("L"))
    check_refused(data, "has mode P, which color 'keep' does not support", KEEP)
    assert notes(data) == ("P",)


def test_rgb_with_a_transparent_colour_is_its_colours() -> None:
    image = Image.fromarray(pixels(1))
    check_same(decoded(encoded(image, transparency=(1, 2, 3))), image)
    check_same(decoded(encoded(image, transparency=(1, 2, 3)), GRAY), image.convert("L"))


def test_cmyk_jpeg_is_converted_by_pillow() -> None:
    image = Image.merge("CMYK", [Image.fromarray(pixels(i, channels=1)) for i in range(4)])
    data = encoded(image, "JPEG")
    opened = Image.open(io.BytesIO(data))
    assert opened.mode == "CMYK"
    check_same(decoded(data), opened.convert("RGB"))
    check_same(decoded(data, GRAY), opened.convert("RGB").convert("L"))
    check_refused(data, "has mode CMYK", KEEP)


def test_lab_is_refused() -> None:
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(Image.fromarray(pixels(1)), *profiles, outputMode="LAB")
    check_refused(encoded(lab, "TIFF"), "has mode LAB, which is not supported")


# ---- more than 8 bits


def deep_images() -> dict[str, bytes]:
    deep = np.arange(120, dtype=np.uint16).reshape(10, 12) * 500
    row = b"\0" + bytes(range(12))  # filter 0, then two pixels of three 16-bit channels
    return {
        "grey PNG": encoded(Image.fromarray(deep)),
        "RGB PNG": png((2, 2, 16, 2), row * 2),
        "LA PNG": png((3, 2, 16, 4), row * 2),
        "RGBA PNG": png((2, 2, 16, 6), (b"\0" + bytes(16)) * 2),
        "grey TIFF": encoded(Image.fromarray(deep), "TIFF"),
        "int TIFF": encoded(Image.fromarray(deep.astype(np.int32)), "TIFF"),
        "float TIFF": encoded(Image.fromarray(deep.astype(np.float32)), "TIFF"),
        "PGM": b"P5 2 2 65535\n" + bytes(8),
        "PPM": b"P6 2 2 1023\n" + bytes(24),
        "plain PPM": b"P3 1 1 256\n1 2 256\n",
    }


@pytest.mark.parametrize("name", list(deep_images()))
@pytest.mark.parametrize("options", [RGB, GRAY, KEEP], ids=lambda options: options.color)
def test_more_than_8_bits_is_refused(name: str, options: ImageOptions) -> None:
    way = "an array .Pillow reduces it to 8 bits." if Image.open(io.BytesIO(deep_images()[name])).mode in (
        "RGB", "RGBA", "LA",
    ) else r"np\.asarray\(image\)"  # fmt: skip
    reason = r"has more than 8 bits per channel \(.*\): convert it to 8 bits first, .* data set in Python that returns"
    check_refused(deep_images()[name], rf"{reason} .*{way}: h5chunk\.convert\(dataset, path\)", options)


def test_pillow_opens_deep_rgb_as_8_bits() -> None:
    """The reason why the mode alone is not enough."""
    assert Image.open(io.BytesIO(deep_images()["RGB PNG"])).mode == "RGB"


def test_fewer_than_8_bits_are_not_refused() -> None:
    check_same(decoded(b"P5 2 1 3\n\0\3", GRAY), np.array([[0, 255]], np.uint8))
    assert decoded(png((8, 1, 1, 0), b"\0\xaa"), GRAY).getpixel((0, 0)) == 255
    five_six_five = encoded(Image.fromarray(pixels(1)), "BMP")
    assert decoded(five_six_five).mode == "RGB"


# ---- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_and_counted(kind: str, orientation: int) -> None:
    image = Image.fromarray(pixels(1))
    options = {"lossless": True} if kind == "WEBP" else {}
    upright = Image.open(io.BytesIO(encoded(image, kind, **options)))
    expected = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
    }[orientation]  # fmt: skip
    data = encoded(image, kind, exif=exif(orientation), **options)
    check_same(decoded(data), upright.transpose(expected) if expected is not None else upright.convert("RGB"))
    assert notes(data) == (("RGB",) if orientation == 1 else ("RGB", "rotated"))


XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def carried(kind: str, carrier: str, orientation: int) -> bytes:
    """An image whose orientation is in one of the places where Pillow finds it."""
    image, options = Image.fromarray(pixels(1)), {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}.get(kind, {})
    xmp = XMP.format(orientation).encode()
    if carrier == "exif":
        return encoded(image, kind, exif=exif(orientation), **options)
    if carrier == "tag":
        return encoded(image, kind, tiffinfo={274: orientation})
    if kind == "TIFF":
        return encoded(image, kind, tiffinfo={700: xmp})
    if kind != "PNG":
        return encoded(image, kind, xmp=xmp, **options)
    rows, parts, late = b"".join(b"\0" + row.tobytes() for row in pixels(1)), [], b""
    if carrier == "late":
        late = exif(orientation).tobytes()[6:]
    elif carrier == "raw profile":
        data = exif(orientation).tobytes()
        parts = [(b"tEXt", f"Raw profile type exif\0\nexif\n{len(data):8}\n{data.hex()}\n".encode())]
    else:
        parts = [(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + xmp)]
    return png((12, 10, 8, 2), rows, *parts, late=late)


CARRIERS = [
    ("JPEG", "exif"), ("JPEG", "xmp"), ("PNG", "exif"), ("PNG", "late"), ("PNG", "raw profile"), ("PNG", "xmp"),
    ("WEBP", "exif"), ("WEBP", "xmp"), ("TIFF", "exif"), ("TIFF", "tag"), ("TIFF", "xmp"),
    *([("AVIF", "exif")] if features.check("avif") else []),
]  # fmt: skip


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "carrier"), CARRIERS)
def test_orientation_is_that_of_exif_transpose_wherever_it_is(kind: str, carrier: str, orientation: int) -> None:
    """As a file, as an opened image of a data set in Python, and as a file that is stored unchanged."""
    data = carried(kind, carrier, orientation)
    plain = np.asarray(Image.open(io.BytesIO(carried(kind, carrier, 1))))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert orientation == 1 or not np.array_equal(np.asarray(expected), plain)
    sources: list[bytes | Image.Image] = [data] if kind != "AVIF" else []
    for source in (*sources, Image.open(io.BytesIO(data))):
        with pillow_limits(RGB.max_pixels):
            found = decode(source, RGB)
            kept = make_any_image(source, ImageOptions(keep_encoded=True))
        check_same(found.image, np.asarray(expected))
        assert found.notes == (("RGB",) if orientation == 1 else ("RGB", "rotated"))
        assert found.size == (kept.height, kept.width) == expected.size[::-1]
        out = np.zeros(kept.height * kept.width * 3, np.uint8)
        shape = decode_any(np.frombuffer(kept.data, np.uint8), *kept[1:4], 3, (kept.height, kept.width), out)
        np.testing.assert_array_equal(out.reshape(*shape, 3), np.asarray(expected))


def test_odd_orientation_is_none() -> None:
    for value in (0, 9, 77):
        data = encoded(Image.fromarray(pixels(1)), exif=exif(value))
        check_same(decoded(data), pixels(1))
        assert notes(data) == ("RGB",)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "raw profile"])
def test_exif_data_that_is_damaged_has_no_orientation(kind: str) -> None:
    if kind == "raw profile":
        data = png((2, 1, 8, 2), bytes(7), (b"tEXt", b"Raw profile type exif\0\nexif\n  8\nzzzz\n"))
    else:
        data = encoded(Image.fromarray(pixels(1)), kind, exif=b"Exif\0\0this is no EXIF data")
    assert notes(data) == ("RGB",)


# ---- several frames


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animated_is_refused_or_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (6, 5), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    check_refused(data, r"has 3 frames: use animated='first' \(--animated first\) to store the first one")
    first = ImageOptions(animated="first")
    check_same(decoded(data, first), frames[0])
    assert notes(data, first)[1:] == ("first frame",)


def test_single_gif_is_an_image() -> None:
    check_same(decoded(encoded(palette_image(), "GIF")), palette_image().convert("RGB"))


def test_mpo_is_its_first_picture() -> None:
    pictures = [Image.fromarray(pixels(i, 40, 40)) for i in range(2)]
    data = encoded(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    opened = Image.open(io.BytesIO(data))
    assert opened.format == "MPO" and opened.n_frames == 2
    check_same(decoded(data), opened)
    assert notes(data) == ("RGB",)


# ---- broken


def jpeg() -> bytes:
    return encoded(Image.fromarray(pixels(1, 64, 64)), "JPEG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF"])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95])
def test_truncated_is_refused(kind: str, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(pixels(1, 64, 64)), kind)
    for allowed in (False, True):  # whatever the process has set
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", allowed)
        check_refused(data[: int(len(data) * part)], "cannot be decoded|not an image in a known format")
        assert ImageFile.LOAD_TRUNCATED_IMAGES is allowed


def test_what_is_no_image_is_refused() -> None:
    check_refused(
        b"<html><body>404</body></html>",
        r"in a known format \(JPEG, PNG.*\), or is .*; starts with b'<html>",
    )
    check_refused(b"\0" * 100, "not an image in a known format")
    check_refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in a known format")
    check_refused(encoded(Image.fromarray(pixels(1)), "ICO"), "not an image in a known format")


def test_images_in_other_formats_are_told_the_way(tmp_path: Path) -> None:
    """Whatever their suffix; and the way works."""
    image = Image.fromarray(pixels(1))
    for kind in [kind for kind, has in (("AVIF", "avif"), ("JPEG2000", "jpg_2000")) if features.check(has)]:
        data = encoded(image, kind)
        check_refused(data, r"is AVIF, HEIF or JPEG 2000: in Python, h5chunk\.convert\(dataset, path\)")
        dataset = [Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))]
        assert h5chunk.convert(dataset, tmp_path / f"{kind}.h5", workers=0).shapes == {"images": (3, 10, 12)}


def test_corrupted_png_is_refused() -> None:
    data = bytearray(encoded(Image.fromarray(pixels(1, 64, 64))))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    check_refused(bytes(data), "cannot be decoded")


def test_no_flipped_byte_escapes_as_another_error() -> None:
    for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"):
        whole = encoded(Image.fromarray(pixels(1)), kind)
        for position in range(0, len(whole), max(1, len(whole) // 100)):
            data = bytearray(whole)
            data[position] ^= 0xFF
            try:
                decoded(bytes(data))
            except SampleError as error:
                assert str(error)


def test_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(pixels(1)))
    check_same(decoded(data, ImageOptions(max_pixels=120)), pixels(1))
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    for limit in (119, 10):  # Pillow warns up to twice its limit, and raises above
        check_refused(data, rf"more pixels than the limit max_pixels={limit}", ImageOptions(max_pixels=limit))


def test_limits_are_those_of_the_process_afterwards() -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    with pillow_limits(7):
        assert Image.MAX_IMAGE_PIXELS == 7
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


# ---- sizes


def test_other_size_is_refused_unless_told_how_to_fit() -> None:
    data = encoded(Image.fromarray(pixels(1)))
    check_same(decoded(data, ImageOptions(size=(10, 12))), pixels(1))
    check_refused(data, "is 10 x 12, but the size is 5 x 6: use fit stretch, crop or pad", ImageOptions(size=(5, 6)))


@pytest.mark.parametrize("size", [(5, 6), (20, 7), (3, 30), (10, 12)])
@pytest.mark.parametrize("color", ["rgb", "gray", "keep"])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_fit_is_pillows(fit: str, color: str, size: tuple[int, int]) -> None:
    for image in (Image.fromarray(pixels(1)), alpha_images()["RGBA"]):
        source = {"rgb": image.convert("RGB"), "gray": image.convert("L"), "keep": image}[color]
        wide, cubic = (size[1], size[0]), Image.Resampling.BICUBIC
        if fit == "stretch":
            expected = source.resize(wide, cubic)
        else:
            expected = (ImageOps.fit if fit == "crop" else ImageOps.pad)(source, wide, cubic)
        options = ImageOptions(size=size, fit=fit, color=color)
        check_same(decoded(encoded(image), options), expected if size != (10, 12) else source)
        assert ("resized" in notes(encoded(image), options)) == (size != (10, 12))


def test_pad_is_black_at_both_sides() -> None:
    result = np.asarray(decoded(encoded(Image.new("RGB", (4, 4), "white")), ImageOptions(size=(4, 8), fit="pad")))
    assert (result[:, 2:6] == 255).all() and (result[:, :2] == 0).all() and (result[:, 6:] == 0).all()


def photo(height: int, width: int) -> Image.Image:
    """Smooth, as photographs are."""
    return Image.fromarray(pixels(5, 12, 16)).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_scaled_decoding_of_jpegs_is_near_a_full_one(
    fit: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(600, 800), "JPEG", quality=95, exif=exif(orientation))
    options = ImageOptions(size=(40, 64), fit=fit)
    loaded = []
    opened = type(Image.open(io.BytesIO(data)))
    monkeypatch.setattr(opened, "load_end", lambda self: loaded.append(self.size), raising=False)
    fast = decoded(data, options)
    assert loaded[0][0] <= 400, "decoded in full"
    monkeypatch.setattr(opened, "draft", lambda self, mode, size: None)
    full = decoded(data, options)
    assert loaded[1] == (800, 600)
    assert fast.size == full.size == (64, 40)
    difference = np.abs(np.asarray(fast).astype(int) - np.asarray(full).astype(int))
    assert difference.mean() < 1 and difference.max() < 24
    assert notes(data, options) == ("RGB", *(["rotated"] if orientation == 6 else []), "resized")


def test_jpeg_of_a_similar_size_is_decoded_in_full() -> None:
    data = encoded(photo(60, 80), "JPEG")
    full = Image.open(io.BytesIO(data)).convert("RGB")
    check_same(
        decoded(data, ImageOptions(size=(40, 64), fit="stretch")), full.resize((64, 40), Image.Resampling.BICUBIC)
    )


# ---- as arrays


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_layouts(mode: str) -> None:
    image = {**alpha_images(), "L": Image.fromarray(pixels(1, channels=1)), "RGB": Image.fromarray(pixels(1))}[mode]
    channels = len(mode)
    expected = np.asarray(image).reshape(10, 12, channels)
    assert sample_shape(image, "nhwc") == (10, 12, channels)
    assert sample_shape(image, "nchw") == (channels, 10, 12)
    for layout, axes in (("nhwc", (0, 1, 2)), ("nchw", (2, 0, 1))):
        out = np.full(sample_shape(image, layout), 7, np.uint8)
        write_pixels(image, layout, out)
        np.testing.assert_array_equal(out, expected.transpose(axes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "squash"}, "fit is 'squash': pass error, stretch, crop or pad"),
        ({"color": "cmyk"}, "color is 'cmyk': pass "),
        ({"layout": "chwn"}, "layout is 'chwn': pass "),
        ({"animated": "all"}, "animated is 'all': pass "),
        ({"size": (0, 5)}, r"size is \(0, 5\): pass a height and a width"),
        ({"size": (5,)}, r"size is \(5,\): pass a height and a width"),
        ({"fit": "crop"}, "fit is 'crop', but there is no size"),
        ({"max_pixels": 0}, "max_pixels is 0: pass at least 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ImageOptions(**options)  # type: ignore[arg-type]
