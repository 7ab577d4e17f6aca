"""np.memmap: ``images[indices]`` reads the rows of a shuffled batch at once."""

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
        del allocate  # fancy indexing returns a new array
        return self.images[indices].view(np.ndarray), self.labels[indices]


class Sorted(Rows):
    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        return super().read(np.sort(indices), allocate)


class Into(Rows):
    """Read with np.take into reused memory instead of fancy indexing. This is also one of the limits."""

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        out = allocate(len(indices))
        np.take(self.images, indices, axis=0, out=out, mode="clip")
        return out, self.labels[indices]


class Contender(Indexed):
    FILE_SETTINGS = ()
    # Fastest in fresh memory: two threads for large images, one for small. Processes lose time to their transport.
    # Sorting the rows of a batch makes no difference. np.take into reused memory is a separate row of the table.
    TRIED = (
        *({"how": how} | way for way in WAYS if "memory" not in way for how in ("Rows", "Sorted")),
        *({"how": "Into"} | way for way in WAYS),
    )

    def __init__(self, source: Source, path: Path, batch_size: int, how: str = "Rows", **way: Any) -> None:
        del path
        reader = {"Rows": Rows, "Sorted": Sorted, "Into": Into}[how]
        super().__init__(lambda: reader(source), source, batch_size, **way)
