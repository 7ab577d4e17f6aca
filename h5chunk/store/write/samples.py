"""Write the samples of a source into a new file, which may begin with the samples of an old file.

`h5chunk convert` and `append` both use this module. Only `append` has old samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import SampleError, ShapeError, SourceError
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import Layout
from h5chunk.source import AnyImage, SampleField, SampleReader, SampleSource
from h5chunk.store.format.header import header_attributes
from h5chunk.store.format.spec import GROUP, ArraySpec, FileSpec, Region, field_spec
from h5chunk.store.write.any_size import AnySizeJob, BytesWriter, any_size_specs, fill_any_size, write_image_tables
from h5chunk.store.write.fill import Failure, Filled, FillField, FillJob, TaskResult, fill
from h5chunk.store.write.new_file import NewFile, checksum_specs, column_specs, table_specs, write_columns
from h5chunk.store.write.old_file import OldDataset, OldImages

LARGE_BYTES = 1 << 20  # a placeholder, large enough for HDF5 to align the dataset


@dataclass(frozen=True)
class OldSamples:
    """The samples of an old file, which are the first samples of the new file. By default there are none.

    `h5chunk.store.format.spec` describes the tables.
    """

    num_samples: int = 0
    label: str = ""  # the file's name, for messages
    fields: Mapping[str, OldDataset] = field(default_factory=dict)  # fields that are read sample by sample
    images: OldImages | None = None  # images of any size, instead of ``fields``
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # values of all other fields
    source_index: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    name_ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    names: bytes = b""
    attributes: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # attributes of objects, by path
    options: Mapping[str, Any] = field(default_factory=dict)  # options that the file records
    seed: int = 0
    cache: CacheSettings | None = None  # the cache that tune recommended

    @property
    def first_index(self) -> int:
        """The value of ``source_index`` for sample 0 of the new source."""
        return int(self.source_index.max()) + 1 if self.num_samples else 0

    def tail(self, chunk_samples: int) -> dict[str, np.ndarray]:
        """Return the samples after the last full chunk, by field. The dict is empty if there are none."""
        chunk, rest = divmod(self.num_samples, chunk_samples)
        if not rest:
            return {}
        return {name: dataset.values(chunk) for name, dataset in self.fields.items()}


@dataclass(frozen=True)
class SampleJob:
    """The plan of a file of samples, with all decisions that are made before the first sample is written."""

    path: Path  # the output
    source: SampleSource
    order: np.ndarray  # (num_new,) int64: the new samples, in the order in which they are written
    layout: Layout  # layout of the complete file
    options: Mapping[str, Any]  # options for the header, as JSON, including ``seed`` and ``shuffle``
    columns: Mapping[str, np.ndarray]  # columns of the source, in its order but with the dtypes of the file
    categories: Mapping[str, Sequence[str]]  # names of codes, by field, for the complete file
    num_workers: int
    skip: bool  # whether unreadable samples are left out
    num_bytes: int | None = None  # total size of images of any size; None before they were read
    old: OldSamples = field(default_factory=OldSamples)

    @property
    def fields(self) -> dict[str, SampleField]:
        """The fields that are read sample by sample, the largest first."""
        return dict(sorted(self.source.fields.items(), key=lambda item: -item[1].sample_bytes))

    @property
    def any_size(self) -> str:
        """The name of the field of images of any size, or an empty string."""
        return next((name for name, field_ in self.source.fields.items() if field_.form), "")

    @property
    def field_names(self) -> list[str]:
        """The names of all fields. Those that are in batches by default are first, in their order."""
        names = [*self.source.fields, *self.source.columns]
        return list(dict.fromkeys([*self.options.get("fields", names), *names]))

    @property
    def first_chunk(self) -> int:
        """The index of the first chunk that contains new samples."""
        return self.old.num_samples // self.layout.chunk_samples

    @property
    def copied_bytes(self) -> int:
        """Total size in bytes of the old samples that are copied unchanged."""
        if self.old.images is not None:
            return self.old.images.num_bytes
        size = self.first_chunk * self.layout.chunk_samples
        return size * sum(field_.sample_bytes for field_ in self.fields.values())

    def name(self, row: int) -> str:
        """Return the name of new sample ``row``, for messages."""
        return self.source.name(int(self.order[row]))

    def sample_buffers(self) -> dict[str, np.ndarray]:
        """Return uninitialised arrays for the fields of one sample."""
        return {name: np.empty(field_.shape, field_.dtype) for name, field_ in self.fields.items()}

    def with_order(self, order: np.ndarray) -> SampleJob:
        """Return a copy of the job with only these new samples, in this order."""
        num_samples = self.old.num_samples + len(order)
        layout = replace(
            self.layout, num_samples=num_samples, chunk_samples=min(self.layout.chunk_samples, num_samples)
        )
        layout = replace(layout, window_chunks=min(layout.window_chunks, layout.num_chunks))
        return replace(self, order=order, layout=layout)

    def spec(self) -> FileSpec:
        """Return the specification of the file to write."""
        layout, is_appended = self.layout, self.old.num_samples > 0
        size = layout.num_samples, layout.chunk_samples
        fields = column_specs(self.columns, *size)
        images: dict[str, ArraySpec] = {}
        axes: dict[str, dict[str, Any]] = {name: {"axes": each.axes} for name, each in self.fields.items() if each.axes}
        if self.any_size:
            images, axes[self.any_size] = self._any_size_specs()
        else:
            fields = {name: field_spec(*size, each.shape, each.dtype) for name, each in self.fields.items()} | fields
        options = self.options
        if is_appended:
            before = self.old.options.get("appended")
            record = {"samples": len(self.order), "first_index": self.old.first_index, **self.options}
            options = {**self.old.options, "appended": [*(before if isinstance(before, list) else []), record]}
        header = header_attributes(
            num_samples=layout.num_samples,
            chunk_samples=layout.chunk_samples,
            window_chunks=layout.window_chunks,
            cache=self.old.cache or layout.cache,
            seed=self.old.seed if is_appended else self.options["seed"],
            shuffled=self.options["shuffle"] and not is_appended,
            options=options,
        )
        old_attributes = {name: each for name, each in self.old.attributes.items() if name != GROUP}
        header = {**self.old.attributes.get(GROUP, {}), **header}
        datasets = images | fields | self._table_specs() | checksum_specs(fields, layout.num_chunks)
        return FileSpec(datasets, {**(old_attributes or axes), GROUP: header})

    def _any_size_specs(self) -> tuple[dict[str, ArraySpec], dict[str, Any]]:
        """Return the datasets of images of any size, and the attributes of their group."""
        name, num_samples = self.any_size, self.layout.num_samples
        field, num_bytes, old = self.source.fields[name], self.num_bytes, self.old.images
        if num_bytes is None:
            num_bytes = len(self.order) * field.sample_bytes + (0 if old is None else old.num_bytes)
        channels = np.uint8(1 if self.options.get("color") == "gray" else 3)
        return any_size_specs(name, num_samples, num_bytes), {"form": field.form, "channels": channels}

    def _table_specs(self) -> dict[str, ArraySpec]:
        each_sample = ArraySpec((self.layout.num_samples,), np.dtype(np.int64))
        specs = {f"{GROUP}/source_index": each_sample}
        if self.source.names is not None:
            num_bytes = len(self.old.names) + int(self._name_lengths().sum())
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
        tables = {"source_index": np.concatenate([self.old.source_index, self.order + self.old.first_index])}
        if self.source.names is not None:
            ends = np.cumsum(self._name_lengths()) + len(self.old.names)
            names = bytearray(self.old.names)
            for index in self.order:
                names += self.source.names[index]
            tables["source_name_ends"] = np.concatenate([self.old.name_ends, ends])
            tables["source_names"] = np.frombuffer(names, np.uint8)
        return tables


def write_samples(
    new: NewFile,
    job: SampleJob,
    *,
    claims: Mapping[int, TaskResult] | None = None,
    finished: Callable[[TaskResult], None] = lambda done: None,
    written: Callable[[int], None] = lambda num_samples: None,
    copied: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[SampleJob, Filled]:
    """Allocate and write a complete file, without committing it.

    ``claims`` and ``finished`` are arguments of `h5chunk.store.write.fill.fill`. ``written`` is called with the number
    of samples written since the last call, and ``copied`` with the number of old bytes copied since the last call.
    Returns the job without skipped samples, and the results of all tasks. In failures, row 0 is the first new sample.
    """
    if job.any_size:
        return _write_any_size(new, job, claims or {}, finished, written, copied)
    regions = new.reallocate(job.spec(), job.fields) if claims else new.allocate(job.spec())
    tail = job.old.tail(job.layout.chunk_samples)
    with new.flusher():
        for name, old in job.old.fields.items():
            old.copy_chunks(job.first_chunk, new.part, regions[name].offset, copied)
        filled = fill(_fill_job(new, job, regions, tail), job.num_workers, not job.skip, written, claims, finished)
    num_tail = job.old.num_samples - job.first_chunk * job.layout.chunk_samples
    filled.failures = [failure._replace(row=failure.row - num_tail) for failure in filled.failures]
    check_failures(job, filled.failures)
    for name, old in job.old.fields.items():
        filled.checksums[name] = np.concatenate([old.checksums[: job.first_chunk], filled.checksums[name]])
    if filled.failures:
        job = _close_gaps(new, job, filled)
    _write_tables(new, job, filled.checksums)
    return job, filled


def _write_any_size(
    new: NewFile,
    job: SampleJob,
    claims: Mapping[int, TaskResult],
    finished: Callable[[TaskResult], None],
    written: Callable[[int], None],
    copied: Callable[[int], None],
) -> tuple[SampleJob, Filled]:
    name, size, old = job.any_size, job.layout.chunk_samples, job.old.images
    new.begin(replace(job, num_bytes=LARGE_BYTES).spec(), f"{name}/data")
    mean = job.source.fields[name].sample_bytes
    images = AnySizeJob(new.part, (), size, job.source, job.order, mean, job.columns)
    writer = BytesWriter(new, f"{name}/data")
    with new.flusher():
        if old is not None:
            writer.copy_old(old, copied)
        filled = fill_any_size(writer, images, job.num_workers, not job.skip, written, claims, finished)
    check_failures(job, filled.failures)
    good = filled.facts[:, 0] >= 0
    facts = filled.facts[good] if old is None else np.concatenate([old.facts, filled.facts[good]])
    job = replace(job.with_order(job.order[good]), num_bytes=int(facts[:, 0].sum()))
    new.complete(job.spec(), f"{name}/data", job.num_bytes or 0)
    write_image_tables(new, name, facts, writer.finish())
    _write_tables(new, job, {})
    return job, filled


def _fill_job(new: NewFile, job: SampleJob, regions: Mapping[str, Region], tail: Mapping[str, np.ndarray]) -> FillJob:
    size = job.layout.chunk_samples
    fields = tuple(
        FillField(name, regions[name].offset + job.first_chunk * size * field_.sample_bytes, field_.shape, field_.dtype)
        for name, field_ in job.fields.items()
    )
    if not tail:
        return FillJob(new.part, fields, size, job.source, job.order)
    num_tail = len(next(iter(tail.values())))
    order = np.concatenate([-1 - np.arange(num_tail), job.order])
    return FillJob(new.part, fields, size, _TailedReader(job.source, tail), order)


@dataclass
class _TailedReader:
    """A reader of new samples that also reads the old samples in the old file's last, partly filled chunk.

    The old samples have the indices -1, -2, ...
    """

    source: SampleReader
    tail: Mapping[str, np.ndarray]

    def session(self) -> AbstractContextManager[None]:
        return self.source.session()

    @property
    def runs_user_code(self) -> bool:
        return self.source.runs_user_code

    def name(self, index: int) -> str:
        return "an old sample" if index < 0 else self.source.name(index)

    def stamp(self, index: int) -> tuple[int, ...]:
        return () if index < 0 else self.source.stamp(index)

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        if index >= 0:
            return self.source.read_into(index, out)
        for name, samples in self.tail.items():
            out[name][...] = samples[-1 - index]
        return ()

    def read_any(self, index: int) -> AnyImage:
        return self.source.read_any(index)


def check_failures(job: SampleJob, failures: Sequence[Failure]) -> None:
    """Raise the error of failed samples, unless ``job.skip`` is set and at least one sample succeeded."""
    odd = next((failure for failure in failures if failure.kind == ShapeError.__name__), None)
    if odd is not None:
        if job.old.num_samples:
            raise SourceError(f"{job.name(odd.row)}: {odd.reason} in {job.old.label}")
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
    order, first = job.order.copy(), job.old.num_samples
    order[gaps] = order[movers]
    for name, field_ in job.fields.items():
        size = field_.sample_bytes
        for gap, mover in zip(gaps, movers, strict=True):
            new.write_bytes(name, (first + gap) * size, new.read(name, (first + mover) * size, size))
    job = job.with_order(order[:num_kept])
    new.reallocate(job.spec(), job.fields)
    size, num_chunks = job.layout.chunk_samples, job.layout.num_chunks
    changed = {*((first + gap) // size for gap in gaps), num_chunks - 1}
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
        new.write(f"{GROUP}/checksums/{name}", of_field)
    columns = {
        name: np.concatenate([job.old.columns.get(name, values[:0]), values[job.order]])
        for name, values in job.columns.items()
    }
    write_columns(new, columns, job.layout.chunk_samples)
    for name, table in (job.index_tables() | job.category_tables()).items():
        new.write(f"{GROUP}/{name}", table)
