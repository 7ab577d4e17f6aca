"""Compare how fast this version of h5chunk reads files of many layouts with another version, in turns.

    python scripts/bench_versions.py ../h5chunk-before                    # a checkout, with its native library built
    python scripts/bench_versions.py ../h5chunk-before --kinds gzip keyed --rounds 7 --scale 0.2
    python scripts/bench_versions.py .                                    # the rates alone, and the noise

Makes files as h5py users have them: contiguous and chunked images, shards, gzip (one and 16 images in a chunk), LZ4,
Fletcher-32, the chunks that h5py guesses, rows of floats, CSR matrices, ragged values, episodes, volumes, a dataset per
sample. Each version runs in its own process, which keeps its loaders open, so that a turn is whole epochs of at least
``--seconds``, with a warm page cache. Prints for each kind the samples/s and the processor time for a sample of this
version, and its ratio to the other by both (medians of the rounds; above 1 this version is faster). A kind that one of
the versions does not read is listed with its error. LZ4 needs ``pip install hdf5plugin``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

GZIP = {"compression": "gzip", "compression_opts": 1}
ROBOT = {"image": "data/*/obs/image", "actions": "data/*/actions"}
EPISODES = {"image": "data/*/image", "actions": "data/*/actions"}


def kinds(folder: Path, open_files: Any) -> dict[str, Callable[[], Callable[[], int]]]:
    """Return functions that open the files of each kind, and return a function that reads and counts an epoch."""
    from torch.utils.data import DataLoader

    h5 = open_files

    def loader(open_data: Callable[[], Any], batch: int = 256) -> Callable[[], Callable[[], int]]:
        def ready() -> Callable[[], int]:
            data = open_data()
            batches = h5.ChunkLoader(data, batch, resident=False)
            return lambda: sum(1 for _ in batches) * batch

        return ready

    def workers(open_data: Callable[[], Any], batch: int = 256) -> Callable[[], Callable[[], int]]:
        def ready() -> Callable[[], int]:
            data = open_data()
            sampler = h5.ChunkSampler(data, batch)
            return lambda: sum(1 for _ in DataLoader(data, batch_sampler=sampler, num_workers=2)) * batch

        return ready

    def single(open_data: Callable[[], Any]) -> Callable[[], Callable[[], int]]:
        def ready() -> Callable[[], int]:
            data = open_data()
            numbers = np.random.default_rng(0).integers(0, len(data), 2000).tolist()
            return lambda: sum(1 for number in numbers if data[number])

        return ready

    def rows(name: str, **how: Any) -> Callable[[], Any]:
        return lambda: h5.ChunkDataset(folder / name, **how)

    windows = {"windows": lambda: h5.Windows(folder / "robot.h5", ROBOT, 10)}
    patches = {name: lambda name=name: h5.Patches(folder / name, {"raw": "*/raw"}, (32, 32, 32)) for name in VOLUMES}
    keyed = {
        name: lambda name=name: h5.Keyed(folder / name, "traces/*/data", attributes=["magnitude"]) for name in KEYED
    }
    images = [*IMAGES, "shards"]
    files = {name: rows(name) for name in (*images, *MATRICES)} | {"ragged.h5": rows("ragged.h5", fields=["tokens"])}
    files |= windows | patches | keyed
    found = {name: loader(each, 16 if name in patches else 256) for name, each in files.items()}
    for name in ("plain224.h5", "gzip16.h5", *MATRICES, "windows", "keyed.h5", "keyed-gzip.h5"):
        found[f"{name} DataLoader"] = workers(files[name])
    for name in ("plain32.h5", "gzip16.h5", "csr.h5", "windows"):
        found[f"{name} [i]"] = single(files[name])
    return found


IMAGES: dict[str, tuple[int, int, dict[str, Any]]] = {  # number, pixels along each side, and options of the dataset
    "plain224.h5": (8000, 224, {}),
    "plain32.h5": (400_000, 32, {}),
    "chunk32.h5": (400_000, 32, {"chunks": (64, 3, 32, 32)}),
    "gzip16.h5": (30_000, 32, {"chunks": (16, 3, 32, 32), **GZIP}),
    "gzip1.h5": (20_000, 32, {"chunks": (1, 3, 32, 32), **GZIP}),
    "lz4.h5": (100_000, 32, {"chunks": (64, 3, 32, 32), "lz4": True}),
    "fletcher.h5": (50_000, 32, {"chunks": (16, 3, 32, 32), "fletcher32": True}),
    "guessed.h5": (8000, 64, {"chunks": True}),
    "guessed-gzip.h5": (8000, 64, {"chunks": True, **GZIP}),
}
MATRICES = ("csr.h5", "csr-gzip.h5", "rows.h5", "rows-gzip.h5")
VOLUMES, KEYED = ("volumes.h5", "volumes-gzip.h5"), ("keyed.h5", "keyed-gzip.h5")


def make_files(folder: Path, scale: float) -> None:
    def scaled(count: int) -> int:
        return max(64, int(count * scale))

    random = np.random.default_rng(0)
    for name, (count, side, options) in IMAGES.items():
        if options.pop("lz4", False):
            try:
                import hdf5plugin
            except ImportError:
                continue
            options |= hdf5plugin.LZ4()
        make_images(folder / name, scaled(count), side, options, random)
    (folder / "shards").mkdir()
    for number in range(8):
        make_images(folder / f"shards/{number}.h5", scaled(20_000), 32, {"chunks": (64, 3, 32, 32)}, random)
    count = scaled(50_000)
    lengths = random.integers(20, 600, count)
    starts = np.append(0, np.cumsum(lengths))
    columns = np.concatenate([np.sort(random.choice(20_000, length, replace=False)) for length in lengths]).astype("i4")
    entries = random.integers(1, 9, starts[-1]).astype("f4")
    with h5py.File(folder / "ragged.h5", "w") as file:
        file["tokens"], file["offsets"] = columns, starts
    for suffix, options in (("", {}), ("-gzip", GZIP)):
        with h5py.File(folder / f"csr{suffix}.h5", "w") as file:
            group = file.create_group("X")
            group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (count, 20_000)})
            group["indptr"] = starts
            for name, values in (("indices", columns), ("data", entries)):
                group.create_dataset(
                    name, data=values, **({"chunks": (min(65_536, len(values)),), **options} if options else {})
                )
        with h5py.File(folder / f"rows{suffix}.h5", "w") as file:
            dense = random.random((scaled(20_000), 2000), "f4") * (random.random((1, 2000)) < 0.1)
            file.create_dataset("X", data=dense, chunks=(64, 2000), **options)
            file["labels"] = np.arange(len(dense))
        with h5py.File(folder / f"volumes{suffix}.h5", "w") as file:
            for number in range(2):
                values = random.integers(0, 8, (256, max(64, int(512 * scale) // 64 * 64), 512), np.uint8)
                file.create_dataset(f"{number}/raw", data=values, chunks=(64, 64, 64), **options)
        with h5py.File(folder / f"keyed{suffix}.h5", "w") as file:
            for number in range(scaled(20_000)):
                group = file.create_group(f"traces/{number:07}")
                group.create_dataset("data", data=random.normal(size=256).astype("f4"), **options)
                group.attrs["magnitude"] = number / 4
    with h5py.File(folder / "robot.h5", "w") as file:
        for number in range(max(3, int(100 * scale))):
            steps = 120 + number % 60
            group = file.create_group(f"data/demo_{number}")
            group["obs/image"] = random.integers(0, 255, (steps, 84, 84, 3), np.uint8)
            group["actions"] = random.normal(size=(steps, 7)).astype("f4")


def make_images(path: Path, count: int, side: int, options: Any, random: np.random.Generator) -> None:
    """Write images whose pixels are equal in squares of four, so that they can be compressed."""
    some = random.integers(0, 255, (min(count, 1000), 3, side // 4, side // 4), np.uint8).repeat(4, 2).repeat(4, 3)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (count, 3, side, side), np.uint8, **options)
        for start in range(0, count, len(some)):
            images[start : start + len(some)] = some[: count - start]
        file["labels"] = np.arange(count)


def serve(folder: Path, seconds: float) -> None:
    """Read epochs of the kinds whose names come in, and answer with samples, seconds and processor seconds."""
    import h5chunk

    warnings.simplefilter("ignore")
    known, epochs = kinds(folder, h5chunk), {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in epochs:
                epochs[name] = known[name]()
                epochs[name]()
            count, started, before = 0, time.perf_counter(), processor_s()
            while not count or time.perf_counter() - started < seconds:
                count += epochs[name]()
            answer: list[Any] = [count, time.perf_counter() - started, processor_s() - before]
        except Exception as error:  # which is printed for this kind
            answer = [f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


def processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield a line for each kind."""
    command = [sys.executable, __file__, "--serve", str(folder), "--seconds", str(args.seconds)]
    versions = []
    for tree in (args.other, Path(__file__).parent.parent):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree.resolve()), *sys.path[1:]])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        versions.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        for name in (
            each for each in kinds(folder, None) if not args.kinds or any(some in each for some in args.kinds)
        ):
            taken: list[list[list[Any]]] = [[], []]
            for turn in range(args.rounds):
                for number in (0, 1) if turn % 2 else (1, 0):
                    print(name, file=versions[number].stdin, flush=True)
                    taken[number].append(json.loads(versions[number].stdout.readline()))
            failed = [error for (error, *rest), *_ in taken if not rest]
            if failed:
                yield f"{name:26} {failed}"
                continue
            (old_s, old_used), (new_s, new_used) = (
                [statistics.median(each[column] / each[0] for each in own) for column in (1, 2)] for own in taken
            )
            yield (
                f"{name:26} {1 / new_s:12,.0f} samples/s, {new_used * 1e6:9.1f} us; of the other: "
                f"{old_s / new_s:5.2f} by rate, {old_used / new_used:5.2f} by processor time"
            )
    finally:
        for version in versions:
            version.kill()
            version.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of the other version")
    parser.add_argument("--kinds", nargs="+", default=[], help="only kinds whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="shortest duration of a turn")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the files; 1: 3.5 GB")
    parser.add_argument("--folder", type=Path, help="where to make the files; default: a temporary folder")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.seconds)
        return
    if args.other is None:
        parser.error("name a checkout of the other version")
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        make_files(Path(temporary), args.scale)
        for line in compare(args, Path(temporary)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
