"""Write the output of a command to an object store.

Files are written to a local disk, and uploaded once they are complete.
"""

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
from h5chunk.store.write.journal import has_command_id
from h5chunk.store.write.output import NUMBERED
from h5chunk.tools.shared import SharedFolder
from h5chunk.urls import is_url, parse

Command = TypeVar("Command", bound=Callable[..., Any])
FIRST_SHARD = re.compile(r"-00000-of-\d+\.h5$")
FILES = 4  # number of files, and of parts of each file, that are uploaded at the same time


def uploads(command: Command) -> Command:
    """Decorate a command so that its second argument, the output, may be a URL."""
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
        return _upload(url.rstrip("/"), functools.partial(_make, command, source, given), given, overwrite)

    return run  # type: ignore[return-value]


def _make(command: Command, source: Any, options: dict[str, Any], path: Path) -> Any:
    """Write the local output, unless an earlier call with the same arguments has written it completely."""
    if has_command_id(path):
        try:
            return command(source, path, overwrite=False, **options)
        except OutputError:  # it is the output of another call
            pass
    return command(source, path, overwrite=True, **options)


class Uploads:
    """Upload each file to a folder of an object store as soon as it is complete, but the first shard last.

    Shard names contain the number of shards, so readers reject the folder as incomplete until the first shard exists.
    """

    def __init__(self, url: str, folder: Path, *, overwrite: bool) -> None:
        self.url, self._folder, self._overwrite = url, folder, overwrite
        self._record = folder.with_name("uploaded")  # lines that identify the files in the store, also of earlier calls
        self._uploaded = set(self._record.read_text().splitlines()) if self._record.exists() else set()
        self._files: dict[str, Future[None]] = {}
        self._old: list[str] = []  # files that are replaced
        self.sizes: dict[str, int] = {}  # sizes, in bytes, of the files that workers have uploaded
        self._pool = ThreadPoolExecutor(FILES)

    def add(self, file: Path) -> None:
        """Start uploading a complete file other than the first shard. Raises FileError if an earlier upload failed."""
        for started in self._files.values():
            if started.done():
                started.result()
        if file.name in self._files or FIRST_SHARD.search(file.name):
            return
        self.begin()
        if _identity(file) in self._uploaded and exists(f"{self.url}/{file.name}"):
            self._files[file.name] = Future()
            self._files[file.name].set_result(None)
            return
        self._folder.mkdir(exist_ok=True)
        link = self._folder / file.name  # because the folder of the file will be renamed
        link.unlink(missing_ok=True)
        os.link(file, link)
        self._files[file.name] = self._pool.submit(self._put, link)

    def _put(self, file: Path) -> None:
        put(file, f"{self.url}/{file.name}")
        with self._record.open("a") as record:
            record.write(f"{_identity(file)}\n")

    def begin(self) -> None:
        """Remove the first of the old shards that the upload replaces.

        Otherwise readers might mix old and new shards.
        """
        if self._overwrite and not self.url.startswith("http"):  # web servers cannot list files
            self._old = [name for name in list_url(f"{self.url}/", NO_OPTIONS) if NUMBERED.fullmatch(name)]
            for name in filter(FIRST_SHARD.search, self._old):
                remove(f"{self.url}/{name}")
        self._overwrite = False

    def finish(self, path: Path) -> None:
        """Upload the remaining files of a complete folder, and remove old shards. May raise FileError."""
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


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{file.name} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


_current: ContextVar[Uploads | None] = ContextVar("uploads", default=None)


def upload_early(file: Path) -> None:
    """Start uploading a complete file of an unfinished folder, if the output is a URL. May raise OutputError."""
    if (uploads := _current.get()) is not None:
        try:
            uploads.add(file)
        except FileError as error:
            raise OutputError(str(error)) from None


def in_store() -> bool:
    """Return whether the output is a URL."""
    return _current.get() is not None


def shared_folder(part: Path, path: Path) -> SharedFolder:
    """Return a folder for the tasks of a cluster: ``path``, or a folder in the store if the output is a URL."""
    uploads = _current.get()
    return SharedFolder(path) if uploads is None else SharedFolder.in_store(uploads.url, part, path)


def upload_last(names: Sequence[str], folder: SharedFolder) -> set[int]:
    """Prepare for uploads by workers; return the indices of the names whose files must be uploaded last."""
    if (uploads := _current.get()) is None or not folder.url:
        return set()
    uploads.begin()
    return {number for number, name in enumerate(names) if FIRST_SHARD.search(name)}


def take(folder: SharedFolder, attempt: str, final: Path, num_bytes: int) -> None:
    """Move the file of a finished task into the unfinished output, unless a worker has uploaded it."""
    if (uploads := _current.get()) is not None and folder.url:
        uploads.sizes[final.name] = num_bytes
        return
    try:
        (folder.path / attempt).replace(final)
    except FileNotFoundError:
        raise OutputError(
            f"{printable(final)}: a worker has written {attempt} to a folder that this process cannot see: put "
            "SOURCE and OUTPUT on a file system that all workers share, or in an object store"
        ) from None
    upload_early(final)


def is_uploaded(name: str, num_bytes: int) -> bool:
    """Return whether a file that a worker has uploaded is still in the store."""
    uploads = _current.get()
    if uploads is None or not exists(f"{uploads.url}/{name}"):
        return False
    uploads.sizes[name] = num_bytes
    return True


def files_in(path: Path) -> list[Path]:
    """Return the files of an output folder. For files that workers have uploaded, return local copies."""
    uploads = _current.get()
    if uploads is None or not uploads.sizes:
        return sorted(path.iterdir())
    return list_files([f"{uploads.url}/{name}" for name in sorted(uploads.sizes)])


def size_of(file: Path) -> int:
    """Return the size in bytes of an output file, even if a worker has uploaded it."""
    uploads = _current.get()
    return uploads.sizes[file.name] if uploads and file.name in uploads.sizes else file.stat().st_size


def _upload(url: str, make: Callable[[Path], Any], options: dict[str, Any], overwrite: bool) -> Any:
    """Call ``make`` with a local path, upload the file or folder that it writes, and return its report."""
    if not parse(url)[1]:
        raise OutputError(f"{printable(url)}: does not name an object: use a URL such as {printable(url)}/data.h5")
    if not overwrite and not options.get("dry_run") and _exists(url):
        raise OutputError(f"{printable(url)}: already exists: use another name, or overwrite=True (--overwrite)")
    folder = NO_OPTIONS.root / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / parse(url)[1]
    if options.get("dry_run"):
        return _at(url, make(path))
    uploads = Uploads(url, folder / "complete", overwrite=overwrite)
    with closing(uploads):
        token = _current.set(uploads)
        try:
            report = _at(url, make(path))
        finally:
            _current.reset(token)
        try:
            if path.is_dir():
                uploads.finish(path)
            else:
                put(path, url)
        except FileError as error:
            rest = (
                "upload the rest"
                if has_command_id(path)
                else "write and upload them again, because changes in this source cannot be detected"
            )
            raise OutputError(
                f"{error}. All files are complete in {printable(folder)}; repeat the call to {rest}"
            ) from None
    shutil.rmtree(folder)
    return report


def _at(url: str, report: Any) -> Any:
    """Replace the local paths in a report by the URLs of the output."""
    files = [replace(file, path=f"{url}/{Path(file.path).name}") for file in getattr(report, "files", ())]
    return replace(report, path=url, **({"files": tuple(files)} if files else {}))


def _exists(url: str) -> bool:
    """Return whether an object, or a complete folder of files, exists at the URL."""
    if not exists(url):
        return False
    names = [] if url.startswith("http") else list_url(f"{url}/", NO_OPTIONS)
    return not names or not all(map(NUMBERED.fullmatch, names)) or any(map(FIRST_SHARD.search, names))
