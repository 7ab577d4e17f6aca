"""Plant faults in training loops, and check whether `h5chunk.doctor` finds them and predicts the gains of fixes.

    python scripts/bench_doctor.py                 # all faults that this machine can have; --only NAME for some
    python scripts/bench_doctor.py --overhead      # the overhead of watching, and whether training stays the same

Each training loop runs with and without its fault, in turns. A verdict is correct if it names an expected cause; a
prediction is correct if it is within 20 % of the measured gain. Then doctor must find nothing in healthy loops. The
tests run two of the faults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doctor_faults import CUDA, FAULTS, Fault, Make, Step, healthy, network, simple, trainer
from doctor_samples import FOLDER, Made, decoded, tiny
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.tools.doctor import gpu, record, watch

SECONDS = 2.5  # duration of each loop
WARM_UP = 6  # untimed batches at the beginning of a block; open files are listed once, after the third batch
THREADS = torch.get_num_threads() if CUDA else 1  # one thread, so that other programs disturb less
RANKS = """
    import sys, time, torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __len__(self):
            return 100_000

        def __getitem__(self, i):
            return torch.zeros(256), i % 10

    if __name__ == "__main__":
        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters())
        started = None
        for number, (images, labels) in enumerate(DataLoader(Samples(), 32)):
            if torch.distributed.get_rank() == 1:
                time.sleep(float(sys.argv[1]))
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
            if number == 150:
                break
"""


@dataclass
class Result:
    """The doctor's verdict on a fault, with its predicted and measured gain."""

    name: str
    verdict: str
    is_right: bool
    predicted: float | None = None
    measured: float | None = None
    fixes: list[str] = field(default_factory=list)

    @property
    def is_predicted(self) -> bool:
        return bool(self.predicted and self.measured) and abs(self.measured / self.predicted - 1) <= 0.2

    def __str__(self) -> str:
        gain = "" if self.predicted is None else f"; predicted {self.predicted:.2f}, measured {self.measured:.2f}"
        text = f"{'right' if self.is_right else 'WRONG'}  {self.name}: {self.verdict}{gain}"
        return f"{text}{' ok' if self.is_predicted else ''}\n       {self.fixes[:4]}"


def watched(make: Make, fix: Any, seconds: float) -> Any:
    """Train for ``seconds`` under the doctor, and return its report."""
    torch.set_num_threads(THREADS)
    batches, step = make(fix)
    with h5chunk.doctor(batches, step) as report:
        train(batches, step, seconds)
    return report


def train(batches: Any, step: Step, seconds: float) -> tuple[float, float]:
    """Train for ``seconds``; return the median time of an iteration and, after 40 of them, the mean processor time."""
    times, used = [time.perf_counter()], 0.0
    while True:
        for batch in batches:
            step(batch)
            times.append(time.perf_counter())
            if len(times) == 41:
                used = time.process_time()
            if len(times) > 60 and times[-1] > times[1] + seconds:
                return statistics.median(np.diff(times[5:])), (time.process_time() - used) / (len(times) - 41)


def run_fault(fault: Fault, seconds: float = SECONDS, rounds: int = 1) -> Result:
    """Diagnose a loop with its fault, train it without the fault, and compare. Gains are medians of all rounds."""
    gains = []
    for number in range(rounds):
        report = watched(fault.make, None, seconds)
        found = report.diagnosis
        if not number:
            result = Result(fault.name, found.verdict, found.cause in fault.causes)
            result.fixes = [f"{fix.name}: {fix.gain_text}" for fix in found.fixes]
        fix = next((fix for fix in found.fixes if fault.fix and fault.fix in fix.name), None)
        if fix is not None:
            gains.append((fix.gain.value, watched(fault.make, fix, seconds).seen.rate / report.seen.rate))
    if gains:
        result.predicted, result.measured = map(statistics.median, zip(*gains, strict=True))
    return result


def run_ranks(_: float = 0.0) -> Result:
    """Diagnose two DDP processes, one of which sleeps in each step."""
    script, rates = FOLDER / "ranks.py", []
    script.write_text(textwrap.dedent(RANKS))
    for slept in ("0.02", "0.0"):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port=29511",
            script,
            slept,
        ]
        report = h5chunk.doctor(command=[str(word) for word in command])
        rates.append(report)
    found = rates[0].diagnosis
    result = Result("straggler of DDP", found.verdict, found.cause == "straggler")
    result.fixes = [f"{fix.name}: {fix.gain_text}" for fix in found.fixes]
    if fix := next((fix for fix in found.fixes if "rank" in fix.name), None):
        result.predicted, result.measured = fix.gain.value, rates[1].seen.rate / rates[0].seen.rate
    return result


def is_unchanged() -> bool:
    """Train twice with the same seed, once under the doctor, and return whether all weights are equal."""
    weights = []
    for is_watched in (False, True):
        model = network()
        step, batches = trainer(model), DataLoader(Made(decoded, 2_000), 32, num_workers=2, shuffle=True)
        with h5chunk.doctor(batches) if is_watched else nullcontext():
            for batch in batches:
                step(batch)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def overhead(pairs: int = 60, steps: int = 20) -> Iterator[str]:
    """Yield by how much watching slows down iterations, measured in short alternating blocks in this process.

    The lines of code that run are sampled more often in the first two seconds of a process. On a GPU, a process is also
    profiled once, for a few steps: the blocks leave this out, and it is measured by itself.
    """
    work = 2 if CUDA else 8
    cases = {
        "batches made by the training process": simple(tiny, work=work),
        "by a worker, which is the limit": simple(decoded, 8, work=work, num_workers=1),
    }
    torch.set_num_threads(THREADS)
    if CUDA:
        seconds = profiling(simple(tiny, work=work))
        yield f"profiling {gpu.PROFILED} steps, once in a process, takes {seconds:.2f} s longer than the steps"
        gpu.PROFILE_AT = -1
    for (name, make), first in product(cases.items(), (record.FIRST, 0)):
        record.FIRST = first
        with tempfile.TemporaryDirectory() as folder:
            step = make(None)[1]
            loops = {is_watched: started(make, folder, is_watched) for is_watched in (True, False)}
            times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for turn in range(pairs):
                for is_watched in (turn % 2 == 0, turn % 2 == 1):
                    if is_watched:
                        watch.install(folder).sampler.start()
                    times[is_watched].append(block(loops[is_watched], step, steps))
                    watch.remove()
        when = "at first" if first else "later"
        milliseconds = 1e3 * np.median(times[False], axis=0)[0] / steps
        for what, values in zip(
            ("time", "processor time"), np.transpose(np.divide(times[True], times[False]) - 1), strict=True
        ):
            low, high = interval(values)
            yield (
                f"{name}, {when}: {np.median(values):+.2%} ({low:+.2%} to {high:+.2%}) of the {what} of an iteration "
                f"of {milliseconds:.1f} ms"
            )


def profiling(make: Make) -> float:
    """Return the seconds that the profiler adds to a process. Its steps, and the first ones after it, count."""
    batches, step = make(None)
    with h5chunk.doctor(batches, step):
        times = [time.perf_counter()]
        for batch in islice(batches, gpu.PROFILE_AT + 200):
            step(batch)
            wait()
            times.append(time.perf_counter())
    seconds = np.diff(times)[gpu.PROFILE_AT - 1 :]
    return float(seconds.sum() - np.median(seconds) * len(seconds))


def started(make: Make, folder: str, is_watched: bool) -> Iterator[Any]:
    """Start iterating a loader. If it is watched, start the hooks in its workers."""
    if is_watched:
        watch.install(folder)
    iterator = iter(make(None)[0])
    next(iterator)
    watch.remove()
    return iterator


def block(batches: Iterator[Any], step: Step, steps: int) -> tuple[float, float]:
    """Train with some batches; return the time and the processor time, both without the first batches."""
    for number, batch in enumerate(islice(batches, steps + WARM_UP)):
        if number == WARM_UP:
            wait()
            began, used = time.perf_counter(), time.process_time()
        step(batch)
    wait()
    return time.perf_counter() - began, time.process_time() - used


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def interval(values: Any) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrap."""
    draws = np.random.default_rng(0).choice(values, (4_000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each loop")
    parser.add_argument("--rounds", type=int, default=1, help="of each fault; more average out other programs")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if options.overhead:
        for line in overhead():
            print(line, flush=True)
        print(f"weights after training with and without are {'equal' if is_unchanged() else 'DIFFERENT'}")
        return
    faults = [fault for fault in FAULTS if CUDA or not fault.gpu]
    ranks = Fault("straggler of DDP", simple(tiny), ("straggler",), "rank")
    results = []
    wanted = [fault for fault in [*faults, ranks] if not options.only or fault.name in options.only]
    for fault in wanted:
        try:
            result = run_ranks() if fault is ranks else run_fault(fault, options.seconds, options.rounds)
        except Exception as error:
            result = Result(fault.name, f"{type(error).__name__}: {error}", False)
        results.append(result)
        print(result, flush=True)
    alarms = 0
    for name, make in () if options.only else healthy():
        found = watched(make, None, options.seconds).diagnosis
        is_healthy = not found.fixes and found.verdict.startswith("Nothing to fix")
        alarms += not is_healthy
        print(f"{'healthy' if is_healthy else 'ALARM'}  {name}: {found.verdict}", flush=True)
    gains = [result for fault, result in zip(wanted, results, strict=True) if fault.fix]
    print(
        f"{sum(r.is_right for r in results)} of {len(results)} verdicts are right, "
        f"{sum(r.is_predicted for r in gains)} of {len(gains)} gains are within 20 %, {alarms} false alarms"
    )
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
