"""Loaders whose order has settings that only a sampler takes."""

from __future__ import annotations

from typing import Any

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sampler import ChunkSampler


def ordered(data: Any, batch_size: int, **order: Any) -> dict[str, Any]:
    """The arguments ``data`` and ``sampler`` of a ChunkLoader."""
    dataset = data if isinstance(data, ChunkDataset) else ChunkDataset(data)
    return {"data": dataset, "sampler": ChunkSampler(dataset, batch_size, **order)}
