"""Plant faults in training loops: does `h5chunk.doctor` name them, and do fixes gain what it predicts?

    python scripts/bench_doctor.py                 # all faults that this machine can have; --only NAME for some
    python scripts/bench_doctor.py --overhead      # what watching costs

Every fault is trained twice, with it and without. A verdict is right if the cause is one of those expected and
blames the data only if that is to blame; a prediction is right if it is within 20 % of the measured gain. Healthy
loops follow, in which nothing may be found. The tests run two of the faults.
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

import h5chunk
from h5chunk.tools.doctor.doctor import _rate

SECONDS = 2.5  # of each loop
CUDA = torch.cuda.is_available()
FOLDER = Path(tempfile.mkdtemp(prefix="h5chunk-faults-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
PACKED = zlib.compress(np.random.default_rng(0).integers(0, 4, 60_000).astype(np.uint8).tobytes(), 1)
LOCK = multiprocessing.get_context("fork").Lock()
Step = Callable[[Any], None]


class Made(Dataset):
    """Samples that a function of their number makes."""

    def __init__(self, make: Callable[[int], Any], length: int = 100_000) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Stored(Dataset):
    """Samples of an HDF5 file, opened in each worker."""

    def __init__(self, path: Path, **cache: Any) -> None:
        self.path, self.cache, self.images = path, cache, None
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        if self.images is None:
            self.images = h5py.File(self.path, **self.cache)["images"]
        return torch.from_numpy(self.images[i]), i % 10


def stored(name: str, chunks: tuple[int, ...], **filters: Any) -> Path:
    path = FOLDER / f"{name}.h5"
    if not path.exists():
        images = np.random.default_rng(0).integers(0, 40, (2_000, 32, 32, 3)).astype(np.uint8)
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=images, chunks=chunks, **filters)
    return path


def tiny(i: int) -> Any:
    return torch.zeros(256), i % 10


def decoded(i: int) -> Any:
    pixels = zlib.decompress(PACKED)
    return torch.frombuffer(bytearray(pixels[:256]), dtype=torch.uint8).float(), i % 10


def slept(seconds: float) -> Callable[[int], Any]:
    def make(i: int) -> Any:
        time.sleep(seconds)  # waits as for a server
        return tiny(i)

    return make


def locked(i: int) -> Any:
    with LOCK:
        time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def unlocked(i: int) -> Any:
    time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def uneven(i: int) -> Any:
    worker = get_worker_info()
    time.sleep(0.002 if worker is not None and worker.id == 0 else 0.0003)
    return tiny(i)


def slow_collate(samples: list[Any]) -> Any:
    rows = [torch.tensor([float(value) for value in sample.tolist()]) for sample, _ in samples]
    return torch.stack(rows), torch.tensor([label for _, label in samples])


def network(width: int = 256, depth: int = 2, inputs: int = 256) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).to("cuda" if CUDA else "cpu")


def trainer(
    model: torch.nn.Module, *, blocking: bool = False, after: Callable[[Any], None] | None = None, **adam: Any
) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), **adam)
    device = next(model.parameters()).device

    def step(batch: Any) -> None:
        images = batch[0].to(device, non_blocking=not blocking)
        optimizer.zero_grad()
        loss = model(images.flatten(1).float()[:, : model[0].in_features]).square().mean()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(loss)

    return step


def python_work(_: Any) -> None:
    until = time.perf_counter() + 0.008
    while time.perf_counter() < until:
        sum(range(200))


Loop = tuple[Any, Step]


def loader(make: Callable[[int], Any], batch: int = 32, **options: Any) -> Any:
    return DataLoader(Made(make), batch, **options)


@dataclass
class Fault:
    """A loop with a fault; ``make(None)`` has it, and ``make(fix)`` has that fix."""

    name: str
    make: Callable[[Any], Loop]
    causes: tuple[str, ...]  # that are right; "none": not the data, and nothing else
    fix: str = ""  # beginning of the name of the fix that is measured; empty: none
    gpu: bool = False


def applied(fix: Any) -> dict[str, Any]:
    return {} if fix is None else dict(fix.apply.get("loader", {}))


def simple(make: Callable[[int], Any], batch: int = 32, width: int = 256, **options: Any) -> Callable[[Any], Loop]:
    """A loop whose loader takes the arguments of a fix."""
    return lambda fix: (loader(make, batch, **{**options, **applied(fix)}), trainer(network(width)))


def other(
    fault: Callable[[int], Any], cured: Callable[[int], Any], batch: int = 32, **options: Any
) -> Callable[[Any], Loop]:
    return lambda fix: (loader(cured if fix else fault, batch, **options), trainer(network()))


def with_cache(path: Path, **cache: Any) -> Callable[[Any], Loop]:
    def make(fix: Any) -> Loop:
        better = dict(zip(("rdcc_nslots", "rdcc_nbytes"), fix.apply["cache"], strict=True)) if fix else cache
        return DataLoader(Stored(path, **better), 32, shuffle=True, num_workers=1), trainer(network())

    return make


def across_samples(fix: Any) -> Loop:
    path = stored("whole", (1, 32, 32, 3)) if fix else stored("across", (500, 8, 8, 3), compression="lzf")
    return DataLoader(Stored(path, rdcc_nbytes=0), 32, shuffle=True, num_workers=1), trainer(network())


def oversubscribed(fix: Any) -> Loop:
    torch.set_num_threads(fix.apply["threads"] if fix else 16)
    return loader(tiny, 256, num_workers=1), trainer(network(1024))


def validating(fix: Any) -> Loop:
    model = network(512)
    step, tests, count = trainer(model), loader(decoded), [0]

    def train(batch: Any) -> None:
        step(batch)
        count[0] += 1
        if count[0] % 10 == 0 and fix is None:
            with torch.no_grad():
                for number, (images, _) in enumerate(tests):
                    model(images.to(next(model.parameters()).device))
                    if number == 4:
                        break

    return loader(tiny, 64), train


def small_batches(fix: Any) -> Loop:
    return loader(tiny, 8 if fix else 1, num_workers=1), trainer(network(16, 0), lr=1e-3)


def with_python(fix: Any) -> Loop:
    return loader(tiny, 64, num_workers=1), trainer(network(), after=None if fix else python_work)


def item(fix: Any) -> Loop:
    model = network(4096 if CUDA else 512, 6 if CUDA else 2)
    return loader(tiny, 64, num_workers=2, pin_memory=CUDA), trainer(
        model, after=None if fix else lambda loss: loss.item()
    )


def image(i: int) -> Any:
    return IMAGE, i % 10


IMAGE = torch.zeros(3, 160, 160)


def copying(fix: Any) -> Loop:
    workers = {"num_workers": 8, "prefetch_factor": 4}
    return loader(image, 128, **{**workers, **applied(fix)}), trainer(network(2048, 8))


def synchronous(fix: Any) -> Loop:
    return loader(image, 64, num_workers=8, pin_memory=True), trainer(network(4096, 8), blocking=fix is None)


def launching(fix: Any) -> Loop:
    model = network(64, 120)
    if fix:
        model = torch.cuda.make_graphed_callables(model, (torch.zeros(64, 256, device="cuda"),))
    return loader(tiny, 64, num_workers=2, pin_memory=True), trainer(model)


def optimizing(fix: Any) -> Loop:
    adam = {"fused": True} if fix else {"foreach": False}
    return loader(tiny, 64, num_workers=2, pin_memory=True), trainer(network(64, 120), **adam)


FAULTS = [
    Fault("slow decode", other(decoded, tiny), ("decoding",), "without bench"),
    Fault("slow decode, one worker", other(decoded, tiny, num_workers=1), ("decoding",), "without bench"),
    Fault("one worker", simple(slept(0.0005), num_workers=1), ("transform", "reading"), "num_workers"),
    Fault("no worker", simple(slept(0.0005)), ("transform", "reading"), "num_workers"),
    Fault(
        "tiny HDF5 cache",
        with_cache(stored("tiny", (100, 32, 32, 3), compression="lzf"), rdcc_nbytes=1 << 16),
        ("reading",),
        "chunk cache",
    ),
    Fault(
        "one slot in the HDF5 cache",
        with_cache(stored("tiny", (100, 32, 32, 3), compression="lzf"), rdcc_nslots=1, rdcc_nbytes=1 << 26),
        ("reading",),
        "chunk cache",
    ),
    Fault("chunks across samples", across_samples, ("reading",), "repack"),
    *(() if CUDA else (Fault("oversubscription", oversubscribed, ("oversubscription",), "1 thread"),)),
    Fault(
        "slow collate",
        lambda fix: (
            loader(tiny, num_workers=1, collate_fn=default_collate if fix else slow_collate),
            trainer(network()),
        ),
        ("collate",),
        "without slow_collate",
    ),
    Fault("lock in a transform", other(locked, unlocked, num_workers=2), ("lock",), "no lock"),
    Fault("unbalanced workers", simple(uneven, num_workers=2), ("unbalanced",), "in_order"),
    Fault("validation in between", validating, ("validation",), ""),
    Fault("small batches", small_batches, ("small batches",), "larger batches"),
    Fault("Python in the step", with_python, ("python", "none"), "" if not CUDA else "less Python"),
    Fault(".item() in each step", item, ("synchronisation", "none"), ""),
    Fault("pageable copy", copying, ("copy",), "pin_memory", gpu=True),
    Fault("synchronous copy", synchronous, ("copy", "synchronisation", "none"), "", gpu=True),
    Fault("launch-bound model", launching, ("launches",), "fewer kernel", gpu=True),
    Fault("optimizer of many kernels", optimizing, ("launches",), "fused", gpu=True),
]


def healthy() -> Iterator[tuple[str, Callable[[Any], Loop]]]:
    width = 8192 if CUDA else 768
    yield "in memory", simple(tiny, 64, width)
    yield "one worker", simple(tiny, 64, width, num_workers=1)
    yield "two workers, pinned", simple(tiny, 64, width, num_workers=2, pin_memory=CUDA)
    yield (
        "HDF5 in good chunks",
        lambda fix: (DataLoader(Stored(stored("whole", (1, 32, 32, 3))), 32, num_workers=1), trainer(network(width))),
    )
    yield (
        "ChunkLoader",
        lambda fix: (
            h5chunk.ChunkLoader(h5chunk.ChunkDataset(stored("whole", (1, 32, 32, 3)), fields=["images"]), 64),
            trainer(network(width)),
        ),
    )


def watched(make: Callable[[Any], Loop], fix: Any, seconds: float) -> Any:
    """Train for some seconds under the doctor, and return its report."""
    torch.set_num_threads(THREADS)
    batches, step = make(fix)
    with h5chunk.doctor(batches) as report:
        train(batches, step, seconds)
    return report


def train(batches: Any, step: Step, seconds: float) -> float:
    """Train for some seconds; return the median time of an iteration."""
    times = [time.perf_counter()]
    while True:
        for batch in batches:
            step(batch)
            times.append(time.perf_counter())
            if len(times) > 16 and times[-1] > times[1] + seconds:
                return statistics.median(np.diff(times[5:]))


THREADS = torch.get_num_threads() if CUDA else 1  # one thread: less noise from other programs


@dataclass
class Result:
    """What the doctor said about one fault."""

    name: str
    verdict: str
    is_right: bool
    predicted: float | None = None
    measured: float | None = None
    fixes: list[str] = field(default_factory=list)

    @property
    def is_predicted(self) -> bool:
        return (
            self.predicted is not None and self.measured is not None and abs(self.measured / self.predicted - 1) <= 0.2
        )


def run_fault(fault: Fault, seconds: float = SECONDS) -> Result:
    """Diagnose a loop with its fault; train it without the fault, too, and compare."""
    report = watched(fault.make, None, seconds)
    found = report.diagnosis
    result = Result(fault.name, found.verdict, found.cause in fault.causes)
    result.fixes = [f"{fix.name}: {fix.gain_text}" for fix in found.fixes]
    fix = next((fix for fix in found.fixes if fault.fix and fix.name.startswith(fault.fix)), None)
    if fix is not None:
        after = watched(fault.make, fix, seconds)
        result.predicted = fix.gain.value
        result.measured = _rate(after.seen) / _rate(report.seen)
    return result


def overhead(seconds: float = 1.0, rounds: int = 9) -> Iterator[tuple[str, float]]:
    """Yield how much slower iterations are while they are watched, measured in turns."""
    cases = {"batches made by the training process": simple(tiny, 64), "by a worker": simple(decoded, 8, num_workers=1)}
    for name, make in cases.items():
        ratios = []
        for _ in range(rounds):
            torch.set_num_threads(THREADS)
            batches, step = make(None)
            bare = train(batches, step, seconds)
            with h5chunk.doctor(batches):
                ratios.append(train(batches, step, seconds) / bare - 1)
        yield name, statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each loop")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if options.overhead:
        for name, share in overhead():
            print(f"{name}: {share:+.1%}")
        return
    faults = [fault for fault in FAULTS if (CUDA or not fault.gpu) and (not options.only or fault.name in options.only)]
    results = []
    for fault in faults:
        try:
            results.append(result := run_fault(fault, options.seconds))
        except Exception as error:
            results.append(result := Result(fault.name, f"{type(error).__name__}: {error}", False))
        gain = "" if result.predicted is None else f"; predicted {result.predicted:.2f}, measured {result.measured:.2f}"
        wanted = fault.fix and result.predicted is None
        print(f"{'right' if result.is_right else 'WRONG'}  {fault.name}: {result.verdict}{gain}", flush=True)
        print(f"       {'NO FIX ' * bool(wanted)}{'ok' if result.is_predicted else ''} {result.fixes[:4]}", flush=True)
    alarms = 0
    for name, make in () if options.only else healthy():
        found = watched(make, None, options.seconds).diagnosis
        alarms += found.cause != "none"
        print(f"{'healthy' if found.cause == 'none' else 'ALARM'}  {name}: {found.verdict}", flush=True)
    wanted = [result for fault, result in zip(faults, results, strict=True) if fault.fix]
    print(
        f"{sum(r.is_right for r in results)} of {len(results)} verdicts are right, "
        f"{sum(r.is_predicted for r in wanted)} of {len(wanted)} gains are within 20 %, {alarms} false alarms"
    )
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
