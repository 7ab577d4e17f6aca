"""Measure when the GPU works and when it waits: events around each step, and torch's profiler for a few steps."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

import torch

from h5chunk.tools.doctor.record import Recorder

PROFILED = 8  # steps under the profiler
PROFILE_AT = 24  # number of the first profiled step
MAX_WAITING = 2_000  # events that are kept until the GPU reaches them
CLOCK_S = 0.5  # seconds between readings of the GPU's clock
# without this, newer versions of torch warn that they keep the events of the last cycle only, and there is only one
ONE_CYCLE: dict[str, Any] = {"acc_events": True} if "acc_events" in signature(torch.profiler.profile).parameters else {}


class GpuClock:
    """Events on the current stream at the beginning and the end of each step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._count = recorder, 0
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._begin: Any = None
        self._last_end: Any = None
        self._profile: Any = None
        self._clock_read = 0.0
        self._read_clock = clock_reader()

    def begin_step(self) -> None:
        """Record an event at the beginning of a step's work."""
        if self._count == PROFILE_AT:
            self._start_profile()
        if time.perf_counter() > self._clock_read + CLOCK_S:
            self._clock_read = time.perf_counter()
            self._recorder.keep("clock", *self._read_clock())
        self._begin = self._event()

    def end_step(self) -> int:
        """Record an event at the end of the step's work.

        Returns the number of the step, or -1 if the profiler slowed it down.
        """
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
        """Write the measurements of the events that the GPU has reached. End the profiler if it is running."""
        if self._profile is not None:
            self._end_profile()
        with suppress(RuntimeError):  # the device failed, or the process ends
            while self._waiting and self._waiting[0][2].query():
                self._write(*self._waiting.popleft())

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start_profile(self) -> None:
        with suppress(Exception):  # the user may be running a profiler
            torch.cuda.synchronize()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], **ONE_CYCLE)
            profile.start()
            self._profile = profile

    def _end_profile(self) -> None:
        with suppress(Exception):
            self._profile.stop()
            if self._count == PROFILE_AT + PROFILED:
                self._recorder.keep("kernels", PROFILED, summary(self._profile.profiler.kineto_results.events()))
        self._profile = None


def summary(events: Any) -> dict[str, float]:
    """Return the number of kernels, and the seconds of GPU work, copies, gradient exchange and waiting of the CPU."""
    sums = {"busy": 0.0, "kernels": 0, "copies": 0.0, "reduce": 0.0}
    spans, waits = [], list[tuple[int, float]]()
    events = list(events)
    read = {event.correlation_id() for event in events if "Memcpy DtoH" in event.name()}
    for event in events:
        name, seconds = event.name(), event.duration_ns() / 1e9
        if event.is_user_annotation() or "#" in name:  # a range of time, not work
            continue
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            sums["copies"] += seconds if "Memcpy HtoD" in name else 0
            sums["reduce"] += seconds if name.startswith("nccl") else 0
            if name[:6] in ("Memcpy", "Memset") or not name.startswith("cuda"):
                sums["kernels"] += not name.startswith("Mem")
                spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif "Synchronize" in name or event.correlation_id() in read:
            waits.append((event.start_ns(), seconds))
    sums["blocked"] = sum(seconds for _, seconds in sorted(waits)[:-1])  # the last one is the profiler's
    end = 0
    for start, stop in sorted(spans):
        sums["busy"] += max(0, stop - max(start, end)) / 1e9
        end = max(end, stop)
    return sums


def clock_reader() -> Callable[[], tuple[int, float]]:
    """Return a function that reads the GPU's clock.

    It returns NVML's bit mask of reasons for a reduced clock, and the clock as a fraction of the maximum.
    """
    handle, reasons, clock, highest = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    except (OSError, AttributeError):
        failed = 1

    def read() -> tuple[int, float]:
        if failed or nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)):
            return 0, 1.0
        nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(clock))
        nvml.nvmlDeviceGetMaxClockInfo(handle, 1, ctypes.byref(highest))
        return reasons.value, clock.value / max(1, highest.value)

    return read
