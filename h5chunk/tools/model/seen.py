"""Measurements of a training loop: the input of a diagnosis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from h5chunk.tools.model.pipeline import Loop

READING, DECODING, TRANSFORM, COLLATE, LOCK = "reading", "decoding", "transform", "collate", "lock"
GATHERING, COPYING, WAITING = "gathering", "copying", "waiting"  # stages of `ChunkLoader`, besides reading and decoding
FETCH_STAGES = (READING, DECODING, TRANSFORM, LOCK, COLLATE)
NO_LOADER = -1  # the number of the loader of iterations that no loader feeds
NO_LOADER_FACTS = {"kind": "none", "num_workers": 0, "made_at": ""}
MAX_DELAY = 0.5  # largest fraction of a time that is attributed to waiting for a core
OUTLIER = 3.0  # longer steps, such as saving, are clipped to this multiple of the median
TAKE_S, MAX_TAKE_S = 1.5e-4, 4e-4  # default and maximum time to unpack a tensor from a worker
KERNEL_GAP_S = 2e-6  # time between two kernels on a GPU
BLOCKS = 8  # parts of a measurement, whose differences give confidence limits


@dataclass(frozen=True)
class Line:
    """A line of the user's code, and its share of the time of a stage."""

    stage: str
    place: str  # file:line
    share: float  # share of the time of a fetch, or of a step
    on_cpu: float  # fraction of its time in which it used a core
    code: str = ""
    error: float = 0.0  # sampling error of the share

    def __str__(self) -> str:
        name = self.place.rpartition("/")[2]
        return f"{name} `{self.code}`" if self.code else name


@dataclass(frozen=True)
class Gpu:
    """Times per step on the GPU, in seconds."""

    busy: float  # time in which kernels or copies run
    idle: float  # time between two steps in which nothing is queued
    copy: float  # time of copies from the host
    kernels: float  # number of kernels per step
    blocked: float  # time in which Python waits for the GPU
    is_profiled: bool  # whether busy, copy, kernels and blocked were measured
    slow_clocks: str = ""  # reason why the clock is reduced most of the time; empty if it is not
    clock: float = 1.0  # clock rate as a fraction of the maximum

    @property
    def least(self) -> float:
        """Minimum time of a step on the GPU."""
        return self.busy + self.kernels * KERNEL_GAP_S if self.is_profiled else 0.0


@dataclass(frozen=True)
class Seen:
    """Means per iteration of the training loop, in seconds unless stated otherwise."""

    samples: float  # samples per batch
    waits: Sequence[float]  # time of waiting for each batch
    steps: Sequence[float]  # time between receiving each batch and requesting the next one
    fetches: Sequence[float]  # time to produce each batch; empty if it was not measured
    stages: dict[str, float]  # time of each stage of a fetch, or of a `ChunkLoader`'s work for a batch
    lines: Sequence[Line]
    loader: dict[str, Any]
    batch: dict[str, Any]
    cores: int
    threads: int
    fetched_by: Sequence[int] = ()  # index of the worker of each fetch
    fetch_gap: float = 0.0
    fetch_cpu: float = 0.0
    fetch_delay: float = 0.0  # time that a worker waits for a core
    step_cpu: float = 0.0
    step_delay: float = 0.0  # time that the main thread waits for a core
    other_cores: float = 0.0  # number of cores that other processes keep busy
    take: float | None = None  # time that the main process takes to unpack a batch from a worker
    cached_step: tuple[float, float] | None = None  # Python's time and the total time of a step on one cached batch
    copy: float = 0.0  # time in which Python copies to the device or waits for copies
    copy_bytes: float = 0.0
    pageable_bytes: float = 0.0
    optimizer: float = 0.0
    warm: float = 1.0  # time of code with warm CPU caches, relative to its time in a fetch
    h5_reads: float = 0.0  # number of reads with h5py per fetch
    read_bytes: float = 0.0  # bytes that a fetch reads from files
    disk_bytes: float = 0.0  # bytes that a fetch reads from disks rather than from the page cache
    cold_s: float | None = None  # time to read the bytes of a batch from the disk
    memory_stall: float = 0.0  # fraction of all time in which a process waits for memory
    held: float = 0.0  # fraction of a step in which another thread holds the GIL
    holder: str = ""  # the thread that holds the GIL most, and its line of code
    ranks: Sequence[tuple[float, float]] = ()  # for each rank: time of an iteration, and its wait for gradients
    in_torch: float = 0.0  # fraction of a step in which Python runs torch's code rather than the user's
    gpu: Gpu | None = None
    elsewhere: float = 0.0  # fraction of all time spent in other loaders, such as validation
    epoch_start: float = 0.0  # time from starting an epoch to its first batch
    epoch_batches: float = 0.0  # number of batches per epoch; 0 if no epoch ended
    worker_fetches: Sequence[float] = ()  # mean time of a fetch of each worker
    files: Sequence[dict[str, Any]] = field(default=())
    lost: Sequence[str] = ()  # measurements that failed

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
    def loader_threads(self) -> int:
        """Number of reader threads of a `ChunkLoader` whose stages were measured; else 0."""
        return int(self.loader.get("num_threads") or 0) if WAITING in self.stages else 0

    @property
    def fetch(self) -> float:
        return sum(self.fetches) / len(self.fetches) if self.fetches else 0.0

    @property
    def workers(self) -> int:
        return int(self.loader.get("num_workers") or 0)

    @property
    def has_loader(self) -> bool:
        """Whether a loader feeds the loop. Otherwise, an iteration is the time between two steps of the optimizer."""
        return self.loader.get("kind") != NO_LOADER_FACTS["kind"]

    @property
    def unit(self) -> str:
        return "samples" if self.has_loader else "steps"

    @property
    def is_torch(self) -> bool:
        """Whether a DataLoader feeds the loop, and its fetches were measured."""
        return self.loader.get("kind") == "DataLoader" and bool(self.fetches)

    @property
    def rate(self) -> float:
        """Samples/s over all time, including validation and the starts of epochs."""
        return self.samples / self.iteration * (1 - self.other_share)

    @property
    def idle(self) -> float:
        """Fraction of the time in which the GPU does not work; 1 without a GPU."""
        if self.gpu is None:
            return 1.0
        idle = self.iteration - self.gpu.least if self.gpu.is_profiled else self.gpu.idle
        return min(1.0, max(0.0, idle / self.iteration))

    @property
    def handover(self) -> float:
        """Time to receive a batch that is ready."""
        tensors = max(1, int(self.batch.get("tensors") or 1))
        return (
            TAKE_S * tensors if self.take is None else min(self.take, MAX_TAKE_S * tensors)
        )  # longer times are due to busy workers

    @property
    def starting(self) -> float:
        """Fraction of the training time that starting epochs takes."""
        if not self.epoch_batches:
            return 0.0
        start = max(0.0, self.epoch_start - self.wait)
        return start / (start + self.epoch_batches * self.iteration)

    @property
    def other_share(self) -> float:
        """Fraction of all time outside of training iterations."""
        return 1 - (1 - self.elsewhere) * (1 - self.starting)

    def waiting(self) -> tuple[float, float]:
        """Return the fraction of time in which training waits for batches, and its lower 95 % confidence limit."""
        taken = self.handover if self.workers else 0.0
        block = max(1, len(self.waits) // BLOCKS)
        shares = []
        for start in range(0, block * (len(self.waits) // block), block):
            wait, step = sum(self.waits[start : start + block]), sum(self.steps[start : start + block])
            shares.append((wait - taken * block) / max(1e-9, wait + step))
        share = min(self.idle, (self.wait - taken) / self.iteration)
        error = 2 * statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
        return share, share - error

    def loop(self) -> Loop:
        """Return the measured loop in the form that the simulation of workers takes."""
        waited = min(MAX_DELAY, self.step_delay / max(1e-9, self.step if self.workers else self.iteration))
        delay = min(MAX_DELAY, self.fetch_delay / max(1e-9, self.fetch)) if self.workers else waited
        mean = max(1e-9, self.fetch)
        even = {worker: mean / max(1e-9, seconds) for worker, seconds in enumerate(self.worker_fetches)}
        by = self.fetched_by or [0] * len(self.fetches)
        times = [seconds * even.get(worker, 1.0) for seconds, worker in zip(self.fetches, by, strict=True)]
        lock = self.stages.get(LOCK, 0.0)
        steps = self._hot_steps(1 - waited)
        hot = min(1.0, statistics.fmean(steps) / max(1e-9, self.step - self.step_delay))
        return Loop(
            fetches=[seconds * (1 - delay) + self.fetch_gap for seconds in times] or [0.0],
            steps=steps,
            workers=self.workers,
            cores=max(1.0, self.cores - self.other_cores),
            fetch_cpu=self.fetch_cpu,
            step_cpu=self.step_cpu * hot,
            prefetch=int(self.loader.get("prefetch_factor") or 2),
            handover=self.handover,
            least=0.0 if self.gpu is None else self.gpu.least,
            exclusive=self.iteration if self.workers > 1 and lock > 0.2 * self.fetch else 0.0,
            in_order=bool(self.loader.get("in_order", True)),
            slowdown=[seconds / mean for seconds in self.worker_fetches],
        )

    def _hot_steps(self, on_core: float) -> list[float]:
        """Return the times of the steps, scaled to a cached batch, with outliers clipped and no waits for a core."""
        most = OUTLIER * statistics.median(self.steps)
        steps = [min(seconds, most) for seconds in self.steps]
        if self.cached_step is not None:
            on_core = min(on_core, self.cached_step[0] / max(1e-9, statistics.fmean(steps)))
        return [seconds * on_core for seconds in steps]
