"""Share a folder of files among the tasks of a command.

The folder is on a file system that all workers see, or in an object store.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from h5chunk import errors
from h5chunk.errors import FileError, OptionError, OutputError, printable
from h5chunk.remote.mirror import NO_OPTIONS, download, exists, list_url, put, remove
from h5chunk.store.write.part_file import writing
from h5chunk.urls import is_url, parse, without_query


@dataclass(frozen=True)
class SharedFolder:
    """Temporary files of tasks. If they are in an object store, ``path`` contains local copies of the files in use."""

    path: Path
    url: str = ""  # URL of the temporary files in an object store; empty on a shared file system
    output: str = ""  # URL of the folder for complete files in an object store

    @classmethod
    def in_store(cls, output: str, part: Path, path: Path) -> SharedFolder:
        """Return a folder in the store of the URL ``output``.

        Its name depends on ``part``, the path of the unfinished output.
        """
        key = hashlib.sha256(f"{socket.gethostname()}:{part}".encode()).hexdigest()[:12]
        folder, name = parse(output)
        return cls(path, f"{folder}.{name}.h5chunk-{key}", output)

    @contextmanager
    def in_worker(self) -> Iterator[SharedFolder]:
        """Yield the folder for use by one task.

        Copies of files in a store are kept in a temporary folder until the task ends.
        """
        if not self.url:
            if not self.path.is_dir():
                raise FileError(
                    f"{printable(self.path)}: a worker cannot see this folder: put SOURCE and OUTPUT on a file system "
                    "that all workers share, or in an object store"
                )
            yield self
            return
        with _scratch() as path:
            yield replace(self, path=path)

    def file(self, name: str) -> Path:
        """Return the local path of a file, which is downloaded first if necessary."""
        path = self.path / name
        if self.url and not path.exists():
            download(f"{self.url}/{name}", path)
        return path

    @contextmanager
    def part(self, name: str, start: int, num_bytes: int) -> Iterator[tuple[Path, int]]:
        """Yield a local file that contains a range of bytes of the file ``name``, and the offset of the range in it."""
        if not self.url or (self.path / name).exists():
            yield self.path / name, start
            return
        path = self.path / f"{name}-{start}"
        download(f"{self.url}/{name}", path, start, start + num_bytes)
        yield path, 0
        path.unlink()

    def share(self, name: str) -> None:
        """Upload a complete file if the folder is in a store, so that all tasks see it."""
        if self.url:
            _put(self.path / name, f"{self.url}/{name}")

    def finish(self, job: str, name: str, final: str) -> None:
        """Upload a complete file of the output. Raises OutputError if the command with this job has ended."""
        if self.url:
            if not exists(f"{self.url}/{job}"):
                raise OutputError(f"{printable(self.output)}: was not written, because the command has ended")
            _put(self.path / name, f"{self.output}/{final}")

    def has(self, name: str) -> bool:
        """Return whether the file exists, on this machine or in the store."""
        return (self.path / name).exists() or (bool(self.url) and exists(f"{self.url}/{name}"))

    def free(self, name: str) -> None:
        """Truncate a file that is no longer needed, but keep it, so that its task counts as finished."""
        (self.path / name).write_bytes(b"")
        self.share(name)

    def clear(self) -> None:
        """Remove all temporary files from the store."""
        if self.url:
            with suppress(FileError):
                for name in list_url(f"{self.url}/", NO_OPTIONS):
                    remove(f"{self.url}/{name}")

    def save_job(self, job: Any) -> str:
        """Save the job that all tasks share in a file, and return its name. Raises OptionError if pickling fails."""
        try:
            data = cloudpickle.dumps(job)
        except Exception as error:  # pickle raises errors of many types
            raise OptionError(
                f"the source cannot be sent to Dask workers ({error}): convert it without a cluster"
            ) from None
        name = f"job-{hashlib.sha256(data).hexdigest()}"
        with writing(self.path / name):
            (self.path / name).write_bytes(data)
        self.share(name)
        return name

    def load_job(self, name: str) -> Any:
        """Load the job that all tasks share."""
        data = self.file(name).read_bytes()
        if name != f"job-{hashlib.sha256(data).hexdigest()}":
            raise FileError(f"{printable(self.path / name)}: was changed by another program: repeat the command")
        return pickle.loads(data)


def _put(file: Path, url: str) -> None:
    try:
        put(file, url)
    except FileError as error:
        raise OutputError(str(error)) from None


@contextmanager
def _scratch() -> Iterator[Path]:
    """Create a temporary folder.

    A Dask worker creates it in its own folder, which Dask removes if the worker is killed.
    """
    parent = None
    if "distributed" in sys.modules:
        from distributed import get_worker

        with suppress(ValueError):  # not in a worker
            parent = get_worker().local_directory
    with TemporaryDirectory(prefix="h5chunk-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def at_hand(source: Any) -> Iterator[Path]:
    """Yield the local path of a file. If ``source`` is a URL, it is first downloaded to a temporary folder."""
    if not is_url(source):
        yield Path(source)
        return
    with _scratch() as folder:
        path = folder / parse(source)[1]
        errors.shown_as[str(path)] = without_query(source)
        download(source, path)
        yield path
        del errors.shown_as[str(path)]
