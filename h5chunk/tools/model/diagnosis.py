"""Diagnose a training loop from its measurements: name what it waits for, and rank changes by their gain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from h5chunk.tools.model.cost import LEAST_SHARE, Cost, Fix, slowest_line
from h5chunk.tools.model.data_costs import data_costs, start_costs
from h5chunk.tools.model.pipeline import seconds_per_batch
from h5chunk.tools.model.seen import COLLATE, COPYING, DECODING, GATHERING, LOCK, READING, TRANSFORM, Seen
from h5chunk.tools.model.step_costs import machine_costs, step_costs

RULES = (machine_costs, data_costs, start_costs, step_costs)
STAGES = {
    COLLATE: "+ collating",
    DECODING: "+ decoding",
    TRANSFORM: "+ the rest of __getitem__",
    LOCK: "+ locks",
    READING: "+ reading",
}


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: the rate of training with all stages up to this one."""

    name: str
    rate: float  # samples/s
    alone: float | None  # samples/s of this stage alone; None if that was not measured


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, all costs, the ladder of rates, and the changes with the highest gains."""

    verdict: str
    cause: str
    is_data: bool
    utilisation: float
    costs: list[Cost]
    ladder: list[Rung]
    fixes: list[Fix]


def diagnose(seen: Seen) -> Diagnosis:
    """Find the largest cost of a loop, and rank the changes that reduce costs."""
    found = (cost for rule in RULES for cost in rule(seen))
    costs = sorted((cost for cost in found if cost.share >= LEAST_SHARE), key=lambda cost: -cost.share)
    fixes = [fix for cost in costs for fix in cost.fixes if fix.is_worth_it]
    fixes.sort(key=lambda fix: (-round(math.log(fix.gain.value), 1), fix.is_bound, -fix.gain.value))
    first = costs[0] if costs else Cost("none", False, 0.0, _healthy(seen))
    return Diagnosis(first.sentence, first.cause, first.is_data, utilisation(seen), costs, ladder(seen), fixes)


def utilisation(seen: Seen) -> float:
    """Return the fraction of the loop's time in which the GPU works or, without a GPU, the training step runs.

    Returns NaN if this was not measured: without a loader, nothing tells the step from preparing its batch.
    """
    if seen.gpu is not None and (seen.has_loader or seen.gpu.is_profiled):
        return min(1.0, seen.gpu.busy / seen.iteration)
    return seen.step / seen.iteration if seen.has_loader else math.nan


def _healthy(seen: Seen) -> str:
    """Return the verdict if no cost was found."""
    line, works = slowest_line(seen, "step"), utilisation(seen)
    gpu = "" if seen.gpu is None or math.isnan(works) else f"the GPU works {works:.0%} of the time, and "
    if not seen.has_loader:
        slowest = "no line takes most of it" if line is None else f"its slowest line is {line}, {line.share:.0%} of it"
        what = "an iteration includes preparing its batch, because no DataLoader or ChunkLoader feeds the loop"
        return f"Not certain: {gpu}{what}; {slowest}."
    waits = f"training waits {max(0.0, seen.waiting()[0]):.1%} of its time for batches"
    if line is not None and not gpu:
        waits += f"; the step's slowest line is {line}, {line.share:.0%} of it"
    return f"Nothing to fix: {gpu}{waits}."


def ladder(seen: Seen) -> list[Rung]:
    """Return the rate of training on one cached batch, and the rates after each further stage is added.

    Returns an empty list if no loader feeds the loop, because the stages of preparing a batch are not known.
    """
    if not seen.has_loader:
        return []
    loop, samples = seen.loop(), seen.samples
    gpu_busy, gpu_copy = (0.0, 0.0) if seen.gpu is None else (seen.gpu.busy, seen.gpu.copy)
    step = seen.step if seen.cached_step is None else seen.cached_step[1]
    rungs = [Rung("the step on one cached batch", samples / max(step - seen.copy, gpu_busy - gpu_copy, 1e-9), None)]
    if moved := max(seen.copy, gpu_copy):
        rungs.append(Rung("+ copying to the device", samples / max(step, gpu_busy), samples / moved))
    if seen.loader_threads:
        work = seen.stages[READING] + seen.stages[DECODING]
        alone = samples * seen.loader_threads / work if work else None
        made = samples / (seen.step + seen.stages[GATHERING] + seen.stages[COPYING])
        rungs.append(Rung("+ gathering and copying batches", min(rungs[-1].rate, made), None))
        return [*rungs, Rung("+ reading and decoding", samples / seen.iteration, alone)]
    if not seen.fetches:
        return [*rungs, Rung("+ the loader", samples / seen.iteration, None)]
    taken = 0.0
    for stage, name in STAGES.items():
        seconds = seen.stages.get(stage, 0.0)
        if seconds > 0.01 * seen.fetch:
            taken += seconds
            left = min(0.999, max(0.0, 1 - taken / seen.fetch))
            part = replace(loop.shorter(left, left), exclusive=loop.exclusive if stage == LOCK else 0.0)
            alone = samples * max(1, seen.workers) / seconds if seconds > 1e-6 else None
            rungs.append(Rung(name, min(rungs[-1].rate, samples / seconds_per_batch(part)), alone))
    return [*rungs, *_cold(seen, rungs[-1].rate)]


def _cold(seen: Seen, rate: float) -> list[Rung]:
    """Return the rate if all bytes were read from the disk; an empty list if the disk was not measured."""
    if seen.cold_s is None:
        return []
    loop, more = seen.loop(), seen.cold_s * max(0.0, 1 - seen.disk_bytes / max(1.0, seen.read_bytes))
    cold = seconds_per_batch(replace(loop, fetches=[seconds + more for seconds in loop.fetches]))
    alone = seen.samples * max(1, seen.workers) / seen.cold_s
    return [Rung("+ reading from the disk", min(rate, seen.samples / cold), alone)]
