"""A folder of files that appears under its name only when it is complete and on disk.

As `h5chunk.store.write.newfile` does it with a file: until then it is ``.NAME.h5chunk-part`` beside its place, locked,
and what stood under the name stays as it was until the new folder takes its place in one step (in two, where the file
system cannot exchange folders: between them the old one is ``.NAME.h5chunk-old``). Only a folder of shards is ever
replaced: whatever else stands there is somebody's work. A journal beside it says what a killed one had done.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from h5chunk.errors import OutputError, printable
from h5chunk.store.write.command_id import save_command_id
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.partfile import (
    check_name,
    check_parent,
    is_kept,
    is_open,
    journal_path,
    lock,
    part_path,
    sync_folder,
)

SHARD = re.compile(r".+-\d{5}-of-\d{5}\.h5")
EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2, and RENAME_SWAP of macOS' renamex_np
AT_FDCWD = -100


def shard_name(name: str, number: int, count: int) -> str:
    """The name of a shard's file.

    >>> shard_name("photos", 3, 12)
    'photos-00003-of-00012.h5'
    """
    return f"{name}-{number:05}-of-{count:05}.h5"


class NewFolder:
    """Context manager around the making of one folder of shards.

    Parameters
    ----------
    path : path
        Where the folder shall appear.
    overwrite : bool
        Whether a folder of shards that stands there may be replaced.

    Attributes
    ----------
    part : Path
        Where files are to be written until then.
    journal : Journal
        Of what was done in all of them; it goes when the folder is complete.
    command_id : str or None
        Identity of the command that makes the folder, for those who know it; it is kept with the complete folder.
    kept : bool
        Whether part and journal were kept, as an error or Ctrl-C came after work that need not be done again.

    Raises
    ------
    OutputError
        Something stands there, another process is writing it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self._path = Path(os.path.realpath(path))  # a link stays a link
        self._overwrite = overwrite
        self.part = part_path(self._path)
        self.journal = Journal(journal_path(self._path))
        self.command_id: str | None = None
        self.kept = False

    def __enter__(self) -> NewFolder:
        check_folder(self._path, self._overwrite)
        self._descriptor = self._lock()
        try:
            check_folder(self._path, self._overwrite)  # who had the lock may have made it
        except OutputError:
            with suppress(OSError):  # it holds what a killed writer left
                self.part.rmdir()
            os.close(self._descriptor)
            raise
        return self

    def open_journal(self, key: str) -> None:
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
        """Let a file that was finished be a part file again, so that it can be looked at and continued."""
        file = self.part / name
        if file.exists():
            file.replace(part_path(file))

    def _lock(self) -> int:
        shown = printable(self._path)
        while True:
            try:
                self.part.mkdir(exist_ok=True)
            except FileExistsError:
                raise OutputError(
                    f"{shown}: a file of that name is not finished: finish that, or remove {printable(self.part)}"
                ) from None
            except OSError as error:
                raise OutputError(f"{shown}: cannot be written: {error.strerror}") from None
            try:
                descriptor = os.open(self.part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # another writer just finished
            except OSError as error:
                raise OutputError(f"{shown}: cannot be written: {error.strerror}") from None
            lock(descriptor, shown)
            if is_open(descriptor, self.part):
                return descriptor
            os.close(descriptor)

    def commit(self) -> None:
        """Put the folder under its name; its files are on disk already."""
        try:
            check_folder(self._path, self._overwrite)  # what may have appeared meanwhile
        except OutputError:
            self._remove()  # the same command would not continue it
            raise
        try:
            os.fsync(self._descriptor)
            if self.command_id is not None:
                save_command_id(self.part, self.command_id)
            self.journal.remove()  # while the name of the part folder, and with it the lock, is ours
            if not self._path.exists() or not any(self._path.iterdir()):
                self.part.rename(self._path)
            else:
                self._replace()
            sync_folder(self._path.parent)
        except OSError as error:
            raise OutputError(f"{printable(self._path)}: cannot be put on disk: {error.strerror}") from None

    def _replace(self) -> None:
        """Change places with the old folder, which is removed then; locked, as it has the name of ours meanwhile."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if is_open(self._descriptor, self.part):
                self.kept = is_kept(self.journal, error)
                self.journal.close() if self.kept else self._remove()
        finally:
            os.close(self._descriptor)

    def _remove(self) -> None:
        self.journal.remove()
        shutil.rmtree(self.part)


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
    """Let two folders change their names in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        return libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], EXCHANGE) == 0
    if hasattr(libc, "renamex_np"):
        return libc.renamex_np(*names, EXCHANGE) == 0
    return False
