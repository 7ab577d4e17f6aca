"""Write measurements of a training process, or of a DataLoader's worker, as JSON lines; sample its lines of code.

This runs inside the user's processes: it draws no random numbers, and never raises an error into their code.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

FLUSH_S = 0.5  # seconds between writes
SWITCH_S = 1e-3  # Python's switch interval: with the default of 5 ms, samples would show the line after a slow one
SAMPLE_S, LATER_S = 0.01, 0.1  # seconds between samples of the line that runs, at first and later
FIRST = 200  # number of samples with the shorter interval
PROBE_S, HELD_S = 2e-4, 8e-4  # a sleep without the GIL, and the delay after it that shows that a thread held the GIL
MAX_BUSY = 0.9  # share of a core that a thread uses at most while it waits for the GIL often
READING, DECODING, TRANSFORM, COLLATE, LOCK = "reading", "decoding", "transform", "collate", "lock"
LIBRARIES = {
    **dict.fromkeys(("h5py", "zarr", "tables", "pyarrow", "fsspec", "lmdb", "netCDF4", "xarray"), READING),
    **dict.fromkeys(("PIL", "cv2", "imageio", "simplejpeg", "imagecodecs", "torchcodec", "av", "zlib"), DECODING),
    **dict.fromkeys(("albumentations", "kornia", "torchaudio"), TRANSFORM),
}
FILES = {
    "multiprocessing/synchronize.py": LOCK,
    "torchvision/io": DECODING,
    "torchvision/transforms": TRANSFORM,
    "numpy/lib": READING,
}
WORDS = {  # words in lines that call C functions, which have no Python frame
    LOCK: r"\b\w*lock\b|\.acquire\(|semaphore",
    DECODING: r"decode|imread|decompress|Image\.open|\.convert\(",
    READING: r"\bopen\(|\.read\w*\(|np\.load\(|torch\.load\(|fromfile\(|pread|read_bytes",
}
LOADER = "torch/utils/data/dataloader.py"  # the loop over a loader without workers calls it
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_FOLDER = str(Path(__file__).parents[2])


@cache
def is_library(filename: str) -> bool:
    """Return whether a file of code belongs to Python, an installed package or h5chunk, and not to the user."""
    return filename.startswith((*_LIBRARY_FOLDERS, _OWN_FOLDER, "<frozen")) or "-packages/" in filename


def line_of(frame: FrameType) -> int:
    """Return the line that a frame runs, or the first line of its function if Python does not know the line."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def caller(frame: FrameType | None, *, within: str = "") -> str:
    """Return the innermost line of the user's code as ``file:line``; empty if there is none.

    ``within`` is the end of a file's name: lines of code that called the functions of this file do not count.
    """
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = None if within and frame.f_code.co_filename.endswith(within) else frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{line_of(frame)}"


def stage_of(frame: FrameType | None) -> str:
    """Return the stage of a call stack, by its libraries and by words in the user's line of code."""
    while frame is not None and "torch/utils/data" not in frame.f_code.co_filename:
        if found := _stage_of_line(frame.f_code.co_filename, line_of(frame)):
            return found
        frame = frame.f_back
    return TRANSFORM


@cache
def _stage_of_line(filename: str, number: int) -> str:
    if is_library(filename):
        package = filename.rpartition("-packages/")[2].partition("/")[0]
        return LIBRARIES.get(package) or next((FILES[part] for part in FILES if part in filename), "")
    line = linecache.getline(filename, number)
    return next((stage for stage, words in WORDS.items() if re.search(words, line)), "")


class Step(NamedTuple):
    """One iteration of a loop, from requesting a batch to requesting the next one."""

    loader: int
    asked: float
    received: float
    resumed: float
    samples: int
    trains: bool  # whether gradients are computed
    epoch_started: float | None  # when the epoch began; None except for its first batch
    ended: float = 0.0
    take: float = 0.0  # time to unpack a batch of a worker
    copy: float = 0.0
    copy_bytes: int = 0
    pageable_bytes: int = 0
    optimizer: float = 0.0
    optimizer_steps: int = 0
    backward: float = 0.0
    gpu: int | None = None  # number of its events on the GPU; -1: the step was profiled
    stages: dict[str, float] | None = None  # seconds by stage of `ChunkLoader`, in all of its threads


class Fetch(NamedTuple):
    """The production of one batch; ``worker`` is -1 in the training process."""

    worker: int
    started: float
    ended: float
    cpu: float  # CPU seconds of all threads
    collate: float
    h5_reads: int
    h5_seconds: float
    again: float  # time to collate the same samples a second time; 0: not measured


class Use(NamedTuple):
    """Resources that this process has used so far; the last two values refer to the whole machine."""

    time: float
    cpu: float
    delay: float  # seconds in which this thread waited for a core
    read: float  # bytes
    disk: float
    everyone: float  # CPU seconds
    memory: float  # seconds in which some process waited for memory


def core_wait(thread: int) -> float:
    """Return the seconds that a thread has waited for a core. Raises OSError if the system does not measure this."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


def use() -> Use:
    """Return the resources that this process has used so far; values that the system does not report are 0."""
    delay, read, disk, everyone, memory = 0.0, 0, 0, 0.0, 0.0
    with suppress(OSError, ValueError, IndexError, KeyError):
        delay = core_wait(threading.get_native_id())
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        read, disk = int(fields["rchar"]), int(fields["read_bytes"])
        ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        everyone = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        memory = int(Path("/proc/pressure/memory").read_text().split("total=")[1].split()[0]) / 1e6
    return Use(time.perf_counter(), time.process_time(), delay, read, disk, everyone, memory)


class Recorder:
    """Collect measurements of one process, and regularly append them to a file in a folder."""

    def __init__(self, folder: str, role: str, parent: int) -> None:
        self._path = Path(folder) / f"{role}-{parent}-{os.getpid()}.jsonl"
        self._rows: list[Any] = []
        self._written = 0.0

    def add(self, kind: str, *values: Any) -> None:
        """Keep a measurement, and write all measurements if the last write was over ``FLUSH_S`` seconds ago."""
        self.keep(kind, *values)
        if time.perf_counter() > self._written + FLUSH_S:
            self.flush()

    def keep(self, kind: str, *values: Any) -> None:
        """Keep a measurement until the next flush; any thread may call this."""
        self._rows.append((kind, *values))

    def flush(self) -> None:
        """Write the measurements, and the counters of this process."""
        self.keep("use", *use())
        rows, self._rows = self._rows, []
        with suppress(OSError, TypeError, ValueError), self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._written = time.perf_counter()


class Sampler:
    """A thread that samples which line of the user's code another thread runs, while ``stage`` is set."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._target = recorder, threading.get_ident()
        self._target_id = threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(self._target) if hasattr(time, "pthread_getcpuclockid") else None
        self.stage = ""  # "step", "fetch", "collate", "reading"; empty: no samples
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it is running."""
        if self._thread is None:
            self._stop.clear()
            self._interval = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self._interval))
            self._thread = threading.Thread(target=self._run, name="h5chunk doctor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, so that the process can fork safely."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        last, used, left = time.perf_counter(), self._used(), FIRST
        while not self._stop.wait(SAMPLE_S if left > 0 else LATER_S):
            now, cpu, left = time.perf_counter(), self._used(), left - 1
            frame = sys._current_frames().get(self._target)
            if (stage := self.stage) and frame is not None:
                stage = stage_of(frame) if stage == "fetch" else stage
                busy, library = min(1.0, (cpu - used) / max(1e-9, now - last)), is_library(frame.f_code.co_filename)
                place = caller(frame, within="" if stage == "step" else LOADER)
                self._recorder.keep("line", stage, place, busy, library)
                if busy < MAX_BUSY:
                    self._find_holder(busy)
            del frame
            last, used = now, cpu

    def _find_holder(self, busy: float) -> None:
        """Record which thread holds the GIL while the target thread, which uses no core, and this one wait for it."""
        clocks = {thread: time.pthread_getcpuclockid(thread) for thread in sys._current_frames()}
        if len(clocks) < 3 or self._clock is None:
            return
        with suppress(OSError):  # a thread has ended, or the system has no such counters
            before = {thread: time.clock_gettime(clock) for thread, clock in clocks.items()}
            both, started = (threading.get_native_id(), self._target_id), time.perf_counter()
            waits = [core_wait(thread) for thread in both]
            time.sleep(PROBE_S)
            for_cores = max(core_wait(thread) - wait for thread, wait in zip(both, waits, strict=True))
            waited = time.perf_counter() - started - PROBE_S - for_cores
            used = {thread: time.clock_gettime(clock) - before[thread] for thread, clock in clocks.items()}
            holder = max(used, key=used.__getitem__)
            if waited > HELD_S and used[holder] > max(waited / 10, 2 * used[self._target]):
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                place = caller(sys._current_frames().get(holder))
                self._recorder.keep("held", names.get(holder, "?"), place, 1 - busy)
                sys.setswitchinterval(self._interval)  # the user's, which determines the length of each wait

    def _used(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)
