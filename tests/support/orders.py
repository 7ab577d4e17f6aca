"""Loaders whose order has settings that only a sampler takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.feed.stream import WindowStream


def ordered(data: Any, batch_size: int, **order: Any) -> dict[str, Any]:
    """The arguments ``data`` and ``batch_sampler`` of a ChunkLoader."""
    dataset = data if isinstance(data, ChunkDataset) else ChunkDataset(data)
    return {"data": dataset, "batch_sampler": ChunkSampler(dataset, batch_size, **order)}


def read_alone(loader: ChunkLoader) -> None:
    """Read an epoch without what is read ahead of the next one."""
    plan = replace(loader._plan, order=loader.order)
    stream = WindowStream(loader._source, plan, lends_slot=True, once=True)
    try:
        for _ in stream.windows(plan.order):
            pass
    finally:
        stream.close()
