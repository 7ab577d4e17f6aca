"""The order in which samplers and loaders visit a file: one place for its defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.feed.epoch import Ranks
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import choose_interleave, choose_window_chunks
from h5chunk.plan.line import Picks
from h5chunk.plan.order import INTERLEAVE, Drawn, Order, with_full_windows
from h5chunk.plan.picks import WeightedPicks, balanced_weights, check_weights
from h5chunk.plan.sparse import bounded_window, fullest_chunks
from h5chunk.store.read.files import chunk_starts
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.sidecar import read_recommendation


def recommendation(reader: H5Reader) -> tuple[int, CacheSettings] | None:
    """Window in chunks, and cache of one process: what a tuner left beside the file, or what the file says.

    Raises
    ------
    FileError
        What lies beside the file is damaged.
    """
    beside = read_recommendation(
        reader.path,
        dataset=reader.main.dataset,
        num_samples=reader.num_samples,
        chunk_samples=reader.chunk_samples,
    )
    if beside is not None or reader.header is None:
        return beside
    return reader.header.window_chunks, reader.header.cache


def recommended_window(reader: H5Reader) -> int:
    """How many chunks to shuffle together: what the file says, or what the model does.

    Fewer where some chunks of a matrix hold far more than others, as windows are bounded by bytes.
    """
    found = recommendation(reader)
    if found is not None:
        window_chunks = found[0]
    else:
        window_chunks = choose_window_chunks(reader.chunk_bytes, math.ceil(reader.num_samples / reader.chunk_samples))
    if reader.matrix is None:
        return window_chunks
    return bounded_window(window_chunks, fullest_chunks(reader.indptr, reader.chunk_samples))


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
    picks: Drawn | None = None,
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
        num_samples=reader.num_samples if picks is None else len(picks),
        chunk_samples=reader.chunk_samples if picks is None else max(1, round(len(picks) / max(1, picks.num_chunks))),
        batch_size=batch_size,
        window_chunks=recommended_window(reader) if window_chunks is None else window_chunks,
        interleave=INTERLEAVE if interleave is None else interleave,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        pad=pad,
        picks=picks,
        **ranks._asdict(),
    )
    if interleave is None:
        order = replace(order, interleave=choose_interleave(order.window_chunks * reader.chunk_bytes))
        if window_chunks is not None or reader.header is None or not reader.header.shuffled:
            order = with_full_windows(order)
    return order


def make_picks(
    reader: H5Reader, samples: np.ndarray | None, weights: Any, values: Callable[[str], np.ndarray]
) -> Drawn | None:
    """The samples that an epoch visits, by their positions in the subset; None: all samples of equal chunks, once.

    Parameters
    ----------
    reader : H5Reader
    samples : (n,) int64, optional
        A subset, ascending.
    weights : array, str or None
        Of each sample of it; or a field whose values shall be equally likely.
    values : callable
        Gives the values of a field.

    Raises
    ------
    OptionError, FieldError
        The weights cannot be.
    """
    starts = chunk_starts(reader)
    if samples is None and weights is None:
        return None if starts is None else Picks(starts)
    rows = np.arange(reader.num_samples) if samples is None else samples
    chunks = rows // reader.chunk_samples if starts is None else np.searchsorted(starts, rows, "right") - 1
    if weights is None:
        return Picks(Picks.of(chunks, 1).starts)
    if not len(rows):
        raise OptionError("weights are given, but there are no samples to draw")
    given = balanced_weights(values(weights)) if isinstance(weights, str) else check_weights(weights, len(rows))
    return WeightedPicks.of(given, chunks, None, len(rows))


def in_file(order: Order, samples: np.ndarray | None) -> Order:
    """An order of the positions of a subset as an order of its samples' numbers in the file."""
    if samples is None:
        return order
    return replace(order, picks=replace(order.picks, samples=samples))  # type: ignore[type-var]
