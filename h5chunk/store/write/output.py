"""Write an output, a file or a folder of shards, that gets its final name once it is complete and on disk.

Until then it is the part file (or part folder) ``.NAME.h5chunk-part`` in the same folder. The part is locked, so that a
second writer of the same output gets an error. An existing output is unchanged until the new one replaces it
atomically. A killed writer leaves its part. The next writer continues the part if there is a journal of finished work,
``.NAME.h5chunk-journal`` (`h5chunk.store.write.journal`), and otherwise starts over.
"""

from __future__ import annotations

import errno
import os
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from h5chunk.errors import OptionError, OutputError, SampleError, SourceError, printable
from h5chunk.sample_source import split_of
from h5chunk.store.read.files import NUMBERED
from h5chunk.store.write.journal import Journal, save_command_id
from h5chunk.store.write.part_file import check_name, check_parent, is_open, journal_path, lock, part_path, sync_folder

OPENINGS = 1000  # attempts to lock a part, in case other writers keep finishing it first
_Output = TypeVar("_Output", bound="Output")


class Output(ABC):
    """A context manager that writes an output. The path of the output is ``part`` until `commit` renames it.

    For a file in a folder of shards, pass the ``journal`` of the folder, which is then not removed.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, journal: Journal | None = None) -> None:
        self.path = Path(os.path.realpath(path))  # a symbolic link stays a link
        self._overwrite = overwrite
        self.part = part_path(self.path)
        self._has_own_journal = journal is None
        self.journal = journal or Journal(journal_path(self.path))
        self.command_id: str | None = None  # digest of the command, stored with the complete output
        self.kept = False  # whether the part and its journal were kept for the next run after an error or Ctrl-C

    @abstractmethod
    def _check(self) -> None:
        """Raise OutputError unless the output can be written."""

    @abstractmethod
    def _open_part(self) -> int | None:
        """Open or create the part, and return its descriptor, or None if another writer has just renamed the part."""

    @abstractmethod
    def _replace_output(self) -> None:
        """Give the part the name of the output."""

    def open_journal(self, key: str | None) -> None:
        self.journal.open(key)

    def __enter__(self: _Output) -> _Output:
        self._check()
        self.descriptor = self._lock()
        try:
            self._check()  # the previous holder of the lock may have written the output
        except OutputError:
            with suppress(OSError):  # raised if the folder has files of a killed writer
                if self.part.is_dir():
                    self.part.rmdir()
                elif not os.fstat(self.descriptor).st_size:
                    self.part.unlink()
            os.close(self.descriptor)
            raise
        return self

    def _lock(self) -> int:
        for _ in range(OPENINGS):
            descriptor = self._open_part()
            if descriptor is None:
                continue
            lock(descriptor, printable(self.path))
            if is_open(descriptor, self.part):  # otherwise another writer renamed it before it was locked
                return descriptor
            os.close(descriptor)
        raise OutputError(f"{printable(self.path)}: cannot be written: {os.strerror(errno.ENOENT)}")

    def commit(self) -> None:
        """Flush the output to disk, and give it its final name."""
        try:
            self._check()
        except OutputError:
            self._remove()  # a repeated command could not continue the part
            raise
        try:
            os.fsync(self.descriptor)
            if self.command_id is not None:
                save_command_id(self.part, self.command_id)  # after the last change of the modification time
            if self._has_own_journal:
                self.journal.remove()  # while this writer still holds the part's name and lock
            self._replace_output()
            sync_folder(self.path.parent)
        except OSError as error:
            raise OutputError(f"{printable(self.path)}: cannot be written to disk: {error.strerror}") from None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if is_open(self.descriptor, self.part):
                # SampleError is a SourceError, but the same command may succeed later
                is_final = isinstance(error, (SourceError, OptionError)) and not isinstance(error, SampleError)
                self.kept = error is not None and self.journal.holds_work and not is_final
                if not self.kept:
                    self._remove()
                elif self._has_own_journal:
                    self.journal.close()
        finally:
            os.close(self.descriptor)

    def _remove(self) -> None:
        """Remove the part, and the journal if it belongs only to this output."""
        if self._has_own_journal:
            self.journal.remove()
        if self.part.is_dir():
            shutil.rmtree(self.part)
        else:
            self.part.unlink()


class NewFolder(Output):
    """A context manager that writes a folder of shards. Write files to the folder ``part``, then call `commit`.

    An existing folder is replaced in two steps. Between them the old folder is ``.NAME.h5chunk-old``. Only folders of
    shards are replaced, because other folders may contain a user's work.
    """

    @property
    def work(self) -> Path:
        """Path of a folder for temporary files, which is removed with the part, or before the part is renamed."""
        return self.part.with_name(f"{self.part.name}-work")

    def _remove(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        super()._remove()

    def _check(self) -> None:
        check_folder(self.path, self._overwrite)

    def _open_part(self) -> int | None:
        label = printable(self.path)
        try:
            self.part.mkdir(exist_ok=True)
            return os.open(self.part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileExistsError:
            raise OutputError(
                f"{label}: an unfinished file has this name: repeat the command that wrote it, or remove "
                f"{printable(self.part)}"
            ) from None
        except FileNotFoundError:
            if self.path.parent.is_dir():
                return None  # another writer has just finished
            raise OutputError(f"{label}: cannot be written: its folder was removed") from None
        except OSError as error:
            raise OutputError(f"{label}: cannot be written: {error.strerror}") from None

    def open_journal(self, key: str | None) -> None:
        """Open the journal. If it has no records with this key, remove the files that a killed writer left."""
        super().open_journal(key)
        if not self.journal.records:
            shutil.rmtree(self.work, ignore_errors=True)
            try:
                _remove_files(self.part)
            except OSError as error:
                raise OutputError(
                    f"{printable(self.part)} cannot be cleared ({error.strerror}): remove the folder"
                ) from None

    def reopen(self, name: str) -> None:
        """Turn a finished file in the folder back into a part file, so that it can be verified and continued."""
        file = self.part / name
        if file.exists():
            file.replace(part_path(file))

    def _replace_output(self) -> None:
        """Rename the old folder, give its name to the new one, and remove the old one."""
        shutil.rmtree(self.work, ignore_errors=True)
        old = self.part.with_name(f".{self.path.name}.h5chunk-old")
        if self.path.exists() and any(self.path.iterdir()):
            shutil.rmtree(old, ignore_errors=True)  # a killed writer may have left it
            self.path.rename(old)
        self.part.rename(self.path)
        shutil.rmtree(old, ignore_errors=True)


def check_folder(path: Path, overwrite: bool) -> None:
    """Raise OutputError unless a folder of shards can be created at ``path``, or replaced if ``overwrite`` is set."""
    label = printable(path)
    check_name(path)
    if os.path.lexists(path) and not path.is_dir():
        raise OutputError(f"{label} is a file, but shards need a folder: use another name, or remove the file")
    existing = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    of_splits = {name for name in existing if name.endswith(".h5") and split_of(name.removesuffix(".h5"))[1]}
    others = [name for name in existing if not NUMBERED.fullmatch(name) and name not in of_splits]
    if others:
        raise OutputError(
            f"{label} is a folder with files that are not shards, such as {printable(others[0])}: use another name"
        )
    if existing and not overwrite:
        raise OutputError(f"{label} exists: use --overwrite (overwrite=True) to replace it")
    check_parent(path)


def _remove_files(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()
