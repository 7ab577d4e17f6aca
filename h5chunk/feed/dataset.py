"""A map-style torch Dataset over any HDF5 file, or several, in which samples lie along the first axis."""

from __future__ import annotations

import math
import operator
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from h5chunk.errors import FieldError, OptionError, printable
from h5chunk.feed.collate import Batch, Sample, collate, no_samples
from h5chunk.feed.matrix_rows import Loaded, MatrixRows, copy_all
from h5chunk.feed.names import common_table, decoded, sample_table, source_names
from h5chunk.feed.order import recommendation, recommended_window
from h5chunk.feed.sample_transforms import SampleTransforms
from h5chunk.feed.shared_memory import SharedMemory
from h5chunk.feed.slots import BatchMemory, torch_dtype
from h5chunk.feed.tagged_batch import Numbering, check_batch, numbering_of
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.line import ChunkLine, Line, PickLine, Picks
from h5chunk.plan.order import INTERLEAVE, Order
from h5chunk.plan.permute import SPLIT, permutation
from h5chunk.plan.picks import pick_samples, split_samples
from h5chunk.store.format import Header
from h5chunk.store.guard.checksums import OFF
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.amplification import NOTABLE, read_amplification
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import Paths, chunk_starts, open_other, open_reader
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader, model_cache

Fields = Mapping[str, str] | Sequence[str]
SAMPLE_NUMBER = "sample_number"


class ChunkDataset(Dataset[Any]):
    """Samples of an HDF5 file, or of several, converted by h5chunk or not, read through HDF5's chunk cache.

    ``dataset[i]`` is a tuple of the fields of sample i; ``dataset[[3, 1, 2]]`` is a tuple of the fields of these
    samples, with a first axis of 3. Numbers are tensors of the file's dtype; fixed-length strings are ``str``.

    The file is opened in each process when it is first read there, with any start method of multiprocessing.

    Parameters
    ----------
    path : path or sequence of paths
        A file; or several as one data set, whose samples are numbered file after file: a folder or a pattern such as
        ``shards/*.h5``, by name with numbers in it by their value, or a list, in its order. Their fields must agree,
        and so must the classes that labels stand for; their chunks may differ. A folder that lacks a shard is an error.
    fields : sequence or mapping of str, optional
        Datasets to read, in this order, or the group of a CSR matrix, which comes first; a mapping gives them names.
        Default: ``images``, or the matrix ``X``, and ``labels`` if there are any. ``sample_number`` is the number of
        each sample in this data set, (n,) int64: with it ``source_names``, ``row_ids`` and `values` tell what is in a
        batch. (Name a dataset that is called so ``/sample_number``.)
    trusted : bool, path or sequence of paths
        Whether to follow links, views of other files and external storage, and to run unknown filters. False: never.
        True: within the file's folder. Paths: within these folders. With False, each
        process first opens a file in a child process, as HDF5 may crash or loop on it: usually 20 to 50 ms, once for
        each choice of fields, and more in processes of many GB.
    checksums : {"off", "first", "always"}
        Check chunks against the checksums that a converted file has: each when a process first reads of it, or whenever
        it does. A chunk is read whole for that, however few of its samples are asked for.
    transform : callable or list of callables, optional
        Applied to the first field of each sample, as torchvision's ``transform`` is to the image. Of a matrix, the
        objects of `h5chunk.transforms` that come first are applied to whole batches as they are read, as
        `ChunkLoader` does it: ``transform=[Log1p(1e4), Dense(torch.float16)]``. Default: dense float32.
        With ``Csr()`` a batch is one ``torch.sparse_csr`` tensor, which a DataLoader's worker can send too, and a
        single row a sparse one. Where the last batch of a rank is empty, a sample that is not used tells the shape.

    Raises
    ------
    FileError
        The file is missing, not HDF5 or cut short; when it is read: it was replaced since, or a chunk is damaged.
    FieldError
        A dataset is missing, or cannot be a field; fields of several files differ.
    OptionError
        An argument is invalid; checksums shall be checked, but there are none.
    """

    def __init__(
        self,
        path: Paths,
        *,
        fields: Fields | None = None,
        trusted: Trusted = False,
        checksums: str = OFF,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    ) -> None:
        named = field_mapping(fields)
        self._numbered = [] if named is None else [name for name, dataset in named.items() if dataset == SAMPLE_NUMBER]
        stored = named if named is None else {name: named[name] for name in named if name not in self._numbered}
        if self._numbered and not stored:
            raise OptionError(f"fields is {fields!r}: name a dataset of the file, too")
        self._reader = open_reader(path, stored, trusted=trusted, checksums=checksums)
        self._names = tuple(self._reader.fields if named is None else named)
        self._check_matrix_first()
        self.transform = transform
        self._transforms = SampleTransforms(transform, self.field(self._names[0]))
        rows = self._transforms.rows
        self._matrix = None if rows is None else MatrixRows(self._reader, rows)
        self._dtypes = {name: torch_dtype(self.field(name).dtype, name) for name in self._names}
        self._samples: np.ndarray | None = None  # of a subset
        self._numbering: Numbering | None = None
        self._memory, self._shared = BatchMemory(), SharedMemory()
        self._order: Order | None = None  # what a sampler said
        self._cache_known: tuple[int, CacheSettings] | None = None  # by number of workers

    def _check_matrix_first(self) -> None:
        for name in self._names[1:]:
            if self.field(name).scale is not None:
                raise OptionError(f"field {name!r} is a matrix: name it first")

    def field(self, name: str) -> Field | MatrixField:
        """What is known of a field without reading it: shape, dtype, chunks."""
        if name in self._numbered:
            return Field(name, "", ChunkGrid((self._reader.num_samples,), None, 8, False), np.dtype(np.int64))
        return self._reader.fields[name]

    @property
    def numbered_fields(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """The fields that are not in the file; the function gives the values of samples by their numbers there."""
        return dict.fromkeys(self._numbered, self._positions)

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        """The numbers in this data set of samples by their numbers in the file."""
        return rows if self._samples is None else np.searchsorted(self._samples, rows)

    @property
    def fingerprint(self) -> int:
        """A number that is the same for copies of a file, and differs between the parts of one.

        Different data have different numbers in h5chunk files, which have checksums; of other files it tells only
        names, shapes and types apart.
        """
        found = self._reader.fingerprint
        return found if self._samples is None else zlib.crc32(self._samples.tobytes(), found)

    @property
    def is_whole(self) -> bool:
        """Whether it has all samples of its file."""
        return self._samples is None

    @property
    def numbering(self) -> Numbering:
        """What its sample numbers mean: equal for all samples of files of one length, or the same part of those."""
        if self._numbering is None:
            self._numbering = numbering_of(self._reader.num_samples, self._samples)
        return self._numbering

    @property
    def num_file_samples(self) -> int:
        """Samples of the file, or of all files."""
        return self._reader.num_samples

    @property
    def subset_samples(self) -> np.ndarray | None:
        """The number in the file of each sample, (n,) int64, ascending; None: all samples of the file."""
        return self._samples

    def new_reader(self) -> H5Reader:
        """Another reader of the same fields."""
        return copy(self._reader)

    def __len__(self) -> int:
        return self._reader.num_samples if self._samples is None else len(self._samples)

    @property
    def samples(self) -> np.ndarray:
        """The number in the file of each sample: (n,) int64, ascending."""
        return np.arange(len(self)) if self._samples is None else self._samples

    def subset(self, samples: Any) -> ChunkDataset:
        """Some of the samples, in the order of the file: chunks in which there are none of them are not read.

        `read_amplification` says how much is read of the others.

        Parameters
        ----------
        samples : array of bool or of int
            A mask of this data set's samples, or their numbers in it.

        Raises
        ------
        OptionError
            A number is out of range or named twice, or the mask has another length.
        """
        part = copy(self)
        picked = pick_samples(samples, len(self))
        part._samples = picked if self._samples is None else self._samples[picked]
        part._reader, part._order, part._cache_known, part._numbering = self.new_reader(), None, None, None
        part._memory, part._shared = BatchMemory(), SharedMemory()
        if self._matrix is not None:
            part._matrix = self._matrix.of(part._reader)
        return part

    def split(self, fractions: Sequence[float], *, seed: int = 0, stratify: str | None = None) -> list[ChunkDataset]:
        """Random parts, such as for training and validation.

        Of a file that was shuffled when it was packed they are made of whole chunks but for those at their borders,
        which is as random and reads nothing in vain; of others, and where classes count, sample by sample. What a part
        reads beside its own samples, its `read_amplification` says.

        Parameters
        ----------
        fractions : sequence of float
            Of each part; they make 1, or less where samples shall be left out.
        seed : int
        stratify : str, optional
            Field of this data set by which each part has each class in equal share.

        Raises
        ------
        OptionError
            The fractions cannot be, or the seed.
        FieldError
            There is no such field, or it has more than a value a sample.
        """
        header = self._reader.header
        size = len(self)
        if stratify is None and header is not None and header.shuffled and self._samples is None:
            starts = chunk_starts(self._reader)
            chunks: Line = ChunkLine(size, self.chunk_samples, seed, 0)
            if starts is not None:
                chunks = PickLine(Picks(starts), seed, 0)
            line = chunks.at(np.arange(size)) if size else np.empty(0, np.int64)
        else:
            line = permutation(size, seed, stream=(SPLIT, 0, 0))
        groups = None if stratify is None else self.values(stratify)
        return [self.subset(part) for part in split_samples(line, fractions, groups, seed)]

    def values(self, name: str) -> np.ndarray:
        """A field of one value per sample, of all samples: (n,), numbers or, as in ``dataset[i]``, ``str``.

        Raises
        ------
        FieldError
            The file has no such field, or it has more than a value a sample.
        OptionError
            This is no name.
        """
        if not isinstance(name, str):
            raise OptionError(f"the name of a field is wanted, but this is a {type(name).__name__}: give a str")
        reader = self._reader if name in self._reader.fields else open_other(self._reader, {name: name})
        field = reader.fields[name]
        if isinstance(field, MatrixField) or field.sample_shape:
            raise FieldError(f"field {name!r} has samples of shape {field.sample_shape}: name one of a value a sample")
        found = np.empty(len(self), field.dtype)
        reader.read(name, self.samples, found)
        return decoded(found)

    @property
    def read_amplification(self) -> float:
        """Bytes that are read of the file when each sample is read once, chunk by chunk, over those of the samples.

        More than 1 for a subset that wants only a part of chunks which have to be read whole, as they are compressed or
        their samples small. See `ChunkLoader.read_amplification` for what that reads.
        """
        return read_amplification(self._reader, self._samples)

    @property
    def path(self) -> str:
        """The file, or what messages call several: the folder, the pattern, or the first of them."""
        return str(self._reader.path)

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order in which their samples are numbered."""
        readers = self._reader.readers if isinstance(self._reader, FileSet) else (self._reader,)
        return tuple(str(reader.path) for reader in readers)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in the order of a sample's tuple."""
        return self._names

    @property
    def header(self) -> Header | None:
        """What a file of ours says about itself; None for others."""
        return self._reader.header

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: ``classes[label]``; empty if the file has none."""
        return self._reader.header.class_names if self._reader.header else ()

    @property
    def source_names(self) -> np.ndarray:
        """The path of each sample below the source that it was converted from: (n,) of str.

        Raises
        ------
        FieldError
            The file has none.
        """
        return source_names(self._reader)[self._kept]

    @property
    def row_ids(self) -> np.ndarray:
        """The id of each sample of a matrix in the source: (n,), whole numbers or str.

        Raises
        ------
        FieldError
            The file has none.
        """
        return sample_table(self._reader, "row_ids")[self._kept]

    @property
    def column_ids(self) -> np.ndarray:
        """The id of each column of a matrix in the source, such as names of genes: (columns,), whole numbers or str.

        Raises
        ------
        FieldError
            The file has none, or files differ.
        """
        return common_table(self._reader, "column_ids")

    def categories(self, field: str) -> np.ndarray:
        """The meaning of a field's codes, (num_categories,) of str: ``categories(field)[code]``; -1 is missing.

        Raises
        ------
        FieldError
            The field has no categories, or files differ.
        """
        return common_table(self._reader, f"categories/{field}")

    @property
    def _kept(self) -> slice | np.ndarray:
        return slice(None) if self._samples is None else self._samples

    @property
    def chunk_samples(self) -> int:
        """Samples that are read together: the chunk of the largest field along the first axis."""
        return self._reader.chunk_samples

    @property
    def window_chunks(self) -> int:
        """Recommended number of chunks to shuffle together."""
        return recommended_window(self._reader)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are read together: of all chunks of the largest field that hold ``chunk_samples`` samples."""
        return self._reader.chunk_bytes

    @property
    def cache(self) -> CacheSettings:
        """The chunk cache of the largest field in this process, as it will be set."""
        worker = get_worker_info()
        num_workers = worker.num_workers if worker is not None else 1
        if self._cache_known is None or self._cache_known[0] != num_workers:
            self._cache_known = num_workers, self._cache_of_one(num_workers)
        return self._cache_known[1]

    def _cache_of_one(self, num_workers: int) -> CacheSettings:
        if self._order is not None:
            self._warn_if_shared(self._order, num_workers)
            return model_cache(self._reader, self._order.open_chunks_of(num_workers), self._order.cache_w0)
        found = recommendation(self._reader)
        if found is not None:
            whole = found[1]
            return CacheSettings(whole.nslots, -(-whole.nbytes // num_workers), whole.w0)
        return model_cache(self._reader, -(-INTERLEAVE * self.window_chunks // num_workers))

    def _warn_if_shared(self, order: Order, num_workers: int) -> None:
        """Say so, from one worker, if chunks will be read by several."""
        readers = num_workers // math.gcd(num_workers, order.interleave)
        worker = get_worker_info()
        matters = order.window_batches > 1 and self._reader.main.grid.needs_cache
        if self._reader.matrix is not None and not self._reader.matrix.filtered:
            matters = False  # rows are read by their byte ranges
        if readers > 1 and matters and worker is not None and worker.id == 0:
            warnings.warn(
                f"num_workers is {num_workers} but the sampler's interleave is {order.interleave}: {readers} workers "
                "will read each chunk; take a number of workers that divides it, or give ChunkSampler "
                f"interleave={math.ceil(order.interleave / num_workers) * num_workers}",
                stacklevel=2,
            )

    def caches_in_force(self) -> dict[str, CacheSettings]:
        """The chunk cache of each field in this process, as HDF5 has it."""
        self._reader.set_caches(self.cache)
        return self._reader.caches_in_force()

    def expect_order(self, order: Order) -> None:
        """Make room for the chunks that this order leaves partly read; a sampler says it.

        Of several samplers, the one that leaves most chunks open decides.
        """
        if self._order is None or order.open_chunks >= self._order.open_chunks:
            self._order = order
            self._cache_known = None

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self._reader.close()
        if self._matrix is not None:
            self._matrix.close()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if isinstance(index, (int, np.integer)) or getattr(index, "ndim", None) == 0:
            batch = self._read(np.array([operator.index(index)], np.int64), shared=False)
            return self._transforms.of_sample(batch[0])
        batch = self._batch(index)
        return batch.fields if not self._transforms.each else tuple(collate(self._each_transformed(batch)))

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Sample]:
        """A whole batch, each chunk read once; torch's DataLoader calls this."""
        batch = self._batch(indices)
        return batch if not self._transforms.each else self._each_transformed(batch)

    def _batch(self, indices: Any) -> Batch:
        check_batch(indices, self.numbering)
        return self._read(_numbers(indices), shared=get_worker_info() is not None)

    def _each_transformed(self, batch: Batch) -> Sequence[Sample]:
        if not len(batch) and len(self):  # a last one that only other ranks have: what would it be?
            return no_samples(self[0])
        return [self._transforms.of_sample(sample) for sample in batch]

    def _read(self, positions: np.ndarray, shared: bool) -> Batch:
        rows = self._rows(positions)
        self._reader.set_caches(self.cache)
        numbers = [name for name, dtype in self._dtypes.items() if dtype is not None]
        loaded = [self._load(name, rows) for name in numbers]
        shapes = [shape for each in loaded for shape in each.shapes]
        assemble = None if self._matrix is None else self._matrix.assemble
        if shared:
            fields: tuple[torch.Tensor, ...] = (sent := self._shared.empty(shapes, assemble))
            tensors = sent.tensors
        else:
            tensors = tuple(self._memory.empty(*shape) for shape in shapes)
            fields = tensors if assemble is None else assemble(tensors)
        left = iter(tensors)
        for each in loaded:
            each.fill(tuple(islice(left, len(each.shapes))))
        if len(numbers) == len(self._dtypes):
            return Batch(fields)
        there = dict(zip(numbers, fields, strict=True))
        return Batch(tuple(there[name] if name in there else self._read_text(name, rows) for name in self.fields))

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """The numbers in the file of samples by their numbers in this data set."""
        if positions.ndim != 1:
            raise IndexError(f"indices have {positions.ndim} axes: give one number or a list of them")
        if positions.size and not (-len(self) <= positions.min() and positions.max() < len(self)):
            wrong = positions[(positions < -len(self)) | (positions >= len(self))][0]
            raise IndexError(f"sample {wrong} of {len(self)}: {printable(self.path)} has samples 0 to {len(self) - 1}")
        positions = np.where(positions < 0, positions + len(self), positions)
        return positions if self._samples is None else self._samples[positions]

    def _load(self, name: str, rows: np.ndarray) -> Loaded:
        """The samples of a field, to be put where they shall be."""
        if self._matrix is not None and name == self.fields[0]:
            return self._matrix.load(rows)
        shape = (len(rows), *self.field(name).sample_shape)
        dtype = self._dtypes[name]
        assert dtype is not None
        if name in self._numbered:
            positions = (torch.from_numpy(self._positions(rows)),)
            return Loaded([(shape, dtype)], lambda tensors: copy_all(positions, tensors))
        return Loaded([(shape, dtype)], lambda tensors: self._reader.read(name, rows, tensors[0].numpy()))

    def _read_text(self, name: str, rows: np.ndarray) -> list[str]:
        field = self._reader.fields[name]
        text = np.empty((len(rows), *field.sample_shape), field.dtype)
        self._reader.read(name, rows, text)
        return decoded(text).tolist()

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{field.name} {field.dtype}{list(field.sample_shape)}" for field in self._reader.fields.values()
        )
        times = self.read_amplification
        beside = "" if times < NOTABLE else f"reads {times:.2f} x their bytes; "
        return printable(
            f"ChunkDataset({self.path!r}: {len(self)} samples of {fields}; chunks of {self.chunk_samples} samples; "
            f"{beside}{self.cache})"
        )


def field_mapping(fields: Fields | None) -> Mapping[str, str] | None:
    """Fields as users name them, as datasets by name."""
    if fields is None or isinstance(fields, Mapping):
        return fields
    names: Any = (fields,) if isinstance(fields, str) else fields
    if isinstance(names, bytes) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"fields is {fields!r}: give names of datasets, or a mapping of names to datasets")
    names = [str(name) for name in names]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise OptionError(f"fields names {twice!r} twice: give each a name of its own: fields={{'name': {twice!r}}}")
    return {name: name for name in names}


def _numbers(indices: Any) -> np.ndarray:
    """Sample numbers as an array; what would be rounded or taken for 0 and 1 is refused."""
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):
        raise IndexError("indices are lists of different lengths: give one number or a list of them") from None
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"indices are of type {numbers.dtype}: give whole numbers; for a mask, mask.nonzero()[0]")
    return numbers.astype(np.int64, copy=False)
