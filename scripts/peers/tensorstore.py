"""TensorStore: an uncompressed zarr array. A batch is one read of shuffled rows, and several reads run concurrently."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import torch

from peers import REUSED, Source
from peers.reading import Batch

BLOCK = 512


def array_spec(source: Source, path: Path, chunk: int, shard: int) -> dict[str, Any]:
    """Return the spec of a zarr 2 array, or of a zarr 3 array with ``shard`` samples per file."""
    sample = list(source.sample_shape)
    spec: dict[str, Any] = {"driver": "zarr3" if shard else "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
    if not shard:
        chunks = [chunk, *sample]
        return spec | {"metadata": {"shape": list(source.shape), "chunks": chunks, "dtype": "|u1", "compressor": None}}
    inner = {"chunk_shape": [chunk, *sample], "codecs": [{"name": "bytes"}]}
    grid = {"name": "regular", "configuration": {"chunk_shape": [shard, *sample]}}
    codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return spec | {
        "metadata": {"shape": list(source.shape), "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
    }


class Contender:
    FILE_SETTINGS = ("chunk", "shard")
    # Fastest: one sample per chunk, reused memory, and one thread per core. For small images: large chunks in a
    # cache for all of them.
    TRIED = (
        *({"chunk": 1, "ahead": ahead} for ahead in (0, 1, 2, 4)),
        {"chunk": 1, "ahead": 2, "memory": REUSED},
        {"chunk": 1, "ahead": 2, "memory": REUSED, "io": 2, "copies": 2},
        {"chunk": 1, "ahead": 2, "io": 2, "copies": 2},
        {"chunk": 1, "ahead": 2, "io": 32},
        {"chunk": 8, "ahead": 2},
        {"chunk": 1, "shard": 256, "ahead": 2},
        {"chunk": 8, "ahead": 2, "cache_bytes": 1 << 28},
        {"chunk": 1, "ahead": 1, "memory": REUSED, "io": 2, "copies": 2},
        {"chunk": 1, "shard": 256, "ahead": 2, "memory": REUSED, "io": 2, "copies": 2},
        {"chunk": 64, "ahead": 2, "memory": REUSED, "cache_bytes": 1 << 28},  # large enough for all of the small images
        {"chunk": 1000, "ahead": 2, "memory": REUSED, "cache_bytes": 1 << 28},
    )

    @staticmethod
    def make(source: Source, path: Path, chunk: int = 1, shard: int = 0) -> None:
        array = tensorstore.open(array_spec(source, path, chunk, shard), create=True, open=False).result()
        images = source.images
        for start in range(0, source.count, BLOCK):
            stop = min(start + BLOCK, source.count)
            array[start:stop] = images[start:stop]

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        *,
        chunk: int = 1,
        shard: int = 0,
        ahead: int = 2,
        memory: str = "fresh",
        io: int = 0,
        copies: int = 0,
        cache_bytes: int = 0,
    ) -> None:
        context: dict[str, Any] = {"cache_pool": {"total_bytes_limit": cache_bytes}}
        context |= {"file_io_concurrency": {"limit": io}} if io else {}
        context |= {"data_copy_concurrency": {"limit": copies}} if copies else {}
        spec = array_spec(source, path, chunk, shard) | {"context": context}
        self.array = tensorstore.open(spec, open=True, read=True, recheck_cached_data=False).result()
        self.source, self.batch_size, self.ahead = source, batch_size, ahead
        self.labels = np.arange(source.count)  # a few kilobytes, kept in memory
        slots = ahead + 1 if memory == REUSED else 0
        self.slots = deque(np.ones((batch_size, *source.sample_shape), np.uint8) for _ in range(slots))

    def start(self, indices: np.ndarray) -> tuple[Any, np.ndarray | None]:
        """Start a read. Return it, and the memory that it fills if the contender owns this memory."""
        if not self.slots:
            return self.array[indices].read(), None
        slot = self.slots.popleft()
        self.slots.append(slot)
        rows = slot[: len(indices)]
        return tensorstore.array(rows, copy=False).write(self.array[indices]), rows

    def epoch(self, number: int) -> Iterator[Batch]:
        under_way: deque = deque()
        for indices in self.source.batches(number, self.batch_size):
            under_way.append((*self.start(indices), indices))
            if len(under_way) > self.ahead:
                yield self.finish(*under_way.popleft())
        while under_way:
            yield self.finish(*under_way.popleft())

    def finish(self, future: Any, rows: np.ndarray | None, indices: np.ndarray) -> Batch:
        images = future.result()
        return torch.from_numpy(images if rows is None else rows), torch.from_numpy(self.labels[indices])
