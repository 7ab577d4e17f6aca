"""`h5chunk bench`: measure how fast this machine feeds a file, and which stage limits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from h5chunk.errors import (
    FieldError,
    FileError,
    H5ChunkError,
    OptionError,
    WorkerError,
    check_whole,
    count_text,
    human_bytes,
    printable,
    shown,
)
from h5chunk.machine import available_cores
from h5chunk.paths import takes_paths
from h5chunk.store.read.files import Paths, open_reader
from h5chunk.store.read.ragged import ImagesField
from h5chunk.store.read.source import Source
from h5chunk.tools.info.usual import Fields, with_usual_fields
from h5chunk.tools.measure.checks import (
    CROP,
    batch_bytes,
    check_budget,
    check_samples,
    why_not_direct,
    worker_counts,
)
from h5chunk.tools.measure.machine import available_bytes, describe_device, library_versions
from h5chunk.tools.measure.stages import (
    CACHED,
    DATALOADER,
    DECODING,
    DISK,
    LIMITS,
    LOADER,
    RESIDENT,
    TO_DEVICE,
    Figure,
    Subject,
    measure_stages,
)
from h5chunk.tools.measure.store import measure_store, remote_verdict
from h5chunk.tools.progress import Progress, TimeBudget
from h5chunk.tools.report import Report

MAX_WORKERS = 4
HELD_BATCHES, HELD_BYTES = 7, 1 << 30  # number of batches that a loader reads ahead, and the limit on their size
HELD_LOADERS = 4  # loaders that are open at the same time
AT_LIMIT = 0.7  # a loader that reaches this fraction of its limit can hardly become faster
NOISY = 1.5  # a rate above this multiple of its limit means that the machine was busy


@takes_paths("path")
def bench(
    path: Paths,
    *,
    batch_size: int = 256,
    device: str = "cpu",
    fields: Mapping[str, str] | Sequence[str] | None = None,
    budget_s: float = 10.0,
    workers: Sequence[int] | None = None,
    cold: bool = True,
    trusted: bool = False,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure how fast this machine feeds a file, and name the slowest stage.

    Parameters
    ----------
    path : path or sequence of paths
        A file; or several files as one data set, specified as for `ChunkDataset`. For URLs, the rates of requests to
        the store and of loaders that read from it are measured, without a cache.
    batch_size : int
        Number of samples per batch.
    device : str
        Device of the batches of `ChunkLoader`: ``"cpu"`` or ``"cuda"``.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`, whose defaults are used. If it has none for this file: those that `h5chunk.info` names.
    budget_s : float
        Approximate duration in seconds. All stages are measured in several rounds; figures are medians.
    workers : sequence of int, optional
        DataLoader worker counts to try. Default: 0, and one per core up to 4.
    cold : bool
        Whether to measure the disk too, by dropping parts of the file from the page cache and reading them again.
    trusted : bool
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("bench", done, 100).

    Raises
    ------
    FileError, FieldError
        As for `ChunkDataset`, or the file has no samples or is damaged.
    WorkerError
        A DataLoader's worker died.
    OptionError
        A number is out of range, the device does not exist, or a batch does not fit in memory.
    """
    from h5chunk.store.read.fields import field_mapping

    numbers = worker_counts(workers, (0, min(MAX_WORKERS, available_cores())))
    batch_size = check_whole("batch_size", batch_size, 1)
    check_budget(budget_s)
    device_name = describe_device(device)

    def open_fields(fields: Fields) -> Source:
        return open_reader(path, field_mapping(fields), trusted=trusted)

    reader, fields = with_usual_fields(open_fields, path, fields, trusted)
    if reader.matrix is not None:
        raise FieldError(f"{printable(reader.path)}: has a sparse matrix, which bench cannot measure: use h5chunk tune")
    subject = Subject(
        path=path,
        fields=fields,
        reader=reader,
        sample_bytes=check_samples(reader, "measured"),
        batch_size=batch_size,
        device=device,
        num_cores=available_cores(),
        memory_bytes=available_bytes(),
        num_samples=reader.num_samples,
        budget=TimeBudget("bench", budget_s, progress),
    )
    _check_memory(subject, max(numbers))
    not_direct = why_not_direct(reader)
    with _named_errors(str(reader.path)), subject.closing:
        if reader.is_remote:
            figures, notes, stored_bytes = measure_store(subject, numbers)
        else:
            figures, notes, stored_bytes = measure_stages(subject, numbers, cold, not_direct)
    if any(figure.ratio is not None and figure.ratio > NOISY for figure in figures if figure.limit == CACHED):
        notes.append("some figures are above their limit, because the machine was busy: repeat the measurement")
    if isinstance(reader.ragged, ImagesField):
        notes.append(f"images of any size are cropped by RandomResizedCrop({CROP}); GB/s counts stored bytes")
    fits = stored_bytes is None or stored_bytes < subject.memory_bytes
    return BenchReport(
        path=shown(reader.path),
        fields=list(reader.fields),
        num_samples=reader.num_samples,
        sample_bytes=subject.sample_bytes,
        stored_bytes=stored_bytes,
        measured_samples=subject.num_samples,
        batch_size=batch_size,
        device=device_name,
        num_cores=subject.num_cores,
        seconds=subject.budget.taken_s,
        figures=figures,
        notes=notes,
        verdict=_too_few(subject)
        or (
            remote_verdict(figures)
            if reader.is_remote
            else verdict(figures, not_direct=not_direct, compressed=subject.is_compressed, fits=fits)
        ),
        versions=library_versions(),
    )


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Turn errors of HDF5 and of workers into errors that name the file or a remedy."""
    try:
        yield
    except H5ChunkError:
        raise
    except OSError as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"{printable(path)}: cannot be read ({message[-1]})") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerError(f"a worker of the DataLoader died ({error}): try fewer --workers") from error


def _check_memory(subject: Subject, num_workers: int) -> None:
    """Raise OptionError if the batches of all loaders and workers do not fit in memory."""
    reader = subject.reader
    batch = min(subject.batch_size, reader.num_samples) * batch_bytes(reader, subject.sample_bytes)
    needed = HELD_LOADERS * min(HELD_BATCHES * batch, HELD_BYTES + 2 * batch) + 3 * (1 + num_workers) * batch
    if needed > subject.memory_bytes:
        raise OptionError(
            f"batch_size is {subject.batch_size}, so a batch takes up {human_bytes(batch)}, and the measurement "
            f"needs about {human_bytes(needed)} of memory, but only {human_bytes(subject.memory_bytes)} are free: use "
            "a smaller batch_size"
        )


# ---- the report


@dataclass(frozen=True)
class BenchReport(Report):
    """Measured rates of all stages for a file."""

    path: str
    fields: list[str]
    num_samples: int
    sample_bytes: int  # total size of all fields of a decoded sample
    stored_bytes: int | None  # size of the fields in the file; None if their data is in other files
    measured_samples: int  # number of leading samples that were measured from the page cache
    batch_size: int
    device: str
    num_cores: int
    seconds: float  # duration of the measurement
    figures: list[Figure]
    notes: list[str]
    verdict: str  # the slowest stage, and what to do about it
    versions: dict[str, str]

    def figure(self, group: str, name: str) -> Figure:
        """Return the figure with this group and name."""
        return next(figure for figure in self.figures if (figure.group, figure.name) == (group, name))

    def lines(self) -> list[str]:
        samples, cores = count_text(self.num_samples, "sample"), count_text(self.num_cores, "core")
        lines = [
            f"{self.path}: {samples} of {human_bytes(self.sample_bytes)} ({', '.join(self.fields)})",
            f"batches of {self.batch_size} to {self.device}; {cores}; measured in {self.seconds:.1f} s",
            "",
            f"{'':26s}{'samples/s':>13s}{'GB/s':>9s}{'of limit':>10s}",
        ]
        group = ""
        for figure in self.figures:
            if figure.group != group:
                lines.append(group := figure.group)
            lines.append(_line(figure))
        lines += ["", *(f"note: {note}" for note in self.notes), self.verdict]
        return lines


def _too_few(subject: Subject) -> str:
    """Return a verdict about data of fewer than two batches, or an empty string if there are more."""
    if subject.num_samples >= 2 * subject.batch_size:
        return ""
    return (
        f"Slowest stage: unknown, because {count_text(subject.num_samples, 'sample')} are fewer than two batches of "
        f"{subject.batch_size}: measure a file with more samples, or use a smaller batch_size"
    )


def _line(figure: Figure) -> str:
    name = f"  {figure.name:24s}"
    if figure.bytes_per_s is None or figure.samples_per_s is None:
        return f"{name}{'-':>13s}{'':19s}  not measured: {figure.note}"
    rate = f"{figure.samples_per_s:>13,.0f}{figure.bytes_per_s / 1e9:>9.{2 if figure.bytes_per_s > 1e8 else 4}f}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    details = [figure.limit and f"of {figure.limit}", figure.note]
    return f"{name}{rate}{ratio:>10s}  {'; '.join(filter(None, details))}".rstrip()


def verdict(figures: list[Figure], *, not_direct: str, compressed: bool, fits: bool) -> str:
    """Return one or two sentences that name the slowest stage and how to speed it up.

    ``not_direct`` is the reason why the file cannot be read by byte ranges, or empty; ``compressed`` is true if the
    file is compressed, and ``fits`` if it fits in memory.
    """
    rates = {(figure.group, figure.name): figure.samples_per_s for figure in figures if figure.samples_per_s}
    measured = [figure for figure in figures if figure.samples_per_s and figure.name != RESIDENT]
    loaders = [figure for figure in measured if figure.group == LOADER] or [
        e for e in measured if e.group == DATALOADER
    ]
    if not loaders:
        return "Slowest stage: unknown, because nothing could be measured"
    best = max(loaders, key=lambda figure: figure.samples_per_s or 0)
    rate = best.samples_per_s or 0.0
    disk = rates.get((LIMITS, DISK))
    if disk and disk < rate and not fits:
        return (
            f"Slowest stage: the disk ({disk:,.0f} samples/s), because the file does not fit in memory. More memory "
            f"or a faster disk gives up to {rate / disk:.1f} times this rate; ChunkLoader(echo=N) uses each sample N "
            "times"
        )
    first = ""
    if disk and disk < rate:
        first = f". The first epoch reads from disk, which limits it to {disk:,.0f} samples/s"
    return _slowest(best, rate, rates, not_direct, compressed) + first


def _slowest(
    best: Figure, rate: float, rates: Mapping[tuple[str, str], float], not_direct: str, compressed: bool
) -> str:
    """Return sentences about the slowest stage other than the disk."""
    share = f"{rate:,.0f} samples/s, {best.ratio or 0:.2f} times the rate of {best.limit or 'its limit'}"
    workers = max((value for (group, _), value in rates.items() if group == DATALOADER), default=0.0)
    resident = rates.get((LOADER, RESIDENT), 0.0)
    if not_direct and (best.ratio or 0) < AT_LIMIT:
        remedy = "Store it in uncompressed chunks of complete samples, as h5chunk convert does"
        if best.group == LOADER and workers > 1.2 * rate:
            remedy += f", or use ChunkDataset in a DataLoader ({workers:,.0f} samples/s)"
        return f"Slowest stage: HDF5 ({share}), which reads in one thread, because {not_direct}. {remedy}"
    if compressed and (best.ratio or 0) < AT_LIMIT:
        remedy = "Store the file uncompressed if the disk has space, or use more cores"
        return f"Slowest stage: decompression ({share}). {remedy}"
    stay = f"ChunkLoader(resident=True) keeps the data on the device and gives {resident:,.0f} samples/s"
    stay = stay if resident > 1.2 * rate else ""
    if best.limit == DECODING and (best.ratio or 0) >= AT_LIMIT:
        remedy = (
            "Use more cores, smaller images (h5chunk convert --max-side), or raw pixels if they fit in memory "
            "(h5chunk convert --keep-size)"
        )
        return f"Slowest stage: decoding images ({share}). {remedy}"
    if (best.ratio or 0) < AT_LIMIT:
        name = "ChunkLoader" if best.group == LOADER else "the DataLoader"
        remedy = stay or "Try larger batches, another num_threads and an idle machine"
        return f"Slowest stage: {name} itself ({share}). {remedy}"
    bottleneck = {TO_DEVICE: "the bus to the GPU", CACHED: "reading the page cache"}.get(best.limit or "", "memory")
    remedy = stay or "Only smaller samples or a faster machine can increase the rate"
    share = f"{best.ratio or 0:.2f} times its rate ({rate:,.0f} samples/s)"
    return f"Slowest stage: {bottleneck}. {best.group} reaches {share}. {remedy}"
