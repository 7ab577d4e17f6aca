"""The size that a JPEG claims, which is checked before a GPU decodes it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from h5chunk.transforms.nvjpeg import jpeg_sizes


def jpeg(height: int, width: int, **options: Any) -> np.ndarray:
    image, file = Image.new("RGB", (width, height), (200, 30, 90)), io.BytesIO()
    image.save(file, "JPEG", **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def sizes(*images: np.ndarray) -> list[list[int]]:
    stops = np.cumsum([len(each) for each in images])
    return jpeg_sizes(np.concatenate(images), stops - [len(each) for each in images], stops).tolist()


def test_sizes_of_jpegs() -> None:
    fake = b"\xff\xc0\x00\x11\x08\x00\x01\x00\x01"  # a frame inside of a comment
    options: list[dict[str, Any]] = [{}, {"progressive": True}, {"comment": fake}, {"exif": b"x" * 5000}]
    images = [jpeg(37 + number, 300, **each) for number, each in enumerate(options)]
    assert sizes(*images) == [[37, 300], [38, 300], [39, 300], [40, 300]]


def test_damaged_bytes_have_no_size() -> None:
    data = jpeg(37, 300)
    assert sizes(*(data[:stop] for stop in (0, 1, 2, 3, 20, 100)), data) == [[0, 0]] * 6 + [[37, 300]]
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = data.copy()
        changed[rng.integers(2, 170, 8)] = rng.integers(0, 256, 8)
        assert all(0 <= side < 1 << 16 for side in sizes(changed)[0])
