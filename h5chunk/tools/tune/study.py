"""The data that a tuner looks at: a file, what of it is measured, and samples of it laid out in other chunks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, H5ChunkError, OptionError, OutputError, printable
from h5chunk.store.format import FORMAT_VERSION, FieldSpec, FileSpec, create_file, opened
from h5chunk.store.guard.guard import Guard, Trusted
from h5chunk.store.read.direct import NotDirect, direct_field
from h5chunk.store.read.fields import Field
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.write.partfile import reason_of
from h5chunk.tools.measure.machine import available_bytes
from h5chunk.tools.model.settings import Facts, Setting
from h5chunk.tools.repack.fields import is_anndata
from h5chunk.tools.tune.clock import Budget

SAMPLE_BYTES = 384 << 20  # that are measured: the same samples as they lie and laid out anew
BATCH_BYTES = 4 * SAMPLE_BYTES  # of a batch: if it has more, a part of one is measured
SAMPLE_SHARE = 0.12  # of the budget, in which they are read
PIECE_BYTES = 32 << 20
DENSE_BYTES = 4  # of a number of a row made dense
MOST_GROUPS = 1 << 27  # samples whose labels are looked at
CODES = "codes"


@dataclass
class Study:
    """What is tuned.

    Attributes
    ----------
    reader : H5Reader
        Of the file that is measured: the source, or a sample of it.
    fields : mapping of str to str
        Datasets by name.
    facts : Facts
        Of the whole data.
    groups : (num_samples,) array or None
        What should be mixed, such as labels.
    folder : Path
        For samples that are laid out anew.
    num_measured : int
        The first samples, which figures are of.
    converted : bool
        False: the source, whose name is ``source``, is to be converted yet.
    anndata : bool
        AnnData wrote the file: it cannot be shuffled in place, nor have a group of ours.
    why_not_direct : str
    stored_share : float
        Stored bytes of the largest field over decoded ones.
    notes : list of str
    """

    reader: H5Reader
    fields: Mapping[str, str]
    facts: Facts
    groups: np.ndarray | None
    folder: Path
    num_measured: int
    converted: bool = True
    anndata: bool = False
    why_not_direct: str = ""
    stored_share: float = 1.0
    source: str = ""
    notes: list[str] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    made: dict[int, Path] = field(default_factory=dict)

    @property
    def matrix(self) -> bool:
        """Whether samples are rows of a sparse matrix."""
        return self.reader.matrix is not None

    def path_of(self, setting: Setting, budget: Budget) -> tuple[Path, Mapping[str, str], int]:
        """The file to measure a setting on, its fields, and how many of its samples."""
        if not setting.repack or self.matrix:
            return self.reader.path, self.fields, self.sample_count
        if setting.chunk_samples not in self.made:
            if not self.rows:
                self.rows = read_rows(self.reader, self.sample_count, budget)
            path = self.folder / f"chunks-{setting.chunk_samples}.h5"
            write_rows(path, self.rows, self.sample_count, setting.chunk_samples)
            self.made[setting.chunk_samples] = path
        fields = {name: f"f{number}" for number, name in enumerate(self.fields)}
        return self.made[setting.chunk_samples], fields, self.sample_count

    def note(self, text: str) -> None:
        """Say something, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def fits_memory(self) -> bool:
        """Whether the page cache can hold what is stored."""
        stored = self.facts.sample_bytes * self.facts.num_samples * self.stored_share
        return stored < available_bytes()

    @property
    def sample_count(self) -> int:
        """Samples that are measured: those in the page cache, as far as there is room for a second layout of them."""
        if self.facts.fixed and self.converted:
            return self.num_measured
        return min(self.num_measured, most_samples(self.facts.batch_size, self.facts.sample_bytes))


@contextmanager
def temporary_folder() -> Iterator[str]:
    """For samples that are laid out anew; it goes with them.

    Raises
    ------
    OutputError
        There is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="h5chunk-tune-", ignore_cleanup_errors=True)
    except OSError as error:
        raise OutputError(f"no temporary folder can be made: {error.strerror}: set TMPDIR") from None
    with made as folder:
        yield folder


def most_samples(batch_size: int, sample_bytes: int) -> int:
    """Samples that are laid out anew: a batch, if it is not very large, and more of small ones."""
    return max(1, SAMPLE_BYTES // sample_bytes, min(batch_size, BATCH_BYTES // sample_bytes))


def look_at_file(
    path: str | os.PathLike[str],
    fields: Mapping[str, str] | None,
    *,
    batch_size: int,
    group_by: str | None,
    folder: Path,
    trusted: Trusted = False,
) -> Study:
    """What is known of a file before anything is measured.

    Raises
    ------
    FileError, FieldError
        As `ChunkDataset`; it has no samples.
    OptionError
        ``group_by`` names nothing that could be groups.
    """
    from h5chunk.feed.dataset import ChunkDataset

    reader = H5Reader(path, fields, trusted=trusted)
    if not reader.num_samples:
        raise FieldError(f"{printable(path)}: has no samples: nothing can be tuned")
    sample_bytes = sum(each.grid.sample_bytes for each in reader.fields.values())
    if not sample_bytes:
        raise FieldError(f"{printable(path)}: its samples have no bytes: nothing can be tuned")
    why = _why_not_direct(reader)
    facts = Facts(
        grid=reader.main.grid,
        sample_bytes=sample_bytes,
        chunk_samples=reader.chunk_samples,
        batch_size=batch_size,
        window_chunks=ChunkDataset(path, fields=fields, trusted=trusted).window_chunks,
        shuffled=reader.header is not None and reader.header.shuffled,
        direct=not why,
        given_bytes=0 if reader.matrix is None else reader.matrix.num_columns * DENSE_BYTES,
        fixed=reader.matrix is not None,
        loads=all(each.dtype.kind != "S" for each in reader.fields.values()),
    )
    named = {name: each.dataset for name, each in reader.fields.items()}
    study = Study(reader, named, facts, None, folder, reader.num_samples, why_not_direct=why)
    with opened(path) as file:
        study.anndata = is_anndata(file)
    study.groups = _read_groups(study, group_by)
    if isinstance(reader.main, Field) and reader.main.grid.filtered:
        with opened(path) as file:
            dataset = file[reader.main.dataset]
            study.stored_share = dataset.id.get_storage_size() / max(1, dataset.nbytes)
    return study


def _why_not_direct(reader: H5Reader) -> str:
    """Why byte ranges cannot be read; empty if they can."""
    with opened(reader.path) as file:
        for name, each in reader.fields.items():
            try:
                if isinstance(each, Field) and each.dtype.kind != "S":
                    direct_field(reader.path, file, each)
            except NotDirect as reason:
                return f"field {name!r} cannot be read by byte ranges: {reason}"
    return ""


def _read_groups(study: Study, group_by: str | None) -> np.ndarray | None:
    """The field that says which samples are alike."""
    name = "labels" if group_by is None else group_by
    with opened(study.reader.path) as file:
        item, reason = _find_groups(study, file, study.fields.get(name, name))
        if reason:
            pass
        elif item is None:
            reason = "there is no such dataset"
        elif item.shape != (study.reader.num_samples,):
            reason = f"it has the shape {item.shape}, not one value a sample"
        elif item.dtype.kind not in "biuS":
            reason = f"it is of type {item.dtype}, not of whole numbers or fixed-length strings"
        elif study.reader.num_samples > MOST_GROUPS:
            reason = f"{study.reader.num_samples:,} samples are too many to look at"
        else:
            return item[:]
    if group_by is not None:
        raise OptionError(f"group_by is {group_by!r}: {reason}: name a dataset of one number or string a sample")
    study.notes.append(f"shuffle quality is unknown: {name!r}: {reason}; --group-by FIELD names another dataset")
    return None


def _find_groups(study: Study, file: h5py.File, name: str) -> tuple[h5py.Dataset | None, str]:
    """A dataset, if there is one, or why it is not looked at."""
    guard = Guard(study.reader.path, study.reader.trusted)
    try:
        item = guard.find(file, name)
        if isinstance(item, h5py.Group) and CODES in item:  # categories, as AnnData and pandas keep them
            name = f"{name}/{CODES}"
            item = guard.find(file, name)
        if not isinstance(item, h5py.Dataset):
            return None, ""
        guard.check_field(item, name)
        return item, ""
    except FieldError as error:
        return None, str(error).removeprefix(f"{printable(study.reader.path)}: ")


def read_rows(reader: H5Reader, num_samples: int, budget: Budget) -> dict[str, np.ndarray]:
    """Some of the first samples of each field, as many as the budget gives time for."""
    found: dict[str, np.ndarray] = {}
    sample_bytes = sum(each.grid.sample_bytes for each in reader.fields.values())
    wanted = min(num_samples, max(1, SAMPLE_BYTES // sample_bytes))
    until = budget.taken_s + SAMPLE_SHARE * budget.seconds
    with opened(reader.path) as file:
        for name, each in reader.fields.items():
            assert not isinstance(each, MatrixField)
            dataset = file[each.dataset]
            step = max(1, PIECE_BYTES // max(1, each.grid.sample_bytes))
            pieces = [dataset[0 : min(step, wanted)]]
            while sum(map(len, pieces)) < wanted and budget.taken_s < until:
                start = sum(map(len, pieces))
                pieces.append(dataset[start : min(start + step, wanted)])
            found[name] = np.ascontiguousarray(np.concatenate(pieces).astype(each.dtype, copy=False))
    return found


def write_rows(path: Path, rows: Mapping[str, np.ndarray], num_samples: int, chunk_samples: int) -> None:
    """A file of ours with these samples, again and again until there are enough: uncompressed bytes are read alike.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    try:
        _write_rows(path, rows, num_samples, chunk_samples)
    except (OSError, RuntimeError) as error:  # HDF5 has its own for a full disk
        path.unlink(missing_ok=True)
        if isinstance(error, H5ChunkError):
            raise
        raise OutputError(
            f"{printable(path.parent)}: samples cannot be laid out there: {reason_of(error)}: free some, or set TMPDIR"
        ) from None


def _write_rows(path: Path, rows: Mapping[str, np.ndarray], num_samples: int, chunk_samples: int) -> None:
    chunk_samples = min(chunk_samples, num_samples)
    specs = [FieldSpec(f"f{i}", each.shape[1:], each.dtype) for i, each in enumerate(rows.values())]
    numbers = {"num_samples": num_samples, "chunk_samples": chunk_samples, "window_chunks": 1}
    numbers |= {"format_version": FORMAT_VERSION, "rdcc_nslots": 1, "rdcc_nbytes": 0}
    attributes = {name: np.int64(value) for name, value in numbers.items()}
    attributes |= {"rdcc_w0": np.float64(0), "seed": np.uint64(0), "shuffled": np.uint8(1), "options": "{}"}
    spec = FileSpec(num_samples, chunk_samples, tuple(specs), {}, attributes | {"h5chunk_version": "tune"})
    regions = create_file(path, spec)
    with path.open("r+b") as file:
        for one, each in zip(specs, rows.values(), strict=True):
            flat = each.reshape(len(each), -1).view(np.uint8)
            for start in range(0, num_samples, len(flat)):
                some = flat[: num_samples - start]
                if some.size:
                    file.seek(regions[one.name].offset + start * one.sample_bytes)
                    file.write(some.data)
