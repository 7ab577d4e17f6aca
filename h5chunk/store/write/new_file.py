"""Write a file that gets its final name once it is complete and on disk, as `h5chunk.store.write.output` describes."""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from h5chunk.errors import OutputError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.remote.pages import write_at
from h5chunk.store.format.recommendation import VERSION, sidecar_of
from h5chunk.store.format.spec import CHECKSUMS, GROUP, ArraySpec, FileSpec, Region, create_file, field_spec
from h5chunk.store.hdf5.open import FULL_DISK
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.output import Output
from h5chunk.store.write.part_file import check_free_space, check_output, no_space_message, open_side_file, writing

PIECE_BYTES = 1 << 20  # bytes that are moved at a time within a file
FLUSH_INTERVAL_S = 0.5


class NewFile(Output):
    """A context manager that writes one new file. Allocate its space, write the datasets, then call `commit`."""

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, journal: Journal | None = None) -> None:
        super().__init__(path, overwrite, journal)
        self._regions: Mapping[str, Region] = {}
        self._header = self.part.with_name(self.part.name + "-header")

    def __enter__(self) -> NewFile:
        super().__enter__()
        self._header.unlink(missing_ok=True)  # a killed writer may have left it
        return self

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "descriptor"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Open the part file in a child of the process that holds its lock."""
        self.__dict__.update(state)
        self.descriptor = open_side_file(self.part, printable(self.path))

    def _check(self) -> None:
        check_output(self.path, self._overwrite)

    def _open_part(self) -> int:
        label = printable(self.path)
        try:
            return open_side_file(self.part, label)
        except IsADirectoryError:
            raise OutputError(
                f"{label}: an unfinished folder of shards has this name: repeat the command that wrote it, or remove "
                f"{printable(self.part)}"
            ) from None

    def _replace_output(self) -> None:
        self.part.replace(self.path)

    def allocate(self, spec: FileSpec) -> Mapping[str, Region]:
        """Create the file and allocate all its space, so that a full disk raises an error before samples are written.

        Returns the byte ranges of all datasets, by path.
        """
        return self.make(spec.num_bytes, lambda part: create_file(part, spec))

    def make(self, num_bytes: int, create: Callable[[Path], Mapping[str, Region]]) -> Mapping[str, Region]:
        """Create the file by calling ``create`` with the path of the part file, then allocate its space.

        ``create`` returns the byte ranges of all datasets, by path, and so does this method. Raises OutputError if the
        disk has fewer than ``num_bytes`` free, which is the approximate size of the file.
        """
        os.ftruncate(self.descriptor, 0)
        check_free_space(self.path, num_bytes)  # before HDF5 writes, because it crashes on a full disk
        with writing(self.path):
            self._regions = create(self.part)
        self._allocate()
        return self._regions

    def reallocate(self, spec: FileSpec, preserved: Iterable[str]) -> Mapping[str, Region]:
        """Change an existing part file to this specification, and return the byte ranges of all datasets.

        The data of the ``preserved`` fields is kept, up to their new length. Other data is undefined. The new metadata
        is written to a separate file, and then copied over the old metadata.
        """
        check_free_space(self.path, spec.num_bytes - os.fstat(self.descriptor).st_blocks * 512)
        with writing(self.path):
            try:
                old, self._regions = self._regions, create_file(self._header, spec)
                _move_data(self.descriptor, [(old[name], self._regions[name]) for name in preserved if old])
                self._copy_header(preserved)
            finally:
                self._header.unlink(missing_ok=True)
        self._allocate()
        return self._regions

    def begin(self, spec: FileSpec, name: str) -> None:
        """Prepare to write a dataset of unknown length before the header.

        The length of the dataset in ``spec`` is not used.
        """
        with writing(self.path):
            try:
                start = create_file(self._header, spec)[name].offset
            finally:
                self._header.unlink(missing_ok=True)
        self._regions = {name: Region(start, 0)}

    def complete(self, spec: FileSpec, name: str, num_bytes: int) -> None:
        """Write the header, after ``num_bytes`` of a dataset were written since `begin`."""
        self._regions = {name: Region(self.offset(name), num_bytes)}
        os.ftruncate(self.descriptor, self.offset(name) + num_bytes)  # an earlier run may have written more
        self.reallocate(spec, [name])
        self.write_bytes(name, num_bytes, bytes(self._regions[name].num_bytes - num_bytes))  # the data may have moved

    def _allocate(self) -> None:
        num_bytes = os.fstat(self.descriptor).st_size
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise OutputError(no_space_message(self.path, num_bytes, error.strerror)) from None
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def _copy_header(self, preserved: Iterable[str]) -> None:
        """Copy the file with the new metadata over the part file, except for the data of ``preserved`` fields."""
        with self._header.open("rb") as file:
            for region in sorted((self._regions[name] for name in preserved), key=lambda region: region.offset):
                start = file.tell()
                write_at(self.descriptor, file.read(region.offset - start), start)
                file.seek(region.offset + region.num_bytes)
            start = file.tell()
            write_at(self.descriptor, file.read(), start)
            os.ftruncate(self.descriptor, file.tell())

    def offset(self, name: str) -> int:
        """Return the offset of a dataset's data in the file."""
        return self._regions[name].offset

    def num_bytes(self, name: str) -> int:
        """Return the size in bytes of a dataset's data in the file, or 0 if it is not known yet."""
        return self._regions[name].num_bytes

    def write(self, name: str, values: np.ndarray) -> None:
        """Write all values of a dataset, and zeros after the last sample of the last chunk."""
        if not values.size:
            return
        region = self._regions[name]
        data = values.tobytes()
        with writing(self.path):
            write_at(self.descriptor, data + bytes(region.num_bytes - len(data)), region.offset)

    def write_checked(self, name: str, values: np.ndarray, chunk_bytes: int | None = None) -> None:
        """Write all values of a dataset, and the checksum of each chunk. By default, the dataset is one chunk."""
        self.write(name, values)
        data, size = values.tobytes(), chunk_bytes or values.nbytes
        data += bytes(-len(data) % size)
        checksums = [zlib.crc32(data[start : start + size]) for start in range(0, len(data), size)]
        self.write(f"{CHECKSUMS}/{name}", np.array(checksums, np.uint32))

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read ``num_bytes`` of a dataset, starting at its byte ``start``."""
        return os.pread(self.descriptor, num_bytes, self.offset(name) + start)

    def write_bytes(self, name: str, start: int, data: bytes | memoryview) -> None:
        """Write ``data`` to a dataset, starting at its byte ``start``."""
        with writing(self.path):
            write_at(self.descriptor, data, self.offset(name) + start)

    @contextmanager
    def flusher(self) -> Iterator[None]:
        """Flush written data to the disk from a thread while the context is open, so that the final fsync is short."""
        done, errors = threading.Event(), []

        def flush() -> None:
            try:
                while not done.wait(FLUSH_INTERVAL_S):
                    os.fdatasync(self.descriptor) if hasattr(os, "fdatasync") else os.fsync(self.descriptor)
            except OSError as error:  # the system reports an error only once, so the final fsync would succeed
                errors.append(error)

        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if errors:
            raise OutputError(f"{printable(self.path)}: cannot be written to disk: {errors[0].strerror}")


def _move_data(descriptor: int, moves: list[tuple[Region, Region]]) -> None:
    """Move the data of (old, new) pairs of regions in a file. No new region may be longer than the old one.

    Large fields keep their order and move to lower offsets, one after another. Small fields are not aligned and may
    move anywhere, so they are held in memory while the large fields are moved.
    """
    small = [move for move in moves if move[1].num_bytes <= PIECE_BYTES]
    waiting = [(new.offset, os.pread(descriptor, new.num_bytes, old.offset)) for old, new in small]
    for old, new in sorted(moves, key=lambda move: move[1].offset):
        if (old, new) in small or new.offset == old.offset:
            continue
        if new.offset > old.offset:
            raise RuntimeError(
                f"HDF5 placed a field of {new.num_bytes} bytes at a higher offset in a smaller file: report this as a "
                "bug of h5chunk, with the version of HDF5"
            )
        for start in range(0, new.num_bytes, PIECE_BYTES):
            piece = os.pread(descriptor, min(PIECE_BYTES, new.num_bytes - start), old.offset + start)
            write_at(descriptor, piece, new.offset + start)
    for offset, data in waiting:
        write_at(descriptor, data, offset)


def column_specs(columns: Mapping[str, np.ndarray], num_samples: int, chunk_samples: int) -> dict[str, ArraySpec]:
    """Return the datasets for columns, which are fields with one value per sample.

    Only the dtypes of the arrays are used.
    """
    return {name: field_spec(num_samples, chunk_samples, (), values.dtype) for name, values in columns.items()}


def table_specs(tables: Mapping[str, np.ndarray]) -> dict[str, ArraySpec]:
    """Return the datasets for tables in the group ``/h5chunk``. Only the shapes and dtypes of the arrays are used."""
    return {f"{GROUP}/{name}": ArraySpec(values.shape, values.dtype) for name, values in tables.items()}


def checksum_specs(fields: Iterable[str], num_chunks: int) -> dict[str, ArraySpec]:
    """Return the datasets for the checksums of fields, with one checksum per chunk."""
    return {f"{CHECKSUMS}/{name}": ArraySpec((num_chunks,), np.dtype(np.uint32)) for name in fields}


def write_recommendation(
    path: str | os.PathLike[str], window_chunks: int, cache: CacheSettings, **made_for: str | int
) -> Path:
    """Write the recommendation of `h5chunk tune` for a file, and return the path of the recommendation.

    ``made_for`` describes the data, as for `h5chunk.store.format.recommendation.read_recommendation`.
    """
    content = {"version": VERSION, "window_chunks": window_chunks, "cache": [cache.nslots, cache.nbytes, cache.w0]}
    write_text(sidecar_of(path), json.dumps(content | made_for) + "\n")
    return sidecar_of(path)


def write_text(path: Path, text: str) -> None:
    """Write or replace a small text file atomically."""
    with NewFile(path, overwrite=True) as new:
        with writing(new.path):
            os.ftruncate(new.descriptor, 0)
            write_at(new.descriptor, text.encode(), 0)
        new.commit()
