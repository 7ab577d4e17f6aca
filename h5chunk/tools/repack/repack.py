"""Rewrite any HDF5 file so that its layout suits training, and keep everything else unchanged.

Data is first compared with its old checksums, because new checksums would hide damage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d

import h5chunk
from h5chunk.errors import FileError, OptionError, count_text, printable
from h5chunk.machine import available_cores
from h5chunk.paths import takes_paths
from h5chunk.plan.permutation import permutation
from h5chunk.plan.repack import MemoryShares
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import CHECKSUMS, Region
from h5chunk.store.hdf5.child import Say, in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import is_stored_as
from h5chunk.store.hdf5.open import descriptor_of, open_file, translate_errors
from h5chunk.store.read.files import Paths, single_file
from h5chunk.store.read.scan import CheckedDataset
from h5chunk.store.rewrite.raw_rows import RawRows
from h5chunk.store.rewrite.replica import Changes, create_replica, region_key
from h5chunk.store.rewrite.shuffle import NewOrder, Rows, UnevenRows, copy_rows, shuffle_rows
from h5chunk.store.rewrite.survey import survey_file
from h5chunk.store.write.journal import has_command_id, is_made_by, key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import check_not_source, check_output, parse_output
from h5chunk.store.write.targets import CompressedTarget, PlainTarget, Target
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.repack.fields import expand_fields, find_samples, is_anndata, keyed_note
from h5chunk.tools.repack.folder import repack_folder
from h5chunk.tools.repack.options import TUNED, RepackOptions, read_tuned
from h5chunk.tools.repack.plan import SOURCE_INDEX, Move, RepackPlan, check_shuffle, plan_header, plan_moves
from h5chunk.tools.repack.report import FieldReport, RepackFolderReport, RepackReport, describe_fields, planned_fields
from h5chunk.tools.shared import at_hand
from h5chunk.tools.upload import uploads

MAX_LEFT_OUT = 8  # objects that notes name
MAX_THREADS = 8  # with more threads, the memory of each would be small


@takes_paths("source", "path")
@uploads
def repack(
    source: Paths,
    path: str | os.PathLike[str],
    *,
    tuned: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    client: Any = None,
    **options: Any,
) -> RepackReport | RepackFolderReport:
    """Rewrite an HDF5 file, or all files of a folder, with complete samples in their chunks.

    A field is a dataset of fixed-size elements with as many rows as the main field, which is ``images``, ``X`` of
    AnnData, or the largest dataset. If other groups, such as episodes, have a dataset like the largest one, all their
    datasets are repacked. If ``fields`` are named, with * for each name of a group, only these are repacked, and a
    shuffle moves all datasets
    of their length; datasets and links that cannot be copied are left out. Fields get chunks of complete samples,
    uncompressed by default. The entries of sparse matrices are stored in chunks of about 1 MiB. The bytes of images of
    any size are stored in chunks of 8 MiB, or of 1 MiB if they are compressed. All other datasets, groups, attributes,
    links, references and dimension scales are kept unchanged. If the file has checksums, they are verified before new
    ones are computed.

    Parameters
    ----------
    source, path : path
        The file to read, and the file to write, which appears under its name when it is complete and on disk. Both may
        be URLs in a store; objects are first copied to a temporary folder. If the source is a folder, a pattern or a
        list, the output is a folder, whose files have the same names, and the same call continues interrupted work.
    tuned : path, optional
        JSON file of tuned options, such as the output of ``h5chunk tune --json``: ``chunk_samples``,
        ``window_chunks``, ``cache``, ``compression``, ``shuffle``, or ``chunks`` for windows or patches.
        Explicit arguments take precedence. For AnnData files, only ``chunk_samples`` and ``compression`` are used.
    overwrite : bool
        Whether to replace a file at ``path``, or a folder of shards.
    dry_run : bool
        Write nothing, and report what would be done.
    progress : callable, optional
        Called as ``progress("repack", done_bytes, total_bytes)``.
    client : optional
        Dask cluster that repacks the files of a folder: see `h5chunk.convert`.
    **options
        The fields of `h5chunk.tools.repack.options.RepackOptions`, which ``h5chunk repack --help`` lists: ``fields``,
        ``keep``, ``chunk_samples``, ``chunks``, ``window_chunks``, ``cache``, ``compression``, ``shuffle``, ``seed``
        and ``memory_bytes``. With ``shuffle``, ``/h5chunk/source_index`` stores the permutation, and content that may
        depend on the order of the samples is an error that names it, unless ``keep`` has its name.
        `h5chunk.convert` uses the same permutation for the same ``seed`` and number of samples.

    Raises
    ------
    FileError, FieldError
        The source is missing or damaged, refers to other files, or has content that cannot be kept.
    OutputError
        The file cannot be written; an existing file at ``path`` is unchanged.
    OptionError
        An argument is invalid.
    """
    parsed, found = RepackOptions(**options), None if tuned is None else read_tuned(tuned)
    run: dict[str, Any] = {"overwrite": overwrite, "dry_run": dry_run, "progress": progress}
    if single_file(source) is not None:
        if client is not None:
            raise OptionError(
                "client (--dask) applies to a folder of files, because each worker repacks one file: leave it out"
            )
        with at_hand(source) as file:
            return repack_file(file, path, parsed, found=found, **run)
    return repack_folder(
        source, path, parsed, partial(repack_file, found=found and (found[0], None)), client=client, **run
    )


def repack_file(
    source: Any,
    path: str | os.PathLike[str],
    parsed: RepackOptions,
    *,
    found: tuple[RepackOptions, int | None] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepackReport:
    """Repack one file, as `repack` does.

    ``found`` contains tuned options and the number of samples of the tuned file.
    """
    started = time.perf_counter()
    output, file = parse_output(path), Source(Path(source))
    check_not_source(output, source)
    check_output(output, overwrite or has_command_id(output))

    def show(done: tuple[Any, ...]) -> None:
        if progress:
            progress(*done)

    # in child processes, so that HDF5 never opens the source in this process
    file, plan = in_child(file.path, _plan, file, parsed, found)
    command_id = key_of(["repack", h5chunk.__version__, parsed.recorded(), repr(parsed.cache), repr(found), file.stamp])
    complete = not overwrite and is_made_by(output, command_id)
    fields, lost = planned_fields(plan), list[str]()
    if complete:
        fields = in_child(output, describe_fields, plan, output, file.label)
    elif dry_run:
        check_output(output, overwrite)
    else:
        with NewFile(output, overwrite) as new:
            fields, lost = in_child(file.path, _write, file, plan, new, on_message=show)
            new.command_id = command_id
            new.commit()
    num_permuted = len(plan.samples.other_datasets) if plan.options.shuffle else 0
    return RepackReport(
        path=str(output),
        dry_run=dry_run,
        has_header=plan.header is not None,
        seed=plan.options.seed,
        source_bytes=file.stamp[2],
        num_bytes=plan.num_bytes if dry_run and not complete else output.stat().st_size,
        seconds=time.perf_counter() - started,
        fields=fields,
        num_alike=plan.samples.num_alike,
        num_copied=len(plan.survey.datasets) - len(plan.moves) - num_permuted,
        notes=[*plan.notes, *lost],
        already_complete=complete,
        **plan.facts,
    )


def _write(say: Say, source: Source, plan: RepackPlan, new: NewFile) -> tuple[list[FieldReport], list[str]]:
    """Write the new file; return the reports on its fields, and notes about content that could not be kept."""
    with source:
        run = Run(source, plan, new, lambda *progress: say(progress))
        with translate_errors(source.label):
            run.check_source()
        lost = run.create()
        with new.flusher(), translate_errors(source.label):
            run.move_all()
        fields = describe_fields(plan, new.part, source.label)
        source.check_unchanged()
    return fields, lost


def _plan(
    source: Source, options: RepackOptions, tuned: tuple[RepackOptions, int | None] | None
) -> tuple[Source, RepackPlan]:
    """Survey the source, and plan the repack with explicit and tuned options."""
    with limited_memory(source.path), source, translate_errors(source.label):
        old = read_header(source.file)
        notes: list[str] = []
        best, num_tuned = tuned or (options, None)
        if tuned is not None and is_anndata(source.file):
            notes += ["of the tuned options, AnnData files support only chunk_samples and compression"]
            best = replace(best, window_chunks=None, cache=None, shuffle=False)
        if tuned is not None and best == RepackOptions():
            notes += ["the tuned options keep the file as it is, so they were not used"]
        missing = {name: getattr(best, name) for name in TUNED if getattr(options, name) is None}
        chunks = options.chunks or best.chunks
        options = replace(options, shuffle=options.shuffle or best.shuffle, chunks=chunks, **missing)
        survey = survey_file(source.file, leave_out=bool(options.fields))
        left_out = survey.left_out or []
        notes += left_out[:MAX_LEFT_OUT]
        notes += [f"{len(left_out) - MAX_LEFT_OUT} more are left out"] if len(left_out) > MAX_LEFT_OUT else []
        options = replace(options, fields=expand_fields(survey, options.fields))
        num_threads = min(MAX_THREADS, available_cores())
        part_bytes = MemoryShares(options.memory_bytes, num_threads).part_bytes
        samples = find_samples(source.file, survey, old, options, part_bytes)
        if num_tuned not in (None, samples.num_samples):
            notes.append(
                f"the options were tuned for {count_text(num_tuned, 'sample')}, but this file has "
                f"{samples.num_samples:,}"
            )
        if old is None and not options.fields and not options.chunks:
            keyed = keyed_note(survey, str(source.path))
            if keyed and options.shuffle:
                raise OptionError(f"{source.label}: {keyed[0]}; to shuffle the rows of one dataset, name it in fields")
            notes += keyed
        if options.shuffle:
            check_shuffle(source.file, survey, samples, options)
        header = plan_header(old, survey, samples, options, source.label)
        return source, plan_moves(source.file, survey, samples, header, options, num_threads, notes)


class Source:
    """The source, which is open as an HDF5 file and for raw reads inside a context. It can be pickled while closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.label = path, printable(path)
        self.stamp: tuple[int, ...] = ()  # see `h5chunk.stamp`; set when the file is opened for the first time

    def __enter__(self) -> Source:
        self.file = open_file(self.path)
        self.descriptor = descriptor_of(self.file)
        self.stamp = self.stamp or stamp_of(self.descriptor, with_ctime=True)
        self.check_unchanged()
        return self

    def __exit__(self, *_: object) -> None:
        with translate_errors(self.label):
            self.file.close()
        del self.file

    def open(self, path: bytes) -> h5py.Dataset:
        """Open a dataset; its path may be any bytes."""
        return h5py.Dataset(h5d.open(self.file.id, path))

    def check_unchanged(self) -> None:
        """Raise FileError if the file was modified after it was first opened."""
        if stamp_of(self.descriptor, with_ctime=True) != self.stamp:
            raise FileError(f"{self.label}: changed while it was read. Run repack again")


class Run:
    """Write the new file from an open source."""

    def __init__(self, source: Source, plan: RepackPlan, new: NewFile, progress: Progress) -> None:
        self._source, self._plan, self._new = source, plan, new
        shuffle, seed = plan.options.shuffle, plan.options.seed
        self._order = NewOrder(permutation(plan.samples.num_samples, seed)) if shuffle else None
        checked = sum(move.facts.stored_bytes for move in self._moves_with_checksums())
        moved = sum(move.facts.num_bytes for move in plan.moves if move.layout.written)
        self._add_done = count_up("repack", checked + moved + plan.copied_bytes, progress)
        self._add_done(0)

    def _moves_with_checksums(self) -> Iterator[Move]:
        """Yield the moves of datasets that have checksums in the source."""
        for move in self._plan.moves:
            table = self._plan.survey.datasets.get(f"{CHECKSUMS}/".encode() + move.facts.path)
            if move.checked and move.facts.num_bytes and table is not None and len(table.shape or ()) == 1:
                yield move

    def check_source(self) -> None:
        """Compare the chunks of all moved datasets with their checksums in the source, if it has checksums."""
        shares, label = self._plan.shares, self._source.label
        for move in self._moves_with_checksums():
            name = move.facts.path.decode()
            expected = self._source.file[f"{CHECKSUMS}/{name}"][()]
            checked = CheckedDataset(self._source.path, self._source.open(move.facts.path), expected)
            if checked.num_chunks != len(expected):
                chunks = count_text(checked.num_chunks, "chunk")
                wrong = f"{name!r} is damaged, because it has {chunks} but {len(expected)} checksums"
                raise FileError(f"{label}: {wrong}: run h5chunk verify to list all problems")
            checked.require_undamaged(
                np.arange(checked.num_chunks),
                self._add_done,
                "nothing was repacked",
                num_threads=shares.num_threads,
                memory_bytes=shares.memory_bytes,
            )

    def create(self) -> list[str]:
        """Write everything except the data of moved datasets. Return notes about content that could not be kept."""
        plan, lost = self._plan, list[str]()
        others = plan.samples.other_datasets if self._order is not None else []
        changes = Changes(
            layouts={move.facts.path: move.layout for move in plan.moves},
            header=plan.header,
            order=self._order,
            permuted=[facts.path for facts in others if facts.num_rows == plan.samples.num_samples],
            memory_bytes=plan.shares.memory_bytes,
        )

        def create(part: Path) -> dict[str, Region]:
            with limited_memory(self._source.path):
                regions, lost[:] = create_replica(part, self._source.file, plan.survey, changes, self._add_done)
            return regions

        self._new.make(plan.num_bytes, create)
        return lost

    def move_all(self) -> None:
        """Write the data of moved datasets, their checksums, and the permutation."""
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
        if move.layout.filters or move.cuts_rows:
            return CompressedTarget(self._new, facts.path, self._plan.shares.num_threads, checked)
        return PlainTarget(self._new, region_key(facts.path), move.chunk_bytes, checked=checked)

    def _move(self, move: Move, target: Target) -> None:
        facts, shares, order = move.facts, self._plan.shares, self._order
        dataset = self._source.open(facts.path)
        if move.kind == "pointers" and order is not None:
            lengths = np.diff(self._starts(facts.path, None))[order.order]
            pointers = np.concatenate(([0], np.cumsum(lengths)))[-facts.num_rows :]
            target.put(0, np.ascontiguousarray(pointers.astype(dataset.dtype)).view(np.uint8))
            self._add_done(facts.num_bytes)
            return
        with closing(self._open_rows(dataset)) as rows:
            if move.kind == "copy" or order is None:
                copy_rows(rows, target, shares, unit_rows=move.chunk_rows, moved=self._add_done)
                return
            permuted = Rows(rows, move.chunk_rows)
            if move.kind == "runs":
                starts = self._starts(move.pointers, facts.num_rows)
                where = f"{self._source.label}: {facts.name!r}"
                permuted = UnevenRows(rows, starts, order.order, shares.part_bytes, where)
            shuffle_rows(permuted, order, target, shares, folder=self._new.part.parent, moved=self._add_done)

    def _starts(self, path: bytes, num_elements: int | None) -> np.ndarray:
        """Return the start of each sample's run of rows, and the end of the last run: (num_samples + 1,) int64.

        The values are not read through HDF5, which would trust damaged chunk lengths.
        """
        name, dataset = f"{self._source.label}: {printable(path)!r}", self._source.open(path)
        if not is_stored_as(dataset, dataset.dtype):
            raise FileError(
                f"{name} has numbers of unusual precision or bit offset, so its rows cannot be shuffled: leave "
                "out --shuffle"
            )
        stored = np.empty(dataset.shape, dataset.dtype)
        with closing(self._open_rows(dataset)) as rows:
            rows.read(0, len(stored), stored.view(np.uint8).reshape(len(stored), -1))
        values = stored.astype(np.int64)
        if len(values) == self._plan.samples.num_samples:
            values = np.concatenate(([0], values))
        falls = np.flatnonzero(np.diff(values) < 0)
        if values[0] != 0 or len(falls):
            row = int(falls[0]) if len(falls) else 0
            raise FileError(f"{name} is damaged: its values must begin with 0 and never decrease (row {row})")
        if num_elements is not None and values[-1] != num_elements:
            raise FileError(f"{name} is damaged: its last value is {values[-1]}, but it must be {num_elements}")
        return values

    def _open_rows(self, dataset: h5py.Dataset) -> RawRows:
        return RawRows(dataset, self._plan.shares, self._new.part.parent)
