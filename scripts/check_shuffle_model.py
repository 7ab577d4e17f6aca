"""Compare the formula for the effective batch with a simulation of the real order.

    python scripts/check_shuffle_model.py [--batches 30000] [--json OUT]

Draws epochs of `h5chunk.plan.order.Order` until each case has ``--batches`` batches. The cases are data sorted by
group, half sorted (half of the samples moved at random), in runs of few groups or of one group each ("patients"), and
shuffled (10 groups; one rare group; few samples per group), for several sizes of windows and batches, with one or 24
interleaved windows, with whole chunks, a short last chunk and chunks that windows cut. Prints for each case the
clustering h_y, deff, the effective batch by formula and by simulation, their deviation, and the simulation's standard
error; then the largest deviations, and the number of cases in which shuffled data was judged to mix badly, or sorted
data well.

The simulated effective batch is the variance of the group shares of one independent sample over that of the real
batches; the factor (M - 1) / (M - B), for drawing without replacement, makes the formula comparable. Exits with 1 if
the effective batch of sorted data is off by more than 5% or a case is judged wrongly. Takes two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.plan.order import Order
from h5chunk.tools.model.clustering import find_clustering
from h5chunk.tools.model.mixing import design_effect, effective_batch

NUM_GROUPS = 10
RUN_SAMPLES = 24  # samples per run in "runs" (of 10 groups) and "patients" (one group per run)
SHUFFLED = ("shuffled", "rare", "few each")  # 10 groups; 2 groups, one with 1 sample in 1000; 3 samples per group
SIZES = ((65_536, 64), (65_500, 64), (65_536, 50))  # samples, chunk: whole chunks, short last chunk, cut chunks
WINDOWS = (8, 32, 128)
BATCHES = (32, 256)
INTERLEAVES = (1, 24)
ALLOWED = 0.05
ENOUGH = 0.95  # effective batch of well-shuffled data, as a fraction of the batch


def make_groups(kind: str, num_samples: int) -> np.ndarray:
    """Return the group of each sample, (num_samples,) int64."""
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, NUM_GROUPS, num_samples))
    if kind == "shuffled":
        rng.shuffle(groups)
    elif kind == "half-sorted":
        moved = np.sort(rng.choice(num_samples, num_samples // 2, replace=False))
        groups[moved] = rng.permutation(groups[moved])
    elif kind in ("runs", "patients"):
        runs = num_samples // RUN_SAMPLES + 1
        groups = np.repeat(rng.integers(0, NUM_GROUPS, runs) if kind == "runs" else np.arange(runs), RUN_SAMPLES)
    elif kind == "rare":
        groups = rng.permutation((np.arange(num_samples) < num_samples // 1000).astype(np.int64))
    elif kind == "few each":
        groups = rng.permutation(np.arange(num_samples) // 3)
    return groups[:num_samples]


def simulate(groups: np.ndarray, order: Order, num_batches: int) -> tuple[float, float]:
    """Return the effective batch over some epochs, and its relative standard error over independent epochs."""
    shares = np.bincount(groups) / len(groups)
    epochs = []
    for epoch in range(max(8, -(-num_batches // order.num_batches))):
        rows = np.sort(groups[np.stack(list(replace(order, epoch=epoch).batches()))], axis=1)
        ends = np.flatnonzero(np.append(np.diff(rows, axis=1) != 0, np.ones((len(rows), 1), bool), axis=1))
        alike = (np.diff(ends, prepend=-1) ** 2).sum() / rows.size / order.batch_size  # mean sum of squared shares
        epochs.append(alike - 2 * shares[rows].mean() + (shares**2).sum())
    variance = np.mean(epochs)
    error = np.std(epochs, ddof=1) / np.sqrt(len(epochs)) / variance
    return float((1 - (shares**2).sum()) / variance), float(error)


def check(kind: str, order: Order, num_batches: int) -> dict[str, Any]:
    """Compare the formula with the simulation in one case."""
    groups = make_groups(kind, order.num_samples)
    clustering = find_clustering(groups, order.chunk_samples)
    deff = design_effect(clustering, order)
    independent = (order.num_samples - 1) / (order.num_samples - order.batch_size)
    predicted = order.batch_size / deff * independent
    simulated, error = simulate(groups, order, num_batches)
    return {
        "data": kind,
        **{k: getattr(order, k) for k in ("num_samples", "chunk_samples", "window_chunks", "batch_size", "interleave")},
        "h_y": clustering.h_y,
        "deff": deff,
        "mixes": effective_batch(clustering, order) >= ENOUGH * order.batch_size,
        "predicted": predicted,
        "simulated": simulated,
        "deviation": predicted / simulated - 1,
        "standard_error": error,
    }


def print_case(case: dict[str, Any]) -> None:
    print(
        f"{case['data']:12}{case['num_samples']:7}{case['chunk_samples']:4}{case['window_chunks']:7}"
        f"{case['interleave']:4}{case['batch_size']:5} {case['h_y']:6.2f} {case['deff']:7.3f} {case['predicted']:7.1f} "
        f"{case['simulated']:7.1f} {case['deviation']:+7.1%} {case['standard_error']:6.1%}  "
        f"{'well' if case['mixes'] else 'badly'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=30_000, help="simulated batches per case, at least 8 epochs")
    parser.add_argument("--json", type=Path, help="write the cases to this file")
    options = parser.parse_args()
    print("data        samples   b window alt batch   h_y    deff  B_eff simulated    off  error  mixes")
    cases = []
    for kind in ("sorted", "half-sorted", "runs", "patients", *SHUFFLED):
        for (samples, chunk), window, interleave, batch in itertools.product(SIZES, WINDOWS, INTERLEAVES, BATCHES):
            cases.append(check(kind, Order(samples, chunk, batch, window, interleave, drop_last=True), options.batches))
            print_case(cases[-1])
    worst = {
        kind: max(abs(c["deviation"]) for c in cases if c["data"] == kind)
        for kind in dict.fromkeys(c["data"] for c in cases)
    }
    for kind, deviation in worst.items():
        print(f"{kind}: largest deviation {deviation:.1%}")
    judged = [c for c in cases if c["data"] in ("sorted", *SHUFFLED)]
    wrong = [c for c in judged if (c["data"] == "sorted") == c["mixes"]]
    print(f"shuffled data said to mix badly, or sorted data well: {len(wrong)} of {len(judged)}")
    if options.json:
        about = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "seed": 0}
        options.json.write_text(json.dumps({**about, "batches": options.batches, "cases": cases}, indent=1) + "\n")
    return 1 if wrong or worst["sorted"] > ALLOWED else 0


if __name__ == "__main__":
    raise SystemExit(main())
