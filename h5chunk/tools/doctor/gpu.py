"""Measure when the GPU works and when it waits: events around each step, and torch's profiler for a few steps."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import torch

from h5chunk.tools.doctor.record import Recorder

PROFILED = 8  # steps under the profiler
PROFILE_AT = 24  # first of them
MAX_WAITING = 2_000  # events that are kept until the GPU reaches them


class GpuClock:
    """Events on the current stream at the beginning and the end of each step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._count = recorder, 0
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._begin: Any = None
        self._last_end: Any = None
        self._profile: Any = None

    def begin_step(self) -> None:
        """Mark the point from which the GPU can work on the step's batch."""
        if self._count == PROFILE_AT:
            self._start_profile()
        self._begin = self._event()

    def end_step(self) -> int:
        """Mark the end of the step's work; return the step's number, -1 while the profiler slows it down."""
        if self._begin is None:
            return -1
        number, self._count = self._count, self._count + 1
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((number, self._begin, self._event()))
        self._begin = None
        if self._profile is not None:
            if self._count == PROFILE_AT + PROFILED:
                self._end_profile()
            return -1
        while len(self._waiting) > 1 and self._waiting[0][2].query():
            self._write(*self._waiting.popleft())
        return number

    def _write(self, number: int, begin: Any, end: Any) -> None:
        idle = 0.0 if self._last_end is None else self._last_end.elapsed_time(begin) / 1e3
        self._recorder.keep("gpu", number, begin.elapsed_time(end) / 1e3, idle)
        self._last_end = end

    def close(self) -> None:
        """Write what the GPU has finished."""
        with suppress(RuntimeError):  # the device failed, or the process ends
            while self._waiting and self._waiting[0][2].query():
                self._write(*self._waiting.popleft())

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start_profile(self) -> None:
        with suppress(Exception):  # the user runs a profiler
            torch.cuda.synchronize()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
            self._profile = profile

    def _end_profile(self) -> None:
        with suppress(Exception):
            torch.cuda.synchronize()
            self._profile.stop()
            self._recorder.keep("kernels", PROFILED, summary(self._profile.profiler.kineto_results.events()))
        self._profile = None


def summary(events: Any) -> dict[str, float]:
    """Sum up what ran on the GPU, in seconds: kernels, copies by kind of memory, and waiting of the CPU."""
    sums = {"busy": 0.0, "kernels": 0, "copies": 0.0, "pageable": 0.0, "to_device_bytes": 0, "blocked": 0.0}
    spans, waits = [], list[tuple[int, float]]()
    for event in events:
        name, seconds = event.name(), event.duration_ns() / 1e9
        if event.is_user_annotation() or "#" in name:  # a range of time, not work
            continue
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            if "Memcpy HtoD" in name:
                sums["copies"] += seconds
                sums["pageable"] += seconds if "Pageable" in name else 0
                sums["to_device_bytes"] += event.nbytes()
            if name[:6] in ("Memcpy", "Memset") or not name.startswith("cuda"):
                sums["kernels"] += not name.startswith("Mem")
                spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif "Synchronize" in name:
            waits.append((event.start_ns(), seconds))
    sums["blocked"] = sum(seconds for _, seconds in sorted(waits)[:-1])  # without the last one, of the profiler
    end = 0
    for start, stop in sorted(spans):
        sums["busy"] += max(0, stop - max(start, end)) / 1e9
        end = max(end, stop)
    return sums
