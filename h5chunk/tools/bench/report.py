"""The report of `h5chunk bench`: rates of all stages, relative to their limits, and the slowest stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h5chunk.plan.layout import human_bytes
from h5chunk.tools.measure.stages import (
    CACHED,
    DATALOADER,
    DISK,
    LIMITS,
    LOADER,
    RESIDENT,
    TO_DEVICE,
    Figure,
)
from h5chunk.tools.report import Report

AT_LIMIT = 0.7  # a loader that gives this much of its limit leaves little to gain


@dataclass(frozen=True)
class BenchReport(Report):
    """Measured rates of all stages for a file."""

    path: str
    fields: list[str]
    num_samples: int
    sample_bytes: int  # of a decoded sample, all fields together
    stored_bytes: int | None  # of the fields in the file; None if they lie elsewhere
    measured_samples: int  # the leading samples that were measured from the page cache
    batch_size: int
    device: str
    num_cores: int
    seconds: float  # that measuring took
    figures: list[Figure]
    notes: list[str]
    verdict: str  # the slowest stage, and what to do about it
    versions: dict[str, str]

    def figure(self, group: str, name: str) -> Figure:
        """Return a figure by its group and name."""
        return next(each for each in self.figures if (each.group, each.name) == (group, name))

    def lines(self) -> list[str]:
        lines = [
            f"{self.path}: {self.num_samples:,} samples of {human_bytes(self.sample_bytes)} ({', '.join(self.fields)})",
            f"batches of {self.batch_size} to {self.device}; {self.num_cores} cores; measured in {self.seconds:.1f} s",
            "",
            f"{'':26s}{'samples/s':>13s}{'GB/s':>9s}{'of limit':>10s}",
        ]
        group = ""
        for each in self.figures:
            if each.group != group:
                lines.append(group := each.group)
            lines.append(_line(each))
        lines += ["", *(f"note: {note}" for note in self.notes), self.verdict]
        return lines


def _line(figure: Figure) -> str:
    name = f"  {figure.name:24s}"
    if figure.bytes_per_s is None or figure.samples_per_s is None:
        return f"{name}{'-':>13s}{'':19s}  not measured: {figure.note}"
    rate = f"{figure.samples_per_s:>13,.0f}{figure.bytes_per_s / 1e9:>9.{2 if figure.bytes_per_s > 1e8 else 4}f}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    how = [figure.limit and f"of {figure.limit}", figure.note]
    return f"{name}{rate}{ratio:>10s}  {'; '.join(filter(None, how))}".rstrip()


def verdict(figures: list[Figure], *, not_direct: str, compressed: bool, fits: bool) -> str:
    """Name the slowest stage, and what to do about it.

    ``not_direct`` is the reason if the file cannot be read by byte ranges; ``fits``: whether it fits in memory.
    """
    rates = {(each.group, each.name): each.samples_per_s for each in figures if each.samples_per_s}
    measured = [each for each in figures if each.samples_per_s and each.name != RESIDENT]
    loaders = [each for each in measured if each.group == LOADER] or [e for e in measured if e.group == DATALOADER]
    if not loaders:
        return "Slowest stage: unknown, as nothing could be measured"
    best = max(loaders, key=lambda each: each.samples_per_s or 0)
    rate = best.samples_per_s or 0.0
    disk = rates.get((LIMITS, DISK))
    if disk and disk < rate and not fits:
        return (
            f"Slowest stage: the disk, {disk:,.0f} samples/s, as the file does not fit in memory: more memory or a "
            f"faster disk gives up to {rate / disk:.1f} times as much; ChunkLoader's echo= trains samples again"
        )
    first = ""
    if disk and disk < rate:
        first = f" (the first epoch comes from the disk, at {disk:,.0f} samples/s at most)"
    return _slowest(best, rate, rates, not_direct, compressed) + first


def _slowest(
    best: Figure, rate: float, rates: Mapping[tuple[str, str], float], not_direct: str, compressed: bool
) -> str:
    """Name the slowest of the stages that come after the page cache."""
    share = f"{rate:,.0f} samples/s, {best.ratio or 0:.2f} of {best.limit or 'the limit'}"
    workers = max((value for (group, _), value in rates.items() if group == DATALOADER), default=0.0)
    resident = rates.get((LOADER, RESIDENT), 0.0)
    if not_direct and (best.ratio or 0) < AT_LIMIT:
        remedy = "store it in chunks of whole samples, uncompressed, as h5chunk convert does"
        if best.group == LOADER and workers > 1.2 * rate:
            remedy += f", or use ChunkDataset in a DataLoader ({workers:,.0f} samples/s)"
        return f"Slowest stage: HDF5, one thread at a time, {share}, as {not_direct}: {remedy}"
    if compressed and (best.ratio or 0) < AT_LIMIT:
        remedy = "store it uncompressed if the disk has room, or use more cores"
        return f"Slowest stage: decompressing, {share}: {remedy}"
    stay = f"resident=True keeps the data on the device: {resident:,.0f} samples/s" if resident > 1.2 * rate else ""
    if (best.ratio or 0) < AT_LIMIT:
        name = "ChunkLoader" if best.group == LOADER else "the DataLoader"
        remedy = stay or "try larger batches, other num_threads and a machine with nothing else to do"
        return f"Slowest stage: {name} itself, {share}: {remedy}"
    what = {TO_DEVICE: "the bus to the GPU", CACHED: "reading the page cache"}.get(best.limit or "", "memory")
    remedy = stay or "only smaller samples or a faster machine give more"
    return f"Slowest stage: {what}, of which {best.group} gives {best.ratio or 0:.2f} ({rate:,.0f} samples/s): {remedy}"
