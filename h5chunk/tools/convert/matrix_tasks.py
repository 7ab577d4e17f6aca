"""Tasks that write a matrix as shards; a shard has consecutive rows in the order of the output.

1. `read_part` writes the entries of a part of the source to a file, with ids mapped to indices of that part.
2. `scatter_part` maps these entries to their final rows and columns, and groups them by shard.
3. `survey_shard` counts the entries of a shard, and collects their values.
4. `write_shard` writes a shard, after the surveys of all shards have determined the columns and the storage of values.

A task writes uniquely named files, so that two attempts can run at the same time, and returns JSON values.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from h5chunk.errors import OutputError, printable
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.matrix.codes import Coding, FloatCoding, Storage
from h5chunk.store.read.files import shard_name
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import writing
from h5chunk.tools.convert.matrix_ids import OldIds
from h5chunk.tools.convert.matrix_read import SPOOL_SHARE, Records, SortedMatrix, uses_times
from h5chunk.tools.convert.matrix_select import select_rows, survey
from h5chunk.tools.convert.matrix_write import write_matrix
from h5chunk.tools.convert.options import MatrixOptions
from h5chunk.tools.shared import SharedFolder

ROWS, COLUMNS = "rows", "columns"
ORDER, DESTINATION = "order.npy", "destination.npy"  # source rows in their new order, and the inverse
Result = dict[str, Any]
Say = Callable[[int], None]


@dataclass(frozen=True)
class MatrixJob:
    """Input that all tasks share. The fields with defaults are set between the rounds of tasks."""

    folder: SharedFolder  # folder of temporary files
    name: str  # name of the shards, without their numbers
    source: SparseSource
    parts: Sequence[SparseSource]
    options: MatrixOptions
    coding: Coding | FloatCoding
    old: OldIds
    read: Sequence[Result] = ()
    num_rows: int = 0
    num_columns: int = 0
    chunk_samples: int = 0
    starts: Sequence[int] = ()  # first row of each shard, and the number of rows
    scattered: Sequence[Result] = ()
    storage: Storage | None = None
    columns: np.ndarray | None = field(default=None, repr=False)  # mask of the columns to write; None for all

    @property
    def record(self) -> np.dtype:
        """The dtype of an entry in temporary files."""
        return Records(self.source, self.options, self.coding, OldIds()).dtype

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    def load(self, name: str) -> np.ndarray:
        """Load an array in the folder as a memory map."""
        values: np.ndarray = np.load(self.folder.file(name), mmap_mode="r")
        return values

    def shard_name(self, number: int) -> str:
        return shard_name(self.name, number, self.num_shards)

    def ids(self, axis: str) -> np.ndarray | None:
        """Return the ids of all rows or columns of the source; None if the source has no ids."""
        return self.load(f"{axis}.npy") if self.source.has_ids else None

    def of_part(self, number: int, axis: str) -> str:
        """Return the name of the file with the array that maps the indices of a part to final indices."""
        return f"{axis}-{number}.npy"

    def entries(self, shard: int) -> Iterator[np.ndarray]:
        """Yield the entries of a shard in the order of the source."""
        for result in self.scattered:
            edges = self.load(f"{result['file']}.npy")
            for place in range(shard, len(edges) - 1, self.num_shards):
                first, last = int(edges[place]), int(edges[place + 1])
                if last > first:
                    yield read_records(self.folder, result["file"], self.record, first, last - first)


@contextmanager
def new_file(folder: SharedFolder, name: str) -> Iterator[tuple[IO[bytes], str]]:
    """Create a file with a unique name, and yield it and its name. All tasks see it after the context ends."""
    name = f"{name}-{uuid.uuid4().hex[:8]}"
    with (
        writing(folder.path / name),
        (folder.path / name).open("xb") as file,
    ):  # buffered: all is written, or an error raised
        yield file, name
        file.flush()
        os.fsync(file.fileno())
    folder.share(name)


def save(folder: SharedFolder, name: str, values: np.ndarray | Mapping[str, np.ndarray]) -> None:
    """Save one array or several named arrays to a file, which all tasks then see."""
    with writing(folder.path / name), (folder.path / name).open("wb") as file:
        if isinstance(values, np.ndarray):
            np.save(file, values.view(values.dtype.str))  # without metadata of HDF5's types
        else:
            np.savez(file, allow_pickle=False, **values)
        file.flush()
        os.fsync(file.fileno())
    folder.share(name)


def read_records(folder: SharedFolder, name: str, record: np.dtype, start: int, count: int) -> np.ndarray:
    with folder.part(name, start * record.itemsize, count * record.itemsize) as (path, offset):
        try:
            records = np.fromfile(path, record, count, offset=offset)
        except FileNotFoundError:
            records = np.empty(0, record)
    if len(records) != count:
        raise OutputError(
            f"{printable(path)}: is missing or truncated: remove {printable(folder.path)}, and convert again"
        )
    return records


def read_part(job: MatrixJob, number: int, say: Say) -> Result:
    """Write the entries of a part of the source, and its ids, to temporary files."""
    source = job.parts[number]
    records = Records(source, job.options, job.coding, job.old)
    with new_file(job.folder, f"read-{number}") as (file, name):
        for part in records.read(say):
            file.write(part.data)
    for axis, ids in zip((ROWS, COLUMNS), records.ids or (), strict=False):
        save(job.folder, f"{name}-{axis}.npy", ids.known)
    return {"file": name, "entries": records.num_read, "extent": records.extent}


def scatter_part(job: MatrixJob, number: int, say: Say) -> Result:
    """Map the entries of a part to their final rows and columns, and group them by shard."""
    read, edges = job.read[number], [np.zeros(1, np.int64)]
    at_once = max(1, job.options.memory_bytes // SPOOL_SHARE // 2 // job.record.itemsize)
    axes = (ROWS, COLUMNS) if job.source.has_ids else ()
    numbers = {axis: np.asarray(job.load(job.of_part(number, axis))) for axis in axes}
    new_rows = numbers[ROWS] if numbers else np.asarray(job.load(DESTINATION))
    starts = np.array(job.starts)
    with new_file(job.folder, f"entries-{number}") as (file, name):
        for start in range(0, read["entries"], at_once):
            count = min(at_once, read["entries"] - start)
            records = read_records(job.folder, read["file"], job.record, start, count)
            rows = new_rows[records["row"]]
            shards = np.searchsorted(starts, rows, "right") - 1
            records["row"] = rows - starts[shards]
            if numbers:
                records["column"] = numbers[COLUMNS][records["column"]]
            file.write(records[np.argsort(shards, kind="stable")].data)
            edges.append(edges[-1][-1] + np.cumsum(np.bincount(shards, minlength=job.num_shards)))
            say(start + len(records))
    save(job.folder, f"{name}.npy", np.concatenate(edges))
    return {"file": name, "entries": read["entries"]}


class ShardMatrix(SortedMatrix):
    """The sorted entries of one shard."""

    def __init__(self, job: MatrixJob, number: int, stack: ExitStack) -> None:
        first, last = job.starts[number : number + 2]
        self.source, self.options, self.coding = job.source, job.options, job.coding
        self._folder, self._stack = job.folder.path, stack
        self._uses_times = uses_times(job.source, job.options)
        self.old = job.old._replace(rows=None if job.old.rows is None else job.old.rows[first:last])
        self.row_ids, self.column_ids = job.ids(ROWS), job.ids(COLUMNS)
        self.order, self.num_rows, self.num_columns = job.load(ORDER)[first:last], job.num_rows, job.num_columns
        self.shard = {"shard": number, "shards": job.num_shards}
        self.chunk_samples, self.num_read = job.chunk_samples, 0
        self._open_sorter(last - first)
        for records in job.entries(number):
            times = records["time"] if self._uses_times else None
            self.entries.append(records["row"], records["column"], records["value"], times)
            self.num_read += len(records)
        self.entries.finish()


def survey_shard(job: MatrixJob, number: int, say: Say) -> Result:
    """Count the entries of a shard, and collect its values."""
    with ExitStack() as stack:
        matrix = ShardMatrix(job, number, stack)
        found = survey(matrix)
    name = f"survey-{number}-{uuid.uuid4().hex[:8]}.npz"
    counts = {} if found.column_entries is None else {COLUMNS: found.column_entries}
    save(job.folder, name, {"examples": found.values.examples(), **counts})
    say(matrix.num_read)
    return {"file": name, "entries": matrix.num_read}


def write_shard(job: MatrixJob, number: int, say: Say) -> Result:
    attempt, done = job.folder.path / f"shard-{number}-{uuid.uuid4().hex[:8]}.h5", 0
    assert job.storage is not None

    def written(num_entries: int) -> None:
        nonlocal done
        done += num_entries
        say(done)

    with ExitStack() as stack, NewFile(attempt, journal=Journal(attempt.with_suffix(".journal"))) as new:
        matrix = ShardMatrix(job, number, stack)
        selection = select_rows(matrix, survey(matrix), job.storage, job.columns)
        fields = write_matrix(new, selection, written)
        new.commit()
        return {
            "file": attempt.name,
            "bytes": attempt.stat().st_size,
            "entries": selection.num_entries,
            "counts": selection.counts,
            "fields": fields,
            "ranges": matrix.entries.num_ranges,
        }
