"""Gather the next batches of data in memory by native threads, while the caller uses earlier batches."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from h5chunk.errors import WorkerError
from h5chunk.feed.slots import KEPT, BatchMemory
from h5chunk.native import DONE, GATHER, JOB, NativePool

AHEAD = 3  # batches per thread that are gathered ahead: so few that a processor's cache holds them
AHEAD_BYTES = 16 << 20  # but no more than this
QUICK_BYTES = 64 << 10  # batches of fewer bytes are gathered sooner than handed to a thread
FOREVER_S = 1e9


class GatherAhead:
    """Threads that gather samples of fields, which are contiguous (num_samples, ...) tensors on the CPU.

    A forked child process must not use it.
    """

    def __init__(self, fields: Sequence[torch.Tensor], num_threads: int) -> None:
        self._fields = [(field, field[:1].nbytes) for field in fields]
        self._sample_bytes = sum(row_bytes for _, row_bytes in self._fields)
        self._num_threads, self._tickets, self._process = num_threads, 0, os.getpid()
        self._pool = NativePool(num_threads)
        self._memory = BatchMemory(KEPT + AHEAD * num_threads)
        self._queue: deque[tuple[int, tuple[torch.Tensor, ...], np.ndarray]] = deque()  # what threads may write to
        self._lock, self._is_iterated, self._is_closed = threading.Lock(), False, False

    def is_worthwhile(self, batch_size: int) -> bool:
        """Return whether batches are large enough to gather ahead, and the threads belong to this process."""
        return batch_size * self._sample_bytes >= QUICK_BYTES and os.getpid() == self._process

    def batches(self, samples: np.ndarray, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the samples of every batch, by field, in new memory; ``samples``, (n,) int64, are not checked.

        Raise `EOFError` or `OSError` if another thread closes this meanwhile.
        """
        self._is_iterated = True
        try:
            self._drain()
            samples = np.ascontiguousarray(samples)
            most = max(2, min(AHEAD * self._num_threads, AHEAD_BYTES // (batch_size * self._sample_bytes)))
            firsts = iter(range(0, len(samples), batch_size))
            done: set[int] = set()
            while True:
                for first in islice(firsts, most - len(self._queue)):
                    self._submit(samples[first : first + batch_size])
                if not self._queue:
                    return
                if os.getpid() != self._process:
                    raise WorkerError("this process was forked while batches were gathered: iterate again")
                self._wait(self._queue[0][0], done)
                yield self._queue.popleft()[1]
        finally:
            self._end()

    def _submit(self, samples: np.ndarray) -> None:
        count, indices = len(samples), samples.ctypes.data
        jobs = np.empty(len(self._fields), JOB)
        gathered = tuple(self._memory.empty((count, *field.shape[1:]), field.dtype) for field, _ in self._fields)
        for number, ((field, row_bytes), out) in enumerate(zip(self._fields, gathered, strict=True)):
            num_bytes = count * row_bytes
            jobs[number] = (GATHER, 0, 0, count, num_bytes, field.data_ptr(), indices, out.data_ptr(), 0, 0)
        self._tickets += 1
        self._queue.append((self._tickets, gathered, samples))  # first: a signal may interrupt this anywhere
        self._pool.submit(self._tickets, jobs)

    def _wait(self, ticket: int, done: set[int]) -> None:
        while ticket not in done:
            if (result := self._pool.wait(FOREVER_S)) is not None:
                if result.status != DONE:
                    raise EOFError("the threads that gather batches were stopped")
                done.add(result.ticket)
        done.remove(ticket)

    def _drain(self) -> None:
        """Wait until no thread writes to batches that were not taken; a signal may hide which tickets came back."""
        while os.getpid() == self._process and self._pool.num_open:
            self._pool.wait(FOREVER_S)
        self._queue.clear()

    def _end(self) -> None:
        """End an iteration; free the threads if they were stopped meanwhile."""
        self._drain()
        with self._lock:
            self._is_iterated = False
            if self._is_closed and os.getpid() == self._process:
                self._pool.free()

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            if self._is_closed or os.getpid() != self._process:
                return
            self._is_closed = True
            self._pool.close(FOREVER_S)
            if not self._is_iterated:
                self._pool.free()
