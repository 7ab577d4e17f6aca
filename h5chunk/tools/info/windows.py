"""Report the cost of windows of time steps with the chunks of a file, and with better chunks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import human_bytes
from h5chunk.plan.patches import best_chunks, chunk_cost
from h5chunk.tools.info.report import DatasetInfo
from h5chunk.tools.report import Report, shell_command

WORTH = 1.3  # factor by which better chunks must reduce the decoded bytes to be recommended
SMALL_BYTES = 1 << 20  # smaller datasets are not reported


@dataclass(frozen=True)
class WindowAdvice(Report):
    """The bytes that readers decode per byte of a random window of a dataset, with its chunks and with better
    chunks.
    """

    path: str
    dataset: str  # the longest of the datasets that differ only in the numbers in their names
    rows: int  # time steps per chunk
    chunk_bytes: int
    cost: float  # decoded bytes per byte of a random window
    options: tuple[str, ...]  # further options of the repack command
    best: tuple[int, ...]  # shape of better chunks
    best_cost: float

    def lines(self) -> list[str]:
        chunks = f"chunks of {self.rows} time steps ({human_bytes(self.chunk_bytes)})"
        lines = [
            f"{self.dataset}  with {chunks}, readers decode {self.cost:.1f} x the bytes of a random window; "
            "ChunkLoader decodes each chunk once for all windows that are shuffled together"
        ]
        if self.cost > WORTH * self.best_cost:
            shape = ",".join(map(str, self.best))
            command = shell_command(["h5chunk", "repack", self.path, "NEW.h5", "--chunks", shape, *self.options])
            lines.append(f"    {command} reduces this to {self.best_cost:.1f} x")
        return lines


def advise_windows(path: str, datasets: Sequence[DatasetInfo], num_steps: int) -> list[WindowAdvice]:
    """Return advice for each kind of compressed dataset with a row per time step, for windows of ``num_steps``
    steps.
    """
    largest: dict[object, DatasetInfo] = {}
    for each in datasets:
        if each.can_train and each.chunks and each.filters and each.stored_bytes and each.shape[0] >= num_steps:
            key = re.sub(r"\d+", "*", each.name), each.chunks, each.dtype, each.shape[1:]
            if key not in largest or each.shape[0] > largest[key].shape[0]:
                largest[key] = each
    advice = []
    for each in largest.values():
        assert each.chunks is not None
        row_bytes = np.dtype(each.dtype).itemsize * math.prod(each.shape[1:])
        if row_bytes * each.shape[0] < SMALL_BYTES:
            continue
        best = best_chunks(each.shape[:1], (num_steps,), row_bytes)
        cost = chunk_cost(each.shape[:1], (num_steps,), each.chunks[:1], row_bytes).alone
        shape, options = (*best.chunks, *each.shape[1:]), ("--compression", each.filters[-1])
        facts = each.chunks[0], each.chunk_bytes, cost, options, shape, best.alone
        advice.append(WindowAdvice(path, each.name.lstrip("/"), *facts))
    return advice
