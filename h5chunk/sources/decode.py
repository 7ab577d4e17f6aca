"""Decode images to uint8 pixels, with one explicit policy for each kind of image.

| kind | policy |
| --- | --- |
| EXIF orientation | applied, counted as ``rotated`` |
| grey (L), 1-bit | to RGB by repeating; 1-bit becomes 0 and 255 |
| alpha (RGBA, LA, PA) | alpha is dropped, as torchvision's loader does; ``color="keep"`` keeps it |
| palette (P) | to RGB; refused by ``color="keep"``, because palette indices are not intensities |
| CMYK, YCbCr | to RGB by Pillow's formula, without colour profiles |
| 16 bits or more, float | refused: 8 bits cannot hold them, and only the user knows the range of interest |
| LAB, HSV, others | refused |
| animated, several pages | refused, or the first with ``animated="first"``; of MPO (two JPEGs in one), the first |
| truncated, broken, not an image | refused |
| more pixels than ``max_pixels`` | refused before they are decoded |

A refusal is a `SampleError`. Colour, size and frame policies are options; nothing is cut or clipped silently.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from h5chunk.errors import SampleError
from h5chunk.sources.kinds import ImageOptions

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
DRAFT_GAP = 2  # decode JPEGs at no less than this many times the wanted size

_TO_RGB = {"1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "RGB"}
_KEPT = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_DEEP = re.compile(r";(12|16|32|64)[BLNSF]+$|^(I|F)(;|$)")
_FILTER = Image.Resampling.BICUBIC


@contextmanager
def pillow_limits(max_pixels: int) -> Iterator[None]:
    """Make Pillow refuse images over ``max_pixels``, and truncated images, in the whole process."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = max_pixels, False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # about odd EXIF and palettes: see the policy above
            warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def decode(image: bytes | Image.Image, options: ImageOptions) -> tuple[Image.Image, tuple[str, ...]]:
    """Decode an encoded image, or an image that Pillow has opened; apply orientation, colours and size.

    Call it within `pillow_limits`. Returns an image of mode L, LA, RGB or RGBA, and notes to count in the report: its
    original mode, and the conversions. A SampleError says why an image is refused.
    """
    try:
        return _adapt(_open(image) if isinstance(image, bytes) else image, options)
    except SampleError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise SampleError(
            f"has more pixels than the limit max_pixels={options.max_pixels}: raise the limit if this is intended"
        ) from None
    except MemoryError:
        raise SampleError("needs more memory than is available") from None
    except Exception as error:  # Pillow's plugins raise many types of errors on broken data
        raise SampleError(f"cannot be decoded: {error or type(error).__name__}") from None


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise SampleError(
            f"is not an image in a known format ({', '.join(FORMATS)}); starts with {data[:16]!r} (or is a "
            "variant that Pillow cannot read)"
        ) from None


def _adapt(image: Image.Image, options: ImageOptions) -> tuple[Image.Image, tuple[str, ...]]:
    notes = [image.mode]
    _refuse_deep(image)
    num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if num_frames > 1:
        if options.animated == "error":
            raise SampleError(f"has {num_frames} frames: use animated='first' (--animated first) for the first one")
        notes.append("first frame")
    turn = _turn(image)
    if options.size and options.fit != "error":
        _draft(image, options, sideways=turn in (5, 6, 7, 8))
    image.load()
    if turn == 1 and image.format == "PNG":  # the EXIF data may come after the pixels
        turn = _turn(image)
    if turn in range(2, 9):
        image = ImageOps.exif_transpose(image)
        notes.append("rotated")
    image = _convert(image, options.color)
    if options.size and (image.height, image.width) != options.size:
        image = _resize(image, options)
        notes.append("resized")
    return image, tuple(notes)


def _refuse_deep(image: Image.Image) -> None:
    """Refuse images of more than 8 bits; Pillow opens some of them as 8-bit modes and drops the lower byte."""
    args = [image.mode]
    for tile in getattr(image, "tile", ()):
        more = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        args += [arg for arg in more if isinstance(arg, str)]
        if tile[0] in ("ppm", "ppm_plain") and isinstance(more[-1], int) and more[-1] > 255:
            args.append("I")
    deep = next((arg for arg in args if _DEEP.search(arg)), None)
    if deep is not None:
        raise SampleError(f"has over 8 bits per channel ({deep}): scale it to 8 bits first; only you know its range")


def _turn(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 is upright. EXIF is parsed only if present, because parsing is slow."""
    if image.format == "TIFF" or any(key in image.info for key in ("exif", "xmp", "XML:com.adobe.xmp")):
        return image.getexif().get(0x0112, 1)
    return 1


def _draft(image: Image.Image, options: ImageOptions, sideways: bool) -> None:
    """Let the JPEG decoder scale by 1/2, 1/4 or 1/8 if the target is much smaller; other decoders ignore it."""
    assert options.size is not None
    height, width = reversed(options.size) if sideways else options.size
    scales = width / image.width, height / image.height
    if options.fit == "crop":
        scales = (max(scales),) * 2
    elif options.fit == "pad":
        scales = (min(scales),) * 2
    wanted = [max(1, round(DRAFT_GAP * s * n)) for s, n in zip(scales, image.size, strict=True)]
    if wanted[0] <= image.width and wanted[1] <= image.height:
        image.draft(None, (wanted[0], wanted[1]))


def _convert(image: Image.Image, color: str) -> Image.Image:
    if color == "keep":
        if image.mode == "1":
            return image.convert("L")
        if image.mode not in _KEPT:
            raise SampleError(f"has mode {image.mode}, which color 'keep' does not support: use color 'rgb' or 'gray'")
        return image
    if image.mode not in _TO_RGB:
        raise SampleError(f"has mode {image.mode}, which is not supported: convert it to RGB first")
    wanted = "RGB" if color == "rgb" else "L"
    if image.mode == wanted:
        return image
    image.info.pop("transparency", None)
    if image.mode == "PA":
        image = image.convert("RGBA")
    return image.convert(wanted)


def _resize(image: Image.Image, options: ImageOptions) -> Image.Image:
    assert options.size is not None
    height, width = options.size
    if options.fit == "error":
        raise SampleError(
            f"is {image.height} x {image.width} but size is {height} x {width}: use fit stretch, crop or pad"
        )
    if options.fit == "stretch":
        return image.resize((width, height), _FILTER)
    fit = ImageOps.fit if options.fit == "crop" else ImageOps.pad
    return fit(image, (width, height), _FILTER)


def write_pixels(image: Image.Image, layout: str, out: np.ndarray) -> None:
    """Copy the pixels of an image into ``out``: (C, H, W) uint8 for layout nchw, (H, W, C) for nhwc."""
    if layout == "nhwc":
        out[...] = np.frombuffer(image.tobytes(), np.uint8).reshape(out.shape)
    elif image.mode in ("RGB", "RGBA"):
        for channel, band in zip(out, image.mode, strict=True):
            channel[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(channel.shape)
    else:
        for channel, plane in zip(out, image.split(), strict=True):
            channel[...] = np.frombuffer(plane.tobytes(), np.uint8).reshape(channel.shape)


def sample_shape(image: Image.Image, layout: str) -> tuple[int, int, int]:
    """Return the shape of an image as a sample."""
    channels = _KEPT[image.mode]
    if layout == "nchw":
        return channels, image.height, image.width
    return image.height, image.width, channels
