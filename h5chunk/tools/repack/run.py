"""Check the source of a repack against its checksums, and write the new file.

New checksums of damaged values would declare these right: so what is moved is compared with its old checksums first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d

from h5chunk.errors import FileError, printable
from h5chunk.stamp import stamp_of
from h5chunk.store.format.spec import Region
from h5chunk.store.hdf5.child import limited_memory
from h5chunk.store.hdf5.library import is_stored_as
from h5chunk.store.hdf5.open import open_file, translate_errors
from h5chunk.store.read.scan import CheckedDataset, check_parts
from h5chunk.store.rewrite.raw_rows import RawRows, open_rows
from h5chunk.store.rewrite.replica import create_replica, printable_key
from h5chunk.store.rewrite.shuffle import EvenRows, NewOrder, UnevenRows, copy_rows, shuffle_rows
from h5chunk.store.rewrite.survey import Survey, look_at_dataset
from h5chunk.store.rewrite.targets import CompressedTarget, PlainTarget, Target, written
from h5chunk.store.write.new_file import NewFile
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.repack.header import CHECKSUMS, SOURCE_INDEX, checksum_name
from h5chunk.tools.repack.plan import Move, RepackPlan, plan_changes
from h5chunk.tools.repack.report import FieldReport, LaidOut


class Source:
    """The source: a context manager in which it is open in HDF5 and as bytes. It pickles when closed."""

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
        with translate_errors(self.shown):
            self.file.close()
        del self.file

    @property
    def num_bytes(self) -> int:
        return self._stamp[2]

    @property
    def stamp(self) -> tuple[int, ...]:
        """The stamp of the file, see `h5chunk.stamp`."""
        return self._stamp

    def _now(self) -> tuple[int, ...]:
        return stamp_of(self.descriptor, with_ctime=True)

    def check_unchanged(self) -> None:
        """Raise FileError if the file was written to meanwhile."""
        if self._now() != self._stamp:
            raise FileError(f"{self.shown}: changed while it was read: start again")


def progress_counter(plan: RepackPlan, survey: Survey, progress: Progress | None) -> Callable[[int], None]:
    """Return the function that reports bytes that were checked, moved or copied."""
    moved = {move.facts.path for move in plan.moves}
    copied = sum(facts.stored_bytes for path, facts in survey.datasets.items() if path not in moved)
    told = count_up("repack", _checked_bytes(plan, survey) + plan.moved_bytes + copied, progress)
    told(0)
    return told


def _checked_bytes(plan: RepackPlan, survey: Survey) -> int:
    """Return the stored bytes of all data that are moved and have checksums in the source."""
    return sum(survey.datasets[path].stored_bytes for path in _with_checksums(plan, survey))


def check_moved(plan: RepackPlan, survey: Survey, source: Source, told: Callable[[int], None]) -> None:
    """Compare the chunks of all that is moved with the checksums that the source holds of them, if it does.

    Parameters
    ----------
    plan : RepackPlan
    survey : Survey
    source : Source
    told : callable
        Told the bytes that were read since the last call.

    Raises
    ------
    FileError
        A chunk is not what its checksum says, or there are not as many checksums as chunks.
    """
    with translate_errors(source.shown):
        for path in _with_checksums(plan, survey):
            name = checksum_name(path, source.shown)
            dataset = h5py.Dataset(h5d.open(source.file.id, path))
            expected = source.file[f"{CHECKSUMS}/{name}"][()]
            checked = CheckedDataset(source.path, dataset, expected)
            if checked.num_chunks != len(expected):
                raise FileError(
                    f"{source.shown}: {name!r} has {checked.num_chunks} chunks but {len(expected)} checksums: it is "
                    "damaged: h5chunk verify says what is wrong"
                )
            shares = plan.shares
            threads = max(1, min(shares.num_threads, shares.memory_bytes // checked.thread_bytes()))
            for came in check_parts(checked.parts(np.arange(checked.num_chunks)), source.descriptor, threads):
                if came.damages:
                    raise _damaged(source, name, came.damages[0].chunk, came.damages[0].what)
                told(came.num_bytes)


def _with_checksums(plan: RepackPlan, survey: Survey) -> Iterator[bytes]:
    """Yield the datasets that are moved and have checksums."""
    for move in plan.moves:
        table = survey.datasets.get(f"{CHECKSUMS}/".encode() + move.facts.path)
        if move.checked and move.facts.num_bytes and table is not None and len(table.shape or ()) == 1:
            yield move.facts.path


def _damaged(source: Source, name: str, chunk: int, what: str) -> FileError:
    return FileError(
        f"{source.shown}: chunk {chunk} of {name!r} {what}: nothing was repacked: h5chunk verify names all that is "
        f"damaged, and repairs it with --repair; if values were changed on purpose, remove {CHECKSUMS}/{name} from it"
    )


class Run:
    """Writer of the new file."""

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
        """Write everything but the data that are moved; return what could not be kept."""
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
        """Write the data that are moved, and the tables beside them."""
        tables: dict[str, np.ndarray] = {}
        if self._order is not None and all(move.facts.path != SOURCE_INDEX.encode() for move in self._plan.moves):
            tables[SOURCE_INDEX] = self._order.order
        with self._new_descriptor() as descriptor:
            for move in self._plan.moves:
                if move.layout.written:
                    with translate_errors(self._source.shown):
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
        """Write one dataset; return the checksums of its chunks."""
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
        """Read where rows of different lengths begin, and where the last one ends: (num_samples + 1,) int64."""
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
        """Read a dataset of numbers of one dimension without HDF5, which believes the lengths of chunks."""
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
        """Compute the pointers of the new order, as bytes."""
        assert self._order is not None
        lengths = np.diff(self._starts(move.facts.path, None))[self._order.order]
        values = np.concatenate(([0], np.cumsum(lengths)))[-move.facts.num_rows :]
        dtype = self._source.file[move.facts.path].dtype
        return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def describe_fields(plan: RepackPlan, shuffled: bool, path: Path, shown: str) -> list[FieldReport]:
    """Report the change of each field, as the new file at ``path`` describes it."""
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
