"""Turn the measurements of a training process and its workers into the input of a diagnosis."""

from __future__ import annotations

import json
import linecache
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from h5chunk.errors import SourceError, count_text
from h5chunk.tools.doctor.files import cached_share, cold_seconds
from h5chunk.tools.doctor.launch import why_nothing
from h5chunk.tools.doctor.record import Fetch, Step, Use
from h5chunk.tools.model.seen import COLLATE, FETCH_STAGES, NO_LOADER, READING, TRANSFORM, Gpu, Line, Seen

MIN_STEPS = 8
MAX_STEPS = 2_000  # iterations that a diagnosis uses, the last ones
MAX_LINES = 8
VALIDATION = -2  # minus the number of a loader: the number of its epochs that do not train
MAX_GAP_S = 2e-3  # gaps between batches of a worker: if all are longer, it waits for requests
MAX_READ = 1 << 20  # bytes of a read whose time without the page cache is measured
TOO_HOT = 0x8 | 0x20 | 0x40 | 0x80  # NVML's bits for clocks that are reduced by heat or lack of power


@dataclass
class Process:
    """All measurements of one process, by kind."""

    role: str
    parent: str
    number: str
    rows: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def use_between(self, start: float, stop: float) -> Use:
        """Return the growth of each counter between its first and its last reading in an interval."""
        inside = [row for row in self.rows["use"] if start <= row[0] <= stop]
        inside = inside if len(inside) > 1 else self.rows["use"]
        if len(inside) < 2:
            return Use(*[0] * 7)
        return Use(*(b - a for a, b in zip(inside[0], inside[-1], strict=True)))


def read_processes(folder: Path) -> list[Process]:
    """Read the measurements that processes wrote to a folder. The last line of a process may be incomplete."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        role, parent, number = path.stem.split("-")
        process = Process(role, parent, number)
        for text in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                kind, *values = json.loads(text)
                process.rows[kind].append(values)
        found.append(process)
    return found


def was_ended(folder: Path) -> bool:
    """Return whether a process of the command was ended because of a limit on seconds or epochs."""
    return any(process.rows["ended"] for process in read_processes(folder))


def collect(folder: Path, loader: int | None = None, cached_step: tuple[float, float] | None = None) -> Seen:
    """Summarise the measurements of a training loop that are stored in ``folder``.

    Raises SourceError if no loop was measured, or if it had too few iterations.
    """
    processes = read_processes(folder)
    mains = [process for process in processes if process.rows["step"]]
    if not mains and any(process.rows["loader"] or process.rows["fetch"] for process in processes):
        raise SourceError("the training was killed before its first iterations were written, within half a second")
    if not mains:
        raise SourceError(why_nothing(folder))
    most = max(len(process.rows["step"]) for process in mains)
    mains = [process for process in mains if 2 * len(process.rows["step"]) > most]
    mains.sort(key=lambda process: process.rows["rank"] or [[0]])
    ranks = [_rank(process) for process in mains] if all(process.rows["rank"] for process in mains) else []
    main = mains[ranks.index(min(ranks, key=lambda rank: rank[1])) if ranks else 0]
    steps = without_validation([Step(*row) for row in main.rows["step"]])
    loader = loader if loader in {step.loader for step in steps} else training_loader(steps)
    own = [step for step in steps if step.loader == loader]
    kept = steady(own)
    if len(kept) < MIN_STEPS:
        raise SourceError(
            f"the training loop ended after {count_text(len(own), 'iteration')}, which are too few to diagnose it: let "
            f"it run for at least {MIN_STEPS + 4}"
        )
    workers = [process for process in processes if process.parent == main.number and process.rows["fetch"]]
    workers = [] if own[0].loader == NO_LOADER else workers  # they work for other loops, such as validation
    return _seen(main, workers, steps, own, kept, ranks=ranks, cached_step=cached_step)


def _rank(process: Process) -> tuple[float, float]:
    """Return the mean times in which a rank completes an iteration, and waits for the gradients of other ranks."""
    kept = steady([Step(*row) for row in process.rows["step"]])
    iteration, backward = _mean([step.ended - step.asked for step in kept]), _mean([step.backward for step in kept])
    count, sums = _profiled(process)
    return iteration, sums.get("reduce", 0.0) / count or backward


def training_loader(steps: Iterable[Step]) -> int:
    """Return the training loader: the one with the most optimizer steps or, without any, the most gradient time."""
    weight: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        weight[step.loader] += 1e6 * step.optimizer_steps + (1 if step.trains else 1e-3) * (step.ended - step.asked)
    return max(weight, key=weight.__getitem__)


def without_validation(steps: Sequence[Step]) -> list[Step]:
    """Return the steps, with other numbers for a loader's epochs without steps of the optimizer, if others have some.

    Such epochs are validation, by the loader of training or by one that was created at the same line of code.
    """
    epochs, epoch_of, found = dict[tuple[int, int], int](), Counter[int](), []
    for step in steps:
        epoch_of[step.loader] += step.epoch_started is not None
        found.append((step.loader, epoch_of[step.loader]))
        epochs[found[-1]] = epochs.get(found[-1], 0) + step.optimizer_steps
    trained = {loader for (loader, _), count in epochs.items() if count}
    return [
        step._replace(loader=VALIDATION - step.loader) if step.loader in trained and not epochs[epoch] else step
        for step, epoch in zip(steps, found, strict=True)
    ]


def steady(steps: Sequence[Step]) -> list[Step]:
    """Return the last iterations, without warm-up, profiled steps and the first batch of each epoch."""
    ready = [step for step in steps if step.epoch_started is None and step.gpu != -1]
    return ready[min(len(ready) // 5, 50) :][-MAX_STEPS:]


def _seen(
    main: Process, workers: list[Process], steps: list[Step], own: list[Step], kept: list[Step], **known: Any
) -> Seen:
    start, stop = kept[0].asked, kept[-1].ended
    facts: dict[int, Any] = {row[0]: row[1:] for row in main.rows["loader"]}
    loader, batch, machine = facts.get(own[0].loader, ({}, {}, {}))
    makers = workers or [main]
    fetches = sorted(Fetch(*row) for process in makers for row in process.rows["fetch"])
    fetches = [row for row in fetches if start <= row.started and row.ended <= stop and (workers or row.worker < 0)]
    fetches = [] if own[0].loader == NO_LOADER else fetches
    stages, lines = _lines(makers, main, fetches)
    made = [step.stages for step in kept if step.stages]
    if made:
        stages = {name: _mean([row[name] for row in made]) for name in made[0]}
    takes = sorted(step.take for step in kept if step.take)
    names = ("samples", "copy", "copy_bytes", "pageable_bytes", "optimizer")
    means: dict[str, Any] = {name: _mean([getattr(step, name) for step in kept]) for name in names}
    seen = Seen(
        waits=[step.received - step.asked for step in kept],
        steps=[step.ended - step.resumed for step in kept],
        fetches=[row.ended - row.started for row in fetches],
        fetched_by=[row.worker for row in fetches],
        stages=stages,
        lines=lines,
        loader=loader,
        batch=batch,
        cores=int(machine.get("cores", 1)),
        threads=int(machine.get("threads", 1)),
        fetch_gap=_gap(fetches) if workers else 0.0,
        take=takes[len(takes) // 10] if takes else None,  # a low value, because a busy worker slows it down
        h5_reads=_mean([row.h5_reads for row in fetches if row.h5_reads]),
        warm=_warm(fetches),
        in_torch=_mean([row[3] for row in main.rows["line"] if row[0] == "step"]),
        **_holder(main),
        gpu=_gpu(main, kept),
        elsewhere=_elsewhere(steps, own),
        worker_fetches=_by_worker(fetches) if workers else (),
        files=_files(makers),
        lost=sorted({text for process in [main, *makers] for (text,) in process.rows["lost"]}),
        **means,
        **_usage(main, workers, kept, fetches),
        **_epochs(own),
        **known,
    )
    return replace(seen, cold_s=_cold(seen))


def _usage(main: Process, workers: list[Process], kept: list[Step], fetches: list[Fetch]) -> dict[str, Any]:
    """Return the use of cores, files and memory by steps and fetches, per iteration."""
    start, stop = kept[0].asked, kept[-1].ended
    per_batch = (stop - start) / len(kept)
    growth = [process.use_between(start, stop) for process in (main, *workers)]
    used, *others = (Use(*(value * per_batch / max(1e-9, use.time) for value in use)) for use in growth)
    fetch = Use(*map(sum, zip(*others, strict=True))) if workers else used._replace(delay=0.0)
    fetch_cpu = _mean([row.cpu for row in fetches])
    step_cpu = used.cpu if workers else max(0.0, used.cpu - fetch_cpu)
    return {
        "fetch_cpu": fetch_cpu,
        "fetch_delay": fetch.delay,
        "step_cpu": step_cpu,
        "step_delay": used.delay,
        "other_cores": max(0.0, (used.everyone - step_cpu - fetch_cpu) / per_batch),
        "read_bytes": fetch.read,
        "disk_bytes": fetch.disk,
        "memory_stall": used.memory / per_batch,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _gap(fetches: list[Fetch]) -> float:
    """Return the time that a worker takes between two batches if the next batch was already requested."""
    gaps, last = [], dict[int, float]()
    for row in sorted(fetches, key=lambda row: row.started):
        if row.worker in last:
            gaps.append(row.started - last[row.worker])
        last[row.worker] = row.ended
    gap = sorted(gaps)[len(gaps) // 20] if gaps else 0.0
    return gap if gap < MAX_GAP_S else 0.0


def _warm(fetches: list[Fetch]) -> float:
    """Return the time of collating samples a second time, relative to the first time."""
    ratios = [row.again / row.collate for row in fetches if row.again and row.collate]
    return min(1.0, statistics.median(ratios)) if ratios else 1.0


def _holder(main: Process) -> dict[str, Any]:
    """Return how often another thread held the GIL (fraction of the line samples), and the most frequent holder."""
    found: Any = Counter()
    for name, place, idle in main.rows["held"]:
        found[f"{name} ({place.rpartition('/')[2] or 'a library'})"] += idle
    if not found:
        return {}
    return {"held": found.total() / len(main.rows["line"]), "holder": found.most_common(1)[0][0]}


def _by_worker(fetches: list[Fetch]) -> list[float]:
    times = defaultdict(list)
    for row in fetches:
        times[row.worker].append(row.ended - row.started)
    return [_mean(times[worker]) for worker in sorted(times)]


def _lines(makers: list[Process], main: Process, fetches: list[Fetch]) -> tuple[dict[str, float], list[Line]]:
    """Return the time of each stage of a fetch, and the slowest lines of fetches and steps."""
    on_cpu: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for process in [*makers, *([main] if main not in makers else [])]:
        for stage, place, used, _ in process.rows["line"]:
            if (process is main and stage == "step") or (process in makers and stage != "step"):
                on_cpu[stage, place].append(used)
    fetch = max(1e-9, _mean([row.ended - row.started for row in fetches]))
    stages = _stages(fetches, {key: len(used) for key, used in on_cpu.items()})
    lines = []
    for (stage, place), used in on_cpu.items():
        of_stage = sum(len(other) for key, other in on_cpu.items() if key[0] == stage)
        part = len(used) / of_stage
        whole = 1.0 if stage == "step" else stages[stage] / fetch
        error = 2 * math.sqrt(part * (1 - part) / of_stage) * whole
        filename, _, number = place.rpartition(":")
        code = linecache.getline(filename, int(number)).strip() if number else ""
        lines.append(Line(stage, place, part * whole, _mean(used), code[:60], error))
    lines.sort(key=lambda line: -line.share)
    by_kind = ([line for line in lines if (line.stage == "step") == kind][:MAX_LINES] for kind in (True, False))
    return stages, [line for kind in by_kind for line in kind]


def _stages(fetches: list[Fetch], counts: dict[tuple[str, str], int]) -> dict[str, float]:
    """Return the seconds of each stage of a fetch. Stages that were not measured are estimated from line samples."""
    seconds = dict.fromkeys(FETCH_STAGES, 0.0)
    for (stage, _), count in counts.items():
        seconds[stage] = seconds.get(stage, 0.0) + count
    seconds.pop("step", None)
    seconds[COLLATE] = 0.0
    timed = [row for row in fetches if row.h5_reads]
    fetch, collate = _mean([row.ended - row.started for row in fetches]), _mean([row.collate for row in fetches])
    reading = 0.0
    if timed:
        seconds[READING] = 0.0
        reading = fetch * sum(row.h5_seconds for row in timed) / sum(row.ended - row.started for row in timed)
    rest = max(0.0, fetch - collate - reading)
    sampled = sum(seconds.values())
    if not sampled:
        return seconds | {COLLATE: collate, READING: reading, TRANSFORM: rest}
    seconds = {stage: rest * count / sampled for stage, count in seconds.items()}
    return seconds | {COLLATE: collate, READING: seconds[READING] + reading}


def _profiled(process: Process) -> tuple[int, dict[str, float]]:
    """Return the number of profiled steps, and the totals of their GPU work."""
    return process.rows["kernels"][0] if process.rows["kernels"] else (1, {})


def _gpu(main: Process, kept: list[Step]) -> Gpu | None:
    numbers = {step.gpu for step in kept}
    rows = [row for row in main.rows["gpu"] if row[0] in numbers]
    count, sums = _profiled(main)
    if not rows or sums.get("kernels") == 0:  # training does not use the GPU
        return None
    per_step = {name: value / count for name, value in sums.items()}
    clocks = main.rows["clock"] or [[0, 1.0]]
    hot = [share for reasons, share in clocks if reasons & TOO_HOT]
    return Gpu(
        busy=per_step.get("busy", _mean([row[1] for row in rows])),
        idle=_mean([max(0.0, row[2]) for row in rows]),
        copy=per_step.get("copies", 0.0),
        kernels=per_step.get("kernels", 0.0),
        blocked=per_step.get("blocked", 0.0),
        is_profiled=bool(sums),
        slow_clocks="it is too hot, or gets too little power" if 2 * len(hot) > len(clocks) else "",
        clock=_mean(hot) if hot else 1.0,
    )


def _elsewhere(steps: list[Step], own: list[Step]) -> float:
    """Return the share of the time that other loaders take, of the time since the first training batch."""
    start, stop = own[0].received, max(step.ended for step in steps)
    others = sum(step.ended - (step.epoch_started or step.asked) for step in steps if step.loader != own[0].loader)
    return min(1.0, others / max(1e-9, stop - start))


def _epochs(own: list[Step]) -> dict[str, Any]:
    starts = [index for index, step in enumerate(own) if step.epoch_started is not None]
    if len(starts) < 2:
        return {}
    seconds = _mean([own[index].received - float(own[index].epoch_started or 0) for index in starts[1:]])
    return {"epoch_start": seconds, "epoch_batches": (starts[-1] - starts[0]) / (len(starts) - 1)}


def _files(makers: list[Process]) -> list[dict[str, Any]]:
    """Return the files that processes had open, those that h5py read most often first, with a dataset of each."""
    found: dict[str, dict[str, Any]] = {}
    for process in makers:
        for (files,) in process.rows["files"]:
            found.update({item["path"]: {**item, "reads": 0} for item in files})
    for process in makers:
        for path, facts in process.rows["dataset"]:
            with suppress(OSError):  # the file was deleted
                item = found.get(path) or {"path": path, "bytes": Path(path).stat().st_size, "reads": 0}
                item["reads"] += 1
                is_largest = facts and math.prod(facts["shape"]) > math.prod(item.get("shape", [0]))  # unlike labels
                found[path] = {**item, **facts} if is_largest else item
    for item in found.values():
        with suppress(OSError, ValueError):
            item["cached"] = cached_share(item["path"], item["bytes"])
    return sorted(found.values(), key=lambda item: -item["reads"])


def _cold(seen: Seen) -> float | None:
    """Measure the time to read the bytes of a batch from the disk; return None if that is not possible.

    The file must be the one that the loop reads: one that h5py read, or the only one that is open.
    """
    if not seen.read_bytes or not seen.files or not (seen.files[0]["reads"] or len(seen.files) == 1):
        return None
    file = seen.files[0]
    size = round(min(MAX_READ, max(4096, seen.read_bytes / max(1.0, seen.h5_reads or seen.samples))))
    with suppress(OSError, ValueError, AttributeError):
        seconds = cold_seconds(file["path"], file["bytes"], size)
        return None if seconds is None else seconds * seen.read_bytes / size
    return None
