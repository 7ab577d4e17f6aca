"""Run work on an HDF5 file in a child process, so that a file that crashes or hangs HDF5 only causes an error.

Forking is safe despite other threads and an initialised GPU. No other thread is inside HDF5, because its lock is held.
The child does not collect garbage of the parent, and it exits without any cleanup. A child that nevertheless waits for
a lock forever is killed.

This works only on Linux. Elsewhere, and if the system cannot fork, the work is done in the calling process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from h5py._objects import phil

from h5chunk.errors import FileError, H5ChunkError, WorkerError, exact_bytes, printable
from h5chunk.machine import warnings_filtered
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.open import DAMAGES

T = TypeVar("T")
Say = Callable[[Any], None]

LOOP_S = 60.0  # CPU time of a thread without a read, write or message, after which a child counts as looping
IDLE_S = 120.0  # time during which all threads sleep, after which a child counts as stuck
LOOK_S, MEMORY_LOOK_S = 1.0, 0.05  # time between checks of a child, and of its memory
METADATA_BYTES = 256 << 20  # limit on the memory that a child may use for metadata
METADATA_RATIO = 128  # additional bytes of memory per byte of the file: HDF5 needs 20 KB for a small open object
PR_SET_PDEATHSIG = 1  # option of prctl
SAID, DONE, FAILED = "said", "done", "failed"  # kinds of messages from the child; every message also has a value

_is_child = False  # whether this process is a child that `in_child` started
# in a child: the limit on its data in bytes or 0, the part of it that a file may use, and whether ``trusted`` lifts it
_limits = memoryview(bytearray(3 * 8)).cast("q")
_tried: set[Hashable] = set()  # versions of files that a child has opened without a crash


class Stuck(WorkerError):
    """Raised if a child process makes no progress for a long time. The file need not be damaged."""


def try_files(paths: Sequence[Path], probe: Callable[[Path], None], purpose: Hashable) -> None:
    """Call ``probe`` with each file in a child process, to test whether HDF5 can safely read it in this process.

    An unchanged file is tested once for each ``purpose``, a key that identifies the work of ``probe``. Raises FileError
    if HDF5 crashes or loops on a file, and passes on h5chunk's own errors from ``probe``.
    """
    if _is_child:
        return
    keys = {path: (stamp_of(path, with_ctime=True), purpose) for path in paths}
    due = [path for path in paths if keys[path] not in _tried]
    if not due:
        return
    reached = [due[0]]

    def probe_all(say: Say) -> None:
        for path in due:
            say(path)
            with limited_memory(path, False):
                probe(path)

    try:
        in_child(probe_all, lambda: printable(reached[-1]), reached.append)
    except Stuck as error:
        warnings.warn(
            f"{error}. The file is now opened without testing first whether HDF5 can safely read it",
            RuntimeWarning,
            stacklevel=4,
        )
    except WorkerError:
        return  # this is not an error of h5chunk, and the caller will get it when it reads the file
    _tried.update(keys[path] for path in due)


def in_child(work: Callable[[Say], T], file_name: Callable[[], str], on_message: Say = lambda _: None) -> T:
    """Run ``work(say)`` in a child process, and return its result or raise its error. Both must be picklable.

    ``on_message`` is called in this process with every object that ``work`` passes to ``say``. ``file_name`` returns
    the name of the file for messages. Raises FileError if the child crashes or loops. Raises WorkerError if the child
    sleeps for too long, or if its error is not an error of h5chunk.
    """
    if sys.platform != "linux" or _is_child:
        return work(on_message)
    with contextlib.suppress(ImportError):
        import hdf5plugin  # noqa: F401  # otherwise every child would import it
    parent = os.getpid()
    try:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        limits = memoryview(mmap.mmap(-1, 3 * 8)).cast("q")  # shared with the child
        with warnings_filtered("ignore"), phil:  # warnings about forks with threads; phil: no thread is inside HDF5
            child = _fork()
    except OSError:
        return work(on_message)
    if not child:
        _run(work, sender, parent, limits)
    sender.close()
    over = False
    try:
        with receiver:
            result = _listen(receiver, child, on_message, file_name, limits)
        over = True
    finally:
        if not over:
            os.kill(child, signal.SIGKILL)
        try:
            status = os.waitpid(child, 0)[1]
        except ChildProcessError:  # another thread of this process has waited for it
            status = 0
    if result:
        value: T = result[0]
        return value
    cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
    raise FileError(f"{file_name()}: this file crashes HDF5 ({cause}): it is damaged, or too little memory is free")


def _fork() -> int:
    """Fork without a garbage collection in the child, where freeing GPU memory of this process would abort."""
    collects = gc.isenabled()
    gc.disable()
    try:
        if not (child := os.fork()):
            gc.freeze()
        return child
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def limited_memory(path: Path, trusted: bool | None = None) -> Iterator[None]:
    """Limit the memory of a child process in a context, because damaged metadata may make HDF5 use all memory.

    There is no limit for ``trusted`` files; None means that the caller has no such option. The parent process raises
    FileError if the child exceeds the limit. Memory that is requested faster than the parent looks is limited to twice
    as much by the system; HDF5 may crash at that limit, but not at the first.
    """
    if sys.platform != "linux" or not _is_child or trusted:
        yield
        return
    taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    before, taken_bytes = resource.getrlimit(resource.RLIMIT_DATA), int(taken.split()[1]) << 10
    allowed = METADATA_BYTES + METADATA_RATIO * sum(stamp_of(path)[2:3])
    hard = min(value for value in (taken_bytes + 2 * allowed, *before) if value != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, before[1]))
    _limits[1], _limits[2], _limits[0] = allowed, trusted is not None, taken_bytes + allowed
    try:
        yield
    except (H5ChunkError, *DAMAGES) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise _too_much_memory(printable(path), _limits) from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        _limits[0] = 0


def _too_much_memory(name: str, limits: memoryview) -> FileError:
    _, allowed, has_option = limits
    remedy = ". If you trust it, trusted=True (--trusted) removes this limit" if has_option else ""
    return FileError(
        f"{name}: its metadata needs more memory than the {exact_bytes(allowed)} that h5chunk allows for a file of its "
        f"size, because it has very many objects or is damaged{remedy}"
    )


def _listen(
    pipe: Connection, child: int, on_message: Say, file_name: Callable[[], str], limits: memoryview
) -> list[Any]:
    """Receive the messages of a child. Returns a list with its result, or an empty list if it dies without one."""
    watch, looked = _Watch(child), time.monotonic()
    while True:
        try:
            if not pipe.poll(MEMORY_LOOK_S):
                if 0 < limits[0] < watch.data_bytes():
                    raise _too_much_memory(file_name(), limits)
                if time.monotonic() - looked < LOOK_S:
                    continue
                looked = time.monotonic()
                if watch.is_dead() and not pipe.poll():  # no EOFError if another process inherited the child's sender
                    return []
                watch.check(file_name)
                continue
            kind, value = pipe.recv()
        except EOFError:
            return []
        if kind == DONE:
            return [value]
        if kind == FAILED:
            raise value
        on_message(value)
        watch.moved = None


class _Watch:
    """Detects whether a child process makes progress: whether it reads, writes, computes or sends messages."""

    def __init__(self, child: int) -> None:
        self._folder = Path(f"/proc/{child}")
        self.moved: bytes | None = None  # the kernel's counters of reads and writes at the last progress
        self._ticks: dict[str, tuple[str, int]] = {}
        self._since = 0.0

    def check(self, file_name: Callable[[], str]) -> None:
        """Raise FileError if the child computes for too long without a read or write.

        Raises Stuck if all of its threads sleep for too long.
        """
        moved, threads = None, self._threads()
        with contextlib.suppress(OSError):
            moved = (self._folder / "io").read_bytes()
        if self.moved is None or moved != self.moved:
            self.moved, self._ticks, self._since = moved, threads, time.monotonic()
            return
        per_s = os.sysconf("SC_CLK_TCK")
        ran = max((ticks - self._ticks.get(name, ("", 0))[1] for name, (_, ticks) in threads.items()), default=0)
        if ran > LOOP_S * per_s:
            raise FileError(f"{file_name()}: this file makes HDF5 loop endlessly: it is damaged")
        if any(state != "S" for state, _ in threads.values()) or ran:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > IDLE_S:
            raise Stuck(f"{file_name()}: a process that was started to read it made no progress for {IDLE_S:.0f} s")

    def data_bytes(self) -> int:
        """Return the memory of the child, in bytes, that a limit on its data applies to."""
        with contextlib.suppress(OSError, IndexError):
            return int((self._folder / "statm").read_text().split()[5]) * resource.getpagesize()
        return 0

    def is_dead(self) -> bool:
        return {state for state, _ in self._threads().values()} <= {"Z", "X"}

    def _threads(self) -> dict[str, tuple[str, int]]:
        """Return the state, as ps shows it, and the CPU time in ticks of every thread, by thread id."""
        states = {}
        with contextlib.suppress(OSError):
            for thread in (self._folder / "task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    fields = (thread / "stat").read_text().rpartition(")")[2].split()
                    states[thread.name] = fields[0], int(fields[11])
        return states


def _run(work: Callable[[Say], Any], pipe: Connection, parent: int, limits: memoryview) -> NoReturn:
    """Run the work in the child process, send its result, and exit."""
    global _is_child, _limits
    _is_child, _limits = True, limits
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the main process, which ends this one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            try:
                pipe.send((DONE, work(lambda value: pipe.send((SAID, value)))))
            except H5ChunkError as error:
                error.__context__ = error.__cause__ = None  # dask would pickle these errors, and some cannot be pickled
                pipe.send((FAILED, error.with_traceback(None)))
            except BaseException:
                pipe.send((FAILED, WorkerError(traceback.format_exc())))
            code = 0
    finally:
        os._exit(code)  # without closing or flushing files of the parent
