"""Open HDF5 files for reading, and translate errors of HDF5 and the system into errors that name the file."""

from __future__ import annotations

import atexit
import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py

from h5chunk.errors import FileError, H5ChunkError, OutputError, printable
from h5chunk.remote.mirror import MirrorFile
from h5chunk.urls import hint_for_url, is_cut_url, local_copy_of

# exceptions that h5py raises for damaged files
DAMAGES = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REASONS = (
    ("truncated", "the file is cut short (its header claims a larger size): copy or convert it again"),
    ("signature not found", "not an HDF5 file"),
    ("Permission denied", "no permission to read it"),
    ("unable to lock file", "the file is locked by another process that is writing to it: wait for that process"),
)  # a part of HDF5's message for a file that cannot be opened, and the reason in h5chunk's message


@contextmanager
def translate_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of h5py within the context into FileErrors that name the file, or OutputErrors if a disk is full."""
    try:
        yield
    except H5ChunkError:
        raise
    except DAMAGES as error:
        reason = str(error) or type(error).__name__
        if any(os.strerror(number) in reason for number in FULL_DISK):
            raise OutputError(f"{printable(path)}: a copy of this file cannot be written: {reason}") from None
        raise FileError(f"{printable(path)} is damaged, or of an unknown kind (HDF5: {reason})") from error


@contextmanager
def errors_as(kind: type[FileError], message: str, *others: type[Exception]) -> Iterator[None]:
    """Turn errors of h5py, and errors of the types in ``others``, into a FileError that begins with ``message``."""
    damages: tuple[type[Exception], ...] = (*DAMAGES, *others)
    try:
        yield
    except FileError:
        raise
    except damages as error:
        raise kind(f"{message}: {error}") from None


@contextmanager
def opened(path: str | os.PathLike[str], **options: Any) -> Iterator[h5py.File]:
    """Open a file for reading, like `open_file`, in a context that turns errors of h5py into FileErrors."""
    with translate_errors(path), open_file(path, **options) as file:
        yield file


def open_file(path: str | os.PathLike[str], **options: Any) -> h5py.File:
    """Open a file for reading. ``options`` are further arguments of `h5py.File`.

    Raises FileError if the file is missing, not HDF5, truncated, or open for writing.
    """
    label = printable(path)
    if is_cut_url(Path(path)):
        raise FileError(f"{label}: this operation needs a local file: copy the object to a disk first")
    if not os.path.exists(path):  # also False for names that are too long
        raise FileError(f"{label}: no such file{hint_for_url(path)}")
    if not Path(path).is_file():
        raise FileError(f"{label}: not a regular file")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401  # HDF5 finds its filters from then on
    mirror = local_copy_of(path)
    try:
        file = h5py.File(path if mirror is None else MirrorFile(mirror), "r", **options)
    except FileError:
        raise
    except OSError as error:
        text = "Permission denied" if isinstance(error, PermissionError) else str(error)
        reason = next((reason for part, reason in REASONS if part in text), f"cannot be opened: {text}")
        raise FileError(f"{label}: {reason}") from None
    if file.id.get_intent() != h5py.h5f.ACC_RDONLY:  # HDF5 shares files that this process already has open
        file.close()
        raise FileError(f"{label} is open for writing (or for SWMR) in this process: close it first")
    if mirror is not None:
        _through_python.add(file)
    return file


_through_python: weakref.WeakSet[h5py.File] = weakref.WeakSet()  # files that HDF5 reads by calling Python


@atexit.register
def _close_files() -> None:
    """Close the files that HDF5 reads by calling Python, because it would otherwise call Python after its exit."""
    for file in list(_through_python):
        file.close()


def descriptor_of(file: h5py.File) -> int:
    """Return the descriptor of an open file, which is valid while it is open."""
    mirror = local_copy_of(file.filename)
    return int(file.id.get_vfd_handle()) if mirror is None else mirror.descriptor


def address_of(item: h5py.HLObject) -> tuple[int, ...]:
    """Return the file number and the address of an object, which identify it under any of its names.

    ``h5o.get_info`` returns them too, but it also reads the chunk index, and crashes if that is damaged.
    """
    info = h5py.h5g.get_objinfo(item.id)
    return (*info.fileno, *info.objno)


def follow(start: Any, path: str) -> Any:
    """Open the object at a path below a group. Returns None unless all names on the path exist and are hard links.

    The objects are low-level objects of h5py, such as `h5py.h5g.GroupID`, which are three times as fast as the others.
    """
    item = start
    for part in path.strip("/").encode().split(b"/"):
        try:
            if not isinstance(item, h5py.h5g.GroupID) or item.links.get_info(part).type != h5py.h5l.TYPE_HARD:
                return None
        except (KeyError, RuntimeError):  # no such name
            return None
        item = h5py.h5o.open(item, part)
    return item


def same_file(item: h5py.HLObject, other: h5py.HLObject) -> bool:
    """Return whether two objects are in the same file."""
    return bool(h5py.h5g.get_objinfo(item.id).fileno == h5py.h5g.get_objinfo(other.id).fileno)
