"""Plan what repack does with each dataset of a file, and refuse what it cannot do, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h5py
from h5py import h5a, h5d, h5o

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.repack import Shares, check_memory
from h5chunk.store.format.spec import GROUP, HEADER_BYTES
from h5chunk.store.hdf5.claims import check_claims, check_filters
from h5chunk.store.rewrite.references import attribute_names, refers_to_regions
from h5chunk.store.rewrite.replica import Changes, NewLayout, WriteValues, copy_objects, permute_objects
from h5chunk.store.rewrite.shuffle import NewOrder
from h5chunk.store.rewrite.survey import DatasetFacts, Survey
from h5chunk.tools.repack.fields import Samples, SparseGroup
from h5chunk.tools.repack.header import CHECKSUMS, NewHeader, checksum_name
from h5chunk.tools.repack.options import RepackOptions

LEAST_FILTERED_BYTES = 4 << 10  # chunks below this are not compressed: their index would take more than is saved
ROWS, RUNS, ENDS = b"source_index row_ids".split(), b"source_names", b"source_name_ends"  # of /h5chunk, by sample


@dataclass(frozen=True)
class Move:
    """A dataset that is laid out anew.

    Attributes
    ----------
    facts : DatasetFacts
    layout : NewLayout
    kind : {"copy", "rows", "runs", "pointers"}
        copy: in its order. rows: permuted. runs: permuted in runs of different lengths. pointers: says where such
        runs begin, or end, and is computed anew.
    pointers : bytes
        Of runs: the dataset of pointers.
    checked : bool
        Whether checksums of it are stored.
    row_elements : float
        Elements of a sample, where a row of the dataset is less than that.
    """

    facts: DatasetFacts
    layout: NewLayout
    kind: str = "copy"
    pointers: bytes = b""
    checked: bool = False
    row_elements: float = 1.0

    @property
    def unit_rows(self) -> int:
        """Rows of a chunk."""
        return self.layout.chunks[0] if self.layout.chunks else self.facts.num_rows

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk, or of all that is contiguous."""
        return self.unit_rows * self.facts.grid.sample_bytes

    @property
    def num_chunks(self) -> int:
        """Along the first axis."""
        return -(-self.facts.num_rows // self.unit_rows)

    @property
    def is_field(self) -> bool:
        """Whether it is a field, not a table of the group ``/h5chunk``."""
        return not self.facts.path.startswith(f"{GROUP}/".encode())

    @property
    def new_bytes(self) -> int:
        """In the new file, if that is known."""
        return self.num_chunks * self.chunk_bytes if self.layout.written and not self.layout.filters else 0

    @property
    def waiting_bytes(self) -> int:
        """Beside the new file, while it is written."""
        return self.facts.num_bytes if self.kind != "copy" and self.layout.filters else 0


@dataclass
class RepackPlan:
    """The plan of a repack.

    Attributes
    ----------
    samples : Samples
    header : NewHeader or None
    moves : list of Move
    shares : Shares
    num_bytes : int
        Of disk, about.
    notes : list of str
    """

    samples: Samples
    header: NewHeader | None
    moves: list[Move]
    shares: Shares
    num_bytes: int
    notes: list[str] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """All that is moved."""
        return sum(move.facts.num_bytes for move in self.moves if move.layout.written)


def plan_moves(
    file: h5py.File,
    survey: Survey,
    samples: Samples,
    header: NewHeader | None,
    options: RepackOptions,
    num_threads: int,
    notes: list[str],
) -> RepackPlan:
    """Plan a repack; add to ``notes``.

    Raises
    ------
    FileError, OptionError
        It cannot be done.
    """
    shown = printable(file.filename)
    moves = [*_field_moves(samples, header, options), *_sparse_moves(samples, header, options)]
    if options.shuffle:
        moves += _table_moves(survey, samples)
    moved = {move.facts.name for move in moves}
    notes += [
        f"copied as it is: {name}, of which rows do not fit in memory"
        for name in samples.too_large
        if name not in moved
    ]
    fixed = [move.facts.name for move in moves if move.facts.maxshape != move.facts.shape]
    if fixed:
        more = f" and {len(fixed) - 4} more" if len(fixed) > 4 else ""
        notes.append(f"can no longer be resized: {', '.join(fixed[:4])}{more}: chunks in one run are of a fixed number")
    for move in moves:
        _check_claims(file, move, shown)
        if header is not None and move.checked:
            header.add_checksums(checksum_name(move.facts.path, shown), move.num_chunks)
    runs = sum(move.kind == "pointers" for move in moves)
    memory_bytes = check_memory(options.memory_bytes, samples.num_samples * (1 + 2 * runs) if options.shuffle else 0)
    shares = Shares(memory_bytes, num_threads)
    _check_samples(moves, shares, shown)
    return RepackPlan(samples, header, moves, shares, _disk_bytes(survey, moves, samples), notes)


def _check_claims(file: h5py.File, move: Move, shown: str) -> None:
    """Refuse datasets that h5chunk would not read: of unknown filters, or of sizes out of proportion."""
    if move.layout.written:
        dataset = h5py.Dataset(h5d.open(file.id, move.facts.path))
        where, properties = f"{shown}: {move.facts.name!r}", dataset.id.get_create_plist()
        check_filters(properties, where, trusted=False)
        check_claims(dataset, properties, where)


def _check_samples(moves: list[Move], shares: Shares, shown: str) -> None:
    largest = max(moves, key=lambda move: move.facts.grid.sample_bytes, default=None)
    if largest is not None and largest.facts.grid.sample_bytes > shares.part_bytes:
        sample_bytes = largest.facts.grid.sample_bytes
        least = sample_bytes * (shares.memory_bytes // shares.part_bytes + 1)
        raise OptionError(
            f"{shown}: one sample of {largest.facts.name!r} is {human_bytes(sample_bytes)}, of which several are held "
            f"at a time, but memory is {human_bytes(shares.memory_bytes)}: allow {human_bytes(least)}"
        )


def _disk_bytes(survey: Survey, moves: list[Move], samples: Samples) -> int:
    moved = {move.facts.path for move in moves}
    copied = sum(facts.stored_bytes for path, facts in survey.datasets.items() if path not in moved)
    waiting = max((move.waiting_bytes for move in moves), default=0)
    return HEADER_BYTES + copied + sum(move.new_bytes for move in moves) + waiting + 16 * samples.num_samples


def _field_moves(samples: Samples, header: NewHeader | None, options: RepackOptions) -> Iterator[Move]:
    for facts in samples.fields:
        chunk_samples = min(samples.layouts[facts.num_rows].chunk_samples, facts.num_rows)
        layout = _layout(facts, (chunk_samples, *facts.grid.shape[1:]), options)
        if samples.anndata and len(facts.grid.shape) == 1 and layout.written:
            layout = NewLayout(None)  # a column of a table, which is always read whole
        kind = "rows" if options.shuffle else "copy"
        yield Move(facts, layout, kind, checked=header is not None and layout.written)


def _layout(facts: DatasetFacts, chunks: tuple[int, ...], options: RepackOptions) -> NewLayout:
    written = facts.stored_bytes > 0
    large = math.prod(chunks) * facts.item_bytes >= LEAST_FILTERED_BYTES
    return NewLayout(chunks, options.filters if written and large else (), written)


def _sparse_moves(samples: Samples, header: NewHeader | None, options: RepackOptions) -> Iterator[Move]:
    for group in samples.sparse:
        by_sample = options.shuffle and _has_samples(group, samples)
        for facts in (group.indices, group.data):
            if facts.num_rows:
                layout = _layout(facts, (group.chunk_entries,), options)
                checked = header is not None and layout.written
                kind, elements = "runs" if by_sample else "copy", facts.num_rows / max(1, group.indptr.num_rows - 1)
                yield Move(facts, layout, kind, group.indptr.path, checked, elements)
        if group.indptr.stored_bytes:
            kind = "pointers" if by_sample else "copy"
            yield Move(group.indptr, NewLayout(None), kind, checked=header is not None)


def _has_samples(group: SparseGroup, samples: Samples) -> bool:
    return group.kind == "csr" and group.shape[0] == samples.num_samples


def _table_moves(survey: Survey, samples: Samples) -> Iterator[Move]:
    """Yield the moves of tables in the group ``/h5chunk`` with a row for each sample."""
    ends = GROUP.encode() + b"/" + ENDS
    for name, kind in [*((name, "rows") for name in ROWS), (RUNS, "runs"), (ENDS, "pointers")]:
        facts = survey.datasets.get(GROUP.encode() + b"/" + name)
        if facts is None:
            continue
        if not facts.fixed or (kind != "runs" and facts.num_rows != samples.num_samples):
            raise FileError(f"{facts.name!r} has {facts.num_rows} rows of {facts.dtype}, not one a sample: damaged")
        if facts.num_rows:
            yield Move(facts, NewLayout(None), kind, ends if kind == "runs" else b"")


def check_shuffle(file: h5py.File, survey: Survey, samples: Samples) -> list[str]:
    """Refuse files that cannot be shuffled; return notes about what is not shuffled.

    Raises
    ------
    OptionError
    """
    shown = printable(file.filename)
    if samples.anndata:
        raise OptionError(
            f"{shown}: is one of AnnData's, whose tables, graphs and names would all have to be permuted alike: "
            "shuffle it with h5chunk convert, which makes a training file of it, or repack it without shuffle"
        )
    for group in samples.sparse:
        if not group.kind:
            raise OptionError(
                f"{shown}: {printable(group.path)!r} looks like a sparse matrix, but nothing says whether of rows or "
                "of columns: shuffle it with h5chunk convert, or repack it without shuffle"
            )
        if group.kind == "csc" and group.shape[0] == samples.num_samples:
            raise OptionError(
                f"{shown}: {printable(group.path)!r} is a matrix in compressed columns, whose rows cannot be permuted: "
                "write it as csr_matrix"
            )
    for facts in survey.datasets.values():
        if facts.regions:
            raise OptionError(f"{shown}: {facts.name!r} refers to regions of datasets, which a shuffle would move")
    return list(_aligned_attributes(file, survey, samples, shown))


def _aligned_attributes(file: h5py.File, survey: Survey, samples: Samples, shown: str) -> Iterator[str]:
    """Yield notes about attributes that seem to have one value for each sample."""
    for path in sorted(survey.paths.values()):
        item = h5o.open(file.id, path or b"/")
        for name in attribute_names(item):
            attribute = h5a.open(item, name)
            where = f"attribute {printable(name)!r} of {printable(path) or 'the file'!r}"
            if refers_to_regions(attribute.get_type()):
                raise OptionError(f"{shown}: {where} refers to regions of datasets, which a shuffle would move")
            if samples.num_samples > 1 and (attribute.shape or ())[:1] == (samples.num_samples,):
                yield f"{where} has {samples.num_samples} values, as many as samples: their order is as it was"


def plan_changes(
    plan: RepackPlan,
    survey: Survey,
    order: NewOrder | None,
    copied: Callable[[int], None],
) -> Changes:
    """Plan what becomes of the other objects of the file."""
    layouts = {move.facts.path: move.layout for move in plan.moves}
    values: dict[bytes, WriteValues] = {
        path: copy_objects
        for path, facts in survey.datasets.items()
        if (facts.refers or facts.named) and path not in layouts
    }
    if order is not None:
        permute = permute_objects(order, plan.shares.memory_bytes)
        values |= {facts.path: permute for facts in plan.samples.others if facts.num_rows == plan.samples.num_samples}
    header, group = plan.header, GROUP.encode()
    if header is None:
        return Changes(layouts, values, copied=copied)
    return Changes(
        layouts,
        values,
        left_out=lambda path: path == CHECKSUMS.encode(),
        attribute_left_out=lambda path, name: path == group and name.decode("utf-8", "replace") in header.attributes,
        finish=header.write,
        copied=copied,
    )
