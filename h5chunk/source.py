"""The contract between sources of data and the writers of files.

A source returns samples by number (`SampleSource`), or the entries of a matrix (`h5chunk.sources.matrix.block`).
Writers depend only on this contract, not on the kinds of sources.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np

SPLIT_NAMES = (
    "train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation",
)  # fmt: skip
ENDS_IN_NULL = "ends with a NUL byte, which strings in a file cannot keep: remove it"


@dataclass(frozen=True)
class SampleField:
    """A field that a source reads sample by sample."""

    shape: tuple[int, ...]  # shape of one sample; () for a number
    dtype: np.dtype  # a dtype of fixed size
    axes: str = ""  # names of the dataset's axes, such as NCHW; empty if they have none

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Names:
    """Many byte strings in two blocks of memory: a Python list would take five times as much.

    >>> names = Names([b"a/1.jpg", b"b/2.jpg"])
    >>> len(names), names[1]
    (2, b'b/2.jpg')
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        self._blob, self._ends = bytearray(), array("q", [0])
        for name in names:
            self.append(name)

    def append(self, name: bytes) -> None:
        """Add a string."""
        self._blob += name
        self._ends.append(len(self._blob))

    @property
    def blob(self) -> bytes:
        """All strings, concatenated."""
        return bytes(self._blob)

    @property
    def offsets(self) -> np.ndarray:
        """Start of each string, and the end of the last: (num_names + 1,) int64."""
        return np.array(self._ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._blob[self._ends[index] : self._ends[index + 1]])

    def __iter__(self) -> Iterator[bytes]:
        blob = self.blob
        return (blob[start:stop] for start, stop in pairwise(self._ends))


class SampleReader(Protocol):
    """Interface for filling a file from a source. It is sent to workers: picklable, unless workers are forked."""

    def session(self) -> AbstractContextManager[None]:
        """Return the context that must be active while samples are read."""
        return nullcontext()

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when sample ``index`` may have changed; empty if `identity` covers changes."""
        return ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        """Read all fields of sample ``index`` into arrays of their shapes; return the notes to count in the report.

        Every element must be written, because the arrays still hold an earlier sample. The array of a number has the
        shape ``()``.

        Raises
        ------
        SampleError
            The sample cannot be read; `h5chunk.errors.ShapeError` if its shape differs from ``fields``.
        """
        raise NotImplementedError


class SampleSource(SampleReader):
    """Base class of sample sources: a `SampleReader`, with the metadata that the file and the report record."""

    kind: ClassVar[str]  # name of the kind, such as images or arrays
    fields: Mapping[str, SampleField] = MappingProxyType({})  # at least one, the largest first
    columns: Mapping[str, np.ndarray] = MappingProxyType({})  # (num_samples,): small fields, already in memory
    categories: Mapping[str, list[str]] = MappingProxyType({})  # meaning of a field's codes; for labels: class names
    names: Names | None = None  # origin of each sample, such as its path
    options: Mapping[str, Any] = MappingProxyType({})  # how samples were read, for the file's header (JSON)
    ignored: Sequence[str] = ()  # content of the source that is left out, for the report
    notes: Sequence[str] = ()  # notes on the source, for the report

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return where sample ``index`` comes from, for messages."""
        return f"sample {index}"

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        """Return the facts that, with the stamps, determine the samples' values: JSON and blobs; None if unknown."""
        return None

    def disagreement(self) -> str:
        """Name two samples of different shapes and the remedy; called once a `ShapeError` was raised."""
        return "the samples have different shapes"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for display.

    >>> shape_text((3, 224, 224))
    '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


@dataclass(frozen=True)
class OpenContext:
    """The context in which a source is opened: everything that it may use, except the options of its kind."""

    memory_bytes: int = 1 << 30  # limit on what the source keeps in memory, such as names and labels
    skips_bad_samples: bool = False  # whether unreadable samples, even the first, are left out
    is_guessed: bool = False  # whether the kind of the source was recognised, and not given
    with_times: bool = False  # whether matrix entries come with their times, if any
    report_found: Callable[[int], None] = lambda count: None  # called now and then with the number of samples found
