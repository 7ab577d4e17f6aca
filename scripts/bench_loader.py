"""Compare ChunkLoader on the CPU with the machine's limits and with other loaders.

    python scripts/bench_loader.py [--sizes 224 32 28] [--rounds 5] [--peers ffcv-random lmdb ...] [--json FILE]
    python scripts/bench_loader.py --python ffcv-random=ENV/bin/python --python ffcv-quasi=ENV/bin/python
    python scripts/bench_loader.py --tune lmdb              # every setting that peers/lmdb.py lists, on one size
    python scripts/bench_loader.py --ways                   # ChunkLoader with ranks, lanes, states and resuming

The data sets are 12,000 images of 3 x 224 x 224, 50,000 of 3 x 32 x 32 and 60,000 of 1 x 28 x 28. Their random pixels
are generated once in ``bench-data/``, and packed once for each contender. Batches are 256 uint8 images with int64
labels; the page cache is warm. Each contender runs in a separate process, with the interpreter set by ``--python
NAME=PATH`` (default: the interpreter of this script) and the best settings found with ``--tune``
(`peers/__init__.py`). If its library cannot be imported, the table says "not installed".

In each round, all contenders take turns, in reverse order every other round. A turn is an epoch that is not timed, and
then epochs in a row that take at least a second, because an epoch of small images takes some 10 ms. Before the first
round, a warm-up epoch compares every image with the original. In timed epochs, each sample must be delivered exactly
once, and one image of each batch is compared after the clock has stopped.

Prints a table for each image size: images/s (median and range of the rounds); the median ratio to the limit, which is
the limit with reused memory for loaders that reuse the memory of batches, and with fresh memory for other loaders; the
speedup of ChunkLoader, without and with ``reuse=True``; and the seconds from construction to the first batch. The
limits are the fastest methods in `peers/limits.py`. ``--json FILE`` writes the results of all rounds, with settings,
versions and machine.

``--ways`` measures only ChunkLoader, in the same rounds: as one of several ranks, with lanes, with a random permutation
as lists of sample numbers, saving a state with each batch, and resumed in the middle of an epoch. Each variant is
compared with the plain loader, in images/s and in images per second of processor time, which other processes disturb
less. The resumed loader is also compared with a loader that starts from the beginning.

The peers need ``pip install mosaicml-streaming litdata webdataset datasets tensorstore lmdb``. FFCV 1.0.2 is compiled:
it needs libopencv-dev, libturbojpeg0-dev, pkg-config and g++, numba, opencv-python-headless, pytorch-pfn-extras,
fastargs, terminaltables, assertpy, tqdm and psutil, then ``pip install --no-deps --no-build-isolation ffcv``. The files
of all three sizes take 21 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from peers import CONTENDERS, REUSED, WAYS, Source
from peers.limits import FRESH_WAYS, REUSED_WAYS
from peers.serve import MOST_EPOCHS

HERE = Path(__file__).parent
SIZES = {224: (12_000, 3, 224, 224), 32: (50_000, 3, 32, 32), 28: (60_000, 1, 28, 28)}
SEED = 0
BLOCK = 1000
MIN_FREE_BYTES = 4 << 30
VERSIONS = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]), m.version('torch'), m.version('numpy'))"


def make_source(folder: Path, shape: tuple[int, ...]) -> tuple[Source, Path]:
    """Make a contiguous HDF5 file of the images, and beside it a file with their CRC-32s."""
    path = folder / f"source-{shape[0]}-{shape[-1]}.h5"
    crcs = path.with_suffix(".npy")
    if not (path.exists() and crcs.exists()):
        rng = np.random.default_rng([SEED, shape[-1]])
        part, sums = path.with_suffix(".part"), []
        with h5py.File(part, "w") as file:
            images = file.create_dataset("images", shape, np.uint8)
            for start in range(0, shape[0], BLOCK):
                block = rng.integers(0, 256, (min(BLOCK, shape[0] - start), *shape[1:]), dtype=np.uint8)
                images[start : start + BLOCK] = block
                sums += [zlib.crc32(image) for image in block]
            file["labels"] = np.arange(shape[0])
        np.save(crcs, np.array(sums, np.uint32))
        part.rename(path)
    with h5py.File(path) as file:
        offset = file["images"].id.get_offset()
    return Source(path.resolve(), offset, shape, SEED), crcs.resolve()


class Contender:
    """A process that runs one row of the table, and its results."""

    def __init__(self, name: str, module: str, label: str, settings: dict, python: str, request: dict) -> None:
        self.name, self.label, self.settings, self.python = name, label, settings, python
        self.is_limit = module == "limits"
        self.reused = settings.get("memory", REUSED if self.is_limit else "fresh") == REUSED
        self.rounds: list[dict[str, Any]] = []
        self.trouble = ""
        self.first: dict[str, Any] = {}
        request = request | {"module": module, "settings": settings}
        self.log = Path(request["folder"]) / "bench_loader.log"
        environment = os.environ | {"PYTHONPATH": str(HERE.resolve()), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [python, "-m", "peers.serve", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            env=environment,
        )

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer. If the answer is an error, store it and end the process."""
        if self.trouble:
            return {}
        assert self.process.stdin and self.process.stdout
        try:
            print(command, file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        if "missing" in answer:
            self.trouble = f"not installed ({answer['missing']})"
        elif "failed" in answer:
            self.trouble = answer["failed"]
        elif self.process.poll() is not None:
            self.trouble = f"ended with {self.process.returncode}: see {self.log}"
        if self.trouble:
            self.close()
        return answer

    def start(self) -> None:
        self.first = self.ask("first")

    def turn(self, number: int) -> None:
        before = paged_in_bytes()
        answer = self.ask(f"epoch {number}")
        if not self.trouble:
            self.rounds.append(answer | {"paged_in_bytes": paged_in_bytes() - before})

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    @property
    def rates(self) -> list[float]:
        return [each["images"] / each["seconds"] for each in self.rounds]

    @property
    def cpu_us(self) -> list[float]:
        """Return the processor time per image of all threads."""
        return [1e6 * each["cpu_seconds"] / each["images"] for each in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.rates) if self.rates and not self.trouble else 0.0


def paged_in_bytes() -> int:
    """Return the bytes that the machine has read from disks, if the system reports them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("pgpgin ")), 0)


def ratio(one: Contender, other: Contender) -> float:
    """Return the median ratio of the rates of two contenders over the rounds."""
    return statistics.median(a / b for a, b in zip(one.rates, other.rates, strict=True))


def run_rounds(contenders: list[Contender], rounds: int) -> None:
    for contender in contenders:
        contender.start()
        said = contender.trouble or f"first batch {contender.first.get('first_batch_s', 0):.2f} s"
        print(f"  {contender.name}: {said}", file=sys.stderr, flush=True)
    for number in range(1, rounds + 1):
        for contender in contenders if number % 2 else contenders[::-1]:
            contender.turn(number)
        print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
    for contender in contenders:
        contender.ask(f"check {MOST_EPOCHS * (rounds + 1)}")
        contender.close()


def print_table(source: Source, contenders: list[Contender]) -> None:
    alive = [each for each in contenders if each.median]
    limits = {
        reused: max(
            (each for each in alive if each.is_limit and each.reused == reused),
            key=lambda each: each.median,
            default=None,
        )
        for reused in (True, False)
    }
    ours = {each.name: each for each in alive if each.name in ("ours", "ours-reuse")}
    count, *shape = source.shape
    print(f"\n{count:,} images of {' x '.join(map(str, shape))}")
    print(
        f"{'':36s} {'images/s':>10s}  {'min .. max':>23s}  {'GB/s':>5s}  memory  of limit  ours /  reuse /  first batch"
    )
    best: dict[tuple[bool, bool], Contender] = {}
    for each in sorted((each for each in alive if each.is_limit), key=lambda each: each.median):
        best[not each.reused, each.settings["kind"] == "preadv"] = each
    shown = [best[key] for key in sorted(best)] + [each for each in contenders if not each.is_limit]
    for each in shown:
        if each.trouble or not each.rounds:
            print(f"{each.label:36s} {each.trouble[:90]}")
            continue
        limit = limits[each.reused]
        cells = [f"{each.label:36s} {each.median:>10,.0f}  {min(each.rates):>10,.0f} .. {max(each.rates):<9,.0f}"]
        cells.append(f"{each.median * source.sample_bytes / 1e9:5.1f}  {'reused' if each.reused else 'fresh ':6s}")
        cells.append(f"{ratio(each, limit):8.2f}" if limit else " " * 8)
        cells += [
            f"{ratio(ours[name], each):7.2f}" if name in ours and not each.name.startswith("ours") else " " * 7
            for name in ("ours", "ours-reuse")
        ]
        cells.append(f"{each.first['first_batch_s']:8.2f} s" if each.first else "")
        print("  ".join(cells))


def print_ways(source: Source, contenders: list[Contender]) -> None:
    by_name = {each.name: each for each in contenders}
    count, *shape = source.shape
    print(f"\n{count:,} images of {' x '.join(map(str, shape))}")
    print(f"{'':36s} {'images/s':>10s}  {'min .. max':>23s}  {'cpu us':>7s}  over: images/s, cpu")
    for each in contenders:
        if each.trouble or not each.rounds:
            print(f"{each.label:36s} {each.trouble[:90]}")
            continue
        line = f"{each.label:36s} {each.median:>10,.0f}  {min(each.rates):>10,.0f} .. {max(each.rates):<9,.0f}"
        line += f"  {statistics.median(each.cpu_us):7.2f}"
        if other := by_name.get(WAYS[each.name][2]):
            cpu = statistics.median(a / b for a, b in zip(other.cpu_us, each.cpu_us, strict=True))
            line += f"  {other.name} {ratio(each, other):.3f} {cpu:.3f}"
        print(line)


def report(source: Source, contenders: list[Contender]) -> dict[str, Any]:
    return {
        each.name: {
            "label": each.label,
            "settings": each.settings,
            "reused_memory": each.reused,
            "trouble": each.trouble,
            "images_per_s": each.median,
            "bytes_per_s": each.median * source.sample_bytes,
            "rates": each.rates,
            "rounds": each.rounds,
            **each.first,
        }
        for each in contenders
    }


def versions(python: str, distribution: str) -> dict[str, str]:
    """Return the versions of a library, torch and NumPy in the interpreter that runs it."""
    done = subprocess.run([python, "-c", VERSIONS, distribution], capture_output=True, text=True)
    names = (distribution, "torch", "numpy")
    return dict(zip(names, done.stdout.split(), strict=False)) | {"python": python_version(python)}


def python_version(python: str) -> str:
    done = subprocess.run([python, "-V"], capture_output=True, text=True)
    return done.stdout.removeprefix("Python ").strip()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def chosen(args: argparse.Namespace, size: int) -> list[tuple[str, str, str, dict]]:
    """Return (name, module, label, settings) of all contenders to run."""
    if args.ways is not None:
        ways = {name: WAYS[name] for name in args.ways or WAYS}
        return [(name, "ours", label, settings) for name, (label, settings, _) in ways.items()]
    rows = []
    limits = [] if args.no_limits else [*REUSED_WAYS, *FRESH_WAYS]
    for way in limits:
        words = [str(value) for value in way.values()]
        reused = "memory" not in way
        label = f"limit, {'reused' if reused else 'fresh'}: {way['kind']}, {way['threads']} thr"
        rows.append((f"limit-{'-'.join(words)}", "limits", label, way))
    if args.tune:
        for name in args.tune:
            kind = CONTENDERS[name].load() if args.python.get(name) is None else None
            tried = kind.TRIED if kind else tried_there(args.python[name], CONTENDERS[name].module)
            rows += [
                (f"{name} {index}", CONTENDERS[name].module, json.dumps(each), each) for index, each in enumerate(tried)
            ]
        return rows
    names = args.peers if args.peers is not None else [name for name in CONTENDERS if not name.startswith("ours")]
    for name in [*(name for name in CONTENDERS if name.startswith("ours")), *names]:
        entry = CONTENDERS[name]
        rows.append((name, entry.module, entry.label, entry.settings(size)))
    return rows


def tried_there(python: str, module: str) -> list[dict]:
    """Return the settings that a peer's module lists, from the interpreter that can import it."""
    code = f"import json; from peers.{module} import Contender; print(json.dumps(Contender.TRIED))"
    environment = os.environ | {"PYTHONPATH": str(HERE.resolve())}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_size(size: int, args: argparse.Namespace) -> dict[str, Any]:
    source, crcs = make_source(args.folder, SIZES[size])
    fields = {"path": str(source.path), "offset": source.offset, "shape": source.shape, "seed": source.seed}
    request = {"source": fields, "crcs": str(crcs), "folder": str(args.folder.resolve())}
    request |= {"batch_size": args.batch_size}
    rows = chosen(args, size)
    contenders = [
        Contender(name, module, label, settings, args.python.get(name.split()[0], sys.executable), request)
        for name, module, label, settings in rows
    ]
    try:
        run_rounds(contenders, args.rounds)
    finally:
        for contender in contenders:
            contender.close()
    (print_table if args.ways is None else print_ways)(source, contenders)
    return report(source, contenders)


def interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in CONTENDERS or shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=PATH, NAME one of {', '.join(CONTENDERS)}")
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench-data"))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--peers", nargs="*", choices=[name for name in CONTENDERS if not name.startswith("ours")])
    parser.add_argument("--python", type=interpreter, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--tune", nargs="+", choices=CONTENDERS, help="time all listed settings of these peers")
    ways = {"nargs": "*", "choices": WAYS, "metavar": "WAY", "help": "time only ChunkLoader, in these ways or in all"}
    parser.add_argument("--ways", **ways)
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.python = dict(args.python)
    args.folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(args.folder).free < MIN_FREE_BYTES:
        parser.error(f"{args.folder} has less than {MIN_FREE_BYTES >> 30} GiB free")
    results = {str(size): run_size(size, args) for size in args.sizes}
    if args.json:
        names = {name for result in results.values() for name in result if name in CONTENDERS}
        found = {name: versions(args.python.get(name, sys.executable), CONTENDERS[name].distribution) for name in names}
        machine = f"{os.cpu_count()} cores, {cpu_name()}, {platform.platform()}"
        content = {"results": results, "versions": found, "machine": machine, "seed": SEED, "rounds": args.rounds}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
