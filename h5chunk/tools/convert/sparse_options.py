"""The options for sparse matrices: what can be asked for, and which options are for images only."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from h5chunk.errors import OptionError, printable
from h5chunk.plan.codes import Coding
from h5chunk.plan.duplicates import TEXTS
from h5chunk.plan.layout import human_bytes
from h5chunk.sources.sparse.block import looks_sparse
from h5chunk.sources.sparse.memory import DEFAULT_MEMORY_BYTES

MIN_MEMORY_BYTES = 1 << 20
MEMORY_BYTES = DEFAULT_MEMORY_BYTES
AUTO = "auto"
UNIQUE = ("csv", "libsvm")  # kinds of sources in which two entries of one place are a mistake, unless it is said
IMAGES = "images"  # the format that is no sparse one


@dataclass(frozen=True)
class SparseOptions:
    """What is asked for; as the arguments of `h5chunk.convert`.

    Raises
    ------
    OptionError
        One of them cannot be.
    """

    scale: float | None = None
    clip: bool = False
    binarize: float | None = None
    min_row_count: int = 0
    min_column_count: int = 0
    duplicates: str = AUTO
    transpose: bool = False
    dense: bool = False
    filter: str = "gzip"
    memory_bytes: int = MEMORY_BYTES
    chunk_samples: int | None = None
    seed: int = 0
    shuffle: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("min_row_count", "min_column_count"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}: give 0 or more")
        if not 0 <= self.seed < 1 << 64:
            raise OptionError(f"seed is {self.seed}: give a number from 0 to {(1 << 64) - 1}")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise OptionError(f"memory_bytes is {self.memory_bytes}: give at least {MIN_MEMORY_BYTES}")
        if self.duplicates not in (AUTO, *TEXTS):
            raise OptionError(f"duplicates is {self.duplicates!r}: give one of {', '.join((AUTO, *TEXTS))}")
        if self.filter not in ("gzip", "none"):
            raise OptionError(f"filter is {self.filter!r}: give gzip or none")
        if self.chunk_samples is not None and self.chunk_samples < 1:
            raise OptionError(f"chunk_samples is {self.chunk_samples}: give at least 1, or let it be chosen")
        self.coding()

    def coding(self) -> Coding:
        """How values become codes."""
        return Coding(self.scale, self.clip, self.binarize)

    def for_kind(self, kind: str) -> SparseOptions:
        """The same, with a choice for duplicates that fits sources of this kind."""
        return self if self.duplicates != AUTO else replace(self, duplicates="error" if kind in UNIQUE else "sum")

    def recorded(self) -> dict[str, Any]:
        """What the file keeps of them: all that its bytes depend on."""
        left_out = ("memory_bytes", "overwrite", *(() if self.dense else ("filter",)))
        return {name: value for name, value in vars(self).items() if name not in left_out}


SOURCE_OPTIONS = ("format", "layer", "columns")
_SHARED = ("chunk_samples", "seed", "shuffle", "overwrite")
SPARSE_ONLY = (*SOURCE_OPTIONS, *(each.name for each in fields(SparseOptions) if each.name not in _SHARED))


def is_sparse(source: str | os.PathLike[str], given: Mapping[str, Any], convert: Callable[..., object]) -> bool:
    """Whether a source is a sparse matrix.

    Parameters
    ----------
    source : path
    given : dict
        The arguments of ``convert``, all of them.
    convert : callable
        Its defaults tell which were given.

    Raises
    ------
    OptionError
        An option was given that is for sources of the other kind.
    """
    kind = given["format"] or (None if given["manifest"] is not None else looks_sparse(source)) or IMAGES
    sparse = kind != IMAGES
    parameters = inspect.signature(convert).parameters
    for name, parameter in parameters.items():
        if name in (*_SHARED, "source", "path", "progress", "notify", "format") or (name in SPARSE_ONLY) == sparse:
            continue
        if given[name] != parameter.default:
            words = ("a sparse matrix", "images") if sparse else ("images", "a sparse matrix")
            raise OptionError(
                f"{name} is {given[name]!r} but {printable(source)} is {words[0]} ({kind}): that option is for "
                f"{words[1]}; give format if it is not what it seems"
            )
    if given["filter"] != parameters["filter"].default and not given["dense"]:
        raise OptionError(f"filter is {given['filter']!r} but only dense rows have one: give dense as well")
    return sparse


def sparse_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `h5chunk.tools.convert.sparse.convert_sparse`, from those of ``convert``."""
    options = SparseOptions(**{each.name: given[each.name] for each in fields(SparseOptions)})
    columns = given["columns"]
    return {
        "options": options,
        "format": given["format"],
        "layer": given["layer"],
        "columns": None if columns is None else tuple(columns),
    }


def parse_bytes(text: str) -> int:
    """Bytes from what people write.

    >>> parse_bytes("1GiB"), parse_bytes("512M"), parse_bytes("1048576")
    (1073741824, 536870912, 1048576)

    Raises
    ------
    OptionError
        It is no such thing.
    """
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    stripped = text.strip().lower().removesuffix("ib").removesuffix("b")
    number = stripped.rstrip("kmgt")
    unit = stripped[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise OptionError(f"{text!r} is no number of bytes: give one, or such as {human_bytes(1 << 30)}") from None
