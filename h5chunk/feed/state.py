"""Save the position in an epoch as integers, and check that a saved position belongs to the same data and order."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h5chunk.errors import StateError
from h5chunk.plan.lengths import LengthOrder
from h5chunk.plan.order import Order

VERSION = 1
BY_LENGTH = ("batch_elements", "padded", "bucket_batches")  # only of orders by length
State = dict[str, int]


def save_state(order: Order, batch: int, file: int) -> State:
    """Return the state after ``batch`` batches of an epoch. ``file`` is a checksum of the data and the weights.

    The state does not contain the number of ranks or workers, which may change.
    """
    return {"version": VERSION, "epoch": order.epoch, "batch": int(batch), **_identity(order, file)}


def load_state(state: Mapping[str, Any], order: Order, file: int) -> tuple[int, int]:
    """Return the epoch and batch at which to resume. Raise StateError if it is invalid, or belongs to other data."""
    try:
        numbers = {name: operator.index(value) for name, value in state.items()}
        version, epoch, batch = numbers["version"], numbers["epoch"], numbers["batch"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StateError(f"state is {state!r:.200}: pass the result of state_dict()") from None
    if version != VERSION:
        raise StateError(
            f"state has version {version}, but this h5chunk reads {VERSION}: use the h5chunk that saved it"
        )
    for name in BY_LENGTH:
        if name in numbers and not isinstance(order, LengthOrder):
            raise StateError(f"state has {name}={numbers[name]}, but the sampler has no {name}: pass the same {name}")
    for name, value in _identity(order, file).items():
        if name not in numbers:
            raise StateError(f"state has no {name}: pass the result of state_dict()")
        if numbers[name] != value:
            raise StateError(_difference(name, numbers[name], value))
    num_batches = 0 if epoch < 0 else replace(order, epoch=epoch).num_batches
    if epoch < 0 or not 0 <= batch <= num_batches:
        raise StateError(
            f"state is at batch {batch} of epoch {epoch}, but an epoch has {num_batches} batches: pass the "
            "result of state_dict()"
        )
    return epoch, batch


def _identity(order: Order, file: int) -> State:
    """Return the numbers that determine the order, except the epoch and the division among ranks."""
    found = {
        "file": file,
        "num_samples": order.num_samples,
        "chunk_samples": order.chunk_samples,
        "seed": order.seed,
        "global_batch_size": order.batch_size * order.world_size,
        "lanes": order.lanes,
        "locality": order.nodes,
        "window_chunks": order.window_chunks,
        "interleave": order.interleave,
        "shuffle": int(order.shuffle),
        "drop_last": int(order.drop_last),
        "pad": int(order.pad),
    }
    if isinstance(order, LengthOrder):
        by_length = order.max_elements or 0, int(order.padded), order.bucket_batches
        found |= dict(zip(BY_LENGTH, by_length, strict=True))
    return found


def _difference(name: str, saved: int, expected: int) -> str:
    if name == "file":
        return (
            "state belongs to another file, or to other samples, weights or groups: use the same files, subset, "
            "weights and groups"
        )
    if name == "global_batch_size":
        return f"state has batches of {saved} samples over all ranks, not {expected}: pass a matching batch_size"
    if name in ("window_chunks", "interleave"):
        return f"state has {name}={saved}, not {expected}: pass the same window_chunks, memory_bytes and interleave"
    return f"state has {name}={saved}, not {expected}: pass the same {name}"
