"""Random pixels."""

from __future__ import annotations

import numpy as np

Pixels = np.ndarray


def pixels(seed: int, height: int = 10, width: int = 12, channels: int = 3) -> Pixels:
    """Random pixels, (height, width, channels) uint8, or (height, width) for one channel."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
