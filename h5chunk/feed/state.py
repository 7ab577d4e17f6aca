"""Save the position in an epoch as integers, and check that a saved position belongs to the same data and order."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h5chunk.errors import StateError
from h5chunk.plan.order import Epoch

VERSION = 1
OF_SOME = ("batch_elements", "padded", "bucket_batches", "batch_sampler")  # settings that not all orders have
PROPORTIONS = "proportions"  # those of groups, which are numbers
# what the user's batches add: see `h5chunk.feed.given`
OWN = ("sampler", "uses", "ahead", "drawn", "usual", "told", PROPORTIONS)
State = dict[str, Any]  # integers, and the values of `OWN`


def save_state(order: Epoch, batch: int, file: int) -> State:
    """Return the state after ``batch`` batches of an epoch. ``file`` is a checksum of the data and the weights.

    The state does not contain the number of ranks or workers, which may change.
    """
    return {"version": VERSION, "epoch": order.epoch, "batch": int(batch), "file": file, **order.settings}


def load_state(state: Mapping[str, Any], order: Epoch, file: int) -> tuple[int, int]:
    """Return the epoch and batch at which to resume. Raise StateError if it is invalid, or belongs to other data."""
    try:
        numbers = {name: operator.index(value) for name, value in state.items() if name not in OWN}
        version, epoch, batch = numbers["version"], numbers["epoch"], numbers["batch"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StateError(f"state is {state!r:.200}: pass the result of state_dict()") from None
    if version != VERSION:
        raise StateError(
            f"state has version {version}, but this h5chunk reads {VERSION}: use the h5chunk that saved it"
        )
    settings = {"file": file, **order.settings}
    for name in OF_SOME:
        if name in numbers and name not in settings:
            raise StateError(f"state has {name}={numbers[name]}, but the sampler has no {name}: pass the same {name}")
    for name, value in settings.items():
        if name not in numbers:
            raise StateError(f"state has no {name}: pass the result of state_dict()")
        if numbers[name] != value:
            raise StateError(_difference(name, numbers[name], value))
    num_batches = 0 if epoch < 0 else replace(order, epoch=epoch).num_batches  # type: ignore[type-var]
    if epoch < 0 or batch < 0 or (num_batches is not None and batch > num_batches):
        raise StateError(
            f"state is at batch {batch} of epoch {epoch}, but an epoch has {num_batches} batches: pass the "
            "result of state_dict()"
        )
    return epoch, batch


def _difference(name: str, saved: int, expected: int) -> str:
    if name == "file":
        return (
            "state belongs to another file, or to other samples, weights or groups: use the same files, subset, "
            "weights and groups"
        )
    if name == "batch_sampler":
        return "state has the position of another batch_sampler: pass a sampler of the same class"
    if name == "global_batch_size":
        return f"state has batches of {saved} samples over all ranks, not {expected}: pass a matching batch_size"
    if name == "interleave":
        return (
            f"state has {name}={saved}, not {expected}: pass the same num_workers to the ChunkSampler; with 0, it has "
            "the order of a ChunkLoader"
        )
    if name == "window_chunks":
        return (
            f"state has {name}={saved}, not {expected}: pass batch_sampler=ChunkSampler(..., {name}={saved}), or what "
            "the size of windows depended on before: memory_bytes, num_threads, reuse and transforms"
        )
    if name == "padded":
        return f"state has {name}={saved}, not {expected}: pass the same transforms, with or without Pack"
    return f"state has {name}={saved}, not {expected}: pass the same {name}"
