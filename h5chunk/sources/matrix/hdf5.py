"""Read groups and datasets of untrusted HDF5 files safely, for sources of matrices.

Links to other files are refused, and shapes must be in proportion to the stored bytes (`h5chunk.store.hdf5.guard`).
Chunks, and strings of variable length, are decoded without the HDF5 library if possible. A decoded chunk must have the
expected length. Strings become fixed-length bytes. Sizes are checked against the memory limit before memory is
allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, SourceError, human_bytes, printable
from h5chunk.sources.kinds import DEFAULT_MEMORY_BYTES
from h5chunk.sources.matrix.block import MemoryLimit, RegularFile
from h5chunk.store.hdf5.child import in_child, limited_memory, try_files
from h5chunk.store.hdf5.chunk_table import NotDirect, count_unwritten, is_stored_as
from h5chunk.store.hdf5.encodings import read_encoding
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import descriptor_of, opened
from h5chunk.store.hdf5.strings import MAX_STRING_BYTES, POINTER, FileBytes, read_strings, read_words
from h5chunk.store.read.raw import RawValues

CHUNK_COPIES = 2  # copies of a chunk in memory while it is decoded
CHUNK_ENTRY_BYTES = 64  # bytes of memory per chunk in the chunk table, while it is sorted
STRING_BYTES = 64  # bytes of memory for a short string that HDF5 reads, as a Python object
REMEDY = "or copy it into this file with h5py"


class GuardedFile(RegularFile):
    """An untrusted HDF5 file, with a limit on the memory for its chunks and for data that is kept."""

    def __init__(self, path: str | os.PathLike[str], memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        super().__init__(path)
        self.memory = MemoryLimit(self.path, memory_bytes)
        self.guard = Guard(self.path, remedy=REMEDY)
        try:  # HDF5 may crash when it opens the objects of a damaged file, and is left to crash in another process
            try_files([Path(self.path)], _touch, purpose="matrix")
        except FileError as error:
            raise SourceError(str(error)) from None

    def touch(self) -> None:
        """Open all objects that a reader of a matrix may open, as it does."""
        with self.open() as root:
            groups = [root]
            while groups:
                group = groups.pop()
                for name in (name for name in group.names() if name != "uns"):
                    with suppress(SourceError, FileError):
                        if group.is_group(name):
                            groups.append(group.group(name))
                        else:
                            group.dataset(name, group.num_dimensions(name)).encoding()
                with suppress(SourceError, FileError):
                    group.encoding(), group.words("_index"), group.words("column-order"), group.numbers("shape")

    @contextmanager
    def open(self) -> Iterator[GuardedGroup]:
        """Open the root group in a context, which converts each FileError to a SourceError."""
        try:
            with opened(self.path) as file:
                self.check_unchanged(descriptor_of(file))
                yield GuardedGroup(self, file["/"], "")
                self.check_unchanged(descriptor_of(file))
        except FileError as error:
            raise SourceError(str(error)) from error.__cause__


def _touch(path: Path) -> None:
    GuardedFile(path).touch()


def _read_strings(path: Path, name: str) -> list[bytes]:
    with limited_memory(path), opened(path) as file:
        words: list[bytes] = file[name][()].tolist()
    return words


class GuardedGroup:
    """A group of an untrusted file, whose members must be hard links."""

    def __init__(self, owner: GuardedFile, group: h5py.Group, path: str) -> None:
        self.owner, self.path, self._group = owner, path, group

    def __contains__(self, name: str) -> bool:
        return name in self._group

    def names(self) -> list[str]:
        return list(self._group)

    def words(self, name: str) -> list[str]:
        """Read an attribute with one or several strings; return an empty list if it does not exist."""
        return read_words(self._group, name, self.error)

    def word(self, name: str) -> str:
        """Read an attribute with one string; return an empty string if it does not exist."""
        words = self.words(name)
        return words[0] if len(words) == 1 else ""

    def encoding(self) -> str:
        """Return AnnData's encoding of the group; an empty string if it has none. Raises SourceError if unsupported."""
        return read_encoding(self._group, self.error)

    def numbers(self, name: str) -> np.ndarray | None:
        """Read an attribute with integers; return None if it does not exist."""
        if name not in self._group.attrs:
            return None
        kind = h5py.h5a.open(self._group.id, name.encode()).get_type()
        if not isinstance(kind, h5py.h5t.TypeIntegerID):
            raise self.error(f"its attribute {name!r} must be whole numbers")
        return np.asarray(self._group.attrs[name])

    def error(self, problem: str, name: str = "") -> SourceError:
        """Return an error that names the file, and the group or its member ``name``."""
        where = self._place(name)
        return self.owner.error(f"{where}: {problem}" if where else problem)

    def _place(self, name: str) -> str:
        return f"{self.path}/{name}".strip("/")

    def _member(self, name: str) -> h5py.Group | h5py.Dataset:
        member = self.owner.guard.find(self._group.file, self._place(name))
        if member is None:
            raise self.error(f"has no {name!r}: it has {', '.join(self.names()[:20]) or 'nothing'}")
        return member

    def is_group(self, name: str) -> bool:
        return isinstance(self._member(name), h5py.Group)

    def group(self, name: str) -> GuardedGroup:
        member = self._member(name)
        if not isinstance(member, h5py.Group):
            raise self.error("must be a group", name)
        return GuardedGroup(self.owner, member, self._place(name))

    def num_dimensions(self, name: str) -> int:
        """Return the number of dimensions of a dataset."""
        return len(self._member(name).shape or ())

    def dataset(self, name: str, num_dimensions: int = 1) -> GuardedDataset:
        """Open a dataset in the group. Raises SourceError unless its number of dimensions, size and type are valid."""
        member = self._member(name)
        if not isinstance(member, h5py.Dataset):
            raise self.error("must be a dataset", name)
        self.owner.guard.check_field(member, self._place(name))
        if member.shape is None or len(member.shape) != num_dimensions:
            raise self.error(f"has the shape {member.shape} but must have {num_dimensions} dimensions", name)
        return GuardedDataset(member, self.owner, self._place(name))


class GuardedDataset:
    """A dataset of numbers or strings, read chunk by chunk. With one dimension, it is a `compressed.Vector`."""

    def __init__(self, dataset: h5py.Dataset, owner: GuardedFile, where: str) -> None:
        self.name = f"{printable(owner.path)}: {where}"
        self.memory, self.where = owner.memory, where
        self._dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape
        self.length = self.shape[0]
        self.chunks: tuple[int, ...] | None = dataset.chunks
        self.is_text, self.dtype = self._find_type()
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.stored_bytes = dataset.id.get_storage_size()
        if self.num_bytes and count_unwritten(dataset):
            raise self.error(f"{count_unwritten(dataset)} of its chunks were never written: the file is incomplete")
        self._values = self._open_values() if self.num_bytes else None
        self._at = 0

    @property
    def is_strings(self) -> bool:
        return self.is_text or self.dtype.kind == "S"

    def error(self, problem: str) -> SourceError:
        return SourceError(f"{self.name}: {problem}")

    def encoding(self) -> str:
        """Return AnnData's encoding of the dataset, as `GuardedGroup.encoding` does."""
        return read_encoding(self._dataset, self.error)

    def _find_type(self) -> tuple[bool, np.dtype]:
        kind = self._dataset.id.get_type()
        if isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str():
            if self._dataset.file.id.get_create_plist().get_sizes()[0] != 8:
                raise self.error("its strings do not have addresses of 8 bytes: rewrite the file (h5repack)")
            return True, POINTER
        try:
            dtype = self._dataset.dtype
        except (TypeError, ValueError) as error:
            raise self.error(f"has an unsupported type: {error}") from None
        if dtype.names and self._is_plain_table(dtype):
            return False, dtype
        if dtype.kind not in "biufcS" or not dtype.itemsize:
            raise self.error(f"has the type {dtype} but only numbers and strings are supported")
        if dtype.kind in "biufc" and not is_stored_as(self._dataset, dtype):
            raise self.error("has numbers of unusual precision or bit offset: convert its type")
        return False, dtype

    def _is_plain_table(self, dtype: np.dtype) -> bool:
        """Return whether all members of a compound dtype have a fixed size, and the memory layout of NumPy."""
        kinds = {dtype[name].kind for name in dtype.names or ()}
        same = self._dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))
        return kinds <= {*"biufS"} and bool(same)

    def _open_values(self) -> RawValues | None:
        """Return the stored values, or None for strings of variable length that only HDF5 can read."""
        if self.chunks is not None:
            count = math.prod(-(-length // size) for length, size in zip(self.shape, self.chunks, strict=True))
            chunk_bytes = math.prod(self.chunks) * self.dtype.itemsize
            self.memory.check(f"{count:,} chunks of {self.where}", count * CHUNK_ENTRY_BYTES)
            self.memory.check(f"chunks of {human_bytes(chunk_bytes)} of {self.where}", chunk_bytes * CHUNK_COPIES)
        try:
            return RawValues(self._dataset, len(self.shape))
        except NotDirect:
            if self.chunks is None:
                raise self.error("its strings are in an unsupported layout: rewrite the file (h5repack)") from None
            return None

    @property
    def consumed_bytes(self) -> int:
        """Number of bytes of the file read so far."""
        return self.stored_bytes * self._at // max(1, self.length)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the values from ``start`` up to ``stop``, excluded, of a dataset with one dimension."""
        self._at = stop
        return self._read((start,), (stop,))

    def _read(self, low: tuple[int, ...], high: tuple[int, ...]) -> np.ndarray:
        """Read a box of values, from the indices ``low`` up to ``high``, excluded."""
        values = np.empty([end - start for start, end in zip(low, high, strict=True)], self.dtype)
        if values.size:
            assert self._values is not None
            self._values.read(low, high, values)
        return values

    def names(self, axis: str, length: int) -> np.ndarray:
        """Read strings, one per row or column, and count them as kept memory: (length,) ``S``, UTF-8.

        Raises SourceError unless the dataset has ``length`` strings. Messages call them ``axis``, such as barcodes.
        """
        if self.length != length:
            raise self.error(f"has {self.length} names but the matrix has {length} {axis}")
        return self.keep(self.strings(), axis)

    def keep(self, values: np.ndarray, noun: str) -> np.ndarray:
        """Count the memory of an array that is kept, and of a permuted copy of it, against the limit; return the array.

        The message of the SourceError for too much memory calls the values ``noun``.
        """
        self.memory.keep(f"{len(values):,} {noun}", 2 * values.nbytes)
        return values

    def all(self) -> np.ndarray:
        """Read all values of a dataset with one dimension, if they fit in memory."""
        self.memory.check(f"{self.length:,} values of {self.where}", self.num_bytes)
        return self.read(0, self.length)

    def strings(self) -> np.ndarray:
        """Read strings of fixed or variable length as fixed-length bytes: (length,) ``S``, UTF-8."""
        if self.is_text and (self._values is not None or not self.num_bytes):
            pointers = self.all()
            width = min(int(pointers["length"].max(initial=0)), MAX_STRING_BYTES)
            self.memory.check(f"{self.length:,} strings of up to {width} bytes in {self.where}", self.length * width)
            return read_strings(FileBytes.of(self._dataset.file, self.error), pointers)
        if self.is_text:
            return self._strings_by_hdf5()
        if self.dtype.kind != "S":
            raise self.error(f"has the type {self.dtype} but must contain strings")
        self._refuse_long(self.dtype.itemsize, 16 * MAX_STRING_BYTES)
        words = self.all()
        return self._narrowed(words, int(np.char.str_len(words).max(initial=0)))

    def _narrowed(self, words: Any, width: int) -> np.ndarray:
        self._refuse_long(width, MAX_STRING_BYTES)
        return np.asarray(words, f"S{max(1, width)}")

    def _refuse_long(self, width: int, max_bytes: int) -> None:
        if width > max_bytes:
            raise self.error(f"has strings of {width} bytes but the limit is {MAX_STRING_BYTES}")

    def _strings_by_hdf5(self) -> np.ndarray:
        """Read strings with HDF5, in a child process, because HDF5 may hang on damaged strings."""
        self.memory.check(f"{self.length:,} strings in {self.where}", self.length * STRING_BYTES)

        path = Path(self._dataset.file.filename)
        words = in_child(path, _read_strings, path, self._dataset.name)
        return self._narrowed(words, max(map(len, words)))

    def parts(
        self, max_bytes: int, range_of: Callable[[int], tuple[int, int]]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first row, first column, values) of the blocks that cover a dataset with two dimensions.

        Blocks are chunks; those of a dataset without chunks take at most ``max_bytes``. ``range_of`` is called with the
        number of rows of blocks, and returns the range, (first, end), of the rows of blocks to yield.
        """
        if not self.num_bytes:
            return
        num_rows, num_columns = self.shape
        cells = max(1, max_bytes // self.dtype.itemsize)
        block = max(1, cells // num_columns), min(cells, num_columns)  # one of the two is the whole axis
        rows, columns = self._dataset.chunks or block
        for row in range(0, num_rows, rows)[slice(*range_of(-(-num_rows // rows)))]:
            self._at = min(num_rows, row + rows)
            for column in range(0, num_columns, columns):
                stop = min(num_columns, column + columns)
                yield row, column, self._read((row, column), (self._at, stop))
