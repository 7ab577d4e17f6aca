"""np.memmap: the rows of a shuffled batch are taken at once, by ``images[indices]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from peers import Source
from peers.reading import WAYS, Allocate, Indexed


class Rows:
    def __init__(self, source: Source) -> None:
        self.images, self.labels = source.images, np.arange(source.count)

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        del allocate  # fancy indexing gives an array of its own
        return self.images[indices].view(np.ndarray), self.labels[indices]


class Sorted(Rows):
    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        return super().read(np.sort(indices), allocate)


class Into(Rows):
    """np.take into reused memory instead of fancy indexing; this is also one of the limits."""

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        out = allocate(len(indices))
        np.take(self.images, indices, axis=0, out=out, mode="clip")
        return out, self.labels[indices]


class Contender(Indexed):
    FILE_SETTINGS = ()
    # Fastest in fresh memory: two threads for large images, one for small; processes lose to their transport.
    # Sorting a batch's rows: within noise. np.take into memory used again is a row of its own.
    TRIED = (
        *({"how": how} | way for way in WAYS if "memory" not in way for how in ("Rows", "Sorted")),
        *({"how": "Into"} | way for way in WAYS),
    )

    def __init__(self, source: Source, path: Path, batch_size: int, how: str = "Rows", **way: Any) -> None:
        del path
        reader = {"Rows": Rows, "Sorted": Sorted, "Into": Into}[how]
        super().__init__(lambda: reader(source), source, batch_size, **way)
