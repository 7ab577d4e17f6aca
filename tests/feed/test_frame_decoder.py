"""Decoding frames that are stored as JPEG or PNG: damaged bytes never become other pixels of a PNG."""

from __future__ import annotations

import numpy as np
from support.encoded import SIZE, encoded

from h5chunk.sources.frame_decoder import FRAME_DECODER

SHAPE = (*SIZE, 3)


def decoded(data: np.ndarray) -> np.ndarray | str:
    out = np.zeros((1, np.prod(SHAPE)), np.uint8)
    problem = FRAME_DECODER.decode(data, np.array([[0, len(data)]]), SHAPE, out, np.array([0]))
    return out if problem is None else problem[1]


def test_a_flipped_bit_of_a_png_is_an_error_or_changes_nothing() -> None:
    ramp = np.arange(np.prod(SHAPE)).reshape(SHAPE) // 7
    image = encoded(ramp.astype(np.uint8), "PNG")
    pixels, num_errors = decoded(image), 0
    assert isinstance(pixels, np.ndarray)
    for bit in range(8 * len(image)):
        changed = image.copy()
        changed[bit // 8] ^= 1 << bit % 8
        found = decoded(changed)
        num_errors += isinstance(found, str)
        assert isinstance(found, str) or np.array_equal(found, pixels), bit
    assert num_errors > 7 * len(image)


def test_bytes_after_the_end_of_an_image_are_ignored() -> None:
    for kind in ("JPEG", "PNG"):
        image = encoded(np.full(SHAPE, 90, np.uint8), kind)
        for more in (np.zeros(100, np.uint8), np.full(3, 0xFF, np.uint8)):
            found = decoded(np.append(image, more))
            assert not isinstance(found, str)
            assert np.array_equal(found, decoded(image))
