"""Files that the tests of `ChunkLoader` read: 203 small images, and 203 whose batches are of a megabyte and more."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from support.foreign import make_file, values

from h5chunk.errors import OptionError
from h5chunk.feed.loader import ChunkLoader
from h5chunk.transforms import Normalize, ToDtype

N = 203  # images of 90 bytes: larger than what is kept in memory whole
IMAGES = values((N, 3, 5, 6), np.uint8)
LABELS = np.arange(N, dtype=np.int64)
CHANNELS_LAST = ToDtype(torch.uint8, channels_last=True)
CONVERSIONS = (ToDtype(torch.float64, scale=True), Normalize(0.5, 0.25), CHANNELS_LAST)


@pytest.fixture
def path(tmp_path):
    return make_file(tmp_path / "a.h5", images=(IMAGES, {"chunks": (4, 3, 5, 6)}), labels=(LABELS, {"chunks": (32,)}))


@pytest.fixture
def large(tmp_path):
    """Batches of a megabyte and more, whose memory is used again."""
    images = values((N, 3, 100, 60), np.uint8)
    return make_file(tmp_path / "large.h5", images=(images, {"chunks": (8, 3, 100, 60)}), labels=(LABELS, {}))


def epoch_of(loader) -> list[list[int]]:
    """The labels of each batch of an epoch; the images are those of the labels."""
    batches = []
    for images, labels in loader:
        assert images.shape[1:] == (3, 5, 6) and images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
        batches.append(labels.tolist())
    return batches


def slots_of(loader: ChunkLoader) -> int:
    """How many windows are under way at a time."""
    return int(re.search(r"(\d+) windows of ", repr(loader))[1])


def windows_bytes(loader: ChunkLoader) -> float:
    """The memory of these windows, to three digits."""
    number, unit = re.search(r" batch(?:es)? \(([\d.]+) (\w+)\); ", repr(loader)).groups()
    return float(number) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def least_memory(**options) -> int:
    """The least ``memory_bytes`` that a ChunkLoader with these arguments takes, as its error says."""
    with pytest.raises(OptionError, match="memory_bytes is 0") as refused:
        ChunkLoader(**options, memory_bytes=0)
    return int(str(refused.value).split("need ")[1].split(":")[0])
