"""Read samples on demand, in any process, in the same way as `h5chunk.ChunkLoader` does, with the same checks.

Decoded chunks are kept for later batches, in as much memory as HDF5's chunk cache would have.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from h5chunk.errors import FileError, OptionError
from h5chunk.feed.collate import Batch, TaggedBatch
from h5chunk.feed.columns import Ragged, ragged_kind, torch_dtype
from h5chunk.feed.disk_cache import DiskCache
from h5chunk.feed.kept_rows import KeptRows, num_kept_chunks
from h5chunk.feed.memory import KEPT, BatchMemory
from h5chunk.feed.shared import Assemble, SharedMemory
from h5chunk.feed.stored_tables import decoded, name_of_sample
from h5chunk.machine import own_cores
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.draws import Draws
from h5chunk.plan.order import INTERLEAVE, Order
from h5chunk.stamp import stamp_of
from h5chunk.store.read.field_readers import field_readers, read_small_fields
from h5chunk.store.read.fields import Field
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.ragged import RaggedField, SeriesField
from h5chunk.store.read.reader import Source
from h5chunk.transforms.any_size import whole_images
from h5chunk.transforms.compile import (
    BATCH_TRANSFORMS,
    DRAWN,
    Transforms,
    check_first,
    compile_transforms,
    transforms_by_field,
)
from h5chunk.transforms.converter import Converter, Loaded, loaded
from h5chunk.transforms.csr import CsrRows, fresh
from h5chunk.transforms.images import convert
from h5chunk.transforms.mixing import Mixer, split_mixing
from h5chunk.transforms.normalize import Normalize, ToDtype
from h5chunk.transforms.pairs import Items, Kind, is_packed, num_tensors
from h5chunk.transforms.segments import as_array, make_csr

SMALL_FIELD_BYTES = 8 << 20  # fields of at most this size, with small rows, are kept in memory

Tensors = Sequence[torch.Tensor]


class SampleTransforms:
    """The transforms of a data set, separated into transforms of batches and transforms of single samples.

    ``converters`` convert batches: the rows of a matrix, samples of different lengths, and images that are augmented.
    ``items`` makes batches of tensors. The ``mixer``, if any, mixes finished batches.
    """

    def __init__(self, transforms: Transforms | None, fields: Mapping[str, Field | RaggedField]) -> None:
        self.given = transforms
        by_field, mixing = split_mixing(transforms_by_field(transforms, fields))
        self.converters: dict[str, Converter] = {}
        self._each: list[Sequence[Callable[[Any], Any]]] = []  # of each value of a sample
        kinds: dict[str, Kind | None] = {}
        for name, field in fields.items():
            others = self._compile(by_field[name], field)
            converter = self.converters.get(name)
            kinds[name] = None if converter is None else converter.pair
            self._each += [others] * num_tensors(kinds[name])
        self.items = Items(kinds)
        self.has_each = any(self._each)
        self.mixer = None if mixing is None else Mixer(mixing, fields, list(map(num_tensors, kinds.values())))
        self._draws = mixing is not None or any(each.is_random for each in self.converters.values())

    def _compile(self, transforms: Sequence[Any], field: Field | RaggedField) -> Sequence[Callable[[Any], Any]]:
        """Create the converter of a field if it needs one, and return the transforms for single samples."""
        stored = torch_dtype(field.dtype, field.name)
        check_first(transforms, field, stored)
        if any(isinstance(each, ToDtype) and each.channels_last for each in transforms):
            raise OptionError(
                "channels_last is for batches, but a data set transforms single samples: use a ChunkLoader"
            )
        needs = field.scale is not None or isinstance(field, SeriesField)
        if needs or any(isinstance(each, DRAWN) for each in transforms):
            converter, others = compile_transforms(transforms, field, stored, fresh)
            if converter.whole_by and others:
                raise OptionError(
                    f"transforms has functions of a sample, but {converter.whole_by} makes whole batches: pass them as "
                    "collate_fn"
                )
            self.converters[field.name], transforms = converter, others
        return tuple(
            partial(_apply_to_sample, each, field) if isinstance(each, BATCH_TRANSFORMS) else each
            for each in transforms
        )

    def packs(self, name: str | None) -> bool:
        """Return whether the samples of a field that differ in length are concatenated."""
        return is_packed(self.items.kinds.get(name or ""))

    def draws(self, indices: Any, rows: np.ndarray) -> Draws:
        """Return the random draws for samples. Without a sampler, seed and epoch come from torch, anew at each read."""
        if isinstance(indices, TaggedBatch):
            return Draws(indices.seed, indices.epoch, rows + indices.repeats)
        drawn = int(torch.randint(1 << 62, ())) if self._draws else 0
        return Draws(drawn, drawn, rows)

    def apply_to_sample(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.has_each:
            return sample
        values = list(sample)
        for number, transforms in enumerate(self._each):
            for transform in transforms:
                values[number] = transform(values[number])
        return tuple(values)


def _apply_to_sample(transform: Callable[[Any], Any], field: Field | RaggedField, sample: torch.Tensor) -> Any:
    """Apply a transform of batches to one sample, which functions may have changed."""
    is_stored = isinstance(field, Field) and tuple(sample.shape) == field.sample_shape
    if is_stored and isinstance(transform, (Normalize, ToDtype)):
        return convert(transform, sample[None], field.axes)[0]
    return transform(sample[None])[0]


@functools.cache
def _assemble(columns: tuple[int | None, ...]) -> Assemble | None:
    """Return the function that makes the fields of a batch, given their `Loaded.num_columns`; None if nothing does.

    It is always the same one for the same fields, so that it is sent to another process only once.
    """
    return partial(_with_csr, columns) if any(each is not None for each in columns) else None


def _with_csr(columns: tuple[int | None, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Combine three tensors into a CSR tensor where there are columns. This may run in the receiving process."""
    left, fields = iter(tensors), list[torch.Tensor]()
    for num_columns in columns:
        first = next(left)
        if num_columns is not None:
            first = make_csr(first, next(left), next(left), (first.shape[0] - 1, num_columns))
        fields.append(first)
    return tuple(fields)


class SampleReader:
    """Reads the fields of a `ChunkDataset`. ``converters`` are the converters by field name.

    With ``skips``, small fields that are damaged are not kept in memory.
    """

    def __init__(
        self, reader: Source, converters: Mapping[str, Converter], order: Order | None, *, skips: bool = False
    ) -> None:
        self._reader, self._converters, self._order, self._skips = reader, converters, order, skips
        self._memory, self._shared = BatchMemory(KEPT * len(converters)), SharedMemory()
        self._name_of = partial(name_of_sample, reader)
        self._opened: _OpenFields | None = None
        self._cache: tuple[int, CacheSettings] | None = None  # number of workers, and the settings for that number

    def read(
        self, names: Sequence[str], draws: Draws, numbered: Mapping[str, np.ndarray], *, shared: bool, ordered: bool
    ) -> Batch:
        """Read the fields of the samples in ``draws``, in any order and possibly repeated.

        ``numbered`` has the values of fields that are not in the file. With ``shared``, the batch is put into memory
        that is shared with the main process of a DataLoader. ``ordered`` is true if a sampler drew the samples.
        """
        found: list[Loaded | list[Any]] = []
        packed: list[int] = []
        for name in names:
            convert = self._converters.get(name)
            packed += [len(found)] if convert is not None and is_packed(convert.pair) else []
            found += self._load(name, draws, numbered.get(name), ordered)
        numbers = [each for each in found if isinstance(each, Loaded)]
        shapes = [shape for each in numbers for shape in each.shapes]
        assemble = _assemble(tuple(each.num_columns for each in numbers))
        if shared:
            fields: tuple[torch.Tensor, ...] = (sent := self._shared.empty(shapes, assemble))
            tensors = sent.tensors
        else:
            tensors = tuple(self._memory.empty(*shape) for shape in shapes)
            fields = tensors if assemble is None else assemble(tensors)
        left = iter(tensors)
        for each in numbers:
            each.fill(tuple(islice(left, len(each.shapes))))
        # a single file is checked here; several files are checked as they are read
        opened = self._opened
        if opened is not None and not opened.files.are_several and stamp_of(self._reader.path) != self._reader.stamp:
            self._reader.check_unchanged()
        if len(numbers) == len(found):  # `SharedFields` stay whole, and are sent to the other process without a copy
            return Batch(fields, len(draws.samples), packed)
        made = iter(fields)
        whole = tuple(next(made) if isinstance(each, Loaded) else each for each in found)
        return Batch(whole, len(draws.samples), packed)

    def share(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy the fields of a batch to memory that is shared with the main process, if all are dense tensors."""
        if not all(isinstance(each, torch.Tensor) and each.layout == torch.strided for each in fields):
            return fields
        shared = self._shared.empty([(tuple(each.shape), each.dtype) for each in fields])
        for own, out in zip(fields, shared.tensors, strict=True):
            np.copyto(as_array(out), as_array(own))
        return shared

    def _load(self, name: str, draws: Draws, numbers: np.ndarray | None, ordered: bool) -> Sequence[Loaded | list[Any]]:
        """Load the samples of a field: one item, or inputs and targets if entries are held out. Strings are a list."""
        if numbers is not None and numbers.dtype.kind == "S":
            return [decoded(numbers).tolist()]
        if numbers is not None:
            return [loaded(torch.from_numpy(numbers))]
        field: Any = self._reader.fields[name]
        rows, convert = draws.numbers, self._converters.get(name)
        kind = self._open().kinds.get(name)
        if convert is not None:
            return convert.load(self._samples(field, kind, rows, ordered), draws)
        if kind is not None:  # images of any size, which are decoded one by one
            sizes = self._reader.image_sizes_of(name)
            return [whole_images(self._read_entries(name, kind, rows), rows, sizes, field, self._name_of)]
        shape, dtype = (len(rows), *field.sample_shape), torch_dtype(field.dtype, name)
        if dtype is None:
            text = np.empty(shape, field.dtype)
            self._read(name, rows, text)
            return [decoded(text).tolist()]
        return [
            Loaded([(shape, dtype)], lambda tensors: self._read(name, rows, as_array(tensors[0]).view(field.dtype)))
        ]

    def _samples(self, field: Any, kind: Ragged | None, rows: np.ndarray, ordered: bool) -> torch.Tensor | CsrRows:
        """Read the samples that a converter converts. Rows of a matrix are valid until the next call."""
        if kind is not None:
            order = self._order if ordered and kind.is_matrix and len(rows) else None
            kept = None if order is None else self._open().kept_rows(field.name, order)
            return self._read_entries(field.name, kind, rows) if kept is None else kept.take(np.ascontiguousarray(rows))
        stored = np.empty((len(rows), *field.sample_shape), field.dtype)
        self._read(field.name, rows, stored)
        return torch.from_numpy(stored)

    def _read(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        opened = self._open()
        if not out.size:
            return
        if name in opened.whole:
            stored = opened.fields[name].rows_of(rows)
            np.take(opened.whole[name], stored, axis=0, out=out, mode="clip")  # in other modes NumPy copies twice
        else:
            opened.read(name, rows, out.reshape(len(rows), -1).view(np.uint8))

    def _read_entries(self, name: str, kind: Ragged, rows: np.ndarray) -> CsrRows:
        column = kind.empty(rows, fresh)
        if len(rows):
            self._open().read(name, rows, kind.destination(column).out)
        kind.check(column)
        return column

    def _open(self) -> _OpenFields:
        opened = self._opened  # another thread may close the files meanwhile
        if opened is None or opened.process != os.getpid():
            self._opened = opened = _OpenFields(self._reader, self.cache, self._skips)
            worker = get_worker_info()  # the workers share the cores
            num_threads = None if worker is None else max(1, own_cores() // worker.num_workers)
            for convert in self._converters.values():
                convert.attach(self._reader, self._name_of, num_threads, torch.device("cpu"))
        return opened

    def close(self) -> None:
        """Close the files in this process. The next read opens them again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.process == os.getpid():
            opened.close()

    @property
    def cache(self) -> CacheSettings:
        """Settings of the chunk cache of the largest field in this process."""
        worker = get_worker_info()
        num_workers = worker.num_workers if worker is not None else 1
        if self._cache is None or self._cache[0] != num_workers:
            self._cache = num_workers, self._cache_of_one(num_workers)
        return self._cache[1]

    def _cache_of_one(self, num_workers: int) -> CacheSettings:
        if self._order is not None:
            self._warn_if_shared(self._order, num_workers)
            return self._reader.main.grid.cache_for(self._order.open_chunks_of(num_workers), self._order.cache_w0)
        recommended = self._reader.recommendation
        if recommended is not None:
            whole = recommended[1]
            return CacheSettings(whole.nslots, -(-whole.nbytes // num_workers), whole.w0)
        return self._reader.main.grid.cache_for(-(-INTERLEAVE * self._reader.recommended_window // num_workers))

    def _warn_if_shared(self, order: Order, num_workers: int) -> None:
        """Warn, in the first worker only, that several workers will decode the same chunks."""
        readers = num_workers // math.gcd(num_workers, order.interleave)
        worker = get_worker_info()
        if worker is None or worker.id or readers == 1 or order.window_batches == 1:
            return
        grid = self._reader.main.grid
        if grid.filtered or grid.chunks_per_sample > 1:  # chunks are decoded, or read in pieces
            one_by_one = "but the sampler's windows follow one another"
            which = f"which does not divide {order.interleave}, the number of the sampler's windows that alternate"
            warnings.warn(
                f"num_workers is {num_workers}, {one_by_one if order.interleave == 1 else which}, so {readers} workers "
                f"will read each chunk: pass num_workers={num_workers} to the ChunkSampler, too",
                stacklevel=2,
            )


class _OpenFields:
    """The readers of the fields in this process, and small fields in memory (``whole``).

    Decoded chunks of the main field are kept in the memory of ``cache``, and as many samples of other fields.
    """

    def __init__(self, reader: Source, cache: CacheSettings, skips: bool) -> None:
        self.process, self._reader = os.getpid(), reader
        self.kinds = {name: ragged_kind(reader, field) for name, field in reader.ragged_fields.items()}
        self.fields = field_readers(reader)[0]
        self._cache = DiskCache(reader, self.fields)
        self.files = OpenFiles(reader)
        weakref.finalize(self, self.files.close)
        self._lock, self._num_reading, self._is_closed = threading.Lock(), 0, False
        check = reader.check_unchanged
        stored = {name: reader.source_of(name).fields[name] for name in self.fields}
        rows = {name: field.rows_field for name, field in self.fields.items()}
        self.whole = read_small_fields(rows, stored, self.files, check, SMALL_FIELD_BYTES, skips=skips)
        for field in self.fields.values():
            field.cache.limit_bytes = max(field.cache.limit_bytes, self._kept_bytes(cache))
        self._kept: dict[str, tuple[int, KeptRows | None]] = {}  # by matrix, with the thread that uses them

    def kept_rows(self, name: str, order: Order) -> KeptRows | None:
        """Return the rows of a matrix that are kept for this order, or None if its chunks need too much memory.

        Only the first thread that calls this gets them, because another thread could free rows that are being copied.
        """
        thread = threading.get_ident()
        if name not in self._kept:
            self._kept[name] = thread, self._keep(name, order)
        owner, kept = self._kept[name]
        return kept if owner == thread else None

    def _keep(self, name: str, order: Order) -> KeptRows | None:
        kind, worker = self.kinds[name], get_worker_info()
        if not kind.indptr[-1]:
            return None
        num_workers = 1 if worker is None else worker.num_workers
        matrices = [each for each in self.kinds.values() if each.is_matrix]
        if num_chunks := num_kept_chunks(self._reader, matrices, order, num_workers):
            with suppress(OSError):  # some machines refuse to reserve so much memory
                return KeptRows(self._reader, kind, num_chunks, partial(self.read, name))
        return None

    def close(self) -> None:
        """Close the files, after the last thread that is reading them."""
        with self._lock:
            self._is_closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._num_reading:
            self.files.close()
            for field in self.fields.values():
                field.cache.forget()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the files open in a context: the number of a closed file may already belong to another one."""
        with self._lock:
            if self._is_closed and not self._num_reading:  # another thread has closed them since this one got them
                self.files = OpenFiles(self._reader)
            self._num_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reading -= 1
                self._close_if_unused()

    def _kept_bytes(self, cache: CacheSettings) -> int:
        main, total = self._reader.main, cache.nbytes
        room = cache.nbytes // max(1, main.grid.band_bytes) * self._reader.chunk_samples  # in samples
        for name, field in self._reader.fields.items():
            grid = field.grid
            if name != main.name and grid.needs_cache and grid.band_samples and name not in self.whole:
                total += grid.cache_for(-(-room // grid.band_samples) + 1).nbytes
        return total

    def read(self, name: str, rows: np.ndarray, out: Any) -> None:
        """Read rows of a field. ``out`` is (n, row_bytes) uint8 or, for a matrix, a `CsrBuffers`."""
        with self._in_use():
            self._read(name, rows, out)

    def _read(self, name: str, rows: np.ndarray, out: Any) -> None:
        order = np.argsort(rows, kind="stable")
        try:
            self.files.run(self.fields[name].tasks(rows[order], order, out), self._cache.make_room)
        except FileError:
            self._reader.check_unchanged()
            raise
