"""Checks several files: each one, whether any is missing, and whether shards can be read as one."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError, H5ChunkError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.format import opened, read_header
from h5chunk.store.read.files import Paths, list_files
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.shardnames import NUMBERED, missing_shards, shard_numbers, wrong_counts
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import Report
from h5chunk.tools.verify.report import VerifyReport

SHOWN = 20  # whole files and missing ones in what people read; JSON has all


@dataclass(frozen=True)
class FolderReport(Report):
    """What was found in a folder.

    Attributes
    ----------
    path : str
    files : tuple of VerifyReport
        Of each file, by name. What cannot be opened has that as its only problem.
    missing : tuple of str
        Names of shards that are not there.
    problems : tuple of str
        What is wrong with the files as a set.
    seconds : float
    """

    path: str
    files: tuple[VerifyReport, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as was looked."""
        return not self.missing and not self.problems and all(each.ok for each in self.files)

    def facts(self) -> dict[str, Any]:
        """The report for programs, with the verdicts."""
        return {"ok": self.ok, **super().facts(), "files": [each.facts() for each in self.files]}

    def lines(self) -> list[str]:
        bad = [each for each in self.files if not each.ok]
        whole = [each for each in self.files if each.ok]
        size = human_bytes(sum(each.num_bytes for each in self.files))
        verdict = "whole" if self.ok else f"DAMAGED: {self._faults(len(bad))}"
        lines = [f"{self.path}: {_count(len(self.files), 'file')}, {size}, {verdict}"]
        lines += [f"  missing: {name}" for name in self.missing[:SHOWN]]
        if len(self.missing) > SHOWN:
            lines.append(f"  missing: {len(self.missing) - SHOWN} more (--json has all)")
        lines += [f"  wrong: {each}" for each in self.problems]
        lines += [f"  {line}" for each in bad for line in each.lines()]
        lines += [f"  {each.lines()[0]}" for each in whole[:SHOWN]]
        if len(whole) > SHOWN:
            lines.append(f"  {len(whole) - SHOWN} more that are whole")
        read_bytes = sum(each.read_bytes for each in self.files)
        lines.append(f"  {human_bytes(read_bytes)} read in {self.seconds:.1f} s")
        return lines

    def _faults(self, num_bad: int) -> str:
        found = [(num_bad, "bad file"), (len(self.missing), "missing file"), (len(self.problems), "other fault")]
        return ", ".join(_count(count, what) for count, what in found if count)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


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
    """One file; what keeps it from being opened is what is wrong with it."""
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
    """Files whose names say other than they do themselves."""
    for file in files:
        match = NUMBERED.fullmatch(file.name)
        said = _said(file) if match else None
        if match and said and said != (int(match[2]), int(match[3])):
            yield f"{printable(file.name)} says of itself that it is shard {said[0]} of {said[1]}: it was renamed"


def _said(file: Path) -> tuple[int, int] | None:
    """Number and count of shards, as a file of ours says; None if it does not."""
    try:
        with opened(file) as shard:
            header = read_header(shard)
        options: Any = json.loads(header.options) if header is not None else {}
        return int(options["shard"]), int(options["shards"])
    except (H5ChunkError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _disagreements(files: list[Path], path: Path) -> Iterator[str]:
    """Why the shards of a set cannot be read as one."""
    for name, count in sorted(shard_numbers([file.name for file in files])):
        shards = [file for file in files if (match := NUMBERED.fullmatch(file.name)) and _of_set(match, name, count)]
        if len(shards) < 2:
            continue
        try:
            FileSet(shards, None, path).close()
        except H5ChunkError as error:
            yield f"its shards cannot be read as one: {error}"


def _of_set(match: re.Match[str], name: str, count: int) -> bool:
    return match[1] == name and int(match[3]) == count
