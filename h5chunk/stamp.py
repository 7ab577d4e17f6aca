"""Compute stamps of files, which show whether a file was changed or replaced."""

from __future__ import annotations

import os

_kept: dict[tuple[int, int], tuple[int, ...]] = {}  # stamps of local copies, by device and inode

DOWNLOADS = ".h5chunk-source"  # suffix of hidden folders of downloads; their files' times encode URL and version


def keep_stamp(path: str | os.PathLike[str], version: int) -> None:
    """Let `stamp_of` return ``version`` instead of the modification time of a local copy.

    A local copy is written while it is read, so its modification time changes although its content does not.
    """
    status = os.stat(path)
    file = status.st_dev, status.st_ino
    _kept[file] = (*file, status.st_size, version)


def stamp_of(file: str | os.PathLike[str] | int | os.stat_result, *, with_ctime: bool = False) -> tuple[int, ...]:
    """Return the stamp of a file: device, inode, size in bytes and modification time in nanoseconds.

    The stamp is empty if the file does not exist. ``with_ctime`` adds the time of the last change of the inode:
    programs cannot set this time, but it also changes with the name, permissions and links of the file.
    """
    if not isinstance(file, os.stat_result):
        try:
            file = os.stat(file)
        except (OSError, ValueError):
            return ()
    if _kept and (kept := _kept.get((file.st_dev, file.st_ino))) and kept[2] == file.st_size:
        return kept
    stamp = file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns
    return (*stamp, file.st_ctime_ns) if with_ctime else stamp


def source_stamp(path: str | bytes | os.PathLike[str]) -> tuple[int, ...]:
    """Return a stamp that identifies the content of a file; downloading the same object again gives the same stamp.

    Its last items are the size in bytes, the modification time and, for files that were not downloaded, the time of the
    last change of the inode (both in nanoseconds). Raises OSError if the file does not exist.
    """
    status = os.stat(path)
    if f"{DOWNLOADS}{os.sep}" in os.fsdecode(path):
        return status.st_size, status.st_mtime_ns
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
