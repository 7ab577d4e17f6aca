"""Does what was planned: writes the new file of a repack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d

from h5chunk.errors import FileError, printable
from h5chunk.sources.sparse.hdf5calls import is_stored_as
from h5chunk.store.format import Region, open_file
from h5chunk.store.guard.child import limited_memory
from h5chunk.store.rewrite.movedrows import EvenRows, UnevenRows
from h5chunk.store.rewrite.rawrows import RawRows, open_rows
from h5chunk.store.rewrite.replica import create_replica, printable_key
from h5chunk.store.rewrite.rewrite import NewOrder, copy_rows, shuffle_rows
from h5chunk.store.rewrite.survey import Survey, damages, look_at_dataset
from h5chunk.store.rewrite.targets import CompressedTarget, PlainTarget, Target, written
from h5chunk.store.write.newfile import NewFile
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.repack.header import CHECKSUMS, SOURCE_INDEX, checksum_name
from h5chunk.tools.repack.plan import Move, RepackPlan, plan_changes
from h5chunk.tools.repack.report import FieldReport, LaidOut


class Source:
    """The file to read; while it is entered, open in HDF5 and as bytes. It pickles in between."""

    def __init__(self, path: Path) -> None:
        self.path, self.shown = path, printable(path)
        self._stamp: tuple[int, ...] = ()

    def __enter__(self) -> Source:
        self.file = open_file(self.path)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._stamp = self._stamp or self._now()
        self.check_unchanged()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        with damages(self.shown):
            self.file.close()
        del self.file

    @property
    def num_bytes(self) -> int:
        return self._stamp[2]

    @property
    def stamp(self) -> tuple[int, ...]:
        """What changes when the file does."""
        return self._stamp

    def _now(self) -> tuple[int, ...]:
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def check_unchanged(self) -> None:
        """Raise FileError if the file was written to meanwhile."""
        if self._now() != self._stamp:
            raise FileError(f"{self.shown}: changed while it was read: start again")


def telling(plan: RepackPlan, survey: Survey, progress: Progress | None, checked_bytes: int) -> Callable[[int], None]:
    """What to tell of bytes that were checked, moved or copied."""
    moved = {move.facts.path for move in plan.moves}
    copied = sum(facts.stored_bytes for path, facts in survey.datasets.items() if path not in moved)
    told = count_up("repack", checked_bytes + plan.moved_bytes + copied, progress)
    told(0)
    return told


class Run:
    """The writing of one file."""

    def __init__(
        self,
        source: Source,
        survey: Survey,
        plan: RepackPlan,
        order: NewOrder | None,
        new: NewFile,
        told: Callable[[int], None],
    ) -> None:
        self._source, self._survey, self._plan, self._order = source, survey, plan, order
        self._new, self._told = new, told
        self._regions: dict[str, Region] = {}

    def create(self) -> list[str]:
        """Write all but what is laid out anew; says what could not be kept."""
        lost: list[str] = []
        changes = plan_changes(self._plan, self._survey, self._order, self._told)

        def create(part: Path) -> dict[str, Region]:
            with limited_memory(self._source.path):
                replica = create_replica(part, self._source.file, self._survey, changes)
            lost.extend(replica.lost)
            return replica.regions

        self._regions = dict(self._new.make(self._plan.num_bytes, create))
        return lost

    def move_all(self) -> None:
        """Write what is laid out anew, and the tables beside it."""
        tables: dict[str, np.ndarray] = {}
        if self._order is not None and all(move.facts.path != SOURCE_INDEX.encode() for move in self._plan.moves):
            tables[SOURCE_INDEX] = self._order.order
        with self._new_descriptor() as descriptor:
            for move in self._plan.moves:
                if move.layout.written:
                    with damages(self._source.shown):
                        sums = self._move(move, descriptor)
                    if move.checked:
                        tables[f"{CHECKSUMS}/{checksum_name(move.facts.path, self._source.shown)}"] = sums
        with written(self._new.part):
            for name, values in tables.items():
                self._new.write(name, values)

    @contextmanager
    def _new_descriptor(self) -> Iterator[int]:
        descriptor = os.open(self._new.part, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _move(self, move: Move, descriptor: int) -> np.ndarray:
        """Write one dataset; gives the checksums of its chunks."""
        with self._target(move, descriptor) as target:
            if move.kind == "pointers":
                target.put(0, self._new_pointers(move))
                self._told(move.facts.num_bytes)
            else:
                self._move_rows(move, target)
            return target.finish()

    def _move_rows(self, move: Move, target: Target) -> None:
        shares, folder = self._plan.shares, self._new.part.parent
        dataset = h5py.Dataset(h5d.open(self._source.file.id, move.facts.path))
        with closing(self._open(dataset)) as rows:
            if move.kind == "copy" or self._order is None:
                copy_rows(rows, target, shares, unit_rows=move.unit_rows, told=self._told)
                return
            permuted: EvenRows | UnevenRows = EvenRows(rows, move.unit_rows)
            if move.kind == "runs":
                starts = self._starts(move.pointers, move.facts.num_rows)
                where = f"{self._source.shown}: {move.facts.name!r}"
                permuted = UnevenRows(rows, starts, self._order.order, shares.part_bytes, where)
            shuffle_rows(permuted, self._order, target, shares, folder=folder, told=self._told)

    def _target(self, move: Move, descriptor: int) -> Target:
        if move.layout.filters:
            return CompressedTarget(self._new.part, move.facts.path, self._plan.shares.num_threads, move.checked)
        return PlainTarget(
            self._new.part,
            descriptor,
            self._regions[printable_key(move.facts.path)],
            num_bytes=move.facts.num_bytes,
            chunk_bytes=move.chunk_bytes,
            checked=move.checked,
        )

    def _starts(self, path: bytes, num_elements: int | None) -> np.ndarray:
        """Where rows of different lengths begin, and where the last one ends: (num_samples + 1,) int64."""
        name = f"{self._source.shown}: {printable(path)!r}"
        values = self._read_all(path).astype(np.int64)
        if len(values) == self._plan.samples.num_samples:
            values = np.concatenate(([0], values))
        falls = np.flatnonzero(np.diff(values) < 0)
        if values[0] != 0 or len(falls):
            raise FileError(f"{name} is damaged: it falls at row {int(falls[0]) if len(falls) else 0}")
        if num_elements is not None and values[-1] != num_elements:
            raise FileError(f"{name} is damaged: it ends at {values[-1]}, but there are {num_elements} elements")
        return values

    def _read_all(self, path: bytes) -> np.ndarray:
        """All of a dataset of numbers of one dimension, past HDF5, which believes what chunks inflate to."""
        dataset = h5py.Dataset(h5d.open(self._source.file.id, path))
        if not is_stored_as(dataset, dataset.dtype):
            raise FileError(
                f"{self._source.shown}: {printable(path)!r} has numbers of unusual precision or bit offset, by which "
                "rows cannot be shuffled: leave --shuffle out"
            )
        values = np.empty(dataset.shape, dataset.dtype)
        with closing(self._open(dataset)) as rows:
            rows.read(0, len(values), values.view(np.uint8).reshape(len(values), -1))
        return values

    def _open(self, dataset: h5py.Dataset) -> RawRows:
        shares = self._plan.shares
        return open_rows(
            dataset,
            self._source.descriptor,
            part_bytes=shares.part_bytes,
            num_threads=shares.num_threads,
            folder=self._new.part.parent,
        )

    def _new_pointers(self, move: Move) -> np.ndarray:
        """What a dataset of pointers holds in the new order, as bytes."""
        assert self._order is not None
        lengths = np.diff(self._starts(move.facts.path, None))[self._order.order]
        values = np.concatenate(([0], np.cumsum(lengths)))[-move.facts.num_rows :]
        dtype = self._source.file[move.facts.path].dtype
        return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def describe_fields(plan: RepackPlan, shuffled: bool, path: Path, shown: str) -> list[FieldReport]:
    """Say what became of the fields, as the new file at ``path`` says."""
    fields = [(move.facts, move.row_elements, move.kind != "copy") for move in plan.moves if move.is_field]
    if shuffled:
        fields += [(facts, 1.0, True) for facts in plan.samples.others]
    reports = []
    with h5py.File(path, "r", locking=False) as file:
        for facts, row_elements, moved in fields:
            now = look_at_dataset(h5d.open(file.id, facts.path), facts.path, shown)
            before, after = LaidOut.of(facts, row_elements), LaidOut.of(now, row_elements)
            reports.append(
                FieldReport(facts.name, facts.dtype, facts.shape or (), facts.num_bytes, before, after, moved)
            )
    return reports
