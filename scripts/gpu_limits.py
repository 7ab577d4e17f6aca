"""Measure the limits of a loader on a GPU: reading a file, copying to the GPU, and a bare loop that does both."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from h5chunk import native
from h5chunk.feed.memory import PinnedMemory
from h5chunk.native import cuda
from h5chunk.store.hdf5.open import open_file

PIECE = 8 << 20


def read_rate(path: Path, threads: int, num_bytes: int) -> float:
    """Return bytes/s of preadv from the page cache into reused pinned memory."""
    descriptor = os.open(path, os.O_RDONLY)
    pieces = iter(range(0, num_bytes - PIECE, PIECE))
    memory = PinnedMemory(threads * PIECE)
    lock = threading.Lock()

    def work(buffer: np.ndarray) -> None:
        while True:
            with lock:
                offset = next(pieces, None)
            if offset is None:
                return
            os.preadv(descriptor, [buffer], offset)

    buffers = memory.bytes[: threads * PIECE].reshape(threads, PIECE)
    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    os.close(descriptor)
    memory.close()
    return num_bytes / seconds


def copy_rate() -> float:
    """Return bytes/s of copying pinned memory to the GPU."""
    memory = PinnedMemory(256 << 20)
    host = torch.from_numpy(memory.bytes)
    on_gpu = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        on_gpu.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    memory.close()
    return host.nbytes / statistics.median(times)


class BareLoop:
    """Read shuffled windows into pinned buffers with threads in C, which also start one copy to the GPU per window.

    Every sample is read once. A window consists of random chunks of the file, with ``window_samples`` samples in total.
    """

    def __init__(self, path: Path, window_samples: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self._path = path
        with open_file(path) as file:
            dataset = file["images"]
            self.row_bytes = dataset[0].nbytes
            per_chunk = dataset.chunks[0]
            chunks = np.random.default_rng(0).permutation(len(dataset) // per_chunk)
            offsets = np.array([dataset.id.get_chunk_info(int(chunk)).byte_offset for chunk in chunks])
        at_once = max(1, window_samples // per_chunk)
        self._windows = offsets[: len(offsets) // at_once * at_once].reshape(-1, at_once)
        self._per_chunk, self.window_bytes = per_chunk, at_once * per_chunk * self.row_bytes

    def _jobs(self, number: int, descriptor: int, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the jobs of a window and the I/O vectors that they point to."""
        rows = self._windows.shape[1] * self._per_chunk
        vectors = np.empty((rows, 2), np.uintp)
        vectors[:, 0] = buffer.ctypes.data + np.random.default_rng(number).permutation(rows) * self.row_bytes
        vectors[:, 1] = self.row_bytes
        jobs = np.zeros(self._windows.shape[1], native.JOB)
        jobs["descriptor"], jobs["offset"], jobs["count"] = descriptor, self._windows[number], self._per_chunk
        jobs["num_bytes"] = self._per_chunk * self.row_bytes
        jobs["source"] = vectors.ctypes.data + np.arange(len(jobs)) * self._per_chunk * vectors.strides[0]
        return jobs, vectors

    def _sending(self, device: torch.Tensor, host: np.ndarray, copied: torch.cuda.Event) -> cuda.Sending:
        """Return the copy of a full buffer, which the thread that reads its last chunk starts."""
        stream, before = torch.cuda.current_stream(), torch.cuda.Event()
        for event in (before, copied):
            event.record(stream)
        sending = cuda.Sending(cuda.context(), stream.cuda_stream, before.cuda_event, copied.cuda_event)
        sending.set_copies(np.array([[device.data_ptr(), host.ctypes.data, host.nbytes]], np.int64))
        sending.before = before  # must live as long as the copies
        return sending

    def rate(self, num_threads: int, wait: Callable[[], object] = lambda: None) -> float:
        """Return bytes/s of an epoch on the current GPU. ``wait`` is called just before the clock starts."""
        num_slots, size = min(self.num_slots, len(self._windows)), self.window_bytes
        descriptor, pinned = os.open(self._path, os.O_RDONLY), PinnedMemory(num_slots * size)
        hosts = pinned.bytes[: num_slots * size].reshape(num_slots, size)
        device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(num_slots)]
        tables = [self._jobs(i, descriptor, hosts[i % num_slots]) for i in range(len(self._windows))]
        copied = [torch.cuda.Event() for _ in range(num_slots)]
        sendings = [self._sending(*slot) for slot in zip(device, hosts, copied, strict=True)]
        endings = [native.Ending(cuda.sender(), sending.address) for sending in sendings]
        pool = native.NativePool(num_threads)
        torch.cuda.synchronize()
        wait()
        started = time.perf_counter()
        for number in range(num_slots):
            pool.submit(number, tables[number][0], endings[number])
        for _ in tables:
            result = pool.wait(60)
            assert result is not None and result.status == native.DONE
            slot, following = result.ticket % num_slots, result.ticket + num_slots
            if following < len(tables):
                copied[slot].synchronize()
                pool.submit(following, tables[following][0], endings[slot])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        pool.close(60)
        pool.free()
        pinned.close()
        os.close(descriptor)
        return len(tables) * size / seconds
