"""Connect to the server process that makes range requests. The process is started when it is first needed."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from h5chunk.errors import ChangedError, FileError, OptionError
from h5chunk.extras import require
from h5chunk.urls import CHANGED

NOTE_S = 0.1  # seconds between notes
START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from h5chunk.remote.server import main; main()"

Then = Callable[[dict[str, Any]], None]
Note = Callable[[int, int], None]


class Client:
    """A connection to the server process at a socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._waiting: dict[int, Then] = {}
        self._parts: dict[int, tuple[int, int]] = {}  # done and total bytes of calls
        self._numbers, self._lock, self._is_over = count(), threading.Lock(), False
        self.num_parts = 0  # number of answered range requests and messages
        self.opened: set[str] = set()  # folders of the copies that the server has opened
        threading.Thread(target=self._receive, name="h5chunk-remote", daemon=True).start()

    def send(self, message: dict[str, Any], then: Then | None) -> int:
        """Send a message, and return its id. ``then`` is called with the reply, in another thread."""
        with self._lock:
            number = next(self._numbers)
            if not self._is_over:
                if then is not None:
                    self._waiting[number] = then
                with suppress(OSError):  # the receiving thread answers all waiting messages with an error
                    self._socket.sendall(json.dumps({**message, "id": number}).encode() + b"\n")
                return number
        if then is not None:
            then({"error": ENDED})
        return number

    def call(self, message: dict[str, Any], note: Note | None = None) -> dict[str, Any]:
        """Send a message and wait for the reply. Raises FileError if the reply contains an error.

        Meanwhile, ``note`` is called with the number of bytes that are done, and the total.
        """
        future = Future[dict[str, Any]]()
        number = self.send(message, future.set_result)
        try:
            while note is not None and not wait([future], NOTE_S).done:
                if number in self._parts:
                    note(*self._parts[number])
            reply = future.result()
        except BaseException:  # such as Ctrl-C
            self.send({"op": "cancel", "fetch": number}, None)
            raise
        finally:
            self._parts.pop(number, None)
        if reply["error"]:
            raise error_of(reply["error"])
        return reply

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def has_ended(self) -> bool:
        """True if the server process has closed the connection, even if the receiving thread has not noticed yet."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _receive(self) -> None:
        try:
            with suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    reply = json.loads(line)
                    self.num_parts += 1
                    if "part" in reply:
                        if "total" in reply:
                            self._parts[reply["id"]] = reply["part"], reply["total"]
                        continue
                    self._waiting.pop(reply["id"])(reply)
        finally:  # also after an error in a function that was called with a reply
            self._end()

    def _end(self) -> None:
        """Close the connection, and reply with an error to all waiting messages."""
        with self._lock:
            self._is_over = True
            self._socket.close()
        if _current and _current[0] is self:
            _current.clear()
        while self._waiting:
            self._waiting.popitem()[1]({"error": ENDED})


def error_of(text: str) -> FileError:
    """Return the error for a request that failed, whose reply has this message."""
    is_over = text == ENDED or text.endswith(CHANGED)
    return ChangedError(text) if is_over else FileError(text)


ENDED = "the process that reads from object stores has ended: open the file again"
_current: list[Client] = []  # the connection of this process, if it has one
_paths: list[str] = []  # sockets to try, opened by this process, a parent or another process
_servers: list[subprocess.Popen[bytes]] = []
_lock = threading.Lock()


def client() -> Client:
    """Return this process's connection to the server process, which is started if it is not running."""
    with _lock:
        if _current and _current[0].has_ended:
            _current.clear()
        if not _current:
            _current.append(_connect())
        return _current[0]


def current() -> Client | None:
    """Return this process's connection if it has one."""
    return _current[0] if _current else None


def _connect() -> Client:
    while _paths:
        try:
            return Client(_paths[-1])
        except OSError:
            _paths.pop()
    require("obstore", "reading from a URL")
    if sys.platform != "linux":
        raise OptionError("reading from a URL needs Linux: copy the file to this machine")
    path = str(Path(tempfile.mkdtemp(prefix="h5chunk-remote-")) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(listener.fileno()), path]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])
        _servers.append(server)  # it exits once all connections are closed
        _paths.append(path)
        return Client(path)


def use(path: str) -> None:
    """Connect to the server process that another process has started, if it is still running.

    ``path`` is its socket.
    """
    if not _current and path not in _paths:
        _paths.append(path)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _current.clear()
    _servers.clear()


@atexit.register
def _close_at_exit() -> None:
    """Close the connection. The server process then exits, unless other processes use it."""
    for connection in _current:
        connection.close()
    for server in _servers:
        with suppress(subprocess.TimeoutExpired):
            server.wait(1)


os.register_at_fork(after_in_child=_after_fork)
