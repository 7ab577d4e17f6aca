"""Measure the stages between a file and its batches: memory, disk, readers and loaders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from h5chunk.errors import count_text, human_bytes
from h5chunk.store.read.field_readers import DIRECT, H5PY, reading
from h5chunk.store.read.files import Paths
from h5chunk.store.read.ragged import ImagesField
from h5chunk.store.read.source import Source
from h5chunk.tools.measure.disk import DISK_THREADS, FileReads, disk_rates, merge
from h5chunk.tools.measure.machine import NotMeasured, device_copy, memory_copy, thread_counts
from h5chunk.tools.progress import TimeBudget

MEMORY, CACHED, DISK, TO_DEVICE = "memory copy", "page-cache read", "disk read", "copy to the GPU"
DECODING = "decoding whole images"
LIMITS, READERS, DATALOADER, LOADER = "limits", "readers, to the CPU", "DataLoader, to the CPU", "ChunkLoader"
RESIDENT = "resident=True"

SMALL_BYTES = 16 << 20  # rates of smaller data do not represent larger data
ROUNDS = 3  # rounds, after a warm-up
COLD_SHARE, WARM_SHARE, CHOICE_SHARE = 0.1, 0.15, 0.1  # shares of the time for the disk, the page cache, thread counts
MIN_TURNS_SHARE = 0.3  # minimum share of the time for the rounds
LOADING_SHARE = 0.1  # share of the time within which resident data must be loaded
LEAD_SHARE = 0.15  # share of a measurement in which prefetched batches are consumed


@dataclass(frozen=True)
class Figure:
    """The measured rate of a stage, or the reason why it was not measured.

    Rates are medians. Reads of the file count stored bytes; all other stages count bytes of decoded samples.
    """

    group: str
    name: str
    samples_per_s: float | None = None
    bytes_per_s: float | None = None
    limit: str | None = None  # name of the limit with the fewest samples/s
    ratio: float | None = None  # this rate divided by the rate of the limit
    rates: tuple[float, ...] = ()  # bytes/s of each round
    note: str = ""  # how the stage was measured, or why it was not


@dataclass
class Stage:
    """A stage to measure.

    ``rate(seconds)`` measures bytes/s for this time; it is None if the stage cannot be measured.
    """

    group: str
    name: str
    bytes_per_sample: float
    rate: Callable[[float], float] | None = None
    note: str = ""
    limits: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)
    first_rate: float = 0.0  # bytes/s of the first measurement

    @property
    def median(self) -> float:
        """Median bytes/s of all rounds, without the first round if there are several."""
        return statistics.median(self.rates[1:] or self.rates)

    def figure(self, limits: Mapping[str, float]) -> Figure:
        """Return the stage's rate, and its ratio to the lowest of its limits.

        ``limits`` maps measured limits to samples/s. If it has none of the stage's limits, the limit is copying memory.
        """
        if not self.rates:
            return Figure(self.group, self.name, note=self.note)
        own = (MEMORY,) if self.limits and limits.keys().isdisjoint(self.limits) else self.limits
        limit = min(limits.keys() & own, key=lambda name: limits[name], default=None)
        samples_per_s = self.median / self.bytes_per_sample
        ratio = None if limit is None else samples_per_s / limits[limit]
        rates = tuple(self.rates[1:] or self.rates)
        return Figure(self.group, self.name, samples_per_s, self.median, limit, ratio, rates, self.note)


@dataclass
class Subject:
    """The data to measure, the time budget, and an exit stack that closes the files and loaders of all stages."""

    path: Paths
    fields: Mapping[str, str] | Sequence[str] | None
    reader: Source
    sample_bytes: int
    batch_size: int
    device: str
    num_cores: int
    memory_bytes: int
    num_samples: int  # number of leading samples that are measured from the page cache
    budget: TimeBudget
    closing: ExitStack = field(default_factory=ExitStack)

    @property
    def is_compressed(self) -> bool:
        return self.reader.main.grid.filtered

    @property
    def is_encoded(self) -> bool:
        """True if samples are encoded images."""
        return isinstance(self.reader.ragged, ImagesField) and self.reader.ragged.form == "encoded"

    @property
    def limits(self) -> tuple[str, ...]:
        """Names of the limits of batch rates on the CPU: reading and, if any, decoding and copying decoded chunks."""
        more = [DECODING] * self.is_encoded + [MEMORY] * self.is_compressed
        return (CACHED, *more)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def measure_stages(
    subject: Subject, workers: Sequence[int], cold: bool, not_direct: str
) -> tuple[list[Figure], list[str], int | None]:
    """Measure all stages; return figures, notes, and the stored size in bytes (None if it cannot be determined)."""
    notes, stored_bytes = [], None
    try:
        reads = FileReads(subject.reader)
    except NotMeasured as reason:
        reading = [Stage(LIMITS, name, 1, note=str(reason)) for name in (CACHED, DISK)]
    else:
        subject.closing.callback(reads.close)
        stored_bytes = reads.num_bytes
        disk = Stage(LIMITS, DISK, reads.num_bytes / reads.num_samples, note="not requested")
        disk = _disk_stage(subject, disk, reads) if cold else disk
        notes = _fill_page_cache(subject, reads)
        cached = Stage(LIMITS, CACHED, disk.bytes_per_sample, limits=() if subject.is_compressed else (MEMORY,))
        runs = merge(reads.head(subject.num_samples))
        reading = [_with_best_threads(subject, cached, partial(reads.rate, runs, again=True)), disk]
    rate = memory_copy(subject.batch_size * subject.sample_bytes, subject.num_cores, subject.memory_bytes // 8)
    memory = _with_best_threads(subject, Stage(LIMITS, MEMORY, subject.sample_bytes), rate)
    device = Stage(LIMITS, TO_DEVICE, subject.sample_bytes, note="the device is the CPU")
    if subject.on_gpu:
        copy = subject.closing.enter_context(device_copy(subject.device))
        device = replace(device, rate=copy, note="pinned memory")
    if subject.is_encoded:
        reading.append(_decoding_stage(subject))
    batches = _batch_stages(subject, workers, not_direct, memory.first_rate)
    stages = [memory, *reading, device, *batches]
    _measure_in_turns([stage for stage in stages if stage.rate is not None and not stage.rates], subject.budget)
    if (measured_bytes := subject.sample_bytes * subject.num_samples) < SMALL_BYTES:
        notes.append(
            f"the data is small ({human_bytes(measured_bytes)}), so its rates depend on call overhead and the "
            "processor's caches more than on memory"
        )
    limits = {item.name: item.median / item.bytes_per_sample for item in stages if item.group == LIMITS and item.rates}
    return [stage.figure(limits) for stage in stages], notes, stored_bytes


def _decoding_stage(subject: Subject) -> Stage:
    """Return the stage that decodes images of any size without reading or cropping them."""
    from h5chunk.tools.measure.images import decoding

    image_bytes, rate = decoding(subject.reader, subject.num_samples)
    return _with_best_threads(subject, Stage(LIMITS, DECODING, image_bytes), rate)


def _disk_stage(subject: Subject, stage: Stage, reads: FileReads) -> Stage:
    """Measure reads from the disk; return the stage with its rates."""
    stage = replace(stage, note=f"{DISK_THREADS} threads, the file's chunks in shuffled order")
    turns = disk_rates(reads, COLD_SHARE * subject.budget.seconds / ROUNDS)
    try:
        for _ in range(ROUNDS):
            stage.rates.append(next(turns))
            subject.budget.report()
    except NotMeasured as reason:
        return replace(stage, rates=[], note=str(reason))
    if not reads.can_be_checked:
        stage.note += "; whether chunks came from the page cache is unknown, because the file belongs to another user"
    return stage


def _fill_page_cache(subject: Subject, reads: FileReads) -> list[str]:
    """Read as many of the measured samples into the page cache as memory and time allow; return notes."""
    seconds = WARM_SHARE * subject.budget.seconds
    samples, all_that_fit = reads.fill_page_cache(subject.num_cores, seconds, subject.memory_bytes // 2)
    subject.budget.report()
    subject.num_samples = min(max(samples, subject.batch_size), reads.num_samples)
    if subject.num_samples == reads.num_samples:
        return []
    why = "fit in memory" if all_that_fit else "could be read in time"
    part = human_bytes(reads.num_bytes / reads.num_samples * subject.num_samples)
    total = human_bytes(reads.num_bytes)
    first = f"the first {subject.num_samples:,} samples ({part} of {total})"
    return [f"all figures except the disk's are for {first}, because no more {why}"]


def _with_best_threads(subject: Subject, stage: Stage, rate: Callable[[int, float], float]) -> Stage:
    """Return the stage with the fastest number of threads, after two trials of each number."""
    counts = thread_counts(subject.num_cores)
    seconds = CHOICE_SHARE * subject.budget.seconds / 3 / 2 / len(counts)
    found = {count: max(rate(count, seconds), rate(count, seconds)) for count in counts}
    best = max(found, key=lambda count: found[count])
    subject.budget.report()
    return replace(stage, rate=partial(rate, best), note=count_text(best, "thread"), first_rate=found[best])


def _batch_stages(subject: Subject, workers: Sequence[int], not_direct: str, copy_rate: float) -> list[Stage]:
    """Open all loaders, and return their stages. DataLoaders come first, so that workers fork before threads start."""
    cached, loader = subject.limits, partial(_open, subject)
    loaders = [loader(DATALOADER, count_text(n, "worker"), cached, num_workers=n) for n in workers]
    text = next((name for name, field_ in subject.reader.fields.items() if field_.dtype.kind == "S"), None)
    why = f"field {text!r} holds strings, which only ChunkDataset reads" if text is not None else ""
    bound = (*cached, TO_DEVICE) if subject.on_gpu else cached
    with reading(DIRECT):
        direct = loader(READERS, "direct", cached, why or not_direct, device="cpu", reuse=True)
    with reading(H5PY):
        h5py = loader(READERS, "h5py", cached, why, device="cpu", reuse=True)
    plain = loader(LOADER, "reuse=False", bound, why)
    if subject.on_gpu:
        reuse = Stage(LOADER, "reuse=True", 1, note="same as reuse=False on a GPU")
    elif direct.rate is not None:
        reuse = replace(direct, group=LOADER, name="reuse=True", rate=None, note="same as the direct reader above")
    else:
        reuse = loader(LOADER, "reuse=True", bound, why, reuse=True)
    not_resident = why or _why_not_resident(subject, copy_rate)
    resident = loader(LOADER, RESIDENT, () if subject.on_gpu else (MEMORY,), not_resident, resident=True)
    return [direct, h5py, *loaders, plain, reuse, resident]


def _open(subject: Subject, group: str, name: str, limits: tuple[str, ...], reason: str = "", **options: Any) -> Stage:
    """Open a loader and return its stage; with a ``reason`` for not measuring it, return a stage without a rate."""
    from h5chunk.tools.measure.batches import first_samples, open_dataset, open_loader, wait_for_readers
    from h5chunk.tools.measure.images import open_data

    stage = Stage(group, name, subject.sample_bytes, note=reason, limits=limits)
    if reason:
        return stage
    dataset = open_data(subject.path, subject.fields, subject.reader.trusted)
    order = first_samples(dataset, subject.batch_size, subject.num_samples)
    if group == DATALOADER:
        batches = open_dataset(dataset, order, **options)
    else:
        batches = open_loader(dataset, order, **{"device": subject.device, **options})
    subject.closing.callback(batches.close)
    wait_for_readers()
    subject.budget.report()

    def rate(seconds: float) -> float:
        rate_bytes = batches.rate(seconds, LEAD_SHARE * seconds) * subject.sample_bytes
        wait_for_readers()
        return rate_bytes

    return replace(stage, rate=rate)


def _why_not_resident(subject: Subject, copy_rate: float) -> str:
    """Return the reason why ``resident=True`` is not measured; empty if it is measured."""
    import torch

    from h5chunk.feed.budget import free_bytes

    if isinstance(subject.reader.ragged, ImagesField):
        return "images of any size are cropped for each batch"
    free = free_bytes(torch.device(subject.device)) if subject.on_gpu else subject.memory_bytes
    room = free // 4  # the model needs the rest
    data_bytes = subject.sample_bytes * subject.reader.num_samples
    if data_bytes > room:
        return f"{human_bytes(data_bytes)} do not fit in a quarter of the free memory"
    seconds = data_bytes / max(1.0, copy_rate) / LOADING_SHARE
    if subject.num_samples < subject.reader.num_samples or seconds > subject.budget.seconds:
        needed = max(seconds, 2 * subject.budget.seconds)
        return f"loading {human_bytes(data_bytes)} needs a budget of {needed:.0f} s"
    return ""


def _measure_in_turns(stages: Sequence[Stage], budget: TimeBudget) -> None:
    """Measure stages in rounds. The first round is short, and counts only if there is no time for another one."""
    left_s = max(MIN_TURNS_SHARE * budget.seconds, budget.seconds - budget.taken_s)
    until = budget.taken_s + left_s
    slice_s = left_s / max(1, len(stages)) / (ROUNDS + 0.5) / (1 + LEAD_SHARE)
    for number in range(ROUNDS + 1):
        for stage in stages:
            if stage.rate is not None and (budget.taken_s < until or number < 1):
                stage.rates.append(stage.rate(slice_s if number else slice_s / 2))
                budget.report()
