"""Report the cost of random patches of volumes with the chunks of a file, and with better chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from h5chunk.plan.patches import best_chunks, chunk_cost
from h5chunk.source import shape_text
from h5chunk.tools.info.report import DatasetInfo
from h5chunk.tools.report import Report, shell_command

WORTH = 1.3  # factor by which better chunks must reduce the decoded bytes to be recommended


@dataclass(frozen=True)
class PatchAdvice(Report):
    """The bytes that readers decode per byte of random patches of a dataset, with its chunks and with better chunks."""

    path: str
    dataset: str  # the largest dataset with these chunks, dtype and number of axes
    chunks: tuple[int, ...] | None
    alone: float  # decoded bytes per byte, if patches are read one at a time
    together: float  # decoded bytes per byte with `h5chunk.Patches`
    options: tuple[str, ...]  # further options of the repack command
    best: tuple[int, ...]  # shape of better chunks
    best_alone: float
    best_together: float

    def lines(self) -> list[str]:
        chunks = f"chunks of {shape_text(self.chunks)}" if self.chunks else "contiguous data"
        lines = [
            f"{self.dataset}  with {chunks}, readers decode {self.alone:.2f} x the bytes of a random patch, or "
            f"{self.together:.2f} x with h5chunk.Patches"
        ]
        if self.chunks and self.alone * self.together > WORTH * self.best_alone * self.best_together:
            chunks = ",".join(map(str, self.best))
            command = shell_command(["h5chunk", "repack", self.path, "NEW.h5", "--chunks", chunks, *self.options])
            lines.append(f"    {command} reduces this to {self.best_alone:.2f} x and {self.best_together:.2f} x")
        return lines


def advise(path: str, datasets: Sequence[DatasetInfo], size: tuple[int, ...]) -> list[PatchAdvice]:
    """Return advice for each kind of volume in a file.

    Volumes may have more axes than ``size``. The additional axes come first, and patches contain them completely.
    """
    largest: dict[object, DatasetInfo] = {}
    for each in datasets:
        if len(each.shape) >= len(size) and all(each.shape) and np.dtype(each.dtype).kind in "biuf":
            key = each.chunks, each.dtype, len(each.shape)
            if key not in largest or math.prod(each.shape) > math.prod(largest[key].shape):
                largest[key] = each
    advice = []
    for each in largest.values():
        before = len(each.shape) - len(size)
        space, itemsize = each.shape[before:], np.dtype(each.dtype).itemsize * math.prod(each.shape[:before])
        best = best_chunks(space, size, itemsize)
        own = (1.0, 1.0) if each.chunks is None else chunk_cost(space, size, each.chunks[before:], itemsize)[1:]
        options = ("--compression", "gzip") if each.filters else ()
        costs = own[0], own[1], options, (*each.shape[:before], *best.chunks), best.alone, best.together
        advice.append(PatchAdvice(path, each.name.lstrip("/"), each.chunks, *costs))
    return advice
