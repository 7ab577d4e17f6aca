"""Augment images in the C library, without the GIL; see ``augment.c``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from h5chunk import native

# columns of a table of geometry; from ERASED + 4 * k: top, left, height and width of the k-th erased box in the result
OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, TURNED, ERASED = range(
    13
)


class ImageRule(ctypes.Structure):
    """Parameters that apply to all images of a call of `augment`. ``augment.h`` describes them."""

    kept: tuple[Any, ...] = ()  # the arrays that the pointers refer to
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("channels", "height", "width", "interpolation", "mode", "interleaved")),
        *((name, ctypes.c_int32) for name in ("out_interleaved", "item_bytes", "conversion", "boxes")),
        *((name, ctypes.c_void_p) for name in ("fill", "values", "erased", "scale", "shift")),
    )


def augment(rule: ImageRule, source: int, num_bytes: int, table: np.ndarray, out: int) -> None:
    """Augment images one after another, without the GIL.

    Parameters
    ----------
    source, out : int
        Addresses of the images, of ``num_bytes`` in total, and of the results.
    table : (n, columns) int64, C-contiguous
        The geometry of each image, as written by `h5chunk.transforms.geometry.Geometry.fill`.

    Raises
    ------
    IndexError
        A row of the table refers to bytes outside of the source.
    MemoryError
        Memory is short.
    """
    state = native._library().h5chunk_augment(
        ctypes.byref(rule), source, num_bytes, table.ctypes.data, table.shape[1], len(table), out
    )
    if state:
        raise MemoryError("memory for resizing images is short") if state == -1 else IndexError("an image is cut short")
