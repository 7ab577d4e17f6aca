"""Append samples to a converted file: a longer file is written, and then replaces it in one step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError, OptionError, count_text, printable
from h5chunk.paths import takes_paths
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.source import SampleSource
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import choose_options, describe, find_kind
from h5chunk.sources.options import flag_of
from h5chunk.sources.recognise import is_path
from h5chunk.store.hdf5.open import translate_errors
from h5chunk.store.write.old_file import OldFile, open_old
from h5chunk.store.write.part_file import check_not_source
from h5chunk.store.write.samples import SampleJob
from h5chunk.tools.convert.append_fit import SET_BY_FILE, plan_addition, recorded_options
from h5chunk.tools.convert.options import AppendOptions, SampleOptions
from h5chunk.tools.convert.report import ConvertReport
from h5chunk.tools.convert.run import Notify, SampleRun
from h5chunk.tools.convert.samples import is_complete, open_context, prepare
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import code, shell_command
from h5chunk.tools.sources import downloads
from h5chunk.tools.verify.tables import find_table_problems

AGAIN = "nothing was appended, because the last append added the same samples; to add them again, use another seed"


@takes_paths("path", "source")
@downloads
def append(
    path: str | os.PathLike[str],
    source: Any,
    *,
    format: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
    **options: Any,
) -> ConvertReport:
    """Append the samples of a source to a file that `h5chunk.convert` made.

    The old samples keep their indices, and the new samples follow them. After all old chunks are checked, a longer file
    is written beside the old one and then replaces it in one step. The disk must have space for both. A process that
    has the old file open still sees the old file; h5chunk's readers detect this and raise a FileError. The same file,
    source and options give the same bytes, with any number of workers. If an error is raised, the file is unchanged.

    New samples are shuffled only among themselves, so the file no longer counts as shuffled:
    `h5chunk repack --shuffle` mixes old and new samples. Sparse matrices cannot be appended to: convert new rows to a
    second file, and read both as one data set.

    Parameters
    ----------
    path : path
        A file that `h5chunk.convert` wrote.
    source : path or object
        A source that `h5chunk.convert` accepts, or a `h5chunk.source.SampleSource`. It must have the same fields as the
        file.
    format, dry_run, progress, notify
        As for `h5chunk.convert`.
    **options
        The fields of `h5chunk.tools.convert.options.AppendOptions`, and the options of `h5chunk.convert` for reading
        the source. Images are decoded and resized with the options that the file records; only ``fit`` and
        ``split_folders`` may differ.

    Raises
    ------
    FileError
        The file is missing, damaged, or was not made from samples by convert.
    SourceError, SampleError
        The source cannot be used, or differs from the file in fields or classes.
    OutputError
        The new file cannot be written, or another process is writing it.
    OptionError
        An option is invalid.
    """
    started = time.perf_counter()
    with _planned(path, source, format, progress, options) as (old, job, new_classes):
        complete = is_complete(job, 1)
        notes = [AGAIN] if complete else _duplicate_names(job)
        mix = shell_command(["h5chunk", "repack", str(path), "NEW.h5", "--shuffle"])
        notes.append(f"old and new samples are not mixed: {code(mix)} mixes them")
        notes += [*_small_chunks(job.layout), *job.source.notes]
        run = SampleRun(job, [], True, dry_run, progress, notify, started, old, complete)
        return run.report(notes, new_classes)


@contextmanager
def _planned(
    path: str | os.PathLike[str],
    source: Any,
    format: str | None,
    progress: Progress | None,
    requested: Mapping[str, Any],
) -> Iterator[tuple[OldFile, SampleJob, list[str]]]:
    """Open the file and the source; yield the old file, the job that writes the longer file, and the new classes."""
    requested = {name: value for name, value in requested.items() if value is not None}
    with _open_checked(Path(path), source, requested.get("manifest")) as old:
        if hasattr(source, "read_into"):
            label, opened, options = f"the {source.kind}", source, AppendOptions(**requested)
        else:
            label = describe(source)
            opened, options = _open_source(old, source, format, progress, requested)
        order_options = {name: getattr(options, name) for name in ("seed", "shuffle", "workers", "on_error")}
        opened.read_columns()
        job = prepare(opened, old.path, SampleOptions(**order_options))
        yield old, *plan_addition(old, job, new_classes=options.new_classes, source=label)


@contextmanager
def _open_checked(path: Path, *sources: Any) -> Iterator[OldFile]:
    """Open the file to append to. Raises FileError if its tables are inconsistent."""
    if not path.exists():
        raise FileError(f"{printable(path)}: no such file: create it with h5chunk convert")
    if path.is_dir():
        raise FileError(
            f"{printable(path)}: is a folder: append to one of its files, or convert the new samples into another file "
            "and read all files as one data set"
        )
    check_not_source(path, *filter(is_path, sources))
    with open_old(path) as old:
        with translate_errors(old.label):
            problem = next(find_table_problems(old.file, old.header, list(old.datasets)), None)
        if problem is not None:
            raise FileError(f"{old.label}: {problem}. Nothing was appended; run h5chunk verify to list all problems")
        yield old


def _open_source(
    old: OldFile, source: Any, format: str | None, progress: Progress | None, requested: Mapping[str, Any]
) -> tuple[SampleSource, AppendOptions]:
    """Open a path or object as a source that decodes images with the options recorded in the file."""
    kind = find_kind(source, format)
    if issubclass(kind, SparseSource):
        raise OptionError(
            f"{describe(source)}: {kind.noun} cannot be appended: convert them into a second file, and read both files "
            "as one data set"
        )
    fixed = next((name for name in SET_BY_FILE if name in requested and name in kind.Options.names()), None)
    if fixed is not None:
        raise OptionError(
            f"{flag_of(fixed)} cannot be set, because images are decoded with the options recorded in {old.label}: "
            "leave it out"
        )
    recorded = recorded_options(old, kind)
    if "manifest" in requested:
        recorded.pop("split_folders", None)
    source_options, options = choose_options(kind, source, {**recorded, **requested}, (kind.Options, AppendOptions))
    return kind.open(source, source_options, open_context(options, old.path, progress)), options


def _duplicate_names(job: SampleJob) -> list[str]:
    """Return a warning, in a list, if new samples have the same names as samples in the file."""
    old, source = job.old, job.source
    if source.names is None:
        return []
    new = {source.names[index] for index in range(len(source))}
    again = {old.names[start:stop] for start, stop in pairwise([0, *old.name_ends.tolist()])} & new
    if not again:
        return []
    return [
        f"{len(again):,} of {len(source):,} new names, such as {printable(min(again))}, are already in the file: "
        "if they are the same samples, the longer file contains them twice"
    ]


def _small_chunks(layout: Layout) -> list[str]:
    """Return a note, in a list, if `plan_layout` would choose much larger chunks for the longer file."""
    size, better = layout.chunk_samples, plan_layout(layout.num_samples, layout.sample_bytes).chunk_samples
    if better < 4 * size:
        return []
    samples = count_text(size, "sample")
    return [f"chunks still hold {samples}, but {better} would be better for the longer file: use h5chunk repack"]
