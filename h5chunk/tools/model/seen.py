"""What was seen of a training loop, as numbers: the input of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from h5chunk.tools.model.pipeline import Loop

READING, DECODING, TRANSFORM, COLLATE, LOCK = "reading", "decoding", "transform", "collate", "lock"
FETCH_STAGES = (READING, DECODING, TRANSFORM, LOCK, COLLATE)
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
    lag: float  # from the end of a step in Python to its end on the GPU
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

    def loop(self) -> Loop:
        """Return the loop as the simulation of workers takes it."""
        delay = min(0.9, self.fetch_delay / max(1e-9, self.fetch))
        step_delay = min(0.9, self.step_delay / max(1e-9, self.step))
        mean = max(1e-9, self.fetch)
        return Loop(
            fetches=[seconds * (1 - delay) + self.fetch_gap for seconds in self.fetches] or [0.0],
            steps=[seconds * (1 - step_delay) for seconds in self.steps],
            workers=self.workers,
            cores=max(1.0, self.cores - self.other_cores),
            fetch_cpu=self.fetch_cpu,
            step_cpu=self.step_cpu,
            prefetch=int(self.loader.get("prefetch_factor") or 2),
            handover=self.handover,
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
