"""Say in one sentence what a training loop waits for, from what was seen of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from h5chunk.tools.model.fixes import (
    Fix,
    all_fixes,
    contention,
    epoch_start_share,
    is_launch_bound,
    read_ratio,
    shorter,
    slowest_line,
    today,
)
from h5chunk.tools.model.pipeline import seconds_per_batch
from h5chunk.tools.model.seen import COLLATE, DECODING, LOCK, READING, TRANSFORM, Seen

LEAST_SHARE = 0.05  # of all time: less is not worth a word
FEW_SAMPLES = 4  # of a batch that is taken from a worker
CLEAR_SHARE = 0.1  # from this share on, a finding is certain


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: training with the stages so far."""

    name: str
    rate: float  # samples/s
    alone: float | None  # samples/s of the stage without the others; None if it was not seen


@dataclass(frozen=True)
class Finding:
    """A cost, its share of all time, and the sentence that says so."""

    cause: str
    is_data: bool
    share: float
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, the findings behind it, the ladder, and the changes that gain most."""

    verdict: str
    cause: str
    is_data: bool
    is_certain: bool
    utilisation: float
    findings: list[Finding]
    ladder: list[Rung]
    fixes: list[Fix]


def diagnose(seen: Seen) -> Diagnosis:
    """Find the largest cost of a loop, and rank the changes that lower it."""
    findings = sorted(_findings(seen), key=lambda finding: -finding.share)
    findings = [finding for finding in findings if finding.share >= LEAST_SHARE]
    fixes = all_fixes(seen)
    common = {"findings": findings, "ladder": ladder(seen), "fixes": fixes, "utilisation": utilisation(seen)}
    if not findings:
        return Diagnosis(f"Not your data: {_healthy(seen)}.", "none", False, True, **common)  # type: ignore[arg-type]
    first = findings[0]
    certain = first.share >= CLEAR_SHARE and _is_steady(seen, first)
    verdict = first.sentence if certain else f"Not certain: {first.sentence[0].lower()}{first.sentence[1:]}"
    return Diagnosis(verdict, first.cause, first.is_data, certain, **common)  # type: ignore[arg-type]


def utilisation(seen: Seen) -> float:
    """Return the share of the training loop's time in which the GPU works, or on the CPU, in which the step runs."""
    if seen.gpu is not None:
        return min(1.0, seen.gpu.busy / seen.iteration)
    return seen.step / seen.iteration


def _is_steady(seen: Seen, finding: Finding) -> bool:
    """Return whether the loop waits in most parts of the measurement, if waiting is what was found."""
    if not finding.is_data:
        return True
    block = max(1, len(seen.waits) // 5)
    waits = [sum(seen.waits[i : i + block]) for i in range(0, block * 5, block)]
    steps = [sum(seen.steps[i : i + block]) for i in range(0, block * 5, block)]
    shares = [wait / max(1e-9, wait + step) for wait, step in zip(waits, steps, strict=True)]
    return sum(share > LEAST_SHARE for share in shares) >= 3 and statistics.median(shares) > LEAST_SHARE


def ladder(seen: Seen) -> list[Rung]:
    """Return the rates of training as one stage after another is added, beginning with one batch on the device."""
    loop, samples = today(seen), seen.samples
    gpu_busy, gpu_copy = (0.0, 0.0) if seen.gpu is None else (seen.gpu.busy, seen.gpu.copy)
    bare = max(seen.step - seen.copy, gpu_busy - gpu_copy, 1e-9)
    rungs = [Rung("the step on one cached batch", samples / bare, None)]
    moved = max(seen.copy, gpu_copy)
    if moved:
        step = max(seen.step, gpu_busy)
        rungs.append(Rung("+ copying to the device", samples / step, samples / moved))
    if not seen.fetches:
        return [*rungs, Rung("+ the loader", samples / seen.iteration, None)]
    taken = 0.0
    names = {COLLATE: "+ collating", DECODING: "+ decoding", TRANSFORM: "+ the rest of __getitem__", LOCK: "+ locks"}
    for stage, name in {**names, READING: _reading(seen)}.items():
        seconds = seen.stages.get(stage, 0.0)
        if seconds > 0.01 * seen.fetch:
            taken += seconds
            left = min(0.999, max(0.0, 1 - taken / seen.fetch))
            part = replace(shorter(loop, left, left), exclusive=loop.exclusive if stage == LOCK else 0.0)
            alone = samples * max(1, seen.workers) / seconds if seconds > 1e-6 else None
            rungs.append(Rung(name, min(rungs[-1].rate, samples / seconds_per_batch(part)), alone))
    return rungs


def _reading(seen: Seen) -> str:
    if not seen.disk_bytes or not seen.read_bytes:
        return "+ reading from the page cache"
    return f"+ reading, {min(1.0, seen.disk_bytes / seen.read_bytes):.0%} of it from the disk"


def _findings(seen: Seen) -> Iterator[Finding]:
    rest = 1 - seen.elsewhere
    iteration = seen.iteration
    starts = epoch_start_share(seen)
    yield from _data(seen, rest * (1 - starts))
    if seen.elsewhere:
        text = f"Not training: other loaders, such as validation, take {seen.elsewhere:.0%} of the time."
        yield Finding("validation", False, seen.elsewhere, text)
    if starts:
        text = f"Starting epochs takes {starts:.0%} of the training time, {seen.epoch_start:.2g} s each."
        yield Finding("epoch start", True, rest * starts, text)
    delay = contention(seen)
    if seen.threads > seen.cores and delay > 0.1:
        text = (
            f"Not your data: {seen.threads} threads of torch and {seen.workers} workers compete for "
            f"{seen.cores} cores, and the training thread waits {delay:.0%} of its time for one."
        )
        yield Finding("oversubscription", False, rest * max(delay, 1 - 1 / max(1.0, seen.threads / seen.cores)), text)
    if seen.gpu is not None:
        yield from _gpu(seen, rest, iteration)


def _data(seen: Seen, rest: float) -> Iterator[Finding]:
    """Say what the loop waits for when it asks for a batch."""
    handover = seen.handover if seen.workers else 0.0
    share = min(seen.idle, (seen.wait - handover) / seen.iteration) * rest
    if handover > 0.25 * seen.iteration or (seen.workers and seen.samples <= FEW_SAMPLES and share > CLEAR_SHARE):
        text = (
            f"Not your data: taking {seen.samples:.0f} samples from a worker costs {1e6 * handover:.0f} µs or more, "
            f"{handover / seen.iteration:.0%} of the time: batches are too small."
        )
        lost = seen.idle if seen.gpu is not None and seen.samples <= FEW_SAMPLES else handover / seen.iteration
        yield Finding("small batches", False, rest * max(share / rest, lost), text)
        return
    if seen.fetches:
        simulated = _simulated_wait(seen)
        if simulated * rest < share / 2 and seen.workers:
            yield from _late(seen, share - simulated * rest)
            share = simulated * rest
    waits = f"Your data: training waits {share:.0%} of its time for batches"
    if not seen.fetches:
        yield Finding("loader", True, share, f"{waits}.")
        return
    stage, seconds = max(seen.stages.items(), key=lambda item: item[1])
    if seen.workers > 1 and seen.stages.get(LOCK, 0.0) > 0.2 * seen.fetch:  # more workers would only wait longer
        stage, seconds = LOCK, seen.stages[LOCK]
    part = seconds / max(1e-9, seen.fetch)
    line = next((line for line in seen.lines if line.stage == stage and line.place), None) or slowest_line(seen)
    where = f" ({line})" if line is not None and line.stage == stage else ""
    names = {TRANSFORM: "the code of __getitem__", READING: "reading", LOCK: "waiting for a lock"}
    text = f"{waits}; {names.get(stage, stage)} takes {part:.0%} of making one{where}"
    ratio = read_ratio(seen)
    if stage == READING and ratio >= 2 and seen.files:
        text += f", and reads {ratio:.0f} times the bytes that it uses"
    times = seen.worker_fetches
    if len(times) > 1 and max(times) > 1.4 * sum(times) / len(times):
        slowest = max(times) / max(1e-9, min(times))
        text += f"; one worker is {slowest:.1f} times slower than another, and all wait for it"
        stage = "unbalanced"
    yield Finding(stage, True, share, f"{text}.")


def _simulated_wait(seen: Seen) -> float:
    """Return the share of time that the loop would wait for its workers if no other process used the cores."""
    loop = replace(today(seen), cores=seen.cores)
    ready = shorter(replace(loop, exclusive=0.0), 0.999, 0.999)
    return 1 - seconds_per_batch(ready) / max(1e-9, seconds_per_batch(loop))


def _late(seen: Seen, share: float) -> Iterator[Finding]:
    """Say that batches come late although the workers could make them in time."""
    late = f"batches come {share:.0%} of the time late, although the workers could make them in time"
    if seen.other_cores > 0.15 * seen.cores:
        text = f"Not your data: {late}: other processes use {seen.other_cores:.1f} of {seen.cores} cores."
        yield Finding("other processes", False, share, text)
    elif share > CLEAR_SHARE:
        yield Finding(
            "unknown", False, min(share, 0.99 * CLEAR_SHARE), f"Not your data: {late}; the cause was not seen."
        )


def _gpu(seen: Seen, rest: float, iteration: float) -> Iterator[Finding]:
    gpu = seen.gpu
    assert gpu is not None
    busy = f"the GPU works {gpu.busy / iteration:.0%} of the time"
    idle = max(0.0, 1 - gpu.busy / iteration)
    line = next((line for line in seen.lines if line.stage == "step" and line.place), None)
    copies = line is not None and (".to(" in line.code or ".cuda(" in line.code)
    blocking = max(seen.copy, line.share * seen.step if line is not None and copies else 0.0) / iteration
    if seen.pageable_bytes > 0.5 * seen.copy_bytes and blocking > LEAST_SHARE:
        text = f"Copying to the GPU from pageable memory takes {blocking:.0%} of the time; {busy}."
        yield Finding("copy", True, rest * blocking, text)
    if not gpu.is_profiled or idle < 0.15:
        return
    where = f"; its slowest line is {line}" if line is not None else ""
    host = max(0.0, (seen.step - gpu.blocked) / iteration - blocking)
    if gpu.blocked > 0.1 * iteration:
        lost = min(idle, 2 * gpu.blocked / iteration)  # while one waits, the other works
        text = f"Not your data: Python waits for the GPU in each step, and the GPU for Python; {busy}{where}."
        yield Finding("synchronisation", False, rest * lost, text)
    if host > 0.3:
        if is_launch_bound(seen):
            text = f"Not your data: launching {gpu.kernels:.0f} kernels per step takes longer than they run; {busy}."
            yield Finding("launches", False, rest * min(idle, host), text)
        else:
            text = f"Not your data: Python keeps the GPU waiting within the step{where}; {busy}."
            yield Finding("python", False, rest * min(idle, host), text)


def _healthy(seen: Seen) -> str:
    if seen.gpu is not None:
        return f"the GPU works {utilisation(seen):.0%} of the time, and training waits {_waits(seen)} of it for batches"
    line = next((line for line in seen.lines if line.stage == "step" and line.place), None)
    where = f"; its slowest line is {line}, {line.share:.0%} of it" if line is not None else ""
    return f"the step takes {utilisation(seen):.0%} of the time{where}"


def _waits(seen: Seen) -> str:
    return f"{max(0.0, seen.wait / seen.iteration):.1%}"
