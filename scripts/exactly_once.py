"""Count the samples that are missed or repeated when training is interrupted and resumed, in thousands of cases.

    python scripts/exactly_once.py [--json FILE]        # two to four minutes on 2 cores
    python scripts/exactly_once.py --pure               # the order alone

A case is an epoch that is interrupted after some batches and resumed from the saved state. Cases differ in the number
of processes and of workers before and after the interruption, in the sizes of data, chunks, windows and batches, and in
how the last batch is treated. The samples that all processes received before and after are compared with those of an
uninterrupted epoch of one process. That epoch must contain each sample once: with drop_last except for an incomplete
batch, with pad with a few samples twice.

Prints a line for each source of batches: the order alone; ChunkLoaders; a DataLoader with workers; torchdata's
StatefulDataLoader, if it is installed; ChunkLoaders and DataLoaders in processes of torch.distributed (gloo). Each line
counts cases, missed samples, repeated samples, and steps whose samples, over all processes, differ from those of the
uninterrupted epoch. Exits with 1 unless the last three are 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import distributed
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.feed.sampler import load_state, save_state
from h5chunk.plan.order import Order
from h5chunk.store.read.field_readers import reading

TAILS: dict[str, dict[str, bool]] = {"exact": {}, "drop_last": {"drop_last": True}, "pad": {"pad": True}}
WORLDS, WORKERS = (1, 2, 3, 4, 6, 12), (1, 2, 3)
GEOMETRIES = (  # samples, chunk, samples per step, window, interleave
    (1000, 8, 48, 6, 24),
    (997, 10, 60, 4, 12),
    (1203, 16, 24, 8, 6),
    (641, 1, 12, 40, 3),
    (500, 64, 120, 2, 1),
    (49, 7, 48, 3, 24),
)
NUM_SAMPLES, STEP, LANES = 403, 24, 12  # for the real loaders
SEED = 7

Batches = list[np.ndarray]
Steps = list[np.ndarray]  # the samples of each step over all processes, sorted


@dataclass
class Count:
    """The counts over all cases of one kind."""

    cases: int = 0
    samples: int = 0
    missed: int = 0
    repeated: int = 0
    other_steps: int = 0
    seconds: float = 0.0

    def add(self, expected: Steps, found: Steps) -> None:
        """Compare the steps of a case with the expected steps."""
        size = 1 + max((int(step.max()) for step in (*expected, *found) if len(step)), default=0)
        wanted, got = (
            np.bincount(np.concatenate([*steps, []]).astype(int), minlength=size) for steps in (expected, found)
        )
        self.cases += 1
        self.samples += int(got.sum())
        self.missed += int(np.maximum(wanted - got, 0).sum())
        self.repeated += int(np.maximum(got - wanted, 0).sum())
        self.other_steps += sum(
            one is None or two is None or not np.array_equal(one, two) for one, two in zip_longest(expected, found)
        )

    @property
    def is_clean(self) -> bool:
        return self.cases > 0 and not (self.missed or self.repeated or self.other_steps)

    def __str__(self) -> str:
        return (
            f"{self.cases:,} cases, {self.samples:,} samples: {self.missed} missed, {self.repeated} repeated, "
            f"{self.other_steps} other steps; {self.seconds:.0f} s"
        )


def steps_of(ranks: Iterable[Batches]) -> Steps:
    """Return the samples of each step over all processes. Raises ValueError if the numbers of batches differ."""
    return [np.sort(np.concatenate(step)) for step in zip(*ranks, strict=True)]


def check_whole(steps: Steps, num_samples: int, step: int, tail: str) -> None:
    """Raise an error unless an uninterrupted epoch has the right samples."""
    counts = np.bincount(np.concatenate([*steps, []]).astype(int), minlength=num_samples)
    left = num_samples % step
    twice = {"exact": 0, "drop_last": 0, "pad": -left % step if left else 0}[tail]
    missing = left if tail == "drop_last" else 0
    if counts.max() > 2 or (counts == 2).sum() != twice or (counts == 0).sum() != missing:
        raise SystemExit(f"an epoch of {num_samples} samples in steps of {step} ({tail}) misses or repeats samples")


def cuts_of(num_steps: int) -> list[int]:
    """Return the steps at which an epoch is interrupted: the first, the last, and some between."""
    return sorted({0, 1, num_steps // 3, num_steps // 2 + 1, num_steps - 1, num_steps} & set(range(num_steps + 1)))


# --- the order alone -------------------------------------------------------------------------------------------------


def dealt(order: Order, start: int, num_workers: int) -> Iterator[np.ndarray]:
    """Yield the batches of an order as a DataLoader does: one from each worker in turn."""
    workers = [islice(order.batches(start), worker, None, num_workers) for worker in range(num_workers)]
    while workers:
        for worker in workers:
            batch = next(worker, None)
            if batch is None:
                return
            yield batch


def ranks_of(order: Order, world_size: int) -> list[Order]:
    size = order.batch_size // world_size
    return [replace(order, batch_size=size, rank=rank, world_size=world_size) for rank in range(world_size)]


def pure_cases(order: Order, tail: str, count: Count) -> None:
    """Run all combinations of processes and workers, before and after, at some steps of one epoch."""
    whole = steps_of([list(order.batches())])
    check_whole(whole, order.num_samples, order.batch_size, tail)
    cuts = cuts_of(order.num_batches)
    before, after = {}, {}
    for world, workers in product(WORLDS, WORKERS):
        ranks = ranks_of(order, world)
        for cut in cuts:
            before[world, workers, cut] = steps_of([list(islice(dealt(rank, 0, workers), cut)) for rank in ranks])
            state = json.loads(json.dumps(save_state(order, cut, file=1)))
            starts = [load_state(state, rank, file=1) for rank in ranks]
            resumed = [replace(rank, epoch=epoch) for rank, (epoch, _) in zip(ranks, starts, strict=True)]
            parts = [list(dealt(rank, cut, workers)) for rank, (_, cut) in zip(resumed, starts, strict=True)]
            after[world, workers, cut] = steps_of(parts)
    for world, workers, cut in before:
        for other, others in product(WORLDS, WORKERS):
            count.add(whole, before[world, workers, cut] + after[other, others, cut])


def pure() -> Count:
    count, started = Count(), time.perf_counter()
    for number, (size, chunk, step, window, interleave) in enumerate(GEOMETRIES):
        for tail, options in TAILS.items():
            order = Order(
                size,
                chunk,
                step,
                window,
                interleave,
                seed=SEED,
                epoch=number,
                lanes=LANES,
                shuffle=number != 2,
                **options,
            )
            pure_cases(order, tail, count)
    count.seconds = time.perf_counter() - started
    return count


# --- real loaders ----------------------------------------------------------------------------------------------------

Make = Callable[..., Any]  # makes a feed, which has batches, state_dict and load_state_dict


class SampledBatches:
    """A DataLoader and its sampler. Counts the loader's batches for the sampler's state."""

    def __init__(self, path: Path, batch_size: int, num_workers: int, **options: Any) -> None:
        dataset = h5chunk.ChunkDataset(path)
        self.sampler = h5chunk.ChunkSampler(dataset, batch_size, num_workers=2, **options)
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, num_workers=num_workers)
        self.load_state_dict, self.given = self.sampler.load_state_dict, 0

    def __iter__(self) -> Iterator[Any]:
        self.given = self.sampler.state_dict()["batch"]
        for batch in self.loader:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict(self.given)


def stateful_batches(path: Path, batch_size: int, num_workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = h5chunk.ChunkDataset(path)
    sampler = h5chunk.ChunkSampler(dataset, batch_size, num_workers=2, **options)
    return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)


def chunk_batches(path: Path, batch_size: int, how: str, **options: Any) -> h5chunk.ChunkLoader:
    dataset = h5chunk.ChunkDataset(path)
    sampler = h5chunk.ChunkSampler(dataset, batch_size, **options)
    with reading("auto" if how == "resident" else how):
        return h5chunk.ChunkLoader(dataset, batch_sampler=sampler, num_threads=2, resident=how == "resident")


def labels_of(batches: Iterable[Any]) -> Batches:
    """Return the labels, which are the indices of the samples."""
    return [labels.numpy().copy() for _, labels in batches]


def part_of(feed: Any, state: Any, cut: int | None) -> tuple[Batches, Any]:
    """Return at most ``cut`` batches of a feed, starting from a state, and the state after them."""
    if state is not None:
        feed.load_state_dict(state)
    batches = iter(feed)
    found = labels_of(islice(batches, cut))
    saved = feed.state_dict()
    del batches
    if isinstance(feed, h5chunk.ChunkLoader):
        feed.close()
    return found, saved


def part_of_all(make: Make, way: Any, world: int, state: Any, cut: int | None, options: Any) -> tuple[Steps, Any]:
    """Like `part_of`, for all ranks, one after the other in this process."""
    parts = [
        part_of(make(STEP // world, way, rank=rank, world_size=world, **options), state, cut) for rank in range(world)
    ]
    return steps_of([found for found, _ in parts]), parts[0][1]


def real(make: Make, ways: tuple[Any, ...], worlds: tuple[int, ...], cuts: tuple[int, ...]) -> Count:
    """Interrupt and resume epochs for all pairs of ``ways``, such as numbers of workers, and of ``worlds``."""
    count, started = Count(), time.perf_counter()
    for tail, options in TAILS.items():
        options = {**options, "seed": SEED, "window_chunks": 4, "lanes": LANES}
        whole, _ = part_of_all(make, ways[0], 1, None, None, options)
        check_whole(whole, NUM_SAMPLES, STEP, tail)
        rests: dict[Any, Steps] = {}  # of equal states once
        for way, world, cut in product(ways, worlds, cuts):
            seen, state = part_of_all(make, way, world, None, min(cut, len(whole)), options)
            for other in product(ways, worlds):
                key = (*other, repr(state))
                if key not in rests:
                    rests[key] = part_of_all(make, *other, state, None, options)[0]
                count.add(whole, seen + rests[key])
    count.seconds = time.perf_counter() - started
    return count


# --- processes of torch.distributed ----------------------------------------------------------------------------------

GROUPS, GROUP_CUTS = (1, 2, 3), (0, 5, 16, 17)


def group_feed(path: Path, kind: str) -> Any:
    """Make a feed that gets its rank and world size from torch.distributed."""
    batch_size = STEP // distributed.get_world_size()
    options = {"seed": SEED, "window_chunks": 4, "lanes": LANES}
    return (
        chunk_batches(path, batch_size, "direct", **options)
        if kind == "ChunkLoader"
        else SampledBatches(path, batch_size, 1, **options)
    )


def run_rank(rank: int, world: int, path: Path, folder: Path, kind: str, states: list[Any]) -> None:
    """Return the batches of this rank: after each state, or up to each cut if there are no states yet."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of workers, as it is where nothing was spawned
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    wanted = [(state, None) for state in states] or [(None, cut) for cut in GROUP_CUTS]
    parts = []
    for state, cut in wanted:
        found, saved = part_of(group_feed(path, kind), state, cut)
        parts.append(([batch.tolist() for batch in found], saved))
        distributed.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(parts))
    distributed.barrier()
    distributed.destroy_process_group()


def run_group(world: int, path: Path, kind: str, states: list[Any]) -> list[tuple[Steps, Any]]:
    """Return the batches of all ranks of a group."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        args = (world, path, Path(folder), kind, states)
        processes = [context.Process(target=run_rank, args=(rank, *args)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a process of {world} failed")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    return [
        (steps_of([[np.array(batch, int) for batch in found] for found, _ in parts]), parts[0][1])
        for parts in zip(*ranks, strict=True)
    ]


def groups(path: Path) -> Count:
    count, started = Count(), time.perf_counter()
    for kind in ("ChunkLoader", "DataLoader"):
        before = {world: run_group(world, path, kind, []) for world in GROUPS}
        states = [state for world in GROUPS for _, state in before[world]]
        after = {world: run_group(world, path, kind, states) for world in GROUPS}
        whole = after[1][0][0]  # from the first state on, which is that of an epoch's beginning
        check_whole(whole, NUM_SAMPLES, STEP, "exact")
        for world in GROUPS:
            seen = [steps for first in GROUPS for steps, _ in before[first]]
            for one, (two, _) in zip(seen, after[world], strict=True):
                count.add(whole, one + two)
    count.seconds = time.perf_counter() - started
    return count


# ---------------------------------------------------------------------------------------------------------------------


def make_data(path: Path) -> None:
    """Make a file of images whose labels are their indices."""
    images = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 3, 8, 8), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(5, 3, 8, 8))
        file.create_dataset("labels", data=np.arange(NUM_SAMPLES), chunks=(64,))


def real_counts(path: Path) -> Iterator[tuple[str, Count]]:
    def make(kind: Make) -> Make:
        return lambda *args, **options: kind(path, *args, **options)

    yield "ChunkLoader", real(make(chunk_batches), ("direct", "h5py", "resident"), WORLDS, (0, 5, 16, 17))
    yield "DataLoader", real(make(SampledBatches), (0, 1, 2), (1, 2, 3), (0, 7, 17))
    try:
        import torchdata.stateful_dataloader  # noqa: F401
    except ImportError:
        print("torchdata is not installed: StatefulDataLoader is left out")
    else:  # its states are of a number of workers
        for workers in (0, 2):
            name = f"StatefulDataLoader, {workers} workers"
            yield name, real(make(stateful_batches), (workers,), (1, 2, 3), (0, 7, 16))
    yield "gloo", groups(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pure", action="store_true", help="check only the order, without loaders")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's about few cores, and its own deprecations
    counts = {"order": pure()}
    print(f"order: {counts['order']}", flush=True)
    if not args.pure:
        with tempfile.TemporaryDirectory() as folder:
            make_data(Path(folder) / "data.h5")
            for name, count in real_counts(Path(folder) / "data.h5"):
                counts[name] = count
                print(f"{name}: {count}", flush=True)
    if args.json:
        result: dict[str, Any] = {name: asdict(count) for name, count in counts.items()}
        result["versions"] = {"h5chunk": h5chunk.__version__, "torch": torch.__version__, "h5py": h5py.__version__}
        result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        result["seed"] = SEED
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(not all(count.is_clean for count in counts.values()))


if __name__ == "__main__":
    main()
