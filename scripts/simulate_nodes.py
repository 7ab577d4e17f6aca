"""Simulate the order of an epoch on many nodes, without data: the cost of planning it, and the effect of locality.

    python scripts/simulate_nodes.py [--samples 100000000] [--ranks 64] [--sample-bytes 100000] [--json FILE]

Scale: some ranks plan their first windows of two epochs, with ``--ranks-a-node`` ranks per node and chunks as `h5chunk
convert` chooses them. Prints the seconds until the first window is planned, the memory of the plan and of the
windows, the chunks read per window, and, at ``--rate`` samples/s on each rank, requests/s and bytes/s of all ranks. Two
ranks must not read the same chunk, and a chunk must be on the same node in both epochs; otherwise the script fails.

Mixing: the effective batch (`scripts/check_shuffle_model.py`) of all ranks together, in sorted data, with and without
locality, over epochs of one seed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from check_shuffle_model import make_groups

from h5chunk.plan.layout import plan_layout
from h5chunk.plan.order import Order, choose_interleave

WINDOWS = 24  # number of windows that a rank plans in each epoch
MIXED = Order(65_536, 64, 256, 4, lanes=8)


def make_order(args: argparse.Namespace) -> Order:
    layout = plan_layout(args.samples, args.sample_bytes)
    chunk_bytes = layout.chunk_samples * args.sample_bytes
    return Order(
        args.samples,
        layout.chunk_samples,
        args.batch_size,
        layout.window_chunks,
        interleave=choose_interleave(layout.window_chunks * chunk_bytes),
        lanes=args.ranks,
        world_size=args.ranks,
        nodes=args.ranks // args.ranks_a_node,
    )


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """Plan the first windows of two ranks on each of two nodes."""
    order, before = make_order(args), peak_bytes()
    far = args.ranks // 2 // args.ranks_a_node * args.ranks_a_node
    seconds, chunks = [], dict[int, tuple[int, int]]()  # rank and node of each chunk
    num_chunks = []
    for epoch in range(2):
        readers = dict[int, int]()
        for rank in (0, 1, far, far + 1):
            started = time.perf_counter()
            windows = replace(order, rank=rank, epoch=epoch).windows()
            first = next(windows)
            seconds.append(time.perf_counter() - started)
            for window in (first, *islice(windows, WINDOWS - 1)):
                found = np.unique(window.rows // order.chunk_samples).tolist()
                num_chunks.append(len(found))
                for chunk in found:
                    if readers.setdefault(chunk, rank) != rank:
                        raise SystemExit(f"chunk {chunk} is read by ranks {readers[chunk]} and {rank}")
                    node = rank // args.ranks_a_node
                    if chunks.setdefault(chunk, (rank, node))[1] != node:
                        raise SystemExit(f"chunk {chunk} moved from node {chunks[chunk][1]} to {node}")
    window_samples = order.window_batches * order.lane_batch
    requests = args.ranks * args.rate / window_samples * float(np.mean(num_chunks))
    return {
        "chunks": order.num_chunks,
        "chunk_samples": order.chunk_samples,
        "batches": order.num_batches,
        "first_window_s": max(seconds),
        "plan_bytes": max(0, peak_bytes() - before),
        "windows_bytes": (order.interleave + 1) * window_samples * args.sample_bytes,
        "chunks_per_window": float(np.mean(num_chunks)),
        "requests_per_s": requests,
        "bytes_per_s": requests * order.chunk_samples * args.sample_bytes,
    }


def effective_batch(groups: np.ndarray, order: Order, epochs: int) -> float:
    """Return the size of a fully shuffled batch whose group shares vary as much as those of all ranks together."""
    shares, found = np.bincount(groups) / len(groups), []
    for epoch in range(epochs):
        for batch in replace(order, epoch=epoch).batches():
            counted = np.bincount(groups[batch], minlength=len(shares)) / len(batch)
            found.append(float(((counted - shares) ** 2).sum()))
    return float((1 - (shares**2).sum()) / np.mean(found))


def mixing(epochs: int) -> dict[str, float]:
    """Return the effective batch of 256 samples in sorted data, in 8 lanes on 1 to 8 nodes, over three seeds."""
    groups = make_groups("sorted", MIXED.num_samples)
    found = {}
    for nodes in (1, 2, 4, 8):
        orders = (replace(MIXED, nodes=nodes, seed=seed) for seed in range(3))
        found[f"{nodes} nodes"] = float(np.mean([effective_batch(groups, order, epochs) for order in orders]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--ranks-a-node", type=int, default=8)
    parser.add_argument("--sample-bytes", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=256, help="of each rank")
    parser.add_argument("--rate", type=float, default=2500, help="samples/s of each rank")
    parser.add_argument("--epochs", type=int, default=4, help="for the effective batch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"scale": scale(args), "effective_batch_of_256": mixing(args.epochs)}
    for name, each in result.items():
        print(name)
        for label, value in each.items():
            print(f"  {label}: {value:,.3f}" if isinstance(value, float) else f"  {label}: {value:,}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
