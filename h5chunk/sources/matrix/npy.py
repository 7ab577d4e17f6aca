"""A dense matrix in a .npy, mapped into memory; its zeros are dropped. Nothing is unpickled.

Source: numpy.lib.format.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.compressed import check_finite, check_values_type, native
from h5chunk.sources.matrix.text import check_regular
from h5chunk.sources.recognise import NPY_MAGIC
from h5chunk.stamp import stamp_of

CELL_BYTES = 48  # of memory for one cell that is not zero, as int64 numbers and masks
MIN_CELLS = 1024
MAX_HEADER_BYTES = 1 << 16


def read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns lie together, and type of an array in .npy; leaves the file at its first value.

    Raises
    ------
    SourceError
        It is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # headers of Python 2 and the like
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise SourceError(f"{name}: version {version} of the .npy format is not read: save it again")
            size = file.read(2 * version[0])
            length = int.from_bytes(size, "little")
            if length > MAX_HEADER_BYTES:
                raise SourceError(f"{name}: claims a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_column, dtype = read(io.BytesIO(size + file.read(length)))
    except SourceError:
        raise
    except Exception as error:  # a header is Python's notation, and its parser has errors of many types
        raise SourceError(f"{name} is no .npy array: {(str(error).splitlines() or ['damaged'])[0]}") from None
    if any(length < 0 for length in shape):
        raise SourceError(f"{name} claims the shape {shape}: that cannot be")
    return shape, by_column, dtype


class NpySource(SparseSource):
    """A dense .npy of two dimensions; see `SparseSource`.

    Raises
    ------
    SourceError
        It is no such file, or its size does not fit its shape.
    """

    kind = "npy"
    shape: tuple[int, int]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(NPY_MAGIC)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stamp = check_regular(self.path)
        self.num_bytes = self._stamp[2]
        shown = printable(self.path)
        with open(self.path, "rb") as file:  # noqa: PTH123
            shape, self._by_column, self._dtype = read_header(file, shown)
            self._offset = file.tell()
        if self._dtype.hasobject:
            raise SourceError(f"{shown} holds Python objects, which are never unpickled: save plain numbers")
        check_values_type(shown, self._dtype)
        if len(shape) != 2:
            raise SourceError(f"{shown} has {len(shape)} dimensions but a matrix has two, rows and columns")
        self.shape = (shape[0], shape[1])
        claimed = self._offset + shape[0] * shape[1] * self._dtype.itemsize
        if claimed != self.num_bytes:
            raise SourceError(
                f"{shown} has {self.num_bytes} bytes but its shape {shape} needs {claimed}: it is cut short"
            )
        self.is_sorted_by_row = not self._by_column

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        num_rows, num_columns = self.shape
        num_cells = num_rows * num_columns
        if not num_cells:
            return
        at_once = max(MIN_CELLS, max_bytes // CELL_BYTES)
        for start in range(0, num_cells, at_once):
            part = self._cells(start, min(at_once, num_cells - start))
            places = np.flatnonzero(part)
            values = native(part[places])
            places += start
            if self._by_column:
                columns, rows = np.divmod(places, num_rows)
            else:
                rows, columns = np.divmod(places, num_columns)
            check_finite(printable(self.path), values, rows, columns)
            yield Block(rows, columns, values), self._offset + (start + len(part)) * self._dtype.itemsize

    def _cells(self, start: int, count: int) -> np.ndarray:
        """Some cells, as they are stored; not mapped into memory, as a file that gets shorter would end the process."""
        offset = self._offset + start * self._dtype.itemsize
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                cells = np.fromfile(file, self._dtype, count, offset=offset)
                if len(cells) == count and stamp_of(os.fstat(file.fileno())) == self._stamp:
                    return cells
        except OSError as error:
            raise SourceError(f"{printable(self.path)}: cannot be read: {error.strerror}") from None
        raise SourceError(f"{printable(self.path)}: changed while it was read")
