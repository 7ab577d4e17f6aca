"""Hooks that measure a training loop from inside: DataLoaders, copies between devices, and optimizers.

`install` installs the hooks, and `remove` removes them. They call the original functions with the same arguments, and
return their results unchanged.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
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
from h5chunk.tools.doctor.files import describe_dataset, open_files
from h5chunk.tools.doctor.gpu import GpuClock
from h5chunk.tools.doctor.loader_stages import Stages
from h5chunk.tools.doctor.record import Fetch, Recorder, Sampler, Step, caller
from h5chunk.tools.model.seen import NO_LOADER, NO_LOADER_FACTS

FILES_AFTER = 3  # fetches after which open files are listed
TIMED = 8  # h5py's reads are measured in one of this many fetches
REPEATED = 10  # fetches whose samples are collated a second time, to measure this with warm caches
TAKE_S = 5e-5  # seconds to take a batch from a worker, besides unpacking it
MAX_DATASETS = 64  # reads with h5py, per process, whose dataset is described
MAX_LOST = 3  # errors of hooks that are reported
NOTICE_AT = 12  # steps of an optimizer, without a loader in between, after which the user is told
NOTICE = (
    "this loop takes its batches from neither a torch DataLoader nor a ChunkLoader, so that iterations are measured "
    "from one step of the optimizer to the next, and preparing a batch counts as a part of them"
)
Hook = Callable[..., Generator[Any, Any, None]]
Measurement = Generator["tuple[Any, Any] | None", Any, None]
clock = time.perf_counter
_new_number = itertools.count()  # of loaders; never used again, unlike IDs of objects


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
        self.datasets_left = MAX_DATASETS  # reads with h5py whose dataset is still to be described
        self.stages = Stages()
        self._optimizing, self._is_over = 0.0, False
        self._without_loader = 0  # consecutive iterations that no loader has fed
        self._lost: set[str] = set()

    def lose(self, hook: str, error: Exception) -> None:
        """Record that a hook failed. The report says so, and training goes on."""
        text = f"{hook.strip('_')} raised {type(error).__name__}"
        if text not in self._lost and len(self._lost) < MAX_LOST:
            self._lost.add(text)
            self.recorder.keep("lost", text)

    def asks(self, number: int) -> None:
        """End an iteration, because the loop requests another batch."""
        now = clock()
        self.sampler.stage = ""
        self._without_loader = 0
        if self._open is not None and self._open.loader != NO_LOADER:
            self._end_iteration(now)
        self._open = None
        self.spent.clear()
        self.take = 0.0

    def _end_iteration(self, now: float) -> None:
        """Write the current iteration, and stop measuring if the time is over."""
        assert self._open is not None
        gpu = self.gpu.end_step() if self.gpu is not None else None
        stages = self.stages.take() if self.stages.loader() is not None else {}
        self.recorder.add("step", *self._open._replace(ended=now, gpu=gpu, stages=stages, **self.spent))
        self._open = None
        self.spent.clear()
        self._first = self._first or now
        if now - self._first > self.options.get("seconds", math.inf):
            self._end()

    def _end(self) -> None:
        """Stop measuring; with option "end", also exit the process."""
        is_to_exit = self.options.get("end")
        if is_to_exit:
            self.recorder.keep("ended")
        elif self._optimizing:  # torch is iterating over the hooks of optimizers, which thus cannot be removed
            self._is_over = True
            return
        remove()
        if is_to_exit and threading.current_thread() is threading.main_thread():
            raise SystemExit(0)
        if is_to_exit:  # an exception would end only this thread
            os.kill(os.getpid(), signal.SIGTERM)

    def number_of(self, loader: Any) -> int:
        """Return a loader's number. Loaders that a script creates anew for each epoch have the same number."""
        known: int | None = loader.__dict__.get("_doctor_number")
        if known is None:
            known = next(_new_number)
            if isinstance(loader, DataLoader):
                with suppress(Exception):  # the user's objects may raise any error
                    known = self._numbers.setdefault(_kind(loader), known)
            loader.__dict__["_doctor_number"] = known
        return known

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
        self._begin_gpu_step()
        self.spent["take"] = self.take and self.take + TAKE_S
        started, samples = self.epoch_started.pop(number, None), 1
        with suppress(Exception):
            samples = batch_samples(batch)
        self._open = Step(number, asked, received, clock(), samples, torch.is_grad_enabled(), started)
        self.sampler.stage = "step"

    def _begin_gpu_step(self) -> None:
        if self.gpu is None and torch.cuda.is_initialized():
            self.gpu = GpuClock(self.recorder)
        if self.gpu is not None:
            self.gpu.begin_step()

    def close(self) -> None:
        """Write everything that was measured."""
        with suppress(Exception):  # such as errors of a device that failed
            self.sampler.stop()
            if self.gpu is not None:
                self.gpu.close()
        self.recorder.flush()

    def begin_optimizer(self) -> None:
        if not torch.compiler.is_compiling():  # a compiled step of the optimizer contains no measurement
            self._optimizing = clock()

    def end_optimizer(self) -> None:
        if torch.compiler.is_compiling():
            return
        now = clock()
        self.spent["optimizer"] += now - self._optimizing
        self.spent["optimizer_steps"] += 1
        if not self._is_over and (self._open is None or self._open.loader == NO_LOADER):
            try:
                self._steps_without_loader(now)
            except Exception as error:
                self.lose("optimizer", error)
        self._optimizing = 0.0

    def _steps_without_loader(self, now: float) -> None:
        """Measure the iterations of a loop that no loader feeds: from one step of the optimizer to the next."""
        if self._open is not None:
            self._end_iteration(now)
        if self._is_over:
            return
        self.sampler.start()
        self._without_loader += 1
        if NO_LOADER not in self._described:
            self._described.add(NO_LOADER)
            self.recorder.add("loader", NO_LOADER, NO_LOADER_FACTS, {}, machine())
        if self._without_loader == NOTICE_AT and self.options.get("end") and os.environ.get("RANK", "0") == "0":
            limit = ", and --epochs has no effect" if "epochs" in self.options else ""
            print(f"h5chunk doctor: {NOTICE}{limit}", file=sys.stderr, flush=True)
        self._begin_gpu_step()
        self.spent.clear()
        self._open = Step(NO_LOADER, now, now, now, 1, torch.is_grad_enabled(), None)
        self.sampler.stage = "step"


def _kind(loader: Any) -> tuple[Any, ...]:
    """Return what the loaders that a script creates anew for each epoch have in common."""
    dataset, size = loader.dataset, None
    with suppress(Exception):  # such as those of iterable datasets, whose length may be undefined
        size = len(dataset)
    return loader.__dict__["_made_at"], type(dataset), size, loader.batch_size, type(loader.sampler)


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
    _replace(DataLoader, "__init__", partial(_init, inspect.signature(DataLoader.__init__)))
    _replace(DataLoader, "__iter__", _iter)
    _replace(DataLoader, "_get_iterator", _get_iterator)
    _replace(fetch._MapDatasetFetcher, "fetch", _fetch)
    _replace(fetch._IterableDatasetFetcher, "fetch", _fetch)
    _replace(reduction.ForkingPickler, "loads", _loads)
    _replace(torch.Tensor, "to", _copy, _is_on_cpu)
    _replace(torch.Tensor, "cuda", _copy, _is_on_cpu)
    before = optimizer.register_optimizer_step_pre_hook(_begin_optimizer)
    after = optimizer.register_optimizer_step_post_hook(_end_optimizer)
    _undo.extend([before.remove, after.remove])
    if "RANK" in os.environ:
        watch.recorder.keep("rank", int(os.environ["RANK"]))
        _replace(torch.Tensor, "backward", _backward)
    _apply(options.get("fix", {}))
    if "h5chunk.feed.loader" in sys.modules:
        watch_chunk_loader(sys.modules["h5chunk.feed.loader"])
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
        _replace(module.ChunkLoader, "__init__", partial(_init, inspect.signature(module.ChunkLoader.__init__)))
        _replace(module.ChunkLoader, "__iter__", _iter)
        _watch.stages.install(_wrap)


def remove() -> None:
    """Remove the hooks, and write everything that was measured."""
    global _watch
    while _undo:
        _undo.pop()()
    _close()
    _watch = None


@atexit.register
def _close() -> None:
    if _watch is not None:
        _watch.close()


def _after_fork() -> None:
    """Measure a fork of this process separately. `StartWorker` does it again, if that is a DataLoader's worker."""
    global _watch
    if _watch is not None:
        with suppress(Exception):
            _watch = Watch(_watch.folder, "main", _watch.options)


def _close_at_end(_: Any = None) -> None:
    util.Finalize(None, _close, exitpriority=100)


os.register_at_fork(after_in_child=_after_fork)
_close_at_end()  # processes of multiprocessing do not run atexit handlers, and their forks forget these ones
util.register_after_fork(Watch, _close_at_end)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function with one that calls ``around``, whose first argument is the original function."""
    original, own = getattr(owner, name), name in vars(owner)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replaced)
    _undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def _replace(owner: Any, name: str, hook: Hook, wanted: Callable[[Watch, Any], bool] = lambda *_: True) -> None:
    """Run a hook around each call of a function. No error of the hook reaches the caller.

    ``wanted(watch, first_argument)`` says whether a call is measured, for functions that are called very often.
    """
    _wrap(owner, name, partial(_around, hook, wanted))


def _around(
    hook: Hook, wanted: Callable[[Watch, Any], bool], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    watch = _watch
    if watch is None or not wanted(watch, args[0]):
        return original(*args, **kwargs)
    running = hook(watch, *args, **kwargs)
    try:
        changed = next(running, None)
    except Exception as error:
        watch.lose(original.__name__, error)
        changed = None
    if changed is not None:
        args, kwargs = changed
    try:
        result = original(*args, **kwargs)
    except BaseException:
        try:
            running.close()
        except Exception as error:
            watch.lose(original.__name__, error)
        raise
    try:
        running.send(result)
    except StopIteration:
        pass
    except Exception as error:
        watch.lose(original.__name__, error)
    return result


# ---- the hooks: generators, which yield once where the original function runs, and receive its result
#
# They get the arguments of the call. They may yield other ones, as a tuple and a dict.


def _next(watch: Watch, self: Any) -> Measurement:
    if get_worker_info() is not None:
        return
    number = watch.number_of(self)
    watch.asks(number)
    asked = clock()
    batch = yield None
    watch.receives(number, asked, batch)


def _init(signature: inspect.Signature, watch: Watch, self: Any, *args: Any, **kwargs: Any) -> Measurement:
    changed, place = None, caller(sys._getframe())
    kind = "loader" if isinstance(self, DataLoader) else "chunk_loader"
    if fix := watch.options.get("fix", {}).get(kind):
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments.update(fix)
        changed = bound.args, bound.kwargs
    yield changed
    self.__dict__["_made_at"] = place


def _with_cache(num_slots: int, num_bytes: int, watch: Watch, *args: Any, **kwargs: Any) -> Measurement:
    yield args, {**kwargs, "rdcc_nslots": num_slots, "rdcc_nbytes": num_bytes}


def _iter(watch: Watch, self: Any) -> Measurement:
    if get_worker_info() is not None:
        return
    started = clock()
    iterator = yield None
    number = watch.number_of(self)
    iterator.__dict__["_doctor_number"] = number
    watch.begins_epoch(number, started, self)


def _get_iterator(watch: Watch, self: Any) -> Measurement:
    if not self.num_workers:
        return
    given = self.worker_init_fn
    self.worker_init_fn = StartWorker(watch.folder, given)
    watch.sampler.stop()  # `begins_epoch` starts it again
    try:
        yield None
    finally:
        self.worker_init_fn = given


class StartWorker:
    """A ``worker_init_fn`` that starts measuring in a DataLoader's worker, and calls the user's function."""

    def __init__(self, folder: str, given: Callable[[int], None] | None) -> None:
        self.folder, self.given = folder, given

    def __call__(self, worker: int) -> None:
        with suppress(Exception):  # this worker is then not measured
            self._start(worker)
        if self.given is not None:
            self.given(worker)

    def _start(self, worker: int) -> None:
        global _watch
        if _watch is None:
            install(self.folder, f"worker{worker}")
        else:  # the hooks were inherited
            _watch = Watch(self.folder, f"worker{worker}", {})
        assert _watch is not None
        _watch.sampler.start()


def _fetch(watch: Watch, self: Any, _indices: Any) -> Measurement:
    if not isinstance(self.collate_fn, TimedCollate):
        self.collate_fn = TimedCollate(self.collate_fn)
    before, started, used = watch.sampler.stage, clock(), time.process_time()
    watch.collate, watch.again, watch.h5, watch.sampler.stage = 0.0, 0.0, (0, 0.0), "fetch"
    try:
        yield None
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
    with suppress(Exception):  # files may change
        watch.recorder.keep("files", open_files())
    if "h5py" in sys.modules:
        _replace(sys.modules["h5py"].Dataset, "__getitem__", _read, _is_to_read)


def _is_to_read(watch: Watch, _dataset: Any) -> bool:
    return watch.sampler.stage == "fetch" and bool(watch.datasets_left or not watch.fetches % TIMED)


def _read(watch: Watch, dataset: Any, *_: Any, **__: Any) -> Measurement:
    is_timed = not watch.fetches % TIMED
    if watch.datasets_left:
        watch.datasets_left -= 1
        watch.recorder.keep("dataset", *describe_dataset(dataset))
    if is_timed:
        watch.sampler.stage, started = "reading", clock()
        try:
            yield None
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
            batch = self.given(samples)
        finally:
            watch.collate, watch.sampler.stage = clock() - started, "fetch"
        if self.given is default_collate and watch.fetches % TIMED == 0 and watch.fetches < REPEATED * TIMED:
            with suppress(Exception):  # samples may not allow to be collated twice
                self.given(samples)
                watch.again = clock() - started - watch.collate
        return batch


def _loads(watch: Watch, *_: Any, **__: Any) -> Measurement:
    started = clock()
    yield None
    if threading.get_ident() == watch.thread:
        watch.take += clock() - started


def _is_on_cpu(_watch: Watch, tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_cuda


def _copy(watch: Watch, self: Any, *_: Any, **__: Any) -> Measurement:
    started = clock()
    result = yield None
    if result.is_cuda:
        watch.spent["copy"] += clock() - started
        watch.spent["copy_bytes"] += self.nbytes
        watch.spent["pageable_bytes"] += 0 if self.is_pinned() else self.nbytes


def _begin_optimizer(*_: Any) -> None:
    if _watch is not None:
        _watch.begin_optimizer()


def _end_optimizer(*_: Any) -> None:
    if _watch is not None:
        _watch.end_optimizer()


def _backward(watch: Watch, *_: Any, **__: Any) -> Measurement:
    started = clock()
    yield None
    watch.spent["backward"] += clock() - started
