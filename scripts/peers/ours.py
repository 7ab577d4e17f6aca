"""ChunkLoader with its defaults: one thread per core. The file has the layout of `h5chunk convert`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_packed import spec_of
from torch.utils.data import BatchSampler, RandomSampler

import h5chunk
from h5chunk.store.format.spec import GROUP
from h5chunk.store.write.new_file import NewFile
from peers import REUSED, Source
from peers.reading import Batch

BLOCK = 512
WAYS: dict[str, dict[str, Any]] = {  # ways to run an epoch that should not be slower
    "plain": {},
    "alone": {"rank": 0, "world_size": 1},
    "lanes": {"rank": 0, "world_size": 1, "lanes": 4},
    "rank": {"rank": 1, "world_size": 2, "lanes": 2},
    "lists": {},  # a random permutation, as lists of torch's BatchSampler
    "saved": {},  # saves a state with each batch
    "begun": {},  # the first half of an epoch, with new threads
    "resumed": {},  # the second half, with new threads
}
PARTS = ("rank", "begun", "resumed")  # ways in which an epoch has only a part of the samples


class Contender:
    FILE_SETTINGS = ()
    TRIED = (
        {},
        {"num_threads": 1},
        {"num_threads": 3},
        {"memory": REUSED},
        {"num_threads": 1, "memory": REUSED},
        {"num_threads": 3, "memory": REUSED},
    )

    @staticmethod
    def make(source: Source, path: Path) -> None:
        """Write the samples in shuffled order, as convert does."""
        images = source.images
        order = np.random.default_rng(source.seed).permutation(source.count)
        spec = spec_of(source.count, source.sample_shape, source.count)
        spec.attributes[GROUP] = {**spec.attributes[GROUP], "shuffled": np.uint8(1)}
        with NewFile(path, overwrite=True) as new:
            new.allocate(spec)
            for start in range(0, source.count, BLOCK):
                new.write_bytes(
                    "images", start * source.sample_bytes, images[order[start : start + BLOCK]].reshape(-1).data
                )
            new.write("labels", order.astype(np.int64))
            new.commit()

    def __init__(
        self, source: Source, path: Path, batch_size: int, memory: str = "fresh", way: str = "plain", **options: Any
    ) -> None:
        order: dict[str, Any] = {"batch_size": batch_size, "seed": source.seed}
        if way == "lists":
            generator = torch.Generator().manual_seed(source.seed)
            samples = RandomSampler(range(source.count), generator=generator)
            order = {"batch_sampler": BatchSampler(samples, batch_size, drop_last=False)}
        self.loader = h5chunk.ChunkLoader(path, **order, reuse=memory == REUSED, **options, **WAYS[way])
        self._way, self.is_part = way, way in PARTS

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of the next epoch or, with new threads, of epoch ``number``."""
        if self._way == "saved":
            return self._saved()
        if self._way in ("begun", "resumed"):
            self.loader.close()
            half = len(self.loader) // 2
            begin = half if self._way == "resumed" else 0
            self.loader.load_state_dict(self.loader.state_dict() | {"epoch": number, "batch": begin})
            return islice(self.loader, half)
        return iter(self.loader)

    def _saved(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.loader.state_dict()
            yield batch
