"""Record which command made an output, so that a command that was killed at its very end finds its work done.

A writer that is killed right after its output got its name had no time to say so. The identity of its command lies with
the output then, in an extended attribute of the file system: it covers the options, and the size and times of all that
was read. Those have no place in the file, as equal sources make equal bytes. It also covers the size and time of the
output, so that it means nothing any more once somebody has written to that, nor in a copy.

Where the system or the file system has no such attributes, nothing is kept, and an output merely exists.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from h5chunk.store.write.journal import key_of

ATTRIBUTE = "user.h5chunk.command"


def save_command_id(output: Path, command_id: str) -> None:
    """Keep the identity of the command with its output, if the file system can."""
    with suppress(OSError, AttributeError):
        os.setxattr(output, ATTRIBUTE, _bound_to(output, command_id))


def has_command_id(output: Path) -> bool:
    """Whether some command's identity is kept with a file or folder."""
    return _read(output) is not None


def is_made_by(output: Path, command_id: str) -> bool:
    """Whether an output was made by this command and was not written to since."""
    kept = _read(output)
    try:
        return kept is not None and kept == _bound_to(output, command_id)
    except OSError:  # somebody removes it
        return False


def _read(output: Path) -> bytes | None:
    try:
        return os.getxattr(output, ATTRIBUTE)
    except (OSError, AttributeError, ValueError):
        return None


def _bound_to(output: Path, command_id: str) -> bytes:
    files = sorted(output.iterdir()) if output.is_dir() else [output]
    states = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
    names = [os.fsencode(file.name).hex() for file in files] if output.is_dir() else []
    return key_of([command_id, names, states]).encode()
