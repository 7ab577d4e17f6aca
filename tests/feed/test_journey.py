"""How many modules a reader of the code opens to follow one batch: counted by running it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import h5chunk
from h5chunk.transforms import Normalize

PACKAGE = Path(h5chunk.__file__).parent


@pytest.fixture(autouse=True)
def opened_by() -> None:
    """Files are first opened in a child process, as for users."""


class Journey:
    """Notes the modules in which functions are called, in the order in which they are first entered.

    Modules at the top of the package (errors, stamp, machine) are its vocabulary, and not counted.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []

    def _note(self, frame: Any, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or frame.f_code.co_name == "<module>" or PACKAGE not in path.parents:
            return
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        if ("/" in module or (PACKAGE / module).is_dir()) and module not in self.modules:
            self.modules.append(module)

    def follow(self, work: Callable[[], Any]) -> Any:
        """Do some work, in this thread and those that it starts."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@pytest.fixture
def photos(tmp_path, class_folder):
    h5chunk.convert(class_folder(60, height=40, width=40), tmp_path / "photos.h5")
    return tmp_path / "photos.h5"


def test_the_counter_sees_modules_of_other_threads():
    journey = Journey()

    def in_thread():
        from h5chunk.plan.permutation import permutation

        thread = threading.Thread(target=permutation, args=(3, 0))
        thread.start()
        thread.join()

    journey.follow(in_thread)
    assert journey.modules == ["plan/permutation"]


@pytest.fixture
def dataset(photos):
    h5chunk.ChunkLoader(photos, 16).close()  # what is made once in a process is there
    return h5chunk.ChunkDataset(photos)


def test_opening_a_data_set(photos, dataset):
    journey = Journey()
    journey.follow(lambda: h5chunk.ChunkDataset(photos))
    assert len(journey.modules) <= 18, journey.modules


def test_construction(dataset):
    journey = Journey()
    journey.follow(lambda: h5chunk.ChunkLoader(dataset, 16, transforms=[Normalize(0.5, 0.5)]))
    assert len(journey.modules) <= 18, journey.modules


def test_the_first_batch(dataset):
    journey = Journey()
    with h5chunk.ChunkLoader(dataset, 16, transforms=[Normalize(0.5, 0.5)]) as loader:
        images, labels = journey.follow(lambda: next(iter(loader)))
    assert len(images) == len(labels) == 16
    assert len(journey.modules) <= 12, journey.modules
    # the core in C does what store.hdf5.ranges does: whoever reads the one need not read the other
    to_bytes = [module for module in journey.modules if module not in ("feed/batches", "transforms/images", "native")]
    assert len(to_bytes) <= 9, to_bytes
    assert {"feed/loader", "feed/stream", "feed/read_pool", "plan/order", "store/read/samples"} < set(to_bytes)
