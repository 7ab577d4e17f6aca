"""Decode and augment JPEG images in C without the GIL, with a libjpeg-turbo that this process has loaded."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from h5chunk import native
from h5chunk.native import available
from h5chunk.native.augment import ImageRule

FUNCTIONS = (
    *("std_error", "CreateDecompress", "mem_src", "read_header", "start_decompress", "read_scanlines"),
    *("skip_scanlines", "finish_decompress", "abort_decompress", "destroy_decompress"),
)


class Decoder(ctypes.Structure):
    """The functions of libjpeg that ``jpeg.c`` calls, and the version and structure size that it detects."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in FUNCTIONS),
        ("version", ctypes.c_int64),
        ("info_bytes", ctypes.c_int64),
    )


class Images(ctypes.Structure):
    """The images of a batch. Each thread processes the image with the index ``next``, and increments the index."""

    next: int
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "starts", "stops", "orientations", "table")),
        *((name, ctypes.c_int64) for name in ("columns", "count", "next", "channels")),
    )

    def __init__(
        self,
        data: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        orientations: np.ndarray,
        table: np.ndarray,
        channels: int,
    ) -> None:
        self.kept = data, starts, stops, orientations, table
        addresses = (each.ctypes.data for each in self.kept)
        super().__init__(*addresses, table.shape[1], len(table), 0, channels)


@functools.cache
def load(path: str) -> Decoder | None:
    """Return the functions of the libjpeg-turbo with which the library at a path is linked.

    Returns None if there is no libjpeg-turbo, or if the C library was not built.
    """
    if not available():
        return None
    try:
        library = ctypes.CDLL(path)
        decoder = Decoder(*(ctypes.cast(getattr(library, f"jpeg_{name}"), ctypes.c_void_p).value for name in FUNCTIONS))
    except (OSError, AttributeError):
        return None
    return decoder if native._library().h5chunk_find_jpeg(ctypes.byref(decoder)) == 0 else None


def decode(library: Decoder | None, images: Images, rule: ImageRule | None, out: int, result_bytes: int) -> int | None:
    """Decode images that no other thread has taken, until all are done.

    Returns None at the end, or the index of an image that is not a valid JPEG with EXIF orientation 1. The caller must
    decode this image in another way, and call this function again. For scaled images, the size in ``table`` is updated.

    Parameters
    ----------
    library : Decoder or None
        None if images are stored as pixels, (H, W, C).
    images : Images
    rule : ImageRule or None
        How to augment each image. With None, images are only decoded, as (H, W, C), to their offsets in ``out``.
    out : int
        Address of the results, of ``result_bytes`` each.
    """
    given = (None if each is None else ctypes.byref(each) for each in (library, rule, images))
    found = native._library().h5chunk_decode(*given, out, result_bytes)
    if found == -2:
        raise MemoryError("memory for decoding images is short")
    return None if found < 0 else int(found)
