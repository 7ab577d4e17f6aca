"""Read an h5chunk file that samples are appended to, and check it as it is copied into a longer one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from h5chunk.store.hdf5.codecs import crc32
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
    """An h5chunk file that samples are appended to."""

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
            if header.kind:
                raise FileError(
                    f"{self.shown}: holds a sparse matrix, which cannot be appended to: convert all sources together, "
                    "or the new rows into one more file: several files with the same columns are one data set"
                )
            self.header, self.options = header, header.options
            self.datasets: dict[str, h5py.Dataset] = {}  # all that there are, by path
            guard = Guard(path)
            for name, item in guard.walk(file):
                if isinstance(item, FieldError):
                    raise item
                guard.check_field(item, name)
                self.datasets[name] = item

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
        """Return the attributes of an object, which must be of fixed-size types."""
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
    """Open a file that samples are appended to."""
    path = Path(path)
    with open_file(path) as file:
        descriptor = open_descriptor(path)
        try:
            yield OldFile(path, file, descriptor)
        finally:
            os.close(descriptor)


class OldDataset:
    """The chunks of a dataset, checked as they are read."""

    def __init__(self, old: OldFile, name: str) -> None:
        self._old, self._name = old, name
        self.dataset = old.datasets[name]
        table = old.table(f"checksums/{name}")
        if table is None or table.ndim != 1 or table.dtype != np.uint32:
            raise FileError(
                f"{old.shown}: {name!r} has no checksums, as what h5chunk wrote has: convert its source again"
            )
        self._checked = CheckedDataset(old.path, self.dataset, table)
        self.checksums = table
        if len(table) != self._checked.num_chunks:
            raise FileError(
                f"{old.shown}: {name!r} has {self._checked.num_chunks} chunks but {len(table)} checksums: h5chunk "
                "verify says what is wrong"
            )

    def values(self) -> np.ndarray:
        """Return the whole dataset, checked, in memory."""
        self._run(self._checked.parts(np.arange(len(self.checksums))), lambda _: None)
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
        """Copy the first chunks to an offset of the new file."""
        if not num_chunks:
            return
        size = self._checked.place(0)[1]
        step = max(1, PART_BYTES // size)
        target = os.open(part, os.O_WRONLY | os.O_CLOEXEC)
        try:
            borders = range(0, num_chunks, step)
            chunks = (np.arange(first, min(first + step, num_chunks)) for first in borders)
            self._run((partial(self._carry_some, each, target, offset) for each in chunks), told)
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise OutputError(f"{self._old.shown}: its copy cannot be written: {error.strerror}") from None
        finally:
            os.close(target)

    def _carry_some(self, chunks: np.ndarray, target: int, offset: int, descriptor: int) -> Parted:
        """Check some chunks, and copy them if they are whole, in runs of those that lie one behind the other."""
        parts = [part(descriptor) for part in self._checked.parts(chunks)]
        found = Parted(sum(part.num_bytes for part in parts), tuple(bad for part in parts for bad in part.damages))
        if not found.damages:
            size = self._checked.place(0)[1]
            apart = np.flatnonzero(np.diff(self._checked.table.offsets[chunks]) != size) + 1
            for first, stop in pairwise([0, *apart.tolist(), len(chunks)]):
                start, place = self._checked.place(int(chunks[first]))[0], offset + int(chunks[first]) * size
                copy_range(descriptor, start, target, place, (stop - first) * size, lambda _: self._old.shown)
        return found

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


def copy_range(
    source: int, source_offset: int, target: int, target_offset: int, num_bytes: int, where: Where = lambda _: "a file"
) -> None:
    """Copy a byte range between two descriptors; by the kernel where it can, so that reflinks share the bytes."""
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
