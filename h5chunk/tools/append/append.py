"""Append images to a file that h5chunk converted. The longer file replaces it when it is complete and on disk."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.sources.decode import MAX_PIXELS
from h5chunk.store.rewrite.survey import damages
from h5chunk.store.write.appended import OldFile, open_old
from h5chunk.store.write.newfile import NewFile, check_room
from h5chunk.tools.append.images import Addition, OldImages, plan_addition
from h5chunk.tools.append.longer import plan_longer, write_longer
from h5chunk.tools.append.report import AppendPlan, AppendReport, small_chunks, unmixed
from h5chunk.tools.convert.images import count_written, estimate_s, prepare
from h5chunk.tools.convert.resume import Notify, say_nothing, telling
from h5chunk.tools.convert.skipped import save_skipped
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.verify.tables import look_at_tables

AGAIN = "this very command appended the same images last: they are not appended twice (with another seed they would be)"


def append(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    manifest: str | os.PathLike[str] | None = None,
    split_folders: str | None = None,
    fit: str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    workers: int | None = None,
    on_error: str = "fail",
    max_pixels: int = MAX_PIXELS,
    new_classes: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> AppendReport:
    """Append the images of a source to a file that `h5chunk.convert` made.

    A sparse matrix is not appended to: convert new rows into one more file, as several files are one data set.

    The old samples keep their places; the new ones come behind them. A longer file is written beside the old one, of
    which all chunks are checked on the way, and takes its place in one step: so room for both is needed, and the old
    samples can be read all the while. Who has the old file open then still has it; our readers look, and end with a
    FileError that says that it was replaced, rather than mix the two. Equal file, source and options give equal bytes,
    with any number of workers.

    New samples are permuted among themselves only. So the file no longer counts as shuffled, and windows are made as
    for one that is not: `h5chunk repack --shuffle` mixes old and new.

    Parameters
    ----------
    path : path
        The file of images, as convert writes them.
    source : path
        As for `h5chunk.convert`. Images are decoded as the file says that its own were, and get the size of those.
    manifest : path, optional
        A table of paths; its further columns must be the fields of the file.
    split_folders : {"auto", "yes", "no"}, optional
        Whether the top folders of the source are splits; as those of the file's own source if not given.
    fit : {"error", "stretch", "crop", "pad"}, optional
        For images of another size; as the file's own if not given.
    seed : int
        Of the permutation of the new samples.
    shuffle : bool
        False keeps the order of the source.
    workers, on_error, max_pixels
        As for `h5chunk.convert`. The list of images that were left out, ``PATH.skipped.csv``, gets those of now behind
        those of before.
    new_classes : bool
        Whether classes that the file does not have go behind its own. Classes are found by their names; labels of old
        samples stay.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.
    notify : callable, optional
        Called with a line for people: that what an earlier call had done of the same images is used, or is kept.

    Raises
    ------
    FileError
        The file is missing, damaged, or not made of images by convert.
    SourceError, SampleError
        The source cannot be used, or differs from the file in fields or classes.
    OutputError
        The new file cannot be written, or another process is writing it.
    OptionError
        An argument cannot be. The file is as it was after any of these.
    """
    given = dict(locals())
    started = time.perf_counter()
    path = _check_paths(given.pop("path"), source, manifest)
    with open_old(path) as old:
        _check_tables(old)
        return _append_images(old, given, started)


def plan_append(path: str | os.PathLike[str], source: str | os.PathLike[str], **options: Any) -> AppendPlan:
    """What `append` would do with the same arguments; writes nothing.

    Raises
    ------
    As `append`, as far as a look at the source and at a few images shows it.
    """
    call = inspect.signature(append).bind(path, source, **options)
    call.apply_defaults()
    given = dict(call.arguments)
    path = _check_paths(given.pop("path"), source, given["manifest"])
    with open_old(path) as old:
        _check_tables(old)
        return _plan_images(old, given)


def _check_paths(
    path: str | os.PathLike[str], source: str | os.PathLike[str], manifest: str | os.PathLike[str] | None
) -> Path:
    path = Path(path)
    if not path.exists():
        raise FileError(f"{printable(path)}: no such file: h5chunk convert makes it")
    if path.is_dir():
        raise FileError(
            f"{printable(path)}: is a folder: append to one of its files, or convert the new samples into one more "
            "and read them together"
        )
    for read in (source, manifest):
        if read is not None and os.path.exists(read) and path.samefile(read):
            raise OptionError(f"{printable(path)}: is the source itself: give other samples")
    return path


def _check_tables(old: OldFile) -> None:
    """Raise FileError if what the file keeps beside the data does not agree with itself."""
    with damages(old.shown):
        problem = next(look_at_tables(old.file, old.header, list(old.datasets)), None)
    if problem is not None:
        raise FileError(f"{old.shown}: {problem}: nothing was appended: h5chunk verify says all that is wrong")


def _addition(old: OldFile, given: dict[str, Any]) -> Addition:
    before = OldImages(old)
    options = before.image_options(given["fit"])
    split_folders = given["split_folders"] or ("auto" if given["manifest"] else before.split_folders)
    shared = ("source", "manifest", "seed", "shuffle", "workers", "on_error", "max_pixels", "progress")
    job = prepare(
        path=old.path,
        split_folders=split_folders,
        chunk_samples=None,
        check=lambda path: None,
        **{name: given[name] for name in shared},
        **options,
    )
    job = replace(job, options=job.options | {"append": {"new_classes": given["new_classes"]}})
    return plan_addition(before, job, options["fit"], given["new_classes"], printable(given["source"]))


def _append_images(old: OldFile, given: dict[str, Any], started: float) -> AppendReport:
    addition = _addition(old, given)
    job, progress = addition.job, given["progress"]
    notify = given["notify"] or say_nothing
    if job.is_complete(1):
        return _already_appended(old, addition, started)
    carried = count_up("copy", addition.carried_bytes, progress)
    again = addition.come_again()
    with _taking_place(old, notify) as new:
        longer, filled = write_longer(new, addition, carried, count_written(len(job.order), progress), notify)
        new.command_id = job.command_id(1, filled.stamp)
    skipped = [(job.source.name(int(job.order[failure.row])), failure.reason) for failure in filled.failures]
    return AppendReport(
        path=str(old.path),
        num_added=len(longer.order),
        num_samples=longer.layout.num_samples,
        num_bytes=old.path.stat().st_size,
        seconds=time.perf_counter() - started,
        counts=dict(filled.notes.most_common()),
        new_classes=addition.classes.added,
        class_names=addition.classes.names,
        skipped=skipped,
        skipped_list=save_skipped(old.path, skipped, behind=True),
        ignored=job.listing.ignored,
        notes=[*again, unmixed(old.shown), *small_chunks(longer.layout)],
    )


def _already_appended(old: OldFile, addition: Addition, started: float) -> AppendReport:
    """Report what the same command did before."""
    job, index, last = addition.job, old.table("source_index"), old.options["appended"][-1]
    assert index is not None
    failures = job.left_out(index[len(index) - last["samples"] :] - last["first_index"])
    skipped = [(job.source.name(int(job.order[failure.row])), failure.reason) for failure in failures]
    return AppendReport(
        path=str(old.path),
        num_added=last["samples"],
        num_samples=len(index),
        num_bytes=old.path.stat().st_size,
        seconds=time.perf_counter() - started,
        counts={},
        class_names=addition.classes.names,
        skipped=skipped,
        skipped_list=save_skipped(old.path, skipped, behind=True),
        ignored=job.listing.ignored,
        notes=[AGAIN, unmixed(old.shown)],
        already_complete=True,
    )


def _plan_images(old: OldFile, given: dict[str, Any]) -> AppendPlan:
    addition = _addition(old, given)
    num_bytes = plan_longer(addition, addition.job.order).spec().num_bytes
    check_room(old.path, num_bytes)
    return AppendPlan(
        path=str(old.path),
        num_old=addition.before.num_samples,
        num_new=len(addition.job.order),
        num_bytes=num_bytes,
        free_bytes=shutil.disk_usage(old.path.absolute().parent).free,
        estimated_s=estimate_s(addition.job),
        new_classes=addition.classes.added,
        notes=[*([AGAIN] if addition.job.is_complete(1) else addition.come_again()), unmixed(old.shown)],
    )


@contextmanager
def _taking_place(old: OldFile, notify: Notify) -> Iterator[NewFile]:
    """The new file, which takes the place of the old one in the end, with its permissions."""
    new = NewFile(old.path, overwrite=True)
    with telling(new, notify), new:
        old.check_unchanged()  # by who had the lock before
        yield new
        new.part.chmod(old.mode)
        old.check_unchanged()
        new.commit()
