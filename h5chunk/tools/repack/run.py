"""Check the source of a repack against its checksums, and write the new file.

New checksums of damaged values would make the values look right: so data is first compared with its old checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d

from h5chunk.errors import FileError, printable
from h5chunk.plan.permutation import permutation
from h5chunk.stamp import stamp_of
from h5chunk.store.format.spec import Region
from h5chunk.store.hdf5.child import limited_memory
from h5chunk.store.hdf5.chunk_table import is_stored_as
from h5chunk.store.hdf5.codecs import KNOWN_FILTERS
from h5chunk.store.hdf5.open import open_file, translate_errors
from h5chunk.store.read.scan import CheckedDataset
from h5chunk.store.rewrite.raw_rows import RawRows
from h5chunk.store.rewrite.replica import CHECKSUMS, Changes, create_replica, region_key
from h5chunk.store.rewrite.shuffle import NewOrder, Rows, UnevenRows, copy_rows, shuffle_rows
from h5chunk.store.rewrite.survey import DatasetFacts, look_at_dataset
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.targets import CompressedTarget, PlainTarget, Target
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.repack.plan import SOURCE_INDEX, Move, RepackPlan
from h5chunk.tools.repack.report import FieldReport, LaidOut


class Source:
    """The source file, open in HDF5 and as bytes inside this context manager. It can be pickled when closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.shown = path, printable(path)
        self.stamp: tuple[int, ...] = ()  # see `h5chunk.stamp`, as it was when first opened

    def __enter__(self) -> Source:
        self.file = open_file(self.path)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.stamp = self.stamp or stamp_of(self.descriptor, with_ctime=True)
        self.check_unchanged()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        with translate_errors(self.shown):
            self.file.close()
        del self.file

    def open(self, path: bytes) -> h5py.Dataset:
        """Open a dataset; its path may be any bytes."""
        return h5py.Dataset(h5d.open(self.file.id, path))

    def check_unchanged(self) -> None:
        """Raise FileError if the file was modified since it was opened."""
        if stamp_of(self.descriptor, with_ctime=True) != self.stamp:
            raise FileError(f"{self.shown}: changed while it was read: start again")


class Run:
    """Write the new file from an open source."""

    def __init__(self, source: Source, plan: RepackPlan, new: NewFile, progress: Progress) -> None:
        self._source, self._plan, self._new = source, plan, new
        shuffle, seed = plan.options.shuffle, plan.options.seed
        self._order = NewOrder(permutation(plan.samples.num_samples, seed)) if shuffle else None
        checked = sum(move.facts.stored_bytes for move in self._moves_with_checksums())
        moved = sum(move.facts.num_bytes for move in plan.moves if move.layout.written)
        self._told = count_up("repack", checked + moved + plan.copied_bytes, progress)
        self._told(0)

    def _moves_with_checksums(self) -> Iterator[Move]:
        """Yield the moves of datasets with checksums in the source."""
        for move in self._plan.moves:
            table = self._plan.survey.datasets.get(f"{CHECKSUMS}/".encode() + move.facts.path)
            if move.checked and move.facts.num_bytes and table is not None and len(table.shape or ()) == 1:
                yield move

    def check_source(self) -> None:
        """Compare the chunks of all moved datasets with their checksums in the source, if it has checksums."""
        shares, shown = self._plan.shares, self._source.shown
        for move in self._moves_with_checksums():
            name = move.facts.path.decode()
            expected = self._source.file[f"{CHECKSUMS}/{name}"][()]
            checked = CheckedDataset(self._source.path, self._source.open(move.facts.path), expected)
            if checked.num_chunks != len(expected):
                raise FileError(
                    f"{shown}: {name!r} has {checked.num_chunks} chunks but {len(expected)} checksums: it is damaged: "
                    "h5chunk verify says what is wrong"
                )
            checked.require_whole(
                np.arange(checked.num_chunks),
                self._source.descriptor,
                self._told,
                "nothing was repacked",
                f"; if values were changed on purpose, remove {CHECKSUMS}/{name} from it",
                num_threads=shares.num_threads,
                memory_bytes=shares.memory_bytes,
            )

    def create(self) -> list[str]:
        """Write everything except the data that is moved; return messages about what could not be kept."""
        plan, lost = self._plan, list[str]()
        others = plan.samples.others if self._order is not None else []
        changes = Changes(
            layouts={move.facts.path: move.layout for move in plan.moves},
            header=plan.header,
            order=self._order,
            permuted=[facts.path for facts in others if facts.num_rows == plan.samples.num_samples],
            memory_bytes=plan.shares.memory_bytes,
        )

        def create(part: Path) -> dict[str, Region]:
            with limited_memory(self._source.path):
                regions, lost[:] = create_replica(part, self._source.file, plan.survey, changes, self._told)
            return regions

        self._new.make(plan.num_bytes, create)
        return lost

    def move_all(self) -> None:
        """Write the data of moved datasets, and the tables beside them."""
        tables: dict[str, np.ndarray] = {}
        if self._order is not None and all(move.facts.path != SOURCE_INDEX.encode() for move in self._plan.moves):
            tables[SOURCE_INDEX] = self._order.order
        for move in self._plan.moves:
            if move.layout.written:
                with self._target(move) as target:
                    self._move(move, target)
                    sums = target.finish()
                if move.checked:
                    tables[f"{CHECKSUMS}/{move.facts.path.decode()}"] = sums
        for name, values in tables.items():
            self._new.write(name, values)

    def _target(self, move: Move) -> Target:
        facts, checked = move.facts, move.checked
        if move.layout.filters:
            return CompressedTarget(self._new, facts.path, self._plan.shares.num_threads, checked)
        name, sizes = region_key(facts.path), {"num_bytes": facts.num_bytes, "chunk_bytes": move.chunk_bytes}
        return PlainTarget(self._new, name, **sizes, checked=checked)

    def _move(self, move: Move, target: Target) -> None:
        """Write the data of one dataset."""
        facts, shares, order = move.facts, self._plan.shares, self._order
        dataset = self._source.open(facts.path)
        if move.kind == "pointers" and order is not None:
            lengths = np.diff(self._starts(facts.path, None))[order.order]
            pointers = np.concatenate(([0], np.cumsum(lengths)))[-facts.num_rows :]
            target.put(0, np.ascontiguousarray(pointers.astype(dataset.dtype)).view(np.uint8))
            self._told(facts.num_bytes)
            return
        with closing(self._open_rows(dataset)) as rows:
            if move.kind == "copy" or order is None:
                copy_rows(rows, target, shares, unit_rows=move.unit_rows, told=self._told)
                return
            permuted = Rows(rows, move.unit_rows)
            if move.kind == "runs":
                starts = self._starts(move.pointers, facts.num_rows)
                where = f"{self._source.shown}: {facts.name!r}"
                permuted = UnevenRows(rows, starts, order.order, shares.part_bytes, where)
            shuffle_rows(permuted, order, target, shares, folder=self._new.part.parent, told=self._told)

    def _starts(self, path: bytes, num_elements: int | None) -> np.ndarray:
        """Read the starts of rows of different lengths, and the end of the last row: (num_samples + 1,) int64.

        The starts are not read through HDF5, which would trust damaged chunk lengths.
        """
        name, dataset = f"{self._source.shown}: {printable(path)!r}", self._source.open(path)
        if not is_stored_as(dataset, dataset.dtype):
            raise FileError(
                f"{name} has numbers of unusual precision or bit offset, by which rows cannot be shuffled: leave "
                "--shuffle out"
            )
        stored = np.empty(dataset.shape, dataset.dtype)
        with closing(self._open_rows(dataset)) as rows:
            rows.read(0, len(stored), stored.view(np.uint8).reshape(len(stored), -1))
        values = stored.astype(np.int64)
        if len(values) == self._plan.samples.num_samples:
            values = np.concatenate(([0], values))
        falls = np.flatnonzero(np.diff(values) < 0)
        if values[0] != 0 or len(falls):
            raise FileError(f"{name} is damaged: it falls at row {int(falls[0]) if len(falls) else 0}")
        if num_elements is not None and values[-1] != num_elements:
            raise FileError(f"{name} is damaged: it ends at {values[-1]}, but there are {num_elements} elements")
        return values

    def _open_rows(self, dataset: h5py.Dataset) -> RawRows:
        return RawRows(dataset, self._source.descriptor, self._plan.shares, self._new.part.parent)


def planned_fields(plan: RepackPlan) -> list[FieldReport]:
    """Report the planned change of each field."""
    reports = []
    for facts, row_elements, moved, planned in _fields_of(plan):
        before, after = LaidOut.of(facts, row_elements), replace(LaidOut.of(planned, row_elements), stored_bytes=None)
        reports.append(FieldReport(facts.name, facts.dtype, facts.shape or (), facts.num_bytes, before, after, moved))
    return reports


def describe_fields(plan: RepackPlan, path: Path, shown: str) -> list[FieldReport]:
    """Report the change of each field, as the new file at ``path`` describes it."""
    reports = []
    with h5py.File(path, "r", locking=False) as file:
        for planned, (facts, row_elements, *_) in zip(planned_fields(plan), _fields_of(plan), strict=True):
            now = look_at_dataset(h5d.open(file.id, facts.path), facts.path, shown)
            reports.append(replace(planned, after=LaidOut.of(now, row_elements)))
    return reports


def _fields_of(plan: RepackPlan) -> Iterator[tuple[DatasetFacts, float, bool, DatasetFacts]]:
    """Yield each field, its elements per sample, whether it is shuffled, and the planned facts."""
    for move in plan.moves:
        if move.is_field:
            names = tuple(KNOWN_FILTERS.get(each.code, f"filter {each.code}") for each in move.layout.filters)
            planned = replace(move.facts, chunks=move.layout.chunks, filter_names=names)
            yield move.facts, move.row_elements, move.kind != "copy", planned
    if plan.options.shuffle:
        yield from ((facts, 1.0, True, facts) for facts in plan.samples.others)
