"""h5py at its best: the rows of a batch of a contiguous dataset are read into one array. Labels stay in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from peers import REUSED, Source
from peers.reading import WAYS, Allocate, Indexed


class Rows:
    def __init__(self, source: Source, fancy: bool) -> None:
        self.file = h5py.File(source.path, "r")
        self.images, self.labels = self.file["images"], self.file["labels"][()]
        self.fancy = fancy

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        out = allocate(len(indices))
        if self.fancy:  # h5py accepts only ascending indices
            indices = np.sort(indices)
            self.images.read_direct(out, indices)
        else:
            for place, index in enumerate(indices):
                self.images.read_direct(out, np.s_[index], np.s_[place])
        return out, self.labels[indices]


class Contender(Indexed):
    FILE_SETTINGS = ()
    # Fastest: one call per batch, with ascending rows. One call per row is slower, and threads wait for HDF5's lock.
    TRIED = (*WAYS, {"fancy": True}, {"fancy": True, "memory": REUSED}, {"fancy": True, "workers": 2})

    def __init__(self, source: Source, path: Path, batch_size: int, fancy: bool = False, **way: Any) -> None:
        del path
        super().__init__(lambda: Rows(source, fancy), source, batch_size, **way)
