"""Small data that many tests use."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Pixels = np.ndarray
PRELOAD = ["torch.distributed", "torch._dynamo", "torch.nn.parallel", "h5chunk.feed.loader", "h5chunk.feed.sampler"]
multiprocessing.set_forkserver_preload(PRELOAD)  # imported once, for all workers that tests start by forkserver


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests that try many combinations too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        skip = pytest.mark.skip(reason="one of many combinations: bash scripts/test.sh --nightly")
        for item in items:
            if "nightly" in item.keywords:
                item.add_marker(skip)


def pixels(seed: int, height: int = 10, width: int = 12, channels: int = 3) -> Pixels:
    """Random pixels, (height, width, channels) uint8, or (height, width) for one channel."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def class_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of PNGs in one folder per class; image i has the pixels ``pixels(i)``, class ``i % classes``."""

    def make(count: int = 20, classes: int = 3, name: str = "photos", **size: int) -> Path:
        root = tmp_path / name
        for i in range(count):
            path = root / f"class{i % classes}" / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(i, **size)).save(path)
        return root

    return make


@pytest.fixture
def in_process(monkeypatch):
    """Do in this process what is done in children, in case that HDF5 crashes: so that patches can collect something."""
    monkeypatch.setattr("h5chunk.store.guard.child._is_child", True)


@pytest.fixture(autouse=True)
def small_images_are_read(monkeypatch):
    """Images of tests are so small that all of them would be kept in memory."""
    if "h5chunk.feed.read_pool" in sys.modules:
        monkeypatch.setattr("h5chunk.feed.read_pool.WHOLE_ROW_BYTES", 64)
