"""The position in an epoch, the rank of this process, and the state with which a sampler or loader goes on."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from h5chunk.errors import OptionError, StateError
from h5chunk.plan.order import Order

if TYPE_CHECKING:
    from h5chunk.feed.dataset import ChunkDataset

VERSION = 1
State = dict[str, int]


@dataclass
class Position:
    """The position of a sampler, and of the loaders that were given it.

    Attributes
    ----------
    epoch, batch : int
        Where the next iteration begins.
    running : (int, int or None), optional
        The epoch that was begun last, and how many of its batches were delivered; None: all of them.
    """

    epoch: int = 0
    batch: int = 0
    running: tuple[int, int | None] | None = None

    def begin(self) -> tuple[int, int]:
        """Begin an iteration; returns its epoch and first batch."""
        begun = self.epoch, self.batch
        self.running, self.epoch, self.batch = begun, self.epoch + 1, 0
        return begun

    def move(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration begin there; what runs is forgotten."""
        self.epoch, self.batch, self.running = epoch, batch, None

    @property
    def reached(self) -> tuple[int, int]:
        """The epoch, and how many of its batches are done: of the one that runs, or comes next."""
        if self.running is None or self.running[1] is None:
            return self.epoch, self.batch
        return self.running[0], self.running[1]


class Resumable:
    """A sampler or loader: what stands at a batch of an epoch, and can be told to go on at another."""

    _template: Order  # of any epoch
    _position: Position
    _identity: DataIdentity
    _given_rank: int | None  # by the user

    @property
    def order(self) -> Order:
        """The order of the epoch that comes next."""
        return replace(self._template, epoch=self._position.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, from 0 on. Without it, each iteration goes on to the next epoch.

        The epoch at which a loaded state stands goes on where that says.
        """
        epoch = replace(self._template, epoch=epoch).epoch  # raises OptionError where it is no epoch
        self._position.move(epoch, self._position.batch if epoch == self._position.epoch else 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` says, with the next iteration.

        Raises
        ------
        StateError
            It is of another file, seed, batch size or order.
        OptionError
            This is a loader that echoes.
        """
        self._position.move(*load_state(state, self._template, self._identity()))

    def _check_ranks(self) -> None:
        """Raise OptionError if torch.distributed was initialised after it was asked: all ranks would read the same."""
        order, now = self._template, _distributed()
        if self._given_rank is None and (order.rank, order.world_size) != now and now[1] > 1:
            raise OptionError(
                f"made as rank {order.rank} of {order.world_size}, but torch.distributed says rank {now[0]} of "
                f"{now[1]} now: make it after init_process_group, or give rank= and world_size="
            )

    def _state(self, epoch: int, batch: int) -> State:
        return save_state(replace(self._template, epoch=epoch), batch, self._identity())


class Ranks(NamedTuple):
    """One of ``world_size`` processes, and the lanes that all of them share out."""

    lanes: int
    rank: int
    world_size: int


def find_ranks(lanes: int | None, rank: int | None, world_size: int | None) -> Ranks:
    """The rank as given, or as torch.distributed says where it is initialised; by default there is one lane per rank.

    Raises
    ------
    OptionError
        Only one of ``rank`` and ``world_size`` is given.
    """
    if (rank is None) != (world_size is None):
        raise OptionError(f"rank is {rank} and world_size {world_size}: give both, or none")
    if rank is None or world_size is None:
        rank, world_size = _distributed()
    return Ranks(world_size if lanes is None else lanes, rank, world_size)


def _distributed() -> tuple[int, int]:
    """Rank and world size, as torch.distributed says where it is initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class DataIdentity:
    """Gives a number for the samples that are visited, and how often: of a saved state, to know them again.

    Parameters
    ----------
    dataset : ChunkDataset
    weights : array, str or None
    """

    def __init__(self, dataset: ChunkDataset, weights: Any) -> None:
        self._dataset, self._weights = dataset, weights
        self._found: int | None = None

    def __call__(self) -> int:
        if self._found is None:  # it takes the time of all samples of a subset, and loops save a state each batch
            self._found = self._number()
        return self._found

    @property
    def numbering(self) -> Any:
        """The data set that sample numbers belong to: `h5chunk.feed.collate.Numbering`."""
        return self._dataset.numbering

    def _number(self) -> int:
        found = self._dataset.fingerprint
        if self._weights is None:
            return found
        weights = self._weights
        given = weights.encode() if isinstance(weights, str) else np.asarray(weights, float).tobytes()
        return zlib.crc32(given, found)


def save_state(order: Order, batch: int, file: int) -> State:
    """The state after ``batch`` batches of the order's epoch.

    Parameters
    ----------
    order : Order
    batch : int
        Batches of the epoch that were delivered.
    file : int
        Fingerprint of the data.

    Returns
    -------
    dict of str to int
        It says nothing of the number of ranks or workers: those may change.
    """
    return {"version": VERSION, "epoch": order.epoch, "batch": int(batch), **_identity(order, file)}


def load_state(state: Mapping[str, Any], order: Order, file: int) -> tuple[int, int]:
    """The epoch and the batch at which to go on.

    Raises
    ------
    StateError
        It is no state, or one of another file, seed, batch size or order.
    """
    try:
        numbers = {name: operator.index(value) for name, value in state.items()}
        version, epoch, batch = numbers["version"], numbers["epoch"], numbers["batch"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StateError(f"state is {state!r:.200}: give what state_dict() gave") from None
    if version != VERSION:
        raise StateError(
            f"state is of version {version} but this h5chunk reads {VERSION}: use the h5chunk it came from"
        )
    for name, value in _identity(order, file).items():
        if name not in numbers:
            raise StateError(f"state says nothing of {name}: give what state_dict() gave")
        if numbers[name] != value:
            raise StateError(_difference(name, numbers[name], value))
    if epoch < 0 or not 0 <= batch <= order.num_batches:
        raise StateError(f"state is at batch {batch} of epoch {epoch}, but an epoch has {order.num_batches} batches")
    return epoch, batch


def _identity(order: Order, file: int) -> State:
    """All that the order is drawn from, but for the epoch and the division among ranks."""
    return {
        "file": file,
        "num_samples": order.num_samples,
        "chunk_samples": order.chunk_samples,
        "seed": order.seed,
        "global_batch_size": order.batch_size * order.world_size,
        "lanes": order.lanes,
        "window_chunks": order.window_chunks,
        "interleave": order.interleave,
        "shuffle": int(order.shuffle),
        "drop_last": int(order.drop_last),
        "pad": int(order.pad),
    }


def _difference(name: str, saved: int, here: int) -> str:
    if name == "file":
        return "state is of another file, or of other samples or weights: give the same files, subset and weights"
    if name == "global_batch_size":
        return (
            f"state is of batches of {saved} samples over all ranks, and here they are {here}: "
            "keep batch_size x world_size as it was"
        )
    if name in ("window_chunks", "interleave"):
        return (
            f"state is of {name}={saved}, and here it is {here}: give what was given for window_chunks, memory_bytes "
            "and a sampler's interleave"
        )
    return f"state is of {name}={saved}, and here it is {here}: give the same {name}"
