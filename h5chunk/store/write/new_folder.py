"""A folder of files that appears under its name only when it is complete and on disk: see `h5chunk.store.write.output`.

It replaces another one in one step, or in two where the file system cannot exchange folders: between them the old one
is ``.NAME.h5chunk-old``. Only a folder of shards is ever replaced: whatever else stands there is somebody's work.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from h5chunk.errors import OutputError, printable
from h5chunk.store.write.output import Output
from h5chunk.store.write.part_file import check_name, check_parent, part_path

SHARD = re.compile(r".+-\d{5}-of-\d{5}\.h5")
EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2, and RENAME_SWAP of macOS' renamex_np
AT_FDCWD = -100


class NewFolder(Output):
    """Context manager around the making of one folder of shards; ``part`` is where its files are written."""

    def _check(self) -> None:
        check_folder(self._path, self._overwrite)

    def _check_place(self) -> None:
        self._check()  # what may have appeared meanwhile

    def _open_part(self) -> int | None:
        shown = printable(self._path)
        try:
            self.part.mkdir(exist_ok=True)
            return os.open(self.part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileExistsError:
            raise OutputError(
                f"{shown}: a file of that name is not finished: finish that, or remove {printable(self.part)}"
            ) from None
        except FileNotFoundError:
            if self._path.parent.is_dir():
                return None  # another writer just finished
            raise OutputError(f"{shown}: cannot be written: its folder is gone") from None
        except OSError as error:
            raise OutputError(f"{shown}: cannot be written: {error.strerror}") from None

    def _remove_empty(self) -> None:
        with suppress(OSError):  # it holds what a killed writer left
            self.part.rmdir()

    def _remove_part(self) -> None:
        shutil.rmtree(self.part)

    def open_journal(self, key: str | None) -> None:
        """Open the journal; without records of that key, the files that a killed writer left are removed.

        Raises
        ------
        OutputError
            They cannot be.
        """
        self.journal.open(key)
        if self.journal.records:
            return
        try:
            _remove_files(self.part)
        except OSError as error:
            raise OutputError(f"{printable(self.part)}: cannot be emptied: {error.strerror}: remove it") from None

    def reopen(self, name: str) -> None:
        """Turn a finished file into a part file again, so that it can be checked and continued."""
        file = self.part / name
        if file.exists():
            file.replace(part_path(file))

    def _take_place(self) -> None:
        if not self._path.exists() or not any(self._path.iterdir()):
            self.part.rename(self._path)
        else:
            self._replace()

    def _replace(self) -> None:
        """Exchange names with the old folder, and remove that; locked, as it has the name of the part meanwhile."""
        old, descriptor = self.part, os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _exchange(self.part, self._path):  # a file system that cannot: two steps
                old = self.part.with_name(f".{self._path.name}.h5chunk-old")
                self._path.rename(old)
                self.part.rename(self._path)
            _remove_files(old)
            old.rmdir()
        finally:
            os.close(descriptor)


def check_folder(path: Path, overwrite: bool) -> None:
    """Raise OutputError unless a folder of shards can be made at ``path``."""
    shown = printable(path)
    check_name(path)
    if os.path.lexists(path) and not path.is_dir():
        raise OutputError(f"{shown}: is a file, and shards make a folder: give another name, or remove it")
    there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    others = [name for name in there if not SHARD.fullmatch(name)]
    if others:
        raise OutputError(
            f"{shown}: is a folder with more than shards in it, such as {printable(others[0])}: give the name of a "
            "new one"
        )
    if there and not overwrite:
        raise OutputError(f"{shown}: exists: use --overwrite (overwrite=True) to replace it")
    check_parent(path)


def _remove_files(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        return libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], EXCHANGE) == 0
    if hasattr(libc, "renamex_np"):
        return libc.renamex_np(*names, EXCHANGE) == 0
    return False
