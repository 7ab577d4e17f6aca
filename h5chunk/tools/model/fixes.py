"""Predict what changes to a training loop would gain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from h5chunk.plan.cache import ChunkGrid
from h5chunk.tools.model.pipeline import Loop, Range, gain_range, seconds_per_batch
from h5chunk.tools.model.seen import COLLATE, DECODING, LOCK, READING, Line, Seen

LEAST_GAIN = 1.05  # smaller gains are not shown
LEAST_BOUND = 1.1  # the same of those that only have an upper limit
ENOUGH = 1.03  # of the best time: fewer workers that are as good are preferred
MAX_WORKERS = 32
PINNED_BYTES_S = 2e10  # of a copy from pinned memory, bytes/s: a cautious figure for PCIe 4
PINNING_BYTES_S = 8e9  # of copying to pinned memory, by a thread
UNBALANCED = 1.4  # slowest worker over the mean
MORE = 8  # times larger batches
LAUNCH_S = 6e-5  # per kernel, with the Python around it
BAD_READS = 3.0  # bytes read over bytes used


@dataclass(frozen=True)
class Fix:
    """A change with its predicted gain: how many times faster the whole training is."""

    name: str
    cause: str  # of what it cures
    gain: Range
    code: str
    apply: dict[str, Any] = field(default_factory=dict)  # how it can be tried without changing the script
    is_bound: bool = False  # the gain is an upper limit, as if the cost were gone

    @property
    def gain_text(self) -> str:
        low, high = f"{self.gain.low:.2g}", f"{self.gain.high:.2g}"
        if self.is_bound:
            return f"at most {self.gain.high:.2g} times"
        return f"{self.gain.value:.2g} times" + (f" ({low} to {high})" if low != high else "")


def all_fixes(seen: Seen) -> list[Fix]:
    """Return the changes that gain at least 5 %, the best first; those that need no rewriting before equal ones."""
    found = [fix for rule in RULES for fix in rule(seen)]
    found = [fix for fix in found if fix.gain.value >= (LEAST_BOUND if fix.is_bound else LEAST_GAIN)]
    return sorted(found, key=lambda fix: (-round(math.log(fix.gain.value), 1), fix.is_bound, -fix.gain.value))


def today(seen: Seen) -> Loop:
    """Return the loop as it is, with what only one worker can do at a time."""
    lock = seen.stages.get(LOCK, 0.0)
    loop = seen.loop()
    if loop.workers < 2 or lock < 0.2 * seen.fetch:
        return loop
    return replace(loop, exclusive=seen.iteration)


def _predict(seen: Seen, loop: Loop, changed: Loop) -> Range:
    """Predict the gain on all time, of which other loaders and the starts of epochs are not changed."""
    gain = gain_range(loop, changed)
    rest = other_share(seen)
    low, value, high = (1 / ((1 - rest) / max(1e-9, ratio) + rest) for ratio in (gain.low, gain.value, gain.high))
    return Range(value, low, high)


def other_share(seen: Seen) -> float:
    """Return the share of all time outside of the iterations of training."""
    return 1 - (1 - seen.elsewhere) * (1 - epoch_start_share(seen))


def epoch_start_share(seen: Seen) -> float:
    """Return the share of the training loop's time in which it starts epochs."""
    if not seen.epoch_batches:
        return 0.0
    start = max(0.0, seen.epoch_start - seen.wait)
    return start / (start + seen.epoch_batches * seen.iteration)


def without(seen: Seen, loop: Loop, stage: str, part: float = 1.0) -> Loop:
    """Return a loop whose fetches lack a part of a stage's time."""
    share = min(0.999, part * seen.stages.get(stage, 0.0) / max(1e-9, seen.fetch))
    return shorter(loop, share, 0.0 if stage == LOCK else share)


def shorter(loop: Loop, share: float, cpu_share: float) -> Loop:
    """Return a loop whose fetches lack a share of their time, and a share of their CPU time."""
    fetches = [seconds * (1 - share) for seconds in loop.fetches]
    return replace(loop, fetches=fetches, fetch_cpu=loop.fetch_cpu * (1 - cpu_share))


def _where(seen: Seen) -> str:
    place = str(seen.loader.get("made_at") or "").rpartition("/")[2]
    return f"{place}: " if place else ""


def _is_torch(seen: Seen) -> bool:
    return seen.loader.get("kind") == "DataLoader" and bool(seen.fetches)


def _workers(seen: Seen) -> Iterator[Fix]:
    if not _is_torch(seen):
        return
    loop = today(seen)
    counts = sorted({2**n for n in range(6)} | {seen.cores})
    counts = [count for count in counts if loop.workers < count <= min(MAX_WORKERS, max(2, seen.cores))]
    times = {count: seconds_per_batch(replace(loop, workers=count)) for count in counts}
    best = next((count for count in counts if times[count] <= ENOUGH * min(times.values())), None)
    if best is not None:
        gain = _predict(seen, loop, replace(loop, workers=best, slowdown=()))
        text = f"{_where(seen)}DataLoader(..., num_workers={best})"
        yield Fix(f"num_workers={best}", "workers", gain, text, {"loader": {"num_workers": best}})


def _prefetch(seen: Seen) -> Iterator[Fix]:
    loop = today(seen)
    if _is_torch(seen) and loop.workers > 0 and loop.prefetch < 8 and not _is_unbalanced(seen):
        gain = _predict(seen, loop, replace(loop, prefetch=8))
        code = f"{_where(seen)}DataLoader(..., prefetch_factor=8)"
        yield Fix("prefetch_factor=8", "prefetch", gain, code, {"loader": {"prefetch_factor": 8}})


def _is_unbalanced(seen: Seen) -> bool:
    times = seen.worker_fetches
    return len(times) > 1 and max(times) > UNBALANCED * sum(times) / len(times)


def _balance(seen: Seen) -> Iterator[Fix]:
    if _is_torch(seen) and _is_unbalanced(seen) and seen.loader.get("in_order", True):
        loop = today(seen)
        gain = _predict(seen, loop, replace(loop, in_order=False))
        code = f"{_where(seen)}DataLoader(..., in_order=False), which changes the order of the batches"
        yield Fix("in_order=False", "unbalanced", gain, code, {"loader": {"in_order": False}})


def contention(seen: Seen) -> float:
    """Return the share of an iteration that waiting for a core costs."""
    lost = seen.step_delay / max(1e-9, seen.iteration)
    return lost if seen.threads > seen.cores or seen.workers else 0.0


def _threads(seen: Seen) -> Iterator[Fix]:
    wanted = max(1, seen.cores - min(seen.workers, seen.cores - 1))
    if seen.threads > seen.cores and contention(seen) > 0.1:
        gain = seen.iteration / max(1e-9, seen.iteration - seen.step_delay)
        code = f"torch.set_num_threads({wanted}), or OMP_NUM_THREADS={wanted}"
        yield Fix(f"{wanted} threads", "oversubscription", Range(gain, 1.0, 2 * gain), code, {"threads": wanted})


def _pinned(seen: Seen) -> Iterator[Fix]:
    share = seen.pageable_bytes / max(1.0, seen.copy_bytes)
    if share < 0.5 or seen.gpu is None:
        return
    copy = seen.copy_bytes / PINNED_BYTES_S
    step = max(1e-9, seen.step - seen.copy)
    after = max(seen.wait + step, seen.gpu.busy - seen.gpu.copy + copy, seen.copy_bytes / PINNING_BYTES_S)
    gain = seen.iteration / after
    code = f"{_where(seen)}DataLoader(..., pin_memory=True), and tensor.to(device, non_blocking=True)"
    apply = {"loader": {"pin_memory": True}} if _is_torch(seen) else {}
    yield Fix("pin_memory=True, non_blocking=True", "copy", Range(gain, 0.9 * gain, 1.1 * gain), code, apply)


def _persistent(seen: Seen) -> Iterator[Fix]:
    share = epoch_start_share(seen)
    if seen.workers and share > 0.03 and not seen.loader.get("persistent_workers"):
        gain = 1 / (1 - share * (1 - seen.elsewhere))
        code = f"{_where(seen)}DataLoader(..., persistent_workers=True)"
        bounds = Range(gain, 1 + (gain - 1) / 2, gain * 1.1)
        yield Fix("persistent_workers=True", "epoch start", bounds, code, {"loader": {"persistent_workers": True}})


def read_ratio(seen: Seen) -> float:
    """Return the bytes that were read from files over the bytes of a batch; 0 if nothing was seen."""
    used = float(seen.batch.get("bytes") or 0)
    file = _chunked(seen)
    if file is not None and used:
        grid = grid_of(file)
        used = min(used, seen.samples * grid.sample_bytes)
    return seen.read_bytes / used if used else 0.0


def _chunked(seen: Seen) -> dict[str, Any] | None:
    """Return the largest HDF5 file whose data is chunked; None if none was open."""
    files = [file for file in seen.files if file.get("chunks")]
    return max(files, key=lambda file: file["bytes"], default=None)


def grid_of(file: dict[str, Any]) -> ChunkGrid:
    """Return the chunk grid of a file's largest dataset."""
    return ChunkGrid(tuple(file["shape"]), tuple(file["chunks"]), file["itemsize"], file["filtered"])


def _reads(seen: Seen) -> Iterator[Fix]:
    file = _chunked(seen)
    if file is None or seen.stages.get(READING, 0.0) < 0.1 * seen.fetch:
        return
    grid, loop = grid_of(file), today(seen)
    held = file["cache"][1] // max(1, grid.chunk_bytes)
    needed = grid.num_bands * grid.chunks_per_sample
    if read_ratio(seen) < BAD_READS and held >= grid.chunks_per_sample:
        return
    ratio = max(1.0, read_ratio(seen), grid.amplification(cached=not held) if not seen.read_bytes else 1.0)
    gain = _predict(seen, loop, without(seen, loop, READING, 1 - 1 / ratio))
    name = file["path"].rpartition("/")[2]
    code = f'h5chunk repack {file["path"]} repacked.h5, then h5chunk.ChunkLoader("repacked.h5", ...)'
    yield Fix(f"repack {name}", "chunks", Range(gain.value, gain.low * 0.8, gain.high * 1.2), code)
    if needed * grid.chunk_bytes < 2 << 30:
        size = (needed + 1) * grid.chunk_bytes
        code = f"h5py.File(..., rdcc_nbytes={size:_}, rdcc_nslots={grid.num_slots}): in each worker"
        apply = {"cache": [grid.num_slots, size]}
        yield Fix(f"chunk cache of {size >> 20} MiB", "chunks", Range(gain.value, gain.low, gain.high), code, apply)


def _lock(seen: Seen) -> Iterator[Fix]:
    line = next((line for line in seen.lines if line.stage == LOCK), None)
    if line is not None and seen.workers > 1 and today(seen).exclusive:
        loop = today(seen)
        gain = _predict(seen, loop, replace(without(seen, loop, LOCK), exclusive=0.0))
        yield Fix(f"no lock at {line}", "lock", gain, f"{line}: let the workers not wait for each other", is_bound=True)


def _collate(seen: Seen) -> Iterator[Fix]:
    least = 0.1 if seen.loader.get("collate") else 0.4  # torch's own is rarely what to change
    if _is_torch(seen) and seen.stages.get(COLLATE, 0.0) > least * seen.fetch:
        loop = today(seen)
        gain = _predict(seen, loop, without(seen, loop, COLLATE))
        name = seen.loader.get("collate") or "default_collate"
        code = f"{name}: make one array per field in `__getitems__`, without a tensor per sample"
        yield Fix(f"without {name}", "collate", gain, code, is_bound=True)


def _line(seen: Seen) -> Iterator[Fix]:
    """Without the slowest line of a fetch; decoding and transforms can be done once, by converting."""
    line = slowest_line(seen)
    if line is None or not _is_torch(seen):
        return
    loop = today(seen)
    gain = _predict(seen, loop, shorter(loop, min(0.999, line.share), line.share * min(1.0, line.on_cpu)))
    code = f"{line}: do it once for all epochs (h5chunk convert), or faster"
    yield Fix(f"without {line.place.rpartition('/')[2]}", line.stage, gain, code, is_bound=True)


def _batch(seen: Seen) -> Iterator[Fix]:
    """Larger batches, if taking one costs much: at best, a step takes no longer for more samples."""
    if not _is_torch(seen) or not seen.workers or seen.handover < 0.25 * seen.iteration:
        return
    loop = today(seen)
    larger = replace(loop, fetches=[MORE * seconds - (MORE - 1) * seen.fetch_gap for seconds in loop.fetches])
    gain = MORE * seconds_per_batch(loop) / seconds_per_batch(larger)
    least = seen.iteration / (seen.iteration - seen.handover * (1 - 1 / MORE))
    code = f"{_where(seen)}DataLoader(..., batch_size={MORE * round(seen.samples)}), which changes training"
    yield Fix("larger batches", "small batches", Range(gain, least, MORE), code, is_bound=True)


def slowest_line(seen: Seen) -> Line | None:
    """Return the line that takes most of a fetch, of those that read, decode or transform."""
    lines = [
        line
        for line in seen.lines
        if line.stage in (READING, DECODING, "transform") and line.place and line.share > 0.1
    ]
    return max(lines, key=lambda line: line.share, default=None)


def is_launch_bound(seen: Seen) -> bool:
    """Return whether a step launches so many kernels that their launches take its time."""
    return seen.gpu is not None and seen.gpu.kernels > 20 and seen.iteration / seen.gpu.kernels < LAUNCH_S


def _gpu_rules(seen: Seen) -> Iterator[Fix]:
    gpu = seen.gpu
    if gpu is None or not gpu.is_profiled:
        return
    host = seen.step - seen.copy
    floor = max(gpu.busy, seen.wait + host - gpu.blocked)
    if gpu.blocked > 0.1 * seen.iteration and gpu.busy < 0.9 * seen.iteration:
        gain = seen.iteration / max(1e-9, floor)
        code = "log losses every 100 steps: .item(), .cpu() and print of a GPU tensor wait for the GPU"
        yield Fix("no synchronisation in each step", "synchronisation", Range(gain, 1.0, 1.1 * gain), code)
    line = next((line for line in seen.lines if line.stage == "step" and line.place), None)
    if line is not None and gpu.busy < 0.7 * seen.iteration and not is_launch_bound(seen):
        gain = seen.iteration / max(gpu.busy, seen.iteration - line.share * (seen.step - gpu.blocked))
        code = f"{line}: do less of it, or not in each step"
        yield Fix("less Python in the step", "python", Range(gain, 1.0, 1.1 * gain), code, is_bound=True)
    if gpu.busy < 0.7 * seen.iteration and host > 0.6 * seen.iteration and is_launch_bound(seen):
        gain = seen.iteration / max(1e-9, gpu.busy, seen.wait + seen.copy + seen.optimizer)
        code = 'torch.compile(model, mode="reduce-overhead"), or a larger batch: fewer kernels per sample'
        yield Fix("fewer kernel launches", "launches", Range(gain, 1.0, gain), code, is_bound=True)
    if seen.optimizer > 0.3 * seen.iteration and gpu.busy < 0.7 * seen.iteration:
        gain = seen.iteration / max(gpu.busy, seen.iteration - 0.85 * seen.optimizer)
        code = "torch.optim.Adam(..., fused=True), or the same of your optimizer"
        yield Fix("fused optimizer", "launches", Range(gain, 1 + (gain - 1) / 2, 1.1 * gain), code)
    if seen.batch.get("dtype") == "float32" and gpu.copy > 0.2 * seen.iteration:
        after = max(seen.iteration - 0.75 * gpu.copy, gpu.busy - 0.75 * gpu.copy)
        gain = seen.iteration / after
        code = "send uint8 to the GPU, and make it float32 there"
        yield Fix("uint8 to the GPU", "copy", Range(gain, 1.0, gain), code, is_bound=True)


RULES = (
    _workers,
    _prefetch,
    _balance,
    _threads,
    _pinned,
    _persistent,
    _reads,
    _lock,
    _collate,
    _line,
    _batch,
    _gpu_rules,
)
