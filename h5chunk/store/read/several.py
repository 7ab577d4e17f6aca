"""Read rows of one or several files by byte ranges, and estimate how many bytes are read per used byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.cache import count_items_read
from h5chunk.remote.countdown import Countdown
from h5chunk.remote.mirror import Descriptor, Hold, Mirror
from h5chunk.store.hdf5.chunk_table import NotDirect
from h5chunk.store.hdf5.open import opened
from h5chunk.store.hdf5.ranges import PART_BYTES, Ranges, ReadTask, open_descriptor, row_tasks
from h5chunk.store.read.csr import CsrField, VlenBytes
from h5chunk.store.read.direct import ByteReader, ChunkRows, PlainField, direct_field
from h5chunk.store.read.encoded import EncodedField, encoded_bytes
from h5chunk.store.read.episodes import EpisodeFile
from h5chunk.store.read.fields import Field
from h5chunk.store.read.fileset import with_remedy
from h5chunk.store.read.keyed import KeyedBytes, KeyedReader
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.source import Source
from h5chunk.store.read.vlen import VlenField
from h5chunk.store.read.volumes import PatchReader
from h5chunk.store.read.windows import WindowReader

NOTABLE = 1.01  # read amplification above this is reported


class OpenFiles:
    """The file descriptors of a set of files, which are opened on first use. Any number of threads may use them."""

    def __init__(self, reader: Source) -> None:
        self._readers = reader.readers
        self._first = _first_of_file(reader.readers)
        self._open: list[int | None] = [None] * len(reader.readers)
        self._lock = threading.Lock()

    def descriptor_of(self, number: int) -> int:
        """Return the descriptor of a file. Raises FileError if it cannot be opened or has changed."""
        number = self._first[number]
        descriptor = self._open[number]
        if descriptor is None:
            with self._lock:
                descriptor = self._open[number]
                if descriptor is None:
                    descriptor = self._open[number] = _open_checked(self._readers[number], len(self._readers))
        return descriptor

    def check(self, number: int) -> None:
        """Raise FileError if a file was changed or replaced."""
        self._readers[number].check_unchanged()

    def close(self) -> None:
        """Close the files. No task may be running."""
        for descriptor in self._open:
            if descriptor is not None:
                os.close(descriptor)
        self._open = [None] * len(self._readers)


def _first_of_file(readers: Sequence[Source]) -> list[int]:
    """Return, for each reader, the index of the first reader of the same file. They share a descriptor."""
    first: dict[Path, int] = {}
    return [first.setdefault(reader.path, number) for number, reader in enumerate(readers)]


def _open_checked(reader: Source, num_files: int) -> int:
    try:
        descriptor = open_descriptor(reader.path)
    except FileError as error:
        raise with_remedy(error, num_files) from error.__cause__
    try:
        reader.check_unchanged(descriptor)
    except FileError:
        os.close(descriptor)
        raise
    return descriptor


def open_descriptors(reader: Source) -> int | OpenFiles:
    """Open the files of a reader. Returns the descriptor of a single file, or `OpenFiles` for several files."""
    return OpenFiles(reader) if len(reader.readers) > 1 else _open_checked(reader, 1)


def close_descriptors(opened: int | OpenFiles) -> None:
    """Close the descriptors that `open_descriptors` returned."""
    if isinstance(opened, OpenFiles):
        opened.close()
    else:
        os.close(opened)


def remote_ranges(tasks: Iterable[Any], descriptor: Any) -> dict[Mirror, Ranges]:
    """Return the byte ranges that tasks read from remote objects."""
    by_mirror: dict[Mirror, list[Ranges]] = {}
    for task in tasks:
        for part, of, *_ in task.split(descriptor) if isinstance(task, FileTasks) else [(task, descriptor)]:
            if isinstance(of, Descriptor) and hasattr(part, "ranges"):
                by_mirror.setdefault(of.mirror, []).append(part.ranges)
    return {
        mirror: (np.concatenate([each[0] for each in ranges]), np.concatenate([each[1] for each in ranges]))
        for mirror, ranges in by_mirror.items()
    }


def hold_ranges(ranges: Mapping[Mirror, Ranges], then: Callable[[FileError | None], None]) -> list[Hold]:
    """Hold byte ranges of remote objects. ``then`` is called with None once they are local, or with an error."""
    joint = Countdown[FileError | None](then)
    holds = [mirror.hold(offsets, sizes, joint.add()) for mirror, (offsets, sizes) in ranges.items()]
    joint.end(None)
    return holds


@contextmanager
def held_ranges(ranges: Mapping[Mirror, Ranges]) -> Iterator[None]:
    """Fetch byte ranges of remote objects, and hold them within a context. Raises FileError if fetching fails."""
    future = Future[FileError | None]()
    holds = hold_ranges(ranges, future.set_result)
    try:
        if (error := future.result()) is not None:
            raise error
        yield
    finally:
        for hold in holds:
            hold.close()


class FilesField(ByteReader):
    """A byte-range reader of one field of several files. Its tasks are called with `OpenFiles` instead of a descriptor.

    ``fields`` has the byte reader of each file, or None for a file without samples. All files together may use as much
    memory for cached chunks as a single file.
    """

    def __init__(self, reader: Source, name: str, fields: Sequence[ByteReader | None]) -> None:
        self.name, self._reader = name, reader
        self._fields = {number: field for number, field in enumerate(fields) if field is not None}
        self.num_bytes = sum(field.num_bytes for field in self._fields.values())
        self.is_plain = all(field.is_plain for field in self._fields.values())
        self.row_bytes = next(iter(self._fields.values())).row_bytes
        self.chunks = [chunks for field in self._fields.values() for chunks in field.chunks]
        self.forget()

    def forget(self) -> None:
        super().forget()
        for chunks in self.chunks:
            chunks.share_kept(self.chunks[0])

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. Small tasks of several files are joined."""
        joined: list[tuple[ReadTask, int]] = []
        total = 0
        for number, positions in self._reader.by_file(rows):
            field = self._fields[number]
            its_rows = rows[positions] - self._reader.starts[number]
            num_bytes = PART_BYTES if field.chunks else field.bytes_read(its_rows)
            for part in field.tasks(its_rows, destinations[positions], out):
                joined.append((part, number))
                total += num_bytes
                if total >= PART_BYTES:
                    yield FileTasks(joined)
                    joined, total = [], 0
        if total:
            yield FileTasks(joined)

    def chunk_rows(self, number: int = 0) -> Iterator[ChunkRows]:
        if number in self._fields:
            yield from self._fields[number].chunk_rows()

    def read_all(self, opened: OpenFiles) -> np.ndarray:
        values = []
        for number, field in self._fields.items():
            values.append(field.read_all(opened.descriptor_of(number)))
            opened.check(number)
        return np.concatenate(values)

    def bytes_read(self, rows: np.ndarray) -> int:
        return sum(
            self._fields[number].bytes_read(rows[positions] - self._reader.starts[number])
            for number, positions in self._reader.by_file(rows)
        )


class EpisodesField(FilesField):
    """A byte-range reader of one field of the episodes of one file. Its tasks are called with the file's descriptor."""

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        for number, positions in self._reader.by_file(rows):
            its_rows = rows[positions] - self._reader.starts[number]
            yield from self._fields[number].tasks(its_rows, destinations[positions], out)

    def read_all(self, descriptor: Any) -> np.ndarray:
        return np.concatenate([field.read_all(descriptor) for field in self._fields.values()])


class RowsAt(ByteReader):
    """A byte-range reader of an uncompressed field of all episodes of a file, with the offset of each row."""

    is_plain = reads_rows = True

    def __init__(self, file: EpisodeFile, name: str) -> None:
        field = file.fields[name]
        assert isinstance(field, Field)
        self.name, self._file, self._field, self._offsets = name, file, field, file.offsets[name]
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, len(self._offsets) * field.grid.sample_bytes

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        return row_tasks((self._offsets, 1, self.row_bytes), rows, None, destinations, out, self._where)

    def read_all(self, descriptor: Any) -> np.ndarray:
        values, rows = np.empty(self._field.grid.shape, self._field.dtype), np.arange(len(self._offsets))
        for task in self.tasks(rows, rows, values.reshape(len(values), -1).view(np.uint8)):
            task(descriptor)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        return len(rows) * self.row_bytes

    def _where(self, offset: int) -> str:
        row = int(np.where(self._offsets <= offset, self._offsets, -1).argmax())
        episode = int(np.searchsorted(self._file.episodes.starts, row, "right")) - 1
        return f"{printable(self._file.path)}: {self._file.episodes.readers[episode].fields[self.name].dataset!r}"


class FileTasks:
    """Several tasks and the indices of their files. One thread runs them one after another."""

    def __init__(self, parts: list[tuple[ReadTask, int]]) -> None:
        self._parts = parts

    @property
    def is_plain(self) -> bool:
        """True if native threads can run all parts."""
        return all(hasattr(part, "jobs") for part, _ in self._parts)

    def split(self, opened: OpenFiles) -> Iterator[tuple[ReadTask, int, Callable[[], None]]]:
        """Yield each task, the descriptor of its file, and a function that raises FileError if the file was changed."""
        for part, number in self._parts:
            yield part, opened.descriptor_of(number), partial(opened.check, number)

    def __call__(self, opened: Any) -> None:
        for part, number in self._parts:
            part(opened.descriptor_of(number))
            opened.check(number)


def direct_fields(reader: Source) -> tuple[dict[str, ByteReader], dict[str, str]]:
    """Return byte readers of the fields that can be read by byte ranges, and the reasons why other fields cannot.

    Raises FileError if a file is damaged or was changed.
    """
    if not reader.num_samples:
        return {}, dict.fromkeys(reader.fields, "it is empty")
    if isinstance(reader, WindowReader):
        parts = [direct_fields(source) for source in reader.sources]
        frames = {name: reader.byte_reader(name, field) for fields, _ in parts for name, field in fields.items()}
        return frames, {name: reason for _, reasons in parts for name, reason in reasons.items()}
    if isinstance(reader, PatchReader):
        return reader.direct_fields()
    by_file: dict[str, list[Any]] = {name: [] for name in reader.fields}
    why: dict[str, str] = {}
    for single in reader.readers:
        readers, reasons = _byte_readers_of_file(single)
        for name, own in readers.items():
            by_file[name].append(own)
        for name, reason in reasons.items():
            why.setdefault(name, f"{printable(single.path)}: {reason}" if len(reader.readers) > 1 else reason)
    return {
        name: fields[0] if len(fields) == 1 else FilesField(reader, name, fields)
        for name, fields in by_file.items()
        if name not in why
    }, why


def _byte_readers_of_file(single: Source) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the byte readers of one file (None if it is empty), and the reasons why other fields have none."""
    if isinstance(single, KeyedReader):
        return _byte_readers_of_samples(single)
    joined = single if isinstance(single, EpisodeFile) else None
    found: dict[str, Any] = {name: RowsAt(joined, name) for name in joined.offsets} if joined is not None else {}
    left, why = [name for name in single.fields if name not in found], {}
    if not left:
        return found, {}
    with opened(single.path) as file:
        single.check_unchanged()
        for name in left:
            try:
                readers = joined.episodes.readers if joined else [single]
                parts = [_byte_reader(reader, file, name) for reader in readers]
                found[name] = parts[0] if joined is None else EpisodesField(joined.episodes, name, parts)
            except NotDirect as error:
                why[name] = str(error)
    return found, why


def _byte_readers_of_samples(reader: KeyedReader) -> tuple[dict[str, Any], dict[str, str]]:
    readers, why = {}, {}
    for name in reader.fields:
        try:
            readers[name] = KeyedBytes(reader, name)
        except NotDirect as error:
            why[name] = str(error)
    return readers, why


def _byte_reader(single: Source, file: h5py.File, name: str) -> ByteReader | None:
    field = single.fields[name]
    if not single.num_samples:
        return None
    if isinstance(field, VlenField):
        return VlenBytes(single.path, file, field)
    if isinstance(field, RaggedField):
        return CsrField(single.path, file, field, single.indptr, single.sums)
    if isinstance(field, EncodedField):
        return encoded_bytes(single.path, file, field, single.sums)
    return direct_field(single.path, file, field, single.sums)


def find_offsets(joined: EpisodeFile) -> None:
    """Set the offsets of the rows of uncompressed fields, so that the file need not be listed again."""
    with opened(joined.path) as file:
        for name, starts in joined.starts_of.items():
            episodes = zip(joined.episodes.readers, starts.tolist(), strict=True)
            offsets = [_offsets(reader, start, file, name) for reader, start in episodes]
            known = [rows for rows in offsets if rows is not None]
            if len(known) == len(offsets):
                joined.offsets[name] = np.concatenate(known)


def _offsets(episode: Source, start: int, file: h5py.File, name: str) -> np.ndarray | None:
    """Return the offset of each row of an episode, or None if a row is compressed or cut into pieces."""
    if start >= 0:
        return start + np.arange(episode.num_samples) * episode.fields[name].grid.sample_bytes
    try:
        part = _byte_reader(episode, file, name)
    except NotDirect:
        return None
    if part is None:
        return np.empty(0, np.int64)
    return part.offsets if isinstance(part, PlainField) and part.reads_rows else None


def read_amplification(
    reader: Source, rows: np.ndarray | None, direct: Mapping[str, ByteReader], in_memory: Collection[str] = ()
) -> float:
    """Return the ratio of bytes read to bytes used for these samples, or 1.0 if ``rows`` is empty or None.

    Bytes are counted after decoding, and each chunk counts once, as if a cache held all open chunks. Fields in
    ``direct`` are read by byte ranges, and other fields through HDF5. Fields in ``in_memory`` do not count.
    """
    names = [name for name in reader.fields if name not in in_memory]
    used = 0 if rows is None else sum(_bytes_of(reader, name, rows) for name in names)
    if rows is None or not used:
        return 1.0
    read = 0
    for name in names:
        if name in direct:
            read += direct[name].bytes_read(rows)
            continue
        for number, positions in reader.by_file(rows):
            read += _bytes_by_hdf5(reader.readers[number], name, rows[positions] - reader.starts[number])
    return read / used


def _bytes_of(reader: Source, name: str, rows: np.ndarray) -> int:
    """Return the number of bytes of these samples of a field. Repeated samples are counted repeatedly."""
    field = reader.fields[name]
    if isinstance(field, RaggedField):
        return int((reader.indptr[rows + 1] - reader.indptr[rows]).sum()) * field.entry_bytes
    return len(rows) * field.grid.sample_bytes


def _bytes_by_hdf5(reader: Source, name: str, rows: np.ndarray) -> int:
    """Estimate the bytes read through HDF5's chunk cache: whole chunks, except for large uncompressed samples."""
    field, grid = reader.fields[name], reader.fields[name].grid
    if isinstance(field, Field):
        if not grid.needs_cache or not grid.band_samples:
            return len(rows) * grid.sample_bytes
        return count_items_read(rows, grid.band_samples, grid.shape[0]) * grid.sample_bytes
    if not field.filtered:
        return _bytes_of(reader, name, rows)
    chunks = np.unique(rows // field.chunk_samples)
    ends = np.minimum((chunks + 1) * field.chunk_samples, field.num_rows)
    return int((reader.indptr[ends] - reader.indptr[chunks * field.chunk_samples]).sum()) * field.entry_bytes
