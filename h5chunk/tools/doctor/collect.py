"""Turn the measurements of a training process and its workers into the numbers that a diagnosis takes."""

from __future__ import annotations

import json
import linecache
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from h5chunk.errors import SourceError
from h5chunk.tools.doctor.files import cached_share
from h5chunk.tools.model.seen import COLLATE, FETCH_STAGES, Gpu, Line, Seen

MIN_STEPS = 8
MAX_STEPS = 2_000  # iterations that a diagnosis uses, the last ones
MAX_LINES = 8
MAX_GAP_S = 2e-3  # between two batches of a worker that is never idle


class Step(NamedTuple):
    """One iteration of a loop, as `Watch.asks` writes it."""

    loader: int
    asked: float
    received: float
    resumed: float
    ended: float
    samples: int
    trains: bool  # gradients are on
    epoch_started: float | None  # when the epoch began, for its first batch
    copy: float
    copy_bytes: int
    pageable_bytes: int
    optimizer: float
    optimizer_steps: int
    gpu: int | None  # number of its events; -1: under the profiler


@dataclass
class Process:
    """All rows of one process, by kind."""

    role: str
    rows: defaultdict[str, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))

    def use_between(self, start: float, stop: float) -> tuple[float, list[float]]:
        """Return the seconds between the first and last counters in a time, and the growth of each counter."""
        inside = [row for row in self.rows["use"] if start <= row[0] <= stop]
        if len(inside) < 2:
            inside = self.rows["use"]
        if len(inside) < 2:
            return 0.0, [0.0] * 5
        return inside[-1][0] - inside[0][0], [b - a for a, b in zip(inside[0][1:], inside[-1][1:], strict=True)]

    def used_in_fetches(self, start: float, stop: float) -> list[float]:
        """Return the growth of each counter while a worker made batches between two times."""
        times = [time for row in self.rows["fetch"] for time in row[1:3] if start <= time <= stop]
        elapsed, growth = self.use_between(start, stop)
        span = max(times, default=0.0) - min(times, default=0.0)
        return [value * span / max(1e-9, elapsed) for value in growth]


def read_processes(folder: Path) -> list[Process]:
    """Read the measurements that processes wrote to a folder; the last line of a process may be cut off."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        process = Process(path.name.partition("-")[0])
        for text in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                kind, *values = json.loads(text)
                process.rows[kind].append(values)
        found.append(process)
    return found


def collect(folder: Path, loader: int | None = None) -> Seen:
    """Return what was seen of the training loop in the measurements of a folder.

    Raise SourceError if no loop was seen, or too little of it.
    """
    processes = read_processes(folder)
    mains = [process for process in processes if process.rows["step"]]
    if not mains:
        raise SourceError("the command iterated neither a DataLoader nor a ChunkLoader: there is nothing to diagnose")
    main = max(mains, key=lambda process: len(process.rows["step"]))
    steps = [Step(*row) for row in main.rows["step"]]
    loader = loader if loader in {step.loader for step in steps} else training_loader(steps)
    own = [step for step in steps if step.loader == loader]
    kept = steady(own)
    if len(kept) < MIN_STEPS:
        raise SourceError(
            f"the training loop ended after {len(own)} batches: let it run for at least {MIN_STEPS + 4} to diagnose it"
        )
    workers = [process for process in processes if process.role != "main" and process.rows["fetch"]]
    return _seen(main, workers, steps, own, kept)


def training_loader(steps: Iterable[Step]) -> int:
    """Return the loader whose batches train: the one with most optimizer steps, then with most time with gradients."""
    weight: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        weight[step.loader] += 1e6 * step.optimizer_steps + (1 if step.trains else 1e-3) * (step.ended - step.asked)
    return max(weight, key=weight.__getitem__)


def steady(steps: Sequence[Step]) -> list[Step]:
    """Return the iterations without the first ones, those under the profiler, and the first batch of each epoch."""
    ready = [step for step in steps if step.epoch_started is None and step.gpu != -1]
    return ready[min(len(ready) // 5, 50) :][-MAX_STEPS:]


def _seen(main: Process, workers: list[Process], steps: list[Step], own: list[Step], kept: list[Step]) -> Seen:
    start, stop, count = kept[0].asked, kept[-1].ended, len(kept)
    facts: dict[int, Any] = {row[0]: row[1:] for row in main.rows["loader"]}
    loader, batch, machine = facts.get(own[0].loader, ({}, {}, {}))
    makers = workers or [main]
    fetches = sorted(row for process in makers for row in process.rows["fetch"] if start <= row[1] and row[2] <= stop)
    if not workers:
        fetches = [row for row in fetches if row[0] == -1]
    stages, lines = _lines(makers, main, fetches, sum(step.ended - step.resumed for step in kept) / count)
    elapsed, (cpu, delay, read, disk, everyone) = main.use_between(start, stop)
    per_batch = (stop - start) / count / max(1e-9, elapsed)
    used = [process.used_in_fetches(start, stop) for process in workers]
    fetch_cpu, fetch_delay, read_bytes, disk_bytes = (sum(use[i] for use in used) / count for i in range(4))
    if not workers:
        on_core = sum(line.share * line.on_cpu for line in lines if line.stage != "step")
        fetch_cpu = min(cpu * per_batch, on_core * _mean([row[2] - row[1] for row in fetches]))
        read_bytes, disk_bytes = read * per_batch, disk * per_batch
    own_cpu = cpu * per_batch + (fetch_cpu if workers else 0.0)
    return Seen(
        samples=_mean([step.samples for step in kept]),
        waits=[step.received - step.asked for step in kept],
        steps=[step.ended - step.resumed for step in kept],
        fetches=[row[2] - row[1] for row in fetches],
        fetched_by=[row[0] for row in fetches],
        stages=stages,
        lines=lines,
        loader=loader,
        batch=batch,
        cores=int(machine.get("cores", 1)),
        threads=int(machine.get("threads", 1)),
        fetch_gap=_gap(fetches) if workers else 0.0,
        fetch_cpu=fetch_cpu,
        fetch_delay=fetch_delay,
        step_cpu=cpu * per_batch - (0.0 if workers else fetch_cpu),
        step_delay=delay * per_batch,
        other_cores=max(0.0, everyone / max(1e-9, elapsed) - own_cpu * count / (stop - start)),
        copy=_mean([step.copy for step in kept]),
        copy_bytes=_mean([step.copy_bytes for step in kept]),
        pageable_bytes=_mean([step.pageable_bytes for step in kept]),
        optimizer=_mean([step.optimizer for step in kept]),
        read_bytes=read_bytes,
        disk_bytes=disk_bytes,
        gpu=_gpu(main, kept),
        gpu_name=str(machine.get("gpu", "")),
        elsewhere=_elsewhere(steps, own),
        **_epochs(own),
        worker_fetches=_by_worker(fetches) if workers else (),
        files=_files(makers),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _gap(fetches: list[list[Any]]) -> float:
    """Return the time that a worker takes between two batches if the next one was asked for before."""
    gaps, last = [], dict[int, float]()
    for worker, started, ended, _ in sorted(fetches, key=lambda row: row[1]):
        if worker in last:
            gaps.append(started - last[worker])
        last[worker] = ended
    return min(sorted(gaps)[len(gaps) // 20], MAX_GAP_S) if gaps else 0.0


def _by_worker(fetches: list[list[Any]]) -> list[float]:
    times = defaultdict(list)
    for worker, started, ended, _ in fetches:
        times[worker].append(ended - started)
    return [_mean(times[worker]) for worker in sorted(times)]


def _lines(
    makers: list[Process], main: Process, fetches: list[list[Any]], step: float
) -> tuple[dict[str, float], list[Line]]:
    """Return the time of each stage of a fetch, and the lines that took most of fetches and steps."""
    counts: dict[tuple[str, str], list[float]] = {}
    for process in [main, *(process for process in makers if process is not main)]:
        for stage, place, count, on_cpu in process.rows["line"]:
            if process is main or stage != "step":
                entry = counts.setdefault((stage, place), [0, 0.0])
                entry[0], entry[1] = entry[0] + count, entry[1] + on_cpu
    in_fetch = {key: value for key, value in counts.items() if key[0] in FETCH_STAGES and key[0] != COLLATE}
    fetched = sum(value[0] for value in in_fetch.values())
    collate, fetch = _mean([row[3] for row in fetches]), _mean([row[2] - row[1] for row in fetches])
    stages = dict.fromkeys(FETCH_STAGES, 0.0) | {COLLATE: collate}
    lines = []
    for (stage, place), (count, on_cpu) in counts.items():
        total = fetched if (stage, place) in in_fetch else sum(v[0] for k, v in counts.items() if k[0] == stage)
        part = (fetch - collate) / max(1e-9, fetch) if (stage, place) in in_fetch else collate / max(1e-9, fetch)
        share = count / total * (1.0 if stage == "step" else part)
        if (stage, place) in in_fetch:
            stages[stage] += share * fetch
        filename, _, number = place.rpartition(":")
        code = linecache.getline(filename, int(number)).strip() if number else ""
        lines.append(Line(stage, place, share, on_cpu / count, code[:60]))
    if not fetched and fetch > collate:
        stages["transform"] = fetch - collate
    lines.sort(key=lambda line: -line.share)
    return stages, [
        line for kind in (True, False) for line in [x for x in lines if (x.stage == "step") == kind][:MAX_LINES]
    ]


def _gpu(main: Process, kept: list[Step]) -> Gpu | None:
    numbers = {step.gpu for step in kept}
    rows = [row for row in main.rows["gpu"] if row[0] in numbers]
    if not rows:
        return None
    count, sums = next(iter(main.rows["kernels"]), (1, {}))
    span = _mean([row[1] for row in rows])
    per_step = {name: value / count for name, value in sums.items()}
    return Gpu(
        busy=per_step.get("busy", span),
        idle=_mean([max(0.0, row[2]) for row in rows]),
        copy=per_step.get("copies", 0.0),
        pageable=per_step.get("pageable", 0.0),
        kernels=per_step.get("kernels", 0.0),
        blocked=per_step.get("blocked", 0.0),
        is_profiled=bool(sums),
    )


def _elsewhere(steps: list[Step], own: list[Step]) -> float:
    """Return the share of time in other loaders, between the first and the last batch of training."""
    start, stop = own[0].received, max(step.ended for step in steps)
    others = sum(step.ended - (step.epoch_started or step.asked) for step in steps if step.loader != own[0].loader)
    return min(1.0, others / max(1e-9, stop - start))


def _epochs(own: list[Step]) -> dict[str, float]:
    starts = [index for index, step in enumerate(own) if step.epoch_started is not None]
    if len(starts) < 2:
        return {}
    seconds = _mean([own[index].received - float(own[index].epoch_started or 0) for index in starts[1:]])
    return {"epoch_start": seconds, "epoch_batches": (starts[-1] - starts[0]) / (len(starts) - 1)}


def _files(makers: list[Process]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for process in makers:
        for (files,) in process.rows["files"]:
            found.update({item["path"]: item for item in files})
    for item in found.values():
        with suppress(OSError, ValueError):
            item["cached"] = cached_share(item["path"], item["bytes"])
    return list(found.values())
