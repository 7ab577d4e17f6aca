"""Decode frames of windows that are stored as JPEG or PNG images, to the pixel values that Pillow returns.

Frames are grey (Pillow's mode L) or in colour (RGB). EXIF rotations are ignored. Damaged images are refused.
"""

from __future__ import annotations

import io
import zlib

import numpy as np
from PIL import Image

from h5chunk.errors import SampleError
from h5chunk.sources.decode import check_depth, raw_modes_of
from h5chunk.sources.decode_any import COLORS, check_size, simplejpeg

FORMATS = ("JPEG", "PNG")
CHANNELS = {"L": 1, "RGB": 3}
CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")  # chunks of a PNG that determine its pixels


def shape_of_frame(data: np.ndarray) -> tuple[int, int, int]:
    """Return the height, width and number of channels of an encoded image, (n,) uint8, according to its header.

    Raises SampleError if the header is damaged, or the image is not supported.
    """
    return _shape_of(_opened(data))


def decode_frame(data: np.ndarray, shape: tuple[int, int, int], out: np.ndarray, *, is_refused: bool) -> None:
    """Decode an image, (n,) uint8, to ``out``, (H * W * C,) uint8, where ``shape`` is (H, W, C).

    A grey image is converted to RGB if C is 3. ``is_refused`` is true if `h5chunk.native.jpeg` has already failed to
    decode the image. Raises SampleError if the image is damaged or has another shape.
    """
    image = _opened(data)
    found = _shape_of(image)
    if found[:2] != shape[:2] or found[2] > shape[2]:
        raise SampleError(
            f"is {found[0]} x {found[1]} in {COLORS[found[2]]}, but frame 0 is {shape[0]} x {shape[1]} in "
            f"{COLORS[shape[2]]}: all frames must have the size and channels of frame 0"
        )
    if image.format == "PNG":
        _check_png(data.tobytes())
    elif simplejpeg is not None or is_refused:
        _decode_jpeg(data, shape, out)
        return
    try:
        image.load()
    except Exception as error:  # Pillow's plugins raise many types of errors for damaged data
        raise SampleError(f"cannot be decoded: {error or type(error).__name__}") from None
    pixels = image if found == shape else image.convert("RGB")
    out[:] = np.frombuffer(pixels.tobytes(), np.uint8)


def _opened(data: np.ndarray) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data.tobytes()), formats=FORMATS)
        check_size(image.height, image.width)
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(f"is not a JPEG or PNG image, or is damaged ({error or type(error).__name__})") from None
    check_depth(raw_modes_of(image))
    return image


def _shape_of(image: Image.Image) -> tuple[int, int, int]:
    if image.mode not in CHANNELS:
        raise SampleError(f"has mode {image.mode}, but windows support only grey (L) and colour (RGB): convert it")
    return image.height, image.width, CHANNELS[image.mode]


def _decode_jpeg(data: np.ndarray, shape: tuple[int, int, int], out: np.ndarray) -> None:
    try:
        if simplejpeg is None:
            raise ValueError("its JPEG data is damaged")
        simplejpeg.decode_jpeg(data, COLORS[shape[2]], buffer=out)
    except ValueError as error:
        raise SampleError(f"cannot be decoded: {error}") from None


def _check_png(data: bytes) -> None:
    """Raise SampleError if a checksum of a PNG's pixels is wrong, because Pillow does not always verify them."""
    at, kind = 8, b""
    while kind != b"IEND" and at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 8 + length
        if kind in CRITICAL and zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise SampleError(f"is damaged: the checksum of a {kind.decode()} chunk differs")
        at = end + 4
    if kind != b"IEND":
        raise SampleError("is truncated: its IEND chunk is missing")
