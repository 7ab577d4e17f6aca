"""Decode frames that are stored as JPEG or PNG images, without the GIL. `h5chunk.native.jpeg` decodes most JPEGs."""

from __future__ import annotations

import math

import numpy as np

from h5chunk.errors import SampleError
from h5chunk.native import jpeg
from h5chunk.native.augment import BOX_HEIGHT, BOX_WIDTH, ERASED, FULL_HEIGHT, FULL_WIDTH, HEIGHT, OFFSET, WIDTH
from h5chunk.store.read.encoded import FrameDecoder, Shape

JPEG = 0xFF  # first byte of a JPEG


def _shape_of(data: np.ndarray) -> Shape:
    from h5chunk.sources.decode_frame import shape_of_frame

    return shape_of_frame(data)


def _decode(
    data: np.ndarray, bounds: np.ndarray, shape: Shape, out: np.ndarray, places: np.ndarray
) -> tuple[int, str] | None:
    from h5chunk.sources.decode_any import LINKED
    from h5chunk.sources.decode_frame import decode_frame

    library = jpeg.load(LINKED) if shape[2] == 3 else None  # C would convert colour to grey without an error
    is_by_c = (data[bounds[:, 0]] == JPEG) & (library is not None)
    by_c = np.flatnonzero(is_by_c)
    images = _images(data, bounds[by_c], shape, places[by_c])
    number = -1
    try:
        while library is not None and (left := jpeg.decode(library, images, None, out.ctypes.data, 0)) is not None:
            number = int(by_c[left])
            decode_frame(data[slice(*bounds[number])], shape, out[places[number]], is_refused=True)
        for number in np.flatnonzero(~is_by_c).tolist():
            decode_frame(data[slice(*bounds[number])], shape, out[places[number]], is_refused=False)
    except SampleError as error:
        return number, str(error)
    return None


def _images(data: np.ndarray, bounds: np.ndarray, shape: Shape, places: np.ndarray) -> jpeg.Images:
    """Describe images that are decoded completely, to the rows ``places`` of the result."""
    table = np.zeros((len(bounds), ERASED), np.int64)
    table[:, OFFSET] = places * math.prod(shape)
    table[:, [HEIGHT, BOX_HEIGHT, FULL_HEIGHT]], table[:, [WIDTH, BOX_WIDTH, FULL_WIDTH]] = shape[0], shape[1]
    starts, stops = np.ascontiguousarray(bounds.T)
    return jpeg.Images(data, starts, stops, np.ones(len(bounds), np.uint8), table, shape[2])


def import_decoders() -> None:
    """Import Pillow now: a process that is forked while a thread imports it could never import it."""
    import h5chunk.sources.decode_frame  # noqa: F401


FRAME_DECODER = FrameDecoder(_shape_of, _decode)
