"""What sources of samples have in common, apart from images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.source import OpenContext, SampleField, SampleNames
from h5chunk.sources.options import Options

LABELS = "labels"


class Samples:
    """Base of sources of samples: a `h5chunk.source.SampleSource` without names, columns and a life after a stop.

    Attributes
    ----------
    fields, columns, categories
        As of `h5chunk.source.SampleSource`.
    """

    kind: ClassVar[str]
    noun: ClassVar[str]
    Options: ClassVar[type[Options]] = Options

    def __init__(self) -> None:
        self.fields: Mapping[str, SampleField] = {}
        self.columns: Mapping[str, np.ndarray] = {}
        self.categories: Mapping[str, list[str]] = {}
        self.names: SampleNames | None = None
        self.options: Mapping[str, Any] = {}
        self.ignored: Sequence[str] = []
        self.notes: Sequence[str] = []

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Whether a source, of which these are the first bytes, is of this kind."""
        raise NotImplementedError

    @classmethod
    def open(cls, source: Any, options: Any, context: OpenContext) -> Samples:
        """Open a source."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return where a sample comes from, for people."""
        return f"sample {index}"

    def session(self) -> AbstractContextManager[None]:
        """Return what must be in force while samples are read: nothing."""
        return nullcontext()

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when a sample may have changed: none, as all are covered by `identity`."""
        return ()

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        """Return what decides the samples' values; None if that is unknown."""
        return None

    def disagreement(self) -> str:
        """Say that samples differ in shape; a source that reads them one by one says which."""
        return "the samples do not all have one shape"


def field_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a file keeps values of some dtype: native byte order, and truth as uint8.

    Raises
    ------
    SourceError
        A file cannot hold such values; says how they could be changed.
    """
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    if dtype.kind == "S" and dtype.itemsize:
        return dtype
    remedies = {
        "O": "Python objects are never unpickled: make plain numbers of them",
        "c": "split real and imaginary parts",
        "U": "encode it as UTF-8 (np.char.encode)",
        "M": "make int64 of it",
        "m": "make int64 of it",
    }
    remedy = remedies.get(dtype.kind, "convert it to a number of at most 64 bits")
    raise SourceError(f"{printable(name)} has the dtype {dtype}, which a field cannot have: {remedy}")
