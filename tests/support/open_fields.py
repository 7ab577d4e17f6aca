"""Fields of open files, whose rows are read by the threads that are in use: native ones, or those of Python."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.store.read.field_readers import field_readers
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.source import Source


class OpenField:
    """A field of a source, whose files are open. ``why`` is the reason why HDF5 reads it, or empty."""

    def __init__(self, source: Source, name: str, way: str = "auto") -> None:
        self.source, self.name, self.stored = source, name, source.fields[name]
        fields, why = field_readers(source, way, [name])
        self.reader, self.why = fields[name], why.get(name, "")
        self.files = OpenFiles(source)
        self.files.descriptor(0)  # later changes of the file are not seen here
        weakref.finalize(self, self.files.close)
        weakref.finalize(self, self.reader.cache.forget)

    @property
    def cache(self) -> Any:
        return self.reader.cache

    def tasks(self, rows: Any, places: Any, out: Any) -> list[Any]:
        return list(self.reader.tasks(np.asarray(rows, np.int64), np.asarray(places, np.int64), out))

    def read_into(self, rows: Any, out: Any) -> None:
        """Read rows in any order, each to its place in ``out``, which is an array, or `CsrBuffers`."""
        places = np.argsort(rows, kind="stable")
        memory = out.reshape(len(rows), -1).view(np.uint8) if isinstance(out, np.ndarray) else out
        for task in self.tasks(np.asarray(rows)[places], places, memory):
            task(self.files)

    def read(self, rows: Any) -> np.ndarray:
        """Read rows in any order, into memory that was used before: (n, *sample_shape)."""
        shape = (len(rows), *self.stored.sample_shape)
        out = np.full(self.stored.dtype.itemsize * int(np.prod(shape)), 0xA5, np.uint8).view(self.stored.dtype)
        if out.size:
            self.read_into(rows, out)
        return out.reshape(shape)

    def read_all(self) -> np.ndarray:
        values = self.reader.read_all(self.files)
        return values.view(self.stored.dtype).reshape(len(values), *self.stored.sample_shape)


def open_field(path: Path, dataset: str = "x", way: str = "auto") -> OpenField:
    """Open a dataset of one row per sample."""
    return OpenField(H5Reader(path, {"x": dataset}, trusted=True), "x", way)


def direct_field(path: Path, dataset: str = "x") -> OpenField:
    """Open a dataset that is read without HDF5."""
    field = open_field(path, dataset, "direct")
    assert not field.why, field.why
    return field
