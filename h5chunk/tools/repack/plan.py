"""Plan the new layout of each dataset. Raises errors for files that cannot be repacked before anything is written."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
from h5py import h5d

from h5chunk.errors import FileError, OptionError, human_bytes, printable
from h5chunk.extras import load
from h5chunk.plan.repack import MemoryShares, memory_for_copying
from h5chunk.store.format.header import Header, header_attributes
from h5chunk.store.format.spec import CHECKSUMS, GROUP, HEADER_BYTES, ArraySpec, FileSpec
from h5chunk.store.hdf5.codecs import BLOSC, FLETCHER32, GZIP, LZF, SHUFFLE
from h5chunk.store.hdf5.guard import check_filters, check_stored_size
from h5chunk.store.rewrite.replica import Filter, NewLayout
from h5chunk.store.rewrite.survey import DatasetFacts, Survey
from h5chunk.tools.repack.fields import Samples, kept_paths
from h5chunk.tools.repack.options import RepackOptions
from h5chunk.tools.repack.order_check import find_dependent

MIN_FILTERED_BYTES = 4 << 10  # compressing smaller chunks would save less space than their index needs
COMPRESSIONS = ("none", "gzip", "lzf", "zstd", "lz4", "blosc")
_LEVELS = {"gzip": (0, 9, 4), "zstd": (1, 22, 3)}  # minimum, maximum, default
MAX_LISTED = 6  # objects that one message names
SOURCE_INDEX = f"{GROUP}/source_index"
TABLES = (
    ("source_index", "rows"),
    ("row_ids", "rows"),
    ("source_names", "runs"),
    ("source_name_ends", "pointers"),
)  # tables of /h5chunk with values per sample, and the kind of their `Move`


@dataclass(frozen=True)
class Move:
    """A dataset that gets a new layout.

    The ``kind`` is "copy" if the order of the rows stays the same, "rows" if rows are permuted, and "runs" if the rows
    of each sample are moved together. It is "pointers" if the values are the starts or ends of these runs, which are
    recomputed.
    """

    facts: DatasetFacts
    layout: NewLayout
    kind: str = "copy"
    pointers: bytes = b""  # path of the dataset with the starts or ends of runs, if the kind is "runs"
    checked: bool = False  # whether checksums are stored for the dataset
    row_elements: float = 1.0  # rows per sample, if a row of the dataset is an entry of a matrix

    @property
    def chunk_rows(self) -> int:
        return self.layout.chunks[0] if self.layout.chunks else self.facts.num_rows

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes, or of the entire dataset if it is contiguous."""
        return self.chunk_rows * self.facts.grid.sample_bytes

    @property
    def num_chunks(self) -> int:
        across = zip(self.facts.grid.shape[1:], self.layout.chunks[1:] if self.layout.chunks else (), strict=False)
        return -(-self.facts.num_rows // self.chunk_rows) * math.prod(-(-size // chunk) for size, chunk in across)

    @property
    def cuts_rows(self) -> bool:
        """True if chunks contain parts of rows."""
        return self.layout.chunks is not None and self.layout.chunks[1:] != tuple(self.facts.grid.shape[1:])

    @property
    def is_field(self) -> bool:
        """True if the dataset is a field rather than a table in the group ``/h5chunk``."""
        return not self.facts.path.startswith(f"{GROUP}/".encode())


@dataclass
class RepackPlan:
    options: RepackOptions
    survey: Survey
    samples: Samples
    header: FileSpec | None
    moves: list[Move]
    shares: MemoryShares
    notes: list[str]

    @property
    def facts(self) -> dict[str, Any]:
        """The values that every report contains, by name."""
        layout = self.samples.layout
        return {
            "num_samples": self.samples.num_samples,
            "main": self.samples.main,
            "chunk_samples": layout.chunk_samples if layout is not None else None,
            "window_chunks": self.options.window_chunks or (layout.window_chunks if layout is not None else None),
            "shuffled": self.options.shuffle,
        }

    @property
    def copied_bytes(self) -> int:
        """Stored size, in bytes, of all datasets that keep their layout."""
        moved = {move.facts.path for move in self.moves}
        return sum(facts.stored_bytes for path, facts in self.survey.datasets.items() if path not in moved)

    @property
    def num_bytes(self) -> int:
        """Approximate size on disk, in bytes, of the new file and of temporary files."""
        plain = [move for move in self.moves if move.layout.written and not move.layout.filters]
        waiting = [move.facts.num_bytes for move in self.moves if move.layout.filters and move.kind != "copy"]
        moved = sum(-(-move.facts.num_rows // move.chunk_rows) * move.chunk_bytes for move in plain) + max(
            waiting, default=0
        )
        return HEADER_BYTES + self.copied_bytes + moved + 16 * self.samples.num_samples


def plan_moves(
    file: h5py.File,
    survey: Survey,
    samples: Samples,
    header: FileSpec | None,
    options: RepackOptions,
    num_threads: int,
    notes: list[str],
) -> RepackPlan:
    """Plan a repack. Adds the tables of checksums to ``header``, and warnings to ``notes``."""
    label = printable(file.filename)
    moves = [*_field_moves(samples, header, options), *_ragged_moves(samples, header, options)]
    if options.shuffle:
        moves += _table_moves(survey, samples)
    moved = {move.facts.name for move in moves}
    notes += [
        f"{name} is copied unchanged, because its rows are too large for a chunk or for memory"
        for name in samples.too_large
        if name not in moved
    ]
    if samples.cut:
        more = f" and {len(samples.cut) - MAX_LISTED} more" if len(samples.cut) > MAX_LISTED else ""
        without = ", without shuffle, window_chunks and cache, which describe samples of one number" if header else ""
        notes.append(
            f"{', '.join(samples.cut[:MAX_LISTED])}{more} keep chunks that cut each sample: to repack them, too, name "
            f"all fields (--fields {shlex.quote(samples.cut[0])}; * stands for the name of each group){without}"
        )
    fixed = [move.facts.name for move in moves if move.facts.maxshape != move.facts.shape]
    if fixed:
        more = f" and {len(fixed) - 4} more" if len(fixed) > 4 else ""
        notes.append(
            f"{', '.join(fixed[:4])}{more} can no longer be resized, because chunks are stored one after the other"
        )
    lost = [move.facts.name for move in moves if header is None and FLETCHER32 in move.facts.filters]
    if lost:
        notes.append(f"Fletcher32 checksums are not kept in {', '.join(lost)}; --window-chunks adds other checksums")
    decompressed = [move.facts.name for move in moves if options.compression is None and _loses_compression(move)]
    if decompressed:
        notes.append(
            f"{', '.join(decompressed[:4])} will not be compressed any more, which makes reading faster: to keep them "
            "small, pass --compression, such as gzip"
        )
    for move in moves:
        if move.layout.written:  # refuse what h5chunk cannot read: unknown filters, implausible sizes
            dataset = h5py.Dataset(h5d.open(file.id, move.facts.path))
            where, properties = f"{label}: {move.facts.name!r}", dataset.id.get_create_plist()
            check_filters(properties, where, trusted=False)
            check_stored_size(dataset, properties, where)
        if header is not None and move.checked:
            try:
                table = f"{CHECKSUMS}/{move.facts.path.decode()}"
            except UnicodeDecodeError:
                raise FileError(
                    f"{label}: the name {move.facts.name!r} is not UTF-8, but checksums are stored by name: rename it"
                ) from None
            header.datasets[table] = ArraySpec((move.num_chunks,), np.dtype(np.uint32))
    runs = sum(move.kind == "pointers" for move in moves)
    num_permuted = samples.num_samples * (1 + 2 * runs) if options.shuffle else 0
    memory_bytes = memory_for_copying(options.memory_bytes, num_permuted)
    shares = MemoryShares(memory_bytes, num_threads)
    _check_samples(moves, shares, label)
    return RepackPlan(options, survey, samples, header, moves, shares, notes)


def _check_samples(moves: list[Move], shares: MemoryShares, label: str) -> None:
    largest = max(moves, key=lambda move: move.facts.grid.sample_bytes, default=None)
    if largest is not None and largest.facts.grid.sample_bytes > shares.part_bytes:
        sample_bytes = largest.facts.grid.sample_bytes
        min_bytes = sample_bytes * (shares.memory_bytes // shares.part_bytes + 1)
        raise OptionError(
            f"{label}: a sample of {largest.facts.name!r} takes up {human_bytes(sample_bytes)}, and several must fit "
            f"in memory_bytes, which is {human_bytes(shares.memory_bytes)}: raise it to {human_bytes(min_bytes)}"
        )


def _field_moves(samples: Samples, header: FileSpec | None, options: RepackOptions) -> Iterator[Move]:
    for facts in samples.fields:
        chunk_samples = min(samples.layouts[facts.num_rows].chunk_samples, facts.num_rows)
        chunks = (chunk_samples, *facts.grid.shape[1:])
        if options.chunks:
            chunks = tuple(map(min, options.chunks, facts.grid.shape))
        layout = _layout(facts, chunks, options)
        if samples.anndata and len(facts.grid.shape) == 1 and layout.written:
            layout = NewLayout(None)  # a column of a table, which readers always read completely
        kind = "rows" if options.shuffle else "copy"
        yield Move(facts, layout, kind, checked=header is not None and layout.written)


def _loses_compression(move: Move) -> bool:
    return move.layout.written and not move.layout.filters and bool({*move.facts.filters} - {SHUFFLE, FLETCHER32})


def _layout(facts: DatasetFacts, chunks: tuple[int, ...], options: RepackOptions) -> NewLayout:
    written = facts.stored_bytes > 0
    large = math.prod(chunks) * facts.item_bytes >= MIN_FILTERED_BYTES
    filters = parse_compression(options.compression) if written and large else ()
    if filters and SHUFFLE in facts.filters and filters[0].code != BLOSC:  # Blosc shuffles bytes itself
        filters = (Filter(SHUFFLE), *filters)
    return NewLayout(chunks, filters, written)


def _ragged_moves(samples: Samples, header: FileSpec | None, options: RepackOptions) -> Iterator[Move]:
    for group in samples.ragged:
        by_sample = options.shuffle and group.has_samples and group.shape[0] == samples.num_samples
        chunk_entries = group.chunk_entries(bool(parse_compression(options.compression)))
        for facts in group.lists:
            if facts.num_rows:
                layout = _layout(facts, (chunk_entries,), options)
                checked = header is not None and layout.written
                kind, elements = "runs" if by_sample else "copy", facts.num_rows / max(1, group.pointers.num_rows - 1)
                yield Move(facts, layout, kind, group.pointers.path, checked, elements)
        for facts in (group.pointers, *group.tables):
            if facts.stored_bytes:
                kind = "pointers" if facts is group.pointers else "rows"
                yield Move(facts, NewLayout(None), kind if by_sample else "copy", checked=header is not None)


def _table_moves(survey: Survey, samples: Samples) -> Iterator[Move]:
    """Yield the moves of the tables in ``/h5chunk`` that contain values for each sample."""
    for name, kind in TABLES:
        facts = survey.datasets.get(f"{GROUP}/{name}".encode())
        if facts is None:
            continue
        if not facts.is_fixed_size or (kind != "runs" and facts.num_rows != samples.num_samples):
            raise FileError(
                f"{facts.name!r} is damaged, because it has {facts.num_rows} rows of {facts.dtype}, not one per sample"
            )
        if facts.num_rows:
            yield Move(facts, NewLayout(None), kind, f"{GROUP}/source_name_ends".encode())


def check_shuffle(file: h5py.File, survey: Survey, samples: Samples, options: RepackOptions) -> None:
    """Raise OptionError if a shuffle could separate anything in the file from its samples."""
    label = printable(file.filename)
    if samples.anndata:
        raise OptionError(
            f"{label}: is an AnnData file, whose tables, graphs and names would all have to be permuted: shuffle "
            "it with h5chunk convert, which makes a training file, or repack it without shuffle"
        )
    for group in samples.ragged:
        if not group.kind:
            raise OptionError(
                f"{label}: {printable(group.path)!r} looks like a sparse matrix, but its format, csr or csc, is "
                "unknown: shuffle it with h5chunk convert, or repack it without shuffle"
            )
        if group.kind == "csc" and group.shape[0] == samples.num_samples:
            raise OptionError(
                f"{label}: {printable(group.path)!r} is a matrix in compressed columns, whose rows cannot be permuted: "
                "write it as csr_matrix"
            )
    named = {os.fsencode(name).strip(b"/") for name in options.fields}
    found = list(find_dependent(file, survey, samples, named, kept_paths(options)))
    if not found:
        return
    shown = found[:MAX_LISTED]
    listed = "; ".join(f"{each.name!r} {each.reason}" for each in shown)
    more = f"; and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    remedies = ", ".join(dict.fromkeys(each.remedy or f"--keep {shlex.quote(each.name)}" for each in shown))
    raise OptionError(
        f"{label}: shuffle would move the {samples.num_samples} rows of {samples.main!r} (fields chooses other "
        f"samples), but this may depend on their order: {listed}{more}. If something does not depend on it, copy it "
        f"unchanged ({remedies}; a group stands for all in it). Otherwise leave out shuffle, or let "
        "h5chunk.convert({name: array, ...}, path) shuffle arrays with one row per sample"
    )


def plan_header(
    header: Header | None, survey: Survey, samples: Samples, options: RepackOptions, label: str
) -> FileSpec | None:
    """Plan the group ``/h5chunk`` of the new file; return None if it does not need this group.

    An h5chunk file keeps its group. Another HDF5 file gets the group if it is shuffled, or if a window or cache is
    recommended to readers. The fields of such a file may be in groups, and ``checksums`` lists them by their paths.
    """
    if header is None and not options.needs_header:
        return None
    option = "shuffle" if options.shuffle else "window_chunks" if options.window_chunks is not None else "cache"
    if samples.anndata:
        raise OptionError(
            f"{label}: {option} would add the group /{GROUP}, but AnnData does not read files with unknown groups: "
            "leave it out"
        )
    layout = samples.layout
    if layout is None:
        raise OptionError(f"{label}: {option} is set, but no dataset has samples along its first axis: leave it out")
    if len(samples.layouts) > 1:
        lengths = ", ".join(map(str, sorted(samples.layouts)))
        raise OptionError(
            f"{label}: {option} is set, but the fields differ in length ({lengths}): name only fields of one length"
        )
    if header is None and any(node.path == GROUP.encode() for node in survey.nodes):
        raise FileError(f"{label}: has a group /{GROUP} that h5chunk did not write: rename that group")
    if options.window_chunks is not None:
        layout = replace(layout, window_chunks=options.window_chunks)
    numbers: dict[str, Any] = {"chunk_samples": layout.chunk_samples, "window_chunks": layout.window_chunks}
    if header is None:
        numbers["num_samples"] = layout.num_samples
    if header is None or options.shuffle:
        numbers |= {"seed": options.seed if options.shuffle else 0, "shuffled": options.shuffle}
    recorded = {**(header.options if header is not None else {}), "repack": options.recorded()}
    attributes = header_attributes(cache=options.cache or layout.cache, options=recorded, **numbers)
    new = FileSpec({}, {GROUP: attributes})
    if options.shuffle and SOURCE_INDEX.encode() not in survey.datasets:  # headers without a kind come from repack
        new.datasets[SOURCE_INDEX] = ArraySpec((samples.num_samples,), np.dtype(np.int64))
    return new


# ---- compressions


def parse_compression(text: str | None) -> tuple[Filter, ...]:
    """Return the filters for a compression such as ``gzip`` or ``gzip:9``; an empty tuple for ``none`` or None."""
    name, _, level = (text or "none").partition(":")
    if name not in COMPRESSIONS or (level and name not in _LEVELS):
        raise OptionError(
            f"compression is {text!r}: use one of {', '.join(COMPRESSIONS)}, gzip:0 to gzip:9, or zstd:1 to zstd:22"
        )
    if name == "none":
        return ()
    if name == "lzf":
        return (Filter(LZF),)
    number = 0
    if name in _LEVELS:
        lowest, highest, number = _LEVELS[name]
        number = int(level) if level.isdecimal() else -1 if level else number
        if not lowest <= number <= highest:
            raise OptionError(f"compression is {text!r}: use a level of {name} from {lowest} to {highest}")
    return (Filter(GZIP, (number,)),) if name == "gzip" else _plugin_filters(name, number)


def _plugin_filters(name: str, level: int) -> tuple[Filter, ...]:
    hdf5plugin = load("hdf5plugin", f"compression {name!r}")
    made = {"zstd": lambda: hdf5plugin.Zstd(clevel=level), "lz4": hdf5plugin.LZ4, "blosc": hdf5plugin.Blosc}[name]()
    code = int(made["compression"])
    if not h5py.h5z.filter_avail(code):
        raise OptionError(f"compression is {name!r} but the installed hdf5plugin lacks it: install a newer one")
    return (Filter(code, tuple(made["compression_opts"])),)
