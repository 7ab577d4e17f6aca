"""A file that appears under its name only when it is complete and on disk: see `h5chunk.store.write.output`."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from h5chunk.errors import H5ChunkError, OutputError, printable
from h5chunk.store.format.spec import LIBVER, FileSpec, Region, create_file
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.output import Output
from h5chunk.store.write.part_file import ROOM_BYTES, check_output, check_room, no_room, open_own, reason_of, write_at

PIECE_BYTES = 1 << 20  # of data that are moved within a file
FLUSH_INTERVAL_S = 0.5


class NewFile(Output):
    """Context manager around the making of one file.

    Raises
    ------
    OutputError
        As `Output`; or, from `allocate`, the disk is too small.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, journal: Journal | None = None) -> None:
        super().__init__(path, overwrite, journal)
        self._regions: Mapping[str, Region] = {}
        self._header = self.part.with_name(self.part.name + "-header")

    def __enter__(self) -> NewFile:
        super().__enter__()
        self._header.unlink(missing_ok=True)  # of a writer that was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._header.unlink(missing_ok=True)
        finally:
            super().__exit__(kind, error, trace)

    def _check(self) -> None:
        check_output(self._path, self._overwrite)

    def _check_place(self) -> None:
        if not self._overwrite and self._path.exists():
            raise OutputError(f"{printable(self._path)}: appeared meanwhile: it was left as it is")

    def _open_part(self) -> int:
        shown = printable(self._path)
        try:
            return open_own(self.part, shown)
        except IsADirectoryError:
            raise OutputError(
                f"{shown}: a folder of shards of that name is not finished: finish that, or remove "
                f"{printable(self.part)}"
            ) from None

    def _remove_empty(self) -> None:
        if not os.fstat(self._descriptor).st_size:
            self.part.unlink()

    def _remove_part(self) -> None:
        self.part.unlink()

    def _take_place(self) -> None:
        self.part.replace(self._path)

    def allocate(self, spec: FileSpec) -> Mapping[str, Region]:
        """Create the file with all its space, so that a full disk shows before the first sample.

        Returns
        -------
        dict of str to Region
            Where each dataset's bytes go.
        """
        return self.make(spec.num_bytes, lambda part: create_file(part, spec))

    def reallocate(self, spec: FileSpec, kept: Iterable[str]) -> Mapping[str, Region]:
        """As `allocate`, for an existing part file: keep the data of the fields ``kept``, make all else anew."""
        taken = os.fstat(self._descriptor).st_blocks * 512
        check_room(self._path, spec.num_bytes - taken)
        with self._put_on_disk():
            regions = create_file(self._header, spec)
            self._copy_header([regions[name] for name in kept])
        self._take_room()
        self._regions = regions
        return regions

    def make(self, num_bytes: int, create: Callable[[Path], Mapping[str, Region]]) -> Mapping[str, Region]:
        """As `allocate`, for a file of about ``num_bytes`` that ``create`` writes at a path."""
        os.ftruncate(self._descriptor, 0)
        check_room(self._path, num_bytes)  # before HDF5 writes, as it crashes on a full disk
        with self._put_on_disk():
            self._regions = create(self.part)
        self._take_room()
        return self._regions

    def _take_room(self) -> None:
        num_bytes = os.fstat(self._descriptor).st_size
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise OutputError(no_room(self._path, num_bytes, error.strerror)) from None
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def shrink(self, spec: FileSpec, kept: Iterable[str]) -> None:
        """Turn the file into that of ``spec``, which has fewer samples; the fields ``kept`` keep the data of those.

        The header of the new file is made apart and copied over the old one. Other fields and tables must be written
        after this.
        """
        with self._put_on_disk():
            regions = create_file(self._header, spec)
            _move_data(self._descriptor, [(self._regions[name], regions[name]) for name in kept])
            self._copy_header([regions[name] for name in kept])
        self._regions = regions

    def _copy_header(self, data: list[Region]) -> None:
        """Copy all bytes of the header file but those of ``data``."""
        try:
            with self._header.open("rb") as file:
                for region in sorted(data, key=lambda region: region.offset):
                    start = file.tell()
                    write_at(self._descriptor, file.read(region.offset - start), start)
                    file.seek(region.offset + region.num_bytes)
                start = file.tell()
                write_at(self._descriptor, file.read(), start)
                os.ftruncate(self._descriptor, file.tell())
        finally:
            self._header.unlink(missing_ok=True)

    @contextmanager
    def _put_on_disk(self) -> Iterator[None]:
        try:
            yield
        except H5ChunkError:
            raise
        except (OSError, RuntimeError) as error:
            reason = reason_of(error)
            if reason is None:
                raise
            raise OutputError(f"{printable(self._path)}: cannot be written: {reason}") from None

    def write(self, name: str, values: np.ndarray) -> None:
        """Write a whole dataset; a field's last chunk is filled up with zeros."""
        if not values.size:
            return
        region = self._regions[name]
        data = values.tobytes()
        with self._put_on_disk():
            write_at(self._descriptor, data + bytes(region.num_bytes - len(data)), region.offset)

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Read bytes of a dataset, from its byte ``start`` on."""
        return os.pread(self._descriptor, num_bytes, self._regions[name].offset + start)

    def write_bytes(self, name: str, start: int, data: bytes | memoryview) -> None:
        """Write bytes of a dataset, from its byte ``start`` on."""
        with self._put_on_disk():
            write_at(self._descriptor, data, self._regions[name].offset + start)

    @contextmanager
    def chunk_writer(self, name: str) -> Iterator[ChunkWriter]:
        """Open a writer of the compressed chunks of a field; nothing else may be written meanwhile."""
        with self._put_on_disk(), h5py.File(self.part, "r+", libver=LIBVER, locking=False) as file:
            yield ChunkWriter(file[name], self._path)

    def flusher(self) -> Flusher:
        """Return a thread that sends what was written to the disk all the while."""
        return Flusher(self._path, self._descriptor)


def _move_data(descriptor: int, moves: list[tuple[Region, Region]]) -> None:
    """Move data from old to new regions of a file, of which the new ones are no longer.

    Large fields lie in the same order in both, so that they move to lower offsets one after the other. Small ones are
    not aligned and may lie anywhere: they wait in memory.
    """
    small = [(new.offset, os.pread(descriptor, new.num_bytes, old.offset)) for old, new in moves if _is_small(new)]
    for old, new in sorted(moves, key=lambda move: move[1].offset):
        if _is_small(new) or new.offset == old.offset:
            continue
        if new.offset > old.offset:
            raise RuntimeError(f"this version of HDF5 puts a field of {new.num_bytes} bytes higher in a smaller file")
        for start in range(0, new.num_bytes, PIECE_BYTES):
            piece = os.pread(descriptor, min(PIECE_BYTES, new.num_bytes - start), old.offset + start)
            write_at(descriptor, piece, new.offset + start)
    for offset, data in small:
        write_at(descriptor, data, offset)


def _is_small(region: Region) -> bool:
    return region.num_bytes <= PIECE_BYTES


class ChunkWriter:
    """Writer of compressed chunks, in order, of a dataset that is chunked along its first axis only.

    Parameters
    ----------
    dataset : h5py.Dataset
    path : Path
        The output, whose disk is looked at.

    Attributes
    ----------
    checksums : list of int
        CRC-32 of each chunk written so far.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._room_bytes = 0
        self.checksums: list[int] = []

    def write(self, data: bytes) -> None:
        """Write the next chunk."""
        self._room_bytes -= len(data)
        if self._room_bytes < 0:  # before HDF5 writes, as it crashes on a full disk
            self._room_bytes = ROOM_BYTES
            check_room(self._path, len(data) + 2 * ROOM_BYTES)
        start = (len(self.checksums) * self._dataset.chunks[0], *(0,) * (self._dataset.ndim - 1))
        self._dataset.id.write_direct_chunk(start, data)
        self.checksums.append(zlib.crc32(data))


class Flusher:
    """Thread that sends dirty pages to the disk while others compute, so that the final fsync finds little left."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._error: OSError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._done.wait(FLUSH_INTERVAL_S):
                os.fdatasync(self._descriptor) if hasattr(os, "fdatasync") else os.fsync(self._descriptor)
        except OSError as error:  # the system tells it once: the final fsync would not see it
            self._error = error

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise OutputError(f"{printable(self._path)}: cannot be put on disk: {self._error.strerror}")
