"""The stages of a benchmark: what can be measured for `h5chunk.tools.bench.bench`, or why it cannot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from h5chunk.plan.layout import human_bytes
from h5chunk.store.read.files import Paths
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.bench.report import (
    CACHED,
    DATALOADER,
    DISK,
    FRESH,
    LIMITS,
    LOADER,
    MEMORY,
    READERS,
    RESIDENT,
    TO_DEVICE,
    Figure,
)
from h5chunk.tools.measure.disk import DISK_THREADS, DiskRead, FileReads, Stored
from h5chunk.tools.measure.machine import MemoryCopy, NotMeasured, thread_counts
from h5chunk.tools.progress import Progress

ROUNDS = 3  # counted, after one that is not
COLD_SHARE, WARM_SHARE, CHOICE_SHARE = 0.1, 0.15, 0.1  # of the time: disk, filling the page cache, numbers of threads
RESIDENT_SHARE = 0.1  # of the time, in which data that shall stay on the device has to be loaded


@dataclass
class Stage:
    """Something to measure, or why it is not; ``rate`` measures for so many seconds and gives bytes/s."""

    group: str
    name: str
    bytes_per_sample: float
    rate: Callable[[float], float] | None = None
    note: str = ""
    limits: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)
    first_rate: float = 0.0  # from a first look, bytes/s

    def figure(self) -> Figure:
        if not self.rates:
            return Figure(self.group, self.name, note=self.note)
        rates = self.rates[1:] or self.rates
        middle = statistics.median(rates)
        return Figure(self.group, self.name, middle / self.bytes_per_sample, middle, rates=tuple(rates), note=self.note)


@dataclass
class Subject:
    """What is measured; ``num_samples``: how many samples of it figures from the page cache are of."""

    path: Paths
    fields: Mapping[str, str] | Sequence[str] | None
    reader: H5Reader
    batch_size: int
    device: str
    num_cores: int
    room_bytes: int
    num_samples: int

    @property
    def sample_bytes(self) -> int:
        return sum(each.grid.sample_bytes for each in self.reader.fields.values())

    @property
    def is_compressed(self) -> bool:
        return self.reader.main.grid.filtered

    @property
    def limits(self) -> tuple[str, ...]:
        """Of what gives batches on the CPU; reading is a copy already, but what is decoded is also written."""
        return (CACHED, MEMORY) if self.is_compressed else (CACHED,)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


class Clock:
    """The time there is, and who wants to know."""

    def __init__(self, seconds: float, progress: Progress | None) -> None:
        self.seconds, self._progress = seconds, progress
        self._started = time.perf_counter()

    @property
    def taken_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def left_s(self) -> float:
        return max(0.3 * self.seconds, self.seconds - self.taken_s)

    def tick(self) -> None:
        if self._progress is not None:
            self._progress("bench", min(100, int(100 * self.taken_s / self.seconds)), 100)


def measure_disk(stored: Stored, reads: FileReads, cold: bool, clock: Clock) -> Stage:
    """Reads what it first drops from the page cache."""
    per_sample = stored.num_bytes / stored.num_samples
    stage = Stage(LIMITS, DISK, per_sample, note=f"{DISK_THREADS} threads, the file's chunks in shuffled order")
    if not cold:
        return replace(stage, note="not asked for")
    disk = DiskRead(reads, stored.chunks())
    try:
        for _ in range(ROUNDS):
            stage.rates.append(disk.rate(COLD_SHARE * clock.seconds / ROUNDS))
            clock.tick()
    except NotMeasured as reason:
        return replace(stage, rates=[], note=str(reason))
    if not reads.can_be_checked:
        stage.note += "; whether they were cached could not be checked, as the file belongs to somebody else"
    return stage


def fill_page_cache(subject: Subject, stored: Stored, reads: FileReads, clock: Clock) -> list[str]:
    """Read as much as fits in memory and time; the figures are of these samples."""
    fitting = int(np.searchsorted(np.cumsum(stored.sizes), subject.room_bytes // 2, side="right"))
    ranges = list(zip(stored.offsets[:fitting].tolist(), stored.sizes[:fitting].tolist(), strict=True))
    if ranges:
        reads.rate(ranges, subject.num_cores, WARM_SHARE * clock.seconds, again=False)
    clock.tick()
    done = reads.num_read
    if done == len(stored.sizes):
        return []
    samples = max(int(stored.first_samples[done]), subject.batch_size)
    subject.num_samples = min(samples, stored.num_samples)
    if subject.num_samples == stored.num_samples:
        return []
    why = "fit in memory" if done == fitting else "could be read in the time given: take more --seconds for more"
    total = human_bytes(stored.num_bytes)
    part = human_bytes(stored.num_bytes / stored.num_samples * subject.num_samples)
    return [f"figures but the disk's are of the first {subject.num_samples:,} samples, {part} of {total}, that {why}"]


def cached_read(subject: Subject, stored: Stored, reads: FileReads, clock: Clock) -> Stage:
    """Reads of what the page cache holds."""
    runs = stored.head(subject.num_samples).runs()
    rate = partial(reads.rate, runs, again=True)
    per_sample = stored.num_bytes / stored.num_samples
    return _with_best_threads(
        Stage(LIMITS, CACHED, per_sample, limits=() if subject.is_compressed else (MEMORY,)), rate, subject, clock
    )


def memory_stages(subject: Subject, clock: Clock) -> list[Stage]:
    """Copies of pieces as large as a batch."""
    memory = MemoryCopy(subject.batch_size * subject.sample_bytes, subject.num_cores, subject.room_bytes // 8)
    again = Stage(LIMITS, MEMORY, subject.sample_bytes)
    fresh = Stage(LIMITS, FRESH, subject.sample_bytes, limits=(MEMORY,))
    return [
        _with_best_threads(again, memory.rate, subject, clock),
        _with_best_threads(fresh, memory.fresh_rate, subject, clock),
    ]


def _with_best_threads(stage: Stage, rate: Callable[[int, float], float], subject: Subject, clock: Clock) -> Stage:
    """Choose the number of threads that gives most; each is tried twice."""
    counts = thread_counts(subject.num_cores)
    seconds = CHOICE_SHARE * clock.seconds / 3 / 2 / len(counts)
    found = {count: max(rate(count, seconds), rate(count, seconds)) for count in counts}
    best = max(found, key=lambda count: found[count])
    clock.tick()
    note = f"{best} thread{'s' if best > 1 else ''}"
    return replace(stage, rate=partial(rate, best), note=note, first_rate=found[best])


def device_copy(subject: Subject, closing: ExitStack) -> Stage:
    """Copies to the GPU, if that is asked for."""
    stage = Stage(LIMITS, TO_DEVICE, subject.sample_bytes)
    if not subject.on_gpu:
        return replace(stage, note="the device is the CPU")
    from h5chunk.tools.measure.batches import DeviceCopy

    copy = DeviceCopy(subject.device)
    closing.callback(copy.close)
    return replace(stage, rate=copy.rate, note="pinned memory")


def batch_stages(
    subject: Subject, workers: Sequence[int], not_direct: str, fresh_rate: float, clock: Clock, closing: ExitStack
) -> list[Stage]:
    """All ways to batches, as reported; DataLoaders are opened first, so that workers are forked without threads."""
    opener = _Opener(subject, clock, closing)
    loaders = [opener.dataset(count) for count in workers]
    text = next((name for name, each in subject.reader.fields.items() if each.dtype.kind == "S"), None)
    why = f"field {text!r} holds strings, which only ChunkDataset reads" if text is not None else ""
    cached = subject.limits
    bound = (*cached, TO_DEVICE) if subject.on_gpu else cached
    direct = opener.loader(READERS, "direct", cached, why or not_direct, device="cpu", reader="direct", reuse=True)
    h5py = opener.loader(READERS, "h5py", cached, why, device="cpu", reader="h5py", reuse=True)
    plain = opener.loader(LOADER, "reuse=False", bound, why)
    if subject.on_gpu:
        reuse = Stage(LOADER, "reuse=True", 1, note="the same on a GPU")
    elif direct.rate is not None:
        reuse = replace(direct, group=LOADER, name="reuse=True", rate=None, note="the direct reader above")
    else:
        reuse = opener.loader(LOADER, "reuse=True", bound, why, reuse=True)
    not_resident = why or _not_resident(subject, fresh_rate, clock)
    resident = opener.loader(LOADER, RESIDENT, () if subject.on_gpu else (MEMORY,), not_resident, resident=True)
    return [direct, h5py, *loaders, plain, reuse, resident]


class _Opener:
    """Opens what gives batches, up to its first one; ``closing`` closes it."""

    def __init__(self, subject: Subject, clock: Clock, closing: ExitStack) -> None:
        self._subject, self._clock, self._closing = subject, clock, closing
        self._common: dict[str, Any] = {
            "fields": subject.fields,
            "num_samples": subject.num_samples,
            "sample_bytes": subject.sample_bytes,
            "trusted": subject.reader.trusted,
        }

    def loader(self, group: str, name: str, limits: tuple[str, ...], why_not: str, **options: Any) -> Stage:
        from h5chunk.tools.measure.batches import loader_batches

        stage = Stage(group, name, self._subject.sample_bytes, note=why_not, limits=limits)
        return stage if why_not else self._open(stage, loader_batches, {"device": self._subject.device, **options})

    def dataset(self, num_workers: int) -> Stage:
        from h5chunk.tools.measure.batches import dataset_batches

        name = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
        stage = Stage(DATALOADER, name, self._subject.sample_bytes, limits=self._subject.limits)
        return self._open(stage, dataset_batches, {"num_workers": num_workers})

    def _open(self, stage: Stage, make: Callable[..., Any], options: dict[str, Any]) -> Stage:
        batches = make(self._subject.path, self._subject.batch_size, **self._common, **options)
        self._closing.callback(batches.close)
        self._clock.tick()
        return replace(stage, rate=batches.rate)


def _not_resident(subject: Subject, fresh_rate: float, clock: Clock) -> str:
    """Why data is not loaded to stay on the device; empty if it is."""
    from h5chunk.tools.measure.batches import resident_room

    data_bytes = subject.sample_bytes * subject.reader.num_samples
    on_device = resident_room(subject.device)
    room = subject.room_bytes // 4 if on_device is None else on_device
    if data_bytes > room:
        return f"{human_bytes(data_bytes)} do not fit in a quarter of the free memory"
    seconds = data_bytes / max(1.0, fresh_rate) / RESIDENT_SHARE
    if subject.num_samples < subject.reader.num_samples or seconds > clock.seconds:
        return f"loading {human_bytes(data_bytes)} takes long: give --seconds {max(seconds, 2 * clock.seconds):.0f}"
    return ""
