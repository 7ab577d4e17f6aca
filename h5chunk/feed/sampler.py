"""A batch sampler that visits samples chunk-wise, in random order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from h5chunk.errors import OptionError
from h5chunk.feed.collate import TaggedBatch, check_numbering
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.epoch import DataIdentity, Position, Ranks, Resumable, State, find_ranks
from h5chunk.feed.sample_reader import recommended_window
from h5chunk.plan.order import INTERLEAVE, Order, choose_interleave, with_full_windows
from h5chunk.plan.selection import FixedSelection, Selection, WeightedSelection, balanced_weights, check_weights
from h5chunk.store.read.reader import H5Reader


class ChunkSampler(Resumable, Sampler[list[int]]):
    """Batches of sample numbers for a DataLoader, so that each chunk is read once an epoch.

    Chunks are permuted and samples shuffled within windows of chunks: see `h5chunk.plan.order`. Every sample comes
    once an epoch. The order is a function of (seed, epoch) alone, and each iteration is an epoch. With any number of
    workers that divides ``interleave`` each chunk is read by one worker. Use as ``batch_sampler``::

        DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 256), num_workers=4)

    or, which torch never collates, as ``sampler`` with ``batch_size=None``.

    Parameters
    ----------
    dataset : ChunkDataset
        The one, or the part of one, that is given to the DataLoader: batches of another part are an error there.
    batch_size : int
    shuffle : bool
        False: the order of the file.
    seed : int
    window_chunks : int, optional
        Chunks that are shuffled together; default: the file's recommendation. A window is never less than a batch.
    drop_last : bool
        Leave out a last batch that is not full, on all ranks.
    pad : bool
        Fill it up on all ranks, with samples that the epoch began with. With neither, every sample comes once: last
        batches may then differ by a sample or, where fewer samples than ranks are left, be empty on some.
    lanes, rank, world_size : int, optional
        Of several training processes; default: as torch.distributed says where it is initialised, and a lane a rank.
        All have the same number of batches, of ``batch_size`` each, and read different chunks. As long as
        ``batch_size * world_size`` and ``lanes``, which ``world_size`` must divide, stay as they are, the batches of
        all ranks together are the same samples, however many ranks there are.
    weights : array or str, optional
        The relative probability of each sample of the data set, (n,), 0 or more; or a field of classes that shall all
        be equally likely. An epoch then draws as many samples as there are, each as often as it is due, up to a whole
        number, and still chunk by chunk.
    interleave : int, optional
        Number of windows whose batches alternate, so that a DataLoader's workers get windows of their own. Default: 24,
        or a divisor of it where chunks are so large that the windows would take more than 1 GiB, or where an epoch has
        fewer windows of the size that you ask for. Make it a multiple of your number of workers if 24 is not.

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
        pad: bool = False,
        lanes: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        weights: Any = None,
    ) -> None:
        if not isinstance(dataset, ChunkDataset):
            raise OptionError(f"dataset is a {type(dataset).__name__}: give the ChunkDataset, as its chunks matter")
        reader = dataset.new_reader()
        order = make_order(
            reader,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            window_chunks=window_chunks,
            drop_last=drop_last,
            interleave=interleave,
            ranks=find_ranks(lanes, rank, world_size),
            pad=pad,
            selection=make_selection(reader, dataset.subset_samples, weights, dataset.values),
        )
        self._set(dataset, order, DataIdentity(dataset, weights), rank, chooses_window=window_chunks is None)

    @classmethod
    def of_order(cls, dataset: ChunkDataset, order: Order) -> ChunkSampler:
        """A sampler with this order of the data set's samples: for tools that compare orders."""
        sampler = cls.__new__(cls)
        sampler._set(dataset, order, DataIdentity(dataset, None), order.rank, chooses_window=False)
        return sampler

    def _set(
        self, dataset: ChunkDataset, order: Order, identity: DataIdentity, rank: int | None, *, chooses_window: bool
    ) -> None:
        self._template, self._position, self._identity = order, Position(order.epoch), identity
        self._given_rank, self.chooses_window = rank, chooses_window
        dataset.expect_order(order)

    def check_data(self, dataset: ChunkDataset) -> None:
        """Raise OptionError if the samples of a data set are not those that this sampler draws."""
        check_numbering(self._identity.numbering, dataset.numbering)

    @property
    def sampler(self) -> ChunkSampler:
        """Itself: Lightning's Trainer looks here for what has a ``set_epoch``."""
        return self

    @property
    def batch_size(self) -> int:
        """Not to be had: who asks for it means to deal batches out to ranks, as Accelerate's ``prepare`` does.

        Raises
        ------
        OptionError
            They are dealt out already: each rank would get a part of its part.
        """
        order = self._template
        if order.world_size > 1:
            raise OptionError(
                f"this sampler gives rank {order.rank} its part of {order.world_size} already, and something, such as "
                "Accelerate's prepare(), is about to deal it out once more: give the sampler rank=0, world_size=1, or "
                "leave the DataLoader out of prepare()"
            )
        raise AttributeError("batch_size")

    def __len__(self) -> int:
        return self._template.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        self._position.running = None  # what was left of the last epoch is given up
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        self._check_ranks()
        epoch, start = self._position.begin()  # at the first batch: torch may call iter() twice
        order = replace(self._template, epoch=epoch)
        for number, batch in enumerate(order.batches(start), start + 1):
            self._position.running = epoch, number
            yield TaggedBatch(batch.tolist(), self._identity.numbering)
        self._position.running = epoch, None

    def state_dict(self, batches: int | None = None) -> State:
        """Where the epoch stands: a few integers, for `load_state_dict` of any sampler or loader of the same file.

        Parameters
        ----------
        batches : int, optional
            Batches of this epoch that training has had, those before a resumed start among them. Default: those that
            were taken from here. A DataLoader with workers takes some ahead: there, count the batches, or use
            torchdata's StatefulDataLoader, which does.

        Raises
        ------
        OptionError
            An epoch has no such number of batches.
        """
        if batches is not None and not (_is_whole(batches) and 0 <= batches <= len(self)):
            raise OptionError(f"batches is {batches!r}: an epoch has 0 to {len(self)}; count those of this epoch alone")
        position = self._position
        if batches is None:
            return self._state(*position.reached)
        return self._state(position.running[0] if position.running else position.epoch, batches)

    def __repr__(self) -> str:
        return f"ChunkSampler({self.order})"


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def make_order(
    reader: H5Reader,
    batch_size: int,
    *,
    shuffle: bool,
    seed: int,
    window_chunks: int | None,
    drop_last: bool,
    interleave: int | None,
    ranks: Ranks,
    pad: bool = False,
    selection: Selection | None = None,
) -> Order:
    """The order of a file's first epoch: one place for its defaults, so that all who read a file agree.

    A file that was not shuffled when it was converted, or windows that the user asked for, get windows of that size
    even where few fit in an epoch; else workers get windows of their own, which are smaller.

    Raises
    ------
    OptionError
        A number is out of range.
    """
    order = Order(
        num_samples=reader.num_samples if selection is None else len(selection),
        chunk_samples=reader.chunk_samples
        if selection is None
        else max(1, round(len(selection) / max(1, selection.num_chunks))),
        batch_size=batch_size,
        window_chunks=recommended_window(reader) if window_chunks is None else window_chunks,
        interleave=INTERLEAVE if interleave is None else interleave,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        pad=pad,
        selection=selection,
        **ranks._asdict(),
    )
    if interleave is None:
        order = replace(order, interleave=choose_interleave(order.window_chunks * reader.chunk_bytes))
        if window_chunks is not None or reader.header is None or not reader.header.shuffled:
            order = with_full_windows(order)
    return order


def make_selection(
    reader: H5Reader, samples: np.ndarray | None, weights: Any, values: Callable[[str], np.ndarray]
) -> Selection | None:
    """The samples that an epoch visits, by their positions in the subset; None: all samples of equal chunks, once.

    Parameters
    ----------
    reader : H5Reader
    samples : (n,) int64, optional
        A subset, ascending.
    weights : array, str or None
        One weight per sample of the subset; or the name of a field, each value of which is drawn equally often.
    values : callable
        Gives the values of a field.

    Raises
    ------
    OptionError, FieldError
        The weights cannot be.
    """
    starts = reader.chunk_starts
    if samples is None and weights is None:
        return None if starts is None else FixedSelection(starts)
    rows = np.arange(reader.num_samples) if samples is None else samples
    chunks = rows // reader.chunk_samples if starts is None else np.searchsorted(starts, rows, "right") - 1
    if weights is None:
        return FixedSelection(FixedSelection.of(chunks, 1).starts)
    if not len(rows):
        raise OptionError("weights are given, but there are no samples to draw")
    given = balanced_weights(values(weights)) if isinstance(weights, str) else check_weights(weights, len(rows))
    return WeightedSelection.of(given, chunks, None, len(rows))


def in_file(order: Order, samples: np.ndarray | None) -> Order:
    """An order of the positions of a subset as an order of its samples' numbers in the file."""
    if samples is None:
        return order
    return replace(order, selection=replace(order.selection, samples=samples))  # type: ignore[type-var]
