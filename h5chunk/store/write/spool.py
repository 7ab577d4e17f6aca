"""Keep temporary data in memory, or in an unnamed file, which the system removes when the process exits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from h5chunk.errors import OutputError, printable
from h5chunk.remote.pages import write_at
from h5chunk.store.hdf5.open import FULL_DISK
from h5chunk.store.hdf5.ranges import read_bytes


class TemporaryBytes:
    """An unnamed temporary file on the disk of a folder."""

    offset = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".h5chunk-", buffering=0)
        except OSError as error:
            raise OutputError(f"{printable(folder)}: a temporary file cannot be created: {error.strerror}") from None
        self.descriptor = self._file.fileno()

    def close(self) -> None:
        """Close and remove the file."""
        self._file.close()

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write the bytes of an array at an offset."""
        try:
            write_at(self.descriptor, data.reshape(-1).data, offset)
        except OSError as error:
            where = printable(self._folder)
            if error.errno in FULL_DISK:
                raise OutputError(
                    f"{where}: the disk is full after {offset} bytes of a temporary file: free some space, "
                    "increase the memory limit (--memory-bytes), or write elsewhere"
                ) from None
            raise OutputError(f"{where}: a temporary file cannot be written: {error.strerror}") from None

    def read(self, offset: int, out: np.ndarray) -> None:
        """Fill an array with the bytes at an offset."""
        read_bytes(
            self.descriptor, offset, out.reshape(-1).data, lambda _: f"{printable(self._folder)}: temporary file"
        )


class Spool:
    """A context manager that concatenates arrays in memory, or beyond ``memory_bytes`` in a temporary file."""

    def __init__(self, folder: Path, dtype: np.dtype, memory_bytes: int) -> None:
        self._folder = folder
        self.dtype = dtype
        self._memory_bytes = memory_bytes
        self._parts: list[np.ndarray] = []
        self._file: TemporaryBytes | None = None
        self.num_bytes = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts = []
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    def append(self, values: np.ndarray) -> None:
        """Add an array, which the caller must not change afterwards."""
        self._parts.append(values)
        self.num_bytes += values.nbytes
        if self._file is None and self.num_bytes <= self._memory_bytes:
            return
        if self._file is None:
            self._file = TemporaryBytes(self._folder)
        offset = self.num_bytes - sum(part.nbytes for part in self._parts)
        while self._parts:
            part = self._parts.pop(0)
            self._file.write(offset, part.view(np.uint8))
            offset += part.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return elements ``start`` to ``stop`` (excluded) of data in a temporary file, as a new array."""
        if self._file is None:
            raise ValueError("the data is in memory: use take()")
        values = np.empty(stop - start, self.dtype)
        self._file.read(start * self.dtype.itemsize, values.view(np.uint8))
        return values

    def take(self, num_elements: int) -> Iterator[np.ndarray]:
        """Yield all data once, in arrays of about ``num_elements``. The spool releases each array that it yields."""
        if self._file is None:
            self._parts.reverse()
            while self._parts:
                yield self._parts.pop()
            return
        for start in range(0, len(self), num_elements):
            yield self.read(start, min(start + num_elements, len(self)))
