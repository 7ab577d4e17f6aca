"""The helper process, which starts from nothing and forks itself for each piece of work that `in_child` sends.

The helper has one thread and no memory of the process that started it, so forks of it are quick and safe: no lock is
held, and no GPU is in use. It ends when its connection closes, also if the caller was killed, and with it all work.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from h5chunk.errors import H5ChunkError, WorkerError
from h5chunk.store.hdf5 import child

MAX_REQUEST_BYTES = 4096
FIRST_NEEDED = "hdf5plugin", "h5chunk.store.read.files"  # modules that the test of a file needs
END_S = 1.0  # time for a process to end after it was killed, which it may not do while a file system does not answer
PR_SET_PDEATHSIG = 1  # option of prctl

_running: set[int] = set()  # the numbers of processes
_statuses: dict[int, int] = {}  # of processes that failed, until the caller asks


def serve(descriptor: int) -> NoReturn:
    """Fork a process for each request until the caller has ended: the main function of the helper process.

    ``descriptor`` is a socket. A request to start a process has a descriptor to send messages to the caller, and the
    names of modules to import before the fork, with commas between them. The answer is the number of the process, or
    -1. Another request is the number of a process to end, and the answer is its status, as of `os.waitpid`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the caller, which ends the work
    warnings.simplefilter("ignore")
    for name in FIRST_NEEDED:
        with suppress(Exception):
            import_module(name)  # otherwise every fork would import it
    control = socket.socket(fileno=descriptor)
    while True:
        request, descriptors = b"", list[int]()
        with suppress(OSError):
            request, descriptors, *_ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if descriptors:
            _reap()
            answer = _start(request.decode().split(","), descriptors[0], control)
            os.close(descriptors[0])
        elif request:
            answer = _end(int(request))
        else:  # the caller has ended
            for process in _running:
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        with suppress(OSError):
            control.sendall(answer.to_bytes(8, "little", signed=True))


def _start(modules: list[str], descriptor: int, control: socket.socket) -> int:
    """Return the number of a new process that does the work, or -1 if the system cannot start one."""
    for name in modules:
        with suppress(Exception):  # the fork raises the error again
            import_module(name)
    gc.freeze()
    helper = os.getpid()
    try:
        process = os.fork()
    except OSError:
        return -1
    if not process:
        try:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == helper:
                control.close()
                _work(Connection(descriptor))
        finally:
            os._exit(1)
    _running.add(process)
    return process


def _reap() -> None:
    """Note which processes have ended, and the statuses of those that failed."""
    for process in [*_running]:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            _running.remove(process)
        if status:
            _statuses[process] = status


def _end(process: int) -> int:
    """Kill a process if it still runs, and return its status, which is 0 if it has done its work or does not end."""
    if process in _running:
        os.kill(process, signal.SIGKILL)
    started = time.monotonic()
    while process in _running and time.monotonic() - started < END_S:
        _reap()
        time.sleep(0.001)
    return _statuses.pop(process, 0)


def _work(connection: Connection) -> None:
    """Do the work that is received, and send its result or its error."""

    def send(kind: str, value: Any) -> None:
        connection.send((kind, value))

    try:
        work: Callable[[], Any] = child.received(connection.recv_bytes(), send)
        send(child.DONE, work())
    except H5ChunkError as error:
        error.__context__ = error.__cause__ = None  # dask would pickle these errors, and some cannot be pickled
        send(child.FAILED, error.with_traceback(None))
    except BaseException:
        send(child.FAILED, WorkerError(traceback.format_exc()))
    os._exit(0)
