"""MosaicML Streaming: uncompressed MDS shards on the local disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from peers import REUSED, Source
from peers.reading import Allocate, Batch, Indexed, loader


class Samples(StreamingDataset):
    """A StreamingDataset whose samples Collate accepts."""

    def get_item(self, *args: Any, **options: Any) -> tuple[bytes, int]:
        sample = super().get_item(*args, **options)
        return sample["image"], sample["label"]


class Random:
    """Read samples by index, in the source's full shuffle instead of the library's shuffle."""

    def __init__(self, source: Source, dataset: Samples) -> None:
        self.dataset = dataset

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        images, labels = allocate(len(indices)), np.empty(len(indices), np.int64)
        flat = images.reshape(len(indices), -1)
        for place, index in enumerate(indices):
            pixels, labels[place] = self.dataset[int(index)]
            flat[place] = np.frombuffer(pixels, np.uint8)
        return images, labels


class Contender:
    FILE_SETTINGS = ("shard_bytes",)
    # Fastest: two threads that read by index; with the library's shuffle, two processes.
    # py1s is left out, because with two workers it repeats 32 samples of an epoch.
    TRIED = (
        *({"workers": workers} for workers in (0, 1, 2, 3)),
        {"workers": 2, "ahead": 4},
        {"workers": 2, "algorithm": "naive"},
        {"workers": 2, "shard_bytes": 1 << 24},
        {"indexed": True, "workers": 2},
        {"indexed": True, "threads": 2},
        {"indexed": True, "threads": 2, "memory": REUSED},
        {"indexed": True, "memory": REUSED},
    )

    @staticmethod
    def make(source: Source, path: Path, shard_bytes: int = 1 << 26) -> None:
        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=str(path), columns=columns, size_limit=shard_bytes, progress_bar=False) as writer:
            for index, image in enumerate(source.images):
                writer.write({"image": image.tobytes(), "label": index})

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        *,
        workers: int = 0,
        threads: int = 0,
        ahead: int = 2,
        algorithm: str = "py1e",
        indexed: bool = False,
        memory: str = "fresh",
        shard_bytes: int = 1 << 26,
    ) -> None:
        del shard_bytes
        clean_stale_shared_memory()
        dataset = Samples(
            local=str(path), shuffle=True, shuffle_seed=source.seed, shuffle_algo=algorithm, batch_size=batch_size
        )
        self.indexed = None
        if indexed:
            self.indexed = Indexed(
                lambda: Random(source, dataset), source, batch_size, workers=workers, threads=threads, memory=memory
            )
        else:
            self.loader = loader(dataset, source.sample_shape, batch_size, workers, ahead)

    def epoch(self, number: int) -> Iterator[Batch]:
        return self.indexed.epoch(number) if self.indexed else iter(self.loader)
