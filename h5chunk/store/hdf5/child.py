"""Run work on an HDF5 file in a child process, so that a file that crashes or hangs HDF5 only causes an error.

Children are forks of a helper process (`h5chunk.store.hdf5.helper`), which each process starts when it opens its first
untrusted file, or when it imports a class that will (`start_ahead`). Neither depends on the threads, the GPU, the
standard streams or the main module of this process. A child that loops, sleeps or takes too much memory is killed, on
Linux; elsewhere the system does not show what it does. If the system cannot start a helper, the work is done in the
calling process.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from h5chunk.errors import FileError, H5ChunkError, WorkerError, exact_bytes, printable
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.chunk_table import keep_tables, noted_tables
from h5chunk.store.hdf5.helper_start import Child, start_child
from h5chunk.store.hdf5.open import DAMAGES, check_not_written
from h5chunk.urls import local_copy_of

T = TypeVar("T")
Say = Callable[[Any], None]

LOOP_S = 60.0  # CPU time of a thread without a read, write or message, after which a child counts as looping
IDLE_S = 120.0  # time during which all threads sleep, after which a child counts as stuck
LOOK_S, MEMORY_LOOK_S = 1.0, 0.05  # time between checks of a child, and of its memory
METADATA_BYTES = 256 << 20  # limit on the memory that a child may use for metadata
METADATA_RATIO = 128  # additional bytes of memory per byte of the file: HDF5 needs 20 KB for a small open object
SAID, DONE, FAILED, LIMITED = "said", "done", "failed", "limited"  # kinds of messages from the child; each has a value

_is_child = False  # whether this process is a child that `in_child` started
_send: Callable[[str, Any], None] | None = None  # in a child: sends a message to the caller
_tried: set[Hashable] = set()  # versions of files that a child has opened without a crash


class Stuck(WorkerError):
    """Raised if a child process makes no progress for a long time. The file need not be damaged."""


class _Limit(NamedTuple):
    """The file that a child reads, and the memory that it may take for it."""

    name: str
    allowed: int = 0  # bytes for the file
    data_bytes: int = 0  # limit on all data of the child in bytes; 0 if there is none
    has_option: bool = False  # whether ``trusted`` lifts the limit


def try_files(
    paths: Sequence[Path], probe: Callable[..., T], *arguments: Any, purpose: Hashable = None
) -> dict[Path, T]:
    """Call ``probe(path, *arguments)`` with each file in a child process, to test whether HDF5 can safely read it.

    Returns the results by path. They must be picklable. The tables of chunks that the child lists are kept for this
    process. An unchanged file is tested once for each ``purpose``, a key that identifies the work of ``probe``; there
    is no result for it afterwards. Raises FileError if HDF5 crashes or loops on a file, and passes on h5chunk's own
    errors from ``probe``.
    """
    if _is_child:
        return {}
    keys = {path: (stamp_of(path, with_ctime=True), purpose) for path in paths}
    due = [path for path in keys if keys[path] not in _tried]
    found: list[T] = []
    if not due:
        return {}
    check_not_written(due)
    try:
        found, tables = in_child(due[0], _call_each, due, probe, arguments)
        keep_tables(tables)
    except Stuck as error:
        warnings.warn(
            f"{error}. The file is now opened without testing first whether HDF5 can safely read it",
            RuntimeWarning,
            stacklevel=4,
        )
    except WorkerError:
        return {}  # this is not an error of h5chunk, and the caller will get it when it reads the file
    _tried.update(keys[path] for path in due)
    return dict(zip(due, found, strict=False))


def _call_each(paths: Sequence[Path], probe: Callable[..., T], arguments: Sequence[Any]) -> tuple[list[T], Any]:
    """In a child, call ``probe(path, *arguments)`` for each file. Returns the results, and the tables of chunks."""
    found = []
    with noted_tables() as tables:
        for path in paths:
            with limited_memory(path, False):
                found.append(probe(path, *arguments))
    return found, tables


def in_child(path: Path, work: Callable[..., T], *arguments: Any, on_message: Say | None = None) -> T:
    """Run ``work(*arguments)`` in a child process, and return its result or raise its error.

    ``work`` is a function of a module, and all arguments, the result and the error are picklable. Messages name the
    file at ``path``, until the child enters `limited_memory` with another file. With ``on_message``, the first
    argument of ``work`` is a function, and ``on_message`` is called in this process with every object that ``work``
    passes to it. Raises FileError if the child crashes or loops, or if this process writes to the file. Raises
    WorkerError if the child sleeps for too long, or if its error is not an error of h5chunk.
    """
    if _is_child:
        return work(*arguments) if on_message is None else work(on_message, *arguments)
    check_not_written([path])
    name = printable(path)
    message, modules = pickled(work, arguments, on_message is not None)
    try:
        child = start_child(",".join(modules))
    except OSError as error:
        warnings.warn(
            f"{name}: no process can be started to test files first ({error.strerror or error}): a damaged file may "
            "crash this process",
            RuntimeWarning,
            stacklevel=3,
        )
        return work(*arguments) if on_message is None else work(on_message, *arguments)
    with child.connection:
        try:
            with contextlib.suppress(ConnectionError):  # it has crashed already
                child.connection.send_bytes(message)
            result: T = _listen(child, _Limit(name), on_message or (lambda _: None))
            return result
        except BaseException:
            child.end()
            raise


@contextlib.contextmanager
def limited_memory(path: Path, trusted: bool | None = None) -> Iterator[None]:
    """Limit the memory of a child process in a context, because damaged metadata may make HDF5 use all memory.

    Errors of the child name the file from then on. There is no limit for ``trusted`` files; None means that the caller
    has no such option. The parent process raises FileError if the child exceeds the limit. Memory that is requested
    faster than the parent looks is limited to twice as much by the system; HDF5 may crash at that limit, but not at the
    first.
    """
    if _send is None:
        yield
        return
    name = printable(path)
    if sys.platform != "linux" or trusted:
        _send(LIMITED, _Limit(name))
        yield
        return
    taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    before, taken_bytes = resource.getrlimit(resource.RLIMIT_DATA), int(taken.split()[1]) << 10
    allowed = METADATA_BYTES + METADATA_RATIO * sum(stamp_of(path)[2:3])
    hard = min(value for value in (taken_bytes + 2 * allowed, *before) if value != resource.RLIM_INFINITY)
    limit = _Limit(name, allowed, taken_bytes + allowed, trusted is not None)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, before[1]))
    _send(LIMITED, limit)
    try:
        yield
    except (H5ChunkError, *DAMAGES) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise _too_much_memory(limit) from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        _send(LIMITED, _Limit(name))


def _too_much_memory(limit: _Limit) -> FileError:
    remedy = ". If you trust it, trusted=True (--trusted) removes this limit" if limit.has_option else ""
    return FileError(
        f"{limit.name}: its metadata needs more memory than the {exact_bytes(limit.allowed)} that h5chunk allows for a "
        f"file of its size, because it has very many objects or is damaged{remedy}"
    )


# ---- what is sent to a child


class _Pickler(pickle.Pickler):
    """A pickler that sends the path of a remote object's local copy with all that is needed to read the object.

    ``modules`` are those of h5chunk that the child needs, which its helper imports once for all children.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules = {__name__}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__.startswith("h5chunk."):
            self.modules.add(value.__module__)
        if isinstance(value, PurePath) and (mirror := local_copy_of(value)) is not None:
            return _path_of, (mirror,)
        return NotImplemented


def _path_of(mirror: Any) -> Path:
    return Path(mirror.path)


def pickled(work: Callable[..., Any], arguments: Sequence[Any], has_say: bool) -> tuple[bytes, list[str]]:
    """Return a message with work for a child, and the names of the modules that it needs.

    The message also has the folder and the variables of this process.
    """
    folder = None
    with contextlib.suppress(OSError):  # the current folder was removed
        folder = os.getcwd()
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump((folder, dict(os.environ), work, arguments, has_say))
    return data.getvalue(), sorted(pickler.modules)


def received(message: bytes, send: Callable[[str, Any], None]) -> Callable[[], Any]:
    """Prepare a child, and return the work of a message."""
    global _is_child, _send
    _is_child, _send = True, send
    folder, variables, work, arguments, has_say = pickle.loads(message)
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    return partial(work, *([partial(send, SAID)] if has_say else []), *arguments)


# ---- watching a child


def _listen(child: Child, limit: _Limit, on_message: Say) -> Any:
    """Receive the messages of a child, until it has a result. Raises FileError if it dies without one."""
    watch, looked = _Watch(child.number), time.monotonic()
    while True:
        if child.connection.poll(MEMORY_LOOK_S):
            try:
                kind, value = child.connection.recv()
            except (EOFError, ConnectionError):
                raise _crash(child, limit.name) from None
            if kind == DONE:
                return value
            if kind == FAILED:
                raise value
            if kind == LIMITED:
                limit = value
            else:
                on_message(value)
            watch.moved = None
        elif 0 < limit.data_bytes < watch.data_bytes():
            raise _too_much_memory(limit)
        elif time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            if watch.has_ended():  # another process may have inherited the child's end of the connection
                raise _crash(child, limit.name)
            watch.check(limit.name)


def _crash(child: Child, name: str) -> FileError:
    code = child.end()
    cause = signal.Signals(os.WTERMSIG(code)).name if os.WIFSIGNALED(code) else f"code {os.WEXITSTATUS(code)}"
    return FileError(f"{name}: this file crashes HDF5 ({cause}): it is damaged, or too little memory is free")


class _Watch:
    """Detects whether a child process makes progress: whether it reads, writes, computes or sends messages."""

    def __init__(self, child: int) -> None:
        self._folder = Path(f"/proc/{child}")
        self.moved: bytes | None = None  # the kernel's counters of reads and writes at the last progress
        self._ticks: dict[str, tuple[str, int]] = {}  # of the threads at the last progress
        self._threads_before: dict[str, tuple[str, int]] = {}  # when a thread last computed
        self._since = 0.0

    def check(self, name: str) -> None:
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
        ran = max((ticks - self._ticks.get(thread, ("", 0))[1] for thread, (_, ticks) in threads.items()), default=0)
        if ran > LOOP_S * per_s:
            raise FileError(f"{name}: this file makes HDF5 loop endlessly: it is damaged")
        if any(state != "S" for state, _ in threads.values()) or threads != self._threads_before:
            self._threads_before, self._since = threads, time.monotonic()
        elif time.monotonic() - self._since > IDLE_S:
            raise Stuck(f"{name}: a process that was started to read it made no progress for {IDLE_S:.0f} s")

    def has_ended(self) -> bool:
        """Return whether the child has ended, and waits for the helper to ask for its status."""
        return any(state == "Z" for state, _ in self._threads().values())

    def data_bytes(self) -> int:
        """Return the memory of the child, in bytes, that a limit on its data applies to."""
        with contextlib.suppress(OSError, IndexError):
            return int((self._folder / "statm").read_text().split()[5]) * resource.getpagesize()
        return 0

    def _threads(self) -> dict[str, tuple[str, int]]:
        """Return the state, as ps shows it, and the CPU time in ticks of every thread, by thread id."""
        states = {}
        with contextlib.suppress(OSError):
            for thread in (self._folder / "task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    fields = (thread / "stat").read_text().rpartition(")")[2].split()
                    states[thread.name] = fields[0], int(fields[11])
        return states
