"""Read windows ahead, epoch after epoch, and yield their batches in order.

Why no memory is overwritten too early
--------------------------------------
A window passes through the states *planned*, *being read*, *ready*, *in use* and *released*. Only the consumer's thread
moves it on, apart from *ready*, which is the end of the last task. Three kinds of memory are used again:

**A slot** holds one window. It is in ``_free``, or belongs to one `WindowRead` in ``_open``, never both: `_load` takes
it from ``_free``, and `_put_back` returns it after the last batch of its window was made (with ``lends_slot``, after
the batch that follows was requested). Threads write to it only in tasks of its read, which count ``num_left``; a read
that is given up, because an epoch was left early, is waited for before its slot is free (`_restart_reading`), whether
or not it failed.

On the CPU, memory of a slot is new for each window (`BatchMemory`): batches are views of it or copies, and the memory
is used again only once nothing refers to it any more, which the reference count says. With ``lends_slot`` there is one
memory for each slot, and a batch is valid until the next one is requested.

If a batch of the user is larger than planned, the slots in ``_free`` are replaced by larger ones (`_grow`). On a GPU
these are all slots, because the earlier windows were released before this batch was asked for; all copies are waited
for before the pinned memory is freed.

**The device buffer** of a slot on a GPU is written by a copy, on the stream ``_copies``, and read by the kernels that
make batches, on the consumer's stream. Two events of the slot order them, so that no thread waits for a GPU:

- ``copied`` is recorded after the copy. `receive` lets the consumer's stream wait for it before the first batch is
  made.
- ``consumed`` is recorded by `release` on the consumer's stream, after the kernels of the last batch. The next copy
  into the buffer waits for it, on its own stream.

A slot that is given up before its window was received waits for ``copied``, too (`_put_back`): otherwise ``consumed``
would be recorded before a copy that still runs.

**A pinned buffer** is written by reading threads and read by the copy. Slots share the pinned buffers, and take them
in turn. A window that only native threads fill (`ReadPool.queues`) is queued for a buffer that may still be copied
from: they begin it when the ``copied`` of the window before it in this buffer has been reached (`Buffer.is_free`,
asked in ``begin`` of ``core.c``), and windows that use one buffer begin in the order in which they were submitted
(``is_taken``). For any other window, `CudaSlot.begin` takes a buffer for which no window is queued, and waits for its
last copy. `return_pinned` is called once no thread writes to the buffer any more. No array of a slot is smaller than
what a window needs: `Room.allocate` raises an error.

When the stream is closed, pinned memory is freed after all threads have ended and all copies are done (`_give_back`).
A fork has the memory but neither threads nor events: it refuses to go on (`lost_by_fork`).

Copies may be late by any time: `tests/native/test_cuda.py` reads through a stand-in for CUDA whose copies are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from h5chunk.errors import FileError, closed, lost_by_fork
from h5chunk.feed.batches import BatchMaker, EpochReport, Tensors, drop, with_images
from h5chunk.feed.columns import Columns, slot_bytes
from h5chunk.feed.cuda_slots import CudaSlot, PinnedBuffer, num_pinned
from h5chunk.feed.fetches import RemoteReadPool
from h5chunk.feed.memory import KEPT, BatchMemory
from h5chunk.feed.read_pool import ReadPool, WindowRead
from h5chunk.feed.skipping import Bad, check_skipped
from h5chunk.feed.slots import CpuSlot, Slot, to_device
from h5chunk.feed.source import DataSource
from h5chunk.plan.draws import REPEAT, Draws
from h5chunk.plan.order import Epoch, Order, Window
from h5chunk.plan.slots import SlotPlan, echo_pass, num_echoed

FEW_THREADS = 4
PLANNED = 12  # windows to plan at a time, once at most that many planned windows remain


class BadSamplesError(Exception):
    """Some samples of a window that is read only once are bad. ``bad`` has their errors."""

    def __init__(self, bad: Bad) -> None:
        super().__init__()
        self.bad = bad


def _is_read_soon(source: DataSource) -> bool:
    """Return whether windows are read again while they are in the processor's caches: scripts/LOG.md."""
    if source.device.type != "cpu":
        return source.num_threads > FEW_THREADS  # fewer are slower than the copy to the GPU
    return not all(kind.is_fixed for kind in source.kinds.values())  # rows and frames are copied to batches


class _Planner:
    """A thread that computes which samples the next windows contain. It reads no data.

    It plans many windows at a time, because waking the thread costs the consumer more time than planning a window.
    """

    def __init__(self, order: Order, start: int, together: int, *, once: bool) -> None:
        self._planned: SimpleQueue[tuple[int, Window] | BaseException] = SimpleQueue()  # (epoch, window) pairs
        self._room, self._stop, self._num_taken = threading.Semaphore(2 * PLANNED), threading.Event(), 0
        self._thread = threading.Thread(
            target=self._plan, args=(order, start, together, once), name="h5chunk-planner", daemon=True
        )

    def start(self) -> None:
        """Start the thread. `stop` ends it even if a signal interrupts this call."""
        self._thread.start()

    def _plan(self, order: Order, start: int, together: int, once: bool) -> None:
        size = 1  # the first window is read alone, so that its batches are there soon
        try:
            while order.num_batches:
                windows = order.windows(start)
                while group := list(islice(windows, size)):
                    self._room.acquire()
                    if self._stop.is_set():
                        return
                    self._planned.put((order.epoch, Window.joined(group)))
                    size = together
                if once:
                    return
                order, start = replace(order, epoch=order.epoch + 1), 0
        except BaseException as error:  # raised again in the consumer's thread
            self._planned.put(error)

    def take(self, timeout_s: float | None) -> tuple[int, Window] | None:
        """Return the epoch and the next window, or None on a timeout. Raise the error of the planner's thread."""
        try:
            planned = self._planned.get(timeout=timeout_s) if timeout_s != 0 else self._planned.get_nowait()
        except Empty:
            return None
        if isinstance(planned, BaseException):
            raise planned
        self._num_taken += 1
        if self._num_taken % PLANNED == 0:
            self._room.release(PLANNED)
        return planned

    def stop(self, error: BaseException) -> None:
        """Let the thread end. A caller of `take` gets ``error``."""
        self._stop.set()
        self._room.release()
        self._planned.put(error)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread, which was stopped, up to ``timeout_s``."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout_s)


class _Drawer:
    """Plans the windows of the user's batches, in the thread that takes them.

    They are planned once there is room for them, which does not depend on how fast they are read. Therefore a sampler
    whose batches depend on the training loop draws the same batches in each run.
    """

    is_alive = False  # there is no thread

    def __init__(self, order: Epoch, start: int, num_windows: int) -> None:
        self._epoch, self._windows, self._num_windows = order.epoch, order.windows(start), num_windows
        self._planned: deque[tuple[int, Window]] = deque()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Plan as many windows as there is room for."""
        self.add(self._num_windows)

    def add(self, num_windows: int = 1) -> None:
        """Plan more windows, for which there is room now. `take` raises the error of the user's sampler."""
        try:
            self._planned.extend((self._epoch, window) for window in islice(self._windows, num_windows))
        except Exception as error:
            self._error = error

    def take(self, timeout_s: float | None) -> tuple[int, Window] | None:
        """Return the epoch and the next window. With a timeout of 0, return None if there is no room for it."""
        if not self._planned and timeout_s != 0:
            if self._error is None:
                self.add()
            if self._error is not None:
                raise self._error
        return self._planned.popleft() if self._planned else None

    def stop(self, error: BaseException) -> None:
        """Plan no more windows. A caller of `take` gets ``error``."""
        self._error, self._windows = error, iter(())
        self._planned.clear()

    def join(self, _timeout_s: float | None) -> None:
        """Return, because there is no thread."""


class _Turn:
    """The window whose batches are being made: a function that returns its next batch, and how many are left."""

    read: WindowRead
    take: Callable[[], Tensors]
    num_left = 0


class WindowStream:
    """Read ahead through the windows of a plan, and yield their batches.

    The consumer's thread starts reading a window when a slot becomes free. The stream keeps no reference to the batch
    maker: transforms may refer to the loader, whose finalizer refers to the stream.

    With ``lends_slot`` a batch is a view of its slot, valid until the next batch is requested; otherwise batches have
    their own memory. With ``once`` only the first epoch is read.
    """

    def __init__(
        self,
        source: DataSource,
        plan: SlotPlan,
        *,
        lends_slot: bool,
        echo: float = 1,
        once: bool = False,
        start: int = 0,
    ) -> None:
        self._lends_slot, self._echo, self._once, self._together = lends_slot, echo, once, plan.together
        self._source, self._num_slots = source, plan.num_slots
        self._num_local = plan.num_local
        # memory for the samples of echoes
        self._gathered = BatchMemory(KEPT * len(source.kinds)) if source.device.type == "cpu" else None
        self._open: dict[WindowRead, None] = {}  # windows in the order of reading
        self._unused: deque[tuple[int, WindowRead]] = deque()  # the epochs and the windows of which no batch was begun
        self._free: deque[Slot] = deque()  # slots
        self._maker: threading.Thread | None = None  # the thread that creates all slots but the first
        self._is_closed = False
        self._not_made: BaseException | None = None
        self._planner: _Planner | _Drawer | None = None
        self._left_planners: list[_Planner | _Drawer] = []  # stopped planners whose threads may still run
        self._planned: tuple[int, Window] | None = None  # a window that was planned, and waits for memory
        self._pinned: list[PinnedBuffer] = []
        self._copies: Any = None  # the stream of copies to a GPU
        self._pool: Any = None
        try:
            slots = self._make_slots(plan)
            self._free.append(next(slots))
            if source.device.type == "cpu":
                self._free.extend(slots)
            else:  # pinning memory takes longer than reading into it
                self._maker = threading.Thread(
                    target=self._make_others, args=(slots,), name="h5chunk-pinner", daemon=True
                )
                self._maker.start()
            how: dict[str, Any] = {"numbered": source.numbered, "timeout_s": source.timeout_s}
            how |= {"skips": source.skipping is not None, "is_cached": _is_read_soon(source)}
            how["memory"] = source.memory
            is_remote = source.reader.is_remote and source.memory is None
            if is_remote:
                how |= {"selection": plan.order.selection, "num_windows": plan.num_slots}
            pool = RemoteReadPool if is_remote else ReadPool
            self._pool = pool(source.reader, source.fields, source.num_threads, **how)
            self._start_reading(plan.order, start)
        except BaseException:
            self.close()
            raise

    def _make_slots(self, plan: SlotPlan) -> Iterator[Slot]:
        source = self._source
        kinds, num_samples = source.kinds, plan.window_samples
        if source.device.type == "cpu":
            kept = KEPT if plan.order.is_pure else plan.num_slots  # no window is read ahead at the end of an epoch
            memory = None if self._lends_slot or source.has_frames else BatchMemory(kept * len(kinds))
            for _ in range(plan.num_slots):
                yield CpuSlot(kinds, num_samples, memory)
            return
        self._copies, current = torch.cuda.Stream(source.device), torch.cuda.current_stream(source.device)
        pinned: deque[PinnedBuffer] = deque()  # those that no slot uses
        enough = num_pinned(plan.num_slots, slot_bytes(kinds, num_samples))
        enough = plan.num_slots if source.reader.is_remote else enough  # else fewer windows would be fetched at a time
        for number in range(plan.num_slots):
            with torch.cuda.stream(current):  # the caller's, also in the thread that makes slots
                if number < enough:
                    self._pinned.append(PinnedBuffer(kinds, num_samples))
                    pinned.append(self._pinned[-1])
                slot = CudaSlot(kinds, num_samples, pinned, self._copies)
            yield slot
            del slot

    def _make_others(self, slots: Iterator[Slot]) -> None:
        try:
            while not self._is_closed and (slot := next(slots, None)) is not None:
                self._free.append(slot)
        except BaseException as error:  # raised again in the consumer's thread
            self._not_made = error

    @property
    def is_usable(self) -> bool:
        """Whether the threads belong to this process: see `ReadPool.is_usable`."""
        return bool(self._pool.is_usable)

    def close(self) -> None:
        """Stop the threads, wake up callers that wait for a window, then free the memory.

        The memory is freed in the background if a thread hangs, or if the garbage collector makes this call in the
        thread that creates the slots.
        """
        self._is_closed = True
        if self._pool is not None:
            if self.is_usable:  # a fork has no planner thread, and may have copied its lock locked
                self._end_planner()
            self._pool.close()
        has_ended = self._pool is None or self._pool.has_ended.is_set()
        if has_ended and self._maker is not threading.current_thread():
            self._give_back()
        else:
            threading.Thread(target=self._give_back, name="h5chunk-closer", daemon=True).start()

    def _give_back(self) -> None:
        if self._maker is not None:
            self._maker.join()
        if self._pool is not None:
            self._pool.has_ended.wait()
        while self._pinned:
            self._copies.synchronize()
            self._pinned.pop().close()

    def _end_planner(self) -> None:
        if self._planner is not None:
            self._planner.stop(self._closed())
            for planner in (*self._left_planners, self._planner):
                planner.join(self._pool.wait_s)

    def _leave_planner(self) -> None:
        """Stop the planner without waiting for it, because planning a round takes milliseconds."""
        assert self._planner is not None
        self._planner.stop(self._closed())
        self._left_planners = [each for each in (*self._left_planners, self._planner) if each.is_alive]

    def _closed(self) -> FileError:
        return closed(self._pool.path)

    def _start_reading(self, order: Epoch, start: int) -> None:
        self._next: tuple[int, int] | None = (order.epoch, start)
        self._planned = None
        if isinstance(order, Order):
            self._planner = _Planner(order, start, self._together, once=self._once)
        else:
            self._planner = _Drawer(order, start, self._num_slots)
        self._planner.start()
        if self._is_closed:  # by another thread, just now
            self._end_planner()
        self._fill()

    def _restart_reading(self, order: Epoch, start: int) -> None:
        """Restart at another position with the same threads and memory. Running reads are discarded once they end."""
        self._leave_planner()
        self._pool.cancel()
        self._unused.clear()
        for read in list(self._open):
            read.wait_for_threads(self._pool.timeout_s)
            self._put_back(read)
        self._start_reading(order, start)

    def _fill(self) -> None:
        """Start reading planned windows into the free slots, without waiting."""
        assert self._planner is not None
        while self._free and self.is_usable:
            self._planned = self._planned or self._planner.take(0)
            if self._planned is None:
                return
            slot, num_samples = self._free[0], len(self._planned[1].samples)
            queued = self._pool.queues(slot, num_samples)
            if not slot.has_pinned(queued=queued):
                self._pool.finish_ready()
            if not slot.holds(num_samples) or not slot.can_begin(queued=queued):
                return
            self._load(*self._planned)

    def _load(self, epoch: int, window: Window) -> None:
        self._pool.epoch, self._planned = epoch, None
        read = self._pool.load(window, self._free.popleft())
        self._open[read] = None
        self._unused.append((epoch, read))

    def _load_next(self, order: Epoch) -> None:
        """Wait until the next window is planned, and start reading it. Raise WorkerError if that takes too long."""
        if not self.is_usable:
            raise lost_by_fork(self._pool.path)
        if self._maker is not None and not self._free:
            self._maker.join()
        if self._not_made is not None:
            raise self._not_made
        assert self._planner is not None
        self._planned = self._planned or self._planner.take(self._pool.timeout_s)
        if self._planned is None:
            raise self._pool.mark_hanging(self._pool.timeout_s)
        if not self._free[0].holds(num_samples := len(self._planned[1].samples)):
            self._grow(order, num_samples)
        self._wait_for_pinned(self._free[0], num_samples)
        self._load(*self._planned)

    def _wait_for_pinned(self, slot: Slot, num_samples: int) -> None:
        """Wait for the open windows, one after the other, until there is a pinned buffer for another one."""
        queued = self._pool.queues(slot, num_samples)
        for read in list(self._open):
            if slot.has_pinned(queued=queued):
                return
            read.wait_for_threads(self._pool.timeout_s)

    def _grow(self, order: Epoch, num_samples: int) -> None:
        """Replace the free slots by larger ones. On a GPU no slot is in use, because the next batch needs this one."""
        assert order.replan is not None
        plan = order.replan(num_samples)
        if self._maker is not None:
            self._maker.join()
        count = len(self._free)
        self._free.clear()
        if self._copies is not None:
            assert not self._open
            self._copies.synchronize()
            while self._pinned:
                self._pinned.pop().close()
            count = plan.num_slots
        self._free.extend(islice(self._make_slots(plan), count))

    def windows(self, order: Any) -> Iterator[Columns]:
        """Yield the columns of each window of an epoch. If slots are lent, they are valid until the next request."""
        if self._next != (order.epoch, 0):
            self._restart_reading(order, 0)
        self._next, self._report, left = None, EpochReport(), order.num_batches
        while left:
            if not self._open:
                self._load_next(order)
            read = next(iter(self._open))
            self._wait_for(read, order)
            left -= len(read.window.batches)
            yield read.slot.window
            self._release(read)

    def batches(self, order: Epoch, maker: BatchMaker, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch, starting at batch ``start``.

        If these batches come next in the windows that were read ahead, those windows are used.
        """
        if self._next != (order.epoch, start):
            self._restart_reading(order, start)
        self._next, self._report = None, report
        report.waited_s += time.perf_counter() - report.started  # starting threads, opening the file
        turn = _Turn()
        stays = self._lends_slot or self._echo != 1  # the window, until its last batch is used
        begun: deque[tuple[WindowRead, Tensors, bool]] = deque()  # batches that are being decoded
        following = (order.epoch + 1, 0) if order.is_pure else None
        num_batches = order.num_batches
        try:
            for number in order.numbers(start):
                if maker.ahead:
                    while not begun or (len(begun) <= maker.ahead and self._is_batch_ready(turn, order.epoch)):
                        begun.append(self._begin_batch(turn, order, maker))
                    read, batch, last = begun.popleft()
                    batch = self._with_images(read, batch, order, maker, number)
                else:
                    read, batch, last = self._begin_batch(turn, order, maker)
                if not stays and number + 1 == num_batches:
                    self._next = following  # before the last batch: a consumer that counts batches stops there
                if not stays and last:
                    self._release(read)
                report.add(maker.num_samples(batch), fresh=True)
                yield maker.finish(batch)
                if stays and last:
                    for batch in islice(self._echoes(read, order, maker), self._num_due(read, number)):
                        report.add(maker.num_samples(batch), fresh=False)
                        yield maker.finish(batch)
                    self._release(read)
        finally:
            for _, batch, _ in begun:
                drop(batch)
            if not order.is_pure:  # the user's sampler may refer to the loader, whose finalizer refers to the stream
                self._leave_planner()
        self._next = following

    def _is_batch_ready(self, turn: _Turn, epoch: int) -> bool:
        """Return whether the next batch of the epoch can be made without waiting."""
        self._pool.finish_ready()
        if turn.num_left or not self._unused:
            return bool(turn.num_left)
        next_epoch, read = self._unused[0]
        return next_epoch == epoch and read.is_ready

    def _begin_batch(self, turn: _Turn, order: Epoch, maker: BatchMaker) -> tuple[WindowRead, Tensors, bool]:
        """Begin the next batch. Return it with its window, and whether it is the last one of this window.

        The first batch of a window waits until it has been read.
        """
        if not turn.num_left:
            while not self._unused:
                self._load_next(order)
            _, read = self._unused.popleft()
            self._wait_for(read, order)
            turn.read, turn.take, turn.num_left = read, self._made(read, order, maker), len(read.window.batches)
        turn.num_left -= 1
        return turn.read, turn.take(), not turn.num_left

    def _made(self, read: WindowRead, order: Epoch, maker: BatchMaker) -> Callable[[], Tensors]:
        """Return a function that returns the batches of a window that was read, and keeps no reference to them."""
        is_whole = len(read.window.batches) == 1
        if is_whole and maker.passes_windows and not self._lends_slot:
            if self._free:
                self._fill()
            return deque([read.slot.window]).popleft
        draws = Draws(order.seed, order.epoch, read.window.keys, kept={}, whole=read.window.keys)
        if is_whole and not maker.ahead:
            self._fill()
            return deque([maker.whole(read.slot.window, draws, max(1, len(read.window.samples)))]).popleft
        batches = maker.open(read.slot.window, draws, read.window.sizes or order.batch_size)
        self._fill()
        return batches.__next__

    def _wait_for(self, read: WindowRead, order: Epoch) -> None:
        if not self.is_usable:
            raise lost_by_fork(self._pool.path)
        self._pool.finish_ready(read)
        try:
            if not read.is_ready:
                waits = time.perf_counter()
                read.wait(self._pool.timeout_s)
                self._report.waited_s += time.perf_counter() - waits
            read.wait()
        except FileError as error:
            check_skipped(self._source.skipping, error)
            self._replace_bad(read, order)
        read.slot.receive()

    def _replace_bad(self, read: WindowRead, order: Epoch) -> None:
        """Read a window again, in which bad samples are replaced by good ones."""
        skipping, window = self._source.skipping, read.window
        assert skipping is not None
        read.bad = skipping.find(window.keys, self._errors_of)
        if self._once and read.bad:
            raise BadSamplesError(read.bad)
        keys, replaced = skipping.replaced(window.keys, window.sizes or order.batch_size, read.bad, order)
        self._report.add_skipped(replaced)
        read.window, read.error = Window.of(keys, window.batches, window.sizes), None
        self._wait_for_pinned(read.slot, len(keys))
        again = self._pool.load(read.window, read.slot)
        again.wait(self._pool.timeout_s)

    def _with_images(self, read: WindowRead, batch: Tensors, order: Epoch, maker: BatchMaker, number: int) -> Tensors:
        """Wait for the images of a batch. Bad ones are replaced, with the other fields, by other samples."""
        try:
            return with_images(batch)
        except FileError as error:
            drop(batch)
            check_skipped(self._source.skipping, error)
        sizes = read.window.sizes or [order.batch_size] * len(read.window.batches)
        index = list(read.window.batches).index(number)
        start = sum(sizes[:index])
        return self._made_again(read, np.arange(start, min(start + sizes[index], len(read.window.keys))), order, maker)

    def _made_again(self, read: WindowRead, some: np.ndarray, order: Epoch, maker: BatchMaker, use: int = 0) -> Tensors:
        """Make a batch of ``some`` of a window's samples, of which bad ones are replaced by others of the batch."""
        skipping, keys = self._source.skipping, read.window.keys[some]
        assert skipping is not None
        place_of = dict(zip((keys % REPEAT).tolist(), read.places_of(some).tolist(), strict=True))

        def places_of(own: np.ndarray) -> np.ndarray:
            return np.array([place_of[row] for row in (own % REPEAT).tolist()])

        def make(own: np.ndarray) -> Tensors:
            draws = Draws(order.seed, order.epoch, own, use)
            return maker.make(self._taken(read, places_of(own), maker), draws, len(own))[0]

        keys, batch, replaced = skipping.remade(read.planned.keys[some], keys, read.bad, order, make)
        self._report.add_skipped(replaced)
        read.replace(some, keys, places_of(keys))
        return batch

    def _errors_of(self, parts: Sequence[np.ndarray]) -> list[BaseException | None]:
        """Try to read the samples of several arrays of keys, and return the error or None for each of them."""
        kinds = self._source.kinds
        reads = [self._pool.load(Window.of(keys), CpuSlot(kinds, len(keys), BatchMemory())) for keys in parts]
        for read in reads:
            read.wait_for_threads(self._pool.timeout_s)
        return [read.error for read in reads]

    def _num_due(self, read: WindowRead, number: int) -> int:
        """Return the number of echoed batches to yield after the window whose last batch is batch ``number``."""
        if self._echo == 1:
            return 0
        fresh = len(read.window.batches)
        return num_echoed(self._echo, number + 1) - num_echoed(self._echo, number + 1 - fresh)

    def _echoes(self, read: WindowRead, order: Epoch, maker: Any) -> Iterator[Tensors]:
        """Shuffle the samples of a window repeatedly, and yield the batches of each pass, without end."""
        window, size = read.window, order.batch_size
        for number in count():
            samples = echo_pass(len(window.samples), order.seed, order.epoch, window.batches[0], number)
            for first in range(0, max(1, len(samples)), size):  # at least one batch, if this rank has no samples
                some = samples[first : first + size]
                draws = Draws(order.seed, order.epoch, window.keys[some], number + 1)
                try:
                    batches = maker.make(self._taken(read, read.places_of(some), maker), draws, size)
                except FileError as error:
                    check_skipped(self._source.skipping, error)
                    batches = [self._made_again(read, some, order, maker, number + 1)]
                yield from batches

    def _taken(self, read: WindowRead, places: np.ndarray, maker: BatchMaker) -> tuple[Any, ...]:
        """Copy samples of a window, given their positions in it, (n,) int64."""
        return maker.take(read.slot.window, to_device(places, read.slot.device), self._gathered)

    def _release(self, read: WindowRead) -> None:
        self._put_back(read)
        self._fill()

    def _put_back(self, read: WindowRead) -> None:
        del self._open[read]
        if isinstance(self._planner, _Drawer):
            self._planner.add()
        is_needed = not self._pool.is_local or len(self._open) + len(self._free) < self._num_local
        if not is_needed:  # fewer are enough; a copy to its memory may still be running if no batch was taken
            read.slot.receive()
        read.slot.release()
        if is_needed:
            self._free.append(read.slot)
