"""A batch sampler that visits samples chunk-wise, in random order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

from torch.utils.data import Sampler

from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset, make_order
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.order import Order


class ChunkSampler(Sampler[list[int]]):
    """Batches of sample numbers for a DataLoader, so that each chunk is read once an epoch.

    Chunks are permuted and samples shuffled within windows of chunks: see `h5chunk.plan.order`. Every sample comes
    once an epoch. The order is a function of (seed, epoch) alone, and each iteration is an epoch. With any number of
    workers that divides ``interleave`` each chunk is read by one worker. Use as ``batch_sampler``::

        DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 256), num_workers=4)

    or, which torch never collates, as ``sampler`` with ``batch_size=None``.

    Parameters
    ----------
    dataset : ChunkDataset
    batch_size : int
    shuffle : bool
        False: the order of the file.
    seed : int
    window_chunks : int, optional
        Chunks that are shuffled together; default: the file's recommendation. A window is never less than a batch.
    drop_last : bool
        Leave out a last batch that is not full.
    interleave : int, optional
        Windows whose batches alternate, for the workers. Default: 24, or a divisor of it where chunks are so large
        that the windows would take more than 1 GiB, or where an epoch has fewer windows of the size that you ask for.
        Make it a multiple of your number of workers if 24 is not.

    Raises
    ------
    OptionError
        A number is out of range.
    """

    def __init__(
        self,
        dataset: ChunkDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        window_chunks: int | None = None,
        drop_last: bool = False,
        interleave: int | None = None,
    ) -> None:
        if not isinstance(dataset, ChunkDataset):
            raise OptionError(f"dataset is a {type(dataset).__name__}: give the ChunkDataset, as its chunks matter")
        self._order = make_order(
            dataset._reader,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            window_chunks=window_chunks,
            drop_last=drop_last,
            interleave=interleave,
        )
        dataset.expect_order(self._order)
        self._check_cache(dataset)

    def _check_cache(self, dataset: ChunkDataset) -> None:
        """Say so if a cache that the user gave cannot hold the windows."""
        grid, cache = dataset._reader.main.grid, dataset.cache
        needed = self._order.open_chunks * grid.band_bytes
        if grid.chunks and cache.nbytes < needed and (grid.filtered or cache.nbytes >= grid.chunk_bytes):
            warnings.warn(
                f"the chunk cache of {human_bytes(cache.nbytes)} is smaller than the {human_bytes(needed)} of the "
                f"{self._order.open_chunks} chunks that are open at one time: chunks will be read more than once; "
                "leave out cache=, or take smaller window_chunks or interleave",
                stacklevel=3,
            )

    @property
    def order(self) -> Order:
        """The order of the epoch that comes next."""
        return self._order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, from 0 on. Without it, each iteration goes on to the next epoch."""
        self._order = replace(self._order, epoch=epoch)

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order  # read at the first batch: torch's DataLoader may call iter() twice for one epoch
        self._order = replace(order, epoch=order.epoch + 1)
        for batch in order.batches():
            yield batch.tolist()

    def __repr__(self) -> str:
        return f"ChunkSampler({self._order})"
