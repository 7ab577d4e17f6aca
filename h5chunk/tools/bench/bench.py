"""What this machine gives for a file: the limits, and what each way of reading makes of them, turn about."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import h5py
import numpy as np

import h5chunk
from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError, WorkerError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.format import opened
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.direct import NotDirect, direct_field
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import Paths, open_reader
from h5chunk.store.read.filesdirect import files_fields
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.write.fill import available_cores
from h5chunk.tools.bench.report import CACHED, DISK, FRESH, LIMITS, BenchReport, verdict, with_ratios
from h5chunk.tools.bench.stages import (
    ROUNDS,
    Clock,
    Stage,
    Subject,
    batch_stages,
    cached_read,
    device_copy,
    fill_page_cache,
    measure_disk,
    memory_stages,
)
from h5chunk.tools.measure.disk import FileReads, Stored, locate
from h5chunk.tools.measure.machine import NotMeasured, available_bytes
from h5chunk.tools.progress import Progress

MAX_WORKERS = 4
HELD_BATCHES, HELD_BYTES, HELD_LOADERS = 7, 1 << 30, 4  # what a loader reads ahead is bounded by the second
SMALL_BYTES = 16 << 20
NOISY = 1.5  # of a limit: more is the time of day


def bench(
    path: Paths,
    *,
    batch_size: int = 256,
    device: str = "cpu",
    fields: Mapping[str, str] | Sequence[str] | None = None,
    seconds: float = 10.0,
    workers: Sequence[int] | None = None,
    cold: bool = True,
    trusted: Trusted = False,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure what this machine gives for a file, and name what bounds it.

    Parameters
    ----------
    path : path or sequence of paths
        A file; or several as one data set, named as for `ChunkDataset`.
    batch_size : int
    device : str
        Where `ChunkLoader` brings batches: ``"cpu"`` or ``"cuda"``.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`.
    seconds : float
        To take, about. Each thing gets turns in several rounds; figures are medians.
    workers : sequence of int, optional
        Of the DataLoaders; default: 0, and one a core up to 4.
    cold : bool
        Also read from the disk: parts of the file are dropped from the page cache, and read again.
    trusted : bool, path or sequence of paths
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("bench", done, 100).

    Raises
    ------
    FileError, FieldError
        As for `ChunkDataset`; the file has no samples, or is damaged.
    WorkerError
        A DataLoader's worker died.
    OptionError
        A number is out of range, the device is not there, or a batch does not fit in memory.
    """
    from h5chunk.feed.dataset import field_mapping
    from h5chunk.tools.measure.batches import check_device

    num_cores = available_cores()
    numbers = _workers(workers, num_cores)
    _check_numbers(batch_size, seconds)
    device_name = check_device(device)
    reader = open_reader(path, field_mapping(fields), trusted=trusted)
    subject = Subject(path, fields, reader, batch_size, device, num_cores, available_bytes(), reader.num_samples)
    _check_subject(subject, max(numbers))
    clock = Clock(seconds, progress)
    with _named_errors(str(reader.path)), ExitStack() as closing:
        stages, notes, stored, not_direct = _measure(subject, numbers, cold, clock, closing)
    limits = {(stage.group, stage.name): stage.limits for stage in stages}
    figures = with_ratios([stage.figure() for stage in stages], limits)
    if any(each.ratio is not None and each.ratio > NOISY for each in figures if each.limit == CACHED):
        notes.append("some figures are above their limit: the machine was busy with other things: run it again")
    fits = stored is None or stored.num_bytes < subject.room_bytes
    return BenchReport(
        path=str(reader.path),
        fields=list(reader.fields),
        num_samples=reader.num_samples,
        sample_bytes=subject.sample_bytes,
        stored_bytes=None if stored is None else stored.num_bytes,
        measured_samples=subject.num_samples,
        batch_size=batch_size,
        device=device_name,
        num_cores=num_cores,
        seconds=clock.taken_s,
        figures=figures,
        notes=notes,
        verdict=verdict(figures, not_direct=not_direct, compressed=subject.is_compressed, fits=fits),
        versions=_versions(),
    )


def _measure(
    subject: Subject, workers: Sequence[int], cold: bool, clock: Clock, closing: ExitStack
) -> tuple[list[Stage], list[str], Stored | None, str]:
    """All stages, what to say beside them, where the bytes lie, and why not directly if so."""
    stored, why = None, ""
    try:
        stored = locate(subject.reader)
    except NotMeasured as reason:
        why = str(reason)
    notes: list[str] = []
    if stored is None:
        read_stages = [Stage(LIMITS, CACHED, 1, note=why), Stage(LIMITS, DISK, 1, note=why)]
    else:
        reads = FileReads(*stored.paths)
        closing.callback(reads.close)
        disk = measure_disk(stored, reads, cold, clock)
        notes += fill_page_cache(subject, stored, reads, clock)
        read_stages = [cached_read(subject, stored, reads, clock), disk]
    not_direct = _why_not_direct(subject.reader)
    limits = [*memory_stages(subject, clock), *read_stages]
    fresh_rate = next(stage.first_rate for stage in limits if stage.name == FRESH)
    batches = batch_stages(subject, workers, not_direct, fresh_rate, clock, closing)
    stages = [*limits, device_copy(subject, closing), *batches]
    _take_turns([stage for stage in stages if stage.rate is not None and not stage.rates], clock)
    if subject.sample_bytes * subject.num_samples < SMALL_BYTES:
        notes.append(
            f"the data is small ({human_bytes(subject.sample_bytes * subject.num_samples)}): figures are of calls and "
            "processors' caches more than of memory"
        )
    return stages, notes, stored, not_direct


def _take_turns(stages: list[Stage], clock: Clock) -> None:
    """Measure all in rounds; the first one is short, and counted only if time is up."""
    until = clock.taken_s + clock.left_s
    each = clock.left_s / max(1, len(stages)) / (ROUNDS + 0.5) / 1.15
    for number in range(ROUNDS + 1):
        for stage in stages:
            if stage.rate is not None and (clock.taken_s < until or number < 1):
                stage.rates.append(stage.rate(each if number else each / 2))
                clock.tick()


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """What HDF5 or a worker says, as an error of ours."""
    try:
        yield
    except H5ChunkError:
        raise
    except OSError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"{printable(path)}: cannot be read: {said[-1]}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerError(f"a worker of the DataLoader died: try fewer --workers: {error}") from error


def _workers(workers: Sequence[int] | None, num_cores: int) -> Sequence[int]:
    """Numbers of workers, each once."""
    if workers is None:
        return 0, min(MAX_WORKERS, num_cores)
    for number in workers:
        if not isinstance(number, int) or number < 0:
            raise OptionError(f"workers has {number!r}: give whole numbers, at least 0")
    return sorted(set(workers))


def _check_numbers(batch_size: int, seconds: float) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size is {batch_size!r}: give a whole number, at least 1")
    if not 0 < seconds < float("inf"):
        raise OptionError(f"seconds is {seconds!r}: give a number above 0")


def _check_subject(subject: Subject, num_workers: int) -> None:
    """There are bytes to move, and room for batches."""
    if subject.reader.matrix is not None:
        raise FieldError(f"{printable(subject.reader.path)}: holds a sparse matrix, which bench does not measure yet")
    if not subject.reader.num_samples:
        raise FieldError(f"{printable(subject.reader.path)}: has no samples: nothing can be measured")
    if not subject.sample_bytes:
        raise FieldError(f"{printable(subject.reader.path)}: its samples have no bytes: nothing can be measured")
    batch = min(subject.batch_size, subject.reader.num_samples) * subject.sample_bytes
    needed = HELD_LOADERS * min(HELD_BATCHES * batch, HELD_BYTES + 2 * batch) + 3 * (1 + num_workers) * batch
    if needed > subject.room_bytes:
        raise OptionError(
            f"batch_size is {subject.batch_size}, a batch of {human_bytes(batch)}: measuring holds about "
            f"{human_bytes(needed)} at a time, but {human_bytes(subject.room_bytes)} are free: give a smaller one"
        )


def _why_not_direct(reader: H5Reader) -> str:
    """Why byte ranges cannot be read; empty if they can."""
    if isinstance(reader, FileSet):
        name, reason = next(iter(files_fields(reader)[1].items()), ("", ""))
        return f"field {name!r} cannot be read by byte ranges: {reason}" if reason else ""
    with opened(reader.path) as file:
        for name, each in reader.fields.items():
            try:
                assert isinstance(each, Field)  # see _check_subject
                direct_field(reader.path, file, each)
            except NotDirect as reason:
                return f"field {name!r} cannot be read by byte ranges: {reason}"
    return ""


def _versions() -> dict[str, str]:
    from h5chunk.tools.measure.batches import torch_version

    versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    return versions | {"numpy": np.__version__, "torch": torch_version(), "python": platform.python_version()}
