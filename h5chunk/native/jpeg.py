"""Decode JPEG images in C, with a libjpeg-turbo that this process has loaded, and augment them, without the GIL."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from h5chunk import native
from h5chunk.native import ImageRule, available

FUNCTIONS = (
    *("std_error", "CreateDecompress", "mem_src", "read_header", "start_decompress", "read_scanlines"),
    *("skip_scanlines", "finish_decompress", "abort_decompress", "destroy_decompress"),
)


class Decoder(ctypes.Structure):
    """The functions of libjpeg that ``jpeg.c`` calls, and what it finds out about this libjpeg."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in FUNCTIONS),
        ("version", ctypes.c_int64),
        ("info_bytes", ctypes.c_int64),
    )


class Images(ctypes.Structure):
    """The images of a batch, of which each thread takes the ``next``."""

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
    """Return the libjpeg-turbo that a library is linked to; None if there is none to call, or nothing was built."""
    if not available():
        return None
    try:
        library = ctypes.CDLL(path)
        found = Decoder(*(ctypes.cast(getattr(library, f"jpeg_{name}"), ctypes.c_void_p).value for name in FUNCTIONS))
    except (OSError, AttributeError):
        return None
    return found if native._library().h5chunk_find_jpeg(ctypes.byref(found)) == 0 else None


def decode(library: Decoder | None, images: Images, rule: ImageRule | None, out: int, result_bytes: int) -> int | None:
    """Decode images that no other thread has taken, until all are done.

    Returns None; or the number of an image that is not a valid JPEG with EXIF orientation 1: decode it in another way,
    and call again. ``table`` gets the size of an image that was scaled.

    Parameters
    ----------
    library : Decoder or None
        None: images are stored as pixels, (H, W, C).
    rule : ImageRule or None
        How to augment each image. None: an image is only decoded, as (H, W, C), to its place in ``out``.
    out : int
        Address of the results, of ``result_bytes`` each.
    """
    given = (None if each is None else ctypes.byref(each) for each in (library, rule, images))
    found = native._library().h5chunk_decode(*given, out, result_bytes)
    if found == -2:
        raise MemoryError("memory for decoding images is short")
    return None if found < 0 else int(found)
