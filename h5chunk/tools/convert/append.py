"""Append samples to a file that h5chunk converted. The longer file replaces it when it is complete and on disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.source import OpenContext, SampleSource
from h5chunk.sources.images import ImageSource
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import all_kinds, choose_options, describe, find_kind, open_kind
from h5chunk.sources.options import Options, flag_of, option
from h5chunk.sources.recognise import is_path
from h5chunk.store.hdf5.open import translate_errors
from h5chunk.store.write.fill_task import Failure
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.old_file import OldFile, open_old
from h5chunk.store.write.part_file import check_not_source, check_room
from h5chunk.store.write.samples import write_samples
from h5chunk.tools.convert.append_fit import Addition, plan_addition, recorded_image_options
from h5chunk.tools.convert.append_report import AppendPlan, AppendReport, small_chunks, unmixed
from h5chunk.tools.convert.options import SampleOptions
from h5chunk.tools.convert.resume import Notify, TaskLog, command_id, is_complete, keeping, left_out, say_nothing
from h5chunk.tools.convert.samples import count_written, estimate_s, prepare
from h5chunk.tools.convert.skipped import save_skipped
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.verify.tables import look_at_tables

AGAIN = (
    "this very command appended the same samples last: they are not appended twice (with another seed they would be)"
)
SET_BY_FILE = ("size", "color", "layout", "animated")  # options of images that are as when the file was made


@dataclass(frozen=True)
class AppendOptions(Options):
    """Options of `append`, besides those of the kind of source."""

    heading: ClassVar[str] = "Samples"

    seed: int = option(0, "Seed of the permutation of the new samples.", minimum=0, maximum=(1 << 64) - 1)
    shuffle: bool = option(True, "Keep the order of SOURCE.")
    workers: int | None = option(
        None, "Number of processes that read samples; 0: none but this one.", minimum=0, shown_default="one per core"
    )
    on_error: str = option(
        "fail",
        "Stop at samples that cannot be used, or leave them out and list them in FILE.skipped.csv.",
        choices=("fail", "skip"),
    )
    new_classes: bool = option(False, "Add classes that FILE does not have, after its own; old labels stay.")


def option_groups() -> list[type[Options]]:
    """Return the classes of the options that `append` takes."""
    return [*(kind.Options for kind in all_kinds() if not issubclass(kind, SparseSource)), AppendOptions]


def append(
    path: str | os.PathLike[str],
    source: Any,
    *,
    format: str | None = None,
    progress: Progress | None = None,
    notify: Notify | None = None,
    **options: Any,
) -> AppendReport:
    """Append the samples of a source to a file that `h5chunk.convert` made.

    A sparse matrix is not appended to: convert new rows into one more file, as several files are one data set.

    The old samples keep their places; the new ones come behind them. A longer file is written beside the old one, of
    which all chunks are checked on the way, and takes its place in one step: so room for both is needed, and the old
    samples can be read all the while. A process that has the old file open keeps it; h5chunk's readers notice, and end
    with a FileError that says that it was replaced, rather than mix the two. Equal file, source and options give equal
    bytes, with any number of workers.

    New samples are permuted among themselves only. So the file no longer counts as shuffled, and windows are made as
    for one that is not: `h5chunk repack --shuffle` mixes old and new.

    Parameters
    ----------
    path : path
        The file, as convert writes it.
    source : path or object
        As for `h5chunk.convert`, with the fields of the file; or a `h5chunk.source.SampleSource`.
    format : str, optional
        The kind of the source, where its name and first bytes do not tell.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.
    notify : callable, optional
        Called with a line for people: that what an earlier call had done of the same samples is used, or is kept.
    **options
        The fields of `AppendOptions`, and options of the kind of source as for `h5chunk.convert`. Images are decoded
        as those of the file were, and get their size; ``fit`` and ``split_folders`` may be given anew.

    Raises
    ------
    FileError
        The file is missing, damaged, or not made of samples by convert.
    SourceError, SampleError
        The source cannot be used, or differs from the file in fields or classes.
    OutputError
        The new file cannot be written, or another process is writing it.
    OptionError
        An option is invalid. The file is as it was after any of these.
    """
    started = time.perf_counter()
    with _settled(path, source, format, progress, options) as addition:
        if is_complete(addition.job, 1):
            return _already_appended(addition, started)
        return _append(addition, progress, notify or say_nothing, started)


def plan_append(
    path: str | os.PathLike[str],
    source: Any,
    *,
    format: str | None = None,
    progress: Progress | None = None,
    notify: Notify | None = None,
    **options: Any,
) -> AppendPlan:
    """Predict what `append` would do with the same arguments; writes nothing.

    Raises
    ------
    As `append`, as far as a look at the source and at a few samples shows it.
    """
    with _settled(path, source, format, progress, options) as addition:
        job, num_bytes = addition.job, addition.job.spec().num_bytes
        check_room(job.path, num_bytes)
        return AppendPlan(
            path=str(job.path),
            num_old=job.old.num_samples,
            num_new=len(job.order),
            num_bytes=num_bytes,
            free_bytes=shutil.disk_usage(job.path.absolute().parent).free,
            estimated_s=estimate_s(job),
            new_classes=addition.new_classes,
            notes=[*([AGAIN] if is_complete(job, 1) else addition.duplicate_names()), unmixed(job.old.shown)],
        )


@contextmanager
def _settled(
    path: str | os.PathLike[str], source: Any, format: str | None, progress: Progress | None, given: Mapping[str, Any]
) -> Iterator[Addition]:
    """Open the file and the source, and compare them."""
    given = {name: value for name, value in given.items() if value is not None}
    with _open_checked(Path(path), source, given.get("manifest")) as old:
        if hasattr(source, "read_into"):
            shown, opened, options = f"the {source.kind}", source, AppendOptions(**given)
        else:
            shown = describe(source)
            opened, options = _open_source(old, source, format, progress, given)
        how = {name: getattr(options, name) for name in ("seed", "shuffle", "workers", "on_error")}
        job = prepare(opened, old.path, SampleOptions(**how))
        yield plan_addition(old, job, new_classes=options.new_classes, source=shown)


@contextmanager
def _open_checked(path: Path, *sources: Any) -> Iterator[OldFile]:
    """Open the file that is appended to; its tables must agree."""
    if not path.exists():
        raise FileError(f"{printable(path)}: no such file: h5chunk convert makes it")
    if path.is_dir():
        raise FileError(
            f"{printable(path)}: is a folder: append to one of its files, or convert the new samples into one more "
            "and read them together"
        )
    check_not_source(path, *filter(is_path, sources))
    with open_old(path) as old:
        with translate_errors(old.shown):
            problem = next(look_at_tables(old.file, old.header, list(old.datasets)), None)
        if problem is not None:
            raise FileError(f"{old.shown}: {problem}: nothing was appended: h5chunk verify says all that is wrong")
        yield old


def _open_source(
    old: OldFile, source: Any, format: str | None, progress: Progress | None, given: Mapping[str, Any]
) -> tuple[SampleSource, AppendOptions]:
    """Open a source of any kind; images as the file's own were read."""

    def report_found(count: int) -> None:
        if progress:
            progress("list", count, None)

    kind = find_kind(source, format)
    if issubclass(kind, SparseSource):
        raise OptionError(f"{describe(source)}: {kind.noun} are not appended to: convert it into one more file")
    given = {**_recorded_options(old, kind, given), **given}
    source_options, options = choose_options(kind, source, given, (kind.Options, AppendOptions))
    context = OpenContext(skips_bad_samples=options.on_error == "skip", report_found=report_found)
    return open_kind(kind, source, source_options, context), options


def _recorded_options(old: OldFile, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a kind of source that are as when the file was made."""
    fixed = next((name for name in SET_BY_FILE if name in given and name in kind.Options.names()), None)
    if fixed is not None:
        raise OptionError(f"{flag_of(fixed)}: images are decoded as those of {old.shown} were: leave it out")
    if kind is ImageSource:
        recorded = recorded_image_options(old)
        if "manifest" in given:
            del recorded["split_folders"]
        return recorded
    recorded = {name: old.options[name] for name in (*SET_BY_FILE, "fit") if name in old.options}
    if recorded.get("size") is not None:
        recorded["size"] = tuple(recorded["size"])
    return {name: value for name, value in recorded.items() if name in kind.Options.names()}


def _append(addition: Addition, progress: Progress | None, notify: Notify, started: float) -> AppendReport:
    job, old, notes = addition.job, addition.file, addition.duplicate_names()
    new = NewFile(old.path, overwrite=True)
    with keeping(new, job, notify), new:
        old.check_unchanged()  # by who had the lock before
        new.journal.open(addition.key())
        log = TaskLog(new.journal, [job], notify)
        written, filled = write_samples(
            new,
            job,
            claims=log.claims(0),
            finished=log.adder(0),
            written=count_written(len(job.order), progress),
            carried=count_up("copy", job.carried_bytes, progress),
        )
        log.finish()
        new.command_id = command_id(job, 1, filled.stamp)
        new.part.chmod(old.mode)
        old.check_unchanged()
        new.commit()
    return _report(
        addition,
        filled.failures,
        started,
        num_added=len(written.order),
        num_samples=written.layout.num_samples,
        counts=dict(filled.notes.most_common()),
        new_classes=addition.new_classes,
        notes=[*notes, unmixed(old.shown), *small_chunks(written.layout)],
    )


def _already_appended(addition: Addition, started: float) -> AppendReport:
    """Report what the same command did before."""
    job, last, index = addition.job, addition.file.options["appended"][-1], addition.job.old.source_index
    return _report(
        addition,
        left_out(job, index[len(index) - last["samples"] :] - last["first_index"]),
        started,
        num_added=last["samples"],
        num_samples=len(index),
        counts={},
        notes=[AGAIN, unmixed(job.old.shown)],
        already_complete=True,
    )


def _report(addition: Addition, failures: Sequence[Failure], started: float, **facts: Any) -> AppendReport:
    job = addition.job
    skipped = [(job.name(failure.row), failure.reason) for failure in failures]
    return AppendReport(
        path=str(job.path),
        num_bytes=job.path.stat().st_size,
        seconds=time.perf_counter() - started,
        class_names=list(job.categories.get("labels", ())),
        skipped=skipped,
        skipped_list=save_skipped(job.path, skipped, behind=True),
        ignored=list(job.source.ignored),
        **facts,
    )
