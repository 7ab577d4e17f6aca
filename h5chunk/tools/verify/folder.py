"""Check several files: each one, whether any is missing, and whether shards can be read as one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from h5chunk.errors import FileError, H5ChunkError, printable
from h5chunk.store.format.header import read_header
from h5chunk.store.format.shard_names import NUMBERED, missing_shards, shard_numbers, wrong_counts
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.files import Paths, list_files, open_reader
from h5chunk.tools.progress import Progress
from h5chunk.tools.verify.report import FolderReport, VerifyReport


def verify_folder(
    path: Paths,
    check: Callable[[Path, Progress | None], VerifyReport],
    progress: Progress | None = None,
) -> FolderReport:
    """Check all files of a folder.

    Parameters
    ----------
    path : path or sequence of paths
        A folder, a pattern, or several files.
    check : callable
        Checks one file.
    progress : callable, optional
        Called as ``progress("verify", done_bytes, total_bytes)``, of all files together.

    Raises
    ------
    FileError
        There are none.
    """
    started = time.perf_counter()
    files = list_files(path)
    name = Path(path) if isinstance(path, (str, os.PathLike)) else files[0].parent
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    reports, done = [], 0
    for file, size in zip(files, sizes, strict=True):
        reports.append(_check(file, check, _of_all(progress, done, sum(sizes))))
        done += size
    names = [file.name for file in files]
    missing = tuple(missing_shards(names))
    whole = [file for file, report in zip(files, reports, strict=True) if report.ok]
    problems = [*wrong_counts(names), *_numbers(whole)]
    if not missing and len(whole) == len(files):
        problems += _disagreements(files, name)
    return FolderReport(str(name), tuple(reports), missing, tuple(problems), time.perf_counter() - started)


def _of_all(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda stage, done, _: progress(stage, before + done, total)


def _check(
    file: Path, check: Callable[[Path, Progress | None], VerifyReport], progress: Progress | None
) -> VerifyReport:
    """Check one file; an error that keeps it from being opened becomes its problem."""
    try:
        return check(file, progress)
    except FileError as error:
        why = str(error).removeprefix(f"{printable(file)}: ")
        num_bytes = file.stat().st_size if file.exists() else 0
        return VerifyReport(
            path=str(file),
            num_bytes=num_bytes,
            by_h5chunk=False,
            quick=False,
            fields=(),
            bad=(),
            problems=(why,),
            notes=(),
            seconds=0.0,
            read_bytes=0,
        )


def _numbers(files: list[Path]) -> Iterator[str]:
    """Yield messages about shards that were renamed."""
    for file in files:
        match = NUMBERED.fullmatch(file.name)
        said = _said(file) if match else None
        if match and said and said != (int(match[2]), int(match[3])):
            yield f"{printable(file.name)} says of itself that it is shard {said[0]} of {said[1]}: it was renamed"


def _said(file: Path) -> tuple[int, int] | None:
    """Return the number and count of shards that the header of a file names; None if it names none."""
    try:
        with opened(file) as shard:
            header = read_header(shard)
        options = header.options if header is not None else {}
        return int(options["shard"]), int(options["shards"])
    except (H5ChunkError, ValueError, KeyError, TypeError):
        return None


def _disagreements(files: list[Path], path: Path) -> Iterator[str]:
    """Yield the reasons why the shards of a set cannot be read as one."""
    for name, count in sorted(shard_numbers([file.name for file in files])):
        shards = [file for file in files if (match := NUMBERED.fullmatch(file.name)) and _of_set(match, name, count)]
        if len(shards) < 2:
            continue
        try:
            open_reader(shards).close()
        except H5ChunkError as error:
            yield f"its shards cannot be read as one: {error}"


def _of_set(match: re.Match[str], name: str, count: int) -> bool:
    return match[1] == name and int(match[3]) == count
