"""What stands beside an output until that is complete: names, the lock, and whether it is worth keeping."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from h5chunk.errors import OptionError, OutputError, SampleError, SourceError
from h5chunk.store.journal import Journal

LOCK_WAIT_S = 0.5  # the workers of a writer that was just killed hold its lock until they have noticed


def part_path(path: Path) -> Path:
    """Where a file, or a folder, stands until it is complete."""
    return path.with_name(f".{path.name}.h5chunk-part")


def journal_path(path: Path) -> Path:
    """Where the journal of that is."""
    return path.with_name(f".{path.name}.h5chunk-journal")


def lock(descriptor: int, shown: str) -> None:
    """Lock what is open; close it and raise OutputError if another process has locked it, or it cannot be locked."""
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                raise OutputError(f"{shown}: another process is writing it: wait for that, or stop it") from None
            time.sleep(LOCK_WAIT_S / 10)
        except OSError as error:
            os.close(descriptor)
            raise OutputError(f"{shown}: cannot be locked: {error.strerror}: write to a local disk") from None


def is_kept(journal: Journal, error: BaseException | None) -> bool:
    """Whether what was done is worth keeping: after the error, the same command would not make something else."""
    if error is None or not journal.holds_work:
        return False
    return isinstance(error, SampleError) or not isinstance(error, (SourceError, OptionError))
