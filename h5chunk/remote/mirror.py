"""Open objects by URL, and read them through their sparse local copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk import errors
from h5chunk.attributes import cached_property
from h5chunk.errors import FileError, H5ChunkError, OptionError, check_whole
from h5chunk.paths import expanded
from h5chunk.remote import client
from h5chunk.remote.countdown import Countdown
from h5chunk.remote.pages import OBJECT, PAGE, Pages, Runs, pages_of
from h5chunk.stamp import keep_stamp
from h5chunk.urls import local_copies, without_query


@dataclass(frozen=True)
class RemoteOptions:
    """Options for reading objects, which `h5chunk.ChunkDataset` describes."""

    cache_dir: str | None = None
    cache_bytes: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of the sparse copies."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h5chunk"


NO_OPTIONS = RemoteOptions()


def remote_options(
    cache_dir: str | os.PathLike[str] | None, cache_bytes: int | None, storage_options: Mapping[str, Any] | None
) -> RemoteOptions:
    """Validate the options of a data set, and return them. Raises OptionError if one is invalid."""
    if cache_bytes is not None:
        if cache_dir is None:
            raise OptionError("cache_bytes requires cache_dir: pass the folder of the cache as cache_dir")
        cache_bytes = check_whole("cache_bytes", cache_bytes, 1)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise OptionError(f"storage_options is {storage_options!r}: pass a mapping, as for obstore's from_url")
    folder = None if cache_dir is None else os.path.abspath(expanded(cache_dir))
    return RemoteOptions(folder, cache_bytes, dict(storage_options or {}))


class Descriptor(int):
    """The file descriptor of a sparse copy. Pages must be held by a `Hold` while they are read."""

    mirror: Mirror


class Hold:
    """Protects pages of sparse copies from being freed until `close`. `fetch` fetches those that are absent."""

    def __init__(self, runs: Mapping[Mirror, Runs]) -> None:
        self.runs = runs
        for mirror, own in runs.items():
            mirror.pages.hold(own)
        absent = {mirror: mirror.pages.absent(own) for mirror, own in runs.items()}
        self.absent = {mirror: own for mirror, own in absent.items() if own}
        self._uses, self._lock = 1, threading.Lock()  # one by the caller, and one by the fetch
        self._cancels: list[Callable[[], object]] = []

    def fetch(self, then: Callable[[H5ChunkError | None], None]) -> None:
        """Fetch the absent pages. ``then`` is called with None once all are present, or with an error."""
        if not self.absent:
            then(None)
            return

        def end(error: H5ChunkError | None) -> None:
            self._cancels.clear()
            self.close()
            then(error)

        self._uses += 1
        count = Countdown[H5ChunkError | None](end)
        for mirror, runs in self.absent.items():
            part = count.add()
            try:
                self._cancels.append(mirror.request(runs, part))
            except H5ChunkError as error:
                part(error)
        count.end(None)

    def fetched(self) -> Hold:
        """Wait until the absent pages have been fetched. Raises an error, and ends the hold, if that fails."""
        future = Future[H5ChunkError | None]()
        self.fetch(future.set_result)
        if (error := future.result()) is not None:
            self.close()
            raise error
        return self

    def close(self, *, frees: bool = True) -> None:
        """Release the pages. Once they are fetched they are freed, unless there is a cache, or not ``frees``."""
        with self._lock:
            self._uses -= 1
            is_over = not self._uses
        if not is_over:
            for cancel in tuple(self._cancels):
                cancel()
            return
        for mirror, runs in self.runs.items():
            unheld = mirror.pages.release(runs)
            if unheld and frees and not mirror.keeps:
                mirror.free(unheld)


class Mirror:
    """A sparse local copy of one version of an object, filled on demand and shared by any number of processes."""

    def __init__(self, url: str, folder: str, options: RemoteOptions) -> None:
        self.url, self._folder, self.options = url, folder, options
        self.keeps, self.cache_bytes = options.cache_dir is not None, options.cache_bytes
        self._opened: tuple[int, Pages] | None = None
        self._retained: list[Hold] | None = None  # holds to release at the end of a context
        self._register()

    @property
    def path(self) -> Path:
        """The local copy."""
        return Path(self._folder) / OBJECT

    def _register(self) -> None:
        local_copies[str(self.path)] = self
        errors.shown_as[str(self.path)] = without_query(self.url)
        keep_stamp(self.path, int(self._folder[-15:], 16))  # a digest of the URL and version

    @property
    def pages(self) -> Pages:
        """The copy, which each process opens for itself."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Pages(Path(self._folder))
        return self._opened[1]

    def held(self, offsets: Any, sizes: Any) -> Hold:
        """Hold the pages of byte ranges, and wait until all are present. Raises FileError if a request fails.

        ``offsets`` and ``sizes``, in bytes, are (n,) arrays.
        """
        return Hold({self: page_runs(offsets, sizes)}).fetched()

    def request(self, runs: Runs, then: Callable[[FileError | None], None]) -> Callable[[], object]:
        """Request pages, and return a function that cancels this. ``then`` is called with None or an error."""
        connection = self._connection()
        number = connection.send(
            {"op": "fetch", "folder": self._folder, "runs": runs, "keeps": self.keeps},
            lambda reply: then(client.error_of(reply["error"]) if reply["error"] else None),
        )
        return lambda: connection.send({"op": "cancel", "fetch": number}, None)

    def _connection(self) -> client.Client:
        connection = client.client()
        if self._folder not in connection.opened:
            message = {"op": "open", "url": self.url, "folder": self._folder}
            connection.call({**message, "options": dict(self.options.storage_options)})
            connection.opened.add(self._folder)
        return connection

    def free(self, runs: Runs) -> None:
        """Free pages that nobody uses. The server does so, because the reading threads would wait for the disk."""
        connection = client.current()
        if connection is not None and self._folder in connection.opened:
            connection.send({"op": "free", "folder": self._folder, "runs": runs}, None)
        else:
            self.pages.free(runs)

    # ---- metadata, which `h5chunk.remote.mirror_file` reads for HDF5

    def are_absent(self, offset: int, stop: int) -> bool:
        """Return whether some bytes must be fetched."""
        return bool(self.pages.absent([(offset // PAGE, -(-stop // PAGE))]))

    def is_kept(self, offset: int, stop: int) -> bool:
        """Return whether bytes are present, and never freed."""
        return self.pages.are_kept(offset // PAGE, -(-stop // PAGE))

    def is_held(self, offset: int, stop: int) -> bool:
        """Return whether bytes are held as metadata in this process."""
        return bool(self._holds[offset // PAGE : -(-stop // PAGE)].all())

    def missing(self, addresses: np.ndarray) -> np.ndarray:
        """Return the addresses of bytes, (n,) int64, that are neither kept, nor held as metadata in this process."""
        places = addresses[(addresses >= 0) & (addresses < self.pages.num_bytes)]
        pages = places // PAGE
        return places[(self._holds[pages] == 0) & ~self.pages.which_are_kept(pages)]

    def hold_metadata(self, offsets: Any, sizes: Any) -> Hold:
        """Hold byte ranges as `held` does, until `release`."""
        hold = self.held(offsets, sizes)
        for first, stop in hold.runs[self]:
            self._holds[first:stop] += 1
        return hold

    def keep(self, offset: int, stop: int) -> None:
        """Never free bytes, which are held, because HDF5 reads the same metadata repeatedly."""
        if self._retained is None:
            self.pages.keep([(offset // PAGE, -(-stop // PAGE))])

    def release(self, hold: Hold) -> None:
        """Release metadata, and free it if the cache has a limit, which it would use up."""
        if self._retained is not None and self.cache_bytes is None:
            self._retained.append(hold)
            return
        for first, stop in hold.runs[self]:
            self._holds[first:stop] -= 1
        hold.close()
        if self.keeps and self.cache_bytes is not None:
            self.pages.free(hold.runs[self])

    @contextmanager
    def without_keeping(self) -> Iterator[None]:
        """Hold what HDF5 reads in a context, but do not keep it afterwards. The caller frees it (`free_unused`)."""
        self._retained = retained = list[Hold]()
        try:
            yield
        finally:
            self._retained = None
            for hold in retained:
                for first, stop in hold.runs[self]:
                    self._holds[first:stop] -= 1
                hold.close(frees=False)

    def free_unused(self) -> None:
        """Without a cache, free all pages that are not metadata to keep, and not in use."""
        if not self.keeps:
            self.pages.free([(0, pages_of(self.pages.num_bytes))])

    @cached_property
    def _holds(self) -> np.ndarray:
        """The number of holds on each page as metadata: (n,) uint32."""
        return np.zeros(pages_of(self.pages.num_bytes), np.uint32)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the copy in this process. It stays open."""
        descriptor = Descriptor(self.pages.descriptor)
        descriptor.mirror = self
        return descriptor

    def open_descriptor(self) -> Descriptor:
        """Open and return a new descriptor of the copy."""
        descriptor = Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        descriptor.mirror = self
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_holds"}
        return {**kept, "_opened": None, "_retained": None, "socket": client.client().path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        client.use(state.pop("socket"))
        self.__dict__.update(state)
        self._register()


def page_runs(offsets: np.ndarray, sizes: np.ndarray) -> Runs:
    """Return the pages of byte ranges as disjoint runs.

    >>> page_runs(np.array([0, 40_000, 1_000_000]), np.array([20_000, 10, 1]))
    [(0, 3), (61, 62)]
    """
    if not len(offsets):
        return []
    order = np.argsort(offsets, kind="stable")
    firsts, stops = offsets[order] // PAGE, -(-(offsets + sizes)[order] // PAGE)
    stops = np.maximum.accumulate(stops)
    borders = np.flatnonzero(firsts[1:] > stops[:-1]) + 1
    return list(
        zip(firsts[np.append(0, borders)].tolist(), stops[np.append(borders, len(stops)) - 1].tolist(), strict=True)
    )


def open_url(url: str, options: RemoteOptions) -> Mirror:
    """Open an object. Raises FileError if it cannot be read."""
    connection = client.client()
    folder = _call("open", url, options.storage_options, root=str(options.root))["folder"]
    connection.opened.add(folder)
    known = local_copies.get(str(Path(folder) / OBJECT))
    if known is not None and (known.url, known.options) == (url, options) and known.pages.is_there:
        return known  # so that a mirror identifies an object
    mirror = Mirror(url, folder, options)
    mirror.free_unused()  # which a killed process may have left
    return mirror


def open_urls(name: str, urls: Sequence[str], options: RemoteOptions) -> list[Path]:
    """Open objects, several at a time, and return the paths of their local copies.

    ``name`` is the URL or pattern that the caller gave for them.
    """
    with ThreadPoolExecutor(min(16, len(urls))) as pool:
        mirrors = list(pool.map(open_url, urls, repeat(options)))
    if len(urls) > 1 or urls[0] != name:
        errors.shown_as[str(Path(name))] = name
    return [mirror.path for mirror in mirrors]


def _call(
    op: str, url: str, options: Mapping[str, Any] | None = None, note: client.Note | None = None, **more: Any
) -> dict[str, Any]:
    """Send a request to the server process, and return its reply; see `client.Client.call`."""
    return client.client().call({"op": op, "url": url, "options": dict(options or {}), **more}, note)


def exists(url: str) -> bool:
    """Return whether an object, or a folder with objects, exists at a URL.

    Raises FileError if the request fails.
    """
    return bool(_call("exists", url)["found"])


def put(file: Path, url: str) -> None:
    """Upload a file atomically. Raises FileError if that fails."""
    _call("put", url, file=str(file))


def download(url: str, file: Path, start: int = 0, stop: int | None = None) -> None:
    """Write an object, or its bytes ``start`` to ``stop`` (excluded), to a new file. Raises FileError if that fails."""
    _call("download", url, file=str(file), start=start, stop=stop)


def save(url: str, folder: Path, note: client.Note) -> Path:
    """Download an object, a folder, or the objects that match a pattern, into a local folder. Returns the local path.

    A download that was stopped is continued. ``note`` is called with the number of bytes that are done, and the total.
    Raises FileError if the download fails.
    """
    return Path(_call("save", url, note=note, folder=str(folder))["path"])


def remove(url: str) -> None:
    """Remove an object. Raises FileError if that fails."""
    _call("remove", url)


def measure(
    ranges: Sequence[tuple[str, int, int]],
    num_requests: int,
    seconds: float,
    storage_options: Mapping[str, Any],
    most: int = 1 << 30,
) -> dict[str, Any]:
    """Measure the speed of requests for byte ranges, with ``num_requests`` requests at a time.

    The ranges, (URL, start, stop), are requested repeatedly for about ``seconds``, or until ``most`` requests were
    made. The received bytes are dropped. Returns the number of received bytes as ``num_bytes``, the elapsed
    ``seconds``, and the ``times`` of the first requests in seconds. Raises FileError if a request fails.
    """
    more: dict[str, Any] = {"ranges": ranges, "most": most, "requests": num_requests, "seconds": seconds}
    return _call("measure", ranges[0][0], storage_options, **more)


def list_url(url: str, options: RemoteOptions) -> list[str]:
    """Return the names of the objects in a folder. Raises FileError if it cannot be listed."""
    return list(_call("list", url, options.storage_options)["names"])
