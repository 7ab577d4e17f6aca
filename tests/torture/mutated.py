"""Open damaged copies of good files by every tool and reader, each in a child process with limits.

    cd tests
    python -m torture.mutated 20000 --sealed 1 --jobs 16       # some 20 minutes; Linux, pip install ".[test]"
    python -m torture.mutated 1 --first 1234 --seed 7          # one of them again; add --keep FILE for its bytes

What must not happen: a crash, a hang, memory out of proportion, an error that is not an `H5ChunkError`, and wrong
values that were read although the file has checksums and they were asked for. ``--sealed`` is the share of the copies
in which HDF5's own checksums of its metadata are made to fit again, as somebody who means harm would do: without that
HDF5 refuses most damage of newer files at the first look. Exits with 1 if anything happened that must not.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.children import Outcome, in_children
from support.good_files import PLUGINS, GoodFile, make_good
from support.mutations import Mutated, mutated, targets_of

import h5chunk
from h5chunk.errors import H5ChunkError, WorkerError
from h5chunk.store.hdf5 import child
from h5chunk.store.read.field_readers import reading
from h5chunk.tools.repack.repack import repack

PEAK_BYTES = 400 << 20
MAX_SAMPLES = 128  # that are read, should a damaged file claim more than it had
BATCH = 7
NOT_OURS = "not our errors"
NO_MEMORY = re.compile("nable to allocate|memory allocation failed|can't allocate|MemoryError|more memory than")
MUST_NOT = ("crashes", "hangs", NOT_OURS, "over 400 MiB", "wrong though checked")


@dataclass
class Findings:
    """How often things happened, and what must not have."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add those of other cases."""
        self.cases += other.cases
        self.counts.update(other.counts)
        self.bad += other.bad
        self.notes += other.notes

    def must_not(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.bad.append(f"{kind}: {what}")


class Torture:
    """Mutations of some good files; number i is the same whatever the count."""

    def __init__(self, folder: Path, seed: int, sealed: float, names: Sequence[str] = ()) -> None:
        self._folder, self._seed, self._sealed = folder, seed, sealed
        self._goods = make_good(folder, names)
        self._targets = [targets_of(good) for good in self._goods]

    def make(self, number: int) -> Mutated:
        """The damaged file of a number."""
        return mutated(number, self._seed, self._goods, self._targets, self._sealed)

    def run(self, numbers: range) -> Findings:
        """Open the files of some numbers."""
        torch.set_num_threads(1)
        child.LOOP_S, child.LOOK_S = 1.0, 0.2  # not 60 s, after which a loop of HDF5 in a child becomes an error
        found, step = Findings(), mmap.mmap(-1, 64)  # what the child does, for its parent
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder) / "mutated.h5"

            def work(number: int) -> dict[str, str]:
                path.write_bytes(self.make(number).data)
                return look(path, self._goods[number % len(self._goods)], step)

            for number, outcome in in_children(work, numbers, timeout_s=60.0):
                self._judge(found, number, outcome, step[:].rstrip(b"\0").decode())
        return found

    def _judge(self, found: Findings, number: int, outcome: Outcome, step: str) -> None:
        good, made = self._goods[number % len(self._goods)], self.make(number)
        what = f"mutation {number} of seed {self._seed}, {good.name!r} ({made.what})"
        if outcome.ended:
            what += f" ({step})"
        if good.name in PLUGINS and outcome.ended and step.startswith("h5py"):
            found.cases += 1
            found.counts["crashes in filters of hdf5plugin, which h5py's reader leaves to HDF5"] += 1
            found.notes.append(f"{what}: {outcome.ended}")
            return
        before = len(found.bad)
        judge(found, what, good.has_checksums and not made.sealed, outcome)
        for each in found.bad[before:]:
            print(f"BAD: {each}", flush=True)


def look(path: Path, good: GoodFile, step: mmap.mmap) -> dict[str, str]:
    """What each part of h5chunk says of a file: "same", "other", "whole", "damaged", or "error: message"."""
    steps: dict[str, Callable[[], str]] = {
        "info": lambda: str(h5chunk.info(path)) and "read",
        "verify": lambda: "whole" if h5chunk.verify(path).ok else "damaged",
        **{name: partial(_read, read, path, good) for name, read in READERS.items()},
        "repack": lambda: _repack(path),
    }
    said = {}
    for name, work in steps.items():
        step[:] = name.encode().ljust(len(step), b"\0")
        said[name] = _said(work)
    return said


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except WorkerError as error:  # with the traceback of a child
        return f"{NOT_OURS}: {error}"
    except H5ChunkError as error:
        return f"error: {error}"
    except Exception:
        return NOT_OURS + ": " + " < ".join(line.strip() for line in traceback.format_exc().splitlines()[:-9:-1])


def through_hdf5(path: Path, **options: Any) -> list[np.ndarray]:
    """All samples by a ChunkDataset."""
    dataset = h5chunk.ChunkDataset(path, **options)
    return [np.asarray(field) for field in dataset[list(range(min(len(dataset), MAX_SAMPLES)))]]


def by_ranges(path: Path, **options: Any) -> list[np.ndarray]:
    """All samples by a ChunkLoader."""
    dataset = h5chunk.ChunkDataset(path, **options)
    with reading("direct"):
        loader = h5chunk.ChunkLoader(dataset, BATCH, shuffle=False, num_threads=2)
    with loader:
        batches = [batch for batch, _ in zip(loader, range(MAX_SAMPLES // BATCH), strict=False)]
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


READERS: dict[str, Callable[[Path], list[np.ndarray]]] = {
    "h5py": through_hdf5,
    "direct": by_ranges,
    "h5py, checked": partial(through_hdf5, checksums="always"),
    "direct, checked": partial(by_ranges, checksums="always"),
}


def _read(read: Callable[[Path], list[np.ndarray]], path: Path, good: GoodFile) -> str:
    found = read(path)
    same = len(found) == len(good.expected) and all(
        one.dtype == two.dtype and np.array_equal(one, two) for one, two in zip(found, good.expected, strict=True)
    )
    return "same" if same else "other"


def _repack(path: Path) -> str:
    output = path.with_name("repacked.h5")
    output.unlink(missing_ok=True)
    repack(path, output)
    return "read"


def judge(found: Findings, what: str, checksums_tell: bool, outcome: Outcome) -> None:
    """Count what happened, and note what must not.

    ``checksums_tell``: whether the file has checksums, and the metadata by which they are found are beyond doubt.
    """
    found.cases += 1
    if outcome.ended == "raised":
        found.must_not(NOT_OURS, f"{what}: {outcome.value}")
        return
    if outcome.ended:
        kind = "hangs" if outcome.ended in ("timeout", "SIGXCPU") else "crashes"
        found.must_not(kind, f"{what}: {outcome.ended}")
        return
    said: dict[str, str] = outcome.value
    for name, text in said.items():
        if text.startswith(NOT_OURS):
            found.must_not(NOT_OURS, f"{what}: {name}: {text}")
    if NO_MEMORY.search(" ".join(said.values())):
        found.counts["asked for more than 2 GiB, in vain"] += 1
    if outcome.peak_bytes > PEAK_BYTES:
        found.must_not("over 400 MiB", f"{what}: {outcome.peak_bytes >> 20} MiB: {said}")
    others = [name for name, word in said.items() if word == "other"]
    if checksums_tell and any(name.endswith("checked") for name in others):
        found.must_not("wrong though checked", f"{what}: {said}")
    if others:
        verdict = said["verify"].split(":")[0]
        found.counts[f"wrong values, {'with' if checksums_tell else 'without'} checksums, verify says {verdict}"] += 1
        if checksums_tell and said["verify"] == "whole":
            found.must_not("wrong and verify says whole", f"{what}: {said}")
    kinds = Counter(word.split(":")[0] for word in said.values())
    read = "read wrong" if others else "read as if whole"
    found.counts["refused by all" if kinds["error"] == len(said) else read] += 1


def run(torture: Torture, numbers: range, jobs: int = 1) -> Findings:
    """Open the files of some numbers in several processes."""
    if jobs == 1:
        return torture.run(numbers)
    found = Findings()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap_unordered(torture.run, [numbers[job :: 4 * jobs] for job in range(4 * jobs)]):
            found.add(part)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sealed", type=float, default=0.3, help="share with fitting checksums of metadata")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep", type=Path, help="only write the first file there")
    args = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("this forks, limits and counts as only Linux can")
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="h5chunk-mutated-") as folder:
        torture = Torture(Path(folder), args.seed, args.sealed)
        if args.keep:
            args.keep.write_bytes(torture.make(args.first).data)
            return
        found = run(torture, range(args.first, args.first + args.count), args.jobs)
    print(*found.notes, sep="\n")
    counts = {name: found.counts[name] for name in (*MUST_NOT, *sorted(found.counts))}
    print(f"{found.cases:,} mutated files, seed {args.seed}, {args.sealed:.0%} sealed, {len(found.bad)} bad;", end=" ")
    print("; ".join(f"{name}: {count:,}" for name, count in counts.items()), end="; ")
    print(f"{time.perf_counter() - started:.0f} s, {os.cpu_count()} cores")
    sys.exit(bool(found.bad))


if __name__ == "__main__":
    main()
