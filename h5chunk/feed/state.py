"""Where an epoch stands: a few integers, with which any reader of the same file goes on at the next batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from h5chunk.errors import StateError
from h5chunk.plan.order import Order

VERSION = 1
State = dict[str, int]


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


class Resumable:
    """What stands at a batch of an epoch, and can be told to go on at another.

    Attributes
    ----------
    _order : Order
        Of the epoch that comes next.
    _start_batch : int
        Where that begins.
    _running : (Order, int or None), optional
        The epoch of which batches were given, and how many; None: it is over.
    _identity : callable
        Gives the number of the data.
    """

    _order: Order
    _identity: Callable[[], int]
    _start_batch = 0
    _running: tuple[Order, int | None] | None = None

    @property
    def order(self) -> Order:
        """The order of the epoch that comes next."""
        return self._order

    def _position(self) -> tuple[Order, int]:
        """Of the epoch that runs, or comes next: its order, and how many batches are done."""
        if self._running is None or self._running[1] is None:
            return self._order, self._start_batch
        return self._running[0], self._running[1]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, from 0 on. Without it, each iteration goes on to the next epoch.

        The epoch at which a loaded state stands goes on where that says.
        """
        if epoch != self._order.epoch:
            self._start_batch = 0
        self._order = replace(self._order, epoch=epoch)
        self._running = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` says, with the next iteration.

        Raises
        ------
        StateError
            It is of another file, seed, batch size or order.
        OptionError
            This is a loader that echoes.
        """
        epoch, self._start_batch = load_state(state, self._order, self._identity())
        self._order = replace(self._order, epoch=epoch)
        self._running = None


def _identity(order: Order, file: int) -> State:
    """All that the order is drawn from, but for the epoch and who takes which part."""
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
