"""Open HDF5 files for reading, and translate errors of HDF5 and the system into errors that name the file."""

from __future__ import annotations

import atexit
import errno
import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from h5chunk.errors import FileError, H5ChunkError, OutputError, printable
from h5chunk.remote.mirror_file import MirrorFile, fetched
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.lookalike import describe_lookalike
from h5chunk.urls import hint_for_url, is_cut_url, local_copy_of

# exceptions that h5py raises for damaged files
DAMAGES = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_HDF5 = "not an HDF5 file"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of locking where there are no locks
OTHER_DRIVER = "h5chunk-log"  # HDF5's driver "log", which reads like its default driver if it logs nothing
REFUSED_BY_2_0 = (
    "stored datatype size in chunk layout does not match",
    "stored chunk dimension encoding length does not match",
)
REASONS = (
    ("truncated", "the file is cut short (its header claims a larger size): copy or convert it again"),
    ("signature not found", NOT_HDF5),
    ("Permission denied", "no permission to read it"),
    *(
        (
            f"errno = {number},",
            "its file system has no locks: set the environment variable HDF5_USE_FILE_LOCKING=FALSE",
        )
        for number in NO_LOCKS
    ),
    ("unable to lock file", "the file is locked by another process that is writing to it: wait for that process"),
    (
        "already open for write",
        "a program is writing to the file, or did not close it: wait for that program, or, if it has ended, use HDF5's "
        "h5clear -s FILE",
    ),
)  # a part of HDF5's message for a file that cannot be opened, and the reason in h5chunk's message


@contextmanager
def translate_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of h5py within the context into FileErrors that name the file, or OutputErrors if a disk is full."""
    try:
        yield
    except H5ChunkError:
        raise
    except DAMAGES as error:
        reason = explained(error)
        if any(os.strerror(number) in reason for number in FULL_DISK):
            raise OutputError(f"{printable(path)}: a copy of this file cannot be written: {reason}") from None
        problem = "cannot be read" if is_refused(error) else "is damaged, or of an unknown kind"
        raise FileError(f"{printable(path)} {problem} (HDF5: {reason})") from error


@contextmanager
def errors_as(kind: type[FileError], message: str, *others: type[Exception]) -> Iterator[None]:
    """Turn errors of h5py, and errors of the types in ``others``, into a FileError that begins with ``message``."""
    damages: tuple[type[Exception], ...] = (*DAMAGES, *others)
    try:
        yield
    except FileError:
        raise
    except damages as error:
        raise kind(f"{message}: {explained(error)}") from None


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
        what = describe_lookalike(path) if Path(path).is_dir() else ""
        raise FileError(f"{label}: not a regular file{': ' if what else ''}{what}")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401  # HDF5 finds its filters from then on
    mirror = local_copy_of(path)
    try:
        file = _open_current(path, options) if mirror is None else h5py.File(MirrorFile(mirror), "r", **options)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{label}: {_why_not_opened(path, error)}") from None
    if mirror is not None:
        _through_python.add(file)
    return file


def _why_not_opened(path: str | os.PathLike[str], error: OSError) -> str:
    text = "Permission denied" if isinstance(error, PermissionError) else str(error)
    reason = next((reason for part, reason in REASONS if part in text), f"cannot be opened: {explained(error)}")
    what = describe_lookalike(path) if reason == NOT_HDF5 else ""
    return f"{reason}: {what}" if what else reason


def is_refused(error: Exception) -> bool:
    """Return whether this version of HDF5 refuses a dataset that other versions read."""
    return h5py.version.hdf5_version_tuple[:2] == (2, 0) and any(part in str(error) for part in REFUSED_BY_2_0)


def explained(error: Exception) -> str:
    """Return the message of an error of HDF5, with advice if a version of HDF5 refuses files that others read."""
    text = str(error) or type(error).__name__
    if is_refused(error):
        text += (
            f". HDF5 {h5py.version.hdf5_version}, in h5py {h5py.__version__}, refuses datasets of PureHDF and other "
            'writers that HDF5 1.14 reads: pip install "h5py<3.16"'
        )
    return text


def _open_current(path: str | os.PathLike[str], options: dict[str, Any]) -> h5py.File:
    """Open a local file so that HDF5 does not mix it with an older version that this process has open.

    HDF5 shares the cached metadata and chunks of all handles of a file, by device and inode and for each of its
    drivers. If the file was changed after another handle was opened, it is opened with another driver, which shares
    nothing with the first. Both read files in the same way.
    """
    for driver in (None, OTHER_DRIVER):
        with phil:  # no other thread opens the file between the opening and the count
            file = _open_unlocked(path, {**options, "driver": driver})
            if file.id.get_intent() != h5py.h5f.ACC_RDONLY:
                file.close()
                raise _is_written(path)
            stamp = stamp_of(file.id.get_vfd_handle())
            key = *stamp[:2], driver
            is_shared = h5py.h5f.get_obj_count(file.id, h5py.h5f.OBJ_FILE) > 1
            if not is_shared or _opened_stamps.get(key) == stamp:
                _opened_stamps[key] = stamp
                return file
            file.close()
    raise FileError(
        f"{printable(path)}: was overwritten while data sets of an older version of it are open in this process, from "
        "which HDF5 would return old values: close those (close() of the loader or data set), and open it again"
    )


def check_not_written(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Raise FileError if this process has one of the files open for writing, whose values may be only in memory."""
    with phil:
        files = h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
        written = {stamp_of(file.name)[:2] for file in files if file.get_intent() != h5py.h5f.ACC_RDONLY} - {()}
    for path in paths if written else ():
        if stamp_of(path)[:2] in written:
            raise _is_written(path)


def _is_written(path: str | os.PathLike[str]) -> FileError:
    return FileError(f"{printable(path)} is open for writing (or for SWMR) in this process: close it first")


def _open_unlocked(path: str | os.PathLike[str], options: dict[str, Any]) -> h5py.File:
    """Open a file, without a lock if its file system has no locks. Changes of a file are noticed without them."""
    try:
        return h5py.File(path, "r", **options)
    except OSError as error:
        if not any(f"errno = {number}," in str(error) for number in NO_LOCKS):
            raise
    return h5py.File(path, "r", **{**options, "locking": False})


# the stamp with which each file that this process may have open was opened, by device, inode and driver
_opened_stamps: dict[tuple[object, ...], tuple[int, ...]] = {}
h5py.register_driver(OTHER_DRIVER, lambda access: access.set_fapl_log(os.devnull.encode(), 0, 0))


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


@contextmanager
def fetched_objects(file: h5py.File, paths: Collection[str]) -> Iterator[None]:
    """Fetch the headers of the objects at paths of a remote file, which are held in a context.

    All objects of one level of groups are fetched together, because HDF5 reads them one after another. Paths that do
    not exist, or with other links than hard ones, are ignored. Nothing is done for a local file.
    """
    mirror = local_copy_of(file.filename)
    with ExitStack() as held:
        level: dict[tuple[str, ...], Any] = {}  # the objects of a level, by the names on their paths
        if mirror is not None:
            level = {(): h5py.h5g.open(file.id, b"/")}
        listed = [tuple(filter(None, path.split("/"))) for path in paths] if level else []
        for depth in range(1, max(map(len, listed), default=0) + 1):
            addresses: dict[tuple[str, ...], int] = {}
            for names in sorted({names[:depth] for names in listed if len(names) >= depth}):
                parent = level.get(names[:-1])
                with suppress(*DAMAGES):  # which are reported when the object is opened
                    if isinstance(parent, h5py.h5g.GroupID):
                        link = parent.links.get_info(names[-1].encode())
                        if link.type == h5py.h5l.TYPE_HARD:
                            addresses[names] = link.u
            held.enter_context(fetched(mirror, np.array([*addresses.values()], np.int64)))
            inner = {names[:depth] for names in listed if len(names) > depth}
            opened_below: dict[tuple[str, ...], Any] = {}
            for names in addresses:
                if names in inner:
                    with suppress(*DAMAGES):
                        opened_below[names] = h5py.h5o.open(level[names[:-1]], names[-1].encode())
            level = opened_below
        yield


def same_file(item: h5py.HLObject, other: h5py.HLObject) -> bool:
    """Return whether two objects are in the same file."""
    return bool(h5py.h5g.get_objinfo(item.id).fileno == h5py.h5g.get_objinfo(other.id).fileno)
