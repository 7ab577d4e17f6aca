"""Reports on damage in HDF5 files, as text (``str``) and for programs (``to_json``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h5chunk.errors import count_text, human_bytes, printable
from h5chunk.store.read.scan import Damage
from h5chunk.tools.report import Report, rows, shell_command

KEPT = ("images/", "X/")  # groups that are accepted as one field
SHOWN_NAMES = 4
SHOWN = 20  # maximum number of bad chunks, intact files and missing files in the text; JSON lists all


@dataclass(frozen=True)
class Checked:
    """The number of chunks of a dataset that were checked, and how they were checked."""

    field: str
    num_chunks: int  # stored chunks
    num_checked: int  # chunks that were read
    method: str  # "checksum", "decoding" (finds errors that filters notice) or "reading" (finds disk errors)
    num_unwritten: int = 0  # number of chunks that were never written, which is legal; 1 for a contiguous dataset
    reads_as: str = ""  # the value that unwritten chunks read as; empty if there are none

    def __str__(self) -> str:
        read = "" if self.num_checked == self.num_chunks else f"{self.num_checked:,} of "
        parts = [f"{read}{count_text(self.num_chunks, 'chunk')}, by {self.method}"] if self.num_chunks else []
        if self.num_unwritten:
            unwritten = (
                f"{count_text(self.num_unwritten, 'chunk')} never written" if self.num_chunks else "never written"
            )
            parts.append(f"{unwritten} (reads as {self.reads_as})")
        return printable(f"{self.field}: {'; '.join(parts) or 'no chunks'}")


@dataclass(frozen=True)
class VerifyReport(Report):
    """The damage in a file.

    ``bad`` contains the damaged chunks in the order of the file, except ``repaired`` chunks. ``problems`` are other
    errors, and ``notes`` say which parts were not checked, and why. Only files ``by_h5chunk`` have checksums.
    """

    path: str
    num_bytes: int
    by_h5chunk: bool
    quick: bool
    fields: tuple[Checked, ...]
    bad: tuple[Damage, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    read_bytes: int
    repaired: tuple[Damage, ...] = ()
    renamed: tuple[str, ...] = ()  # those of the problems that accept solves
    accepted: tuple[str, ...] = ()  # fields whose checksums were replaced, and how many of their chunks had changed

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.bad and not self.problems

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name, with the verdict."""
        return {"ok": self.ok, **super().facts()}

    def lines(self) -> list[str]:
        return [
            f"{self.path}: {human_bytes(self.num_bytes)}, {self._verdict()}",
            *(f"  {dataset}" for dataset in self.fields),
            *rows("repaired:", self.repaired, SHOWN),
            *rows("bad:", self.bad, SHOWN),
            *rows("wrong:", self.problems),
            *rows("accepted:", self.accepted),
            *rows("note:", self.notes),
            *rows("remedy:", self._remedies()),
            f"  {human_bytes(self.read_bytes)} read in {self.seconds:.1f} s",
        ]

    def _remedies(self) -> list[str]:
        """Return how to accept changes that were made on purpose, and how to repair damage, as far as there are any."""
        changed = [each.field for each in self.bad if each.expected != each.actual and each.actual is not None]
        parts = dict.fromkeys(name.partition("/")[0] if name.startswith(KEPT) else name for name in changed)
        remedies = []
        if not self.by_h5chunk:  # there are no checksums to replace, and HDF5's own do not change on purpose
            parts = {}
        if parts or self.renamed:
            names = [*list(parts)[:SHOWN_NAMES], *(["NAME"] if self.renamed or len(parts) > SHOWN_NAMES else [])]
            options = [part for name in names for part in ("--accept", name)]
            what = "fields were renamed or deleted" if self.renamed and not parts else "values were changed"
            command = shell_command(["h5chunk", "verify", self.path, *options])
            remedies.append(f"if {what} on purpose, {command} replaces their checksums")
        if self.bad and self.by_h5chunk:
            command = shell_command(["h5chunk", "verify", self.path, "--repair", "SOURCE"])
            remedies.append(
                f"if they are damaged, {command} rewrites chunks of images from SOURCE, the folder or archive "
                "of images that was converted; from other sources, convert the file again"
            )
        return remedies

    def _verdict(self) -> str:
        if not self.ok:
            return _damaged([(len(self.bad), "bad chunk"), (len(self.problems), "other fault")])
        looked = "the checked parts are whole" if self.quick else "whole"
        if not self.by_h5chunk:
            looked += ", as far as can be seen without checksums"
        unwritten = sum(dataset.num_unwritten > 0 for dataset in self.fields)
        if unwritten:
            looked += f"; {count_text(unwritten, 'dataset')} not fully written"
        return looked + (f", after repairing {count_text(len(self.repaired), 'chunk')}" if self.repaired else "")


@dataclass(frozen=True)
class FolderReport(Report):
    """The damage in the files of a folder.

    ``files`` contains a report for each file, sorted by name. If a file cannot be opened, the error is the only problem
    in its report. ``missing`` are the names of missing shards, and ``problems`` are errors that concern several files.
    """

    path: str
    files: tuple[VerifyReport, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.missing and not self.problems and all(report.ok for report in self.files)

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name, with the verdicts."""
        return {"ok": self.ok, **super().facts(), "files": [report.facts() for report in self.files]}

    def lines(self) -> list[str]:
        bad = [report for report in self.files if not report.ok]
        faults = [(len(bad), "bad file"), (len(self.missing), "missing file"), (len(self.problems), "other fault")]
        size, read_bytes = (sum(getattr(report, name) for report in self.files) for name in ("num_bytes", "read_bytes"))
        verdict = "whole" if self.ok else _damaged(faults)
        return [
            f"{self.path}: {count_text(len(self.files), 'file')}, {human_bytes(size)}, {verdict}",
            *rows("missing:", self.missing, SHOWN),
            *rows("wrong:", self.problems),
            *(f"  {line}" for report in bad for line in report.lines()),
            *rows("", (report.lines()[0] for report in self.files if report.ok), SHOWN),
            f"  {human_bytes(read_bytes)} read in {self.seconds:.1f} s",
        ]


def _damaged(faults: list[tuple[int, str]]) -> str:
    return "DAMAGED: " + ", ".join(count_text(count, noun) for count, noun in faults if count)
