"""Measure the stages of `ChunkLoader`: its threads read and decode windows, and the training thread makes batches."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from h5chunk.tools.doctor.describe import CHUNK_LOADER
from h5chunk.tools.measure.machine import available_bytes
from h5chunk.tools.model.seen import COPYING, DECODING, GATHERING, READING, WAITING

TASKS = "tasks"  # tasks of Python threads, which read and decode
HOOKS = (
    ("feed.read_pool", "WindowRead", "run", TASKS),
    ("store.read.stored", "Filtered", "decode", DECODING),
    ("feed.batches", "FieldPipeline", "batches", GATHERING),
    ("feed.batches", "BatchMaker", "finish", COPYING),
    ("feed.cuda_slots", "CudaSlot", "receive", COPYING),
    ("feed.stream", "WindowStream", "_load_next", WAITING),
    ("feed.stream", "WindowStream", "_wait_for", WAITING),
    ("feed.stream", "", "with_images", WAITING),
)
clock = time.perf_counter


class Stages:
    """The total time that all threads spend in each stage of a loader."""

    def __init__(self) -> None:
        self._spent: Any = Counter()
        self._lock = threading.Lock()
        self._native_s, self._native_decoding_s = 0.0, 0.0  # seconds that native threads have worked, and decoded
        self.loader: Callable[[], Any] = lambda: None  # a weak reference

    def install(self, replace: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Install the hooks by calling ``replace``. The loader's module must have been imported."""
        for module, owner, name, stage in HOOKS:
            found = sys.modules[f"h5chunk.{module}"]
            replace(getattr(found, owner) if owner else found, name, partial(self._timed, stage))
        replace(sys.modules["h5chunk.feed.resident"].Resident, "_gathered", self._gathered)
        replace(sys.modules["h5chunk.transforms.any_size"].AnySizeConverter, "_in_threads", self._in_threads)

    def _timed(self, stage: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        started = clock()
        try:
            return original(*args, **kwargs)
        finally:
            with self._lock:
                self._spent[stage] += clock() - started

    def _in_threads(self, original: Any, converter: Any, job: Any, work: Any, finish: Any) -> Any:
        return original(converter, job, partial(self._timed, "images", work), finish)

    def _gathered(self, original: Any, *args: Any) -> Iterator[Any]:
        following = partial(self._timed, GATHERING, next, original(*args), None)
        last = [following()]
        while last[0] is not None:  # while suspended, this generator keeps no reference to the batch
            yield last.pop()
            last.append(following())

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call."""
        pool = getattr(getattr(self.loader(), "_feed", None), "_pool", None)
        native = getattr(pool, "_native", None)
        native_s, decoding_s = (getattr(native, name, 0) / 1e9 for name in ("progress", "decoding"))
        with self._lock:
            spent, self._spent = self._spent, Counter()
        worked_s, self._native_s = max(0.0, native_s - self._native_s), native_s
        decoded_s, self._native_decoding_s = max(0.0, decoding_s - self._native_decoding_s), decoding_s
        return {
            READING: worked_s - decoded_s + max(0.0, spent[TASKS] - spent[DECODING]),
            DECODING: decoded_s + spent[DECODING] + spent["images"],
            **{stage: spent[stage] for stage in (GATHERING, COPYING, WAITING)},
        }

    def describe(self, loader: Any) -> dict[str, Any]:
        """Return the properties of a loader that determine which fixes are possible."""
        self.loader = weakref.ref(loader)
        source = loader._source
        on_gpu = source.device.type == "cuda"
        free = torch.cuda.mem_get_info(source.device)[0] if on_gpu else available_bytes()
        return {
            **CHUNK_LOADER,
            "made_at": loader.__dict__.get("_made_at", ""),
            "path": str(source.reader.path),
            "num_threads": source.num_threads,
            "resident": loader.is_resident,
            "echo": loader._echo,
            "fits": 4 * loader._budget._resident_bytes < free,
            "form": getattr(source.reader.ragged, "form", ""),
            "compressed": source.reader.main.grid.filtered,
        }
