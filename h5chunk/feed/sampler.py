"""A batch sampler that visits samples chunk by chunk in random order, with a position that can be saved and resumed."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from h5chunk.attributes import cached_property
from h5chunk.errors import OptionError, StateError, check_whole, count_text
from h5chunk.feed.collate import TaggedBatch, check_numbering
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.grouping import group_selection
from h5chunk.feed.nodes import find_nodes
from h5chunk.feed.state import PROPORTIONS, State, load_state, save_state
from h5chunk.plan.groups import GroupOrder, GroupSelection
from h5chunk.plan.lengths import LengthOrder, usual_batch
from h5chunk.plan.order import INTERLEAVE, Order, choose_interleave, with_full_windows
from h5chunk.plan.quality import OrderReport, measure
from h5chunk.plan.selection import (
    FixedSelection,
    Selection,
    WeightedSelection,
    balanced_weights,
    check_weights,
    starts_of_runs,
)
from h5chunk.store.read.source import Source


@dataclass
class Position:
    """The epoch and batch at which the next iteration of a sampler or loader begins.

    ``running`` is the epoch that was started last and the number of its batches that were returned, where None means
    all.
    """

    epoch: int = 0
    batch: int = 0
    running: tuple[int, int | None] | None = None

    def begin(self) -> tuple[int, int]:
        """Begin an iteration, and return its epoch and first batch."""
        begun = self.epoch, self.batch
        self.running, self.epoch, self.batch = begun, self.epoch + 1, 0
        return begun

    def move(self, epoch: int, batch: int = 0) -> None:
        """Make the next iteration begin at this position."""
        self.epoch, self.batch, self.running = epoch, batch, None

    @property
    def reached(self) -> tuple[int, int]:
        """The current epoch, or the next one if none is running, and the number of its batches that were returned."""
        if self.running is None or self.running[1] is None:
            return self.epoch, self.batch
        return self.running[0], self.running[1]


class Resumable:
    """Base class of samplers and loaders, which have a position in an epoch that can be saved and resumed."""

    _template: Order  # the order, with any epoch
    _position: Position
    _given_rank: int | None  # the rank that the user passed

    @property
    def _identity(self) -> int:
        """A checksum of the data and the weights, which a saved state must match."""
        raise NotImplementedError

    @property
    def order(self) -> Order:
        """The order of the next epoch."""
        return replace(self._template, epoch=self._position.epoch)

    @property
    def _num_batches(self) -> int:
        """Number of batches of the current epoch or, if none is running, of the next."""
        return replace(self._template, epoch=self._position.reached[0]).num_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0. If a state of this epoch was loaded, keep its batch."""
        epoch = replace(self._template, epoch=epoch).epoch  # raises OptionError for an invalid epoch
        self._position.move(epoch, self._position.batch if epoch == self._position.epoch else 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume at the position of ``state``.

        Raises
        ------
        StateError
            The state belongs to another file, seed, batch size or order.
        OptionError
            The loader repeats samples (data echoing).
        """
        self._check_state()
        with self._proportions_of(state):
            self._position.move(*load_state(state, self._template, self._identity))

    def _proportions_of(self, _state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Take over the proportions of groups that a state has, in a context. If it fails, keep the old ones."""
        return nullcontext()

    def _check_state(self) -> None:
        """Raise OptionError if this order's position cannot be saved or loaded."""

    def _check_ranks(self) -> None:
        """Raise OptionError if torch.distributed was initialised too late, as all ranks would read the same samples."""
        order, now = self._template, _distributed()
        if self._given_rank is None and (order.rank, order.world_size) != now and now[1] > 1:
            raise OptionError(
                f"the sampler was created as rank {order.rank} of {order.world_size}, but torch.distributed now "
                f"has rank {now[0]} of {now[1]}: create it after init_process_group, or pass it rank= and world_size="
            )

    def _state(self, epoch: int, batch: int) -> State:
        state = save_state(replace(self._template, epoch=epoch), batch, self._identity)
        selection = self._template.selection
        given = selection.proportions if isinstance(selection, GroupSelection) else None
        return state if given is None else {**state, PROPORTIONS: list(given)}


def find_ranks(lanes: int | None, rank: int | None, world_size: int | None) -> tuple[int, int, int]:
    """Return lanes, rank and world size. Defaults are one lane per rank, and the ranks of torch.distributed."""
    if (rank is None) != (world_size is None):
        raise OptionError(f"rank is {rank} and world_size {world_size}: pass both or neither")
    if rank is None or world_size is None:
        rank, world_size = _distributed()
    return world_size if lanes is None else lanes, rank, world_size


def _distributed() -> tuple[int, int]:
    """Return rank and world size of torch.distributed, or 0 and 1 if it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class ChunkSampler(Resumable, Sampler[list[int]]):
    """Batches of sample numbers for a DataLoader, such that each chunk is read once per epoch.

    Chunks are permuted, and samples are shuffled within windows of chunks: see `h5chunk.plan.order`. Every sample is
    used once per epoch. The order depends only on the chunks of the data set, the arguments and the epoch, and each
    iteration is an epoch. With 1, 2, 3, 4, 6, 8, 12 or 24 workers, or as many as ``num_workers``, each window is read
    by one worker; only a chunk at the border of two windows may be read by two. Use it as ``batch_sampler``::

        DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 256), num_workers=4)

    Parameters
    ----------
    dataset : ChunkDataset
        The data set, or subset, that the DataLoader reads. Reading a batch from any other subset raises OptionError.
    batch_size : int
        Number of samples in a batch; with ``batch_elements``, the maximum number, by default unlimited.
    shuffle : bool
        False: keep the order of the file.
    seed : int
    batch_elements : int, optional
        For samples that differ in length: the maximum number of elements in a batch. An element is a step along the
        first axis, in the first field whose samples differ in length (`ChunkDataset.lengths_field`). Elements that pad
        samples to the longest of the batch count, unless the transform of that field is `h5chunk.transforms.Pack`. All
        ranks have the same number of batches, because some ranks cut their largest batches in two; the number differs a
        little between epochs. With ``drop_last``, the last batch of an epoch is left out. A window has at least 8
        batches of average size.
    bucket_batches : int
        For samples that differ in length: the size of a bucket, in batches of average size. The samples of a bucket are
        sorted by length and cut into batches, and these batches are shuffled. This saves padding, but samples are then
        shuffled less well, because those of a batch have similar lengths: see `report`. A window has at least one
        bucket.
    window_chunks : int, optional
        Chunks to shuffle together; default: the file's recommendation. A window is never smaller than a batch.
    drop_last : bool
        Leave out the last batch if it is not full, on all ranks. An epoch without any batch raises OptionError.
    pad : bool
        Fill up the last batch, on all ranks, with samples from the beginning of the epoch; other batches are not
        changed. (DistributedSampler repeats fewer: it adds samples only until all ranks have as many.) Batches by
        length, which differ in size, get at least one sample. Without ``drop_last`` and ``pad``, every
        sample is used once; the last batch may then be one sample larger on some ranks, or be empty, of which a warning
        tells.
    lanes, rank, world_size : int, optional
        The position of this process among several training processes. Default: that of torch.distributed if it is
        initialised, and one lane per rank. All ranks have the same number of batches, of ``batch_size`` samples, and
        read different chunks. The batches of all ranks together contain the same samples for any number of ranks if
        ``batch_size * world_size`` and ``lanes``, a multiple of ``world_size``, do not change.
    locality : "node" or int, optional
        Number of nodes that read the same chunks in every epoch, so that the disk cache of each node (``cache_dir``)
        serves later epochs. ``"node"``: the number of nodes that torchrun uses. The number must divide ``lanes``,
        and the seed assigns chunks to nodes. To resume on another number of nodes, pass the original number. With
        weights, a few chunks of a node differ from epoch to epoch.
    weights : array or str, optional
        The relative probability of each sample of the data set, (n,), 0 or more; or a field of classes, to make all
        classes equally likely. An epoch then draws as many samples as the data set has, each in proportion to its
        weight (rounded up or down), and still chunk by chunk. If an epoch uses a sample several times, the random
        transforms of `h5chunk.transforms` transform it differently each time.
    num_workers : int, optional
        The ``num_workers`` of the DataLoader. The batches of so many windows alternate, because a DataLoader gives
        consecutive batches to different workers; each worker then has its own windows, and no chunk is decoded twice.
        0 or 1: one window after the other. Default: 24 windows alternate, so that the order is the same for all
        divisors of 24; or fewer if they would need more than 1 GiB, or if an epoch has fewer. Batches by length do not
        alternate.
    groups : str, list of str, or array, optional
        Make batches by group, such as the class or the subject of samples: a field with one value per sample, also an
        attribute of `Keyed`, a constant of `Windows`, or ``source_name``, as in `ChunkDataset.where`; several fields,
        whose combinations are groups; or the group of each sample, (n,). Without further arguments, batches are
        stratified: each has the proportions of the data set, to less than two samples of a group, and every sample is
        used once. All ranks have the same number of batches, and there is one lane per rank.

        Chunks are read one after another, as far as the batches can be made of their samples: those of a group with few
        samples in a chunk come from many chunks, and if the file is sorted by group, stratified batches need a chunk
        of each group at a time. Compressed chunks are then decoded for several windows, and ``report().chunk_reads``
        says for how many: with a larger ``window_chunks``, there are fewer. The other arguments limit the shuffle
        further, as ``report`` says: samples that form a set are those of consecutive chunks of an epoch. Planning an
        epoch needs about 60 bytes of memory per sample.
    groups_per_batch : int, optional
        Number of groups in a batch, each with ``batch_size / groups_per_batch`` samples, which follow each other: P
        classes with K samples each, for metric learning; or 1, so that all samples of a batch belong to one group. The
        groups of a batch are different and random. Groups occur as often as their samples suffice. An epoch uses a
        sample at most once. It leaves out the samples that do not form a set, and those of a group that has more sets
        than there are batches, others in each epoch: ``report().left_out``. With ``pad``, the last set of a group is
        filled up with other samples of the group.
    proportions : mapping of groups to numbers, or "equal", optional
        The proportions of groups in each batch, relative to their sum, and 0 for groups to leave out. Numbers of
        samples are rounded up or down. An epoch has as many samples as the data set, and repeats those of rare groups,
        as with ``weights``. For a `Mix`, which needs no ``groups``, a mapping of members to numbers, in place of its
        own proportions. `set_proportions` changes them.
    controls : group or mapping, optional
        Each set of samples is followed by as many of its control group, so that a batch has ``groups_per_batch`` (1)
        groups with ``batch_size / groups_per_batch / 2`` samples and as many controls each. A group, which is the
        control of all others; a mapping of groups to control groups; or, if ``groups`` has several fields, a mapping
        of a field to its value in control groups: with ``groups=["cell_line", "drug"], controls={"drug": "DMSO"}``, the
        controls of ("A", "x") are ("A", "DMSO"). Every sample of the other groups is used at most once in an epoch;
        controls are used as often as needed, each about equally often.

    Raises
    ------
    OptionError
        A number is out of range; or a group is too small for a set, or has no controls.
    """

    def __init__(
        self,
        dataset: ChunkDataset,
        batch_size: int | None = None,
        *,
        batch_elements: int | None = None,
        bucket_batches: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        window_chunks: int | None = None,
        drop_last: bool = False,
        pad: bool = False,
        lanes: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        locality: str | int | None = None,
        num_workers: int | None = None,
        weights: Any = None,
        groups: Any = None,
        groups_per_batch: int | None = None,
        proportions: Any = None,
        controls: Any = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "dataset", "__class__")}
        if not isinstance(dataset, ChunkDataset):
            raise OptionError(f"dataset is a {type(dataset).__name__}: pass a ChunkDataset, whose chunks are needed")
        if len(dataset) != (stored := ChunkDataset.__len__(dataset)):
            raise OptionError(
                f"{type(dataset).__name__} has its own __len__, which returns {len(dataset)}, but an order has the "
                f"{count_text(stored, 'sample')} of the file: select samples with dataset.subset(numbers), repeat them "
                "with weights=, or pass shuffle=True to a DataLoader in place of a ChunkSampler"
            )
        reader = dataset.new_reader()
        ranks = dict(zip(("lanes", "rank", "world_size"), find_ranks(lanes, rank, world_size), strict=True))
        by_group = {"groups_per_batch": groups_per_batch, "proportions": proportions, "controls": controls}
        selection: Selection | None
        is_mixed = groups is None and dataset.mixture is not None and len(dataset) > 0
        for name in (name for name, value in by_group.items() if value is not None and groups is None):
            if not is_mixed or name != "proportions":
                raise OptionError(f"{name} needs groups: pass groups, such as the name of a field, or leave {name} out")
        if groups is None and not is_mixed:
            selection = _selection(reader, dataset, weights)
        else:
            alone = {"weights": weights, "batch_elements": batch_elements, "locality": locality, "lanes": lanes}
            alone["bucket_batches"] = None if bucket_batches == 1 else bucket_batches
            _check_alone("batches of a Mix" if is_mixed else "groups", alone)
            last = {"drop_last": drop_last, "pad": pad, "batch_size": batch_size, "world_size": ranks["world_size"]}
            if drop_last and pad:
                raise OptionError("drop_last and pad exclude each other: pass only one of them")
            selection = group_selection(dataset, _chunks(reader, dataset), groups, **by_group, **last)
            drop_last = pad = False  # the selection has only the samples that are used
        if selection is None:
            num_samples, chunk_samples = reader.num_samples, reader.chunk_samples
        else:
            num_samples = len(selection)
            chunk_samples = max(1, round(num_samples / max(1, selection.num_chunks)))
        kind: type[Order] = GroupOrder if isinstance(selection, GroupSelection) else Order
        options: dict[str, Any] = {"batch_size": batch_size}
        if batch_elements is not None or bucket_batches != 1:
            limits: dict[str, Any] = {"max_elements": batch_elements, "max_samples": batch_size}
            limits["padded"] = batch_elements is None or dataset.pads_lengths
            kind, options = LengthOrder, {**limits, "bucket_batches": bucket_batches, "subset": dataset.subset_samples}
            options |= {"lengths": reader.sample_lengths, "batch_size": usual_batch(dataset.sample_lengths, **limits)}
        elif batch_size is None:
            raise OptionError("batch_size is missing: pass batch_size or batch_elements")
        interleave = None if num_workers is None else max(1, check_whole("num_workers", num_workers, 0))
        order = kind(
            num_samples,
            chunk_samples,
            window_chunks=reader.recommended_window if window_chunks is None else window_chunks,
            interleave=(1 if kind is LengthOrder else INTERLEAVE) if interleave is None else interleave,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=pad,
            selection=selection,
            nodes=1 if locality is None else find_nodes(locality, ranks["world_size"]),
            **ranks,
            **options,
        )
        if kind is not LengthOrder and interleave is None:  # each worker gets its own windows
            order = replace(order, interleave=choose_interleave(order.window_chunks * reader.chunk_bytes))
            if window_chunks is not None or reader.header is None or not reader.header.shuffled:
                order = with_full_windows(order)  # even if only a few windows of that size fit in an epoch
        if arguments["drop_last"] and len(dataset) and not order.num_batches:
            ranks_text = f" on each of {order.world_size} ranks" if order.world_size > 1 else ""
            raise OptionError(
                f"drop_last leaves out all {count_text(len(dataset), 'sample')}, which do not fill a batch of "
                f"{order.batch_text}{ranks_text}: leave drop_last out, or pass a smaller batch"
            )
        if order.rank == 0 and (num_idle := order.num_idle_ranks):
            what = "the last batch of each" if order.has_equal_batches else "a batch at the end of the next"
            warnings.warn(
                f"{what} epoch is empty on {num_idle} of {order.world_size} ranks: pass drop_last=True "
                "or pad=True, or another batch_size",
                stacklevel=2,
            )
        self._set(dataset, order, weights, rank, chooses_window=window_chunks is None)
        self._arguments |= arguments

    @classmethod
    def of_order(cls, dataset: ChunkDataset, order: Order) -> ChunkSampler:
        """Create a sampler with this order of the data set's samples, for tools that compare orders."""
        sampler = cls.__new__(cls)
        sampler._set(dataset, order, None, order.rank, chooses_window=False)
        return sampler

    def _set(
        self, dataset: ChunkDataset, order: Order, weights: Any, rank: int | None, *, chooses_window: bool
    ) -> None:
        self._template, self._position = order, Position(order.epoch)
        self._dataset, self._weights, self._given_rank = dataset, weights, rank
        self._arguments: dict[str, Any] = {}  # those of the constructor
        self.chooses_window = chooses_window
        dataset.expect_order(order)

    def read_in_turn(self) -> None:
        """Let windows follow one another, because a ChunkLoader reads them, which has no workers.

        Raises
        ------
        OptionError
            The sampler was created for several workers, or a state was loaded in which windows alternate.
        """
        if self._template.interleave == 1:
            return
        is_fixed = self._arguments.get("num_workers") is not None
        if is_fixed or self._position.batch:
            why = f"for {self._template.interleave} workers" if is_fixed else "within an epoch"
            raise OptionError(
                f"batch_sampler is {why}, and its windows alternate, but a ChunkLoader reads one window after the "
                "other: pass num_workers=0 to the ChunkSampler"
            )
        self._template = replace(self._template, interleave=1)
        self._arguments["num_workers"] = 0

    def set_proportions(self, proportions: Mapping[Any, float] | str) -> None:
        """Change the ``proportions`` from the next epoch on, also those of a loader that has this sampler.

        They remain until this is called again. A saved state has them, and loading it sets them.

        Raises
        ------
        OptionError
            The proportions are invalid; or the sampler has no proportions; or an epoch is running: call this after its
            last batch, or after `set_epoch`.
        """
        running = self._position.running
        if running is not None and running[1] is not None and running[1] < self._num_batches:
            raise OptionError(
                f"batch {running[1]} of {self._num_batches} of an epoch is running: set proportions after the last "
                "batch or, if you leave the epoch early, after set_epoch"
            )
        self._change(proportions)
        self._position.running = None  # the last epoch had other proportions

    def _change(self, proportions: Any) -> None:
        selection = self._template.selection
        if not self._arguments or not isinstance(selection, GroupSelection) or selection.proportions is None:
            raise OptionError("this sampler has no proportions: create it with proportions=, or for a Mix")
        dataset = copy(self._dataset)
        dataset._order = None  # the cache of the data set stays as it is
        changed = ChunkSampler(dataset, **{**self._arguments, "proportions": proportions})
        self._template = changed._template
        self.__dict__.pop("_identity", None)

    @contextmanager
    def _proportions_of(self, state: Mapping[str, Any]) -> Iterator[None]:
        before, selection = self._template, self._template.selection
        found = state.get(PROPORTIONS) if isinstance(state, Mapping) else None
        own = list(selection.proportions or ()) if isinstance(selection, GroupSelection) else []
        try:
            if isinstance(found, list) and len(found) == len(own) and found != own:
                try:
                    self._change(found)
                except OptionError as error:
                    raise StateError(f"state cannot be resumed: {error}") from None
            yield
        except BaseException:
            self._template = before
            self.__dict__.pop("_identity", None)
            raise

    def check_data(self, dataset: ChunkDataset) -> None:
        """Raise OptionError unless a data set has the same samples as this sampler's data set."""
        check_numbering(self._dataset.numbering, dataset.numbering)

    @cached_property
    def _identity(
        self,
    ) -> int:  # cached: it needs a pass over all weights, and loops may save a state per batch
        found, weights = self._dataset.fingerprint, self._weights
        if isinstance(self._template, LengthOrder):
            found = zlib.crc32(self._template.lengths.tobytes(), found)
        if isinstance(selection := self._template.selection, GroupSelection):
            found = zlib.crc32(selection.fingerprint, found)
        if weights is None:
            return found
        encoded = weights.encode() if isinstance(weights, str) else np.asarray(weights, float).tobytes()
        return zlib.crc32(encoded, found)

    @property
    def sampler(self) -> ChunkSampler:
        """The sampler itself, because Lightning's Trainer calls ``batch_sampler.sampler.set_epoch``."""
        return self

    @property
    def batch_size(self) -> int:
        """Not available, because code that reads it, such as Accelerate or Lightning, divides batches among ranks.

        Raises
        ------
        OptionError
            There are several ranks. This sampler has already divided the samples, so each rank would lose some.
        """
        order = self._template
        if order.world_size > 1:
            raise OptionError(
                f"this sampler has already divided the samples among {order.world_size} ranks, and other code, such as "
                "Accelerate's prepare(), is about to divide them again: pass rank=0, world_size=1 to the sampler, "
                "or leave the DataLoader out of prepare(); for Lightning, pass Trainer(use_distributed_sampler=False)"
            )
        raise AttributeError("batch_size")

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        self._position.running = None  # the rest of the last epoch is dropped
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        self._check_ranks()
        epoch, start = self._position.begin()  # at the first batch: torch may call iter() twice
        order = replace(self._template, epoch=epoch)
        for number, keys in enumerate(order.keys(start), start + 1):
            self._position.running = epoch, number
            batch = order.numbers_of(keys)
            repeats = 0 if batch is keys else keys - batch
            groups = order.groups_of(batch)
            yield TaggedBatch(batch.tolist(), self._dataset.numbering, epoch, order.seed, repeats, groups)
        self._position.running = epoch, None

    def state_dict(self, batches: int | None = None) -> State:
        """Return the position in the epoch as integers, for `load_state_dict` of a sampler or loader of the same file.

        Parameters
        ----------
        batches : int, optional
            Number of batches of this epoch that training has used, counted from the start of the epoch even after
            resuming. Default: the batches taken from this sampler. A DataLoader with workers prefetches batches: count
            them yourself, or use torchdata's StatefulDataLoader, which does so.

        Raises
        ------
        OptionError
            ``batches`` is larger than the number of batches of an epoch, or not a whole number.
        """
        position = self._position
        if batches is None:
            return self._state(*position.reached)
        epoch = position.running[0] if position.running else position.epoch
        most = replace(self._template, epoch=epoch).num_batches
        is_whole = isinstance(batches, (int, np.integer)) and not isinstance(batches, bool)
        if not is_whole or not 0 <= batches <= most:
            raise OptionError(
                f"batches is {batches!r}: pass a number from 0 to {most}, counted from the start of this epoch"
            )
        return self._state(epoch, batches)

    def report(self, groups: Any = None) -> OrderReport:
        """Measure how well the next epoch is shuffled, and the padding of batches by length, without reading samples.

        Parameters
        ----------
        groups : str or (n,) array, optional
            The group of each sample, such as its class, or the name of a field of groups. Default: the sampler's
            ``groups``; the episodes of `Windows`, the volumes of `Patches`; for batches by length, tenths of the
            samples, sorted by length.

        Raises
        ------
        OptionError
            The data set has no such groups, and ``groups`` is not given.
        """
        given = self._dataset.values(groups) if isinstance(groups, str) else groups
        selection = self._template.selection
        own = selection.codes if isinstance(selection, GroupSelection) else self._dataset.groups
        return measure(self.order, own if given is None else given)

    def __repr__(self) -> str:
        return f"ChunkSampler({self.order})"


def _selection(reader: Source, dataset: ChunkDataset, weights: Any) -> Selection | None:
    """Return the samples of an epoch as positions in the subset.

    Return None if an epoch uses all samples once, and all chunks have the same size.
    """
    starts = reader.chunk_starts
    if dataset.subset_samples is None and weights is None:
        return None if starts is None else FixedSelection(starts)
    chunks = _chunks(reader, dataset)
    if weights is None:
        return FixedSelection(starts_of_runs(chunks))
    if not len(chunks):
        raise OptionError("weights are given, but the data set is empty: pass a data set with samples")
    by_class = isinstance(weights, str)
    array = balanced_weights(dataset.values(weights)) if by_class else check_weights(weights, len(chunks))
    return WeightedSelection.of(array, chunks, len(chunks))


def _chunks(reader: Source, dataset: ChunkDataset) -> np.ndarray:
    """Return the number of the chunk of each sample of a data set: (n,) int64, ascending."""
    starts, rows = reader.chunk_starts, dataset.samples
    return rows // reader.chunk_samples if starts is None else np.searchsorted(starts, rows, "right") - 1


def _check_alone(what: str, options: Mapping[str, Any]) -> None:
    """Raise OptionError if an argument is given that batches by group do not have."""
    for name in (name for name, value in options.items() if value is not None):
        raise OptionError(f"{name} and {what} exclude each other: leave one of them out")
