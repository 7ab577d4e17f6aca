"""Read an h5chunk file that samples are appended to, and check it as it is copied into a longer one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OutputError, printable
from h5chunk.machine import available_cores
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.claims import check_attributes
from h5chunk.store.hdf5.crc import crc32
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import open_file, translate_errors
from h5chunk.store.hdf5.ranges import PART_BYTES, Where, open_descriptor, read_bytes
from h5chunk.store.read.scan import MEMORY_BYTES, CheckedDataset, Damage, Parted, check_parts
from h5chunk.store.write.part_file import write_at

MAX_THREADS = 8
CHECKSUMS = f"{GROUP}/checksums"
COPY_BYTES = 8 << 20  # at a time, where the kernel cannot copy
NO_KERNEL_COPY = (errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ETXTBSY)

Told = Callable[[int], None]  # told the bytes that were carried since the last call


class OldFile:
    """An h5chunk file that samples are appended to.

    Parameters
    ----------
    path : path
    file : h5py.File
        Open for reading, as ``descriptor`` is.
    descriptor : int

    Attributes
    ----------
    header : Header
    options : dict
        What the file was converted with.
    datasets : dict of str to h5py.Dataset
        All that there are, by path.
    mode : int
        Permissions.

    Raises
    ------
    FileError
        It was not written by h5chunk, holds a matrix, has a newer format, or has what cannot be carried.
    """

    def __init__(self, path: Path, file: h5py.File, descriptor: int) -> None:
        self.path, self.file, self.descriptor = path, file, descriptor
        self.shown = printable(path)
        status = os.fstat(descriptor)
        self._stamp, self.mode = stamp_of(status), stat.S_IMODE(status.st_mode)
        with translate_errors(self.shown):
            header = read_header(file)
            if header is None:
                raise FileError(
                    f"{self.shown}: not written by h5chunk: nothing says how its samples were made: convert their "
                    "source with h5chunk convert, together with the new ones"
                )
            self.header = header
            if header.kind:
                raise FileError(
                    f"{self.shown}: holds a sparse matrix, which cannot be appended to: convert all sources together, "
                    "or the new rows into one more file: several files with the same columns are one data set"
                )
            self.options = header.options
            self.datasets = self._survey()

    def _survey(self) -> dict[str, h5py.Dataset]:
        guard, found = Guard(self.path), {}
        for name, item in guard.walk(self.file):
            if isinstance(item, FieldError):
                raise item
            guard.check_field(item, name)
            found[name] = item
        return found

    def check_unchanged(self) -> None:
        """Raise FileError unless what is under the path is the file that was opened, as it was then."""
        if stamp_of(self.path) != self._stamp:
            raise FileError(f"{self.shown}: changed while it was read: nothing was appended: run it again")

    def check_known(self, known: Callable[[str], bool]) -> None:
        """Raise FileError if there is a dataset that is not known, and would be lost."""
        lost = next((name for name in sorted(self.datasets) if not known(name)), None)
        if lost is not None:
            raise FileError(
                f"{self.shown}: {lost!r} is not as h5chunk convert writes it, and would be lost: remove it, or append "
                "to the file as it was converted"
            )

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of an object, which must be of fixed-size types.

        Raises
        ------
        FileError
            One of them is of variable length, or large.
        """
        item = self.file[name]
        check_attributes(item, f"{self.shown}: {name!r}")
        return dict(item.attrs)

    def table(self, name: str) -> np.ndarray | None:
        """Return a dataset of ``/h5chunk``; None if there is none."""
        dataset = self.datasets.get(f"{GROUP}/{name}")
        return None if dataset is None else dataset[()]

    @property
    def fields(self) -> list[str]:
        """Names of the fields: the datasets at the root that have checksums."""
        return [name for name in self.datasets if "/" not in name and f"{CHECKSUMS}/{name}" in self.datasets]


@contextmanager
def open_old(path: str | os.PathLike[str]) -> Iterator[OldFile]:
    """Open a file that samples are appended to.

    Raises
    ------
    FileError
        As `OldFile`; or it is missing, or no HDF5 file.
    """
    path = Path(path)
    with open_file(path) as file:
        descriptor = open_descriptor(path)
        try:
            yield OldFile(path, file, descriptor)
        finally:
            os.close(descriptor)


class OldDataset:
    """The chunks of a dataset, checked as they are read.

    Parameters
    ----------
    old : OldFile
    name : str

    Attributes
    ----------
    num_chunks : int
    checksums : (num_chunks,) uint32
    filtered : bool
        Whether chunks are compressed.

    Raises
    ------
    FileError
        Its checksums are missing, or its chunks cannot be.
    """

    def __init__(self, old: OldFile, name: str) -> None:
        self._old, self._name = old, name
        self.dataset = old.datasets[name]
        table = old.table(f"checksums/{name}")
        if table is None or table.ndim != 1 or table.dtype != np.uint32:
            raise FileError(
                f"{old.shown}: {name!r} has no checksums, as what h5chunk wrote has: convert its source again"
            )
        self._checked = CheckedDataset(old.path, self.dataset, table)
        self.checksums, self.num_chunks = table, self._checked.num_chunks
        self.filtered = self._checked.filtered
        if len(table) != self.num_chunks:
            raise FileError(
                f"{old.shown}: {name!r} has {self.num_chunks} chunks but {len(table)} checksums: h5chunk verify says "
                "what is wrong"
            )

    def check(self) -> None:
        """Raise FileError unless all chunks are what their checksums say."""
        self._run(self._checked.parts(np.arange(self.num_chunks)), lambda _: None)

    def values(self) -> np.ndarray:
        """Return the whole dataset, checked, in memory."""
        self.check()
        values: np.ndarray = self.dataset[()]
        return values

    def samples_of(self, number: int) -> np.ndarray:
        """Return a chunk without a filter, padding included: (chunk_samples, ...)."""
        offset, num_bytes = self._checked.place(number)
        data = np.empty(num_bytes, np.uint8)
        read_bytes(self._old.descriptor, offset, data.data, lambda _: f"{self._old.shown}: {self._name!r}")
        if crc32(data) != self.checksums[number]:
            raise self._damaged(Damage(number, "does not match its checksum"))
        return data.view(self.dataset.dtype).reshape(self.dataset.chunks)

    def carry(self, num_chunks: int, part: Path, offset: int, told: Told) -> None:
        """Copy the first chunks to an offset of the new file.

        Parameters
        ----------
        num_chunks : int
        part : Path
            The new file.
        offset : int
        told : callable

        Raises
        ------
        FileError
            A chunk is not what its checksum says.
        OutputError
            The new file cannot be written.
        """
        if not num_chunks:
            return
        size = self._checked.place(0)[1]
        step = max(1, PART_BYTES // size)
        target = os.open(part, os.O_WRONLY | os.O_CLOEXEC)
        try:
            numbers = (np.arange(first, min(first + step, num_chunks)) for first in range(0, num_chunks, step))
            self._run((_Carried(self._checked, some, target, offset, self._old.shown) for some in numbers), told)
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise OutputError(f"{self._old.shown}: its copy cannot be written: {error.strerror}") from None
        finally:
            os.close(target)

    def _run(self, parts: Iterator[Callable[[int], Parted]], told: Told) -> None:
        threads = max(1, min(available_cores(), MAX_THREADS, MEMORY_BYTES // self._checked.thread_bytes()))
        for came in check_parts(parts, self._old.descriptor, threads):
            if came.damages:
                raise self._damaged(came.damages[0])
            told(came.num_bytes)

    def _damaged(self, damage: Damage) -> FileError:
        return FileError(
            f"{self._old.shown}: chunk {damage.chunk} of {self._name!r} {damage.what}: nothing was appended: h5chunk "
            "verify names all that is damaged, and repairs it with --repair"
        )


class _Carried:
    """A task: check some chunks, and copy them if they are whole."""

    def __init__(self, checked: CheckedDataset, chunks: np.ndarray, target: int, offset: int, shown: str) -> None:
        self._checked, self._chunks, self._target, self._offset, self._shown = checked, chunks, target, offset, shown

    def __call__(self, descriptor: int) -> Parted:
        parts = [part(descriptor) for part in self._checked.parts(self._chunks)]
        found = Parted(sum(part.num_bytes for part in parts), tuple(bad for part in parts for bad in part.damages))
        if not found.damages:
            for chunk, count in self._runs():
                start, size = self._checked.place(chunk)
                place = self._offset + chunk * size
                copy_range(descriptor, start, self._target, place, count * size, lambda _: self._shown)
        return found

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first chunk and the number of chunks of each contiguous run in the old file."""
        offsets, size = self._checked.table.offsets[self._chunks], self._checked.place(0)[1]
        borders = [0, *(np.flatnonzero(np.diff(offsets) != size) + 1).tolist(), len(self._chunks)]
        for start, stop in pairwise(borders):
            yield int(self._chunks[start]), stop - start


def copy_range(
    source: int, source_offset: int, target: int, target_offset: int, num_bytes: int, where: Where = lambda _: "a file"
) -> None:
    """Copy a byte range between two descriptors; by the kernel where it can, so that reflinks share the bytes.

    Parameters
    ----------
    source, source_offset, target, target_offset, num_bytes : int
    where : callable
        Names what lies at an offset of the source, for messages.

    Raises
    ------
    FileError
        The source ends before, or cannot be read.
    OSError
        The target cannot be written.
    """
    done = 0
    while done < num_bytes:
        moved = _in_kernel(source, source_offset + done, target, target_offset + done, num_bytes - done)
        if not moved:  # the kernel cannot, or the source ended, which reading tells
            break
        done += moved
    buffer = np.empty(min(COPY_BYTES, num_bytes - done), np.uint8)
    while done < num_bytes:
        piece = buffer[: num_bytes - done].data
        read_bytes(source, source_offset + done, piece, where)
        write_at(target, piece, target_offset + done)
        done += len(piece)


def _in_kernel(source: int, source_offset: int, target: int, target_offset: int, num_bytes: int) -> int:
    """Copy in the kernel; return the number of bytes, 0 where that is not possible."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, target, num_bytes, source_offset, target_offset)
    except OSError as error:
        if error.errno in NO_KERNEL_COPY:
            return 0
        raise
