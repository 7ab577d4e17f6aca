"""A file of images with more behind them: old chunks as they are, the last one filled up, new ones after it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from h5chunk.errors import SampleError, SourceError
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import Layout
from h5chunk.sources.images import ImageSource, ShapeError
from h5chunk.store.format import GROUP, FieldSpec, FileSpec
from h5chunk.store.write.appended import OldDataset, Told
from h5chunk.store.write.csr import field_checksums
from h5chunk.store.write.fill import Filled, fill
from h5chunk.store.write.filltask import FillJob
from h5chunk.store.write.newfile import NewFile
from h5chunk.tools.append.header import header_attributes, longer_layout, options_with
from h5chunk.tools.append.images import Addition
from h5chunk.tools.convert.images import IMAGES
from h5chunk.tools.convert.resume import Notify, TaskLog


@dataclass(frozen=True)
class Longer:
    """The file that comes of it.

    Attributes
    ----------
    addition : Addition
    layout : Layout
    cache : CacheSettings
    order : (num_added,) int64
        Of the new samples.
    source_index, name_ends : (num_samples,) int64
    names : bytes
    columns : dict of str to (num_samples,) array
    """

    addition: Addition
    layout: Layout
    cache: CacheSettings
    order: np.ndarray
    source_index: np.ndarray
    name_ends: np.ndarray
    names: bytes
    columns: dict[str, np.ndarray]

    def spec(self) -> FileSpec:
        """The file to write."""
        before, layout = self.addition.before, self.layout
        images = FieldSpec(IMAGES, before.sample_shape, np.dtype(np.uint8))
        columns = [FieldSpec(name, (), values.dtype) for name, values in self.columns.items()]
        tables = {name: (values.shape, values.dtype) for name, values in self._tables().items()}
        for each in (images, *columns):
            tables[f"checksums/{each.name}"] = ((layout.num_chunks,), np.dtype(np.uint32))
        old = before.old
        fields = [each.name for each in (images, *columns)]
        return FileSpec(
            num_samples=layout.num_samples,
            chunk_samples=layout.chunk_samples,
            fields=(images, *columns),
            tables=tables,
            attributes=old.attributes(GROUP) | self._attributes(),
            field_attributes={name: old.attributes(name) for name in ("/", *fields)},
        )

    def _attributes(self) -> dict[str, Any]:
        """What is another one than in the old file."""
        return header_attributes(
            self.layout.num_samples,
            self.layout.window_chunks,
            self.cache,
            options_with(
                self.addition.before.old,
                samples=len(self.order),
                first_index=self.addition.before.first_index(),
                seed=self.addition.job.options["seed"],
                shuffle=self.addition.job.options["shuffle"],
                fit=self.addition.fit,
            ),
        )

    def _tables(self) -> dict[str, np.ndarray]:
        tables = {
            "source_index": self.source_index,
            "source_name_ends": self.name_ends,
            "source_names": np.frombuffer(self.names, np.uint8),
        }
        if self.addition.classes.names:
            tables["class_names"] = np.array([name.encode() for name in self.addition.classes.names], "S")
        return tables

    def write_tables(self, new: NewFile, image_checksums: np.ndarray) -> None:
        """Write all but the images."""
        new.write(f"{GROUP}/checksums/{IMAGES}", image_checksums)
        for name, rows in self.columns.items():
            new.write(name, rows)
            new.write(f"{GROUP}/checksums/{name}", field_checksums(rows, self.layout.chunk_samples))
        for name, values in self._tables().items():
            new.write(f"{GROUP}/{name}", values)


def plan_longer(addition: Addition, order: np.ndarray) -> Longer:
    """The file with these of the new samples."""
    before, listing = addition.before, addition.job.listing
    old = before.old
    sample_bytes = int(np.prod(before.sample_shape))
    layout, cache = longer_layout(old.header, before.num_samples + len(order), sample_bytes)
    index, ends, names = (old.table(name) for name in ("source_index", "source_name_ends", "source_names"))
    assert index is not None and ends is not None and names is not None
    lengths = listing.names.offsets[order + 1] - listing.names.offsets[order]
    return Longer(
        addition,
        layout,
        cache,
        order,
        np.concatenate([index, order + before.first_index()]),
        np.concatenate([ends, len(names) + np.cumsum(lengths)]),
        names.tobytes() + b"".join(listing.names[i] for i in order),
        {
            name: np.concatenate([OldDataset(old, name).values(), values[order]])
            for name, values in addition.columns.items()
        },
    )


@dataclass
class _Behind:
    """A source whose samples -1, -2, ... are those of the file's last chunk, which new ones fill up.

    Attributes
    ----------
    source : ImageSource
    tail : (n, *sample_shape) uint8
    """

    source: ImageSource
    tail: np.ndarray

    def session(self) -> AbstractContextManager[None]:
        return self.source.session()

    def stamp(self, index: int) -> tuple[int, ...]:
        return () if index < 0 else self.source.stamp(index)

    def read_into(self, index: int, out: np.ndarray) -> tuple[str, ...]:
        if index >= 0:
            return self.source.read_into(index, out)
        out[...] = self.tail[-1 - index]
        return ()


def write_longer(
    new: NewFile, addition: Addition, carried: Told, written: Callable[[int], None], notify: Notify
) -> tuple[Longer, Filled]:
    """Write the whole file, but for its commit; what a journal knows of new samples is not done again.

    Returns
    -------
    Longer
        Without the samples that were skipped.
    Filled
        What came of the new samples; rows count from the first of them.

    Raises
    ------
    FileError
        The old file is damaged.
    SampleError, SourceError
        New samples cannot be used.
    OutputError
        The new file cannot be written.
    """
    before, job, first = addition.before, addition.job, addition.first_chunk
    longer = plan_longer(addition, job.order)
    size, sample_bytes = longer.layout.chunk_samples, longer.layout.sample_bytes
    new.journal.open(addition.key())
    log = TaskLog(new.journal, [(len(job.order), size)], notify)
    regions = new.reallocate(longer.spec()) if log.claims(0) else new.allocate(longer.spec())
    offset = regions[IMAGES].offset
    with new.flusher():
        before.images.carry(first, new.part, offset, carried)
        num_tail = before.num_samples - first * size
        tail = np.empty((0, *before.sample_shape), np.uint8)
        if num_tail:
            tail = before.images.stored(first).reshape(size, *before.sample_shape)[:num_tail]
        order = np.concatenate([-1 - np.arange(num_tail), job.order])
        start = offset + first * size * sample_bytes
        task = FillJob(new.part, start, before.sample_shape, size, _Behind(job.source, tail), order)
        filled = fill(task, job.num_workers, not job.skip, written, log.claims(0), log.adder(0))
    log.finish()
    filled.failures = [failure._replace(row=failure.row - num_tail) for failure in filled.failures]
    checksums = np.concatenate([before.images.checksums[:first], filled.checksums])
    if filled.failures:
        _check_failures(addition, filled)
        longer, checksums = _close_gaps(new, longer, [failure.row for failure in filled.failures], checksums)
    longer.write_tables(new, checksums)
    return longer, filled


def _check_failures(addition: Addition, filled: Filled) -> None:
    """Raise what failures mean."""
    job, first = addition.job, filled.failures[0]
    odd = next((failure for failure in filled.failures if failure.kind == ShapeError.__name__), None)
    if odd is not None:
        raise SourceError(f"{job.source.name(int(job.order[odd.row]))}: {odd.reason} in {addition.before.old.shown}")
    name = job.source.name(int(job.order[first.row]))
    if not job.skip:
        raise SampleError(f"{name}: {first.reason} (to leave such images out: --on-error skip)")
    if len(filled.failures) == len(job.order):
        raise SourceError(f"none of the {len(job.order)} images can be used, such as {name}: {first.reason}")


def _close_gaps(new: NewFile, longer: Longer, failed: list[int], checksums: np.ndarray) -> tuple[Longer, np.ndarray]:
    """Leave new samples that failed out: the last good ones take their places, and the file becomes a shorter one."""
    old, sample_bytes = longer.addition.before.num_samples, longer.layout.sample_bytes
    order = longer.order.copy()
    num_left, bad = len(order) - len(failed), set(failed)
    gaps = [row for row in failed if row < num_left]
    movers = [row for row in range(num_left, len(order)) if row not in bad]
    for gap, mover in zip(gaps, movers, strict=True):
        new.write_bytes(
            IMAGES, (old + gap) * sample_bytes, new.read(IMAGES, (old + mover) * sample_bytes, sample_bytes)
        )
        order[gap] = order[mover]
    shorter = plan_longer(longer.addition, order[:num_left])
    new.replace_header(shorter.spec())
    layout = shorter.layout
    padding = layout.num_chunks * layout.chunk_samples - layout.num_samples
    new.write_bytes(IMAGES, layout.num_samples * sample_bytes, bytes(padding * sample_bytes))
    checksums = checksums[: layout.num_chunks]
    for chunk in {*((old + gap) // layout.chunk_samples for gap in gaps), layout.num_chunks - 1}:
        data = new.read(IMAGES, chunk * layout.chunk_bytes, layout.chunk_bytes)
        checksums[chunk] = zlib.crc32(data)
    return shorter, checksums
