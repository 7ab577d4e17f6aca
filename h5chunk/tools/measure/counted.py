"""Count the reads that HDF5 makes, to compare them with the model of its chunk cache."""

from __future__ import annotations

from typing import IO, Any


class CountingFile:
    """A file object for ``h5py.File`` that records the offset and size of every read in ``reads``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: Any) -> int:
        self.reads.append((self._file.tell(), len(buffer)))
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
