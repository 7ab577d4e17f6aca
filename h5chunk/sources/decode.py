"""Decode images to uint8 pixels, with an explicit policy for each kind of image.

| kind | policy |
| --- | --- |
| orientation, in EXIF data or XMP | applied as by Pillow's ``exif_transpose``, counted as ``rotated`` |
| grey (L), 1-bit | converted to RGB by repeating the channel; 1-bit becomes 0 and 255 |
| alpha (RGBA, LA, PA) | alpha is dropped, as by torchvision's loader; ``color="keep"`` keeps it |
| palette (P) | converted to RGB; refused by ``color="keep"``, because palette indices are not intensities |
| CMYK, YCbCr | converted to RGB by Pillow, without colour profiles |
| 16 bits or more, float | refused: 8 bits cannot hold them, and only the user knows the range of interest |
| LAB, HSV, others | refused |
| several frames or pages | refused; ``animated="first"`` uses the first, as is always done for MPO (several JPEGs) |
| truncated, broken, not an image | refused |
| more pixels than ``max_pixels`` | refused before they are decoded |

A mask (``mask_column``) keeps its class numbers, one per pixel, and is resized by nearest neighbour:

| kind | policy |
| --- | --- |
| palette (P) | its indices |
| grey (L), 1 to 8 bits | its values; 1-bit becomes 0 and 1 |
| 16 bits or more, float | its values, if all are integers from 0 to 255, otherwise refused |
| colours, alpha | the values of a channel, if all channels are equal and no pixel is transparent, otherwise refused |

`SampleError` is raised for a refused image.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from h5chunk.errors import SampleError
from h5chunk.machine import warnings_filtered
from h5chunk.sources.foreign import AS_PICTURES
from h5chunk.sources.kinds import MAX_PIXELS, ImageOptions

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
JPEG_2000 = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
DRAFT_GAP = 2  # minimum ratio of the size at which a JPEG is decoded to the requested size

_TO_RGB = {"1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "RGB"}  # modes that are converted to RGB
_KEPT = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}  # channels of the modes that color="keep" supports
_DEEP = re.compile(r";(12|16|32|64)[BLNSF]+$|^(I|F)(;|$)")  # raw modes of more than 8 bits
_SCALED = {"L;2": 85, "L;4": 17}  # factors by which Pillow scales grey values of 2 and 4 bits
_STRETCHED = "maxval"  # marks a PPM whose values Pillow scales to another range
NUMBERS = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N", "F")  # modes of one channel


class Decoded(NamedTuple):
    """A decoded image."""

    image: Image.Image  # of mode L, LA, RGB or RGBA
    notes: tuple[str, ...]  # the original mode and the changes made, which the report counts
    size: tuple[int, int]  # height and width after EXIF rotation, before resizing
    orientation: int  # EXIF orientation, already applied; 1: not rotated
    remaining: int  # the part of it that is not applied when Pillow loads the image: 1 for TIFF


@contextmanager
def pillow_limits(max_pixels: int) -> Iterator[None]:
    """Make Pillow refuse truncated images and images of more than ``max_pixels``, while the context is active."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = max_pixels, False
    try:
        with (
            warnings_filtered("ignore", module="PIL"),  # warnings about odd EXIF data and palettes
            warnings_filtered("error", category=Image.DecompressionBombWarning),
        ):
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def decode(image: bytes | Image.Image, options: ImageOptions, is_mask: bool = False) -> Decoded:
    """Decode an image, apply its EXIF orientation, convert its colours, and resize it.

    ``image`` is encoded, as bytes, or opened by Pillow. Call this within `pillow_limits`. Raises SampleError if the
    image is refused.
    """
    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS) if isinstance(image, bytes) else image
        return _adapt(opened, options, is_mask)
    except SampleError:
        raise
    except UnidentifiedImageError:
        start = f"; starts with {image[:16]!r}" if isinstance(image, bytes) else ""
        if isinstance(image, bytes) and (image[4:8] == b"ftyp" or image.startswith(JPEG_2000)):
            start = f": it is AVIF, HEIF or JPEG 2000: in Python, {AS_PICTURES}"
        raise SampleError(
            f"is not an image in a known format ({', '.join(FORMATS)}), or is a variant that Pillow cannot read{start}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        found = re.search(r"\((\d+) pixels\)", str(error))
        way = f"raise the limit (--max-pixels {found[1] if found else 'N'})"
        if options.keep_encoded and options.max_side is None:
            way += f", and shrink large images (--max-side N, at most {math.isqrt(MAX_PIXELS)})"
        raise SampleError(
            f"has more pixels than the limit max_pixels={options.max_pixels}: if you trust the image, {way}"
        ) from None
    except MemoryError:
        raise SampleError("needs more memory than is available") from None
    except Exception as error:  # Pillow's plugins raise many types of errors for damaged data
        raise SampleError(f"cannot be decoded: {error or type(error).__name__}") from None


def _adapt(image: Image.Image, options: ImageOptions, is_mask: bool) -> Decoded:
    notes = [f"{image.mode} mask" if is_mask else image.mode]
    raw_modes = raw_modes_of(image)
    if not (is_mask and image.mode in NUMBERS):
        check_depth(raw_modes)
    num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if num_frames > 1:
        if options.animated == "error":
            raise SampleError(
                f"has {num_frames} frames: use animated='first' (--animated first) to store the first one"
            )
        notes.append("first frame")
    if image.format == "PNG":
        image.load()  # what tells the orientation may follow the pixels
    orientation, full_size = orientation_of(image), image.size
    if options.size and options.fit != "error" and not is_mask:
        _draft(image, options, sideways=orientation in SIDEWAYS)
    is_draft = image.size != full_size
    image.load()
    remaining = orientation_of(image)
    if remaining != 1:
        image = ImageOps.exif_transpose(image)
    if orientation != 1:
        notes.append("rotated")
    width, height = image.size
    if is_draft:
        width, height = full_size[::-1] if orientation in SIDEWAYS else full_size
    image = _class_numbers(image, raw_modes) if is_mask else to_color(image, options.color)
    if options.size and (image.height, image.width) != options.size:
        image = _resize(image, options, Image.Resampling.NEAREST if is_mask else Image.Resampling.BICUBIC)
        notes.append("resized")
    notes = notes[:1] if is_mask else notes  # changes are counted for the image of the mask
    return Decoded(image, tuple(notes), (height, width), orientation, remaining)


def raw_modes_of(image: Image.Image) -> list[str]:
    """Return the mode of an image, followed by the modes that Pillow reports for the pixels in the file."""
    args = [image.mode]
    for tile in getattr(image, "tile", ()):
        more = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        args += [arg for arg in more if isinstance(arg, str)]
        if tile[0] in ("ppm", "ppm_plain") and isinstance(more[-1], int) and more[-1] > 255:
            args.append("I")
        if tile[0] in ("ppm", "ppm_plain") and more[-1] not in (255, 65535):
            args.append(_STRETCHED)
    return args


def check_depth(raw_modes: list[str]) -> None:
    """Refuse images of more than 8 bits: Pillow opens some of them as 8 bits, without a warning."""
    if (deep := next((mode for mode in raw_modes if _DEEP.search(mode)), None)) is not None:
        array = "np.asarray(image)" if _DEEP.search(raw_modes[0]) else "it as an array (Pillow reduces it to 8 bits)"
        raise SampleError(
            f"has more than 8 bits per channel ({deep}): convert it to 8 bits first, because only you know which range "
            f"of values matters; or keep all values, with a data set in Python that returns {array}: "
            "h5chunk.convert(dataset, path)"
        )


def orientation_of(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, that `PIL.ImageOps.exif_transpose` would apply to an image now; 1: none.

    It may come from EXIF data or XMP. Pillow applies that of a TIFF while loading it, so it is 1 afterwards. Data that
    cannot be parsed has none, as Pillow treats that of a JPEG.
    """
    orientation: Any = 1
    with suppress(Exception):  # damaged EXIF data raises many types of errors
        orientation = image.getexif().get(0x0112, 1)
    return int(orientation) if orientation in range(1, 9) else 1


def _draft(image: Image.Image, options: ImageOptions, sideways: bool) -> None:
    """Make the JPEG decoder scale by 1/2, 1/4 or 1/8 if the image is much larger than ``options.size``.

    ``sideways`` is true if EXIF swaps height and width. Other decoders ignore the request.
    """
    assert options.size is not None
    height, width = reversed(options.size) if sideways else options.size
    scales = width / image.width, height / image.height
    if options.fit == "crop":
        scales = (max(scales),) * 2
    elif options.fit == "pad":
        scales = (min(scales),) * 2
    draft_size = [max(1, round(DRAFT_GAP * s * n)) for s, n in zip(scales, image.size, strict=True)]
    if draft_size[0] <= image.width and draft_size[1] <= image.height:
        image.draft(None, (draft_size[0], draft_size[1]))


def to_color(image: Image.Image, color: str) -> Image.Image:
    """Convert an image to ``color``: rgb, gray, or keep. Raises SampleError if its mode is not supported."""
    if image.mode not in _TO_RGB:
        raise SampleError(f"has mode {image.mode}, which is not supported: convert it to RGB first")
    if color == "keep":
        if image.mode == "1":
            return image.convert("L")
        if image.mode not in _KEPT:
            raise SampleError(f"has mode {image.mode}, which color 'keep' does not support: use color 'rgb' or 'gray'")
        return image
    mode = "RGB" if color == "rgb" else "L"
    if image.mode == mode:
        return image
    image.info.pop("transparency", None)
    if image.mode == "PA":
        image = image.convert("RGBA")
    return image.convert(mode)


def are_equal(bands: Sequence[Image.Image]) -> bool:
    """Return whether all channels have the same pixels."""
    return all(band.tobytes() == bands[0].tobytes() for band in bands[1:])


def _class_numbers(image: Image.Image, raw_modes: list[str]) -> Image.Image:
    """Return the class numbers of a mask, unchanged, as an image of mode L."""
    if image.mode in ("RGB", "RGBA", "LA"):
        *bands, last = image.split()
        if image.mode == "RGB":
            bands.append(last)
        elif last.getextrema() != (255, 255):
            raise SampleError("is a mask with transparent pixels: assign a class number to these pixels")
        if not are_equal(bands):
            raise SampleError(
                f"is a colour mask ({image.mode}): replace each colour by a class number, and save it as a grey PNG"
            )
        return bands[0]
    if image.mode not in NUMBERS or _STRETCHED in raw_modes:
        raise SampleError(
            f"is a mask of mode {image.mode} whose class numbers would change: save it as a grey PNG of 8 bits"
        )
    numbers = np.asarray(image)
    with np.errstate(invalid="ignore"):
        fitted = (numbers // next((_SCALED[mode] for mode in raw_modes if mode in _SCALED), 1)).astype(np.uint8)
    if image.mode not in ("1", "L", "P") and not np.array_equal(fitted, numbers):
        wrong = numbers[fitted != numbers][0]
        raise SampleError(
            f"is a mask with the class number {wrong}, but only integers from 0 to 255 are supported: renumber the "
            "classes, with 255 for pixels to ignore, or keep all values, with a data set in Python that returns "
            "np.asarray(mask): h5chunk.convert(dataset, path)"
        )
    return Image.fromarray(fitted)


def _resize(image: Image.Image, options: ImageOptions, resample: Image.Resampling) -> Image.Image:
    assert options.size is not None
    height, width = options.size
    if options.fit == "error":
        raise SampleError(
            f"is {image.height} x {image.width}, but the size is {height} x {width}: use fit stretch, crop or pad"
        )
    if options.fit == "stretch":
        return image.resize((width, height), resample)
    fit = ImageOps.fit if options.fit == "crop" else ImageOps.pad
    return fit(image, (width, height), resample)


def write_pixels(image: Image.Image, layout: str, out: np.ndarray) -> None:
    """Copy pixels into ``out``, uint8: (C, H, W) for layout nchw, (H, W, C) for nhwc; (H, W) for a mask."""
    if layout == "nhwc" or out.ndim == 2:
        out[...] = np.frombuffer(image.tobytes(), np.uint8).reshape(out.shape)
    elif image.mode in ("RGB", "RGBA"):
        for channel, band in zip(out, image.mode, strict=True):
            channel[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(channel.shape)
    else:
        for channel, plane in zip(out, image.split(), strict=True):
            channel[...] = np.frombuffer(plane.tobytes(), np.uint8).reshape(channel.shape)


def sample_shape(image: Image.Image, layout: str, is_mask: bool = False) -> tuple[int, ...]:
    """Return the shape of the array for an image: (C, H, W), (H, W, C), or (H, W) for a mask."""
    if is_mask:
        return image.height, image.width
    channels = _KEPT[image.mode]
    if layout == "nchw":
        return channels, image.height, image.width
    return image.height, image.width, channels
