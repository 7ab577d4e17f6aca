"""Loaders from flat options, for tests that vary those of the order, or several kinds of them, at a time."""

from __future__ import annotations

from typing import Any

import torch

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.transforms import L2, Binarize, Csr, Dense, Normalize, ToDtype

OF_DATA = ("fields", "trusted", "checksums")
OF_ORDER = ("window_chunks", "pad", "lanes", "rank", "world_size", "weights", "interleave")
OF_BOTH = ("shuffle", "seed", "drop_last")  # the loader's own, too
OF_VALUES = ("dtype", "normalize", "channels_last", "sparse", "binarize")


def make_loader(data: Any, batch_size: int, *, subset: Any = None, **options: Any) -> ChunkLoader:
    """A ChunkLoader; options of data, order and values go to ChunkDataset, ChunkSampler and transforms."""
    of_data, of_order, of_values = (_taken(options, names) for names in (OF_DATA, OF_ORDER, OF_VALUES))
    if of_data:
        data = ChunkDataset(data, **of_data)
    if subset is not None:
        data = (data if isinstance(data, ChunkDataset) else ChunkDataset(data)).subset(subset)
    if transforms := transforms_of(**of_values):
        options["transforms"] = transforms
    if not of_order:
        return ChunkLoader(data, batch_size, **options)
    data = data if isinstance(data, ChunkDataset) else ChunkDataset(data)
    sampler = ChunkSampler(data, batch_size, **of_order, **_taken(options, OF_BOTH))
    return ChunkLoader(data, sampler=sampler, **options)


def transforms_of(
    *,
    dtype: Any = None,
    normalize: Any = None,
    channels_last: bool = False,
    sparse: str | None = None,
    binarize: float | None = None,
) -> list[Any]:
    """Transforms by options: those of a matrix where ``sparse`` is given, else those of images."""
    if sparse is not None:
        layout = {"dense": Dense, "csr": Csr}[sparse]
        values = [] if binarize is None else [Binarize(binarize)]
        values += [L2()] if normalize == "l2" else []
        return [*values, layout() if dtype is None else layout(dtype)]
    transforms: list[Any] = [] if normalize is None else [Normalize(*normalize)]
    if dtype is not None or channels_last:
        transforms.append(ToDtype(dtype or (torch.float32 if transforms else torch.uint8), channels_last))
    return transforms


def _taken(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}
