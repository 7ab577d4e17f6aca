"""Files beside an output that its writers make: what else stands in their place is neither written nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from h5chunk.errors import OutputError, printable


def open_own(path: Path, shown: str) -> int:
    """Open, or make, one of them.

    Parameters
    ----------
    path : Path
    shown : str
        What is written, for messages.

    Raises
    ------
    OutputError
        It is a link, a pipe or the like, or it cannot be opened.
    IsADirectoryError
        It is a folder.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except IsADirectoryError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OutputError(f"{printable(path)}: is a link, which is not written through: remove it") from None
        raise OutputError(f"{shown}: cannot be written: {error.strerror}") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OutputError(f"{printable(path)}: is no regular file: remove it")


def remove_own(path: Path) -> None:
    """Remove such a file, if there is one; a folder of that name is not ours."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
