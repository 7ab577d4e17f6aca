"""Copies to a GPU of remote files that are in the cache, by native threads: see `test_cuda`."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import small, watch
from support.foreign import values
from support.object_server import disconnect, object_server
from test_cuda import USER_STREAM, Driver, Stream, device, driver, libraries, pytestmark

import h5chunk
from h5chunk import ChunkLoader
from h5chunk.native import cuda

__all__ = ["device", "driver", "libraries", "pytestmark"]
pytest.importorskip("obstore")


@pytest.mark.parametrize("stops", [False, True])
def test_threads_ask_only_for_copies_that_are_still_known(
    device: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Fewer windows are read ahead once a remote file is in the cache, and their device buffers are given back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known: set[int] = set()

    class Known(cuda.Sending):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            known.add(self.address)

        def __del__(self) -> None:
            known.discard(self.address)
            ctypes.memset(self.address, 0xFF, ctypes.sizeof(self))

    monkeypatch.setattr(cuda, "Sending", Known)
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)  # torch copies while the file is fetched
    file = tmp_path / "many.h5"
    images = values((3000, 20), np.uint8)
    h5chunk.convert({"images": images, "labels": np.arange(3000)}, file, chunk_samples=10)
    small(monkeypatch, whole_bytes=0)
    are_known: list[bool] = []
    are_received: list[bool] = []

    def before_a_window(slot: Any, *_: Any, queued: bool) -> None:
        gc.collect()
        last = slot._all_pinned[0].turn.last
        are_known.append(last is None or last in known)

    def after_a_window(_: None, stream: Any, read: Any) -> None:
        if read.slot not in stream._free:
            event = read.slot._events[1]
            streams = [at for kind, at, which, _ in device.calls if kind in "wr" and which == event]
            are_received.append(not streams or streams[-1] == USER_STREAM)

    watch(monkeypatch, "feed.cuda_slots.CudaSlot.begin", before=before_a_window, note=False)
    watch(monkeypatch, "feed.stream.WindowStream._put_back", after=after_a_window, note=False)
    small(monkeypatch, together_bytes=0)  # each window is read alone
    device.copy_late(on=True)
    with object_server({"/many.h5": file.read_bytes()}) as server:
        data = h5chunk.ChunkDataset(f"{server.url}/many.h5", cache_dir=tmp_path / "data")
        if stops:
            data[range(3000)]  # all is in the cache now
        sampler = h5chunk.ChunkSampler(data, 16, window_chunks=4, num_workers=1)
        with ChunkLoader(data, batch_sampler=sampler, device="cuda", resident=False) as loader:
            for _ in range(6):
                for number, (some, labels) in enumerate(loader):
                    np.testing.assert_array_equal(some, images[labels])
                    if stops and number == 2:
                        break
    disconnect()
    assert len(are_known) > 40 and all(are_known)
    assert len(are_received) > 40 and all(are_received)
