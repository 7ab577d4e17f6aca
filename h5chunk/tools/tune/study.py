"""The data to tune: a file, the number of samples to measure, and copies of these samples in other chunks."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, H5ChunkError, OptionError, OutputError, human_bytes, printable
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.header import header_attributes
from h5chunk.store.format.spec import GROUP, FileSpec, create_file, field_spec
from h5chunk.store.hdf5.child import limited_memory
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.files import SUFFIXES, check_metadata
from h5chunk.store.read.ragged import ImagesField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.write.part_file import reason_of
from h5chunk.tools.measure.checks import batch_bytes, check_samples, why_not_direct
from h5chunk.tools.measure.disk import FileReads
from h5chunk.tools.measure.machine import NotMeasured, available_bytes
from h5chunk.tools.model.clustering import Clustering, find_clustering, integer_groups
from h5chunk.tools.model.mixing import effective_batch
from h5chunk.tools.model.settings import DataFacts, Setting, order_of
from h5chunk.tools.repack.fields import is_anndata
from h5chunk.tools.report import shell_command

SAMPLE_BYTES = 384 << 20  # bytes of samples to measure, in the file's layout and in new layouts
BATCH_BYTES = 4 * SAMPLE_BYTES  # only a part of a larger batch is measured
SMALL_BYTES = 16 << 20  # smaller data is not worth a new file
PIECE_BYTES = 32 << 20  # bytes that are read from a field at a time
DENSE_BYTES = 4  # bytes of a value in a dense row
NO_DATASET = "no such dataset"
MAX_GROUPS = 1 << 27  # labels of more samples are not read
CODES = "codes"


@dataclass
class Study:
    """The data to tune, with facts about it and copies of samples in other chunks."""

    reader: H5Reader
    facts: DataFacts
    folder: Path  # folder for copies of samples in other chunks
    num_measured: int  # number of leading samples that are measured
    requested_fields: Mapping[str, str] | None = None  # the fields that the user named
    anndata: bool = False  # whether AnnData wrote the file, so that repack can neither shuffle it nor add a header
    stored_share: float = 1.0  # stored bytes of the largest field, divided by its decoded bytes
    groups: np.ndarray | None = None  # (num_samples,): equal values mark similar samples, such as labels
    notes: list[str] = field(default_factory=list)
    reading_s: float = math.inf  # time limit for reading the samples to copy
    _clusterings: dict[int, Clustering] = field(default_factory=dict)
    _rows: dict[str, np.ndarray] = field(default_factory=dict)
    _made: dict[int, Path] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, str]:
        """The dataset of each field, by the field's name."""
        return {name: field.dataset for name, field in self.reader.fields.items()}

    @property
    def is_ragged(self) -> bool:
        """True if samples are rows of a sparse matrix, or images of any size, so that chunks cannot be changed."""
        return self.reader.ragged is not None

    def clustering(self, chunk_samples: int) -> Clustering:
        """Return the similarity of the samples within a chunk, for chunks of this size."""
        assert self.groups is not None
        if chunk_samples not in self._clusterings:
            self._clusterings[chunk_samples] = find_clustering(self.groups, chunk_samples)
        return self._clusterings[chunk_samples]

    def effective_batch(self, setting: Setting) -> float | None:
        """Return the effective batch size of a setting; None if no field shows which samples are similar."""
        if self.groups is None:
            return None
        if setting.shuffle:
            return float(self.facts.batch_samples)
        return effective_batch(self.clustering(setting.chunk_samples), order_of(setting, self.facts))

    def path_of(self, setting: Setting) -> tuple[Path, Mapping[str, str]]:
        """Return the file on which a setting is measured, and its fields. Raise OutputError if it cannot be written."""
        if not setting.repack or self.is_ragged:
            return self.reader.path, self.fields
        if setting.chunk_samples not in self._made:
            self._rows = self._rows or read_rows(self)
            path = self.folder / f"chunks-{setting.chunk_samples}.h5"
            write_rows(path, self._rows, self.num_measured, setting.chunk_samples)
            self._made[setting.chunk_samples] = path
        return self._made[setting.chunk_samples], {name: f"f{number}" for number, name in enumerate(self.fields)}

    def note(self, text: str) -> None:
        """Add a note to the report, once."""
        if text not in self.notes:
            self.notes.append(text)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder for copies of samples. Raise OutputError if it cannot be created."""
    try:
        made = tempfile.TemporaryDirectory(prefix="h5chunk-tune-", ignore_cleanup_errors=True)
    except OSError as error:
        raise OutputError(
            f"no temporary folder can be created ({error.strerror}): set TMPDIR to a writable folder"
        ) from None
    with made as folder:
        yield Path(folder)


def samples_to_measure(batch_size: int, sample_bytes: int) -> int:
    """Return the number of samples to measure: those in SAMPLE_BYTES, or a larger batch of up to BATCH_BYTES."""
    return max(1, SAMPLE_BYTES // sample_bytes, min(batch_size, BATCH_BYTES // sample_bytes))


def check_converted(path: str | os.PathLike[str]) -> None:
    """Raise FileError, with the command to run, if the path is one that must be converted first, such as images."""
    path = Path(path)
    if not os.path.exists(path) or path.suffix.lower() in SUFFIXES or (path.is_file() and h5py.is_hdf5(path)):
        return  # the reader raises the error if it cannot be read
    if path.is_dir() and (found := sorted(file for file in path.glob("*.h5") if h5py.is_hdf5(file))):
        raise FileError(
            f"{printable(path)}: is a folder of HDF5 files, but tune accepts one file: use {printable(found[0])}, "
            "whose settings also suit similar files"
        )
    command = shell_command(["h5chunk", "convert", str(path), f"{path.stem or 'data'}.h5"])
    raise FileError(f"{printable(path)}: is not an HDF5 file: convert it first ({command}), and tune the result")


def study_file(
    path: str | os.PathLike[str],
    fields: Mapping[str, str] | None,
    *,
    batch_size: int,
    group_by: str | None,
    folder: Path,
    trusted: bool = False,
) -> Study:
    """Read the facts about a file that are needed before measuring. Raises the same errors as `h5chunk.tune`."""
    from h5chunk.feed.dataset import ChunkDataset

    with limited_memory(Path(path), trusted):
        reader = H5Reader(path, fields, trusted=trusted)
        check_metadata(reader)
    sample_bytes = check_samples(reader, "tuned")
    why = why_not_direct(reader)
    facts = DataFacts(
        grid=reader.main.grid,
        sample_bytes=sample_bytes,
        chunk_samples=reader.chunk_samples,
        batch_size=batch_size,
        window_chunks=ChunkDataset(path, fields=fields, trusted=trusted).window_chunks,
        shuffled=reader.header is not None and reader.header.shuffled,
        direct=not why,
        converted_bytes=_converted_bytes(reader, sample_bytes),
        has_fixed_chunks=reader.ragged is not None,
        loader_reads_all=all(field.dtype.kind != "S" for field in reader.fields.values()),
    )
    num_measured = min(reader.num_samples, samples_to_measure(batch_size, sample_bytes))
    study = Study(reader, facts, folder, num_measured, requested_fields=fields)
    with opened(path) as file:
        study.groups = _read_groups(study, file, group_by)
        study.anndata = is_anndata(file)
        if isinstance(reader.main, Field) and reader.main.grid.filtered:
            dataset = file[reader.main.dataset]
            study.stored_share = dataset.id.get_storage_size() / max(1, dataset.nbytes)
    return study


def _converted_bytes(reader: H5Reader, sample_bytes: int) -> int:
    """Return the number of bytes of a converted sample in a batch; 0 if samples are not converted."""
    if reader.matrix is not None:
        return reader.matrix.num_columns * DENSE_BYTES
    return 0 if reader.ragged is None else batch_bytes(reader, sample_bytes)


def no_gain_reason(study: Study) -> str:
    """Return the reason why no setting can make training faster; empty if a setting may."""
    facts = study.facts
    has_images = isinstance(study.reader.ragged, ImagesField)
    num_bytes = facts.num_samples * (facts.converted_bytes if has_images else facts.sample_bytes)
    if num_bytes < SMALL_BYTES:
        return f"its {human_bytes(num_bytes)} are too small to matter"
    return ""


def fill_page_cache(study: Study, seconds: float) -> None:
    """Read the samples to measure into the page cache. Reduce their number if that takes too long."""
    if study.reader.matrix is not None:
        return
    try:
        reads = FileReads(study.reader)
    except NotMeasured as reason:
        study.note(f"the file was not read into the page cache before measuring ({reason})")
        return
    with closing(reads):
        cached, _ = reads.fill_page_cache(available_cores(), seconds, available_bytes() // 2)
    study.num_measured = min(max(cached, study.facts.batch_size), study.num_measured)


def _read_groups(study: Study, file: h5py.File, group_by: str | None) -> np.ndarray | None:
    """Read the dataset in which similar samples have equal values.

    If there is no such dataset, add a note, or raise OptionError if the user named it.
    """
    labels = next((field for field in study.fields.values() if field.rpartition("/")[2] == "labels"), "labels")
    name = labels if group_by is None else group_by
    found = _find_groups(study, file, study.fields.get(name, name))
    if isinstance(found, h5py.Dataset):
        return integer_groups(found[:])
    if group_by is not None:
        raise OptionError(f"group_by is {group_by!r} ({found}): name a dataset with one number or string per sample")
    reason = "the file has no labels" if found == NO_DATASET else f"{name!r} cannot be used ({found})"
    study.note(f"shuffle quality is unknown, because {reason}; --group-by names a dataset that groups similar samples")
    return None


def _find_groups(study: Study, file: h5py.File, name: str) -> h5py.Dataset | str:
    """Return the dataset of this name, or the reason why it cannot be used to group samples."""
    guard, num_samples = Guard(study.reader.path, study.reader.trusted), study.reader.num_samples
    try:
        item = guard.find(file, name)
        if isinstance(item, h5py.Group) and CODES in item:  # categories, as in AnnData and pandas
            name = f"{name}/{CODES}"
            item = guard.find(file, name)
        if not isinstance(item, h5py.Dataset):
            return NO_DATASET
        guard.check_field(item, name)
    except FieldError as error:
        return str(error).removeprefix(f"{printable(study.reader.path)}: ")
    if item.shape != (num_samples,):
        return f"it has the shape {item.shape}, not one value per sample"
    if item.dtype.kind not in "biuS":
        return f"it has the type {item.dtype}, not integers or fixed-length strings"
    return item if num_samples <= MAX_GROUPS else f"{num_samples:,} samples are too many to read"


def read_rows(study: Study) -> dict[str, np.ndarray]:
    """Read the first samples of each field, as many as memory and time allow, as arrays (n, *sample_shape)."""
    found: dict[str, np.ndarray] = {}
    num_samples = min(study.num_measured, max(1, SAMPLE_BYTES // study.facts.sample_bytes))
    until = time.perf_counter() + study.reading_s
    with opened(study.reader.path) as file:
        for name, field in study.reader.fields.items():
            assert not isinstance(field, MatrixField)
            step = max(1, PIECE_BYTES // max(1, field.grid.sample_bytes))
            pieces: list[np.ndarray] = []
            for start in range(0, num_samples, step):
                if pieces and time.perf_counter() >= until:
                    break
                pieces.append(file[field.dataset][start : min(start + step, num_samples)])
            found[name] = np.ascontiguousarray(np.concatenate(pieces).astype(field.dtype, copy=False))
    return found


def write_rows(path: Path, rows: Mapping[str, np.ndarray], num_samples: int, chunk_samples: int) -> None:
    """Write an h5chunk file of ``num_samples`` that repeats the samples in ``rows``. Raise OutputError if that fails.

    Repeated samples suffice for measuring, because the time to read uncompressed samples does not depend on their
    values.
    """
    chunk_samples = min(chunk_samples, num_samples)
    fields = {f"f{number}": values for number, values in enumerate(rows.values())}
    specs = {
        name: field_spec(num_samples, chunk_samples, values.shape[1:], values.dtype) for name, values in fields.items()
    }
    numbers = {"num_samples": num_samples, "chunk_samples": chunk_samples, "window_chunks": 1}
    attributes = header_attributes(cache=CacheSettings(1, 0), options={}, kind="", seed=0, shuffled=1, **numbers)
    try:
        regions = create_file(path, FileSpec(specs, {GROUP: attributes}))
        with path.open("r+b") as file:
            for name, values in fields.items():
                flat = values.reshape(len(values), -1).view(np.uint8)
                for start in range(0, num_samples if flat.size else 0, len(flat)):
                    file.seek(regions[name].offset + start * flat.shape[1])
                    file.write(flat[: num_samples - start].data)
    except (OSError, RuntimeError) as error:  # HDF5 raises its own error on a full disk
        path.unlink(missing_ok=True)
        if isinstance(error, H5ChunkError):
            raise
        raise OutputError(
            f"{printable(path.parent)}: samples cannot be copied to this folder ({reason_of(error)}): free space, or "
            "set TMPDIR"
        ) from None
