"""Matrices as ``scipy.sparse.save_npz`` writes them: compressed rows, compressed columns or coordinates.

Members are unpacked as streams, several side by side, so that memory is bounded whatever they claim; nothing is
unpickled. Source: numpy.lib.format (the .npy format), scipy.sparse.save_npz (members and their names).
"""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.sources.matrix import compressed
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.npy import read_header
from h5chunk.sources.matrix.text import check_regular
from h5chunk.sources.recognise import has_suffix, zip_members
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.claims import MAX_RATIO

FREE_BYTES, MAX_LARGE_RATIO = 1 << 30, 256  # indices that are larger do not pack that well unless they are made up
MAX_SMALL_BYTES = 1 << 16
MAX_END_BYTES = 22 + (1 << 16)  # of the record at the end of a zip, with its comment
MAX_DIRECTORY_BYTES = 1 << 20
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MEMBERS = {"csr": ("indices", "indptr"), "csc": ("indices", "indptr"), "coo": ("row", "col")}
DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, NotImplementedError, RuntimeError)


class NpzSource(SparseSource):
    """A scipy .npz; see `SparseSource`.

    Raises
    ------
    SourceError
        It is no such file, or its members do not agree.
    """

    kind = "npz"
    shape: tuple[int, int]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        members = zip_members(source, head)
        return {"format.npy", "shape.npy"} <= members or (not members and has_suffix(source, ".npz"))

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stamp = check_regular(self.path)
        self.num_bytes = self._stamp[2]
        with self._open() as archive:
            self._check_members(archive)
            self._format = self._read_format(archive)
            self.shape = self._read_shape(archive)
            with self._vectors(archive) as vectors:
                self._claimed(vectors)
        self.is_sorted_by_row = self._format == "csr"

    def _fail(self, what: str) -> SourceError:
        return SourceError(f"{printable(self.path)}: {what}")

    @contextlib.contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                if stamp_of(os.fstat(file.fileno())) != self._stamp:
                    raise self._fail("changed while it was read")
                self._check_directory(file)
                with zipfile.ZipFile(file) as archive:
                    yield archive
                if stamp_of(os.fstat(file.fileno())) != self._stamp:
                    raise self._fail("changed while it was read")
        except SourceError:
            raise
        except DAMAGES as error:
            raise self._fail(f"damaged, or no .npz: {error}") from None

    def _check_directory(self, file: IO[bytes]) -> None:
        """Refuse a directory of members that takes much memory; zipfile reads it as a whole."""
        file.seek(max(0, self.num_bytes - MAX_END_BYTES))
        start, magic, end = file.read().rpartition(b"PK\x05\x06")
        num_bytes = int.from_bytes(end[8:12], "little") if magic else 0
        if start[-20:].startswith(b"PK\x06\x07"):  # the same for archives of more than 4 GiB
            num_bytes = max(num_bytes, int.from_bytes(start[-36:-28], "little"))
        if num_bytes > MAX_DIRECTORY_BYTES:
            raise self._fail(
                f"its directory claims {num_bytes} bytes, over the limit of {MAX_DIRECTORY_BYTES}: a matrix of "
                "scipy.sparse.save_npz has 5 members"
            )

    def _check_members(self, archive: zipfile.ZipFile) -> None:
        names = Counter(archive.namelist())
        repeated = next((name for name, count in names.items() if count > 1), None)
        if repeated is not None:
            raise self._fail(f"two members are called {repeated!r}")
        if sum(member.compress_size for member in archive.infolist()) > self.num_bytes:
            raise self._fail(f"its members claim more than its {self.num_bytes} bytes: they overlap")
        for member in archive.infolist():
            packed, size = member.compress_size, member.file_size
            if member.flag_bits & 1 or member.compress_type not in PACKINGS:
                raise self._fail(f"member {member.filename!r} is encrypted or packed unusually: save it again")
            if size > MAX_RATIO * packed + MAX_SMALL_BYTES:
                raise self._fail(f"member {member.filename!r} claims {size} bytes out of {packed}: that cannot be")
            index = member.filename in ("indices.npy", "row.npy", "col.npy")
            if index and size > FREE_BYTES and size > MAX_LARGE_RATIO * packed:
                raise self._fail(
                    f"member {member.filename!r} unpacks to {size} bytes, {size // packed} times what it takes, out of "
                    "proportion for indices: save it with compressed=False if it is meant so"
                )
        for name in ("format", "shape"):
            if f"{name}.npy" not in names:
                raise self._fail(f"has no member {name!r}, so it is no matrix of scipy.sparse.save_npz")

    def _small(self, archive: zipfile.ZipFile, name: str) -> np.ndarray:
        with _Member(self.path, archive, name) as member:
            if member.num_bytes > MAX_SMALL_BYTES or member.dtype.hasobject:
                raise self._fail(f"member {name!r} has {member.num_bytes} bytes of type {member.dtype}: that cannot be")
            return member.read(0, member.length)

    def _read_format(self, archive: zipfile.ZipFile) -> str:
        word = self._small(archive, "format")
        if word.dtype.kind not in "SU" or word.size != 1:
            raise self._fail(f"member 'format' has the type {word.dtype} but must be a word")
        text = word.ravel()[0]
        name = text.decode("latin-1") if isinstance(text, bytes) else str(text)
        if name not in MEMBERS:
            raise self._fail(f"format is {name!r} but csr, csc and coo are read: save it after .tocsr()")
        missing = [part for part in (*MEMBERS[name], "data") if f"{part}.npy" not in archive.namelist()]
        if missing:
            raise self._fail(f"has no member {missing[0]!r}, which format {name} needs")
        return name

    def _read_shape(self, archive: zipfile.ZipFile) -> tuple[int, int]:
        shape = self._small(archive, "shape")
        if shape.dtype.kind not in "iu" or shape.size != 2 or int(shape.min()) < 0:
            raise self._fail(f"member 'shape' is {shape.tolist()} but must be two numbers, of rows and of columns")
        return int(shape[0]), int(shape[1])

    @contextlib.contextmanager
    def _vectors(self, archive: zipfile.ZipFile) -> Iterator[list[Any]]:
        """Streams of data, and of indices and indptr, or of rows and columns."""
        with contextlib.ExitStack() as stack:
            names = ("data", *MEMBERS[self._format])
            yield [stack.enter_context(_Member(self.path, archive, name)) for name in names]

    def _claimed(self, vectors: list[Any]) -> tuple[int, int]:
        """Rows and columns, or the other way round for csc, after a look at types and lengths."""
        data, one, two = vectors
        if self._format == "coo":
            return compressed.check_kinds(self.shape, data, None, one, two)
        shape = self.shape if self._format == "csr" else self.shape[::-1]
        return compressed.check_kinds(shape, data, two, one)

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        with self._open() as archive, self._vectors(archive) as vectors:
            data, one, two = vectors
            shape = self._claimed(vectors)
            sizes = [archive.getinfo(f"{name}.npy").compress_size for name in ("data", *MEMBERS[self._format])]

            def consumed() -> int:
                parts = (size * part.read_part for size, part in zip(sizes, vectors, strict=True))
                return int(sum(parts))

            options: dict[str, Any] = {"max_bytes": max_bytes, "consumed": consumed}
            if self._format == "coo":
                yield from compressed.coordinate_blocks(shape, data, one, two, **options)
            else:
                yield from compressed.compressed_blocks(
                    shape, data, one, two, by_column=self._format == "csc", **options
                )


class _Member:
    """A vector that lies in a zip, as a stream; zipfile compares its checksum with the last value."""

    def __init__(self, path: str, archive: zipfile.ZipFile, name: str) -> None:
        self.name = f"{printable(path)}: {name}"
        self._file: IO[bytes] = archive.open(f"{name}.npy")
        shape, _, self.dtype = read_header(self._file, self.name)
        if len(shape) > 1:
            raise SourceError(f"{self.name} has {len(shape)} dimensions but must have one")
        self.length = shape[0] if shape else 1
        if self.dtype.hasobject:
            raise SourceError(f"{self.name} holds Python objects, which are never unpickled: save plain numbers")
        self.num_bytes = self.length * self.dtype.itemsize
        there = archive.getinfo(f"{name}.npy").file_size - self._file.tell()
        if there != self.num_bytes:
            raise SourceError(f"{self.name} claims {self.num_bytes} bytes but {there} are there")
        self._at = 0

    def __enter__(self) -> _Member:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def read_part(self) -> float:
        return self._at / self.length if self.length else 1.0

    def read(self, start: int, stop: int) -> np.ndarray:
        if start != self._at:
            raise AssertionError("members are read in order")
        data = self._file.read((stop - start) * self.dtype.itemsize)
        if len(data) != (stop - start) * self.dtype.itemsize:
            raise SourceError(f"{self.name} ends early: the file is damaged")
        self._at = stop
        return np.frombuffer(data, self.dtype)
