"""Repack the files of a folder, such as shards, into another folder, in this process or on a Dask cluster.

Each task writes one file under a unique name, and this process moves the file into the unfinished folder. Each finished
file records its source and options, so that an interrupted repack does not write it again.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5chunk
from h5chunk.errors import FileError, OptionError, OutputError, printable
from h5chunk.stamp import stamp_of
from h5chunk.store.read.files import Paths, list_files
from h5chunk.store.write.journal import has_command_id, is_made_by, key_of
from h5chunk.store.write.output import NewFolder, check_folder
from h5chunk.store.write.part_file import check_free_space, check_not_source, parse_output
from h5chunk.tools.cluster import connected
from h5chunk.tools.progress import Progress, count_tasks
from h5chunk.tools.repack.options import RepackOptions
from h5chunk.tools.repack.report import RepackFolderReport, RepackReport
from h5chunk.tools.shared import SharedFolder, at_hand
from h5chunk.tools.upload import is_uploaded, shared_folder, take, upload_early, upload_last
from h5chunk.urls import name_of, url_of

RepackFile = Callable[..., RepackReport]
"""A function that repacks one file: see `h5chunk.tools.repack.repack.repack_file`."""


class FileTask(NamedTuple):
    """One file to repack."""

    repack_file: RepackFile
    source: str | Path  # a path or a URL
    final: Path  # path in the unfinished folder; an earlier run may have written this file
    job: str  # name of a file that exists while the command runs
    work: SharedFolder  # folder in which the file is written, under a unique name
    options: RepackOptions


def repack_folder(
    source: Paths,
    path: Any,
    options: RepackOptions,
    repack_file: RepackFile,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    client: Any = None,
) -> RepackFolderReport:
    """Repack all files of a folder, pattern or list. The new files have the same names. See `repack`."""
    started, output = time.perf_counter(), parse_output(path, folder=True)
    files = [Path(file).absolute() for file in list_files(source, complete=True)]
    _check(files, output, options)
    if not has_command_id(output):
        check_folder(output, overwrite)
    if options.chunk_samples is None:  # the same in all files
        largest = max(files, key=lambda file: file.stat().st_size)
        options = replace(options, chunk_samples=_planned(largest, output, options, repack_file).chunk_samples)
    stamps = [(name_of(file), *stamp_of(file, with_ctime=True)) for file in files]
    command_id = key_of(["repack folder", h5chunk.__version__, options.recorded(), repr(options.cache), stamps])
    complete = not overwrite and is_made_by(output, command_id)
    if complete:
        reports = [repack_file(file, output / name_of(file), options) for file in files]
    elif dry_run:
        check_folder(output, overwrite)
        reports = [_planned(file, output, options, repack_file) for file in files]
        check_free_space(output.absolute(), sum(report.num_bytes for report in reports))
    else:
        reports = _write(files, NewFolder(output, overwrite), options, repack_file, command_id, progress, client)
    reports = [replace(report, path=str(output / name_of(file))) for report, file in zip(reports, files, strict=True)]
    return RepackFolderReport(str(output), dry_run, tuple(reports), time.perf_counter() - started, complete)


def _check(files: list[Path], output: Path, options: RepackOptions) -> None:
    """Raise an error if files cannot be repacked together, or an option applies only to single files."""
    names = Counter(map(name_of, files))
    if (name := names.most_common(1)[0][0]) and names[name] > 1:
        raise OptionError(f"two files are called {printable(name)}: repack their folders one after the other")
    for file in files:
        if not file.is_file():
            raise FileError(f"{printable(file)}: no such file")
        check_not_source(output, file.parent)
    if options.shuffle:
        raise OptionError(
            "shuffle applies to a single file, because samples are shuffled only within a file: convert the source "
            "again with another seed, or leave out shuffle"
        )


def _planned(file: Path, output: Path, options: RepackOptions, repack_file: RepackFile) -> RepackReport:
    """Return the plan for repacking a file, as if the output were beside the output folder, which may not exist yet."""
    beside = output.with_name(f".{output.name}-{name_of(file)}")
    return repack_file(file, beside, options, dry_run=True)


def _write(
    files: list[Path],
    folder: NewFolder,
    options: RepackOptions,
    repack_file: RepackFile,
    command_id: str,
    progress: Progress | None,
    client: Any,
) -> list[RepackReport]:
    """Write the folder, continuing earlier work, and return the reports of the files."""
    sizes = [file.stat().st_size for file in files]
    say = count_tasks("repack", sum(sizes), progress)
    reports: dict[int, RepackReport] = {}
    with folder as output:
        output.open_journal(command_id)
        output.work.mkdir(exist_ok=True)
        work = SharedFolder(output.work) if client is None else shared_folder(output.part, output.work)
        job = work.save_job(command_id)
        tasks = {
            number: FileTask(repack_file, url_of(file) or file, output.part / name_of(file), job, work, options)
            for number, file in enumerate(files)
        }
        last = upload_last([name_of(file) for file in files], work)
        for number, num_bytes in output.journal.records if work.url else ():
            if is_uploaded(name_of(files[number]), num_bytes):
                del tasks[number]
                plan = _planned(files[number], folder.path, options, repack_file)
                reports[number] = replace(plan, dry_run=False, num_bytes=num_bytes)
                say(number, sizes[number])
        for number, report in _ended(tasks, client, say, last):
            if report.path == str(tasks[number].final):
                upload_early(tasks[number].final)
            else:
                take(work, Path(report.path).name, tasks[number].final, report.num_bytes)
            output.journal.add([number, report.num_bytes])
            reports[number] = report
            say(number, sizes[number])
        work.clear()
        output.command_id = command_id
        output.commit()
    return [reports[number] for number in range(len(files))]


def _ended(
    tasks: dict[int, FileTask], client: Any, say: Callable[[int, int], None], last: Collection[int]
) -> Iterator[tuple[int, RepackReport]]:
    """Run the tasks, in this process or on a cluster; yield the number and the report of each task as it finishes."""
    with nullcontext() if client is None else connected(client) as cluster:
        if cluster is None:
            yield from ((number, run_task(task, partial(say, number))) for number, task in tasks.items())
        else:
            yield from cluster.run(run_task, tasks, say, last)


def run_task(task: FileTask, say: Callable[[int], None]) -> RepackReport:
    """Repack one file, unless an earlier run has done so."""
    with task.work.in_worker() as work, at_hand(task.source) as source:
        size = source.stat().st_size

        def scaled(stage: str, done: int, total: int | None) -> None:
            say(size * done // max(1, total or 1))

        if task.final.exists():
            try:
                return task.repack_file(source, task.final, task.options, progress=scaled)
            except OutputError:  # it was made from another source, or was changed
                pass
        attempt = work.path / f"{uuid.uuid4().hex}.h5"  # a task may run twice at a time
        report = task.repack_file(source, attempt, task.options, progress=scaled)
        work.finish(task.job, attempt.name, task.final.name)
        return report
