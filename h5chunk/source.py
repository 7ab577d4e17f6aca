"""The contract between sources of data and the writers of files.

A source gives samples by number (`SampleSource`), or the entries of a matrix (`h5chunk.sources.matrix.block`). Writers
know this contract alone, not which kinds of sources there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class SampleField:
    """A field that a source reads sample by sample.

    Attributes
    ----------
    shape : tuple of int
        Of one sample; ``()`` for a number.
    dtype : np.dtype
        Of a fixed size.
    axes : str
        Names of the dataset's axes, such as ``NCHW``; empty if they have none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: str = ""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SampleNames(Protocol):
    """Names of samples, such as paths, packed as one blob of bytes with its ends."""

    blob: bytes
    offsets: np.ndarray  # (num_samples + 1,) int64

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> bytes: ...


class SampleReader(Protocol):
    """What fills a file needs of a source. Travels to worker processes: picklable, or workers must be forked."""

    def session(self) -> AbstractContextManager[None]:
        """Return what must be in force while samples are read."""

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when sample ``index`` may have changed; none if it cannot."""

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        """Read all fields of sample ``index`` into arrays of their shapes; return what the report shall count.

        Every element must be written: the arrays hold what an earlier sample left. An array of a number has the shape
        ``()``.

        Raises
        ------
        SampleError
            The sample cannot be read; `h5chunk.errors.ShapeError` if it has another shape than ``fields`` say.
        """


class SampleSource(SampleReader, Protocol):
    """Samples by number, and what a file records of them.

    Attributes
    ----------
    kind : str
        Such as ``images`` or ``arrays``.
    fields : mapping of str to SampleField
        Fields that are read sample by sample; the largest comes first. At least one.
    columns : mapping of str to (num_samples,) array
        Small fields, which are in memory already.
    categories : mapping of str to list of str
        What the codes of a field mean; those of ``labels`` are the class names.
    names : SampleNames or None
        Where each sample came from.
    options : mapping
        What the file's header records of how samples were read (JSON).
    ignored : sequence of str
        What the source holds and does not give, for people.
    notes : sequence of str
        What people should know of the source.
    """

    kind: str

    @property
    def fields(self) -> Mapping[str, SampleField]: ...
    @property
    def columns(self) -> Mapping[str, np.ndarray]: ...
    @property
    def categories(self) -> Mapping[str, list[str]]: ...
    @property
    def names(self) -> SampleNames | None: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def ignored(self) -> Sequence[str]: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Where sample ``index`` comes from, for people."""

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        """All that, with the stamps, decides the samples' values (JSON and blobs); None: conversions start anew."""

    def disagreement(self) -> str:
        """Name two samples of different shapes and the remedy; called once a `ShapeError` was raised."""


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for people.

    >>> shape_text((3, 224, 224))
    '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


def _say_nothing(count: int) -> None:
    pass


@dataclass(frozen=True)
class OpenContext:
    """What opening a source may use, apart from the options of its kind.

    Attributes
    ----------
    memory_bytes : int
        Upper limit on what the source keeps in memory, such as names and labels.
    skips_bad_samples : bool
        Whether samples that cannot be read will be left out, so that the first one need not be readable.
    with_times : bool
        Whether entries of a matrix shall come with their times, if there are any.
    spool_folder : Path, optional
        Where temporary data may go; default: the system's folder for such files.
    report_found : callable
        Called now and then with the number of samples found so far.
    """

    memory_bytes: int = 1 << 30
    skips_bad_samples: bool = False
    with_times: bool = False
    spool_folder: Path | None = None
    report_found: Callable[[int], None] = _say_nothing
