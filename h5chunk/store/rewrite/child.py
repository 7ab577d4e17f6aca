"""Work that a damaged file may crash, or send round in circles, in a process of its own: that becomes an error.

Of 6,000 mutated files HDF5 crashed on two, and read another two for ever. Only on Linux, where a process can be forked
at once, with all that is open; elsewhere the work is done in this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from h5chunk.errors import FileError, H5ChunkError, WorkerError

T = TypeVar("T")
Say = Callable[[Any], None]

LOOP_S = 60.0  # of processor time, without a read, a write or a word
LOOK_S = 1.0
PR_SET_PDEATHSIG = 1  # of prctl


class _Said(NamedTuple):
    value: Any


class _Done(NamedTuple):
    value: Any


def in_child(work: Callable[[Say], T], heard: Say, shown: str) -> T:
    """What ``work(say)`` gives; ``heard`` is called here with what it says meanwhile. Both must pickle.

    Raises
    ------
    FileError
        It crashed, or does nothing but run.
    H5ChunkError
        As it does.
    """
    if sys.platform != "linux":
        return work(heard)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        child = os.fork()
    if not child:
        _run(work, theirs, parent)
    theirs.close()
    over = False
    try:
        with ours:
            result = _listen(ours, child, heard, shown)
        over = result is None or isinstance(result, _Done)
    finally:
        if not over:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if isinstance(result, _Done):
        value: T = result.value
        return value
    what = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
    raise FileError(f"{shown}: HDF5 crashed on it ({what}): it is damaged, or memory is short")


def _listen(pipe: Connection, child: int, heard: Say, shown: str) -> _Done | None:
    """The result; None if the child dies before it has one."""
    before, since = _io(child), _cpu_s(child)
    while True:
        try:
            if not pipe.poll(LOOK_S):
                now = _io(child)
                if now != before:
                    before, since = now, _cpu_s(child)
                elif _cpu_s(child) - since > LOOP_S:
                    raise FileError(f"{shown}: HDF5 runs in circles on it: it is damaged")
                continue
            message = pipe.recv()
        except EOFError:
            return None
        if isinstance(message, _Said):
            heard(message.value)
            before, since = _io(child), _cpu_s(child)
        elif isinstance(message, _Done):
            return message
        else:
            raise message


def _io(child: int) -> bytes:
    """Changes whenever the child reads or writes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{child}/io").read_bytes()
    return b""


def _cpu_s(child: int) -> float:
    """Processor time of the child's own code."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _run(work: Callable[[Say], Any], pipe: Connection, parent: int) -> NoReturn:
    """All that the child does."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which stops us
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            try:
                pipe.send(_Done(work(lambda value: pipe.send(_Said(value)))))
            except H5ChunkError as error:
                pipe.send(error)
            except BaseException:
                pipe.send(WorkerError(traceback.format_exc()))
            code = 0
    finally:
        os._exit(code)  # nothing of the parent's is closed or flushed
