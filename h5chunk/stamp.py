"""Compute stamps of files, which show whether a file was changed or replaced."""

from __future__ import annotations

import os

_kept: dict[tuple[int, int], tuple[int, ...]] = {}  # by device and inode


def keep_stamp(path: str | os.PathLike[str]) -> None:
    """Leave the modification time out of the stamp of a local copy, which is still being written while it is read."""
    status = os.stat(path)
    file = status.st_dev, status.st_ino
    _kept[file] = (*file, status.st_size, 0)


def stamp_of(file: str | os.PathLike[str] | int | os.stat_result, *, with_ctime: bool = False) -> tuple[int, ...]:
    """Return the stamp of a file: device, inode, size in bytes and modification time in nanoseconds.

    It is empty if the file does not exist. ``with_ctime`` adds the time of the last change of the inode: programs
    cannot set it, but it also changes with the name, permissions and links of the file.
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
