"""Rewrite any HDF5 file so that its samples are laid out for training; everything else is kept."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5chunk
from h5chunk.machine import available_cores
from h5chunk.plan.repack import Shares
from h5chunk.store.format.header import read_header
from h5chunk.store.hdf5.child import Say, in_child, limited_memory
from h5chunk.store.hdf5.open import translate_errors
from h5chunk.store.rewrite.survey import survey_file
from h5chunk.store.write.journal import has_command_id, is_made_by, key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import check_not_source, check_output, parse_output
from h5chunk.tools.progress import Progress
from h5chunk.tools.repack.fields import find_samples, is_anndata
from h5chunk.tools.repack.options import TUNED, RepackOptions, read_tuned
from h5chunk.tools.repack.plan import RepackPlan, check_shuffle, plan_header, plan_moves
from h5chunk.tools.repack.report import FieldReport, RepackReport
from h5chunk.tools.repack.run import Run, Source, describe_fields, planned_fields

Tuned = tuple[RepackOptions, int | None]

MAX_THREADS = 8  # each takes its share of the memory


def repack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tuned: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> RepackReport:
    """Rewrite an HDF5 file with whole samples in its chunks.

    A field is a dataset of fixed-size elements whose first axis is as long as that of the main field: ``images``, ``X``
    of AnnData, or the largest dataset; or of the fields named in ``fields``. Fields get chunks of whole samples,
    uncompressed by default. The entries of sparse matrices get chunks of about 1 MiB. All other datasets, groups,
    attributes, links, references and dimension scales are kept unchanged. If the file has checksums, data is compared
    with them before it gets new ones.

    Parameters
    ----------
    source, path : path
        The file to read, and the file to write, which appears under its name when it is complete and on disk.
    tuned : path, optional
        JSON file of tuned options: ``chunk_samples``, ``window_chunks``, ``cache``, ``compression``, ``shuffle``;
        explicit arguments take precedence. For AnnData files, only the options that these can have.
    overwrite : bool
        Whether to replace a file at ``path``.
    dry_run : bool
        Write nothing, and report what would be done.
    progress : callable, optional
        Called as ``progress("repack", done, total)`` with bytes.
    **options
        The fields of `h5chunk.tools.repack.options.RepackOptions`, which ``h5chunk repack --help`` lists: ``fields``,
        ``keep``, ``chunk_samples``, ``window_chunks``, ``cache``, ``compression``, ``shuffle``, ``seed`` and
        ``memory_bytes``. With ``shuffle``, ``/h5chunk/source_index`` keeps the permutation; `h5chunk.convert` permutes
        equally many samples alike with the same ``seed``.

    Raises
    ------
    FileError, FieldError
        The source is missing or damaged, refers to other files, or has content that cannot be kept.
    OutputError
        The file cannot be made; a file that existed at ``path`` is unchanged.
    OptionError
        An argument is invalid.
    """
    started = time.perf_counter()
    parsed, found = RepackOptions(**options), None if tuned is None else read_tuned(tuned)
    output, file = _parse_path(source, path, overwrite), Source(Path(source))
    # child processes do it, so that HDF5 never opens the source in this process
    file, plan = in_child(lambda _: _plan(file, parsed, found), lambda: file.shown)
    command_id = key_of(["repack", h5chunk.__version__, parsed.recorded(), repr(parsed.cache), repr(found), file.stamp])
    complete = not overwrite and is_made_by(output, command_id)
    fields, lost = planned_fields(plan), list[str]()
    if complete:
        fields = in_child(lambda _: describe_fields(plan, output, file.shown), lambda: str(output))
    elif dry_run:
        check_output(output, overwrite)
    else:
        with NewFile(output, overwrite) as new:
            fields, lost = in_child(
                lambda say: _write(file, plan, new, say),
                lambda: file.shown,
                lambda told: progress(*told) if progress else None,
            )
            new.command_id = command_id
            new.commit()
    num_permuted = len(plan.samples.others) if plan.options.shuffle else 0
    return RepackReport(
        path=str(output),
        dry_run=dry_run,
        has_header=plan.header is not None,
        seed=plan.options.seed,
        source_bytes=file.stamp[2],
        num_bytes=plan.num_bytes if dry_run and not complete else output.stat().st_size,
        seconds=time.perf_counter() - started,
        fields=fields,
        num_copied=len(plan.survey.datasets) - len(plan.moves) - num_permuted,
        notes=[*plan.notes, *lost],
        already_complete=complete,
        **plan.facts,
    )


def _parse_path(source: str | os.PathLike[str], path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Validate the path of the output, and return it."""
    parsed = parse_output(path)
    check_not_source(parsed, source)
    check_output(parsed, overwrite or has_command_id(parsed))
    return parsed


def _write(source: Source, plan: RepackPlan, new: NewFile, say: Say) -> tuple[list[FieldReport], list[str]]:
    """Write the new file; return the changes of its fields, and what could not be kept."""
    with source:
        run = Run(source, plan, new, lambda *progress: say(progress))
        with translate_errors(source.shown):
            run.check_source()
        lost = run.create()
        with new.flusher(), translate_errors(source.shown):
            run.move_all()
        fields = describe_fields(plan, new.part, source.shown)
        source.check_unchanged()
    return fields, lost


def _plan(
    source: Source, options: RepackOptions, tuned: tuple[RepackOptions, int | None] | None
) -> tuple[Source, RepackPlan]:
    """Survey the file, and plan the repack and its options."""
    with limited_memory(source.path), source, translate_errors(source.shown):
        old = read_header(source.file)
        notes: list[str] = []
        best, num_tuned = tuned or (options, None)
        if tuned is not None and is_anndata(source.file):
            notes += ["of what was tuned only chunks and compression are taken: AnnData's files have no more"]
            best = replace(best, window_chunks=None, cache=None, shuffle=False)
        missing = {name: getattr(best, name) for name in TUNED if getattr(options, name) is None}
        options = replace(options, shuffle=options.shuffle or best.shuffle, **missing)
        survey = survey_file(source.file)
        num_threads = min(MAX_THREADS, available_cores())
        part_bytes = Shares(options.memory_bytes, num_threads).part_bytes
        samples = find_samples(source.file, survey, old, options, part_bytes)
        if num_tuned not in (None, samples.num_samples):
            notes.append(f"it was tuned for {num_tuned:,} samples, but there are {samples.num_samples:,} here")
        notes += check_shuffle(source.file, survey, samples) if options.shuffle else []
        header = plan_header(old, survey, samples, options, source.shown)
        return source, plan_moves(source.file, survey, samples, header, options, num_threads, notes)
