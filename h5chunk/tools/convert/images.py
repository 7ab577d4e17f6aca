"""The steps of packing images into one file: what is settled first, the decoding, and the tables beside the data."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import h5chunk
from h5chunk.errors import OptionError, SampleError, SourceError
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.plan.permute import permutation
from h5chunk.sources.decode import ImageOptions
from h5chunk.sources.images import ImageSource, ShapeError
from h5chunk.sources.listing import Listing, list_images
from h5chunk.sources.manifest import list_manifest
from h5chunk.sources.splits import check_split_folders
from h5chunk.store.format import FORMAT_VERSION, GROUP, FieldSpec, FileSpec
from h5chunk.store.write.command_id import has_command_id, is_made_by
from h5chunk.store.write.csr import field_checksums
from h5chunk.store.write.fill import Filled, available_cores, fill
from h5chunk.store.write.filltask import Failure, FillJob, stamp_of_samples
from h5chunk.store.write.journal import key_of
from h5chunk.store.write.newfile import NewFile
from h5chunk.store.write.partfile import check_not_source
from h5chunk.tools.convert.resume import TaskLog, facts_of_all
from h5chunk.tools.progress import Progress, count_up

IMAGES = "images"
NAMES_AT_A_TIME = 65_536
PROBES = 24  # images decoded to estimate the time


@dataclass(frozen=True)
class Conversion:
    """All that is settled before the first sample is written."""

    source: ImageSource
    path: Path
    layout: Layout
    sample_shape: tuple[int, ...]
    order: np.ndarray
    options: dict[str, Any]
    num_workers: int
    skip: bool

    @property
    def listing(self) -> Listing:
        return self.source.listing

    def spec(self) -> FileSpec:
        """The file to write."""
        listing, layout, order = self.listing, self.layout, self.order
        images = FieldSpec(IMAGES, self.sample_shape, np.dtype(np.uint8))
        columns = [FieldSpec(name, (), values.dtype) for name, values in listing.columns.items()]
        ends = listing.names.offsets
        tables: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "source_index": ((len(order),), np.dtype(np.int64)),
            "source_name_ends": ((len(order),), np.dtype(np.int64)),
            "source_names": ((int((ends[order + 1] - ends[order]).sum()),), np.dtype(np.uint8)),
        }
        if listing.class_names:
            tables["class_names"] = ((len(listing.class_names),), _class_table(listing.class_names).dtype)
        for each in (images, *columns):
            tables[f"checksums/{each.name}"] = ((layout.num_chunks,), np.dtype(np.uint32))
        cache = layout.cache
        return FileSpec(
            num_samples=len(order),
            chunk_samples=layout.chunk_samples,
            fields=(images, *columns),
            tables=tables,
            attributes={
                "format_version": np.int64(FORMAT_VERSION),
                "h5chunk_version": h5chunk.__version__,
                "num_samples": np.int64(len(order)),
                "chunk_samples": np.int64(layout.chunk_samples),
                "window_chunks": np.int64(layout.window_chunks),
                "rdcc_nslots": np.int64(cache.nslots),
                "rdcc_nbytes": np.int64(cache.nbytes),
                "rdcc_w0": np.float64(cache.w0),
                "seed": np.uint64(self.options["seed"]),
                "shuffled": np.uint8(self.options["shuffle"]),
                "options": json.dumps(self.options, sort_keys=True),
            },
            field_attributes={IMAGES: {"axes": self.source.options.layout.upper()}},
        )

    def key(self, num_files: int) -> str:
        """What stands for all that decides the bytes of the chunks but the bytes of the samples."""
        facts, blobs = self.source.identity()
        mine = {"shape": self.sample_shape, "chunk_samples": self.layout.chunk_samples, "files": num_files}
        mine |= {name: self.options[name] for name in ("seed", "shuffle")}
        return key_of({**facts_of_all(), **facts, **mine}, blobs)

    def command_id(self, num_files: int, stamp: int) -> str:
        """Identify the command: equal ones make equal files.

        Parameters
        ----------
        num_files : int
        stamp : int
            Of all samples: see `h5chunk.store.write.filltask.SourceStamp`.
        """
        columns = self.listing.columns
        facts = {"key": self.key(num_files), "options": self.options, "skip": self.skip, "stamp": stamp}
        facts |= {"classes": self.listing.class_names, "columns": {name: str(columns[name].dtype) for name in columns}}
        return key_of(facts, (values.tobytes() for values in columns.values()))

    def is_complete(self, num_files: int) -> bool:
        """Whether the output is there, and this command made it of the samples as they are now."""
        if not has_command_id(self.path):
            return False
        return is_made_by(self.path, self.command_id(num_files, stamp_of_samples(self.source, self.order)))

    def left_out(self, kept: np.ndarray) -> list[Failure]:
        """The samples that are not among those that were kept, and why, as reading them again shows."""
        failures, out = [], np.empty(self.sample_shape, np.uint8)
        with self.source.session():
            for row in np.flatnonzero(~np.isin(self.order, kept)).tolist():
                reason = "could not be used then, though it can be now"
                try:
                    self.source.read_into(int(self.order[row]), out)
                except SampleError as error:
                    reason = str(error)
                failures.append(Failure(row, reason, SampleError.__name__))
        return failures


def write_images(
    new: NewFile, job: Conversion, written: Callable[[int], None], log: TaskLog, number: int = 0
) -> tuple[Conversion, Filled]:
    """Write a whole file, but for its commit.

    Parameters
    ----------
    new : NewFile
    job : Conversion
    written : callable
        Told how many samples were written since the last call.
    log : TaskLog
    number : int
        Of the file in that.

    Returns
    -------
    Conversion
        With the samples that were not skipped.
    Filled
    """
    claims = log.claims(number)
    regions = new.reallocate(job.spec()) if claims else new.allocate(job.spec())
    chunks = FillJob(
        new.part, regions[IMAGES].offset, job.sample_shape, job.layout.chunk_samples, job.source, job.order
    )
    with new.flusher():
        filled = fill(chunks, job.num_workers, not job.skip, written, claims, log.adder(number))
    _check_failures(job, filled)
    left = _close_gaps(new, job, filled) if filled.failures else job
    _write_tables(new, left, filled.checksums)
    return left, filled


def count_written(total: int, progress: Progress | None) -> Callable[[int], None]:
    """What is told of samples as they are written, and tells of all of them."""
    written = count_up("convert", total, progress)
    written(0)
    return written


def prepare(
    *,
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    manifest: str | os.PathLike[str] | None,
    split_folders: str,
    chunk_samples: int | None,
    seed: int,
    shuffle: bool,
    workers: int | None,
    on_error: str,
    check: Callable[[Path], None],
    progress: Progress | None,
    **image_options: Any,
) -> Conversion:
    """Check the arguments of `convert`, and the output by ``check``; list the source, and settle layout and order."""
    options = ImageOptions(**image_options)
    path = Path(path)
    if not 0 <= seed < 1 << 64:
        raise OptionError(f"seed is {seed}: give a number from 0 to {(1 << 64) - 1}")
    if on_error not in ("fail", "skip"):
        raise OptionError(f"on_error is {on_error!r}: give fail or skip")
    if workers is not None and workers < 0:
        raise OptionError(f"workers is {workers}: give 0 (none but this process) or more")
    check_split_folders(split_folders)
    if manifest is not None and split_folders != "auto":
        raise OptionError(f"split_folders is {split_folders!r}, but a manifest has columns for that: leave it out")
    check_not_source(path, source, manifest)
    check(path)

    def found(count: int) -> None:
        if progress:
            progress("list", count, None)

    if manifest is None:
        listing = list_images(source, found, split_folders=split_folders)
        split_folders = "yes" if "split" in listing.columns else split_folders
    else:
        listing = list_manifest(manifest, source, found)
    images = ImageSource(listing, options)
    _, shape = images.first_shape(skip=on_error == "skip")
    layout = plan_layout(len(images), int(np.prod(shape)), chunk_samples)
    order = permutation(len(images), seed) if shuffle else np.arange(len(images), dtype=np.int64)
    asked = {
        "size": options.size,
        "fit": options.fit,
        "color": options.color,
        "layout": options.layout,
        "animated": options.animated,
        "seed": seed,
        "shuffle": shuffle,
        "split_folders": split_folders,
    }
    num_workers = available_cores() if workers is None else workers
    return Conversion(images, path, layout, shape, order, asked, num_workers, on_error == "skip")


def _check_failures(job: Conversion, filled: Filled) -> None:
    """Raise what failures mean."""
    total = len(job.order)
    if any(failure.kind == ShapeError.__name__ for failure in filled.failures):
        raise SourceError(job.source.disagreement(job.sample_shape))
    if filled.failures and not job.skip:
        first = filled.failures[0]
        raise SampleError(
            f"{job.source.name(int(job.order[first.row]))}: {first.reason} (to leave such images out: --on-error skip)"
        )
    if len(filled.failures) == total:
        first = filled.failures[0]
        name = job.source.name(int(job.order[first.row]))
        raise SourceError(f"none of the {total} images can be used, such as {name}: {first.reason}")


def _close_gaps(new: NewFile, job: Conversion, filled: Filled) -> Conversion:
    """Leave failed rows out: the last good rows take their places, and the file becomes one of fewer samples.

    Returns
    -------
    Conversion
        With the order and the layout that are left.
    """
    order = job.order.copy()
    failed = [failure.row for failure in filled.failures]
    num_samples = len(order) - len(failed)
    gaps = [row for row in failed if row < num_samples]
    behind = set(failed)
    movers = [row for row in range(num_samples, len(order)) if row not in behind]
    sample_bytes = job.layout.sample_bytes
    for gap, mover in zip(gaps, movers, strict=True):
        new.write_bytes(IMAGES, gap * sample_bytes, new.read(IMAGES, mover * sample_bytes, sample_bytes))
        order[gap] = order[mover]
    size = min(job.layout.chunk_samples, num_samples)
    num_chunks = -(-num_samples // size)
    window_chunks = min(job.layout.window_chunks, num_chunks)
    layout = replace(job.layout, num_samples=num_samples, chunk_samples=size, window_chunks=window_chunks)
    job = replace(job, layout=layout, order=order[:num_samples])
    new.replace_header(job.spec())
    rest = num_chunks * size - num_samples
    new.write_bytes(IMAGES, num_samples * sample_bytes, bytes(rest * sample_bytes))
    filled.checksums = filled.checksums[:num_chunks]
    for chunk in {*(gap // size for gap in gaps), num_chunks - 1}:
        chunk_bytes = size * sample_bytes
        filled.checksums[chunk] = zlib.crc32(new.read(IMAGES, chunk * chunk_bytes, chunk_bytes))
    return job


def _write_tables(new: NewFile, job: Conversion, image_checksums: np.ndarray) -> None:
    listing, order, size = job.listing, job.order, job.layout.chunk_samples
    new.write(f"{GROUP}/checksums/{IMAGES}", image_checksums)
    for name, values in listing.columns.items():
        rows = values[order]
        new.write(name, rows)
        new.write(f"{GROUP}/checksums/{name}", field_checksums(rows, size))
    new.write(f"{GROUP}/source_index", order)
    ends = np.cumsum(listing.names.offsets[order + 1] - listing.names.offsets[order])
    new.write(f"{GROUP}/source_name_ends", ends)
    for start in range(0, len(order), NAMES_AT_A_TIME):
        names = b"".join(listing.names[i] for i in order[start : start + NAMES_AT_A_TIME])
        new.write_bytes(f"{GROUP}/source_names", int(ends[start - 1]) if start else 0, names)
    if listing.class_names:
        new.write(f"{GROUP}/class_names", _class_table(listing.class_names))


def _class_table(class_names: list[str]) -> np.ndarray:
    return np.array([name.encode() for name in class_names], dtype="S")


def estimate_s(job: Conversion) -> float:
    """Seconds that the conversion will take, from decoding a few images spread over the source."""
    source = job.source
    probes = np.unique(np.linspace(0, len(source) - 1, PROBES).astype(np.int64))
    out = np.empty(job.sample_shape, np.uint8)
    started = time.perf_counter()
    with source.session():
        for index in probes:
            try:
                source.read_into(int(index), out)
            except ShapeError:
                raise SourceError(source.disagreement(job.sample_shape)) from None
            except SampleError as error:
                if not job.skip:
                    raise SampleError(f"{source.name(int(index))}: {error}") from None
    return (time.perf_counter() - started) / len(probes) * len(source) / max(1, min(job.num_workers, available_cores()))
