"""A map-style torch Dataset over one or several HDF5 files whose first axis is the sample axis."""

from __future__ import annotations

import operator
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from h5chunk.attributes import cached_property
from h5chunk.errors import (
    FieldError,
    FileError,
    OptionError,
    check_flag,
    count_text,
    is_of_data,
    names_text,
    printable,
    shown,
)
from h5chunk.feed.collate import (
    Batch,
    Numbering,
    TaggedBatch,
    TaggedIndex,
    check_numbering,
    collate,
    no_samples,
    sample_numbers,
)
from h5chunk.feed.columns import torch_dtype
from h5chunk.feed.filter import find_samples
from h5chunk.feed.sample_reader import SampleReader, SampleTransforms
from h5chunk.feed.skipping import MAX_SKIPPED, RAISE, SKIP, BadSample, OneBatch, Skipping, check_on_error
from h5chunk.feed.stored_tables import StoredNames
from h5chunk.paths import check_path
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.draws import REPEAT, Draws, epoch_rows
from h5chunk.plan.order import Order
from h5chunk.plan.permutation import SPLIT, ShuffledSequence, permutation
from h5chunk.plan.selection import FixedSelection, SelectionSequence, select_samples, split_samples
from h5chunk.remote.mirror import remote_options
from h5chunk.store.hdf5.packing import check_decode
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.field_readers import NOTABLE, field_readers, read_amplification, read_rows
from h5chunk.store.read.fields import SAMPLE_NUMBER, Field, Fields, parse_fields
from h5chunk.store.read.files import MAPPING, Paths, open_joined, open_reader, reopen_with_fields
from h5chunk.store.read.fileset import are_images
from h5chunk.store.read.joined import DROP, ERROR
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.source import Computed, Source
from h5chunk.store.read.tables import decoded
from h5chunk.transforms.compile import Transforms
from h5chunk.transforms.mixing import seeds_of_batches
from h5chunk.transforms.pairs import Items

OTHER_TRANSFORMS = (
    'assign dataset.transforms = {"labels": function} to transform the field labels, for example; for a function of '
    "several fields, define __getitem__ in a subclass"
)


class ChunkDataset(StoredNames, Dataset[Any]):
    """Samples of one or several HDF5 files, converted by h5chunk or not, as a map-style data set of torch.

    ``dataset[i]`` is a tuple of the fields of sample i; ``dataset[[3, 1, 2]]`` is a tuple of the fields of these three
    samples, stacked along the first axis. Numbers are tensors of the file's dtype; strings are ``str``. With
    ``as_dict=True``, these are dicts by field, for a model that is called as ``model(**batch)``::

        dataset = h5chunk.ChunkDataset("texts.h5", fields={"input_ids": "tokens", "labels": "labels"}, as_dict=True)

    Uncompressed data is read as by `ChunkLoader`, compressed data through HDF5's chunk cache. Each process opens the
    file at its first read, with any start method of multiprocessing.

    Parameters
    ----------
    path : path, sequence of paths, or mapping of str to these
        One file, or several files that form one data set: a folder, a pattern such as ``shards/*.h5``, or a list.
        Samples are numbered file after file. The files of a folder or a pattern are sorted by name (``2.h5`` before
        ``10.h5``); those of a list keep its order. Fields and class names must agree, but chunks may differ. A folder
        that lacks a shard raises FileError. URLs of objects (``s3://``, ``gs://``, ``az://``, ``https://``) need the
        extra ``remote``. Their bytes are fetched by range requests as they are needed, and an object that changes
        raises FileError. If fields of the same samples are in different files, pass a mapping of fields to files, such
        as ``{"x": "train_x.h5", "y": "train_y.h5"}``, or to sets of files: ``{"x": "images/*.h5", "y": "labels.h5"}``.
        Sample i has row i of each of them, unless ``key`` is given. Files that were shuffled when they were converted
        must have the same order for this.
    fields : sequence or mapping of str, optional
        Datasets to read, in this order, or the groups of CSR matrices; a mapping gives them names.
        Default: ``images``, or the matrix ``X``, and ``labels`` if they exist. ``sample_number`` is the number of each
        sample in this data set, (n,) int64, which indexes `source_names`, `row_ids` and `values`:
        ``dataset.source_names[numbers]``. (Write ``/sample_number`` for a dataset with that name.) The field
        ``h5chunk/source_index`` of a converted file is the number of each sample in its source, such as the row of an
        array.
    offsets, lengths : mapping of str, optional
        For a field whose samples differ in length, and are stored one after another along the first axis: a dataset
        with the offsets of the samples, (n + 1,), from 0 to the number of rows, or with their lengths, (n,). An example
        is ``offsets={"tokens": "starts"}``; with ``{"tokens": "starts", "tags": "starts"}``, two fields have the same
        offsets. A batch has the values and lengths of each such field as one item, a named tuple: see
        `h5chunk.transforms.Pad` (the default), `h5chunk.transforms.Pack` and `h5chunk.transforms.Nested`.
    sample_axis : int or mapping of str to int, optional
        The axis along which samples are, of all datasets in ``fields``, or by field name. The default is 0, the first
        one. Files of MATLAB often need -1, the last axis: sample i of a dataset of shape (C, H, W, N) then has the
        shape (C, H, W). If the axis is not the first one, each window reads all of a contiguous dataset, as
        `read_amplification` says.
    key : str or mapping of str, optional
        If ``path`` is a mapping: a dataset with one number or text per sample, which says which sample it is; or the
        tables ``source_names`` and ``row_ids`` of a file; or ``sample_number``, the number of the row. A mapping has
        the key of each file, by one of its fields: ``{"x": "h5chunk/source_index", "y": "sample_number"}`` is for an x
        that was shuffled when it was converted, and a y in the order of its source. Samples are in
        the order of the file with the largest samples, where several may have the same key. Compressed chunks of files
        in another order are read again for each window, unless they fit in memory: `read_amplification` counts that.
    missing : {"drop", "error"}
        What to do if keys are not in all files: leave out these samples, with a warning, or raise FieldError.
    trusted : bool
        Whether to follow links, views of other files and external storage, wherever they lead, and to run unknown
        filters. If False, a file is first opened in a child process (some 15 ms, and a second for the first file of a
        process), as HDF5 may crash on it.
    checksums : {"off", "first", "always"}
        Check chunks against the checksums of a converted file: once per process, or at every read. This reads complete
        chunks, even if only a few of their samples are needed.
    decode : {"cf"}, optional
        Unpack the numbers of netCDF files by the CF conventions: value = stored value * ``scale_factor`` +
        ``add_offset``; ``_FillValue``, ``missing_value`` and values outside of ``valid_range`` become NaN. The result
        is float32, or float64 for stored float64 and for integers of 32 or 64 bits unless their scale is float32. With
        ``_Unsigned``, signed integers are read as unsigned ones. Each file, episode or volume may be packed in another
        way. Only datasets with such attributes are converted. Default: the stored numbers.
    transforms : callable, list of callables, or dict of these, optional
        Applied to the first field of each sample, as torchvision's ``transform`` is to the image, or to several fields
        by name. A `ChunkLoader` takes the same, but calls functions with batches. If the first transforms are objects
        of `h5chunk.transforms` that augment images or convert a matrix, they are applied to whole batches as they are
        read: ``transforms=[Log1p(1e4), Dense(torch.float16)]``. By default, a matrix becomes dense float32, which
        rounds float64 (``Dense(torch.float64)`` does not). With ``Csr()`` a batch is one ``torch.sparse_csr`` tensor,
        also from a worker, and a single row is a sparse tensor. `h5chunk.transforms.MixUp` and `CutMix` come last, and
        mix whole batches; reading a single sample then raises OptionError.
    as_dict : bool
        Whether samples and batches are dicts with an item per field, in place of tuples, also those of a
        `ChunkLoader`.
    on_error : {"raise", "skip"}
        What happens if a sample of a batch cannot be read, because its chunk is damaged or does not have its checksum,
        its image cannot be decoded, or an object cannot be fetched after all repetitions. "skip": another sample of
        the batch takes its place, with all of its fields, and the field ``sample_number`` has the number of that
        sample. In batches by group, and those of a `Mix`, it is of the same group or member; if the batch and, with a
        ChunkLoader, the window have no good sample of this group, FileError names it. In your own order, which does not
        tell its groups, it is any sample of the batch. Batches keep their sizes. The choice depends only on the seed,
        the epoch and the sample, so that the batches of a loader, a DataLoader and a resumed run are the same. The
        first bad sample is told by a warning, and all are in `skipped`, and in the ``report`` of a `ChunkLoader`.
        Errors remain errors if they are not about data: a file that changes, a read that hangs, an error in your
        transforms. So do a batch or, with a ChunkLoader, a window without any good sample, and ``dataset[i]`` for a bad
        sample i.
    max_skipped : float
        With ``on_error="skip"``: raise FileError once more than this share of the samples is bad, but not for a single
        one.
    cache_dir : path, optional
        For URLs: a folder on a local disk that caches data for later epochs and runs. Processes on a host share it,
        and each version of an object has a separate copy. Files with checksums are checked (``checksums`` is
        ``"first"``). Default: only metadata is cached, in ``~/.cache/h5chunk``.
    cache_bytes : int, optional
        Limit on the size of this data set's cache, in bytes. `ChunkLoader` evicts the data whose next use is furthest
        away, which maximises the hit rate. With a DataLoader, random data is evicted. Default: no limit.
    storage_options : dict, optional
        For URLs: arguments of obstore's ``from_url``, such as ``{"skip_signature": True}`` or an endpoint; ``timeout``,
        seconds per request (30); ``deadline``, seconds for which a request is retried (60); ``requests``, the number of
        concurrent requests (64). Credentials are also read from the environment, as the stores' own tools do.

    Raises
    ------
    FileError
        The file is missing, not HDF5 or truncated; or it is replaced, or a chunk is found to be damaged, while reading.
    FieldError
        A dataset is missing or is not a field; the fields differ between files; or joined files differ in length, or
        have keys that are repeated or not comparable.
    OptionError
        An argument is invalid, or the file has no checksums.
    """

    def __init__(
        self,
        path: Paths | Mapping[str, Paths] | Source,
        *,
        fields: Fields | None = None,
        offsets: Mapping[str, str] | None = None,
        lengths: Mapping[str, str] | None = None,
        sample_axis: int | Mapping[str, int] | None = None,
        key: str | Mapping[str, str] | None = None,
        missing: str = DROP,
        trusted: bool = False,
        checksums: str = OFF,
        decode: str | None = None,
        transforms: Transforms | None = None,
        as_dict: bool = False,
        on_error: str = RAISE,
        max_skipped: float = MAX_SKIPPED,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_path(path)
        self._max_skipped, self._skip_log = max_skipped, check_on_error(on_error, max_skipped)
        if fields is None and isinstance(path, Mapping):
            fields = list(path)
        if missing not in (DROP, ERROR):
            raise OptionError(f"missing is {missing!r}: pass {DROP!r} or {ERROR!r}")
        named = parse_fields(fields, sample_axis, offsets=offsets, lengths=lengths)
        remote = remote_options(cache_dir, cache_bytes, storage_options)
        self._decode = check_decode(decode)
        stored, self._numbered = (None, []) if named is None else without_numbers(named)
        if isinstance(path, Source):  # of a subclass, with the fields that it names
            self._reader = path
        elif isinstance(path, Mapping):
            options: dict[str, Any] = {
                "trusted": trusted,
                "checksums": checksums,
                "remote": remote,
                "decode": self._decode,
            }
            self._reader = open_joined(path, stored, key=key, missing=missing, **options)
        else:
            if key is not None:
                raise OptionError(f"key is {key!r}, but path has no file for each field: pass {MAPPING}")
            self._reader = open_reader(
                path, stored, trusted=trusted, checksums=checksums, decode=self._decode, remote=remote
            )
            if are_images(self._reader.readers, surely=True):
                names = [field.dataset for field in self._reader.fields.values()]
                warnings.warn(
                    f"each of the {len(self._reader.readers)} files of {self.path} seems to be an image, of which this "
                    f"data set reads each row as a sample: h5chunk.Keyed(path, {names}) reads each file as one",
                    stacklevel=2,
                )
        found = (*self._reader.fields, *self._reader.computed)
        self._names = tuple(dict.fromkeys((*_with_columns(named or (), found), *found)))
        for name in self._names:
            torch_dtype(self.field(name).dtype, name)
        self._transforms = self._compiled(transforms)
        self.as_dict = check_flag("as_dict", as_dict)
        self._samples: np.ndarray | None = None  # numbers in the file, for a subset
        self._conditions: tuple[str, ...] = ()  # which selected the samples
        self._order: Order | None = None  # set by a sampler
        self._tables = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if {"transform", "transforms", "target_transform"} & {*vars(cls)} and not _has_own_getitem(cls):
            raise OptionError(
                f"{cls.__name__} defines a transform, which would never be called: pass transforms= to the "
                "constructor, or define __getitem__, too"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("transform", "target_transform") and not _has_own_getitem(type(self)):
            if name == "target_transform" and value is not None:
                raise OptionError(f"{name} would never be called: {OTHER_TRANSFORMS}")
            if name == "transform":  # which timm's create_loader, for example, assigns to any data set
                name = "transforms"
        super().__setattr__(name, value)

    @property
    def transforms(self) -> Transforms | None:
        """The ``transforms`` of this data set. Workers of a DataLoader that are running already keep the old ones."""
        return self._transforms.given

    @transforms.setter
    def transforms(self, transforms: Transforms | None) -> None:
        if _has_own_getitem(type(self)):
            raise OptionError(
                f"{type(self).__name__} has its own __getitem__, and super().__getitem__() would call these "
                "transforms, too: use another name for them, such as self.augment"
            )
        self._transforms = self._compiled(transforms)
        self.__dict__.pop("_sample_reader", None)

    def with_transforms(self, transforms: Transforms | None) -> ChunkDataset:
        """Return a copy of this data set with other transforms, for example for one part of a split.

        `ChunkLoader` accepts the transforms of a data set only if all are objects of `h5chunk.transforms`; otherwise it
        raises OptionError.
        """
        other = copy(self)
        other._transforms = self._compiled(transforms)
        return other

    def _compiled(self, transforms: Transforms | None) -> SampleTransforms:
        return SampleTransforms(transforms, {name: self.field(name) for name in self._names})

    def field(self, name: str) -> Field | RaggedField:
        """Return the description of a field: its shape, dtype and chunks."""
        computed = self._computed.get(name)
        if computed is None and name not in self._reader.fields:
            raise FieldError(f"{self.path} has no field {name!r} in this data set; it has {names_text(self.fields)}")
        return self._reader.fields[name] if computed is None else computed.field

    @property
    def _computed(self) -> dict[str, Computed]:
        """The fields that are not in the file, by name."""
        shape = (self._reader.num_samples,)
        numbered = {name: Computed.described(name, shape, np.int64, self._positions) for name in self._numbered}
        return {**self._reader.computed, **numbered}

    @property
    def numbered_fields(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """For each field that is not in the file, by name, the function that computes it from sample numbers."""
        return {name: computed.of for name, computed in self._computed.items()}

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        """Convert sample numbers in the file to sample numbers in this data set."""
        if self.epoch_samples:
            rows = rows % self.epoch_samples
        return rows if self._samples is None else np.searchsorted(self._samples, rows)

    @property
    def epoch_samples(self) -> int:
        """The number that each epoch adds to sample numbers, if each epoch has different samples, otherwise 0."""
        return self._reader.epoch_samples

    @property
    def groups(self) -> np.ndarray | None:
        """The group of each sample, (n,) int64: its episode or its volume. None if there are no groups."""
        groups = self._reader.groups
        return None if groups is None else groups.numbers[self.samples]

    @property
    def mixture(self) -> Any:
        """The `h5chunk.feed.mix.Mixture` by which a sampler makes batches; None for all data sets except `Mix`."""
        return None

    @property
    def on_error(self) -> str:
        """The treatment of samples that cannot be read: ``"raise"`` or ``"skip"``."""
        return RAISE if self._skip_log is None else SKIP

    @property
    def skipped(self) -> list[BadSample]:
        """The samples that could not be read, and were replaced, with their names and the reasons.

        These are those that this process, its loaders and the workers of its DataLoaders have found so far.
        """
        return [] if self.skipping is None else self.skipping.bad_samples

    @property
    def skipping(self) -> Skipping | None:
        """The replacement of samples that cannot be read; None if they raise an error."""
        if self._skip_log is None:
            return None
        return Skipping(self._skip_log, self._max_skipped, self._reader, self._samples, self._source_names)

    @property
    def fingerprint(self) -> int:
        """A checksum that is equal for copies of a file, and differs between subsets.

        For h5chunk files, it depends on the data; for other files, on the names, shapes and dtypes of the fields.
        """
        whole = self._reader.fingerprint
        return whole if self._samples is None else zlib.crc32(self._samples.tobytes(), whole)

    @cached_property
    def numbering(self) -> Numbering:
        """A key that is equal for two data sets if each index refers to the same sample in both."""
        samples = None if len(self) == self._reader.num_samples else self._samples
        return len(self), 0 if samples is None else zlib.crc32(samples.tobytes())

    @property
    def subset_samples(self) -> np.ndarray | None:
        """The number of each sample in the file, (n,) int64, ascending; None for all samples of the file."""
        return self._samples

    def new_reader(self) -> Source:
        """Return a new reader of the same fields, which opens the file independently."""
        return copy(self._reader)

    def __len__(self) -> int:
        return self._reader.num_samples if self._samples is None else len(self._samples)

    @property
    def sample_lengths(self) -> np.ndarray:
        """The length of each sample along its first axis, (n,) int64, for a field whose samples differ in length.

        If there are several such fields, these are the lengths in the first one (`lengths_field`), by which batches are
        limited and sorted, too: see `ChunkSampler`.
        """
        return self._reader.sample_lengths[self.samples]

    @property
    def pads_lengths(self) -> bool:
        """Whether batches pad the samples of `lengths_field`, because its transform is not `Pack`."""
        return not self._transforms.packs(self.lengths_field)

    @property
    def lengths_field(self) -> str | None:
        """The name of the first field whose samples are arrays that differ in length; None if there is none."""
        field = self._reader.lengths_field
        return None if field is None else field.name

    @property
    def samples(self) -> np.ndarray:
        """The number of each sample in the file: (n,) int64, ascending."""
        return np.arange(len(self)) if self._samples is None else self._samples

    def subset(self, samples: Any) -> ChunkDataset:
        """Select some of the samples, in the order of the file. Chunks without selected samples are not read.

        `where` selects samples by the values of their fields.

        Parameters
        ----------
        samples : array of bool or of int
            A mask of this data set's samples, or their numbers in it.

        Raises
        ------
        OptionError
            A number is out of range or repeated, or the mask has the wrong length.
        """
        return self._selected(select_samples(samples, len(self)))

    def _selected(self, numbers: np.ndarray) -> ChunkDataset:
        """Return a subset of samples whose numbers are ascending."""
        part = copy(self)
        part._samples = numbers if self._samples is None else self._samples[numbers]
        return part

    def where(self, condition: str | Callable[[Mapping[str, np.ndarray]], Any]) -> ChunkDataset:
        r"""Select the samples for which a condition is true, as `subset` does; ``len()`` and ``repr()`` say how many.

        ::

            good = dataset.where("label in [1, 2] and quality > 3")
            same = dataset.where(lambda values: np.isin(values["label"], [1, 2]) & (values["quality"] > 3))

        Parameters
        ----------
        condition : str or callable
            A text with names of fields, numbers, strings, comparisons (also ``1 < x <= 3``), ``in`` and ``not in`` with
            a list, ``and``, ``or``, ``not``, parentheses, and the operators ``+ - * / %``. No code in it is run. Fields
            are those with one value per sample, as for `values`; ``sample_number``, the number in this data set; and
            ``source_name``, the name of a sample, as in `source_names`. Other names than Python's are in backticks:
            ``\`obs/cell_type\` == "T cell"``. Fields of categories are compared with their names or their codes.

            Comparisons with missing values are False: with NaN, the code of no category, and what is divided by zero;
            ``not x == x`` is True where ``x`` is missing.

            A function gets a mapping of the fields to their values, (m,) each, and returns (m,) bool. Fields of
            categories have their codes. It is called for up to 1,048,576 samples at a time, so that memory is bounded.

        Raises
        ------
        OptionError
            The condition is invalid, or false for all samples.
        FieldError
            A field does not exist, or has more than one value per sample.
        """
        part = self._selected(find_samples(self, condition))
        text = condition if isinstance(condition, str) else getattr(condition, "__name__", repr(condition))
        part._conditions = (*self._conditions, shorten(text, 80, placeholder=" ..."))
        return part

    def __getstate__(self) -> dict[str, Any]:
        own = "read_amplification", "numbering", "_sample_reader"  # computed again by a copy, or by another process
        kept = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**kept, "_reader": self.new_reader()}

    @cached_property
    def _sample_reader(self) -> SampleReader:
        return SampleReader(self._reader, self._transforms.converters, self._order, skips=self.on_error == SKIP)

    def split(self, fractions: Sequence[float], *, seed: int = 0, stratify: str | None = None) -> list[ChunkDataset]:
        """Split into random parts, such as for training and validation.

        A file that was shuffled when it was written is split chunk by chunk, which is as random and wastes no reads.
        Other files, and all files with ``stratify``, are split sample by sample, so that compressed chunks are read for
        several parts: see `read_amplification`. All windows of an episode, and all patches of a volume, are in the same
        part.

        Parameters
        ----------
        fractions : sequence of float
            The size of each part; their sum is 1, or less to leave samples out. For windows and patches, these are
            fractions of the episodes or volumes that have samples.
        seed : int
        stratify : str, optional
            A field whose values occur in the same proportions in all parts, such as the labels. Not supported for
            windows and patches.

        Raises
        ------
        OptionError
            The fractions or the seed are invalid; or a part would have no episode or volume.
        FieldError
            The file has no field ``stratify``, or that field has more than one value per sample.
        """
        if (of_samples := self.groups) is not None:
            return self._split_groups(of_samples, fractions, seed, stratify)
        classes = None if stratify is None else self.values(stratify)
        is_shuffled = self.header is not None and self.header.shuffled and self._samples is None
        if is_shuffled and stratify is None and len(self):
            starts, positions = self._reader.chunk_starts, np.arange(len(self))
            if starts is None:
                shuffled = ShuffledSequence(len(self), self.chunk_samples, seed, 0).at(positions)
            else:
                shuffled = SelectionSequence(FixedSelection(starts), seed, 0).at(positions)
        else:
            shuffled = permutation(len(self), seed, stream=(SPLIT, 0, 0))
        return [self.subset(part) for part in split_samples(shuffled, fractions, classes, seed)]

    def _split_groups(
        self, of_samples: np.ndarray, fractions: Sequence[float], seed: int, stratify: str | None
    ) -> list[ChunkDataset]:
        """Split such that all samples of a group are in the same part. ``of_samples`` has the group of each sample."""
        assert self._reader.groups is not None
        noun, groups = self._reader.groups.noun, np.unique(of_samples)
        if stratify is not None:
            raise OptionError(f"stratify is {stratify!r}, but samples are split by {noun}: leave stratify out")
        shuffled = permutation(len(groups), seed, stream=(SPLIT, 0, 0))
        parts = split_samples(shuffled, fractions, None, seed)
        if not all(map(len, parts)):
            raise OptionError(
                f"fractions is {tuple(fractions)}, but with {count_text(len(groups), noun)} a part would be empty: "
                "pass fewer or larger fractions, or split the samples themselves, such as "
                "dataset.subset(numpy.arange(len(dataset)) % 10 > 0)"
            )
        return [self.subset(np.isin(of_samples, groups[part])) for part in parts]

    def values(self, name: str) -> np.ndarray:
        """Read a field that has one value per sample: (n,), numbers or ``str``. It need not be one of `fields`.

        For `Windows`, this is a field with one value per time step, at the current time step of each window.

        Raises
        ------
        FieldError
            The file has no such field, or it has more than one value per sample.
        """
        return self.reader_of(name)(self.samples)

    def reader_of(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that reads `values` of samples, given their numbers in the file: (n,)."""
        if not isinstance(name, str):
            raise OptionError(f"name is a {type(name).__name__}: pass the name of a field as a str")
        if name in self.numbered_fields and not self.field(name).sample_shape:
            return lambda samples: decoded(self.numbered_fields[name](samples))
        reader, _ = self._reader.rows_of_samples(name, np.empty(0, np.int64))
        if name not in reader.fields:
            reader = reopen_with_fields(reader, {name: name})
        field = reader.fields[name]
        if isinstance(field, RaggedField) or field.sample_shape:
            is_fixed = field.sample_shape and min(field.sample_shape) >= 0
            shape = f"of shape {field.sample_shape}" if is_fixed else "that differ in size"
            raise FieldError(f"field {name!r} has samples {shape}: name a field with one value per sample")
        return lambda samples: decoded(read_rows(reader, name, self._reader.rows_of_samples(name, samples)[1]))

    @property
    def own_columns(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """Functions of sample numbers in the file, for the names that `where` knows in addition to fields."""
        return {SAMPLE_NUMBER: self._positions, "source_name": self._source_names}

    @cached_property
    def read_amplification(self) -> float:
        """The bytes that are read, divided by the bytes that are used, if every sample is read once, chunk by chunk.

        The ratio is above 1 for a subset of compressed data, because compressed chunks must be read completely, and if
        samples are scattered: joined by a key in another order, or along another axis of a contiguous dataset.
        """
        if self._samples is None and not self._reader.reads_again:
            return 1.0
        return read_amplification(self._reader, self.samples, field_readers(self._reader)[0])

    @property
    def path(self) -> str:
        """The path of the file; for several files, the folder, the pattern, or the first file."""
        return shown(self._reader.path)

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order in which their samples are numbered, and for joined files in that of the fields."""
        return tuple(map(shown, self._reader.paths))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in the order of a sample's tuple, and the keys of its dict."""
        return self._names

    @property
    def chunk_samples(self) -> int:
        """Samples per chunk of the largest field."""
        return self._reader.chunk_samples

    @property
    def window_chunks(self) -> int:
        """Recommended number of chunks to shuffle together."""
        return self._reader.recommended_window

    @property
    def cache(self) -> CacheSettings:
        """Settings of a chunk cache for the largest field in this process.

        Decoded chunks are kept in as much memory as it has; a reader with plain h5py can pass it to HDF5.
        """
        return self._sample_reader.cache

    def expect_order(self, order: Order) -> None:
        """Size the chunk cache for a sampler's order, or for that with the most open chunks if there are several."""
        if self._order is None or order.open_chunks >= self._order.open_chunks:
            self._order = order
            self.__dict__.pop("_sample_reader", None)

    def close(self) -> None:
        """Close the file in this process; the next read opens it again. The end of a ``with`` block does so, too."""
        if (opened := self.__dict__.pop("_sample_reader", None)) is not None:
            opened.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if isinstance(index, (int, np.integer)) or getattr(index, "ndim", None) == 0:
            if self._transforms.mixer is not None:
                raise OptionError(
                    f"sample {operator.index(index)} is read alone, as by torch's ConcatDataset or "
                    f"DataLoader(batch_size=None), but {self._transforms.mixer.transform} mixes batches: read batches, "
                    "as in dataset[[0, 1, 2]] or DataLoader(dataset, batch_size=256); open several files as one data "
                    "set, or with h5chunk.Mix; or leave it out of transforms, and call it in the collate_fn"
                )
            drawn = index.batch if isinstance(index, TaggedIndex) else index
            batch = self._read(drawn, np.array([operator.index(index)], np.int64), shared=False)
            return self._transformed(tuple(batch[0]))
        collated = collate(self._batch(index))
        return tuple(collated) if isinstance(collated, list) else collated  # torch collates tuples to a list

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read the samples of a batch. torch's DataLoader calls this, so that each chunk is read only once.

        If a subclass has its own ``__getitem__``, it is called for each sample instead.
        """
        if _has_own_getitem(type(self)):
            if isinstance(indices, TaggedBatch):
                self._check_drawn(indices)
                indices = list(indices.one_by_one())
            if self._transforms.mixer is not None:
                raise OptionError(
                    f"{type(self).__name__} overrides __getitem__, which returns single samples, but "
                    f"{self._transforms.mixer.transform} mixes batches: call it in the collate_fn instead"
                )
            return [self[index] for index in indices] or self._no_samples()
        return self._batch(indices)

    def _check_drawn(self, indices: Any) -> None:
        if isinstance(indices, list) and indices and isinstance(indices[0], TaggedBatch):
            raise OptionError(
                "the ChunkSampler returns batches, but was passed as sampler: pass it as batch_sampler, as in "
                "DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 256)), without batch_size and shuffle"
            )
        if isinstance(indices, TaggedBatch) and indices.numbering is not None:
            check_numbering(indices.numbering, self.numbering)

    def _batch(self, indices: Any) -> list[Any]:
        """Return the samples of a batch, as a `Batch` unless functions of single samples have changed them."""
        self._check_drawn(indices)
        transforms, shared = self._transforms, get_worker_info() is not None
        batch = self._read(indices, sample_numbers(indices), shared=shared and transforms.mixer is None)
        if transforms.has_each and (transforms.mixer is None or not len(batch)):
            return [self._transformed(sample) for sample in batch] or self._no_samples()
        stacked = batch.stacked() if transforms.mixer is None else self._mixed(batch, shared=shared)
        stacked.makes_items = self._items
        return stacked

    def _mixed(self, batch: Batch, *, shared: bool) -> Batch:
        """Apply the functions of single samples to a batch, and mix it. With ``shared``, it is put in shared memory."""
        transforms, whole = self._transforms, batch.stacked()
        assert transforms.mixer is not None and whole.draws is not None
        fields = whole.fields
        if transforms.has_each:
            fields = default_collate([transforms.apply_to_sample(tuple(sample)) for sample in whole])
        mixed = transforms.mixer(fields, next(seeds_of_batches(whole.draws, [len(whole)])))
        return Batch(self._sample_reader.share(mixed) if shared else mixed, len(whole), whole.packed)

    @property
    def _items(self) -> Items:
        return replace(self._transforms.items, as_dict=self.as_dict)

    def _transformed(self, sample: tuple[Any, ...]) -> Any:
        """Apply the transforms of single samples, and return a tuple or a dict."""
        return self._items.sample(self._transforms.apply_to_sample(sample))

    def _no_samples(self) -> list[Any]:
        """Return an empty batch with the shapes of a transformed sample."""
        return no_samples(self.__getitems__([0])[0]) if len(self) else []

    def _read(self, indices: Any, positions: np.ndarray, *, shared: bool) -> Batch:
        rows = self._rows(positions)
        if self.epoch_samples:
            rows = rows + self._epoch_rows(indices, len(rows))
        draws, ordered = self._transforms.draws(indices, rows), isinstance(indices, TaggedBatch)
        try:
            return self._read_drawn(draws, shared=shared, ordered=ordered)
        except FileError as error:
            if self.skipping is None or len(rows) < 2 or not is_of_data(error):
                raise
            bad = self.skipping.find(draws.samples, partial(self._errors_of, draws))
            order = OneBatch(draws.seed, draws.epoch, getattr(indices, "groups", None))
            keys, _ = self.skipping.replaced(draws.samples, len(rows), bad, order)
            # as if they were not in order: rows of a matrix would be read with the bad rows of their chunks
            return self._read_drawn(draws._replace(samples=keys), shared=shared, ordered=False)

    def _read_drawn(self, draws: Draws, *, shared: bool, ordered: bool) -> Batch:
        rows, computed = draws.numbers, self.numbered_fields
        numbered = {name: compute(rows) for name, compute in computed.items() if name in self._names}
        batch = self._sample_reader.read(self._names, draws, numbered, shared=shared, ordered=ordered)
        batch.draws = draws
        return batch

    def _errors_of(self, draws: Draws, parts: Sequence[np.ndarray]) -> list[FileError | None]:
        """Try to read the samples of several arrays of keys, and return the error or None for each of them."""
        errors: list[FileError | None] = []
        for keys in parts:
            error = None
            try:
                self._read_drawn(draws._replace(samples=keys), shared=False, ordered=False)
            except FileError as failure:
                error = failure
            errors.append(error)
        return errors

    def _epoch_rows(self, indices: Any, count: int) -> int | np.ndarray:
        """Return what the epoch adds to sample numbers. Without a sampler, torch draws an epoch for each sample."""
        if isinstance(indices, TaggedBatch):
            return epoch_rows(indices.epoch, self.epoch_samples)
        return torch.randint(REPEAT // self.epoch_samples, (count,)).numpy() * self.epoch_samples

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Convert sample indices to sample numbers in the file. Raise IndexError for an invalid index."""
        if positions.ndim != 1:
            raise IndexError(f"the indices have {positions.ndim} axes: pass one integer or a list of integers")
        least, most = (positions.min(), positions.max()) if positions.size else (0, -1)
        if (wrong := least) < -len(self) or (wrong := most) >= len(self):
            raise IndexError(f"sample {wrong} is out of range: {printable(self.path)} has samples 0 to {len(self) - 1}")
        positions = np.where(positions < 0, positions + len(self), positions) if least < 0 else positions
        return positions.copy() if self._samples is None else self._samples[positions]

    def __repr__(self) -> str:
        fields = ", ".join(f"{x.name} {x.dtype}{list(x.sample_shape)}" for x in self._reader.fields.values())
        times = self.read_amplification
        excess = "" if times < NOTABLE else f"reads {times:.2f} x their bytes; "
        chunks = count_text(self.chunk_samples, "sample")
        whole = "" if self._samples is None else f"{len(self):,} of "
        samples = count_text(len(self) if self._samples is None else self._reader.num_samples, "sample")
        where = "".join(f"where {condition}; " for condition in self._conditions)
        return printable(
            f"{type(self).__name__}({self.path!r}: {whole}{samples} of {fields}; {where}chunks of {chunks}; "
            f"{excess}{self.cache})"
        )


def without_numbers(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of the files, and the names of the fields that are the number of each sample.

    Raises OptionError if there are only numbers.
    """
    numbered = [name for name, dataset in fields.items() if dataset == SAMPLE_NUMBER]
    if numbered and len(numbered) == len(fields):
        raise OptionError(f"fields is {list(fields)!r}: name at least one dataset of the file in addition")
    return {name: dataset for name, dataset in fields.items() if name not in numbered}, numbered


def _with_columns(names: Iterable[str], found: Sequence[str]) -> Iterator[str]:
    """Yield the names of fields, and for a field that is a table, those of its columns, which were found instead."""
    for name in names:
        columns = [own for own in found if own.startswith(f"{name}/")]
        yield from [name] if name in found or not columns else columns


def _has_own_getitem(kind: type) -> bool:
    """Return whether a class of the user defines how a sample is read, but not how a batch is."""
    definer = next(base for base in kind.__mro__ if "__getitem__" in vars(base))
    return definer is not ChunkDataset and "__getitems__" not in vars(definer)
