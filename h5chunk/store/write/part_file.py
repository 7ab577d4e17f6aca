"""Name, open and lock the temporary files of an unfinished output, and check paths and disk space."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h5chunk.errors import H5ChunkError, OutputError, human_bytes, printable
from h5chunk.urls import hint_for_url

ROOM_BYTES = 16 << 20  # bytes that are written between checks of the free space, if the size of the output is unknown
LOCK_WAIT_S = 0.5  # time to wait for a lock, because workers of a killed writer hold it until they notice


def part_path(path: Path) -> Path:
    """Return the path of an output while it is incomplete."""
    return path.with_name(f".{path.name}.h5chunk-part")


def journal_path(path: Path) -> Path:
    """Return the path of the journal of an output."""
    return path.with_name(f".{path.name}.h5chunk-journal")


def open_side_file(path: Path, label: str) -> int:
    """Open or create a temporary file of an output, and return its descriptor."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except IsADirectoryError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OutputError(f"{printable(path)} is a symbolic link, which is not followed: remove it") from None
        raise OutputError(f"{label}: cannot be written: {error.strerror}") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OutputError(f"{printable(path)} is not a regular file: remove it")


def lock(descriptor: int, label: str) -> None:
    """Lock an open file. If that fails, close the file and raise OutputError."""
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                raise OutputError(
                    f"{label}: another process is writing it: wait for that process, or stop it"
                ) from None
            time.sleep(LOCK_WAIT_S / 10)
        except OSError as error:
            os.close(descriptor)
            raise OutputError(f"{label} cannot be locked ({error.strerror}): write to a local disk") from None


def is_open(descriptor: int, path: Path) -> bool:
    """Return whether a path still refers to an open file, which another writer may have renamed or removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_output(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """Validate the path of an output file, or of a folder of shards, and return it as a `Path`."""
    text = os.fspath(path)
    name = os.path.basename(text.rstrip("/") if folder else text)
    if name in ("", ".", "..") or "\0" in text:
        noun, example = ("folder", "shards") if folder else ("file", "data.h5")
        raise OutputError(
            f"{printable(text)!r} is not the name of a {noun} to write: use a name such as "
            f"{printable(os.path.join(text.replace(chr(0), ''), example))}"
        )
    return Path(path)


def check_name(path: Path) -> None:
    """Raise OutputError if the name of an output, or a longer name of its temporary files, cannot be used."""
    beside = journal_path(path)
    for file in (path, beside.with_name(f"{beside.name}-data")):  # the longest name of a temporary file
        try:
            os.stat(file)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP):
                raise OutputError(f"{printable(path)} cannot be written ({error.strerror}): use another name") from None


def check_not_source(path: Path, *sources: str | os.PathLike[str] | None) -> None:
    """Raise OutputError if an output is also one of the sources."""
    for source in sources:
        if source is not None and os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise OutputError(f"{printable(path)} is also the source: write to another file")


def check_output(path: Path, overwrite: bool) -> None:
    """Raise OutputError unless a file can be created at ``path``, or replaced if ``overwrite`` is set."""
    label = printable(path)
    check_name(path)
    if path.is_dir():
        raise OutputError(f"{label} is a folder: use the name of a file, such as {printable(path / 'data.h5')}")
    if os.path.exists(path) and not path.is_file():  # a device, such as /dev/null, would be replaced
        raise OutputError(f"{label} is not a regular file, so it is not replaced: use another name")
    if not overwrite:
        check_missing(path)
    check_parent(path)


def check_missing(path: Path) -> None:
    """Raise OutputError if a file or folder exists."""
    if os.path.exists(path):
        raise OutputError(f"{printable(path)} exists: use --overwrite (overwrite=True) to replace it")


def check_parent(path: Path) -> None:
    """Raise OutputError unless files can be created in the folder of ``path``."""
    label, parent = printable(path), printable(path.parent)
    if not path.parent.is_dir():
        missing = f"does not exist{hint_for_url(path)}: create it first"
        problem = "is not a folder: use another path" if path.parent.exists() else missing
        raise OutputError(f"{label}: its folder {parent} {problem}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{label}: its folder {parent} is not writable: use another path")


def check_free_space(path: Path, num_bytes: int) -> None:
    """Raise OutputError unless the disk of ``path`` has ``num_bytes`` free."""
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OutputError(no_space_message(path, num_bytes, f"{human_bytes(free)} are free"))


def no_space_message(path: Path, num_bytes: int, reason: str | None) -> str:
    """Return an error message for an output of ``num_bytes`` that does not fit on the disk. ``reason`` explains why."""
    return (
        f"{printable(path)} needs {human_bytes(num_bytes)} of disk space, but {reason}: free space, or write elsewhere"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the system and of HDF5 within the context to OutputErrors that name the output."""
    try:
        yield
    except H5ChunkError:
        raise
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{printable(path)}: cannot be written: {reason_of(error) or error}") from None


def reason_of(error: OSError | RuntimeError) -> str | None:
    """Return the system's description of an error, even if HDF5 raised it, or None if it has no error number."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    found = re.search(r"errno = (\d+)", str(error))
    return os.strerror(int(found[1])) if found else None
