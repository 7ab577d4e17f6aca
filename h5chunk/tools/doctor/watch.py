"""Hooks that measure a training loop from inside: DataLoaders, copies between devices, and optimizers.

`install` installs the hooks, and `remove` removes them. They call the original functions with the same arguments, and
return their results unchanged.
"""

from __future__ import annotations

import atexit
import inspect
import math
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from multiprocessing import reduction, util
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from h5chunk.tools.doctor.describe import CHUNK_LOADER, batch_samples, describe, describe_batch, machine
from h5chunk.tools.doctor.gpu import GpuClock
from h5chunk.tools.doctor.loader_stages import Stages
from h5chunk.tools.doctor.record import Fetch, Recorder, Sampler, Step, caller

FILES_AFTER = 3  # fetches after which open files are listed
TIMED = 8  # h5py's reads are measured in one of this many fetches
REPEATED = 10  # fetches whose samples are collated a second time, to measure this with warm caches
TAKE_S = 5e-5  # seconds to take a batch from a worker, besides unpacking it
clock = time.perf_counter


class Watch:
    """Measurements of one process."""

    def __init__(self, folder: str, role: str, options: dict[str, Any]) -> None:
        parent = multiprocessing.parent_process()
        self.folder, self.options = folder, options
        self.recorder = Recorder(folder, role, 0 if parent is None else int(parent.pid or 0))
        self.sampler, self.thread = Sampler(self.recorder), threading.get_ident()
        self.gpu: GpuClock | None = None
        self.batch: Any = None  # the last batch, if option "batch" is set
        self._open: Step | None = None  # the current iteration
        self._first = 0.0
        self._described: set[int] = set()
        self.epoch_started: dict[int, float] = {}
        self.settings: dict[int, dict[str, Any]] = {}  # of DataLoaders
        self._numbers: dict[tuple[Any, ...], int] = {}  # of loaders, by their line of code and arguments
        self.epochs: Counter[int] = Counter()  # number of epochs that began, by loader
        self.spent: Any = Counter()  # sums for this iteration, by field of `Step`
        self.take, self.h5 = 0.0, (0, 0.0)  # seconds; calls and seconds
        self.collate, self.again, self.fetches = 0.0, 0.0, 0
        self.stages = Stages()

    def asks(self, number: int) -> None:
        """End an iteration, because the loop requests another batch."""
        now = clock()
        self.sampler.stage = ""
        if self._open is not None:
            gpu = self.gpu.end_step() if self.gpu is not None else None
            stages = self.stages.take() if self.stages.loader() is not None else {}
            self.recorder.add("step", *self._open._replace(ended=now, gpu=gpu, stages=stages, **self.spent))
            self._open = None
            self.spent.clear()
            self._first = self._first or now
            if now - self._first > self.options.get("seconds", math.inf):
                self._end()
        self.take = 0.0

    def _end(self) -> None:
        """Stop measuring; with option "end", also exit the process."""
        remove()
        if self.options.get("end"):
            raise SystemExit(0)

    def number_of(self, loader: Any, number: int) -> int:
        """Return a loader's number. Loaders that a script creates anew for each epoch have the same number."""
        if not isinstance(loader, DataLoader):
            return number
        dataset, place = loader.dataset, loader.__dict__.get("_made_at", number)
        size = len(dataset) if hasattr(dataset, "__len__") else None
        same = place, type(dataset), size, loader.batch_size, type(loader.sampler)
        return self._numbers.setdefault(same, number)

    def begins_epoch(self, number: int, started: float, loader: Any) -> None:
        """Count an epoch that begins. Stop measuring after the requested number of epochs."""
        self.asks(number)
        self.sampler.start()
        if number not in self.settings:
            with suppress(Exception):  # a subclass may lack attributes
                self.settings[number] = (
                    describe(loader) if isinstance(loader, DataLoader) else self.stages.describe(loader)
                )
        self.epochs[number] += 1
        if isinstance(loader, DataLoader) or self.epochs[number] == 1:  # ChunkLoader reads ahead into the next epoch
            self.epoch_started[number] = started
        if self.epochs[number] > self.options.get("epochs", math.inf):
            self._end()

    def receives(self, number: int, asked: float, batch: Any) -> None:
        """Begin an iteration: the loop received a batch."""
        received = clock()
        if number not in self._described:
            self._described.add(number)
            with suppress(Exception):  # the user's objects may raise any error
                facts = self.settings.get(number, CHUNK_LOADER)
                self.recorder.add("loader", number, facts, describe_batch(batch), machine())
        if self.options.get("batch"):
            self.batch = batch
        if self.gpu is None and torch.cuda.is_initialized():
            self.gpu = GpuClock(self.recorder)
        if self.gpu is not None:
            self.gpu.begin_step()
        self.spent["take"] = self.take and self.take + TAKE_S
        started = self.epoch_started.pop(number, None)
        self._open = Step(number, asked, received, clock(), batch_samples(batch), torch.is_grad_enabled(), started)
        self.sampler.stage = "step"

    def close(self) -> None:
        """Write everything that was measured."""
        self.sampler.stop()
        if self.gpu is not None:
            self.gpu.close()
        self.recorder.flush()

    def begin_optimizer(self, *_: Any) -> None:
        self._optimizing = clock()

    def end_optimizer(self, *_: Any) -> None:
        self.spent["optimizer"] += clock() - self._optimizing
        self.spent["optimizer_steps"] += 1


_watch: Watch | None = None
_undo: list[Callable[[], None]] = []


def install(folder: str, role: str = "main", **options: Any) -> Watch:
    """Install hooks that write to ``folder``.

    Options: ``seconds`` and ``epochs`` limit watching, ``end`` exits the process after that, ``fix`` changes settings,
    and ``batch`` keeps the last batch.
    """
    global _watch
    if _watch is not None:
        remove()
    _watch = watch = Watch(folder, role, options)
    _replace(_BaseDataLoaderIter, "__next__", _next)
    _replace(DataLoader, "__init__", _init)
    _replace(DataLoader, "__iter__", _iter)
    _replace(DataLoader, "_get_iterator", _get_iterator)
    _replace(fetch._MapDatasetFetcher, "fetch", _fetch)
    _replace(fetch._IterableDatasetFetcher, "fetch", _fetch)
    _replace(reduction.ForkingPickler, "loads", _loads)
    _replace(torch.Tensor, "to", _copy)
    _replace(torch.Tensor, "cuda", _copy)
    before = optimizer.register_optimizer_step_pre_hook(watch.begin_optimizer)
    after = optimizer.register_optimizer_step_post_hook(watch.end_optimizer)
    _undo.extend([before.remove, after.remove])
    if "RANK" in os.environ:
        watch.recorder.keep("rank", int(os.environ["RANK"]))
        _replace(torch.Tensor, "backward", _backward)
    _apply(options.get("fix", {}))
    if "h5chunk.feed.loader" in sys.modules:
        watch_chunk_loader(sys.modules["h5chunk.feed.loader"])
    atexit.register(watch.close)
    return watch


def _apply(fix: dict[str, Any]) -> None:
    if "threads" in fix:
        torch.set_num_threads(fix["threads"])
    if "cache" in fix:
        import h5py

        _replace(h5py.File, "__init__", partial(_with_cache, *fix["cache"]))


def watch_chunk_loader(module: Any) -> None:
    """Measure the batches of `ChunkLoader`, whose module has been imported."""
    if _watch is not None:
        _replace(module._OneThread, "__next__", _next)
        _replace(module.ChunkLoader, "__init__", _init)
        _replace(module.ChunkLoader, "__iter__", _iter)
        _watch.stages.install(_replace)


def remove() -> None:
    """Remove the hooks, and write everything that was measured."""
    global _watch
    while _undo:
        _undo.pop()()
    if _watch is not None:
        _watch.close()
        atexit.unregister(_watch.close)
    _watch = None


def _replace(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replace a function with a hook, whose first argument is the original function."""
    original, own = getattr(owner, name), name in vars(owner)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, replaced)
    _undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


# ---- the hooks


def _next(original: Any, self: Any) -> Any:
    watch = _watch
    if watch is None or get_worker_info() is not None:
        return original(self)
    number = int(getattr(self, "__dict__", {}).get("_doctor_number", id(self)))
    watch.asks(number)
    asked = clock()
    batch = original(self)
    watch.receives(number, asked, batch)
    return batch


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    kind = "loader" if isinstance(self, DataLoader) else "chunk_loader"
    if _watch is not None and (fix := _watch.options.get("fix", {}).get(kind)):
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.arguments.update(fix)
        args, kwargs = bound.args[1:], bound.kwargs
    original(self, *args, **kwargs)
    self.__dict__["_made_at"] = caller(sys._getframe(1))


def _with_cache(num_slots: int, num_bytes: int, original: Any, *args: Any, **kwargs: Any) -> None:
    original(*args, **{**kwargs, "rdcc_nslots": num_slots, "rdcc_nbytes": num_bytes})


def _iter(original: Any, self: Any) -> Any:
    watch, started = _watch, clock()
    iterator = original(self)
    if watch is not None and get_worker_info() is None:
        number = self.__dict__.setdefault("_doctor_number", watch.number_of(self, id(iterator)))
        iterator.__dict__["_doctor_number"] = number
        watch.begins_epoch(number, started, self)
    return iterator


def _get_iterator(original: Any, self: Any) -> Any:
    if _watch is None or not self.num_workers:
        return original(self)
    given = self.worker_init_fn
    self.worker_init_fn = StartWorker(_watch.folder, given)
    _watch.sampler.stop()  # `begins_epoch` starts it again
    try:
        return original(self)
    finally:
        self.worker_init_fn = given


class StartWorker:
    """A ``worker_init_fn`` that starts measuring in a DataLoader's worker, and calls the user's function."""

    def __init__(self, folder: str, given: Callable[[int], None] | None) -> None:
        self.folder, self.given = folder, given

    def __call__(self, worker: int) -> None:
        global _watch
        if _watch is None:
            install(self.folder, f"worker{worker}")
        else:  # the hooks were inherited
            _watch = Watch(self.folder, f"worker{worker}", {})
        assert _watch is not None
        _watch.sampler.start()
        util.Finalize(None, _watch.recorder.flush, exitpriority=100)  # workers do not run atexit handlers
        if self.given is not None:
            self.given(worker)


def _fetch(original: Any, self: Any, indices: Any) -> Any:
    watch = _watch
    if watch is None:
        return original(self, indices)
    if not isinstance(self.collate_fn, TimedCollate):
        self.collate_fn = TimedCollate(self.collate_fn)
    before, started, used = watch.sampler.stage, clock(), time.process_time()
    watch.collate, watch.again, watch.h5, watch.sampler.stage = 0.0, 0.0, (0, 0.0), "fetch"
    try:
        return original(self, indices)
    finally:
        watch.sampler.stage = before
        worker, again = get_worker_info(), watch.again
        times = started, clock() - again, time.process_time() - used - again
        row = Fetch(-1 if worker is None else worker.id, *times, watch.collate, *watch.h5, again)
        watch.recorder.add("fetch", *row)
        watch.fetches += 1
        if watch.fetches == FILES_AFTER:
            _watch_files(watch)


def _watch_files(watch: Watch) -> None:
    """List the files that are open now, and measure h5py's reads from now on."""
    from h5chunk.tools.doctor.files import open_files

    with suppress(Exception):  # files may change, and h5py may raise any error
        watch.recorder.keep("files", open_files())
    if "h5py" in sys.modules:
        _replace(sys.modules["h5py"].Dataset, "__getitem__", _read)


def _read(original: Any, *args: Any, **kwargs: Any) -> Any:
    watch = _watch
    if watch is None or watch.fetches % TIMED or watch.sampler.stage != "fetch":
        return original(*args, **kwargs)
    watch.sampler.stage, started = "reading", clock()
    try:
        return original(*args, **kwargs)
    finally:
        watch.h5 = watch.h5[0] + 1, watch.h5[1] + clock() - started
        watch.sampler.stage = "fetch"


class TimedCollate:
    """Call a ``collate_fn`` and measure its time. For a few batches, torch's function is called twice."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self, samples: Any) -> Any:
        watch, started = _watch, clock()
        if watch is None:
            return self.given(samples)
        watch.sampler.stage = "collate"
        try:
            return self.given(samples)
        finally:
            watch.collate, watch.sampler.stage = clock() - started, "fetch"
            if self.given is default_collate and watch.fetches % TIMED == 0 and watch.fetches < REPEATED * TIMED:
                self.given(samples)
                watch.again = clock() - started - watch.collate


def _loads(original: Any, *args: Any, **kwargs: Any) -> Any:
    watch, started = _watch, clock()
    result = original(*args, **kwargs)
    if watch is not None and threading.get_ident() == watch.thread:
        watch.take += clock() - started
    return result


def _copy(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if _watch is None or type(self) not in (torch.Tensor, torch.nn.Parameter) or self.is_cuda:
        return original(self, *args, **kwargs)
    started = clock()
    result = original(self, *args, **kwargs)
    if result.is_cuda and _watch is not None:
        spent = _watch.spent
        spent["copy"] += clock() - started
        spent["copy_bytes"] += self.nbytes
        spent["pageable_bytes"] += 0 if self.is_pinned() else self.nbytes
    return result


def _backward(original: Any, *args: Any, **kwargs: Any) -> None:
    started = clock()
    original(*args, **kwargs)
    if _watch is not None:
        _watch.spent["backward"] += clock() - started
