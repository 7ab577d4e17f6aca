"""Store the columns of a table while it is read: numbers and strings in memory, vectors and images in a file."""

from __future__ import annotations

import tempfile
from array import array as number_array
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError, human_bytes, printable
from h5chunk.sources.arrow import byte_lengths, compute, has_type, pyarrow, to_fixed_bytes
from h5chunk.sources.container import read_at
from h5chunk.sources.samples import field_dtype
from h5chunk.store.hdf5.open import FULL_DISK

TEXTS = ("string", "large_string")
NUMBERS = ("integer", "floating", "boolean")
MAX_STRING_BYTES = 4096
MAX_CATEGORIES = 50


class _SpooledValues:
    """Values of any size in an unnamed temporary file in a folder, which forked processes share."""

    held_bytes = 0  # of memory, per row

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._ends = folder or Path(tempfile.gettempdir()), number_array("q", [0])
        try:
            self._file = tempfile.TemporaryFile(prefix=".h5chunk-", buffering=0, dir=folder)
        except OSError as error:
            raise self._error(f"a temporary file cannot be created: {error.strerror}") from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _error(self, problem: str) -> OutputError:
        return OutputError(f"{printable(self._folder)}: {problem}")

    def append(self, data: Any, count: int = 1) -> None:
        """Append ``count`` values of equal size, which are concatenated in ``data``."""
        view = memoryview(data).cast("B")
        start, size = self._ends[-1], len(view) // count
        self._ends.extend(range(start + size, start + len(view) + 1, size) if size else [start] * count)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise self._error(f"a temporary file cannot be written: {error.strerror}") from None
            raise self._error(
                f"the disk is full after {human_bytes(start)} of a temporary file, to which the images and vectors of "
                "a table are copied: free some space, or write the output to another disk"
            ) from None

    def value(self, index: int) -> Any:
        start, stop = self._ends[index : index + 2]
        return read_at(self._file.fileno(), start, stop - start)


class Vectors(_SpooledValues):
    """A column with lists of numbers, all of the same length and type."""

    dtype = np.dtype(np.uint8)
    length: int | None = None

    def add(self, array: Any) -> None:
        numbers = array.flatten()
        if numbers.null_count:
            raise ValueError("contains a list with a missing number")
        values = np.asarray(numbers.to_numpy(zero_copy_only=False))
        lengths, dtype = set(compute.list_value_length(array).to_pylist()), field_dtype("it", values.dtype)
        if self.length is None:
            self.length, self.dtype = min(lengths), dtype
        if lengths != {self.length}:
            other = max(lengths - {self.length})
            raise ValueError(f"contains lists of different lengths ({self.length} and {other}), which must be padded")
        if not self.length:
            raise ValueError("contains empty lists")
        if dtype != self.dtype:
            raise ValueError(f"contains lists of different types ({self.dtype} and {dtype})")
        self.append(np.ascontiguousarray(values, dtype), len(array))

    def value(self, index: int) -> np.ndarray:
        return np.frombuffer(super().value(index), self.dtype)


class Images(_SpooledValues):
    """A column with encoded images."""

    def add(self, array: Any) -> None:
        for value in array:
            self.append(value.as_buffer() if value.is_valid else b"")  # a sample without an image is skipped


class Values:
    """A column of numbers or strings, in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.parts: list[np.ndarray] = []
        self.held_bytes = 0  # of memory, per row
        self.words: set[bytes] = set()  # distinct strings, until there are too many for categories

    def add(self, array: Any) -> None:
        if not has_type(array.type, *TEXTS):
            self._append(np.asarray(array.to_numpy(zero_copy_only=False)))
            return
        try:
            array.validate(full=True)
        except pyarrow.ArrowInvalid:
            raise ValueError("contains text that is not UTF-8") from None
        strings = array.cast(pyarrow.binary())
        longest = int(byte_lengths(strings).max(initial=0))
        if longest > MAX_STRING_BYTES:
            raise ValueError(f"contains a string of {longest} bytes, over the limit of {MAX_STRING_BYTES}")
        if len(self.words) <= MAX_CATEGORIES:
            self.words |= set(compute.unique(strings).to_pylist())
        self._append(to_fixed_bytes(strings))

    def _append(self, values: np.ndarray) -> None:
        self.parts.append(values)
        self.held_bytes = max(self.held_bytes, values.itemsize)


def storage_class(kind: Any) -> Any:
    """Return the class that stores a column of Arrow type ``kind``; None if the type is not supported."""
    if has_type(kind, *NUMBERS, *TEXTS):
        return Values
    if has_type(kind, "list", "large_list", "fixed_size_list") and has_type(kind.value_type, *NUMBERS):
        return Vectors
    is_image = has_type(kind, "struct") and kind.get_field_index("bytes") >= 0
    return Images if is_image or has_type(kind, "binary", "large_binary") else None
