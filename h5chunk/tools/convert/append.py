"""Append samples to a file that h5chunk converted. A longer file replaces it when it is complete and on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError, OptionError, count_text, printable
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.source import SampleSource
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import choose_options, describe, find_kind, open_kind
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
from h5chunk.tools.verify.tables import look_at_tables

AGAIN = "the same command appended the same samples last: they are not appended again (with another seed they would be)"


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

    A sparse matrix cannot be appended to: convert new rows to another file, as several files are one data set.

    The old samples keep their places; the new samples follow them. A longer file is written beside the old one, after
    checking all old chunks, and replaces it in one step: so the disk needs space for both, and the old samples stay
    readable. A process that has the old file open keeps it; h5chunk's readers notice this, and raise a FileError
    instead of mixing both files. Equal file, source and options give equal bytes, with any number of workers.

    New samples are permuted only among themselves. The file therefore no longer counts as shuffled, and its windows are
    those of an unshuffled file: `h5chunk repack --shuffle` mixes old and new samples.

    Parameters
    ----------
    path : path
        The file, as convert writes it.
    source : path or object
        As for `h5chunk.convert`, with the same fields as the file; or a `h5chunk.source.SampleSource`.
    format, dry_run, progress, notify
        As for `h5chunk.convert`.
    **options
        The fields of `h5chunk.tools.convert.options.AppendOptions`, and options of the kind of source as for
        `h5chunk.convert`. Images are decoded and sized as the file's images were; ``fit`` and ``split_folders`` may
        differ.

    Raises
    ------
    FileError
        The file is missing, damaged, or was not made from samples by convert.
    SourceError, SampleError
        The source cannot be used, or differs from the file in fields or classes.
    OutputError
        The new file cannot be written, or another process is writing it.
    OptionError
        An option is invalid. After any of these errors the file is unchanged.
    """
    started = time.perf_counter()
    with _settled(path, source, format, progress, options) as (old, job, new_classes):
        complete = is_complete(job, 1)
        notes = [AGAIN] if complete else _duplicate_names(job)
        notes += [_unmixed(old.shown), *_small_chunks(job.layout), *job.source.notes]
        run = SampleRun(job, [], True, dry_run, progress, notify, started, old, complete)
        return run.report(notes, new_classes)


@contextmanager
def _settled(
    path: str | os.PathLike[str], source: Any, format: str | None, progress: Progress | None, given: Mapping[str, Any]
) -> Iterator[tuple[OldFile, SampleJob, list[str]]]:
    """Open and compare file and source; yield the job of the longer file, and the new classes."""
    given = {name: value for name, value in given.items() if value is not None}
    with _open_checked(Path(path), source, given.get("manifest")) as old:
        if hasattr(source, "read_into"):
            shown, opened, options = f"the {source.kind}", source, AppendOptions(**given)
        else:
            shown = describe(source)
            opened, options = _open_source(old, source, format, progress, given)
        how = {name: getattr(options, name) for name in ("seed", "shuffle", "workers", "on_error")}
        job = prepare(opened, old.path, SampleOptions(**how))
        yield old, *plan_addition(old, job, new_classes=options.new_classes, source=shown)


@contextmanager
def _open_checked(path: Path, *sources: Any) -> Iterator[OldFile]:
    """Open the file to append to, and check that its tables are consistent."""
    if not path.exists():
        raise FileError(f"{printable(path)}: no such file: make it with h5chunk convert")
    if path.is_dir():
        raise FileError(
            f"{printable(path)}: is a folder: append to one of its files, or convert the new samples into another file "
            "and read them together"
        )
    check_not_source(path, *filter(is_path, sources))
    with open_old(path) as old:
        with translate_errors(old.shown):
            problem = next(look_at_tables(old.file, old.header, list(old.datasets)), None)
        if problem is not None:
            raise FileError(f"{old.shown}: {problem}: nothing was appended: h5chunk verify lists all problems")
        yield old


def _open_source(
    old: OldFile, source: Any, format: str | None, progress: Progress | None, given: Mapping[str, Any]
) -> tuple[SampleSource, AppendOptions]:
    """Open a source of any kind, with images decoded by the file's options."""
    kind = find_kind(source, format)
    if issubclass(kind, SparseSource):
        raise OptionError(
            f"{describe(source)}: {kind.noun} cannot be appended: convert them into a second file, and read both as one"
        )
    fixed = next((name for name in SET_BY_FILE if name in given and name in kind.Options.names()), None)
    if fixed is not None:
        raise OptionError(f"{flag_of(fixed)}: images are decoded with the options of {old.shown}: leave it out")
    recorded = recorded_options(old, kind)
    if "manifest" in given:
        recorded.pop("split_folders", None)
    source_options, options = choose_options(kind, source, {**recorded, **given}, (kind.Options, AppendOptions))
    return open_kind(kind, source, source_options, open_context(options, progress)), options


def _duplicate_names(job: SampleJob) -> list[str]:
    """Return a warning if the file already has samples with the new names, which may have been appended before."""
    old, source = job.old, job.source
    if source.names is None:
        return []
    new = {source.names[index] for index in range(len(source))}
    again = {old.names[start:stop] for start, stop in pairwise([0, *old.name_ends.tolist()])} & new
    if not again:
        return []
    return [
        f"{len(again):,} of {len(source):,} new names, such as {printable(min(again))}, are already in the file: "
        "if they are the same samples, the file now has them twice"
    ]


def _unmixed(shown: str) -> str:
    return f"old and new samples are not mixed: h5chunk repack {shown} NEW.h5 --shuffle mixes them"


def _small_chunks(layout: Layout) -> list[str]:
    """Return a note if chunks are much smaller than the longer file should have."""
    size, chosen = layout.chunk_samples, plan_layout(layout.num_samples, layout.sample_bytes).chunk_samples
    if chosen < 4 * size:
        return []
    return [f"chunks keep {count_text(size, 'sample')} each; {chosen} would suit the longer file: use repack for that"]
