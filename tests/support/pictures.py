"""Random pixels, and masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

Pixels = np.ndarray


def pixels(seed: int, height: int = 10, width: int = 12, channels: int = 3) -> Pixels:
    """Random pixels, (height, width, channels) uint8, or (height, width) for one channel."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


HEIGHT, WIDTH = 12, 18  # of images with masks


def mask_of(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Numbers from 0 to 7, in blocks."""
    y, x = np.mgrid[:height, :width]
    return ((y // 3 + x // 3 + number) % 8).astype(np.uint8)


def palette(numbers: np.ndarray) -> Image.Image:
    image = Image.fromarray(numbers).convert("P")
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    image.putdata(numbers.ravel().tolist())
    return image


def save(path: Path, image: Image.Image | np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path)
