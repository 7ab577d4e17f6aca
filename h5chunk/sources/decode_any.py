"""Decode images that are stored encoded: JPEG with simplejpeg if it is installed, other formats with Pillow.

Both libraries release the GIL while they decode. The HDF5 file records the size of each image, which is checked before
the image is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import numpy as np
from PIL import Image, UnidentifiedImageError, _imaging

from h5chunk.errors import SampleError
from h5chunk.sources.decode import FORMATS, SIDEWAYS, check_depth, raw_modes_of, to_color
from h5chunk.sources.kinds import MAX_PIXELS

# Pillow's plugins are imported now: a process that is forked while a thread imports one could never import it.
Image.preinit()
for _plugin in ("Mpo", "Tiff", "WebP"):
    import_module(f"PIL.{_plugin}ImagePlugin")
try:
    import simplejpeg
except ImportError:  # the extra "jpeg"
    simplejpeg = None

LINKED = _imaging.__file__  # path of the extension module that is linked to Pillow's libjpeg
MISSING = 'JPEG by Pillow: pip install "h5chunk[jpeg]" decodes faster'
SCALED = 2  # smallest factor by which a JPEG is shrunk while decoding: smaller factors save no time
HEAD_BYTES = 256  # the beginning of a JPEG, in which an Adobe marker is searched
TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
COLORS = {1: "GRAY", 3: "RGB"}


def decode_any(
    data: np.ndarray, height: int, width: int, orientation: int, channels: int, min_size: Sequence[int], out: np.ndarray
) -> tuple[int, int]:
    """Decode an encoded image, (n,) uint8, to (H, W, C) pixels at the beginning of ``out``, a 1-D uint8 array.

    ``height`` and ``width`` are those of the image after EXIF rotation; ``orientation`` is its EXIF orientation, and
    ``channels`` is 1 (grey) or 3 (RGB). Returns the height and width of the result, because a JPEG may be scaled by
    1/2, 1/4 or 1/8 if it stays at least as large as ``min_size``, (height, width). Raises SampleError on failure.
    """
    is_plain = orientation == 1 and data[0] == 0xFF and b"Adobe" not in data[:HEAD_BYTES].tobytes()  # may be CMYK
    if is_plain and simplejpeg and (2 * min_size[0] > height or 2 * min_size[1] > width):
        with suppress(ValueError):  # fast path for the common case
            pixels = simplejpeg.decode_jpeg(data, COLORS[channels], buffer=out)
            if pixels.shape == (height, width, channels):
                return height, width
    if data[:4].tobytes() in TIFF_MAGICS:
        orientation = 1  # Pillow applies it while loading; older files record it nevertheless
    size = (width, height) if orientation in SIDEWAYS else (height, width)
    check_size(height, width)
    min_size = (min_size[1], min_size[0]) if orientation in SIDEWAYS else (min_size[0], min_size[1])
    pixels = _by_simplejpeg(data, size, channels, min_size, out) if simplejpeg and data[0] == 0xFF else None
    if pixels is None:
        pixels = _by_pillow(data, size, channels)
    if orientation != 1:
        pixels = _turned(pixels.copy(), orientation)
    target = out[: pixels.size].reshape(pixels.shape)
    if not np.shares_memory(pixels, target):
        target[...] = pixels
    return pixels.shape[0], pixels.shape[1]


def check_size(height: int, width: int) -> None:
    """Raise SampleError if an image of this size has too many pixels to be decoded."""
    if height * width > MAX_PIXELS:
        raise SampleError(f"is {height} x {width}, but at most {MAX_PIXELS} pixels can be decoded")


def _by_simplejpeg(
    data: np.ndarray, size: tuple[int, int], channels: int, min_size: tuple[int, int], out: np.ndarray
) -> np.ndarray | None:
    """Decode a JPEG. Return None to leave it to Pillow: CMYK, damaged data, or a size other than ``size``."""
    try:
        *recorded, color, _ = simplejpeg.decode_jpeg_header(data)
        if tuple(recorded) != size or color not in ("YCbCr", "RGB", "Gray"):
            return None
        limits = {"min_height": max(1, min_size[0]), "min_width": max(1, min_size[1])}
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, COLORS[channels], buffer=out, min_factor=SCALED, **limits)
        return pixels
    except ValueError:
        return None


def _by_pillow(data: np.ndarray, size: tuple[int, int], channels: int) -> np.ndarray:
    try:
        image = Image.open(io.BytesIO(data.tobytes()), formats=FORMATS)
        check_depth(raw_modes_of(image))
        if image.width * image.height == size[0] * size[1]:
            image.load()  # may exchange width and height of a TIFF
        if image.size[::-1] != size:
            raise SampleError(f"is {image.height} x {image.width}, but the HDF5 file records {size[0]} x {size[1]}")
        pixels = np.asarray(to_color(image, "rgb" if channels == 3 else "gray"))
        return pixels.reshape(*size, channels)
    except SampleError:
        raise
    except UnidentifiedImageError:
        raise SampleError("cannot be decoded: its bytes are not an image in a supported format") from None
    except MemoryError:
        raise SampleError("needs more memory than is available") from None
    except Exception as error:  # Pillow's plugins raise many types of errors for damaged data
        raise SampleError(f"cannot be decoded: {error or type(error).__name__}") from None


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels rotated and flipped by an EXIF orientation."""
    if orientation in SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels[::-1] if orientation in (3, 4, 7, 8) else pixels
