"""The machine's limits: move the rows of a batch from a matrix in memory with one or two calls, and do nothing else.

CSR batches:

rows       SciPy's ``matrix[rows]`` of a matrix with float32 values and int32 columns
tensor     the same as a torch.sparse_csr tensor
widen      entries in the order of the batches are converted to int32 and float32 in reused memory, and become a
           torch.sparse_csr tensor: the minimum cost of a batch, without shuffling

Dense float32 batches:

toarray    ``matrix[rows].toarray()`` of a matrix with float32 values
zeros      np.zeros or torch.zeros for each batch, with the values put at positions that were computed before
scatter    the same in reused memory, zeroed by NumPy, or by torch.zero_ in its own threads
unscatter  in reused memory, zeros are put only where the previous batch had entries; fails if users write into batches

``threads``: each thread makes a batch; torch.zero_ uses torch's own threads.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers import REUSED
from peers.sparse import CSR, DENSE
from peers.sparse.matrix import Source

TWICE = (1, 2)
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    CSR: (
        *({"kind": "rows", "threads": threads} for threads in TWICE),
        *({"kind": "tensor", "threads": threads} for threads in TWICE),
        *({"kind": "widen", "threads": threads} for threads in TWICE),
    ),
    DENSE: (
        *({"kind": "toarray", "threads": threads} for threads in TWICE),
        *({"kind": "zeros", "threads": threads} for threads in TWICE),
        {"kind": "zeros", "threads": 2, "by": "torch"},
        *({"kind": "scatter", "threads": threads, "memory": REUSED} for threads in TWICE),
        {"kind": "scatter", "threads": 2, "by": "torch", "memory": REUSED},
        *({"kind": "unscatter", "threads": threads, "memory": REUSED} for threads in TWICE),
    ),
}
MOST_BATCHES = 100  # number of batches with known positions, which are moved repeatedly
NO_LIMIT = ("widen", "unscatter")  # these do less than a loader has to do


class Contender:
    FILE_SETTINGS = ()

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        form: str,
        *,
        kind: str,
        threads: int,
        by: str = "numpy",
        memory: str = "fresh",
    ) -> None:
        del path, memory
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        torch.set_num_threads(threads if by == "torch" else 1)
        self.threads = 1 if by == "torch" else threads
        self.step, self.by = getattr(self, kind), by
        self.batches = source.batches(0, batch_size)
        self.shape = (batch_size, source.num_columns)
        if kind in ("rows", "tensor", "toarray"):
            self.matrix = source.matrix(np.float32)
        elif form == DENSE:
            self.prepare_dense(source, kind)
        else:
            self.prepare_widen(source)

    def prepare_dense(self, source: Source, kind: str) -> None:
        """Compute the positions of entries, and allocate memory for batches."""
        self.batches = self.batches[:MOST_BATCHES] * -(-len(self.batches) // MOST_BATCHES)
        found = [dense_entries(source, rows) for rows in self.batches[:MOST_BATCHES]]
        self.places, self.codes = [list(each) for each in zip(*found, strict=True)]
        memory_of = np.zeros if kind == "unscatter" else np.ones
        count = 0 if kind == "zeros" else self.threads
        self.held = [memory_of(self.shape, np.float32).reshape(-1) for _ in range(count)]
        self.last = [np.empty(0, np.int64)] * self.threads

    def prepare_widen(self, source: Source) -> None:
        """Compute the entries and row starts of batches, and allocate memory for them."""
        self.indices, self.values = np.array(source.indices), np.array(source.values)
        firsts = range(0, source.num_rows, self.shape[0])
        pointers = [source.indptr[first : first + self.shape[0] + 1] for first in firsts]
        self.spans = [slice(int(each[0]), int(each[-1])) for each in pointers]
        self.starts = [torch.from_numpy((each - each[0]).astype(np.int32)) for each in pointers]
        most = max(span.stop - span.start for span in self.spans)
        self.columns = [np.ones(most, np.int32) for _ in range(self.threads)]
        self.numbers = [np.ones(most, np.float32) for _ in range(self.threads)]

    def run(self, number: int) -> int:
        """Run one epoch, and return the number of rows. The order of all epochs is that of the computed positions."""
        del number
        work, lock = iter(range(len(self.batches))), threading.Lock()

        def drain(thread: int) -> None:
            while True:
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                self.step(thread, item)

        if self.threads == 1:
            drain(0)
        else:
            threads = [threading.Thread(target=drain, args=(thread,)) for thread in range(self.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return sum(map(len, self.batches))

    def rows(self, thread: int, item: int) -> Any:
        return self.matrix[self.batches[item]]

    def toarray(self, thread: int, item: int) -> Any:
        return self.matrix[self.batches[item]].toarray()

    def tensor(self, thread: int, item: int) -> torch.Tensor:
        batch = self.matrix[self.batches[item]]
        return csr_tensor(torch.from_numpy(batch.indptr), batch.indices, batch.data, batch.shape)

    def widen(self, thread: int, item: int) -> torch.Tensor:
        span = self.spans[item]
        count = span.stop - span.start
        columns, numbers = self.columns[thread][:count], self.numbers[thread][:count]
        columns[:], numbers[:] = self.indices[span], self.values[span]
        return csr_tensor(self.starts[item], columns, numbers, (len(self.starts[item]) - 1, self.shape[1]))

    def zeros(self, thread: int, item: int) -> None:
        size = self.shape[0] * self.shape[1]
        flat = torch.zeros(size).numpy() if self.by == "torch" else np.zeros(size, np.float32)
        self.put(flat, item)

    def put(self, flat: np.ndarray, item: int) -> np.ndarray:
        """Put the values of a batch at their positions, and return the positions."""
        places = self.places[item % len(self.places)]
        flat[places] = self.codes[item % len(self.places)]
        return places

    def scatter(self, thread: int, item: int) -> None:
        flat = self.held[thread]
        if self.by == "torch":
            torch.from_numpy(flat).zero_()
        else:
            flat.fill(0)
        self.put(flat, item)

    def unscatter(self, thread: int, item: int) -> None:
        flat = self.held[thread]
        flat[self.last[thread]] = 0
        self.last[thread] = self.put(flat, item)


def csr_tensor(starts: torch.Tensor, columns: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    parts = (starts, torch.from_numpy(columns), torch.from_numpy(values))
    return torch.sparse_csr_tensor(*parts, shape, check_invariants=False)


def dense_entries(source: Source, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of a batch's entries in the dense batch, int64, and their values, float32."""
    counts = source.indptr[rows + 1] - source.indptr[rows]
    ends = np.cumsum(counts)
    places = np.repeat(source.indptr[rows] - ends + counts, counts) + np.arange(ends[-1])
    flat = np.repeat(np.arange(len(rows)), counts) * source.num_columns + source.indices[places]
    return flat, source.values[places].astype(np.float32)
