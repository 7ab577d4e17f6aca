"""The server process, which makes range requests for the processes that are connected to its socket.

A message is one line of JSON. A request has an ``id`` and an operation ``op``, such as ``open`` for an object, ``list``
for a folder, or ``fetch`` for pages of an open object. The reply has the same ``id``, and an ``error``, which is empty
if the request succeeded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError
from h5chunk.remote.countdown import Countdown
from h5chunk.remote.download import Download, run_all
from h5chunk.remote.objects import HEAD_BYTES, LARGEST, RemoteError, Store, first_line
from h5chunk.remote.pages import ABOUT, GAP_PAGES, PAGE, Pages, Runs, create, pages_of, write_at
from h5chunk.urls import parse, stable, without_query

REQUEST_PAGES = LARGEST // PAGE  # maximum number of pages per request

Reply = Callable[[dict[str, Any]], None]


class Request:
    """A range request for absent pages, and the functions to call when it ends."""

    def __init__(self, first: int, stop: int, keeps: bool) -> None:
        self.first, self.stop, self.keeps = first, stop, keeps
        self.then: list[Callable[[str], None]] = []
        self.ends: list[threading.Event] = []  # one per user, set when the user no longer needs the pages


class Copy:
    """A sparse copy that is being filled."""

    def __init__(self, pages: Pages, store: Store, url: str) -> None:
        self.pages, self._store, self._url = pages, store, url
        self._pin = {name: value for name, value in pages.about.items() if name in ("num_bytes", "etag", "modified")}
        self._lock, self._running = threading.Lock(), list[Request]()

    def renew(self, store: Store, url: str) -> None:
        """Use another URL of the same object, such as one with a newer signature."""
        self._store, self._url = store, url

    def fetch(
        self,
        runs: Runs,
        keeps: bool,
        end: threading.Event,
        note: Callable[[], None],
        then: Callable[[str], None],
    ) -> None:
        """Fetch the absent pages of runs, and call ``then`` with an error or an empty string.

        ``note`` is called after each request. Requests that have not started when ``end`` is set are skipped.
        """
        count = Countdown(then)
        with self._lock:
            absent = self.pages.absent(runs)
            for request in self._running:
                if any(first < request.stop and stop > request.first for first, stop in absent):
                    request.then.append(count.add())
                    request.ends.append(end)
                    absent = _without(absent, request)
            requests = [Request(first, stop, keeps) for first, stop in _joined(absent)]
            for request in requests:
                request.then += [lambda _: note(), count.add()]
                request.ends.append(end)
            self._running += requests
        for request in requests:
            self._store.pool.submit(self._run, request)
        count.end("")

    def _run(self, request: Request) -> None:
        with self._lock:
            is_wanted = not all(end.is_set() for end in request.ends)
            if not is_wanted:
                self._running.remove(request)
        error = self._fetched(request) if is_wanted else "the file was closed while it was read"
        with self._lock:
            if is_wanted:
                self._running.remove(request)
        for then in request.then:
            then(error)

    def _fetched(self, request: Request) -> str:
        """Fetch the pages of a request, and return the error, or an empty string."""
        try:
            with self.pages.fetching(request.first, request.stop):  # another process may already have fetched them
                self.pages.verify(request.first, request.stop)
                if absent := self.pages.absent([(request.first, request.stop)]):
                    self._get(absent[0][0], absent[-1][1], request.keeps)
        except RemoteError as failure:
            return str(failure)
        except OSError as failure:
            copy = f"{self.pages.folder}: the local copy of {without_query(self._url)}"
            return f"{copy} cannot be written: {failure.strerror}"
        except BaseException as failure:
            return f"{without_query(self._url)}: cannot be read: {first_line(failure)}"
        return ""

    def _get(self, first: int, stop: int, keeps: bool) -> None:
        end = min(stop * PAGE, self.pages.num_bytes)
        _, data = self._store.get(self._url, first * PAGE, end, self._pin)
        self.pages.put(first, stop, data, keeps=keeps)

    def put_head(self, data: Any) -> None:
        """Write the first bytes, which were received when the object was opened."""
        stop = pages_of(len(data))
        with self.pages.fetching(0, stop):
            if self.pages.absent([(0, stop)]):
                self.pages.put(0, stop, data)
                self.pages.keep([(0, stop)])


def _without(runs: Runs, request: Request) -> Runs:
    parts = [
        part for first, stop in runs for part in ((first, min(stop, request.first)), (max(first, request.stop), stop))
    ]
    return [(first, stop) for first, stop in parts if first < stop]


def _joined(runs: Runs) -> Runs:
    """Join adjacent or close runs, and split runs that are too long for one request.

    >>> _joined([(0, 1), (3, 4), (100, 400)])
    [(0, 4), (100, 250), (250, 400)]
    """
    joined: Runs = []
    for first, stop in sorted(runs):
        if joined and first - joined[-1][1] <= GAP_PAGES:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((first, stop))
    cut: Runs = []
    for first, stop in joined:
        count = -(-(stop - first) // REQUEST_PAGES)
        ends = [first + (stop - first) * number // count for number in range(count + 1)]
        cut += list(pairwise(ends))
    return cut


class Server:
    """The server, which answers the requests of all connections."""

    def __init__(self) -> None:
        self._calls, self._frees = ThreadPoolExecutor(32), ThreadPoolExecutor(1)
        self._copies: dict[str, Copy] = {}
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Serve connections until the last one is closed."""
        left, over = [0], threading.Event()

        def run(connection: socket.socket) -> None:
            self._serve(connection)
            with self._lock:
                left[0] -= 1
                if not left[0]:
                    over.set()

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                with self._lock:
                    left[0] += 1
                threading.Thread(target=run, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        over.wait()
        self._frees.shutdown()

    def _serve(self, connection: socket.socket) -> None:
        lock, ends = threading.Lock(), dict[int, threading.Event]()

        def reply(message: dict[str, Any]) -> None:
            with lock, suppress(OSError):  # raised if the other process has exited
                connection.sendall(json.dumps(message).encode() + b"\n")

        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._handle(json.loads(line), ends, reply)
        except OSError:
            pass
        for end in list(ends.values()):
            end.set()
        connection.close()

    def _handle(self, message: dict[str, Any], ends: dict[int, threading.Event], reply: Reply) -> None:
        number = message["id"]
        if message["op"] == "cancel":
            ends.get(message["fetch"], threading.Event()).set()
            return
        if message["op"] == "free":
            self._frees.submit(self._copies[message["folder"]].pages.free, message["runs"])
            return
        if message["op"] == "fetch":
            ends[number] = threading.Event()

            def then(error: str) -> None:
                ends.pop(number, None)
                reply({"id": number, "error": error})

            note = partial(reply, {"id": number, "part": 1})
            self._copies[message["folder"]].fetch(message["runs"], message["keeps"], ends[number], note, then)
            return
        calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "list": lambda message: {"names": self._store(message).list(message["url"])},
            "exists": lambda message: {"found": self._store(message).exists(message["url"])},
            "put": self._put,
            "download": self._download,
            "remove": self._remove,
            "measure": self._measure,
            "save": partial(self._save, ends, reply),
        }

        def run() -> None:
            try:
                reply({"id": number, "error": "", **calls[message["op"]](message)})
            except (RemoteError, FileError) as error:
                reply({"id": number, "error": str(error)})
            except OSError as error:
                where = f"{message.get('root')}: sparse copies cannot be stored in this folder"
                reply({"id": number, "error": f"{where} ({error.strerror}): choose another cache_dir"})
            except BaseException as error:
                reply(
                    {"id": number, "error": f"{without_query(message['url'])}: cannot be opened: {first_line(error)}"}
                )

        self._calls.submit(run)

    def _store(self, message: dict[str, Any]) -> Store:
        folder = parse(message["url"])[0]
        key = json.dumps([folder, message["options"]], sort_keys=True)
        with self._lock:
            if key not in self._stores:
                self._stores[key] = Store(folder, message["options"])
            return self._stores[key]

    def _put(self, message: dict[str, Any]) -> dict[str, Any]:
        self._store({**message, "options": {"retry_config": {"max_retries": 10}}}).put(message["url"], message["file"])
        return {}

    def _download(self, message: dict[str, Any]) -> dict[str, Any]:
        store, url, start, stop = self._store(message), message["url"], message["start"], message["stop"]
        pin = None
        if stop is None:
            pin, _ = store.get(url, 0, HEAD_BYTES)
            stop = pin["num_bytes"]
        try:
            with Path(message["file"]).open("xb") as file:

                def copy(first: int) -> None:
                    data = store.get(url, first, min(first + REQUEST_PAGES * PAGE, stop), pin)[1]
                    write_at(file.fileno(), data, first - start)

                run_all(store.pool, copy, range(start, stop, REQUEST_PAGES * PAGE))
        except OSError as error:
            raise FileError(f"{message['file']}: cannot be written: {error.strerror}") from None
        return {}

    def _save(self, ends: dict[int, threading.Event], reply: Reply, message: dict[str, Any]) -> dict[str, Any]:
        number, end = message["id"], threading.Event()

        def note(done: int, total: int) -> None:
            reply({"id": number, "part": done, "total": total})

        ends[number] = end
        try:
            run = Download(lambda url: self._store({**message, "url": url}), Path(message["folder"]), end, note)
            return {"path": str(run.run(message["url"]))}
        except OSError as error:
            raise FileError(f"{message['folder']}: cannot be written: {error.strerror}") from None
        finally:
            del ends[number]

    def _remove(self, message: dict[str, Any]) -> dict[str, Any]:
        self._store(message).remove(message["url"])
        return {}

    def _measure(self, message: dict[str, Any]) -> dict[str, Any]:
        """Request byte ranges repeatedly until the time or the number of requests is reached, and drop the bytes."""
        count, times, sizes = itertools.count(), list[float](), list[int]()
        started = time.perf_counter()

        def ask(_: int) -> None:
            while (number := next(count)) < message["most"] and time.perf_counter() - started < message["seconds"]:
                url, start, stop = message["ranges"][number % len(message["ranges"])]
                begun = time.perf_counter()
                sizes.append(len(self._store({**message, "url": url}).get(url, start, stop)[1]))
                times.append(time.perf_counter() - begun)

        with ThreadPoolExecutor(message["requests"]) as pool:
            list(pool.map(ask, range(message["requests"])))
        return {"num_bytes": sum(sizes), "seconds": time.perf_counter() - started, "times": times[:100]}

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Create a sparse copy of an object, unless this version has one, and write the object's first bytes to it."""
        url, store, folder, data = message["url"], self._store(message), message.get("folder"), None
        if folder is None:
            about, data = store.open(url)
            about = {"url": stable(url), **about}
            key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", parse(url)[1])[:60]
            folder = str(Path(message["root"]) / f"{name}-{key}")
            if not (Path(folder) / ABOUT).exists():
                create(Path(folder), about)
        with self._lock:
            if folder not in self._copies or not self._copies[folder].pages.is_there:
                self._copies[folder] = Copy(Pages(Path(folder)), store, url)
            self._copies[folder].renew(store, url)
        if data is not None:
            self._copies[folder].put_head(data)
        return {"folder": folder}


def main() -> None:
    """Run the server. The command-line arguments are the descriptor and the path of its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the connected processes
    descriptor, path = sys.argv[1:3]
    try:
        Server().serve(socket.socket(fileno=int(descriptor)))
    finally:
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        os._exit(0)  # without waiting for requests that nobody needs
