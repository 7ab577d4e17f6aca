"""Write the output of a command to an object store: make it on a local disk, and upload each complete file."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from h5chunk.errors import FileError, OutputError, printable
from h5chunk.remote.mirror import NO_OPTIONS, exists, list_url, put, remove
from h5chunk.store.read.files import list_files
from h5chunk.store.write.output import NUMBERED
from h5chunk.tools.shared import SharedFolder
from h5chunk.urls import is_url, parse

Command = TypeVar("Command", bound=Callable[..., Any])
FIRST_SHARD = re.compile(r"-00000-of-\d+\.h5$")
FILES = 4  # files that are uploaded at a time; the parts of each are uploaded at the same time, too


def uploads(command: Command) -> Command:
    """Let the second argument of a command, its output, be a URL."""
    signature = inspect.signature(command)
    name = list(signature.parameters)[1]

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        if not is_url(given[name]):
            return command(*arguments, **options)
        given.update(given.pop("options", {}))
        url, overwrite = given.pop(name), given.pop("overwrite", False)
        source = given.pop(next(iter(signature.parameters)))
        return _upload(url.rstrip("/"), lambda path: command(source, path, overwrite=True, **given), given, overwrite)

    return run  # type: ignore[return-value]


class Uploads:
    """Upload files to a folder of a store as soon as each is complete, the first one last.

    As the name of a shard tells how many there are, readers find the folder incomplete until the first one is there.
    """

    def __init__(self, url: str, folder: Path, *, overwrite: bool) -> None:
        self.url, self._folder, self._overwrite = url, folder, overwrite
        self._files: dict[str, Future[None]] = {}
        self._old: list[str] = []  # files that are replaced
        self.sizes: dict[str, int] = {}  # bytes of the files that workers have uploaded
        self._pool = ThreadPoolExecutor(FILES)

    def add(self, file: Path) -> None:
        """Start uploading a complete file. Raises FileError if an earlier one failed."""
        for started in self._files.values():
            if started.done():
                started.result()
        if file.name in self._files or FIRST_SHARD.search(file.name):
            return
        self.begin()
        self._folder.mkdir(exist_ok=True)
        link = self._folder / file.name  # as the folder of the file gets another name
        link.unlink(missing_ok=True)
        os.link(file, link)
        self._files[file.name] = self._pool.submit(put, link, f"{self.url}/{file.name}")

    def begin(self) -> None:
        """Remove the first of the files that are replaced, so that readers do not mix old and new ones."""
        if self._overwrite and not self.url.startswith("http"):  # web servers do not list
            self._old = [name for name in list_url(f"{self.url}/", NO_OPTIONS) if NUMBERED.fullmatch(name)]
            for name in filter(FIRST_SHARD.search, self._old):
                remove(f"{self.url}/{name}")
        self._overwrite = False

    def finish(self, path: Path) -> None:
        """Upload the rest of a complete folder, and remove what it replaced. Raises FileError."""
        self.begin()
        files = sorted(path.iterdir(), reverse=True)
        for file in files:
            self.add(file)
        for started in self._files.values():
            started.result()
        for name in set(self._old) - {file.name for file in files} - self.sizes.keys():
            remove(f"{self.url}/{name}")
        for file in files:
            if file.name not in self._files:
                put(file, f"{self.url}/{file.name}")

    def close(self) -> None:
        """Cancel the uploads that are still queued, and wait for the running ones."""
        self._pool.shutdown(cancel_futures=True)


_current: ContextVar[Uploads | None] = ContextVar("uploads", default=None)


def upload_early(file: Path) -> None:
    """Upload a complete file of a folder already, if the output is a URL. Raises OutputError."""
    if (uploads := _current.get()) is not None:
        try:
            uploads.add(file)
        except FileError as error:
            raise OutputError(str(error)) from None


def in_store() -> bool:
    """Return whether the output is a URL."""
    return _current.get() is not None


def shared_folder(part: Path, path: Path) -> SharedFolder:
    """Return a folder for the tasks of a cluster: ``path``, or one in the store if the output is a URL."""
    uploads = _current.get()
    return SharedFolder(path) if uploads is None else SharedFolder.in_store(uploads.url, part, path)


def upload_last(names: Sequence[str], folder: SharedFolder) -> set[int]:
    """Let workers upload files of these names from now on; return the numbers of those to upload after all others."""
    if (uploads := _current.get()) is None or not folder.url:
        return set()
    uploads.begin()
    return {number for number, name in enumerate(names) if FIRST_SHARD.search(name)}


def take(folder: SharedFolder, attempt: str, final: Path, num_bytes: int) -> None:
    """Move a file that a task has finished into the unfinished output, unless the worker has uploaded it."""
    if (uploads := _current.get()) is not None and folder.url:
        uploads.sizes[final.name] = num_bytes
        return
    try:
        (folder.path / attempt).replace(final)
    except FileNotFoundError:
        raise OutputError(
            f"{printable(final)}: a worker has written {attempt} to a folder that this process does not see: SOURCE "
            "and OUTPUT must be on a file system that all workers share, or in an object store"
        ) from None
    upload_early(final)


def is_uploaded(name: str, num_bytes: int) -> bool:
    """Return whether a file of this name, which a worker has uploaded before, is still in the store."""
    uploads = _current.get()
    if uploads is None or not exists(f"{uploads.url}/{name}"):
        return False
    uploads.sizes[name] = num_bytes
    return True


def files_in(path: Path) -> list[Path]:
    """Return the files of an output folder, or the local copies of those that workers have uploaded."""
    uploads = _current.get()
    if uploads is None or not uploads.sizes:
        return sorted(path.iterdir())
    return list_files([f"{uploads.url}/{name}" for name in sorted(uploads.sizes)])


def size_of(file: Path) -> int:
    """Return the bytes of a file of the output, which a worker may have uploaded."""
    uploads = _current.get()
    return uploads.sizes[file.name] if uploads and file.name in uploads.sizes else file.stat().st_size


def _upload(url: str, make: Callable[[Path], Any], options: dict[str, Any], overwrite: bool) -> Any:
    """Make a file or a folder of files, upload it, and return its report. Raises OutputError."""
    if not parse(url)[1]:
        raise OutputError(f"{printable(url)}: is not the name of an object to write: give one, such as {url}/data.h5")
    if not overwrite and not options.get("dry_run") and _exists(url):
        raise OutputError(f"{printable(url)}: already exists: give another name, or overwrite=True (--overwrite)")
    folder = NO_OPTIONS.root / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / parse(url)[1]
    if options.get("dry_run"):
        return replace(make(path), path=url)
    uploads = Uploads(url, folder / "complete", overwrite=overwrite)
    with closing(uploads):
        token = _current.set(uploads)
        try:
            report = replace(make(path), path=url)
        finally:
            _current.reset(token)
        try:
            if path.is_dir():
                uploads.finish(path)
            else:
                put(path, url)
        except FileError as error:
            raise OutputError(
                f"{error}: the files are complete in {printable(folder)}: the same call continues"
            ) from None
    shutil.rmtree(folder)
    return report


def _exists(url: str) -> bool:
    """Return whether there is an object, or a folder of files that is complete."""
    if not exists(url):
        return False
    names = [] if url.startswith("http") else list_url(f"{url}/", NO_OPTIONS)
    return not names or not all(map(NUMBERED.fullmatch, names)) or any(map(FIRST_SHARD.search, names))
