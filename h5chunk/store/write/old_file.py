"""Read the h5chunk file to which samples are appended, and verify it while it is copied into a longer file."""

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
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.guard import Guard, check_attributes
from h5chunk.store.hdf5.open import open_file, translate_errors
from h5chunk.store.hdf5.ranges import open_descriptor, read_bytes
from h5chunk.store.read.ragged import describe_images, find_image_groups, read_image_sizes, read_indptr
from h5chunk.store.read.scan import CheckedDataset
from h5chunk.store.write.part_file import write_at

CHECKSUMS = f"{GROUP}/checksums"
COPY_BYTES = 8 << 20  # bytes that are copied at a time if the kernel cannot copy
NO_KERNEL_COPY = (errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ETXTBSY)


class OldFile:
    """An open h5chunk file that is copied into a longer one. Its header and all its datasets are validated."""

    def __init__(self, path: Path, file: h5py.File, descriptor: int) -> None:
        self.path, self.file, self.descriptor = path, file, descriptor
        self.label = printable(path)
        status = os.fstat(descriptor)
        self._stamp, self.mode = stamp_of(status), stat.S_IMODE(status.st_mode)
        with translate_errors(self.label):
            header = read_header(file)
            if header is None:
                raise FileError(
                    f"{self.label} was not written by h5chunk, so its options are unknown: convert its source "
                    "together with the new samples (h5chunk convert)"
                )
            if header.kind:
                raise FileError(
                    f"{self.label} has a matrix, to which append cannot add rows: convert all sources "
                    "together, or the new rows to another file (files with the same columns can be read as one)"
                )
            self.header, self.options = header, header.options
            self.datasets: dict[str, h5py.Dataset] = {}  # all datasets, by path
            guard = Guard(path)
            for name, item in guard.walk(file):
                if isinstance(item, FieldError):
                    raise item
                guard.check_field(item, name)
                self.datasets[name] = item

    def check_unchanged(self) -> None:
        """Raise FileError if the file was changed or replaced since it was opened."""
        if stamp_of(self.path) != self._stamp:
            raise FileError(f"{self.label} changed while it was read, so nothing was appended: run the command again")

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of an object. Raises FileError if one is large or has a variable-length type."""
        item = self.file[name]
        check_attributes(item, f"{self.label}: {name!r}")
        return dict(item.attrs)

    def table(self, name: str) -> np.ndarray | None:
        """Return the values of a dataset of the group ``/h5chunk``, or None if it does not exist."""
        dataset = self.datasets.get(f"{GROUP}/{name}")
        return None if dataset is None else dataset[()]

    @property
    def image_group(self) -> str:
        """The name of the group of images of any size, or an empty string if there is none."""
        return next(iter(find_image_groups(self.datasets)), "")

    @property
    def fields(self) -> list[str]:
        """Names of the fields: images of any size, and the datasets at the root that have checksums."""
        names = [name for name in self.datasets if "/" not in name and f"{CHECKSUMS}/{name}" in self.datasets]
        return [*filter(None, [self.image_group]), *names]


@contextmanager
def open_old(path: str | os.PathLike[str]) -> Iterator[OldFile]:
    """Open an h5chunk file in a context, to copy it into the longer file that `append` writes."""
    path = Path(path)
    with open_file(path) as file:
        descriptor = open_descriptor(path)
        try:
            yield OldFile(path, file, descriptor)
        finally:
            os.close(descriptor)


class OldDataset:
    """The chunks of a dataset of the old file, which are compared with their checksums when they are read."""

    def __init__(self, old: OldFile, name: str) -> None:
        self._old, self.dataset = old, old.datasets[name]
        table = old.table(f"checksums/{name}")
        if table is None or table.ndim != 1 or table.dtype != np.uint32:
            raise FileError(f"{old.label}: {name!r} has no checksums, so the file is damaged: convert its source again")
        self._checked, self.checksums = CheckedDataset(old.path, self.dataset, table), table
        if len(table) != self._checked.num_chunks:
            raise FileError(
                f"{old.label}: {name!r} has {self._checked.num_chunks} chunks, but {len(table)} "
                "checksums: run h5chunk verify"
            )

    def values(self, first_chunk: int = 0) -> np.ndarray:
        """Verify the chunks from ``first_chunk`` on, and return their values."""
        self._require(range(first_chunk, len(self.checksums)), lambda num_bytes: None)
        chunk_rows = self.dataset.chunks[0] if self.dataset.chunks else 0
        values: np.ndarray = self.dataset[first_chunk * chunk_rows :]
        return values

    def copy_chunks(self, num_chunks: int, part: Path, offset: int, copied: Callable[[int], None]) -> None:
        """Verify the first chunks, and copy them to ``offset`` of the new file at ``part``.

        ``copied`` is called with the number of bytes copied since the last call.
        """
        if not num_chunks:
            return
        table, size = self._checked.table, int(self._checked.table.sizes[0])

        def copy(chunks: np.ndarray) -> None:  # copies runs that are contiguous in the old file
            apart = np.flatnonzero(np.diff(table.offsets[chunks]) != size) + 1
            for first, stop in pairwise([0, *apart.tolist(), len(chunks)]):
                chunk, num_bytes = int(chunks[first]), (stop - first) * size
                offsets = int(table.offsets[chunk]), offset + chunk * size
                copy_range(self._old.descriptor, target, offsets, num_bytes, self._old.label)

        target = os.open(part, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._require(range(num_chunks), copied, copy)
        except FileError:
            raise
        except OSError as error:
            raise OutputError(f"{self._old.label}: a copy of this file cannot be written: {error.strerror}") from None
        finally:
            os.close(target)

    def _require(
        self,
        chunks: range,
        on_read: Callable[[int], None],
        on_checked: Callable[[np.ndarray], None] = lambda chunks: None,
    ) -> None:
        numbers = np.arange(chunks.start, chunks.stop)
        self._checked.require_undamaged(
            numbers, self._old.descriptor, on_read, "nothing was appended", on_checked=on_checked
        )


class OldImages:
    """The images of any size of the old file.

    ``data`` has their bytes. ``facts``, (num_images, 4) int64, has the number of bytes, the height, the width and the
    EXIF orientation of each image.
    """

    def __init__(self, old: OldFile, name: str) -> None:
        field = describe_images(old.file[name], old.path, name, old.header.chunk_samples)
        self.form, self.num_bytes = field.form, field.num_entries
        self.data = OldDataset(old, f"{name}/data")
        for table in IMAGE_TABLES:
            OldDataset(old, f"{name}/{table}").values()  # to verify the checksum
        offsets = read_indptr(old.file, old.path, field)
        sizes = read_image_sizes(old.file[name], old.path, field, offsets)
        self.facts = np.stack([np.diff(offsets), *sizes], axis=1).astype(np.int64)
        self.mean_bytes = -(-self.num_bytes // len(self.facts))


def copy_range(source: int, target: int, offsets: tuple[int, int], num_bytes: int, label: str = "a file") -> None:
    """Copy bytes from one descriptor to another, with reflinks if the system supports them.

    ``offsets`` has the offset in the source and the offset in the target. Raises FileError if the source cannot be
    read. Messages call the source ``label``.
    """
    done, moved = 0, 1
    while moved and done < num_bytes and hasattr(os, "copy_file_range"):
        try:
            positions = offsets[0] + done, offsets[1] + done
            moved = os.copy_file_range(source, target, num_bytes - done, *positions)  # 0 if the source ends
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
            break
        done += moved
    buffer = np.empty(min(COPY_BYTES, num_bytes - done), np.uint8)
    while done < num_bytes:
        piece = buffer[: num_bytes - done].data
        read_bytes(source, offsets[0] + done, piece, lambda _: label)
        write_at(target, piece, offsets[1] + done)
        done += len(piece)
