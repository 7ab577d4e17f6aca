"""Rewrite any HDF5 file so that its samples are laid out for training; everything else is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5chunk
from h5chunk.errors import printable
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings
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
from h5chunk.tools.repack.options import MEMORY_BYTES, RepackOptions, Tuned, read_tuned
from h5chunk.tools.repack.plan import RepackPlan, check_shuffle, plan_header, plan_moves
from h5chunk.tools.repack.report import FieldPlan, FieldReport, LaidOut, RepackReport, RepackSummary
from h5chunk.tools.repack.run import Run, Source, describe_fields

MAX_THREADS = 8  # each takes its share of the memory


def repack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    chunk_samples: int | None = None,
    window_chunks: int | None = None,
    cache: CacheSettings | Sequence[float] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    compression: str | None = None,
    tuned: str | os.PathLike[str] | None = None,
    fields: Sequence[str] = (),
    keep: Sequence[str] = (),
    memory_bytes: int = MEMORY_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
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
    chunk_samples : int, optional
        Samples in one chunk; default: chosen automatically.
    window_chunks : int, optional
        Recommended number of chunks to shuffle together, stored in the file's group ``/h5chunk``.
    cache : CacheSettings or (nslots, nbytes, w0), optional
        Recommended chunk cache, stored in the same group.
    shuffle : bool
        Permute the samples of all fields alike. The permutation is kept in ``/h5chunk/source_index``.
    seed : int
        Seed of the permutation; `h5chunk.convert` permutes equally many samples alike with the same seed.
    compression : {"none", "gzip", "gzip:0" to "gzip:9", "lzf", "zstd", "zstd:1" to "zstd:22", "lz4", "blosc"}
        Compression of the fields' chunks; all but gzip and lzf need hdf5plugin.
    tuned : path, optional
        JSON file of tuned options: ``chunk_samples``, ``window_chunks``, ``cache``, ``compression``, ``shuffle``;
        explicit arguments take precedence. For AnnData files, only the options that these can have.
    fields : sequence of str
        Datasets whose lengths are the number of samples; without shuffle, the lengths may differ.
    keep : sequence of str
        Datasets to copy unchanged although their length matches.
    memory_bytes : int
        Approximate upper limit on memory. The output does not depend on it.
    overwrite : bool
        Whether to replace a file at ``path``.
    progress : callable, optional
        Called as ``progress("repack", done, total)`` with bytes.

    Raises
    ------
    FileError, FieldError
        The source is missing or damaged, refers to other files, or has content that cannot be kept.
    OutputError
        The file cannot be made; a file that existed at ``path`` is unchanged.
    OptionError
        An argument is invalid.
    """
    options = _parse(
        cache=cache,
        fields=fields,
        keep=keep,
        chunk_samples=chunk_samples,
        window_chunks=window_chunks,
        shuffle=shuffle,
        seed=seed,
        compression=compression,
        memory_bytes=memory_bytes,
        overwrite=overwrite,
    )
    found = None if tuned is None else read_tuned(tuned)
    return _repack(Source(Path(source)), _parse_path(source, path, overwrite), options, found, progress)


def plan_repack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tuned: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> RepackSummary:
    """Plan a `repack` and write nothing; the arguments and errors are the same."""
    parsed = _parse(**options)
    found = None if tuned is None else read_tuned(tuned)
    output = _parse_path(source, path, parsed.overwrite)
    _, plan = in_child(lambda _: _plan(Source(Path(source)), parsed, found), lambda: printable(source))
    fields = [
        FieldPlan(
            name=move.facts.name,
            dtype=move.facts.dtype,
            shape=move.facts.shape or (),
            before=LaidOut.of(move.facts, move.row_elements),
            chunks=move.layout.chunks,
        )
        for move in plan.moves
        if move.is_field
    ]
    return RepackSummary(path=str(output), num_bytes=plan.num_bytes, fields=fields, notes=plan.notes, **plan.facts)


def _parse(*, cache: Any = None, fields: Sequence[str] = (), keep: Sequence[str] = (), **options: Any) -> RepackOptions:
    settings = None if cache is None else CacheSettings.of(cache)
    return RepackOptions(cache=settings, fields=tuple(fields), keep=tuple(keep), **options)


def _parse_path(source: str | os.PathLike[str], path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Validate the path of the output, and return it."""
    parsed = parse_output(path)
    check_not_source(parsed, source)
    check_output(parsed, overwrite or has_command_id(parsed))
    return parsed


def _repack(
    source: Source, path: Path, options: RepackOptions, tuned: Tuned | None, progress: Progress | None
) -> RepackReport:
    """Repack in child processes, so that HDF5 never opens the source in this process."""
    started = time.perf_counter()
    command = options.recorded() | {"cache": repr(options.cache), "tuned": repr(tuned)}
    source, plan = in_child(lambda _: _plan(source, options, tuned), lambda: source.shown)
    command_id = key_of(["repack", h5chunk.__version__, command, source.stamp])
    complete = not options.overwrite and is_made_by(path, command_id)
    if complete:
        lost: list[str] = []
        fields = in_child(lambda _: describe_fields(plan, path, source.shown), lambda: str(path))
    else:
        with NewFile(path, options.overwrite) as new:
            fields, lost = in_child(
                lambda say: _write(source, plan, new, say),
                lambda: source.shown,
                lambda told: progress(*told) if progress else None,
            )
            new.command_id = command_id
            new.commit()
    num_permuted = len(plan.samples.others) if plan.options.shuffle else 0
    return RepackReport(
        path=str(path),
        has_header=plan.header is not None,
        seed=plan.options.seed,
        source_bytes=source.stamp[2],
        num_bytes=path.stat().st_size,
        seconds=time.perf_counter() - started,
        fields=fields,
        num_copied=len(plan.survey.datasets) - len(plan.moves) - num_permuted,
        notes=[*plan.notes, *lost],
        already_complete=complete,
        **plan.facts,
    )


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


def _plan(source: Source, options: RepackOptions, tuned: Tuned | None) -> tuple[Source, RepackPlan]:
    """Survey the file, and plan the repack and its options."""
    with limited_memory(source.path), source, translate_errors(source.shown):
        old = read_header(source.file)
        notes: list[str] = []
        if tuned is not None and is_anndata(source.file):
            notes += ["of what was tuned only chunks and compression are taken: AnnData's files have no more"]
            tuned = replace(tuned, window_chunks=None, cache=None, shuffle=False)
        if tuned is not None:
            names = ("chunk_samples", "window_chunks", "cache", "compression")
            missing = {name: getattr(tuned, name) for name in names if getattr(options, name) is None}
            options = replace(options, shuffle=options.shuffle or tuned.shuffle, **missing)
        survey = survey_file(source.file)
        num_threads = min(MAX_THREADS, available_cores())
        part_bytes = Shares(options.memory_bytes, num_threads).part_bytes
        samples = find_samples(source.file, survey, old, options, part_bytes)
        if tuned is not None and tuned.num_samples not in (None, samples.num_samples):
            notes.append(f"it was tuned for {tuned.num_samples:,} samples, but there are {samples.num_samples:,} here")
        notes += check_shuffle(source.file, survey, samples) if options.shuffle else []
        header = plan_header(old, survey, samples, options, source.shown)
        return source, plan_moves(source.file, survey, samples, header, options, num_threads, notes)
