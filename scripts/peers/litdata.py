"""LitData: chunks written by its writer, and read by StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np

from peers import Source
from peers.reading import Batch, Collate


class Sample:
    """Return a sample to litdata.optimize. This is a class because its workers pickle it."""

    def __init__(self, source: Source, kind: str) -> None:
        self.source, self.kind = source, kind

    def __call__(self, index: int) -> tuple[Any, int]:
        image = np.array(self.source.images[index])
        return (image.tobytes() if self.kind == "bytes" else image), int(index)


class Contender:
    FILE_SETTINGS = ("kind", "chunk_bytes")
    # Fastest: no workers and batch_decode=0. With "auto", it decodes a window of samples for each sample.
    TRIED = (
        *({"kind": kind, "workers": workers} for kind in ("bytes", "array") for workers in (0, 1, 2)),
        {"workers": 2, "chunk_bytes": "16MB"},
        {"workers": 2, "batch_decode": 0},
        {"workers": 0, "batch_decode": 0},
        {"workers": 0, "batch_decode": 0, "chunk_bytes": "16MB"},
        {"workers": 2, "ahead": 4},
    )

    @staticmethod
    def make(source: Source, path: Path, kind: str = "bytes", chunk_bytes: str = "64MB") -> None:
        litdata.optimize(
            Sample(source, kind),
            list(range(source.count)),
            str(path),
            chunk_bytes=chunk_bytes,
            num_workers=1,
            verbose=False,
        )

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        *,
        workers: int = 0,
        kind: str = "bytes",
        chunk_bytes: str = "64MB",
        batch_decode: Any = "auto",
        ahead: int = 2,
    ) -> None:
        del kind, chunk_bytes
        dataset = litdata.StreamingDataset(
            str(path), shuffle=True, seed=source.seed, drop_last=False, batch_decode=batch_decode
        )
        options = {"persistent_workers": True, "prefetch_factor": ahead} if workers else {}
        self.loader = litdata.StreamingDataLoader(
            dataset, batch_size=batch_size, num_workers=workers, collate_fn=Collate(source.sample_shape), **options
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        del number
        return iter(self.loader)
