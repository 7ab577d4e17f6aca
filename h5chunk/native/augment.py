"""Augment images and draw their geometry in the C library, without the GIL; ``augment.c`` and ``draws.c``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from h5chunk import native

FEW_SAMPLES = 1 << 10  # for fewer samples, drawing geometry is faster without releasing the GIL
STEP = np.dtype(  # draws.c describes the fields
    [
        ("kind", np.int64),
        ("key", np.uint64),
        *((name, np.int64) for name in ("height", "width", "left", "top", "right", "bottom", "flag", "reflects")),
        *((name, np.float64, 2) for name in ("scale", "ratio", "log_ratio")),
        ("p", np.float64),
    ]
)
BOX, CROP, RESIZE, FLIP, CUTOUT, ERASE = range(6)  # kinds of steps
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


def draw(
    steps: np.ndarray,
    samples: np.ndarray,
    sizes: tuple[np.ndarray, np.ndarray],
    sides: np.ndarray,
    longest: int,
    table: np.ndarray,
) -> bool:
    """Draw the geometry of images. Returns False if a step cannot be applied to an image.

    Parameters
    ----------
    steps : (k,) STEP
    samples : (n,) int64
    sizes : two of (n,) or (1,) int64
        Heights and widths of each image, or of all images.
    sides : (2,) int64
        Height and width of the results.
    longest : int
        Maximum height or width to which an image may be resized.
    table : (n, columns) int64, C-contiguous
        Output: the rows that `h5chunk.transforms.geometry.Geometry.fill` would write.
    """
    samples, *sizes = (np.ascontiguousarray(each, np.int64) for each in (samples, *sizes))  # type: ignore[assignment]
    images = *(each.ctypes.data for each in sizes), int(len(sizes[0]) > 1)
    given = steps.ctypes.data, len(steps), samples.ctypes.data, len(samples), *images
    library = native._quick() if len(samples) < FEW_SAMPLES else native._library()
    return bool(library.h5chunk_draw(*given, sides.ctypes.data, longest, table.ctypes.data) == len(samples))
