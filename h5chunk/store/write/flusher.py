"""A thread that sends what is written to the disk, while others compute."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from h5chunk.errors import OutputError, printable

FLUSH_INTERVAL_S = 0.5


class Flusher:
    """Sends dirty pages to the disk while others compute, so that the final fsync finds little left."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._error: OSError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._done.wait(FLUSH_INTERVAL_S):
                os.fdatasync(self._descriptor) if hasattr(os, "fdatasync") else os.fsync(self._descriptor)
        except OSError as error:  # the system tells it once: the final fsync would not see it
            self._error = error

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise OutputError(f"{printable(self._path)}: cannot be put on disk: {self._error.strerror}")
