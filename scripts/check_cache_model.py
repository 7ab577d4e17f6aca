"""Compare the model of HDF5's chunk cache (`hdf5_cache.py`) with HDF5 itself: every access, in random configurations.

    python scripts/check_cache_model.py [--configurations 500] [--accesses 500000] [--seed 0] [--json FILE]

Makes small files in memory, of 1 to 4 dimensions, with and without gzip, with chunks that overlap the edge, and reads
random samples and ranges of samples from them, through caches of random size, slots and w0 (sometimes the defaults of
HDF5 1.14 and 2). A Python file object below HDF5 counts every read. For each chunk of each range, in the order of
HDF5's visits, the model must predict whether the chunk is read, how many of its bytes, and in how many reads.

Prints the versions; the number of configurations, accesses (hits, misses, bypasses) and mismatches (the first few with
their configurations); and how many accesses per second the model computes on one core: a million accesses to single
samples in random order, one in three of which hits, with w0 = 0.75. Exits with 1 if there is any mismatch. Takes a
minute or two (2 cores, h5py 3.16, HDF5 2.0.0).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hdf5_cache import BYPASS, HDF5_1_14, HDF5_2, HIT, ChunkCache, CountingFile, range_accesses, sample_accesses

from h5chunk.plan.cache import CacheSettings, ChunkGrid

W0 = (0.0, 0.3, 0.75, 0.99)
TIMED = 1_000_000

Reads = list[tuple[int, int, int]]  # (chunk, bytes, number of reads) for the chunks read for one range
Range = tuple[int, int]  # start and stop of a range of samples


@dataclass
class Case:
    """A dataset, a cache, and the ranges of samples to read."""

    grid: ChunkGrid
    settings: CacheSettings
    ranges: list[Range]
    libver: str = "earliest"


@dataclass
class Comparison:
    """The counts of accesses by outcome (hit, miss, bypass), and the mismatches."""

    outcomes: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    mismatches: list[str] = field(default_factory=list)


def make_file(case: Case) -> bytes:
    """Return the bytes of a file in which every chunk is written."""
    grid, content = case.grid, io.BytesIO()
    data = np.random.default_rng(0).integers(0, 9, grid.shape, f"u{grid.itemsize}")
    options = {"compression": "gzip", "compression_opts": 1} if grid.filtered else {}
    if any(chunk > size for size, chunk in zip(grid.shape, grid.chunks, strict=True)):
        options["maxshape"] = (None,) * len(grid.shape)  # without it, HDF5 refuses chunks larger than the dataset
    with h5py.File(content, "w", libver=case.libver) as file:
        file.create_dataset("data", data=data, chunks=grid.chunks, **options)
    return content.getvalue()


def open_dataset(file: h5py.File, settings: CacheSettings) -> h5py.Dataset:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(settings.nslots, settings.nbytes, settings.w0)
    return h5py.Dataset(h5py.h5d.open(file.id, b"data", access))


def real_reads(case: Case) -> tuple[list[Reads], np.ndarray]:
    """Return HDF5's reads for each range, in order, and the stored bytes of each chunk."""
    counting, found = CountingFile(io.BytesIO(make_file(case))), []
    with h5py.File(counting, "r") as file:
        dataset = open_dataset(file, case.settings)
        table: list[tuple[int, int, int]] = []
        counts = [-(-size // chunk) for size, chunk in zip(case.grid.shape, case.grid.chunks, strict=True)]

        def note(chunk: Any) -> None:
            scaled = [at // size for at, size in zip(chunk.chunk_offset, case.grid.chunks, strict=True)]
            table.append((chunk.byte_offset, chunk.size, int(np.ravel_multi_index(scaled, counts))))

        dataset.id.chunk_iter(note)
        offsets, sizes, numbers = np.array(sorted(table)).T
        for start, stop in case.ranges:
            counting.reads.clear()
            dataset[start:stop]
            found.append(_by_chunk(counting.reads, offsets, sizes, numbers))
    stored = np.zeros(len(numbers), np.int64)
    stored[numbers] = sizes
    return found, stored


def _by_chunk(reads: list[tuple[int, int]], offsets: np.ndarray, sizes: np.ndarray, numbers: np.ndarray) -> Reads:
    """Merge consecutive reads of one chunk. Reads outside of all chunks are reads of the index, and are ignored."""
    together: Reads = []
    for offset, size in reads:
        at = int(np.searchsorted(offsets, offset, "right")) - 1
        if at < 0 or offset >= offsets[at] + sizes[at]:
            continue
        chunk, before = int(numbers[at]), (0, 0)
        if together and together[-1][0] == chunk:
            before = together.pop()[1:]
        together.append((chunk, before[0] + size, before[1] + 1))
    return together


def modelled_reads(case: Case, stored: np.ndarray) -> tuple[list[Reads], np.ndarray]:
    """Return the reads that the model predicts, and its accesses by outcome.

    The accesses are passed to the model in two parts.
    """
    cache, half = ChunkCache(case.grid, case.settings), len(case.ranges) // 2
    found: list[Reads] = []
    outcomes = np.zeros(3, np.int64)
    for part in (case.ranges[:half], case.ranges[half:]):
        accesses = range_accesses(case.grid, *np.array(part, np.int64).reshape(-1, 2).T)
        replay = cache.access(accesses)
        outcomes += [replay.hits, replay.misses, replay.bypasses]
        straight = (replay.outcomes == BYPASS) & (not case.grid.filtered)
        sizes = np.where(straight, accesses.bytes_each, stored[accesses.chunks])
        num_reads = np.where(straight, accesses.runs, 1)
        rows = zip(accesses.chunks.tolist(), sizes.tolist(), num_reads.tolist(), replay.outcomes.tolist(), strict=True)
        for start, stop in part:
            of_range = itertools.islice(rows, len(range_accesses(case.grid, [start], [stop])))
            found.append([(chunk, size, count) for chunk, size, count, outcome in of_range if outcome != HIT])
    return found, outcomes


def compare(case: Case) -> Comparison:
    """Compare the model with HDF5 on one configuration."""
    real, stored = real_reads(case)
    modelled, outcomes = modelled_reads(case, stored)
    wrong = [
        f"{case.grid} {case.settings}: samples {start} to {stop}: HDF5 reads {real[i]}, the model {modelled[i]}"
        for i, (start, stop) in enumerate(case.ranges)
        if real[i] != modelled[i]
    ]
    return Comparison(outcomes, wrong)


def random_case(rng: np.random.Generator, num_accesses: int) -> Case:
    """Draw a configuration, and ranges of samples with about ``num_accesses`` accesses."""
    grid, settings = random_default_cache(rng) if rng.random() < 0.04 else random_cache(rng)
    libver = ("earliest", "v110")[int(rng.integers(2))]  # these have different chunk indices
    case, found = Case(grid, settings, [], libver), 0
    for start, stop in random_ranges(rng, grid.shape[0]):
        case.ranges.append((start, stop))
        found += len(range_accesses(grid, [start], [stop]))
        if found >= num_accesses:
            break
    return case


def random_default_cache(rng: np.random.Generator) -> tuple[ChunkGrid, CacheSettings]:
    """Draw a default cache that holds 1 to 8 chunks of two samples, and a larger dataset."""
    settings, room = (HDF5_1_14, HDF5_2)[int(rng.integers(2))], int(rng.integers(1, 9))
    width = settings.nbytes // room // 2
    return ChunkGrid((2 * room + 5, width), (2, width), 1, rng.random() < 0.5), settings


def random_cache(rng: np.random.Generator) -> tuple[ChunkGrid, CacheSettings]:
    """Draw small chunks, and a cache that holds 0 to 41 of them."""
    rank = int(rng.integers(1, 5))
    chunks = rng.integers(1, (65, 13, 7, 5)[rank - 1], rank)
    counts = rng.integers(1, (65, 11, 6, 5)[rank - 1], rank)
    shape = np.maximum(1, chunks * counts - rng.integers(0, chunks))
    itemsize, filtered = int(2 ** rng.integers(0, 4)), rng.random() < 0.5
    grid = ChunkGrid(tuple(shape.tolist()), tuple(chunks.tolist()), itemsize, filtered)
    room = int(rng.integers(1, min(grid.num_chunks, 40) + 2)) if rng.random() < 0.9 else 0
    nbytes = room * grid.chunk_bytes + int(rng.integers(0, grid.chunk_bytes))
    nslots = (1, 7, int(rng.integers(1, 40)), 521, grid.num_slots)[int(rng.integers(5))]
    return grid, CacheSettings(nslots, nbytes, W0[int(rng.integers(4))])


def random_ranges(rng: np.random.Generator, num_samples: int) -> Iterator[Range]:
    """Yield ranges endlessly; some are repeated, and some are adjacent to the previous range."""
    singly, near = rng.random() < 0.5, 0
    while True:
        near = int(rng.integers(num_samples)) if rng.random() < 0.2 else (near + 1) % num_samples
        yield near, near + 1 if singly else min(num_samples, near + int(rng.integers(1, 9)))


def modelled_per_second() -> float:
    """Return the lower rate of two epochs of random single samples, with a cache for a third of the chunks."""
    grid = ChunkGrid((TIMED, 3072), (256, 3072), 1)
    rows = np.random.default_rng(0).permutation(TIMED)
    cache = ChunkCache(grid, CacheSettings(grid.num_slots, grid.num_chunks // 3 * grid.chunk_bytes, 0.75))
    taken = []
    for _ in range(2):
        started = time.process_time()
        cache.access(sample_accesses(grid, rows))
        taken.append(time.process_time() - started)
    return TIMED / max(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=500)
    parser.add_argument("--accesses", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng, total, started = np.random.default_rng(args.seed), Comparison(), time.perf_counter()
    for _ in range(args.configurations):
        one = compare(random_case(rng, -(-args.accesses // args.configurations)))
        total.outcomes += one.outcomes
        total.mismatches += one.mismatches
    hits, misses, bypasses = total.outcomes.tolist()
    result = {
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "seed": args.seed,
        "configurations": args.configurations,
        "accesses": hits + misses + bypasses,
        "hits": hits,
        "misses": misses,
        "bypasses": bypasses,
        "mismatches": len(total.mismatches),
        "seconds": round(time.perf_counter() - started, 1),
        "modelled_per_s": round(modelled_per_second()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    for name, value in result.items():
        print(f"{name:>15s}  {value:,}" if isinstance(value, int) else f"{name:>15s}  {value}")
    for mismatch in total.mismatches[:5]:
        print(mismatch)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(total.mismatches))


if __name__ == "__main__":
    main()
