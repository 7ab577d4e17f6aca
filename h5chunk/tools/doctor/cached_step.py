"""Time a step that has its batch at once, as the loop would run without waiting for data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

HOST_STEPS = 10  # with a cached batch, in which Python is measured alone
CACHED_STEPS, CACHED_S = 100, 0.5  # with a cached batch, and the longest time of them
clock = time.perf_counter


def time_step(step: Callable[[Any], object], batch: Any) -> tuple[float, float]:
    """Return the seconds that Python takes for a step, and those of a complete step; all steps use one batch."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    times = []
    with torch.random.fork_rng(devices):
        for _ in range(HOST_STEPS):
            wait()  # so that nothing queued before holds up Python
            started = clock()
            step(batch)
            times.append(clock() - started)
        wait()
        started, done = clock(), 0
        while done < CACHED_STEPS and clock() < started + CACHED_S:
            step(batch)
            done += 1
        wait()
    return statistics.median(times), (clock() - started) / done
