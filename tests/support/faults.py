"""Change h5chunk where no file or signal can: constants that small data does not reach, and calls that fail.

Each name of h5chunk that several tests replace is written here, once.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from h5chunk.errors import FileError
from h5chunk.store.read.field_readers import field_readers

CONSTANTS = {
    "ahead_bytes": "plan.slots.AHEAD_BYTES",
    "block_samples": "tools.model.clustering.BLOCK_SAMPLES",
    "can_fork": "store.write.workers.CAN_FORK",
    "compared_bytes": "store.hdf5.chunk_table.COMPARED_BYTES",
    "decoded_part_bytes": "store.read.engine.PART_BYTES",
    "decoding_bytes": "feed.source.DECODING_BYTES",
    "fewest_numbers": "transforms.compiled.FEWEST_NUMBERS",
    "flush_interval_s": "store.write.new_file.FLUSH_INTERVAL_S",
    "free_bytes": "sources.matrix.numpy.FREE_BYTES",
    "idle_s": "store.hdf5.child.IDLE_S",
    "image_chunk_bytes": "store.write.any_size.CHUNK_BYTES",
    "index_chunk_bytes": "plan.csr.INDEX_CHUNK_BYTES",
    "kept_chunks": "store.read.samples.KEPT_BLOCKS",
    "least_filtered_bytes": "tools.repack.plan.MIN_FILTERED_BYTES",
    "least_vector_bytes": "store.rewrite.shuffle.MIN_VECTOR_BYTES",
    "least_write_bytes": "plan.repack.MIN_WRITE_BYTES",
    "look_s": "store.hdf5.child.LOOK_S",
    "loop_s": "store.hdf5.child.LOOP_S",
    "max_decoded_bytes": "store.read.stored.MAX_DECODED_BYTES",
    "max_file_bytes": "sources.container.MAX_FILE_BYTES",
    "max_line_bytes": "sources.matrix.text.MAX_LINE_BYTES",
    "max_open_bytes": "plan.order.MAX_OPEN_BYTES",
    "max_table": "tools.model.clustering.MAX_TABLE",
    "min_cells": "sources.matrix.numpy.MIN_CELLS",
    "min_memory_bytes": "plan.repack.MIN_MEMORY_BYTES",
    "numbers_at_a_time": "store.hdf5.chunk_table.NUMBERS_AT_A_TIME",
    "open_windows_bytes": "plan.layout.OPEN_WINDOWS_BYTES",
    "part_bytes": "store.hdf5.ranges.PART_BYTES",
    "probe_s": "tools.convert.matrix.PROBE_S",
    "quick_bytes": "feed.read_pool.QUICK_BYTES",
    "quick_chunks": "tools.verify.verify.QUICK_CHUNKS",
    "repacked_index_chunk_bytes": "tools.repack.fields.INDEX_CHUNK_BYTES",
    "run_bytes": "store.hdf5.ranges.RUN_BYTES",
    "scanned_part_bytes": "store.read.scan.PART_BYTES",
    "sent_bytes": "store.write.workers.SENT_BYTES",
    "slack_bytes": "store.hdf5.guard.SLACK_BYTES",
    "stall_s": "store.write.workers.STALL_S",
    "step_bytes": "plan.repack.STEP_BYTES",
    "table_bytes": "store.rewrite.raw_rows.TABLE_BYTES",
    "task_samples": "store.write.fill.TASK_SAMPLES",
    "together_bytes": "feed.budget.TOGETHER_BYTES",
    "whole_bytes": "store.read.field_readers.WHOLE_BYTES",
    "whole_row_bytes": "store.read.field_readers.WHOLE_ROW_BYTES",
}
CALLS = {
    "decode chunk": "store.hdf5.codecs.ChunkDecoder.decode",  # in Python's threads: take the fixture python_threads
    "begin slot": "feed.slots.CpuSlot.begin",
    "load window": "feed.read_pool.ReadPool.load",
    "make slot": "feed.slots.CpuSlot.__init__",
    "read image": "sources.images.ImageSource.read_into",
    "read part": "store.hdf5.ranges.VectorTask.__call__",  # of Python's threads: take the fixture python_threads
    "read through HDF5": "store.read.through_hdf5.ThroughHdf5.fill",
    "sync folder": "store.write.output.sync_folder",
    "touch file": "store.read.files.check_metadata",
    "wait for window": "feed.read_pool.WindowRead.wait",
}


def small(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Give constants of h5chunk other values, by their names in small letters."""
    for name, value in values.items():
        monkeypatch.setattr(f"h5chunk.{CONSTANTS[name]}", value)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    before: Callable[..., Any] = lambda *_, **__: None,
    after: Callable[..., Any] = lambda *_: None,
    *,
    note: bool = True,
) -> list[tuple[Any, ...]]:
    """Note the arguments of each call of a function of h5chunk, named as in CALLS or by its path.

    ``before`` gets the arguments, and may fail in place of the call; ``after`` gets the result and the arguments.
    Without ``note`` nothing is kept alive.
    """
    path, _, name = f"h5chunk.{CALLS.get(call, call)}".rpartition(".")
    owner = pkgutil.resolve_name(path)
    function, calls = getattr(owner, name), []

    def watched(*arguments: Any, **options: Any) -> Any:
        if note:
            calls.append(arguments)
        before(*arguments, **options)
        result = function(*arguments, **options)
        after(result, *arguments)
        return result

    monkeypatch.setattr(owner, name, watched)
    return calls


def nth(number: int, action: Callable[[], Any]) -> Callable[..., None]:
    """Something for `watch` to do at one call only, counted from 1."""
    calls: list[int] = []

    def act(*_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            action()

    return act


def unreadable(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Let a row of the first field of data sets be unreadable; for windows, it is that of a frame."""

    class Unreadable:
        ranges: tuple[Any, ...] = ()

        def __call__(self, _: Any) -> None:
            raise FileError(f"row {row} is damaged")

    def opened(source: Any, *given: Any) -> Any:
        fields, why = field_readers(source, *given)
        field = next(iter(fields.values())).rows_field
        tasks = field.tasks

        def with_failure(rows: np.ndarray, *others: Any) -> Iterator[Any]:
            numbers = rows % source.epoch_samples if source.epoch_samples else rows
            yield from [Unreadable()] if row in numbers else tasks(rows, *others)

        field.tasks = with_failure  # type: ignore[method-assign]
        return fields, why

    monkeypatch.setattr("h5chunk.store.read.samples.Rows.reads_rows", False)
    for module in ("source", "sample_reader"):
        monkeypatch.setattr(f"h5chunk.feed.{module}.field_readers", opened)


def through_hdf5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let data sets read plain bytes, too, through HDF5's cache, as where a file needs it."""
    monkeypatch.setattr("h5chunk.feed.sample_reader.field_readers", lambda source: field_readers(source, "h5py"))


def as_worker(monkeypatch: pytest.MonkeyPatch, number: int, num_workers: int) -> None:
    """Let data sets read as in this worker of a DataLoader."""
    info = SimpleNamespace(id=number, num_workers=num_workers)
    monkeypatch.setattr("h5chunk.feed.sample_reader.get_worker_info", lambda: info)


def failure(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises this error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
