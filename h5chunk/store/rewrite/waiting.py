"""A file without a name, for what does not fit in memory: the system takes it back however the process ends."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np

from h5chunk.errors import OutputError, printable
from h5chunk.store.read.ranges import read_bytes
from h5chunk.store.write.newfile import write_at


class WaitingFile:
    """Context manager around a file of bytes, in a folder but without a name there.

    Attributes
    ----------
    descriptor, offset : int
        Of the file, and where the bytes begin in it.

    Raises
    ------
    OutputError
        The folder is not writable or, from `write`, the disk is full.
    """

    offset = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".h5chunk-", buffering=0)
        except OSError as error:
            raise OutputError(f"{printable(folder)}: no temporary file can be made: {error.strerror}") from None
        self.descriptor = self._file.fileno()

    def __enter__(self) -> WaitingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, offset: int, data: np.ndarray) -> None:
        """Put bytes at an offset."""
        try:
            write_at(self.descriptor, data.reshape(-1).data, offset)
        except OSError as error:
            where = printable(self._folder)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OutputError(
                    f"{where}: the disk is full at byte {offset} of a temporary file: "
                    "free some, give more memory, or write elsewhere"
                ) from None
            raise OutputError(f"{where}: a temporary file cannot be written: {error.strerror}") from None

    def read(self, offset: int, out: np.ndarray) -> None:
        """Fill ``out`` with the bytes from an offset on."""
        read_bytes(
            self.descriptor, offset, out.reshape(-1).data, lambda _: f"{printable(self._folder)}: temporary file"
        )
