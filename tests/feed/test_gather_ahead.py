"""Resident data on the CPU, whose next batches native threads gather ahead."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.faults import failure, nth, watch
from support.foreign import make_file
from support.leftovers import in_fork, nothing_is_left

from h5chunk.errors import FileError
from h5chunk.feed import resident
from h5chunk.feed.loader import ChunkLoader
from h5chunk.native import NativePool, Result, available

__all__ = ["nothing_is_left"]

pytestmark = pytest.mark.skipif(not available(), reason="the native threads were not built")

IMAGES = np.random.default_rng(0).integers(0, 256, (1500, 3, 24, 24), np.uint8)


@pytest.fixture(scope="module")
def small_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "a.h5"
    return make_file(
        path, images=(IMAGES, {"chunks": (30, 3, 24, 24)}), labels=(np.arange(len(IMAGES)), {"chunks": (30,)})
    )


@pytest.fixture(autouse=True)
def two_batches_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather two batches at a time, and not all."""
    monkeypatch.setattr(resident, "TOGETHER_BYTES", 2 * 64 * (IMAGES[0].nbytes + 8))


@pytest.mark.parametrize("options", [{}, {"num_threads": 1}, {"drop_last": True}, {"reuse": True}])
def test_gathered_ahead_is_what_is_streamed(small_images: Path, options: dict[str, Any]) -> None:
    streamed = ChunkLoader(small_images, 64, resident=False, **options)
    with ChunkLoader(small_images, 64, resident=True, **options) as kept, streamed:
        for _ in range(3):
            for batch, expected in zip(kept, streamed, strict=True):
                assert all(map(torch.equal, batch, expected))


def test_echoes_are_gathered_too(small_images: Path) -> None:
    with ChunkLoader(small_images, 64, resident=True, echo=2) as loader:
        found = [labels for images, labels in loader if np.array_equal(images, IMAGES[labels])]
        assert np.bincount(np.concatenate(found)).tolist() == [2] * len(IMAGES)


def test_an_iteration_that_is_left_lets_go_of_its_batches(small_images: Path) -> None:
    """Threads that gather ahead write to nothing that was given away, whenever the loop is left."""
    with ChunkLoader(small_images, 64, resident=True) as loader:
        for stop in range(1, 12):
            for number, (images, labels) in enumerate(loader):
                np.testing.assert_array_equal(images, IMAGES[labels])
                if number == stop:
                    break


def test_threads_write_to_no_memory_that_was_freed(small_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the loop is left, batches that were asked of threads are there until these have ended."""
    made: list[weakref.ref[torch.Tensor]] = []
    asked: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def note_ticket(_pool: NativePool, ticket: int, *_: Any) -> None:
        asked[ticket] = made[:]
        made.clear()

    def check(*_: Any, **__: Any) -> None:
        assert all(tensor() is not None for tensors in asked.values() for tensor in tensors)

    def note_end(result: Result | None, *_: Any) -> None:
        if result is not None:
            asked.pop(result.ticket, None)  # some were asked before

    with ChunkLoader(small_images, 64, resident=True) as loader:
        next(iter(loader))  # reading is over
        made.clear()
        watch(monkeypatch, "feed.memory.BatchMemory.empty", after=lambda tensor, *_: made.append(weakref.ref(tensor)))
        watch(monkeypatch, "native.NativePool.submit", note_ticket, note=False)
        for call in ("wait", "poll"):
            watch(monkeypatch, f"native.NativePool.{call}", check, note_end, note=False)
        for stop in range(5):
            for number, _ in enumerate(loader):
                if number == stop:
                    break
        list(loader)
        assert not asked


def test_an_interrupt_while_threads_gather(small_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may hide that a ticket came back: the next iteration is right all the same."""
    with ChunkLoader(small_images, 64, resident=True) as loader:
        next(iter(loader))
        watch(monkeypatch, "native.NativePool.wait", after=nth(3, failure(KeyboardInterrupt)), note=False)
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        for images, labels in loader:
            np.testing.assert_array_equal(images, IMAGES[labels])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_batches_are_gathered_ahead(small_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child calls no function of its parent's pool, whose locks may be held for ever."""
    parent, pools = os.getpid(), list[NativePool]()

    def check(pool: NativePool, *_: Any, **__: Any) -> None:
        if os.getpid() == parent:
            pools.append(pool)
        else:
            assert not any(pool is other for other in pools)

    for call in ("submit", "wait", "_ask"):
        watch(monkeypatch, f"native.NativePool.{call}", check, note=False)
    loader = ChunkLoader(small_images, 64, resident=True)
    batches = iter(loader)
    next(batches)

    def in_child() -> None:
        with pytest.raises(FileError, match="fork"):
            list(batches)
        for images, labels in loader:
            np.testing.assert_array_equal(images, IMAGES[labels])
        loader.close()

    assert in_fork(in_child) == 0
    assert len(list(batches)) == len(loader) - 1
    loader.close()
