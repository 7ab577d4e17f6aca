"""Read HDF5 files in which each sample is a dataset, or a group of datasets, such as ``traces/000123/data``.

A pattern such as ``traces/*/data`` selects the samples, and defines the field ``data``; several patterns that differ
after the ``*`` define several fields. Contiguous datasets are read at their file offsets, all others through HDF5.

Background: https://github.com/h5py/h5py/issues/2425 and issue 2174 report how slowly h5py reads such files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FileError, OptionError, SampleError, SourceError, printable
from h5chunk.sample_source import Names, OpenContext, SampleField
from h5chunk.sources.container import StoredFile
from h5chunk.sources.kinds import KeyedOptions
from h5chunk.sources.recognise import HDF5_MAGIC, has_suffix, hdf5_members, is_hdf5
from h5chunk.sources.samples import Samples, field_dtype, largest_first
from h5chunk.stamp import source_stamp
from h5chunk.store.hdf5.keyed_index import CONTIGUOUS, KeyedIndex, Wanted
from h5chunk.store.hdf5.keyed_list import list_samples
from h5chunk.store.hdf5.open import open_file, opened
from h5chunk.store.hdf5.patterns import fill, parse_samples

SUFFIXES = (".h5", ".hdf5", ".hdf")

LOOM_MEMBERS = {"matrix", "row_attrs", "col_attrs"}
LOOM = (
    "is a loom file, in which genes are rows and cells are columns: save its cells as rows: scipy.sparse.save_npz("
    "'cells.npz', scipy.sparse.csr_matrix(h5py.File(PATH)['matrix'][:].T)), and convert that .npz"
)


class KeyedSource(Samples):
    """Samples that are datasets of one HDF5 file, or groups of datasets."""

    kind = "keyed"
    noun = "a dataset per sample"
    Options = KeyedOptions

    def __init__(self, path: str, patterns: Mapping[str, str], attributes: Sequence[str], index: KeyedIndex) -> None:
        self._path, self._patterns, self._index = path, patterns, index
        self._file, self._opened = StoredFile(path), (0, None)
        fields = {
            name: SampleField(field.shape, field_dtype(name, field.dtype)) for name, field in index.fields.items()
        }
        self.fields = largest_first(fields)
        self.columns = {name: column.astype(field_dtype(name, column.dtype)) for name, column in index.columns.items()}
        self.names = Names(index.name(number).encode("utf-8", "surrogateescape") for number in range(index.num_samples))
        self.options = {"samples": list(patterns.values()), "attributes": list(attributes)}

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(HDF5_MAGIC) or (has_suffix(source, *SUFFIXES) and is_hdf5(source, head))

    @classmethod
    def open(cls, source: Any, options: KeyedOptions, context: OpenContext) -> KeyedSource:
        path = os.fspath(source)
        if options.samples is None and set(hdf5_members(path, HDF5_MAGIC)) >= LOOM_MEMBERS:
            raise SourceError(f"{printable(path)}: {LOOM}")
        if options.samples is None:
            try:
                open_file(path).close()
            except FileError as error:
                raise SourceError(str(error)) from None
            raise SourceError(
                f"{printable(path)}: is an HDF5 file, but neither .h5ad nor 10x .h5: if the rows of its datasets are "
                "samples, use h5chunk repack; if each sample is a dataset, pass their paths as a pattern, such as "
                "h5chunk convert --samples 'traces/*/data'; for columns of a table, pass arrays in Python: "
                "h5chunk.convert({'pt': file['TABLE']['pt']}, OUTPUT) (h5chunk info prints code that loads samples in "
                "the file)"
            )
        patterns = {name: str(pattern) for name, pattern in parse_samples("samples", options.samples).items()}
        attributes = options.attributes or ()
        if not all("*" in pattern for pattern in patterns.values()):
            text = next(iter(patterns.values()))
            raise OptionError(f"samples has {text!r}: use a * in place of the names of samples, as in 'traces/*/data'")
        try:
            wanted = Wanted(patterns, dict.fromkeys(attributes), kinds="biufS")
            index = list_samples(Path(path), wanted, lambda done, _: context.report_found(done))
        except FileError as error:
            raise SourceError(str(error)) from None
        for name, column in index.columns.items():
            if column.ndim > 1:
                raise SourceError(
                    f"{printable(path)}: attribute {name!r} has several values, {list(column.shape[1:])}, but must be "
                    "one number, or one string: leave it out (h5chunk.Keyed reads such attributes)"
                )
        for name, field in index.fields.items():
            if field.is_ragged or not math.prod(field.shape):
                number = int((field.lengths != field.lengths[0]).argmax())
                where = fill(patterns[name], index.name(number))
                raise SourceError(
                    f"{printable(path)}: {printable(where)}: {name!r} has length {field.lengths[number]}, but "
                    f"{field.lengths[0]} in the first sample: all samples must have the same shape, and not be empty "
                    "(h5chunk.Keyed reads samples that differ in length)"
                )
        return cls(path, patterns, attributes, index)

    def __len__(self) -> int:
        return self._index.num_samples

    def name(self, index: int) -> str:
        return self._place(next(iter(self._patterns.values())), index)

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        return {"kind": self.kind, "stamp": source_stamp(self._path), **self.options}, ()

    @contextmanager
    def session(self) -> Iterator[None]:
        process, _ = self._opened
        if process == os.getpid() or all((field.kinds == CONTIGUOUS).all() for field in self._index.fields.values()):
            yield
            return
        with opened(self._path) as file:
            self._opened = os.getpid(), file
            try:
                yield
            finally:
                self._opened = 0, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, None)}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        for name, target in out.items():
            field = self._index.fields[name]
            if field.kinds[index] != CONTIGUOUS:
                target[...] = self._through_hdf5(name, index)
            else:
                num_bytes = math.prod(field.shape) * field.dtype.itemsize
                data = self._file.read_at(int(field.offsets[field.first[index]]), num_bytes)
                target[...] = np.frombuffer(data, field.dtype).reshape(field.shape)
        return ()

    def _through_hdf5(self, name: str, index: int) -> np.ndarray:
        _, file = self._opened
        assert file is not None
        try:
            path, member = self._place(self._patterns[name], index), self._index.fields[name].member
            values = file[path[: -1 - len("/".join(member))] if member else path][()]
            for each in member:
                values = values[each]
            return np.asarray(values)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise SampleError(f"cannot be read: HDF5: {error}") from None

    def _place(self, pattern: str, index: int) -> str:
        return fill(pattern, self._index.name(index))
