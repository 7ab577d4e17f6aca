"""An output that appears under its name only when it is complete and on disk, as `NewFile` and `NewFolder` make it.

Until then it is written beside its place, as ``.NAME.h5chunk-part``, which is locked: a second writer of the same
output gets a message. What stood under the name stays as it was until the new one takes its place in one step. A writer
that is killed leaves the part, which the next one takes over: to continue it, if there is a journal of what was done
(`h5chunk.store.write.journal`), ``.NAME.h5chunk-journal``.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from h5chunk.errors import OptionError, OutputError, SampleError, SourceError, printable
from h5chunk.store.write.command_id import save_command_id
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.part_file import is_open, journal_path, lock, part_path, sync_folder

OPENINGS = 1000  # of a part that other writers finish each time before we lock it
_Output = TypeVar("_Output", bound="Output")


class Output(ABC):
    """Context manager around the making of an output.

    Parameters
    ----------
    path : path
        Where it shall appear.
    overwrite : bool
        Whether what stands there may be replaced.
    journal : Journal, optional
        That of a folder of files, this one among them: it stays when this one is complete.

    Attributes
    ----------
    part : Path
        Where it is written until it is complete.
    journal : Journal
        Of what was done, for those who open it; it goes when the output is complete.
    command_id : str or None
        Identity of the command that makes the output, for those who know it; it is kept with the complete output.
    kept : bool
        Whether part and journal were kept, as an error or Ctrl-C came after work that need not be done again.

    Raises
    ------
    OutputError
        Something stands there, another process is writing it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, journal: Journal | None = None) -> None:
        self._path = Path(os.path.realpath(path))  # a link stays a link
        self._overwrite = overwrite
        self.part = part_path(self._path)
        self._has_own_journal = journal is None
        self.journal = journal or Journal(journal_path(self._path))
        self.command_id: str | None = None
        self.kept = False

    @abstractmethod
    def _check(self) -> None:
        """Raise OutputError unless the output can be made."""

    @abstractmethod
    def _check_place(self) -> None:
        """Raise OutputError unless the output can still take its place."""

    @abstractmethod
    def _open_part(self) -> int | None:
        """Open or make the part; None if another writer just moved it."""

    @abstractmethod
    def _remove_empty(self) -> None:
        """Remove the part if there is nothing in it."""

    @abstractmethod
    def _remove_part(self) -> None:
        """Remove the part and all that is in it."""

    @abstractmethod
    def _take_place(self) -> None:
        """Give the part the name of the output."""

    def __enter__(self: _Output) -> _Output:
        self._check()
        self._descriptor = self._lock()
        try:
            self._check()  # who had the lock may have made it
        except OutputError:
            self._remove_empty()
            os.close(self._descriptor)
            raise
        return self

    def _lock(self) -> int:
        for _ in range(OPENINGS):
            descriptor = self._open_part()
            if descriptor is None:
                continue
            lock(descriptor, printable(self._path))
            if is_open(descriptor, self.part):  # else it became the output between our opening and locking it
                return descriptor
            os.close(descriptor)
        raise OutputError(f"{printable(self._path)}: cannot be written: {os.strerror(errno.ENOENT)}")

    def commit(self) -> None:
        """Put the output on disk and under its name."""
        try:
            self._check_place()
        except OutputError:
            self._remove()  # the same command would not continue it
            raise
        try:
            os.fsync(self._descriptor)
            if self.command_id is not None:
                save_command_id(self.part, self.command_id)  # after which nothing changes the time of the output
            if self._has_own_journal:
                self.journal.remove()  # while the name of the part, and with it the lock, is ours
            self._take_place()
            sync_folder(self._path.parent)
        except OSError as error:
            raise OutputError(f"{printable(self._path)}: cannot be put on disk: {error.strerror}") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if is_open(self._descriptor, self.part):
                self.kept = self._is_worth_keeping(error)
                if not self.kept:
                    self._remove()
                elif self._has_own_journal:
                    self.journal.close()
        finally:
            os.close(self._descriptor)

    def _is_worth_keeping(self, error: BaseException | None) -> bool:
        """Whether, after an error, the same command would make the same of what was done."""
        if error is None or not self.journal.holds_work:
            return False
        return isinstance(error, SampleError) or not isinstance(error, (SourceError, OptionError))

    def _remove(self) -> None:
        """Remove the part, and the journal if it is of this output alone."""
        if self._has_own_journal:
            self.journal.remove()
        self._remove_part()
