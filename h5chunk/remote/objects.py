"""Read, list and write objects of a store through obstore, and retry failed requests."""

from __future__ import annotations

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from h5chunk.urls import CHANGED, without_query

HEAD_BYTES = 64 << 10  # size of the first read, when an object is opened
NUM_REQUESTS, MAX_REQUESTS = 64, 1024  # default and maximum number of simultaneous range requests
DEADLINE_S = 60.0  # seconds for which a failing request is retried
LARGEST, SMALLEST = 4 << 20, 256 << 10  # limits on the bytes of a request; timeouts make requests smaller
MISSING, WHOLE = "no such object", "its server sends only whole files: copy the file to a disk first"
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # seconds before the first retry, and maximum seconds before a retry
FINAL = ("PermissionDeniedError", "UnauthenticatedError", "UnknownConfigurationKeyError")


COMPRESSES = "its server compresses what it sends"
WRONG = re.compile(  # in messages of errors that persist when a request is repeated
    r"Failed to parse|following redirect|non-ASCII|Requested .*, got|status code: (3\d\d|4(?!00|08|25|29)\d\d)"
)
NO_RANGES = re.compile(r"Range request not supported|Content-Length Header missing")


class RemoteError(Exception):
    """Raised if an object cannot be read or written."""


class TimedOutError(Exception):
    """Raised if a request timed out, but requests for fewer bytes may succeed."""


class NoRangesError(RemoteError):
    """Raised if a web server sends only whole files, or parts that may not belong to the same version."""


class Store:
    """A folder of an object store. `h5chunk.ChunkDataset` describes its ``options``."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        from obstore.store import from_url

        self._folder, self._largest = without_query(url), LARGEST
        options = dict(options)
        num_requests = options.pop("requests", NUM_REQUESTS)
        if not isinstance(num_requests, int) or not 1 <= num_requests <= MAX_REQUESTS:
            raise RemoteError(f"storage_options has requests={num_requests!r}: pass a number from 1 to {MAX_REQUESTS}")
        self.pool = ThreadPoolExecutor(num_requests)  # for range requests
        self.deadline_s = float(options.pop("deadline", DEADLINE_S))
        client: dict[str, Any] = {"timeout": f"{float(options.pop('timeout', 30)):g}s", "connect_timeout": "10s"}
        endpoints = (*options.values(), url, *(os.environ.get(name, "") for name in ENDPOINTS))
        if any(str(value).startswith("http://") for value in endpoints):
            client["allow_http"] = True
        client |= options.pop("client_options", {})
        try:
            make: Any = from_url
            self.store = make(url.rstrip("/"), client_options=client, **{"retry_config": {"max_retries": 0}, **options})
        except Exception as error:
            raise RemoteError(f"{without_query(url)}: cannot be opened: {first_line(error)}") from None

    def get(self, url: str, start: int, stop: int, pin: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        """Return the metadata of an object, and its bytes ``start`` to ``stop`` (excluded).

        Raises RemoteError if ``pin`` is given and the object has another version.
        """
        import obstore

        if stop - start > self._largest:
            middle = (start + stop) // 2
            about, first = self.get(url, start, middle, pin)
            return about, memoryview(b"".join((first, self.get(url, middle, stop, pin or about)[1])))
        key, options = self._key(url), {"range": (start, stop)}
        if pin is not None and pin["etag"] and not pin["etag"].startswith("W/"):
            options["if_match"] = pin["etag"]

        def attempt() -> tuple[dict[str, Any], Any]:
            result = obstore.get(self.store, key, options=options)  # type: ignore[arg-type]
            about = version_of(result.meta)
            if pin is not None and any(about[name] != pin[name] for name in about):
                raise RemoteError(changed(url))
            data = memoryview(result.bytes())
            if len(data) != min(stop, about["num_bytes"]) - start:
                if encoding := result.attributes.get("Content-Encoding"):
                    raise RemoteError(
                        f"{without_query(url)}: {COMPRESSES}, as {encoding}: copy it to a disk and decompress it"
                    )
                raise EOFError(f"the store sent {len(data)} bytes instead of {stop - start}")
            return about, data

        try:
            return self.retried(url, attempt, may_split=stop - start > SMALLEST)
        except TimedOutError:  # many requests share a slow connection
            self._largest = max(SMALLEST, (stop - start) // 2)
            return self.get(url, start, stop, pin)

    def open(self, url: str) -> tuple[dict[str, Any], Any]:
        """Return the metadata of an object, and its first bytes. Raises RemoteError if changes would go unnoticed."""
        about, data = self.get(url, 0, HEAD_BYTES)
        if not about["etag"] and about.get("modified", "").startswith("1970-01-01"):
            raise NoRangesError(
                f"{without_query(url)}: its server sends neither ETag nor Last-Modified, so changes would go "
                "unnoticed: copy the object to a disk first"
            )
        return about, data

    def list_all(self, url: str) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the path, size and version of each object in this folder and its subfolders."""
        import obstore

        def attempt() -> list[tuple[str, int, dict[str, Any]]]:
            found = (each for some in obstore.list(self.store, chunk_size=1000) for each in some)
            return [(each["path"], each["size"], version_of(each)) for each in found]

        return self.retried(url, attempt)

    def _key(self, url: str) -> str:
        """Return the name of an object, relative to this folder."""
        name = without_query(url).removeprefix(self._folder)
        return unquote(name) if url.startswith("http") else name  # obstore quotes it

    def list(self, url: str) -> list[str]:
        """Return the names of the objects in this folder, without its subfolders."""
        import obstore

        found = self.retried(url, lambda: obstore.list_with_delimiter(self.store))
        return [each["path"].rpartition("/")[2] for each in found["objects"]]

    def exists(self, url: str) -> bool:
        """Return whether an object, or a folder with objects, exists at a URL."""
        import obstore

        name = self._key(url)
        try:
            return bool(self.retried(url, lambda: obstore.head(self.store, name)))
        except RemoteError as error:
            if not str(error).endswith(MISSING):
                raise
        if url.startswith("http"):  # web servers do not list
            return False
        return bool(self.retried(url, lambda: next(iter(obstore.list(self.store, name, chunk_size=1)), None)))

    def put(self, url: str, file: str) -> None:
        """Upload a file, in several parts if it is large."""
        import obstore

        try:
            obstore.put(self.store, self._key(url), Path(file))
        except Exception as error:
            raise RemoteError(f"{without_query(url)}: cannot be written: {first_line(error)}") from None

    def remove(self, url: str) -> None:
        import obstore

        self.retried(url, lambda: obstore.delete(self.store, self._key(url)))

    def retried(self, url: str, attempt: Any, *, may_split: bool = False) -> Any:
        """Return the result of ``attempt()``. After temporary errors the call is repeated until the deadline.

        Raises RemoteError; if ``may_split``, TimedOutError at the first timeout.
        """
        url = without_query(url)
        end, delay_s = time.monotonic() + self.deadline_s, FIRST_DELAY_S
        while True:
            try:
                return attempt()
            except RemoteError:
                raise
            except Exception as error:
                kind = type(error).__name__
                if kind == "PreconditionError":
                    raise RemoteError(changed(url)) from None
                if kind == "NotFoundError" or isinstance(error, FileNotFoundError):
                    raise RemoteError(f"{url}: {MISSING}") from None
                if may_split and "TimedOut" in str(error):
                    raise TimedOutError from None
                if NO_RANGES.search(str(error)):
                    raise NoRangesError(f"{url}: {WHOLE}") from None
                if "416 Range Not Satisfiable" in str(error):
                    raise RemoteError(f"{url} is empty, or was cut short") from None
                is_final = kind in FINAL or isinstance(error, (PermissionError, NotImplementedError))
                if is_final or WRONG.search(str(error)):
                    raise RemoteError(f"{url}: cannot be read: {first_line(error)}") from None
                pause_s = delay_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s > end:
                    raise RemoteError(
                        f"{url}: cannot be read: requests failed for {self.deadline_s:g} s ({first_line(error)})"
                    ) from None
                time.sleep(pause_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)


ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")


def version_of(meta: Any) -> dict[str, Any]:
    """Return the identity of a version of an object: its size, and its ETag or modification time."""
    modified = meta["last_modified"]
    about = {"num_bytes": meta["size"], "etag": meta["e_tag"] or ""}
    return about if about["etag"] else {**about, "modified": modified.isoformat()}


def changed(url: str) -> str:
    return f"{without_query(url)}: {CHANGED}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without URL queries, or the error's type if there is no message."""
    lines = re.sub(r"\?\S+=\S*", "", str(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
