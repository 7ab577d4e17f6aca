"""Find how much time training loses by waiting for batches, and which changes to the DataLoader reduce this time."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from h5chunk.errors import human_bytes
from h5chunk.plan.cache import ChunkGrid, mean_hits
from h5chunk.tools.model.cost import (
    LEAST_SHARE,
    Cost,
    Fix,
    about,
    chunked_file,
    gain_of,
    late_share,
    slowest_line,
    where,
)
from h5chunk.tools.model.pipeline import Loop, Range, seconds_per_batch
from h5chunk.tools.model.seen import COLLATE, COPYING, DECODING, GATHERING, LOCK, READING, TRANSFORM, WAITING, Seen

ENOUGH = 1.03  # prefer fewer workers if their time is within this factor of the best time
MAX_WORKERS = 32
UNBALANCED = 1.4  # workers are unbalanced if the slowest takes this many times the mean time
MORE = 8  # factor by which batches are enlarged
BAD_READS = 2.0  # chunks are reported if reading decodes this many times the bytes that are used
MAX_CACHE = 2 << 30  # largest chunk cache to propose, in bytes
MAX_ECHO = 4.0
CALL_S = 5e-6  # time of a read with h5py from a cached chunk


def data_costs(seen: Seen) -> Iterator[Cost]:
    """Yield the cost of waiting for batches, and the cost of passing them from workers to the main process."""
    share, least = seen.waiting()
    passing = seen.handover + seen.fetch_gap
    limit = max(seen.fetch, 0.25 * seen.iteration)
    if seen.workers and (seen.handover > limit or (least >= LEAST_SHARE and passing > limit)):
        text = (
            f"Not your data: passing a batch of {seen.samples:.0f} samples takes {1e6 * seen.handover:.0f} µs in the "
            f"main process and {1e6 * seen.fetch_gap:.0f} µs in the worker, so the batches are too small."
        )
        yield Cost(
            "small batches", False, max(share, min(seen.idle, seen.handover / seen.iteration)), text, list(_batch(seen))
        )
    elif least >= LEAST_SHARE:
        if not late_share(seen):
            yield _waiting(seen, share)
        elif seen.held < LEAST_SHARE:
            yield _late(seen, share)


def start_costs(seen: Seen) -> Iterator[Cost]:
    """Yield the cost of starting epochs."""
    share = seen.starting * (1 - seen.elsewhere)
    text = f"Starting epochs takes {seen.starting:.0%} of the training time ({seen.epoch_start:.2g} s per epoch)."
    fixes = []
    if seen.workers and not seen.loader.get("persistent_workers"):
        gain = 1 / max(1e-9, 1 - share)
        fixes = [_option(seen, Range(gain, 1 + (gain - 1) / 2, gain * 1.1), persistent_workers=True)]
    yield Cost("epoch start", True, share, text, fixes)


def _late(seen: Seen, share: float) -> Cost:
    """Return the cost of batches that are late although the workers could produce them in time."""
    late = f"training waits {share:.0%} of the time for batches, although the workers could produce them in time"
    if seen.other_cores > 0.15 * seen.cores:
        text = f"Nothing to fix in this loop: {late}. Other processes use {seen.other_cores:.1f} of {seen.cores} cores."
        return Cost("other processes", False, share, text)
    text = f"Not certain: {late}. The cause could not be determined."
    return Cost("unknown", False, share, text, list(_prefetch(seen)))


def _waiting(seen: Seen, share: float) -> Cost:
    waits = f"Your data: training waits {share:.0%} of its time for batches"
    if seen.loader_threads:
        return _chunk_loader(seen, share, waits)
    if not seen.fetches:
        return Cost("loader", True, share, f"{waits}.")
    stage, seconds = max(seen.stages.items(), key=lambda item: item[1])
    if seen.loop().exclusive:  # more workers would only wait longer
        stage, seconds = LOCK, seen.stages[LOCK]
    line = slowest_line(seen, stage)
    place = "" if line is None else f" ({line})"
    names = {TRANSFORM: "the code of __getitem__", LOCK: "waiting for a lock", COLLATE: "collating"}
    share_of_fetch = seconds / max(1e-9, seen.fetch)
    text = f"{waits}; {names.get(stage, stage)} takes {share_of_fetch:.0%} of the time to produce a batch{place}"
    if stage == READING:
        text += _bad_chunks(seen)
    if _is_unbalanced(seen):
        slowest = max(seen.worker_fetches) / max(1e-9, min(seen.worker_fetches))
        text += f"; the slowest worker takes {slowest:.1f} times as long as the fastest, and training waits for it"
        stage = "unbalanced"
    fixes = [fix for rule in RULES for fix in rule(seen)] if seen.is_torch else []
    return Cost(stage, True, share * (1 - seen.other_share), f"{text}.", fixes)


def _chunk_loader(seen: Seen, share: float, waits: str) -> Cost:
    """Return the cost of waiting for a ChunkLoader: for its threads, or for making batches in the training thread."""
    stages, threads = seen.stages, seen.loader_threads
    work = max(1e-9, stages[READING] + stages[DECODING])
    stage = max((GATHERING, COPYING), key=stages.__getitem__)
    if stages[WAITING] < stages[stage]:
        text = f"{waits}; {stage} takes {min(1.0, stages[stage] / seen.wait):.0%} of that, in the training thread"
        return Cost(stage, True, share * (1 - seen.other_share), f"{text}.")
    stage = max((READING, DECODING), key=stages.__getitem__)
    text = f"{waits}; {stage} takes {stages[stage] / work:.0%} of the work of the loader's threads ({threads})"
    return Cost(
        stage, True, share * (1 - seen.other_share), f"{text}.", list(_loader_fixes(seen, stages[READING] / work))
    )


def _loader_fixes(seen: Seen, reading: float) -> Iterator[Fix]:
    """Yield changes to a ChunkLoader. ``reading`` is the fraction of its threads' work that is reading."""
    known, call = seen.loader, f"{where(seen)}ChunkLoader(..., "
    step = seen.step - seen.step_delay if seen.cached_step is None else min(seen.step, seen.cached_step[1])
    busy = step + seen.stages[GATHERING] + seen.stages[COPYING]  # of the training thread
    work = seen.stages[READING] + seen.stages[DECODING]

    def fix(name: str, left: float, code: str, is_bound: bool = False, **options: Any) -> Fix:
        on_cores = (seen.step_cpu - (1 - left) * work) / max(1.0, seen.cores - seen.other_cores)
        gain = seen.iteration / min(seen.iteration, max(busy, left * seen.iteration, on_cores))
        return Fix(name, about(seen, gain), code, {"chunk_loader": options} if options else {}, is_bound)

    if known["fits"] and not known["resident"]:
        yield fix("resident=True", 0.0, f"{call}resident=True), which keeps all data on the device", resident=True)
    if seen.loader_threads < seen.cores:
        left = seen.loader_threads / seen.cores
        yield fix(f"num_threads={seen.cores}", left, f"{call}num_threads={seen.cores})", num_threads=seen.cores)
    if known["form"] == "encoded":
        code = "convert the images again with --size, which stores pixels of one size, in about ten times the space"
        yield fix("raw images", reading, code, True)
    elif known["form"] == "raw":
        code = "convert the images again with --keep-encoded, which needs a tenth of the space; threads then decode"
        yield fix("encoded images", 0.1 * reading + 1 - reading, code, True)
    elif known["compressed"]:
        path, uncompressed = shlex.quote(known["path"]), shlex.quote(beside(known["path"], "uncompressed"))
        yield fix("no compression", reading, f"h5chunk repack {path} {uncompressed} --compression none", True)
    if known["echo"] == 1:
        echo = min(MAX_ECHO, math.ceil(10 * seen.iteration / busy) / 10)
        code = f"{call}echo={echo:g}), which uses each sample {echo:g} times: check how this affects learning"
        yield fix(f"echo={echo:g}", 1 / echo, code, echo=echo)


def _option(seen: Seen, gain: Range, note: str = "", **option: Any) -> Fix:
    """Return a fix that changes an argument of the DataLoader."""
    name = ", ".join(f"{key}={value}" for key, value in option.items())
    return Fix(name, gain, f"{where(seen)}DataLoader(..., {name}){note}", {"loader": option})


def _workers(seen: Seen) -> Iterator[Fix]:
    loop = seen.loop()
    counts = sorted({2**n for n in range(6)} | {seen.cores})
    counts = [count for count in counts if loop.workers < count <= min(MAX_WORKERS, max(2, seen.cores))]
    times = {count: seconds_per_batch(replace(loop, workers=count)) for count in counts}
    best = next((count for count in counts if times[count] <= ENOUGH * min(times.values())), None)
    if best is not None:
        fix = _option(seen, gain_of(seen, replace(loop, workers=best, slowdown=())), num_workers=best)
        yield replace(fix, is_bound=seen.disk_bytes > seen.read_bytes / 2)  # all workers share the disk


def _prefetch(seen: Seen) -> Iterator[Fix]:
    loop = seen.loop()
    if loop.workers > 0 and loop.prefetch < 8 and not _is_unbalanced(seen):
        yield _option(seen, gain_of(seen, replace(loop, prefetch=8)), prefetch_factor=8)


def _is_unbalanced(seen: Seen) -> bool:
    times = seen.worker_fetches
    return len(times) > 1 and max(times) > UNBALANCED * sum(times) / len(times)


def _balance(seen: Seen) -> Iterator[Fix]:
    if _is_unbalanced(seen) and seen.loader.get("in_order", True):
        gain = gain_of(seen, replace(seen.loop(), in_order=False))
        yield _option(seen, gain, ", which changes the order of the batches", in_order=False)


def _reading(seen: Seen) -> tuple[dict[str, Any], ChunkGrid, float] | None:
    """Return the chunked HDF5 dataset that training reads, its grid, and the bytes decoded per byte used.

    Returns None if training reads no such dataset.
    """
    file = chunked_file(seen)
    if file is None:
        return None
    grid = ChunkGrid(tuple(file["shape"]), tuple(file["chunks"]), file["itemsize"], file["filtered"])
    num_slots, num_bytes = file["cache"][:2]
    hits = mean_hits(grid, num_slots, num_bytes, is_shuffled=not seen.loader.get("sequential"))
    return file, grid, max(1.0, grid.amplification(cached=num_bytes >= grid.chunk_bytes) * (1 - hits))


def _bad_chunks(seen: Seen) -> str:
    found = _reading(seen)
    if found is None or found[2] < BAD_READS:
        return ""
    file, grid, ratio = found
    size = human_bytes(file["cache"][1])
    return (
        f"; with chunks of {grid.band_samples} samples ({grid.chunks_per_sample} per sample) and a cache of {size}, "
        f"HDF5 reads {ratio:,.0f} times the bytes that are used"
    )


def _reads(seen: Seen) -> Iterator[Fix]:
    found = _reading(seen)
    if found is None or found[2] < BAD_READS:
        return
    file, grid, ratio = found
    reading = seen.stages[READING]
    left = max(reading / ratio, min(reading, seen.h5_reads * CALL_S))
    share = (reading - left) / seen.fetch
    gain = gain_of(seen, *(_without(seen, x, x) for x in (share, share - left / seen.fetch)))
    path, repacked = shlex.quote(file["path"]), shlex.quote(beside(file["path"], "repacked"))
    code = f"h5chunk repack {path} {repacked} --fields {shlex.quote(file['dataset'])} && h5chunk info {repacked}"
    yield Fix(f"repack {file['path'].rpartition('/')[2]}", gain, code)
    size = (grid.num_chunks + 1) * grid.chunk_bytes
    if size < MAX_CACHE:
        code = f"h5py.File({file['path']!r}, rdcc_nbytes={size}, rdcc_nslots={grid.num_slots})"
        yield Fix(f"chunk cache of {human_bytes(size)}", gain, code, {"cache": [grid.num_slots, size]})


def beside(path: str, word: str) -> str:
    """Return the path of a new version of a file.

    >>> beside("data/a.b.h5", "repacked")
    'data/a.b-repacked.h5'
    """
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return f"{folder}{slash}{stem or suffix}-{word}{dot}{suffix if dot else ''}"


def _lock(seen: Seen) -> Iterator[Fix]:
    line, loop = slowest_line(seen, LOCK), seen.loop()
    if line is not None and loop.exclusive:
        share = seen.stages[LOCK] / seen.fetch
        changed = (replace(loop.shorter(x, 0.0), exclusive=0.0) for x in _about(share, line.error))
        code = f"{line}: avoid the lock, so that workers do not wait for each other"
        yield Fix(f"no lock at {line}", gain_of(seen, *changed), code, is_bound=True)


def _collate(seen: Seen) -> Iterator[Fix]:
    least = 0.1 if seen.loader.get("collate") else 0.4  # changing torch's default_collate rarely helps
    share = min(0.999, seen.stages.get(COLLATE, 0.0) / max(1e-9, seen.fetch))
    if share > least:
        name = seen.loader.get("collate") or "default_collate"
        code = f"{name}: return one array per field from `__getitems__`, without a tensor per sample"
        yield Fix(f"without {name}", gain_of(seen, seen.loop().shorter(share, share)), code, is_bound=True)


def _line(seen: Seen) -> Iterator[Fix]:
    """Yield a fix that removes the slowest line of a fetch, because it can run in advance, when the data is converted.

    A line that reads an HDF5 file is left out if the file's chunks are the cause: then the file is to be repacked.
    """
    line = slowest_line(seen, READING, DECODING, TRANSFORM)
    is_cured = line is not None and line.stage == READING and any(_reads(seen))
    if line is not None and not is_cured and not seen.loop().exclusive:
        used = sum(other.share * other.on_cpu for other in seen.lines if other.stage != "step")
        weight = line.on_cpu / used if used else 1.0  # the line's share of CPU time, relative to its share of time
        changed = (_without(seen, x, min(0.999, x * weight)) for x in _about(line.share, line.error))
        code = f"{line}: run it once and store the result (h5chunk convert accepts the data set), or make it faster"
        yield Fix(f"without {line.place.rpartition('/')[2]}", gain_of(seen, *changed), code, is_bound=True)


def _without(seen: Seen, share: float, cpu_share: float) -> Loop:
    """Return the loop without a fraction of the work of its fetches, and of their CPU time.

    The larger this fraction, the warmer the CPU caches for the rest of the work.
    """
    rest = 1 - share * (1 - seen.warm)
    return seen.loop().shorter(1 - (1 - share) * rest, 1 - (1 - cpu_share) * rest)


def _about(share: float, error: float) -> Iterator[float]:
    """Yield a fraction, and the ends of its confidence interval."""
    yield from (min(0.999, max(0.0, x)) for x in (share, share - error, share + error))


def _batch(seen: Seen) -> Iterator[Fix]:
    """Yield larger batches as a fix, assuming that steps and passing a batch take no longer with them."""
    loop = seen.loop()
    collate = seen.stages.get(COLLATE, 0.0)
    fetches = [MORE * (seconds - seen.fetch_gap - collate) + seen.fetch_gap + collate for seconds in loop.fetches]
    before, after = seconds_per_batch(loop), seconds_per_batch(replace(loop, fetches=fetches))
    least = seen.iteration / (seen.iteration - seen.handover * (1 - 1 / MORE))
    code = f"{where(seen)}DataLoader(..., batch_size={MORE * round(seen.samples)}), which changes training"
    yield Fix("larger batches", Range(min(MORE, MORE * before / after), least, MORE), code, is_bound=True)


RULES = (_workers, _prefetch, _balance, _reads, _lock, _collate, _line)
