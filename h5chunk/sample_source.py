"""Interface that sources of samples implement, and that the writers of files use.

Sources of matrix entries implement the interface in `h5chunk.sources.matrix.block` instead.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

SPLIT_WORDS = {  # words for the splits of a data set
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SET_WORDS = {  # words that may accompany them in the name of a folder, as in training_set or train2017
    "set", "data", "dataset", "image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "seg",
    "split", "folder", "part", "x", "px",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
SPLIT_WORD = re.compile(rf"({'|'.join(SPLIT_WORDS)})({'|'.join(sorted(SET_WORDS))})?")
ENDS_IN_NULL = "ends with a NUL byte, which strings in a file cannot keep: remove it"


def split_words(name: str) -> tuple[list[str], list[str]]:
    """Return the words for splits in a name, and all others, in lower case.

    >>> split_words("Training images"), split_words("train2017"), split_words("train_masks"), split_words("contest")
    ((['training'], []), (['train'], []), (['train'], ['masks']), ([], ['contest']))
    """
    found = [(word, SPLIT_WORD.fullmatch(word)) for word in map(str.lower, WORD.findall(name))]
    others = [word for word, match in found if match is None and word not in SET_WORDS]
    return [match[1] for _, match in found if match is not None], others


def split_of(name: str) -> tuple[str, bool]:
    """Return the split that a name contains, train, val or test ("" if none), and whether it says nothing else."""
    splits, others = split_words(name)
    return SPLIT_WORDS[splits[0]] if splits else "", len(splits) == 1 and not others


@dataclass(frozen=True)
class SampleField:
    """A field that a source reads sample by sample."""

    shape: tuple[int, ...]  # shape of one sample; () for a number
    dtype: np.dtype
    axes: str = ""  # a letter for each axis of the field, such as NCHW; empty if unknown
    form: str = ""  # for images of any size, whose ``shape`` is (average bytes per image,): encoded or raw

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Names:
    """A compact list of byte strings, which needs about a fifth of the memory of a Python list.

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
        """Start of each string in ``blob``, and the end of the last one: (num_names + 1,) int64."""
        return np.array(self._ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._blob[self._ends[index] : self._ends[index + 1]])

    def __iter__(self) -> Iterator[bytes]:
        blob = self.blob
        return (blob[start:stop] for start, stop in pairwise(self._ends))


class AnyImage(NamedTuple):
    """An image of any size, as it is stored: encoded, or as uint8 pixels (H, W, C)."""

    data: bytes
    height: int  # in pixels, after EXIF rotation
    width: int
    orientation: int  # the EXIF orientation that a decoder must apply; 1: none
    notes: tuple[str, ...]  # remarks, which the report counts
    values: Mapping[str, Any] = MappingProxyType({})  # by column: values that become known when the image is read


class SampleReader(Protocol):
    """Interface for reading samples by index; worker processes receive the reader by fork or pickle."""

    @property
    def runs_user_code(self) -> bool:
        """Whether reading runs code of the user, which must not run in a fork of a process with threads."""
        return False

    def session(self) -> AbstractContextManager[None]:
        """Return the context that must be active while samples are read."""
        return nullcontext()

    def name(self, index: int) -> str:
        """Return the name of sample ``index``, such as its path, for messages."""
        return f"sample {index}"

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return integers that change when sample ``index`` changes; () if `SampleSource.identity` changes then."""
        return ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        """Read sample ``index`` into the arrays of its fields, and return notes, which the report counts.

        Every element must be written, because the arrays may still contain an earlier sample. The array of a scalar
        field has the shape ``()``.

        Raises
        ------
        SampleError
            The sample cannot be read; `h5chunk.errors.ShapeError` if its shape differs from ``fields``.
        """
        raise NotImplementedError

    def read_any(self, index: int) -> AnyImage:
        """Read sample ``index`` of a source of images of any size. Raises SampleError if it cannot be read."""
        raise NotImplementedError


class SampleSource(SampleReader):
    """Base class of sources of samples: a `SampleReader` with a length and metadata."""

    kind: ClassVar[str]  # name of the kind, such as images or arrays
    fields: Mapping[str, SampleField] = MappingProxyType({})  # at least one, the largest first
    columns: Mapping[str, np.ndarray] = MappingProxyType({})  # (num_samples,): small fields, already in memory
    categories: Mapping[str, list[str]] = MappingProxyType({})  # by field: the names of its codes, such as classes
    names: Names | None = None  # name of each sample, such as its path
    options: Mapping[str, Any] = MappingProxyType({})  # reading options to record in the file's header, as JSON
    ignored: Sequence[str] = ()  # descriptions of content that is left out, for the report
    notes: Sequence[str] = ()  # remarks for the report
    size_bytes: Mapping[str, int] = MappingProxyType({})  # by form: the estimated total size of images of any size

    def __len__(self) -> int:
        raise NotImplementedError

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        """Return all facts, except the stamps, that determine the samples' values: a JSON object and byte strings.

        None means that they are unknown, so that an interrupted conversion cannot be resumed.
        """
        return None

    def read_columns(self) -> None:
        """Fill in the ``columns`` whose values would otherwise be known only after all samples have been read."""

    def in_form(self, form: str) -> SampleSource:
        """Return a copy of this source that stores images of any size in the form ``encoded`` or ``raw``."""
        raise NotImplementedError

    def disagreement(self) -> str:
        """Return the error message to show after a `ShapeError` was raised because samples differ in shape."""
        return "the samples have different shapes"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for display.

    >>> shape_text((3, 224, 224))
    '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))


@dataclass(frozen=True)
class OpenContext:
    """Arguments for opening a source of any kind."""

    memory_bytes: int = 1 << 30  # limit on what the source keeps in memory, such as names and labels
    temporary_folder: Path | None = None  # where temporary files are written; None: where the system wants them
    skips_bad_samples: bool = False  # whether unreadable samples, even the first one, are left out
    is_guessed: bool = False  # whether the kind of the source was detected, rather than chosen by the user
    format: str | None = None  # kind of each file if the source is several files, and the user chose the kind
    with_times: bool = False  # whether matrix entries are returned with their times, if the source has times
    report_found: Callable[[int], None] = lambda count: None  # called repeatedly with the number of samples found
