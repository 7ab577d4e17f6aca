"""Recommend chunk shapes for random windows of time steps and random patches of volumes, by computing their cost."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import FieldError, OptionError, check_whole, human_bytes, printable
from h5chunk.plan.patches import best_chunks, chunk_cost
from h5chunk.sample_source import shape_text
from h5chunk.tools.info.info import info
from h5chunk.tools.info.layouts import MAX_FIELDS, loader_code, recognise
from h5chunk.tools.info.report import DatasetInfo, FileInfo
from h5chunk.tools.repack.plan import COMPRESSIONS
from h5chunk.tools.report import Report, code, python_text, shell_command

WORTH = 1.3  # factor by which better chunks must reduce the decoded bytes to be recommended
SMALL_BYTES = 1 << 20  # similar datasets of time steps with a smaller total size are not reported
MAX_CHANNELS = 4  # a last axis of at most this length has the channels of an image


@dataclass(frozen=True)
class ChunkAdvice(Report):
    """The bytes that readers decode per byte of a random window or patch, with a dataset's chunks and with better ones.

    ``alone`` is this ratio if windows or patches are read one at a time, and ``together`` if neighbouring ones
    are read together, as `h5chunk.Patches` and `h5chunk.ChunkLoader` do.
    """

    dataset: str
    chunks: tuple[int, ...] | None
    chunk_bytes: int
    alone: float
    together: float
    best: tuple[int, ...]  # shape of better chunks
    best_alone: float
    best_together: float
    command: str  # command that rewrites the file in these chunks; empty if the gain is small
    repack_chunks: tuple[int, ...] = ()  # chunks in the command, which fit all datasets with as many axes
    compression: str | None = None  # compression in the command
    num_bytes: int = 0  # size of the dataset

    def lines(self) -> list[str]:
        chunks = (
            f"chunks of {shape_text(self.chunks)} ({human_bytes(self.chunk_bytes)})" if self.chunks else "no chunks"
        )
        costs = f"{self.alone:.2f} x the bytes they use, or {self.together:.2f} x if they read neighbours together"
        better = f"    {code(self.command)} reduces this to {self.best_alone:.2f} x and {self.best_together:.2f} x"
        return [f"{self.dataset}  with {chunks}, readers decode {costs}", *([better] if self.command else [])]


@dataclass(frozen=True)
class ChunkRecommendation(Report):
    """Chunk shapes for windows or patches, and lines of Python that create their loader."""

    path: str
    purpose: str
    advice: list[ChunkAdvice]  # one for each kind of dataset
    code: list[str]

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name, with those that ``repack --tuned`` uses.

        Repack makes chunks of one shape: that of the largest dataset for which there are better chunks.
        """
        better = max((each for each in self.advice if each.command), key=lambda each: each.num_bytes, default=None)
        return {
            **super().facts(),
            "repack": better is not None,
            "chunks": better.repack_chunks if better is not None else None,
            "compression": better.compression if better is not None else None,
        }

    def lines(self) -> list[str]:
        listed = [line for each in self.advice for line in each.lines()]
        none = f"no compressed data of more than {human_bytes(SMALL_BYTES)} has such windows: keep all chunks"
        return [
            f"{self.path}: chunks for {self.purpose}",
            *(f"    {code(line)}" for line in self.code),
            *(f"  {line}" for line in listed or [none]),
        ]


class Access(NamedTuple):
    """Random windows, or random patches, of this size."""

    size: tuple[int, ...]
    is_window: bool

    def __str__(self) -> str:
        return f"windows of {self.size[0]} time steps" if self.is_window else f"patches of {shape_text(self.size)}"

    def split(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the lengths of the axes in which windows or patches are placed, of those before, and those after."""
        first = 0 if self.is_window else len(shape) - len(self.size)
        first -= first == 1 and shape[-1] <= MAX_CHANNELS < shape[0]  # channels come last
        end = first + len(self.size)
        return shape[first:end], shape[:first], shape[end:]

    def suits(self, item: DatasetInfo) -> bool:
        """Return whether a dataset has room for a window or patch."""
        is_number = item.can_train and np.dtype(item.dtype).kind in "biuf"
        space = self.split(item.shape)[0] if is_number and len(item.shape) >= len(self.size) else ()
        return bool(space) and all(length >= each for length, each in zip(space, self.size, strict=True))

    def kind(self, item: DatasetInfo) -> object:
        """Return a key that is equal for datasets that share a line of the report."""
        name = re.sub(r"\d+", "*", item.name) if self.is_window else ""
        whole = zip(item.chunks or (), item.shape, strict=False)
        chunks = item.chunks and tuple(0 if chunk == length else chunk for chunk, length in whole)
        return name, chunks, item.dtype, item.shape[1:] if self.is_window else len(item.shape)


def recommend_chunks(
    path: str | os.PathLike[str], window: int | None, patch: Sequence[int], trusted: bool
) -> ChunkRecommendation:
    """Recommend chunks for windows of ``window`` time steps, or for patches of the shape ``patch``.

    Raises OptionError for invalid arguments, and FieldError if no dataset is large enough.
    """
    if window is not None and patch:
        raise OptionError("window and patch exclude each other: pass one of them")
    if not hasattr(patch, "__len__"):
        raise OptionError(f"patch is {patch!r}: pass the shape of a patch, such as (64, 64, 64)")
    size = tuple(check_whole("patch", length, 1, 1 << 30) for length in patch)
    access = Access(size or (check_whole("window", window, 1, 1 << 30),), not size)
    found = info(os.fspath(path), trusted=trusted)
    assert isinstance(found, FileInfo)
    usable = [item for item in found.datasets if access.suits(item)]
    kinds: dict[object, list[DatasetInfo]] = {}
    for item in usable:
        kinds.setdefault(access.kind(item), []).append(item)
    if not usable:
        largest = max(found.datasets, key=_num_bytes, default=None)
        about = f"; the largest, {largest.name}, has the shape {shape_text(largest.shape)}" if largest else ""
        raise FieldError(f"{printable(path)}: no dataset has room for {access}{about}")
    reported = [items for items in kinds.values() if not access.is_window or _decode_much(items)]
    advice = [_advise(found.path, max(items, key=_num_bytes), usable, access) for items in reported]
    main = max(usable, key=_num_bytes)
    return ChunkRecommendation(found.path, f"random {access}", advice, _code(found, main, usable, access))


def _num_bytes(item: DatasetInfo) -> int:
    return math.prod(item.shape) * np.dtype(item.dtype).itemsize


def _decode_much(items: Sequence[DatasetInfo]) -> bool:
    is_compressed = bool(items[0].chunks and items[0].filters) and any(item.stored_bytes for item in items)
    return is_compressed and sum(map(_num_bytes, items)) >= SMALL_BYTES


def _advise(path: str, item: DatasetInfo, usable: Sequence[DatasetInfo], access: Access) -> ChunkAdvice:
    space, before, after = access.split(item.shape)
    itemsize = np.dtype(item.dtype).itemsize * math.prod((*before, *after))
    best, own = best_chunks(space, access.size, itemsize), (1.0, 1.0)
    if item.chunks is not None:
        own = chunk_cost(space, access.size, item.chunks[len(before) : len(before) + len(space)], itemsize)[1:]
    command, compression = "", None
    chunks: tuple[int, ...] = ()
    if item.chunks and own[0] * own[1] > WORTH * best.alone * best.together:
        # repack applies the chunks to all datasets with this number of axes, and limits them to the shape of each
        alike = [other.shape for other in usable if len(other.shape) == len(item.shape)]
        longest = [max(lengths) for lengths in zip(*alike, strict=True)]
        chunks = (*longest[: len(before)], *best.chunks, *longest[len(before) + len(space) :])
        if item.filters:
            compression = next((name for name in reversed(item.filters) if name in COMPRESSIONS), "gzip")
        words = ["h5chunk", "repack", path, "NEW.h5", "--chunks", ",".join(map(str, chunks))]
        command = shell_command(words + (["--compression", compression] if compression else []))
    shape, size = (*before, *best.chunks, *after), _num_bytes(item)
    costs = (*own, shape, best.alone, best.together)
    return ChunkAdvice(item.name, item.chunks, item.chunk_bytes, *costs, command, chunks, compression, size)


# ---- lines of Python


def _code(found: FileInfo, main: DatasetInfo, usable: Sequence[DatasetInfo], access: Access) -> list[str]:
    """Return the code that opens windows or patches of the largest dataset, ``main``, and of the datasets beside it."""
    known = recognise(found.datasets, python_text(found.path), access.size[0]) if access.is_window else None
    if known and known.code[1].startswith("data = h5chunk.Windows("):
        return known.code
    fields = _fields(main, usable, access)
    named = ", ".join(f"{python_text(name)}: {python_text(dataset)}" for name, dataset in fields.items())
    call = f"Windows({python_text(found.path)}, {{{named}}}, length={access.size[0]})"
    if not access.is_window:
        channels = {1: ', channels="first"', 2: ', channels="last"'}
        _, before, after = access.split(main.shape)
        call = f"Patches({python_text(found.path)}, {{{named}}}, size={access.size}"
        call += f"{channels.get(bool(before) + 2 * bool(after), '')})"
    return loader_code(f"data = h5chunk.{call}")


def _fields(main: DatasetInfo, usable: Sequence[DatasetInfo], access: Access) -> dict[str, str]:
    """Return the datasets beside ``main`` with its spatial shape, by field name, with * for an episode or volume."""
    group, _, last = main.name.rpartition("/")
    space, names = access.split(main.shape)[0], [item.name for item in usable]
    parts = group.split("/")
    tried = ["/".join([*parts[:at], "*", *parts[at + 1 :]]) for at in range(len(parts) if group else 0)]
    count = {each: sum(map(bool, map(_compiled(f"{each}/{last}").fullmatch, names))) for each in tried}
    best = max(tried, key=lambda each: count[each], default="")
    beside = [item for item in usable if item.name.rpartition("/")[0] == group]
    alike = [item for item in beside if re.sub(r"\d+", "", item.name) == re.sub(r"\d+", "", main.name)]
    if 1 < len(alike) == len(beside):  # a dataset per episode or volume
        return {"data": f"{group}/*".lstrip("/")}
    own = [item.name.rpartition("/")[2] for item in [main, *beside] if access.split(item.shape)[0] == space]
    start = best if best and count[best] > 1 else group
    return {name: f"{start}/{name}".lstrip("/") for name in dict.fromkeys(own[:MAX_FIELDS])}


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "[^/]+"))
