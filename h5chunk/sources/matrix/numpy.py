"""Read matrices in NumPy files: an .npz of ``scipy.sparse.save_npz``, or a dense .npy, whose zeros are dropped.

An .npz holds compressed rows, compressed columns or coordinates. Its members are read side by side as streams, so that
memory is bounded whatever sizes they claim. Source: scipy.sparse.save_npz.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.matrix.block import Block, RegularFile, SparseSource
from h5chunk.sources.matrix.compressed import check_values_type, check_vectors, dense_block, read_blocks
from h5chunk.sources.numpy_files import MAX_SMALL_BYTES, open_npz, read_header
from h5chunk.sources.recognise import NPY_MAGIC, has_suffix, zip_members

FREE_BYTES, MAX_LARGE_RATIO = 1 << 30, 256  # indices of more than FREE_BYTES never compress better than this ratio
CELL_BYTES = 48  # bytes of memory per nonzero cell: int64 numbers and masks
MIN_CELLS = 1024
MEMBERS = {"csr": ("indices", "indptr"), "csc": ("indices", "indptr"), "coo": ("row", "col")}


class NpzSource(SparseSource):
    """An .npz that scipy.sparse.save_npz wrote."""

    kind = "npz"
    shape: tuple[int, int]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        members = zip_members(source, head)
        names = {name.removesuffix(".npy") for name in members}
        if {"format", "shape"} <= names or {"data", *MEMBERS["csr"]} <= names:
            return True
        return {"data", "shape", *MEMBERS["coo"]} <= names or (not members and has_suffix(source, ".npz"))

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        self._file = RegularFile(path)
        self.path, self.num_bytes = self._file.path, self._file.num_bytes
        with self._open() as archive:
            for member in archive.infolist():
                packed, size = member.compress_size, member.file_size
                is_index = member.filename in ("indices.npy", "row.npy", "col.npy")
                if is_index and size > FREE_BYTES and size > MAX_LARGE_RATIO * packed:
                    raise self._file.error(
                        f"member {member.filename!r} unpacks to {size} bytes, {size // packed} times its compressed "
                        "size, which is implausible for indices: if the file is right, save it with compressed=False"
                    )
            self._layout = self._read_layout(archive)
            shape = self._small(archive, "shape")
            if shape.dtype.kind not in "iu" or shape.size != 2 or int(shape.min()) < 0:
                raise self._file.error(
                    f"member 'shape' is {shape.tolist()} but must be two numbers, those of rows and columns"
                )
            self.shape = int(shape[0]), int(shape[1])
            check_vectors(self._layout, self.shape, self._vectors(archive))

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        with open_npz(self.path) as archive:
            assert archive.fp is not None
            self._file.check_unchanged(archive.fp.fileno())
            yield archive
            self._file.check_unchanged(archive.fp.fileno())

    def _small(self, archive: zipfile.ZipFile, name: str) -> np.ndarray:
        if f"{name}.npy" not in archive.namelist():
            raise self._file.error(f"has no member {name!r}, so it is not a matrix of scipy.sparse.save_npz")
        member = _Member(self.path, archive, name)
        if member.num_bytes > MAX_SMALL_BYTES:
            raise self._file.error(f"member {name!r} has {member.num_bytes} bytes, over the limit of {MAX_SMALL_BYTES}")
        return member.read(0, member.length)

    def _read_layout(self, archive: zipfile.ZipFile) -> str:
        if "format.npy" not in archive.namelist():
            return self._guess_layout(archive)
        word = self._small(archive, "format")
        if word.dtype.kind not in "SU" or word.size != 1:
            raise self._file.error(f"member 'format' has the type {word.dtype} but must be a string")
        text = word.ravel()[0]
        name = text.decode("latin-1") if isinstance(text, bytes) else str(text)
        if name not in MEMBERS:
            raise self._file.error(f"format is {name!r} but must be csr, csc or coo: save it after .tocsr()")
        missing = [part for part in (*MEMBERS[name], "data") if f"{part}.npy" not in archive.namelist()]
        if missing:
            raise self._file.error(f"has no member {missing[0]!r}, which format {name} needs")
        return name

    def _guess_layout(self, archive: zipfile.ZipFile) -> str:
        """Return the layout of a matrix that np.savez saved without its format, by its shape."""
        if "indptr.npy" not in archive.namelist():
            return "coo"
        advice = "save the matrix with scipy.sparse.save_npz, which also saves its format and shape"
        if "shape.npy" not in archive.namelist():
            raise self._file.error(f"looks like a sparse matrix (CSR or CSC), but has no member 'shape': {advice}")
        shape = self._small(archive, "shape").ravel().tolist()
        num_pointers = _Member(self.path, archive, "indptr").length - 1
        if shape.count(num_pointers) != 1:
            raise self._file.error(
                f"looks like a sparse matrix, but has no member 'format', and its shape {shape} does not show whether "
                f"it is CSR or CSC: {advice}"
            )
        return "csr" if shape[0] == num_pointers else "csc"

    def _vectors(self, archive: zipfile.ZipFile) -> list[_Member]:
        """Open the members with the matrix: data, indices and indptr; or data, rows and columns."""
        return [_Member(self.path, archive, name) for name in ("data", *MEMBERS[self._layout])]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        with self._open() as archive:
            yield from read_blocks(self._layout, self.shape, self._vectors(archive), max_bytes)


class _Member:
    """A `compressed.Vector` in a zip, read as a stream; zipfile checks its checksum at the end."""

    def __init__(self, path: str, archive: zipfile.ZipFile, name: str) -> None:
        self.name = f"{printable(path)}: {name}"
        self._file: IO[bytes] = archive.open(f"{name}.npy")
        shape, _, self.dtype = read_header(self._file, self.name)
        if len(shape) > 1:
            raise SourceError(f"{self.name} has {len(shape)} dimensions but must have one")
        self.length = shape[0] if shape else 1
        self.num_bytes = self.length * self.dtype.itemsize
        info = archive.getinfo(f"{name}.npy")
        num_stored = info.file_size - self._file.tell()
        if num_stored != self.num_bytes:
            raise SourceError(f"{self.name} claims {self.num_bytes} bytes but the archive has {num_stored}")
        self._packed_bytes = info.compress_size
        self._at = 0

    @property
    def consumed_bytes(self) -> int:
        return self._packed_bytes * self._at // max(1, self.length)

    def read(self, start: int, stop: int) -> np.ndarray:
        if start != self._at:
            raise AssertionError("members are read in order")
        data = self._file.read((stop - start) * self.dtype.itemsize)
        if len(data) != (stop - start) * self.dtype.itemsize:
            raise SourceError(f"{self.name} ends early: the file is damaged")
        self._at = stop
        return np.frombuffer(data, self.dtype)


class NpySource(SparseSource):
    """A dense .npy with two dimensions."""

    kind = "npy"
    has_parts = True
    shape: tuple[int, int]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(NPY_MAGIC)

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        self._file = RegularFile(path)
        self.path, self.num_bytes = self._file.path, self._file.num_bytes
        label = printable(self.path)
        with self._file.reading() as file:
            shape, self._by_column, self._dtype = read_header(file, label)
            self._offset = file.tell()
        check_values_type(label, self._dtype)
        if len(shape) != 2:
            raise SourceError(f"{label} has {len(shape)} dimensions but a matrix has two, rows and columns")
        self.shape = (shape[0], shape[1])
        claimed = self._offset + shape[0] * shape[1] * self._dtype.itemsize
        if claimed != self.num_bytes:
            raise SourceError(
                f"{label} has {self.num_bytes} bytes but its shape {shape} needs {claimed}: it is damaged"
            )

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        width, num_cells = self.shape[not self._by_column], math.prod(self.shape)
        at_once = max(MIN_CELLS, max_bytes // CELL_BYTES)
        first, stop = self.range_of(num_cells)
        for start in range(first, stop, at_once):
            part = self._cells(start, min(at_once, stop - start))
            block = dense_block(printable(self.path), part, start, width, by_column=self._by_column)
            yield block, self._offset + (start + len(part) - first) * self._dtype.itemsize

    def _cells(self, start: int, count: int) -> np.ndarray:
        """Read ``count`` cells in stored order, from number ``start`` on, as (count,).

        A memory map is not used, because the process would be killed if someone truncated the file.
        """
        offset = self._offset + start * self._dtype.itemsize
        with self._file.reading() as file:
            cells = np.fromfile(file, self._dtype, count, offset=offset)
            self._file.check_unchanged(file.fileno())
        if len(cells) != count:
            raise self._file.error("changed while it was read")
        return cells
