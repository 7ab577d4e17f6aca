"""`h5chunk bench`: measure how fast this machine feeds a file, and which stage limits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError, WorkerError, check_whole, printable
from h5chunk.machine import available_cores
from h5chunk.plan.layout import human_bytes
from h5chunk.store.read.files import Paths, open_reader
from h5chunk.tools.bench.report import BenchReport, verdict
from h5chunk.tools.measure.checks import check_budget, check_samples, why_not_direct, worker_counts
from h5chunk.tools.measure.machine import available_bytes, describe_device, library_versions
from h5chunk.tools.measure.stages import CACHED, Subject, measure_stages
from h5chunk.tools.progress import Progress, TimeBudget

MAX_WORKERS = 4
HELD_BATCHES, HELD_BYTES, HELD_LOADERS = 7, 1 << 30, 4  # what a loader reads ahead is bounded by HELD_BYTES
NOISY = 1.5  # of a limit: more is the time of day


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
        A file; or several files as one data set, named as for `ChunkDataset`.
    batch_size : int
    device : str
        Device that `ChunkLoader` brings batches to: ``"cpu"`` or ``"cuda"``.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`.
    budget_s : float
        Approximate duration in seconds. All stages are measured in several rounds; figures are medians.
    workers : sequence of int, optional
        DataLoader worker counts to try. Default: 0, and one per core up to 4.
    cold : bool
        Whether to measure the disk too: parts of the file are dropped from the page cache, and read again.
    trusted : bool
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
        A number is out of range, the device does not exist, or a batch does not fit in memory.
    """
    from h5chunk.feed.sample_reader import field_mapping

    numbers = worker_counts(workers, (0, min(MAX_WORKERS, available_cores())))
    batch_size = check_whole("batch_size", batch_size, 1)
    check_budget(budget_s)
    device_name = describe_device(device)
    reader = open_reader(path, field_mapping(fields), trusted=trusted)
    if reader.matrix is not None:
        raise FieldError(f"{printable(reader.path)}: holds a sparse matrix, which bench does not measure yet")
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
        figures, notes, stored_bytes = measure_stages(subject, numbers, cold, not_direct)
    if any(each.ratio is not None and each.ratio > NOISY for each in figures if each.limit == CACHED):
        notes.append("some figures are above their limit: the machine was busy with other things: run it again")
    fits = stored_bytes is None or stored_bytes < subject.memory_bytes
    return BenchReport(
        path=str(reader.path),
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
        verdict=verdict(figures, not_direct=not_direct, compressed=subject.is_compressed, fits=fits),
        versions=library_versions(),
    )


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Translate errors of HDF5 and of workers into errors that name the file or a remedy."""
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


def _check_memory(subject: Subject, num_workers: int) -> None:
    """Raise OptionError unless there is memory for batches."""
    batch = min(subject.batch_size, subject.reader.num_samples) * subject.sample_bytes
    needed = HELD_LOADERS * min(HELD_BATCHES * batch, HELD_BYTES + 2 * batch) + 3 * (1 + num_workers) * batch
    if needed > subject.memory_bytes:
        raise OptionError(
            f"batch_size is {subject.batch_size}, a batch of {human_bytes(batch)}: measuring holds about "
            f"{human_bytes(needed)} at a time, but {human_bytes(subject.memory_bytes)} are free: give a smaller "
            "batch_size"
        )
