"""Several HDF5 files of images and labels that form one data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.foreign import make_file, values

SHAPE = (3, 5, 6)
IMAGES = values((400, *SHAPE), np.uint8)
UNEVEN = ((40, 4), (13, 5), (0, 3), (61, 8), (9, 16), (30, 1))  # (samples, chunk_samples) of each file
EVEN = ((40, 8), (64, 8), (8, 8), (37, 8))
Sizes = Sequence[tuple[int, int]]


def make_set(folder: Path, sizes: Sizes, **options: Any) -> list[Path]:
    """Files ``s0.h5``, ...: sample i of all of them has the image ``IMAGES[i]`` and the label i."""
    folder.mkdir()
    paths, first = [], 0
    for number, (count, chunk) in enumerate(sizes):
        some = slice(first, first + count)
        first += count
        paths.append(folder / f"s{number}.h5")
        sizes_max = {"maxshape": (None, *SHAPE)}, {"maxshape": (None,)}
        if count >= chunk:  # else HDF5 wants it so
            sizes_max = {}, {}
        make_file(
            paths[-1],
            images=(IMAGES[some], {"chunks": (chunk, *SHAPE), **sizes_max[0], **options}),
            labels=(np.arange(400)[some], {"chunks": (chunk,), **sizes_max[1]}),
        )
    return paths


def total(sizes: Sizes) -> int:
    return sum(count for count, _ in sizes)
