"""Download objects to local files. A download that was stopped is continued.

A file gets its name once it is complete. Its modification time is a digest of the object's URL and version, so that a
file of another version is never mistaken for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from fnmatch import fnmatchcase
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from ssl import SSLError
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from h5chunk.errors import human_bytes, printable
from h5chunk.remote.objects import (
    COMPRESSES,
    DEADLINE_S,
    LARGEST,
    MISSING,
    NoRangesError,
    RemoteError,
    Store,
    first_line,
)
from h5chunk.remote.pages import write_at
from h5chunk.urls import PATTERN, parse, stable, without_query

RECORD = struct.Struct("<QI")  # start of a piece that was written, and its CRC-32
LATEST_S = 1 << 30  # modification times are before 2004, because some file systems cannot store late ones
FILES = 64  # files that are written at a time
BATCH = 1024
TIMEOUT_S = 30  # seconds, for each read while a whole file is downloaded
KEPT = "%/:?#[]@!$&'()*+,;="  # characters of URLs that are not quoted
SLOWEST = 10_000  # minimum speed at which a whole file is downloaded, in bytes/s
STOPPED, TOO_SLOW = "the download was stopped", f"its server sends less than {SLOWEST} bytes/s: try again later"

Note = Callable[[int, int], None]  # called with the number of bytes written so far, and the total


class Listed(NamedTuple):
    """An object to download."""

    url: str
    path: str  # path of the file, relative to the folder
    num_bytes: int
    about: dict[str, Any]  # the version, from `h5chunk.remote.objects.version_of`


class Download:
    """The download of an object, or of all objects in a folder, into a local folder."""

    def __init__(self, find_store: Callable[[str], Store], folder: Path, end: threading.Event, note: Note) -> None:
        self._find_store, self._folder, self._end, self._note = find_store, folder, end, note
        self._done, self._total, self._lock = 0, 0, threading.Lock()
        self._failure: Exception | None = None  # the first error, after which the download stops

    def run(self, url: str) -> Path:
        """Download an object, the objects in a folder, or the objects that match a pattern, and return the local path.

        Raises RemoteError, or OSError if a file cannot be written.
        """
        try:
            return self._run(url)
        except Exception as error:
            raise self._failure or error from None

    def _run(self, url: str) -> Path:
        folder, name = parse(url)
        own = self._folder / hashlib.sha256(stable(url).encode()).hexdigest()[:12]
        if name and (url.startswith("http") or not re.search(PATTERN, name)):
            self._store = self._find_store(folder)
            try:
                about, _ = self._store.open(url)
            except NoRangesError:
                self._write_stream(url, own / name)
                return own / name
            except RemoteError as error:
                if url.startswith("http") or not str(error).endswith(MISSING):
                    raise
                folder, name = f"{url}/", ""  # it is a folder
            else:
                self._write_all([Listed(url, name, about["num_bytes"], about)], own)
                return own / name
        if folder.startswith("http"):
            raise RemoteError(f"{without_query(folder)}: web servers do not list folders: pass the URLs of files")
        self._store, own = self._find_store(folder), own / PurePosixPath(folder).name
        self._write_all(list(self._listed(folder, name)), own)
        return own / name

    def _write_stream(self, url: str, file: Path) -> None:
        """Write a file of a web server that sends only whole files, in one request."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            with opened_url(url) as answer, part.open("wb") as opened:
                total = int(answer.headers.get("Content-Length") or 0)
                due_s = time.monotonic() + DEADLINE_S
                while data := answer.read1(LARGEST):
                    if self._end.is_set() or time.monotonic() > due_s:
                        raise RemoteError(STOPPED if self._end.is_set() else f"{without_query(url)}: {TOO_SLOW}")
                    opened.write(data)
                    self._done += len(data)
                    self._note(self._done, total or self._done)
                    due_s += len(data) / SLOWEST
                if total and self._done != total:
                    raise RemoteError(f"{without_query(url)}: its server sent {self._done} of {total} bytes: try again")
            version = answer.headers["ETag"] or answer.headers["Last-Modified"] or os.urandom(8).hex()
            time_ns = version_time(Listed(url, "", self._done, {"num_bytes": self._done, "version": version}))
            os.utime(part, ns=(time_ns, time_ns))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _listed(self, folder: str, pattern: str) -> Iterator[Listed]:
        """List the objects of a folder, and of its subfolders unless a pattern is given."""
        found = self._store.list_all(folder)
        folders = {"", *(str(parent) for path, *_ in found for parent in PurePosixPath(path).parents)}
        found = [each for each in found if each[1] or each[0] not in folders]  # empty objects stand for folders
        if pattern:
            found = [each for each in found if "/" not in each[0] and fnmatchcase(each[0], pattern)]
        if not found:
            raise RemoteError(f"{folder}{pattern}: {'no object matches this pattern' if pattern else MISSING}")
        for path, num_bytes, about in found:
            if path in folders or not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path:
                raise RemoteError(f"{folder}{path}: this name is not valid for a file: rename the object")
            yield Listed(folder + path, path, num_bytes, about)

    def _write_all(self, objects: list[Listed], folder: Path) -> None:
        self._total = sum(each.num_bytes for each in objects)
        folder.mkdir(parents=True, exist_ok=True)
        taken = sum(file.stat().st_blocks * 512 for file in self._folder.rglob("*") if file.is_file())
        free = shutil.disk_usage(folder).free
        if self._total > taken + free:
            raise RemoteError(
                f"{printable(str(self._folder))}: downloading needs {human_bytes(self._total - taken)}, but only "
                f"{human_bytes(free)} are free: free up space, or write the output to another disk"
            )
        with ThreadPoolExecutor(min(FILES, len(objects))) as pool:
            rest = iter(objects)
            while some := list(itertools.islice(rest, BATCH)):
                run_all(pool, self._unless_failed(lambda each: self._write(each, folder / each.path)), some)

    def _unless_failed(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a function that calls ``call``, unless the download was stopped or another call has failed."""

        def run(item: Any) -> None:
            if self._end.is_set():
                raise RemoteError(STOPPED)
            try:
                call(item)
            except Exception as error:
                self._failure = self._failure or error
                self._end.set()
                raise

        return run

    def _write(self, each: Listed, file: Path) -> None:
        """Write an object to a file, unless the file already has this version."""
        time_ns = version_time(each)
        if is_complete(file, each.num_bytes, time_ns):
            self._add(each.num_bytes)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{time_ns:x}.part")
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if is_complete(file, each.num_bytes, time_ns):  # another process has written it meanwhile
                part.unlink(missing_ok=True)
                self._add(each.num_bytes)
                return
            self._fill(opened.fileno(), each, part.with_suffix(".done"))
            os.ftruncate(opened.fileno(), each.num_bytes)
            os.utime(opened.fileno(), ns=(time_ns, time_ns))
            part.replace(file)
            part.with_suffix(".done").unlink(missing_ok=True)

    def _fill(self, descriptor: int, each: Listed, record: Path) -> None:
        """Write the pieces of an object that the record does not list as written."""
        starts = range(0, each.num_bytes, LARGEST)
        if len(starts) < 2:
            for start in starts:
                write_at(descriptor, self._piece(each, start), 0)
            return
        with record.open("a+b", buffering=0) as log:
            written = set(self._written(descriptor, log, each.num_bytes))

            def write(start: int) -> None:
                data = self._piece(each, start)
                write_at(descriptor, data, start)
                if log.write(RECORD.pack(start, zlib.crc32(data))) != RECORD.size:  # records after it would be misread
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            run_all(self._store.pool, self._unless_failed(write), [start for start in starts if start not in written])
        os.fsync(descriptor)

    def _written(self, descriptor: int, log: Any, num_bytes: int) -> Iterator[int]:
        """Yield the starts of the pieces that are written, after their checksums were verified."""
        log.seek(0)
        data = log.read()
        log.truncate(len(data) // RECORD.size * RECORD.size)  # a killed process may have written a part of a record
        for start, crc in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]):
            size = min(LARGEST, num_bytes - start)
            if start % LARGEST == 0 and size > 0 and zlib.crc32(os.pread(descriptor, size, start)) == crc:
                self._add(size)
                yield start

    def _piece(self, each: Listed, start: int) -> Any:
        about, data = self._store.get(each.url, start, min(start + LARGEST, each.num_bytes))
        if any(tag(about.get(name, value)) != tag(value) for name, value in each.about.items()):
            raise RemoteError(f"{without_query(each.url)} changed while it was downloaded: repeat the command")
        self._add(len(data))
        return data

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
        self._note(self._done, self._total)


@contextmanager
def opened_url(url: str) -> Iterator[HTTPResponse]:
    """Request a whole file. Raises RemoteError if that fails, or if a truncated answer could not be detected."""
    try:
        request = Request(quote(url, safe=KEPT), headers={"User-Agent": "h5chunk"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise RemoteError(f"{without_query(url)}: {COMPRESSES}: copy it to a disk and decompress it")
            if answer.headers.get("Content-Length") is None and not answer.chunked:
                raise RemoteError(
                    f"{without_query(url)}: its server does not report the size: copy the file to a disk first"
                )
            yield answer
    except (URLError, ConnectionError, TimeoutError, SSLError, HTTPException, ValueError) as error:
        raise RemoteError(f"{without_query(url)}: cannot be read: {first_line(error)}") from None


def run_all(pool: ThreadPoolExecutor, call: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call a function with each item, in threads.

    After all calls have ended, raise the error of the first failed item.
    """
    calls = [pool.submit(call, item) for item in items]
    wait(calls)
    for each in calls:
        each.result()


def tag(value: Any) -> Any:
    """Return an ETag without its quotes, which some stores omit in lists. Other values are returned unchanged."""
    return value.strip('"') if isinstance(value, str) else value


def version_time(each: Listed) -> int:
    """Return the modification time in nanoseconds for a file with this version of an object."""
    about = {name: tag(value) for name, value in each.about.items()}
    digest = hashlib.sha256(json.dumps([stable(each.url), about], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") % (LATEST_S * 10**9)


def is_complete(file: Path, num_bytes: int, time_ns: int) -> bool:
    """Return whether a file has the size and the modification time of a complete download."""
    try:
        status = file.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (num_bytes, time_ns)
