"""Write the samples of a source into a new file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import SampleError, ShapeError, SourceError
from h5chunk.plan.layout import Layout
from h5chunk.sample_source import SampleField, SampleSource
from h5chunk.store.format.header import header_attributes
from h5chunk.store.format.spec import CHECKSUMS, GROUP, IMAGE_TABLES, ArraySpec, FileSpec, field_spec
from h5chunk.store.write.any_size import AnySizeJob, FilledImages, any_size_specs
from h5chunk.store.write.fill import Failure, Filled, FillField, FillJob, TaskResult, fill
from h5chunk.store.write.new_file import NewFile, checksum_specs, column_specs, table_specs

LARGE_BYTES = 1 << 20  # a placeholder, large enough for HDF5 to align the dataset


@dataclass(frozen=True)
class SampleJob:
    """The plan of a file of samples, with all decisions that are made before the first sample is written."""

    path: Path  # the output
    source: SampleSource
    order: np.ndarray  # (num_samples,) int64: the samples, in the order in which they are written
    layout: Layout
    options: Mapping[str, Any]  # options for the header, as JSON, including ``seed`` and ``shuffle``
    columns: Mapping[str, np.ndarray]  # columns of the source, in its order but with the dtypes of the file
    categories: Mapping[str, Sequence[str]]  # names of codes, by field, for the complete file
    num_workers: int
    skip: bool  # whether unreadable samples are left out
    types: Mapping[str, np.dtype] = field(default_factory=dict)  # dtypes in the file that differ from the source's
    num_bytes: int | None = None  # total size of images of any size; None before they were read

    @property
    def fields(self) -> dict[str, SampleField]:
        """The fields that are read sample by sample, the largest first."""
        fields = {
            name: replace(each, dtype=self.types.get(name, each.dtype)) for name, each in self.source.fields.items()
        }
        return dict(sorted(fields.items(), key=lambda item: -item[1].sample_bytes))

    @property
    def any_size(self) -> str:
        """The name of the field of images of any size, or an empty string."""
        return next((name for name, field_ in self.source.fields.items() if field_.form), "")

    @property
    def field_names(self) -> list[str]:
        """The names of all fields. Those that are in batches by default are first, in their order."""
        names = [*self.source.fields, *self.source.columns]
        return list(dict.fromkeys([*self.options.get("fields", names), *names]))

    def name(self, row: int) -> str:
        """Return the name of the sample in a row, for messages."""
        return self.source.name(int(self.order[row]))

    def sample_buffers(self) -> dict[str, np.ndarray]:
        """Return uninitialised arrays for the fields of one sample."""
        return {name: np.empty(field_.shape, field_.dtype) for name, field_ in self.fields.items()}

    def with_order(self, order: np.ndarray) -> SampleJob:
        """Return a copy of the job with only these samples, in this order."""
        size = min(self.layout.chunk_samples, len(order))
        layout = replace(self.layout, num_samples=len(order), chunk_samples=size)
        layout = replace(layout, window_chunks=min(layout.window_chunks, layout.num_chunks))
        return replace(self, order=order, layout=layout)

    def spec(self) -> FileSpec:
        """Return the specification of the file to write."""
        layout = self.layout
        size = layout.num_samples, layout.chunk_samples
        fields = column_specs(self.columns, *size)
        images: dict[str, ArraySpec] = {}
        axes: dict[str, dict[str, Any]] = {name: {"axes": each.axes} for name, each in self.fields.items() if each.axes}
        if self.any_size:
            name, field_ = self.any_size, self.source.fields[self.any_size]
            num_bytes = len(self.order) * field_.sample_bytes if self.num_bytes is None else self.num_bytes
            images = any_size_specs(name, layout.num_samples, num_bytes)
            axes[name] = {"form": field_.form, "channels": np.uint8(1 if self.options.get("color") == "gray" else 3)}
        else:
            fields = {name: field_spec(*size, each.shape, each.dtype) for name, each in self.fields.items()} | fields
        header = header_attributes(
            num_samples=layout.num_samples,
            chunk_samples=layout.chunk_samples,
            window_chunks=layout.window_chunks,
            cache=layout.cache,
            seed=self.options["seed"],
            shuffled=self.options["shuffle"],
            options=self.options,
        )
        datasets = images | fields | self._table_specs() | checksum_specs(fields, layout.num_chunks)
        return FileSpec(datasets, {**axes, GROUP: header})

    def _table_specs(self) -> dict[str, ArraySpec]:
        each_sample = ArraySpec((self.layout.num_samples,), np.dtype(np.int64))
        specs = {f"{GROUP}/source_index": each_sample}
        if self.source.names is not None:
            num_bytes = int(self._name_lengths().sum())
            specs[f"{GROUP}/source_name_ends"] = each_sample
            specs[f"{GROUP}/source_names"] = ArraySpec((num_bytes,), np.dtype(np.uint8))
        return specs | table_specs(self.category_tables())

    def _name_lengths(self) -> np.ndarray:
        assert self.source.names is not None
        offsets = self.source.names.offsets
        return offsets[self.order + 1] - offsets[self.order]

    def category_tables(self) -> dict[str, np.ndarray]:
        """Return the tables of class names and other categories, by path below ``/h5chunk``."""
        return {
            "class_names" if name == "labels" else f"categories/{name}": np.array([n.encode() for n in names], "S")
            for name, names in self.categories.items()
        }

    def index_tables(self) -> dict[str, np.ndarray]:
        """Return the tables of the samples' indices and names in their sources, by path below ``/h5chunk``."""
        tables = {"source_index": self.order}
        if self.source.names is not None:
            names = bytearray()
            for index in self.order:
                names += self.source.names[index]
            tables["source_name_ends"] = np.cumsum(self._name_lengths())
            tables["source_names"] = np.frombuffer(names, np.uint8)
        return tables


def write_samples(
    new: NewFile,
    job: SampleJob,
    *,
    claims: Mapping[int, TaskResult] | None = None,
    finished: Callable[[TaskResult], None] = lambda done: None,
    written: Callable[[int], None] = lambda num_samples: None,
) -> tuple[SampleJob, Filled]:
    """Allocate and write a complete file, without committing it.

    ``claims`` and ``finished`` are arguments of `h5chunk.store.write.fill.fill`. ``written`` is called with the number
    of samples written since the last call. Returns the job without skipped samples, and the results of all tasks.
    """
    name, common = job.any_size, (job.layout.chunk_samples, job.source, job.order)
    if name:
        new.begin(replace(job, num_bytes=LARGE_BYTES).spec(), f"{name}/data")
        fill_job: FillJob = AnySizeJob(new.part, (), *common, mean_bytes=job.source.fields[name].sample_bytes)
        filled: Filled = FilledImages(new, f"{name}/data", job.columns)
    else:
        regions = new.reallocate(job.spec(), job.fields) if claims else new.allocate(job.spec())
        fields = (FillField(name, regions[name].offset, each.shape, each.dtype) for name, each in job.fields.items())
        fill_job = FillJob(new.part, tuple(fields), *common)
        filled = Filled.of(fill_job)
    with new.flusher():
        fill(fill_job, job.num_workers, not job.skip, written, claims, finished, filled)
    check_failures(job, filled.failures)
    if isinstance(filled, FilledImages):
        job = _complete_images(new, job, filled)
    elif filled.failures:
        job = _close_gaps(new, job, filled)
    _write_tables(new, job, filled.checksums)
    return job, filled


def _complete_images(new: NewFile, job: SampleJob, filled: FilledImages) -> SampleJob:
    """Write the header, and the offsets and sizes of all images. Returns the job without skipped samples."""
    name, facts = job.any_size, filled.facts
    good = facts[:, 0] >= 0
    job = replace(job.with_order(job.order[good]), num_bytes=filled.num_bytes)
    new.complete(job.spec(), f"{name}/data", filled.num_bytes)
    filled.checksums[f"{name}/data"] = filled.target.finish()
    offsets, sizes = np.concatenate(([0], np.cumsum(facts[good, 0]))), facts[good, 1:].T
    for (table, kind), values in zip(IMAGE_TABLES.items(), (offsets, *sizes), strict=True):
        new.write_checked(f"{name}/{table}", values.astype(kind))
    return job


def check_failures(job: SampleJob, failures: Sequence[Failure]) -> None:
    """Raise the error of failed samples, unless ``job.skip`` is set and at least one sample succeeded."""
    odd = next((failure for failure in failures if failure.kind == ShapeError.__name__), None)
    if odd is not None:
        raise SourceError(job.source.disagreement())
    if not failures:
        return
    first = failures[0]
    reason = f"{job.name(first.row)}: {first.reason}"
    if not job.skip:
        raise SampleError(f"{reason} (to leave such samples out, use --on-error skip or on_error='skip')")
    if len(failures) == len(job.order):
        raise SourceError(f"none of the {len(failures)} samples can be used; the error of the first is: {reason}")


def _close_gaps(new: NewFile, job: SampleJob, filled: Filled) -> SampleJob:
    """Remove failed samples, and shorten the file.

    The last good samples are moved into the gaps, or all of them forwards if they are in the order of the source.
    """
    failed = {failure.row for failure in filled.failures}
    kept = [row for row in range(len(job.order)) if row not in failed]
    num_kept = len(kept)
    if (np.diff(job.order) > 0).all():
        gaps = [place for place, row in enumerate(kept) if place != row]
        movers = kept[num_kept - len(gaps) :]
    else:
        gaps, movers = [row for row in sorted(failed) if row < num_kept], [row for row in kept if row >= num_kept]
    order = job.order.copy()
    order[gaps] = order[movers]
    for name, field_ in job.fields.items():
        size = field_.sample_bytes
        for gap, mover in zip(gaps, movers, strict=True):
            new.write_bytes(name, gap * size, new.read(name, mover * size, size))
    job = job.with_order(order[:num_kept])
    new.reallocate(job.spec(), job.fields)
    size, num_chunks = job.layout.chunk_samples, job.layout.num_chunks
    changed = {*(gap // size for gap in gaps), num_chunks - 1}
    for name, field_ in job.fields.items():
        end = job.layout.num_samples * field_.sample_bytes
        chunk_bytes = size * field_.sample_bytes
        new.write_bytes(name, end, bytes(num_chunks * chunk_bytes - end))
        checksums = filled.checksums[name] = filled.checksums[name][:num_chunks]
        for chunk in changed:
            checksums[chunk] = zlib.crc32(new.read(name, chunk * chunk_bytes, chunk_bytes))
    return job


def _write_tables(new: NewFile, job: SampleJob, checksums: Mapping[str, np.ndarray]) -> None:
    """Write the checksums of the filled fields, the columns, and all tables."""
    for name, of_field in checksums.items():
        new.write(f"{CHECKSUMS}/{name}", of_field)
    for name, values in job.columns.items():
        new.write_checked(name, values[job.order], job.layout.chunk_samples * values.itemsize)
    for name, table in (job.index_tables() | job.category_tables()).items():
        new.write(f"{GROUP}/{name}", table)
