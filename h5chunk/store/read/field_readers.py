"""Make the readers of a source's fields from what each of its files stores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, OptionError, is_of_data, printable
from h5chunk.store.hdf5.chunk_table import NotDirect
from h5chunk.store.hdf5.open import same_file
from h5chunk.store.hdf5.types import element_of
from h5chunk.store.read.arrays import Arrays
from h5chunk.store.read.checksums import Sums
from h5chunk.store.read.engine import CACHE_BYTES, BlockCache
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.samples import CsrBuffers, Elements, EncodedRows, FieldReader, Part, Rows, Runs, Texts
from h5chunk.store.read.source import Source
from h5chunk.store.read.stored import dataset_arrays, no_values
from h5chunk.store.read.through_hdf5 import hdf5_arrays

VARIABLE = "H5CHUNK_READER"
AUTO, DIRECT, H5PY = "auto", "direct", "h5py"  # ways to read: the faster one, without HDF5, or only with HDF5
WHOLE_ROW_BYTES = 1 << 10  # fields with rows of at most this size are kept in memory
WHOLE_BYTES = 64 << 20  # unless the field is larger than this
WINDOWS_COUNTED = 64  # windows from which the read amplification of a scattered field is estimated
NOTABLE = 1.01  # read amplification above this is reported


_way: ContextVar[str | None] = ContextVar("way", default=None)


@contextmanager
def reading(way: str) -> Iterator[None]:
    """Read the fields that are opened in this context in a certain way, to compare the ways."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def chosen_way() -> str:
    """Return the way to read. Users may set the environment variable ``H5CHUNK_READER``, to find out what differs.

    Raise OptionError if there is no such way.
    """
    way = _way.get() or os.environ.get(VARIABLE) or AUTO
    if way not in (AUTO, DIRECT, H5PY):
        raise OptionError(f"{VARIABLE} is {way!r}: set it to {AUTO!r}, {DIRECT!r} or {H5PY!r}, or unset it")
    return way


@dataclass
class Opening:
    """The cache, the way of reading and the file numbers with which all fields of a data set are opened."""

    cache: BlockCache  # of decoded blocks
    way: str = AUTO  # the reader: `AUTO`, `DIRECT` or `H5PY`
    first_file: int = 0  # the number of a source's first file in the data set
    why: dict[str, str] = field(default_factory=dict)  # the reason for each field that HDF5 must read, filled here

    def arrays(
        self,
        file: OpenStored,
        name: str,
        dataset: str,
        part: str = "",
        indptr: np.ndarray | None = None,
        *,
        member: Sequence[str] = (),
        axes: int = 1,
        sums: Sums | None = None,
        decode: str = "",
    ) -> Arrays:
        """Describe a dataset of an open file as an array, which HDF5 reads if it must.

        ``sums`` has the checksums to verify. Default: those of the file's source.
        """
        item, full = file.file[dataset], f"{name}/{part}" if part else name
        path, sums = file.path, file.source.sums if sums is None else sums
        element = element_of(item, f"{printable(path)}: {dataset!r}", member, decode)
        if not item.size:
            return no_values(path, full, file.number, item, element, axes)
        reason = f"requested by {VARIABLE}={H5PY}"
        if self.way != H5PY:
            try:
                if not same_file(item, file.file):
                    raise NotDirect("it is in another file, to which a link refers")
                return dataset_arrays(path, full, file.number, item, element, sums, indptr, axes=axes)
            except NotDirect as error:
                reason = str(error)
        self.why.setdefault(name, reason)
        about = full, file.number, item, dataset, element, sums, indptr, self.cache.hdf5, file.source.check_unchanged
        return hdf5_arrays(path, *about, axes=axes)

    def file(self, source: Source, file: h5py.File, number: int) -> OpenStored:
        """Return an open file of a source. ``number`` is its number in the data set."""
        return OpenStored(self, source, file, number)

    def joined(self, source: Source, names: Collection[str]) -> dict[str, FieldReader]:
        """Return the readers of fields whose samples are those of all files, one after the other."""
        parts: dict[str, list[tuple[int, Part]]] = {name: [] for name in names}
        first = self.first_file
        for start, each in zip(source.starts.tolist(), source.readers, strict=False):
            for name, part in each.stored_parts(self, first, names).items() if each.num_samples else ():
                parts[name].append((start, part))
            first += len(each.file_list)
        return {name: _joined(source, name, own, self.cache) for name, own in parts.items()}


@dataclass
class OpenStored:
    """An open file of a source, whose fields are described as arrays. See `h5chunk.store.read.samples.StoredFile`."""

    opening: Opening
    source: Source
    file: h5py.File
    number: int

    @property
    def path(self) -> Path:
        return self.source.path

    def arrays(self, name: str, dataset: str, part: str = "", indptr: np.ndarray | None = None, **how: Any) -> Arrays:
        return self.opening.arrays(self, name, dataset, part, indptr, **how)


def field_readers(
    source: Source, way: str | None = None, names: Collection[str] | None = None
) -> tuple[dict[str, FieldReader], dict[str, str]]:
    """Return the readers of a source's fields, and the reasons why some of them are read through HDF5.

    The default of ``way`` is `chosen_way`. ``names`` are the fields to read; default: all. Raises FileError if a file
    is damaged or was changed.
    """
    opening = Opening(BlockCache(), chosen_way() if way is None else way)
    wanted = source.fields if names is None else names
    fields = source.field_readers(opening, wanted) if source.num_samples else {}
    opening.cache.limit_bytes = min(CACHE_BYTES, sum(each.kept_bytes for each in fields.values()))
    return fields, opening.why


def _joined(source: Source, name: str, parts: Sequence[tuple[int, Part]], cache: BlockCache) -> FieldReader:
    field, part = source.fields[name], Part.joined(parts)
    reader: FieldReader
    if part.kind is Rows:
        reader = Rows(name, part.arrays[0], part.starts, field.grid.shape[0], cache, part.axis)
    elif part.kind is Elements:
        reader = Elements(name, part.arrays[0], part.sizes is not None, part.step_items, cache)
    elif part.kind is Texts:
        reader = Texts(name, part.arrays[0], part.step_items, field.dtype.itemsize, cache)
    else:
        indptr = source.indptr_of(name)
        steps = indptr if part.step_items == 1 else indptr // part.step_items
        reader = Runs(name, part.arrays, steps, steps[part.starts], part.step_items, cache)
    if not part.texts or part.sizes is None:
        return reader
    return EncodedRows(reader, part.sizes, field, part.texts, part.starts)


def read_rows(source: Source, name: str, rows: np.ndarray) -> np.ndarray:
    """Read samples of a field whose samples do not differ in length: (n, *sample_shape) of the field's dtype."""
    field = source.fields[name]
    values = np.zeros((len(rows), *field.sample_shape), field.dtype)
    if values.size:
        read_into(source, name, rows, values.reshape(len(rows), -1).view(np.uint8))
    return values


def read_into(source: Source, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
    """Read samples into memory, as `FieldReader.tasks` describes it."""
    fields, _ = field_readers(source, names=[name])
    order = np.argsort(rows, kind="stable")
    with closing(OpenFiles(source)) as files:
        try:
            files.run(fields[name].tasks(rows[order], order, out) if len(rows) else ())
        finally:
            fields[name].cache.forget()
            source.check_unchanged()


def is_small_field(field: FieldReader) -> bool:
    """Return whether a field is small enough to be read once and kept in memory."""
    return field.row_bytes <= WHOLE_ROW_BYTES and field.num_bytes <= WHOLE_BYTES


def read_small_fields(
    fields: Mapping[str, FieldReader],
    descriptions: Mapping[str, Any],
    files: OpenFiles,
    check: Callable[[], None],
    max_bytes: float = math.inf,
    *,
    skips: bool = False,
) -> dict[str, np.ndarray]:
    """Read the small fields that are kept in memory, and return them by name. Each has at most ``max_bytes``.

    If reading fails, ``check`` is called first, which raises an error if the file was changed. If reading succeeds, the
    caller must call ``check``. With ``skips``, damaged fields are left out, to be read sample by sample.
    """
    found = {}
    try:
        for name, each in fields.items():
            if is_small_field(each) and each.num_bytes <= max_bytes:
                stored = descriptions[name]
                values = np.zeros((each.num_rows, *stored.sample_shape), stored.dtype)
                try:
                    if values.size:
                        values.reshape(len(values), -1).view(np.uint8)[...] = each.read_all(files)
                except FileError as error:
                    if not skips or not is_of_data(error):
                        raise
                    check()
                    continue
                found[name] = values
    except (FileError, ValueError, OSError):
        check()
        raise
    return found


def scratch_bytes(fields: Collection[FieldReader], num_threads: int) -> int:
    """Return how many bytes of memory threads need for blocks, in addition to the samples themselves."""
    kept = next((each.cache.limit_bytes for each in fields), 0)
    return num_threads * max((each.thread_bytes for each in fields), default=0) + kept


def read_amplification(
    source: Source, rows: np.ndarray | None, fields: Mapping[str, FieldReader], in_memory: Collection[str] = ()
) -> float:
    """Return the ratio of bytes read to bytes used for these samples, or 1.0 if ``rows`` is empty or None.

    Bytes are counted after decoding, and each block counts once, as if a cache held all open blocks. Fields in
    ``in_memory`` do not count.
    """
    names = [name for name in fields if name not in in_memory]
    used = 0 if rows is None else sum(_bytes_of(source, name, rows) for name in names)
    if rows is None or not used:
        return 1.0
    return sum(_bytes_read(source, fields[name], rows) for name in names) / used


def _bytes_read(source: Source, field: FieldReader, rows: np.ndarray) -> float:
    """Return the bytes that are read for samples, in ascending order.

    A block of a scattered field is read again for each window, unless the cache holds all blocks. This is estimated
    from some of the windows.
    """
    window = max(1, source.recommended_window * source.chunk_samples)
    is_kept = is_small_field(field) or (not field.is_raw and field.num_bytes <= min(CACHE_BYTES, field.kept_bytes))
    if not field.is_scattered or is_kept or len(rows) <= window:
        return field.bytes_read(rows)
    count = -(-len(rows) // window)
    chosen = np.unique(np.linspace(0, count - 1, min(count, WINDOWS_COUNTED)).astype(np.int64)).tolist()
    windows = [rows[number * window : (number + 1) * window] for number in chosen]
    return sum(map(field.bytes_read, windows)) * len(rows) / sum(map(len, windows))


def _bytes_of(source: Source, name: str, rows: np.ndarray) -> int:
    """Return the number of bytes of these samples of a field. Repeated samples are counted repeatedly."""
    field = source.fields[name]
    if (ragged := source.ragged_fields.get(name)) is not None:
        indptr = source.indptr_of(name)
        return int((indptr[rows + 1] - indptr[rows]).sum()) * ragged.entry_bytes
    return len(rows) * field.grid.sample_bytes
