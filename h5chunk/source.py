"""The contract between sources of data and the writers of files.

A source gives samples by number (`SampleSource`), or the entries of a matrix (`h5chunk.sources.matrix.block`). Writers
know this contract alone, not which kinds of sources there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np


@dataclass(frozen=True)
class SampleField:
    """A field that a source reads sample by sample."""

    shape: tuple[int, ...]  # of one sample; () for a number
    dtype: np.dtype  # of a fixed size
    axes: str = ""  # names of the dataset's axes, such as NCHW; empty if they have none

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Names:
    """Many byte strings in two blocks of memory, as a Python list would take five times as much.

    >>> names = Names([b"a/1.jpg", b"b/2.jpg"])
    >>> len(names), names[1]
    (2, b'b/2.jpg')
    """

    def __init__(self, names: Iterable[bytes]) -> None:
        blob, ends = bytearray(), array("q", [0])
        for name in names:
            blob += name
            ends.append(len(blob))
        self.blob = bytes(blob)
        self.offsets = np.frombuffer(ends, dtype=np.int64)  # (num_names + 1,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.blob[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))


class SampleReader(Protocol):
    """What fills a file needs of a source. Travels to worker processes: picklable, or workers must be forked."""

    def session(self) -> AbstractContextManager[None]:
        """Return what must be in force while samples are read."""
        return nullcontext()

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when sample ``index`` may have changed; none if `identity` covers that."""
        return ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        """Read all fields of sample ``index`` into arrays of their shapes; return what the report shall count.

        Every element must be written: the arrays hold what an earlier sample left. An array of a number has the shape
        ``()``.

        Raises
        ------
        SampleError
            The sample cannot be read; `h5chunk.errors.ShapeError` if it has another shape than ``fields`` say.
        """
        raise NotImplementedError


class SampleSource(SampleReader):
    """Base class of sources of samples: what a file records of them, beside reading them by number."""

    kind: ClassVar[str]  # such as images or arrays
    fields: Mapping[str, SampleField] = MappingProxyType({})  # read sample by sample; at least one, the largest first
    columns: Mapping[str, np.ndarray] = MappingProxyType({})  # (num_samples,): small fields, in memory already
    categories: Mapping[str, list[str]] = MappingProxyType({})  # what codes of a field mean; of labels: class names
    names: Names | None = None  # where each sample came from, such as its path
    options: Mapping[str, Any] = MappingProxyType({})  # what the file's header records of how samples were read (JSON)
    ignored: Sequence[str] = ()  # what the source holds and does not give, for people
    notes: Sequence[str] = ()  # what people should know of the source

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return where sample ``index`` comes from, for people."""
        return f"sample {index}"

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        """Return all that, with the stamps, decides the samples' values: JSON and blobs; None if that is unknown."""
        return None

    def disagreement(self) -> str:
        """Name two samples of different shapes and the remedy; called once a `ShapeError` was raised."""
        return "the samples do not all have one shape"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for people.

    >>> shape_text((3, 224, 224))
    '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


@dataclass(frozen=True)
class OpenContext:
    """What opening a source may use, apart from the options of its kind."""

    memory_bytes: int = 1 << 30  # limit on what the source keeps in memory, such as names and labels
    skips_bad_samples: bool = False  # those that cannot be read will be left out: the first one need not be readable
    with_times: bool = False  # whether entries of a matrix shall come with their times, if there are any
    report_found: Callable[[int], None] = lambda count: None  # called now and then with the number of samples found
