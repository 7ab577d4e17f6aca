"""The machine's limits: move the same bytes with one call per batch or piece, and do nothing else.

take           np.take(out=, mode="clip"): gathers shuffled rows from the mapped file, one batch per thread
index_select   torch.index_select(out=): the same in torch's own threads
preadv         fills batches front to back in pieces, one batch per thread

``memory``: "reused" batches were filled before. "numpy" and "torch" allocate each batch by np.empty or torch.empty, and
free it before the next one, like a loop that keeps no batches. Reused batches smaller than a piece are read several at
a time, which takes fewer calls than any loader needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from peers import REUSED, Source

MIB = 1 << 20
REUSED_WAYS = (
    *({"kind": "take", "threads": threads} for threads in (1, 2)),
    *({"kind": "index_select", "threads": threads} for threads in (1, 2)),
    *(
        {"kind": "preadv", "threads": threads, "piece_bytes": piece}
        for threads in (1, 2)
        for piece in (2 * MIB, 8 * MIB)
    ),
)
FRESH_WAYS = (
    *({"kind": "take", "threads": threads, "memory": "numpy"} for threads in (1, 2)),
    *({"kind": "preadv", "threads": threads, "piece_bytes": 2 * MIB, "memory": "numpy"} for threads in (1, 2)),
    {"kind": "index_select", "threads": 2, "memory": "numpy"},
    {"kind": "take", "threads": 2, "memory": "torch"},
    {"kind": "preadv", "threads": 2, "piece_bytes": 2 * MIB, "memory": "torch"},
)


class Contender:
    FILE_SETTINGS = ()
    TRIED = REUSED_WAYS + FRESH_WAYS

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        *,
        kind: str,
        threads: int,
        memory: str = REUSED,
        piece_bytes: int = 8 * MIB,
    ) -> None:
        del path
        self.source, self.batch_size, self.kind, self.memory = source, batch_size, kind, memory
        self.images = source.images
        self.flat = torch.from_numpy(self.images) if kind == "index_select" else None
        self.threads = 1 if kind == "index_select" else threads
        if kind == "index_select":
            torch.set_num_threads(threads)
        batch_bytes = batch_size * source.sample_bytes
        self.buffer_bytes = batch_bytes
        self.piece_bytes = min(piece_bytes, batch_bytes)
        if kind == "preadv" and memory == REUSED and batch_bytes < piece_bytes:
            self.buffer_bytes = self.piece_bytes = piece_bytes
        self.held = [np.ones(self.buffer_bytes, np.uint8) for _ in range(self.threads)] if memory == REUSED else []
        self.descriptor = os.open(source.path, os.O_RDONLY)

    def buffer(self, thread: int, num_bytes: int) -> np.ndarray:
        if self.held:
            return self.held[thread][:num_bytes]
        if self.memory == "torch":
            return torch.empty(num_bytes, dtype=torch.uint8).numpy()
        return np.empty(num_bytes, np.uint8)

    def run(self, number: int) -> int:
        """Run one epoch, and return the number of images moved."""
        if self.kind == "preadv":
            total = self.source.count * self.source.sample_bytes
            work: Iterator = iter(range(0, total, self.buffer_bytes))
            step: Callable = self.read
        else:
            work, step = iter(self.source.batches(number, self.batch_size)), self.gather
        lock, moved = threading.Lock(), [0] * self.threads

        def drain(thread: int) -> None:
            while True:
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                moved[thread] += step(thread, item)

        threads = [threading.Thread(target=drain, args=(thread,)) for thread in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(moved) // self.source.sample_bytes

    def gather(self, thread: int, indices: np.ndarray) -> int:
        buffer = self.buffer(thread, len(indices) * self.source.sample_bytes)
        rows = buffer.reshape(len(indices), *self.source.sample_shape)
        if self.flat is None:
            np.take(self.images, indices, axis=0, out=rows, mode="clip")
        else:
            torch.index_select(self.flat, 0, torch.from_numpy(indices), out=torch.from_numpy(rows))
        return buffer.nbytes

    def read(self, thread: int, start: int) -> int:
        num_bytes = min(self.buffer_bytes, self.source.count * self.source.sample_bytes - start)
        buffer = self.buffer(thread, num_bytes)
        for piece in range(0, num_bytes, self.piece_bytes):
            view = buffer[piece : piece + self.piece_bytes]
            if os.preadv(self.descriptor, [view], self.source.offset + start + piece) != len(view):
                raise OSError(f"{self.source.path} ends early")
        return num_bytes
