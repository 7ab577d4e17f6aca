"""Bytes of one file copied into another.

By the kernel where it can: then a file system with reflinks lets both files share them.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from h5chunk.store.read.ranges import Where, read_bytes
from h5chunk.store.write.newfile import write_at

PIECE_BYTES = 8 << 20
NOT_HERE = (errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ETXTBSY)


def copy_range(
    source: int, source_offset: int, target: int, target_offset: int, num_bytes: int, where: Where = lambda _: "a file"
) -> None:
    """Copy a byte range between two descriptors.

    Parameters
    ----------
    source, source_offset, target, target_offset, num_bytes : int
    where : callable
        Names what lies at an offset of the source, for messages.

    Raises
    ------
    FileError
        The source ends before, or cannot be read.
    OSError
        The target cannot be written.
    """
    done = 0
    while done < num_bytes:
        moved = _in_kernel(source, source_offset + done, target, target_offset + done, num_bytes - done)
        if not moved:  # the kernel cannot, or the source ended, which reading tells
            break
        done += moved
    buffer = np.empty(min(PIECE_BYTES, num_bytes - done), np.uint8)
    while done < num_bytes:
        piece = buffer[: num_bytes - done].data
        read_bytes(source, source_offset + done, piece, where)
        write_at(target, piece, target_offset + done)
        done += len(piece)


def _in_kernel(source: int, source_offset: int, target: int, target_offset: int, num_bytes: int) -> int:
    """Bytes that were copied; 0 where that is not possible."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, target, num_bytes, source_offset, target_offset)
    except OSError as error:
        if error.errno in NOT_HERE:
            return 0
        raise
