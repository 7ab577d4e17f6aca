"""Small data that many tests use."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support.faults import small
from support.pictures import pixels

PRELOAD = ["torch.distributed", "torch._dynamo", "torch.nn.parallel", "h5chunk.feed.loader", "h5chunk.feed.sampler"]
multiprocessing.set_forkserver_preload(PRELOAD)  # imported once, for all workers that tests start by forkserver
os.environ.pop("COLUMNS", None)  # which xdist sets: reports would be wrapped
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell; tests and their children send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests that try many combinations too")
    parser.addoption("--torture", action="store_true", help="run the tests that kill processes and fill disks too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in ("nightly", "torture"):
        if not config.getoption(f"--{name}"):
            skip = pytest.mark.skip(reason=f"takes long: bash scripts/test.sh --{name}")
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude imported modules and the list of tests from garbage collection, which takes a fifth of the time."""
    gc.collect()
    gc.freeze()


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
    monkeypatch.setattr("h5chunk.store.hdf5.child._is_child", True)
    monkeypatch.setattr("h5chunk.store.hdf5.child.METADATA_BYTES", 1 << 60)  # threads could leave this process limited


@pytest.fixture
def python_threads(monkeypatch):
    """Read by threads of Python, whether or not the native ones were built: so that patches reach what they do."""
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")


@pytest.fixture(autouse=True)
def small_images_are_read(monkeypatch):
    """Images of tests are so small that all of them would be kept in memory."""
    if "h5chunk.feed.read_pool" in sys.modules:
        small(monkeypatch, whole_row_bytes=64)
