"""Measure how fast batches by group are planned, and for how many windows each chunk is read.

    python scripts/bench_groups.py

For each case it prints samples/s of processor time, the windows that read from a chunk on average, and the samples that
an epoch leaves out. Files have chunks of 100 samples, and windows of 100 chunks. "Rates" are orders in which all groups
advance at exactly their shares (``slack=0``), instead of following the chunks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from h5chunk.plan.groups import GroupOrder, GroupSelection

N, CHUNK, WINDOW = 5_000_000, 100, 100
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("stratified, 100 groups", 100, {"batch_size": 256}),
    ("16 of 1,000 groups x 16", 1000, {"batch_size": 256, "groups_per_batch": 16}),
    ("1 of 1,000 groups x 256", 1000, {"batch_size": 256, "groups_per_batch": 1}),
    ("1 of 1,000 groups x 64, with controls", 1000, {"batch_size": 128, "groups_per_batch": 1, "controls": 0}),
    ("64 of 100,000 groups x 4", 100_000, {"batch_size": 256, "groups_per_batch": 64}),
]


def main() -> None:
    """Print a line for each case."""
    for name, num_groups, options in CASES:
        for is_sorted in (False, True):
            codes = np.random.default_rng(0).integers(0, num_groups, N)
            codes = np.sort(codes) if is_sorted else codes
            if "controls" in options:
                options = {**options, "controls": np.zeros(num_groups, np.int64)}
            selection = GroupSelection.of(codes, np.arange(N) // CHUNK, names=[*range(num_groups)], **options)
            rates = f", rates {_order(replace(selection, slack=0.0)).chunk_reads():.2f}" if selection.slack else ""
            order, started = _order(selection), time.process_time()
            num_samples = sum(len(window.samples) for window in order.windows())
            rate = num_samples / (time.process_time() - started)
            print(
                f"{name}, {'sorted' if is_sorted else 'shuffled'}: {rate:,.0f} samples/s, {order.chunk_reads():.2f} "
                f"windows for a chunk{rates}, {selection.num_left_out:,} samples left out",
                flush=True,
            )


def _order(selection: GroupSelection) -> GroupOrder:
    batch_size = selection.batch_sets * selection.samples_of_set
    return GroupOrder(len(selection), CHUNK, batch_size, WINDOW, interleave=1, selection=selection)


if __name__ == "__main__":
    main()
