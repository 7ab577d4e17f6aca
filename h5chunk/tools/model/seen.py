"""What was seen of a training loop, as numbers: the input of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from h5chunk.tools.model.pipeline import Loop

READING, DECODING, TRANSFORM, COLLATE, LOCK = "reading", "decoding", "transform", "collate", "lock"
FETCH_STAGES = (READING, DECODING, TRANSFORM, LOCK, COLLATE)
MAX_DELAY = 0.5  # of a time, that can be waiting for a core
OUTLIER = 3.0  # times the median: longer steps are those of warming up, or of saving
HANDOVER_S = 1.5e-4  # of taking a tensor from a worker


@dataclass(frozen=True)
class Line:
    """A line of the user's code, and how much of a stage it took."""

    stage: str
    place: str  # file:line
    share: float  # of the time of a fetch, or of a step
    on_cpu: float  # the part in which it used a core
    code: str = ""

    def __str__(self) -> str:
        name = self.place.rpartition("/")[2]
        return f"{name} `{self.code}`" if self.code else name


@dataclass(frozen=True)
class Gpu:
    """Seconds per step on the GPU."""

    busy: float  # kernels and copies ran
    idle: float  # nothing was queued between two steps
    copy: float  # copies from the host
    pageable: float  # of them, those from pageable memory
    kernels: float  # number per step
    blocked: float  # Python waited for the GPU
    is_profiled: bool  # busy, copy, kernels and blocked are known


@dataclass(frozen=True)
class Seen:
    """Means per iteration of the training loop, in seconds unless stated otherwise."""

    samples: float  # of a batch
    waits: Sequence[float]  # until each batch was received
    steps: Sequence[float]  # from receiving a batch to asking for the next
    fetches: Sequence[float]  # of making batches, where that can be seen
    stages: dict[str, float]  # parts of a fetch
    lines: Sequence[Line]
    loader: dict[str, Any]
    batch: dict[str, Any]
    cores: int
    threads: int
    fetched_by: Sequence[int] = ()  # the worker of each fetch
    fetch_gap: float = 0.0
    fetch_cpu: float = 0.0
    fetch_delay: float = 0.0  # a worker waited for a core
    step_cpu: float = 0.0
    step_delay: float = 0.0  # the main thread waited for a core
    other_cores: float = 0.0  # that other processes of this machine kept busy
    copy: float = 0.0  # Python copied to the device, or waited for that
    copy_bytes: float = 0.0
    pageable_bytes: float = 0.0
    optimizer: float = 0.0
    read_bytes: float = 0.0  # bytes that a fetch read from files
    disk_bytes: float = 0.0  # of them, from disks
    gpu: Gpu | None = None
    gpu_name: str = ""
    elsewhere: float = 0.0  # share of all time in other loaders, such as validation
    epoch_start: float = 0.0  # from starting an epoch to its first batch
    epoch_batches: float = 0.0  # batches per epoch; 0: no epoch ended
    worker_fetches: Sequence[float] = ()  # mean of each worker
    files: Sequence[dict[str, Any]] = field(default=())

    @property
    def wait(self) -> float:
        return sum(self.waits) / len(self.waits)

    @property
    def step(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def iteration(self) -> float:
        return self.wait + self.step

    @property
    def fetch(self) -> float:
        return sum(self.fetches) / len(self.fetches) if self.fetches else 0.0

    @property
    def workers(self) -> int:
        return int(self.loader.get("num_workers") or 0)

    @property
    def idle(self) -> float:
        """Share of the time in which the GPU does not work; 1 without a GPU."""
        if self.gpu is None:
            return 1.0
        idle = self.iteration - self.gpu.busy if self.gpu.is_profiled else self.gpu.idle
        return min(1.0, max(0.0, idle / self.iteration))

    def loop(self) -> Loop:
        """Return the loop as the simulation of workers takes it."""
        waited = min(MAX_DELAY, self.step_delay / max(1e-9, self.step if self.workers else self.iteration))
        delay = min(MAX_DELAY, self.fetch_delay / max(1e-9, self.fetch)) if self.workers else waited
        mean = max(1e-9, self.fetch)
        even = {worker: mean / max(1e-9, seconds) for worker, seconds in enumerate(self.worker_fetches)}
        by = self.fetched_by or [0] * len(self.fetches)
        times = [seconds * even.get(worker, 1.0) for seconds, worker in zip(self.fetches, by, strict=True)]
        most = OUTLIER * sorted(self.steps)[len(self.steps) // 2]
        return Loop(
            fetches=[seconds * (1 - delay) + self.fetch_gap for seconds in times] or [0.0],
            steps=[min(seconds, most) * (1 - waited) for seconds in self.steps],
            workers=self.workers,
            cores=max(1.0, self.cores - self.other_cores),
            fetch_cpu=self.fetch_cpu,
            step_cpu=self.step_cpu,
            prefetch=int(self.loader.get("prefetch_factor") or 2),
            handover=self.handover,
            least=0.0 if self.gpu is None or not self.gpu.is_profiled else self.gpu.busy,
            in_order=bool(self.loader.get("in_order", True)),
            slowdown=[seconds / mean for seconds in self.worker_fetches],
        )

    @property
    def handover(self) -> float:
        """Time of taking a batch that is ready: the shortest waits, as far as that is plausible."""
        typical = HANDOVER_S * max(1, int(self.batch.get("tensors") or 1))
        if not self.workers:
            return typical
        shortest = sorted(self.waits)[len(self.waits) // 20]
        return min(shortest, 2 * typical)
