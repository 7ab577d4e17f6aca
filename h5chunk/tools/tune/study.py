"""The data under study: a file, its measured part, and samples of it in other chunks."""

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
from h5chunk.store.format.spec import FORMAT_VERSION, FieldSpec, FileSpec, create_file
from h5chunk.store.hdf5.child import limited_memory
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.write.part_file import reason_of
from h5chunk.tools.measure.checks import why_not_direct
from h5chunk.tools.model.settings import DataFacts, Setting
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.repack.fields import is_anndata

SAMPLE_BYTES = 384 << 20  # that are measured: the same samples as they lie and laid out anew
BATCH_BYTES = 4 * SAMPLE_BYTES  # of a batch: if it has more, a part of one is measured
SAMPLE_SHARE = 0.12  # of the budget, in which they are read
PIECE_BYTES = 32 << 20
DENSE_BYTES = 4  # of a number of a row made dense
MOST_GROUPS = 1 << 27  # samples whose labels are looked at
CODES = "codes"


@dataclass
class Study:
    """The data that is tuned, and facts about it.

    Attributes
    ----------
    reader : H5Reader
        Of the file that is measured: the source, or a sample of it.
    fields : mapping of str to str
        Datasets by name.
    facts : DataFacts
        Of the whole data.
    groups : (num_samples,) array or None
        Equal values mark similar samples, which should be mixed, such as labels.
    folder : Path
        For samples that are laid out anew.
    num_measured : int
        The first samples, which figures are of.
    source : str
        The source that is to be converted yet; empty if the file is what is tuned.
    anndata : bool
        Whether AnnData wrote the file: it cannot be shuffled in place, nor have a header of h5chunk.
    why_not_direct : str
    stored_share : float
        Stored bytes of the largest field over decoded ones.
    notes : list of str
    rows : dict of str to array
        Samples to lay out anew, by field, once they are read.
    asked : mapping of str to str, optional
        The fields, if they were named.
    """

    reader: H5Reader
    fields: Mapping[str, str]
    facts: DataFacts
    groups: np.ndarray | None
    folder: Path
    num_measured: int
    source: str = ""
    anndata: bool = False
    why_not_direct: str = ""
    stored_share: float = 1.0
    notes: list[str] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    asked: Mapping[str, str] | None = None
    _made: dict[int, Path] = field(default_factory=dict)

    @property
    def converted(self) -> bool:
        """Whether a file is tuned, rather than a source that is not converted yet."""
        return not self.source

    @property
    def matrix(self) -> bool:
        """Whether samples are rows of a sparse matrix."""
        return self.reader.matrix is not None

    def path_of(self, setting: Setting, budget: TimeBudget) -> tuple[Path, Mapping[str, str], int]:
        """The file to measure a setting on, its fields, and the number of samples to use.

        Raises
        ------
        OutputError
            Samples cannot be laid out anew.
        """
        if not setting.repack or self.matrix:
            return self.reader.path, self.fields, self.num_measured
        if setting.chunk_samples not in self._made:
            self.rows = self.rows or read_rows(self.reader, self.num_measured, budget)
            path = self.folder / f"chunks-{setting.chunk_samples}.h5"
            write_rows(path, self.rows, self.num_measured, setting.chunk_samples)
            self._made[setting.chunk_samples] = path
        fields = {name: f"f{number}" for number, name in enumerate(self.fields)}
        return self._made[setting.chunk_samples], fields, self.num_measured

    def note(self, text: str) -> None:
        """Add a note to the report, once."""
        if text not in self.notes:
            self.notes.append(text)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for samples in other chunks, and remove it in the end.

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
        yield Path(folder)


def most_samples(batch_size: int, sample_bytes: int) -> int:
    """Number of samples to measure: at least a batch unless it is very large, and more of small ones."""
    return max(1, SAMPLE_BYTES // sample_bytes, min(batch_size, BATCH_BYTES // sample_bytes))


def study_file(
    path: str | os.PathLike[str],
    fields: Mapping[str, str] | None,
    *,
    batch_size: int,
    group_by: str | None,
    folder: Path,
    trusted: bool = False,
) -> Study:
    """Inspect a file before anything is measured.

    Raises
    ------
    FileError, FieldError
        As `ChunkDataset`; it has no samples.
    OptionError
        ``group_by`` names nothing that could be groups.
    """
    from h5chunk.feed.dataset import ChunkDataset

    with limited_memory(Path(path)):
        reader = H5Reader(path, fields, trusted=trusted)
        reader.touch()
    sample_bytes = sum(each.grid.sample_bytes for each in reader.fields.values())
    if not reader.num_samples:
        raise FieldError(f"{printable(path)}: has no samples: nothing can be tuned")
    if not sample_bytes:
        raise FieldError(f"{printable(path)}: its samples have no bytes: nothing can be tuned")
    why = why_not_direct(reader)
    facts = DataFacts(
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
    num_measured = min(reader.num_samples, most_samples(batch_size, sample_bytes))
    study = Study(reader, named, facts, None, folder, num_measured, why_not_direct=why, asked=fields)
    study.groups = _read_groups(study, group_by)
    with opened(path) as file:
        study.anndata = is_anndata(file)
        if isinstance(reader.main, Field) and reader.main.grid.filtered:
            dataset = file[reader.main.dataset]
            study.stored_share = dataset.id.get_storage_size() / max(1, dataset.nbytes)
    return study


def _read_groups(study: Study, group_by: str | None) -> np.ndarray | None:
    """Read the dataset whose equal values mark similar samples."""
    name = "labels" if group_by is None else group_by
    with opened(study.reader.path) as file:
        item, reason = _find_groups(study, file, study.fields.get(name, name))
        if item is not None and not reason:
            return item[:]
    if group_by is not None:
        raise OptionError(f"group_by is {group_by!r}: {reason}: name a dataset of one number or string a sample")
    study.note(f"shuffle quality is unknown: {name!r}: {reason}; --group-by FIELD names another dataset")
    return None


def _find_groups(study: Study, file: h5py.File, name: str) -> tuple[h5py.Dataset | None, str]:
    """Find a dataset, and the reason why it cannot mark groups of samples, or an empty string."""
    guard, num_samples = Guard(study.reader.path, study.reader.trusted), study.reader.num_samples
    try:
        item = guard.find(file, name)
        if isinstance(item, h5py.Group) and CODES in item:  # categories, as AnnData and pandas keep them
            name = f"{name}/{CODES}"
            item = guard.find(file, name)
        if not isinstance(item, h5py.Dataset):
            return None, "there is no such dataset"
        guard.check_field(item, name)
    except FieldError as error:
        return None, str(error).removeprefix(f"{printable(study.reader.path)}: ")
    if item.shape != (num_samples,):
        return item, f"it has the shape {item.shape}, not one value a sample"
    if item.dtype.kind not in "biuS":
        return item, f"it is of type {item.dtype}, not of whole numbers or fixed-length strings"
    return item, f"{num_samples:,} samples are too many to look at" if num_samples > MOST_GROUPS else ""


def read_rows(reader: H5Reader, num_samples: int, budget: TimeBudget) -> dict[str, np.ndarray]:
    """Read the first samples of each field, as many as the budget gives time for."""
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
    """Write an h5chunk file with these samples, again and again until there are enough.

    The bytes of uncompressed samples do not matter: all are read alike.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    try:
        _write_rows(path, rows, num_samples, min(chunk_samples, num_samples))
    except (OSError, RuntimeError) as error:  # HDF5 has its own for a full disk
        path.unlink(missing_ok=True)
        if isinstance(error, H5ChunkError):
            raise
        raise OutputError(
            f"{printable(path.parent)}: samples cannot be laid out there: {reason_of(error)}: free some, or set TMPDIR"
        ) from None


def _write_rows(path: Path, rows: Mapping[str, np.ndarray], num_samples: int, chunk_samples: int) -> None:
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
