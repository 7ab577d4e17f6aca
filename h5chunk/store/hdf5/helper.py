"""The helper process, which starts from nothing and forks itself for each piece of work that `in_child` sends.

The helper has one thread and no memory of the process that started it, so forks of it are quick and safe: no lock is
held, and no GPU is in use. It ends when its connection closes, also if the caller was killed, and with it all work.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from h5chunk.errors import H5ChunkError, WorkerError
from h5chunk.store.hdf5 import child

MAX_NAME_BYTES = 4096
PR_SET_PDEATHSIG = 1  # option of prctl


def serve(descriptor: int) -> NoReturn:
    """Fork a process for each request until the caller has ended: the main function of the helper process.

    ``descriptor`` is a socket. A request has the names of modules to import before the fork,
    with commas between them, a socket to send messages to the caller, and one for the status of the process. The reply
    is the number of the process, or -1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the caller, which ends the work
    warnings.simplefilter("ignore")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401  # otherwise every fork would import it
    control, (woken, wake) = socket.socket(fileno=descriptor), os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}  # the status sockets of all processes
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    waiting.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is woken:
                os.read(woken, 1024)
            elif key.fileobj is control:
                names, descriptors = _receive(control)
                if len(descriptors) < 2:  # the caller has ended
                    for process in running:
                        os.kill(process, signal.SIGKILL)
                    os._exit(0)
                for name in names.split(","):
                    with suppress(Exception):  # the fork raises the error again
                        import_module(name)
                gc.freeze()
                others = [control.fileno(), woken, wake, *(status.fileno() for status in running.values())]
                process = _fork(descriptors[0], others)
                os.close(descriptors[0])
                status = socket.socket(fileno=descriptors[1])
                if process > 0:
                    running[process] = status
                    waiting.register(status, selectors.EVENT_READ, process)
                control.sendall(process.to_bytes(8, "little", signed=True))
            else:  # the caller has closed the socket
                os.kill(key.data, signal.SIGKILL)
                waiting.unregister(key.fileobj)
        while running:
            process, code = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            status = running.pop(process)
            with suppress(KeyError):
                waiting.unregister(status)
            with status, suppress(OSError):
                status.sendall(code.to_bytes(4, "little"))


def _receive(control: socket.socket) -> tuple[str, list[int]]:
    try:
        name, descriptors, *_ = socket.recv_fds(control, MAX_NAME_BYTES, 2)
    except OSError:
        return "", []
    return name.decode(), descriptors


def _fork(descriptor: int, others: list[int]) -> int:
    """Return the number of a new process that does the work, or -1 if the system cannot start one."""
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
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in others:
                    os.close(other)
                _work(Connection(descriptor))
        finally:
            os._exit(1)
    return process


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
