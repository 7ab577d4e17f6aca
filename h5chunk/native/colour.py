"""Change the colours of images in the C library, without the GIL; ``colour.c``."""

from __future__ import annotations

import numpy as np

from h5chunk import native


def jitter(images: int, table: np.ndarray, num_pixels: int, channels: int, *, interleaved: bool) -> None:
    """Change the colours of images in place, one after another.

    Parameters
    ----------
    images : int
        Address of the images, each with ``channels`` planes of ``num_pixels`` bytes, or with as many interleaved bytes
        per pixel.
    table : (n, 5) int32, C-contiguous
        The changes of each image, as `h5chunk.transforms.colour` describes them.
    """
    native._library().h5chunk_jitter(images, table.ctypes.data, len(table), num_pixels, channels, interleaved)
