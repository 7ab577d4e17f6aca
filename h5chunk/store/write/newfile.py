"""A file that appears under its name only when it is complete and on disk.

Until then it is written beside its place, as ``.NAME.h5chunk-part``, which is locked: a second writer of the same
output gets a message. What stood under the name stays as it was until the new file takes its place in one step. A
writer that is killed leaves the part file, which the next one takes over: to continue it, if there is a journal of what
was done (`h5chunk.store.write.journal`), ``.NAME.h5chunk-journal``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from h5chunk.errors import H5ChunkError, OutputError, printable
from h5chunk.store.format import LIBVER, FileSpec, Region, create_file
from h5chunk.store.write.chunkwriter import ChunkWriter
from h5chunk.store.write.command_id import save_command_id
from h5chunk.store.write.flusher import Flusher
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.ownfile import open_own
from h5chunk.store.write.partfile import (
    check_output,
    check_room,
    is_kept,
    is_open,
    journal_path,
    lock,
    no_room,
    part_path,
    reason_of,
    sync_folder,
    write_at,
)


class NewFile:
    """Context manager around the making of one file.

    Parameters
    ----------
    path : path
        Where the file shall appear.
    overwrite : bool
        Whether a file that stands there may be replaced.
    journal : Journal, optional
        That of a folder of files, this one among them: it stays when this one is complete.

    Attributes
    ----------
    part : Path
        The file until then.
    journal : Journal
        Of what was done, for those who open it; it goes when the file is complete.
    command_id : str or None
        Identity of the command that makes the file, for those who know it; it is kept with the complete file.
    kept : bool
        Whether part and journal were kept, as an error or Ctrl-C came after work that need not be done again.

    Raises
    ------
    OutputError
        Something stands there, another process is writing it, its folder is missing or not writable, or, from
        `allocate`, the disk is too small.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, journal: Journal | None = None) -> None:
        self._path = Path(os.path.realpath(path))  # a link stays a link
        self._overwrite = overwrite
        self._regions: Mapping[str, Region] = {}
        self.part = part_path(self._path)
        self._header = self.part.with_name(self.part.name + "-header")
        self._has_own_journal = journal is None
        self.journal = journal or Journal(journal_path(self._path))
        self.command_id: str | None = None
        self.kept = False

    def __enter__(self) -> NewFile:
        check_output(self._path, self._overwrite)
        self._descriptor = self._lock()
        try:
            check_output(self._path, self._overwrite)  # who had the lock may have made it
        except OutputError:
            if not os.fstat(self._descriptor).st_size:
                self.part.unlink()
            os.close(self._descriptor)
            raise
        self._header.unlink(missing_ok=True)  # of a writer that was killed
        return self

    def _lock(self) -> int:
        shown = printable(self._path)
        while True:
            try:
                descriptor = open_own(self.part, shown)
            except IsADirectoryError:
                raise OutputError(
                    f"{shown}: a folder of shards of that name is not finished: finish that, or remove "
                    f"{printable(self.part)}"
                ) from None
            lock(descriptor, shown)
            # The part file may have become the output between our opening and locking it.
            if is_open(descriptor, self.part):
                return descriptor
            os.close(descriptor)

    def allocate(self, spec: FileSpec) -> Mapping[str, Region]:
        """Create the file with all its space, so that a full disk shows before the first sample.

        Returns
        -------
        dict of str to Region
            Where each dataset's bytes go.
        """
        return self.make(spec.num_bytes, lambda part: create_file(part, spec))

    def reallocate(self, spec: FileSpec) -> Mapping[str, Region]:
        """As `allocate`, of a part file that is there: data of its first field stay, all else is made anew."""
        taken = os.fstat(self._descriptor).st_blocks * 512
        check_room(self._path, spec.num_bytes - taken)
        with self._put_on_disk():
            regions = create_file(self._header, spec)
            self._copy_header(regions[spec.fields[0].name])
        self._take_room()
        self._regions = regions
        return regions

    def make(self, num_bytes: int, create: Callable[[Path], Mapping[str, Region]]) -> Mapping[str, Region]:
        """As `allocate`, of a file that ``create`` writes at a path; of about so many bytes."""
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

    def replace_header(self, spec: FileSpec) -> Mapping[str, Region]:
        """Make the file that of ``spec``, which has fewer samples; the data of its first field stay where they are.

        The header of the new file is made apart and copied over the old one: all bytes before and behind the first
        field's. Data of other fields and tables must be written after this.
        """
        data = spec.fields[0].name
        old = self._regions[data]
        with self._put_on_disk():
            regions = create_file(self._header, spec)
            new = regions[data]
            if new.offset != old.offset:  # tiny fields are not aligned
                moved = os.pread(self._descriptor, new.num_bytes, old.offset)
                write_at(self._descriptor, moved, new.offset)
            self._copy_header(new)
        self._regions = regions
        return regions

    def _copy_header(self, data: Region) -> None:
        """Take all bytes of the header file but those of ``data``."""
        try:
            with self._header.open("rb") as file:
                write_at(self._descriptor, file.read(data.offset), 0)
                file.seek(data.offset + data.num_bytes)
                write_at(self._descriptor, file.read(), data.offset + data.num_bytes)
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
        """Bytes of a dataset, from its byte ``start`` on."""
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
        """A thread that sends what was written to the disk all the while."""
        return Flusher(self._path, self._descriptor)

    def commit(self) -> None:
        """Put the file on disk and under its name."""
        if not self._overwrite and self._path.exists():
            self._remove()  # the same command would not continue it
            raise OutputError(f"{printable(self._path)}: appeared meanwhile: it was left as it is")
        try:
            os.fsync(self._descriptor)
            if self.command_id is not None:
                save_command_id(self.part, self.command_id)  # after which nothing changes the time of the file
            if self._has_own_journal:
                self.journal.remove()  # while the name of the part file, and with it the lock, is ours
            self.part.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise OutputError(f"{printable(self._path)}: cannot be put on disk: {error.strerror}") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._header.unlink(missing_ok=True)
            if is_open(self._descriptor, self.part):
                self.kept = is_kept(self.journal, error)
                if not self.kept:
                    self._remove()
                elif self._has_own_journal:
                    self.journal.close()
        finally:
            os.close(self._descriptor)

    def _remove(self) -> None:
        """Remove the part file, and the journal if it is of this file alone."""
        if self._has_own_journal:
            self.journal.remove()
        self.part.unlink()
