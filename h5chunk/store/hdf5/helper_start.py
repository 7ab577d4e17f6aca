"""Start the helper process of this process, and children of it: see `h5chunk.store.hdf5.helper`.

Importing this module imports neither h5py nor NumPy, so that the helper can start while the caller imports them.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import NamedTuple

from h5chunk.machine import start_python

START_S = 120.0  # time in which a child must have been started


class Child(NamedTuple):
    """A child process: its number, a connection for messages, and the helper that it is a fork of."""

    number: int
    connection: Connection
    helper: _Helper

    def end(self) -> int:
        """Kill the child if it still runs, and return its status, or 0 if the helper does not know it."""
        with contextlib.suppress(OSError):
            return self.helper.ask(str(self.number))
        return 0


class _Helper:
    """The helper process, and the connection to it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with theirs, contextlib.ExitStack() as unused:
            unused.enter_context(self._control)
            self._process = start_python("h5chunk.store.hdf5.helper:serve", theirs.fileno(), **streams)
            unused.pop_all()
        self._control.settimeout(START_S)
        self._lock = threading.Lock()

    def ask(self, request: str, *descriptors: int) -> int:
        """Send a request, and return the answer, or 0 if the helper has ended."""
        with self._lock:
            socket.send_fds(self._control, [request.encode()], descriptors)
            return int.from_bytes(self._control.recv(8), "little", signed=True)

    def start(self, modules: str) -> Child:
        """Start a child. Raises OSError if that is impossible."""
        connection, theirs = multiprocessing.Pipe()
        with theirs, contextlib.ExitStack() as unused:
            unused.enter_context(connection)
            number = self.ask(modules, theirs.fileno())
            if number <= 0:
                raise ChildProcessError("the system starts no further process" if number else "the helper has ended")
            unused.pop_all()
        return Child(number, connection, self)

    def close(self) -> None:
        """End the helper, and its children."""
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """Close the connection in a forked process, which is not the parent of the helper."""
        self._control.close()
        self._process.returncode = 0


_helper: _Helper | None = None
_lock = threading.Lock()  # held while the helper is started or ended


def start_child(modules: str) -> Child:
    """Start a child, and first the helper if there is none. A helper that was killed is replaced.

    ``modules`` has the names of the modules that the child needs, with commas between them.
    """
    global _helper
    problem: OSError | None = None
    for _ in range(2):
        with _lock:
            helper = _helper = _helper or _Helper()
        try:
            return helper.start(modules)
        except BaseException as error:
            with _lock:
                if _helper is helper:
                    helper.close()
                    _helper = None
            if not isinstance(error, OSError):
                raise
            problem = error
    assert problem is not None
    raise problem


def start_ahead() -> None:
    """Start the helper of this process, which will open a file soon, without waiting for it.

    Processes that multiprocessing has started, or is starting, such as the workers of a DataLoader, may never open an
    untrusted file.
    """
    global _helper
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if multiprocessing.parent_process() is None and not is_starting:
        with contextlib.suppress(OSError), _lock:
            _helper = _helper or _Helper()


def _after_fork() -> None:
    global _helper, _lock
    helper, _helper, _lock = _helper, None, threading.Lock()
    if helper is not None:
        helper.leave()


@atexit.register
def _close() -> None:
    if _helper is not None:
        _helper.close()


os.register_at_fork(after_in_child=_after_fork)
