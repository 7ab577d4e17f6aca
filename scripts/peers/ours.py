"""This library's ChunkLoader, with its defaults: one thread a core. The file is laid out as `h5chunk convert` would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from make_packed import spec_of

import h5chunk
from h5chunk.store.newfile import NewFile
from peers import REUSED, Source
from peers.reading import Batch

BLOCK = 512


class Contender:
    FILE_SETTINGS = ()
    TRIED = (
        {},
        {"num_threads": 1},
        {"num_threads": 3},
        {"memory": REUSED},
        {"num_threads": 1, "memory": REUSED},
        {"num_threads": 3, "memory": REUSED},
        {"reader": "mapped"},
        {"reader": "mapped", "memory": REUSED},
    )

    @staticmethod
    def make(source: Source, path: Path) -> None:
        """Samples shuffled once, as convert does."""
        images = source.images
        order = np.random.default_rng(source.seed).permutation(source.count)
        spec = spec_of(source.count, source.sample_shape, source.count)
        spec = replace(spec, attributes=dict(spec.attributes) | {"shuffled": np.uint8(1)})
        with NewFile(path, overwrite=True) as new:
            new.allocate(spec)
            for start in range(0, source.count, BLOCK):
                new.write_bytes(
                    "images", start * source.sample_bytes, images[order[start : start + BLOCK]].reshape(-1).data
                )
            new.write("labels", order.astype(np.int64))
            new.commit()

    def __init__(self, source: Source, path: Path, batch_size: int, memory: str = "fresh", **options: Any) -> None:
        self.loader = h5chunk.ChunkLoader(path, batch_size, seed=source.seed, reuse=memory == REUSED, **options)

    def epoch(self, number: int) -> Iterator[Batch]:
        del number  # each iteration is the next epoch
        return iter(self.loader)
