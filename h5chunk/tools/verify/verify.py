"""Check the structure of a file, every chunk against its checksum, and its tables for contradictions.

HDF5 files that h5chunk did not write have no checksums. Their compressed chunks are decoded, which detects errors that
the filters notice. Uncompressed chunks are only read, so a flipped bit in them is not detected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import (
    FieldError,
    FileError,
    H5ChunkError,
    OptionError,
    TrustError,
    UnsupportedError,
    count_text,
    printable,
    shown,
)
from h5chunk.paths import takes_paths
from h5chunk.store.format.header import CSR, MATRIX, Header, lost_fields, read_header
from h5chunk.store.format.spec import CHECKSUMS, GROUP
from h5chunk.store.hdf5.child import Say, in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import count_unwritten, is_stored_as
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import DAMAGES, opened, same_file
from h5chunk.store.read.fields import MATRIX_PARTS, find_matrix_groups
from h5chunk.store.read.files import (
    NUMBERED,
    Paths,
    list_files,
    missing_shards,
    open_reader,
    shard_numbers,
    single_file,
    wrong_counts,
)
from h5chunk.store.read.ragged import find_image_groups
from h5chunk.store.read.scan import CHECKSUM, CheckedDataset, Damage, OnValues
from h5chunk.tools.cluster import connected
from h5chunk.tools.progress import Progress
from h5chunk.tools.verify.report import Checked, FolderReport, VerifyReport
from h5chunk.tools.verify.tables import ImagesCheck, MatrixCheck, find_table_problems, without_path
from h5chunk.urls import name_of, url_of

QUICK_CHUNKS = 32  # chunks of a dataset that a quick check reads
# datasets that always have checksums
CHECKED = (
    "images",
    "images/data",
    "labels",
    "X",
    "X/indptr",
    "X/indices",
    "X/data",
)


@takes_paths("path")
def verify(
    path: Paths,
    *,
    quick: bool = False,
    repair: str | os.PathLike[str] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    accept: Sequence[str] = (),
    trusted: bool = False,
    progress: Progress | None = None,
    client: Any = None,
) -> VerifyReport | FolderReport:
    """Check an HDF5 file, or all files of a folder.

    Parameters
    ----------
    path : path or sequence of paths
        A file; or a folder, a pattern or a list of files to check. Shards ``NAME-00000-of-00012.h5`` must also be
        complete, and form one data set.
    quick : bool
        Check only 32 chunks of each dataset, evenly spaced from the first to the last.
    repair : path, optional
        The source that the file was converted from. Bad chunks of images and labels are rebuilt from it, and written if
        they match their checksums.
    manifest : path, optional
        The manifest that the conversion used, which is needed to repair fields whose values come from it.
    accept : sequence of str
        Fields whose values were changed on purpose. Their checksums are replaced by those of the present values, if
        the structure of the file is right. A field that was renamed is accepted under both names.
    trusted : bool
        Whether to follow links: see `h5chunk.store.hdf5.guard`. Data in virtual datasets and external storage is not
        checked; verify the files that contain it.
    progress : callable, optional
        Called as ``progress("verify", done_bytes, total_bytes)``.
    client : optional
        Dask cluster that checks the files of a folder: see `h5chunk.convert`.

    Returns
    -------
    VerifyReport or FolderReport
        ``report.ok`` is True if no damage was found.

    Raises
    ------
    FileError
        A single file cannot be opened or is inconsistent, or a folder contains no HDF5 files.
    SourceError
        The source for repairing cannot be used.
    """

    accept = (accept,) if isinstance(accept, str) else tuple(accept)
    if accept and (quick or repair is not None):
        raise OptionError("accept reads all chunks of the fields, and repair would change them back: use one of them")
    options = _VerifyOptions(quick, trusted, repair, manifest, accept)
    if (file := single_file(path)) is not None:
        return _check_file(file, options, progress)
    return _verify_folder(path, options, progress, client)


class _VerifyOptions(NamedTuple):
    quick: bool
    trusted: bool
    repair: str | os.PathLike[str] | None
    manifest: str | os.PathLike[str] | None
    accept: tuple[str, ...]


def _check_file(file: Path, options: _VerifyOptions, progress: Progress | None) -> VerifyReport:
    """Check a file, and repair it or accept its changes if requested."""
    report = _verify_file(file, options.quick, options.trusted, progress)
    if options.accept:
        return _accept(file, report, options, progress)
    if options.repair is None or not report.bad:
        return report
    from h5chunk.tools.verify.repair import repair_chunks

    repaired, bad = repair_chunks(file, list(report.bad), options.repair, options.manifest)
    if repaired and report.problems:  # the repair may have fixed some of them
        report = _verify_file(file, options.quick, options.trusted, progress)
    return replace(report, bad=tuple(bad), repaired=tuple(repaired))


def _accept(file: Path, report: VerifyReport, options: _VerifyOptions, progress: Progress | None) -> VerifyReport:
    """Accept the values of fields. Raises FileError, and changes nothing, if the structure of the file is wrong."""
    from h5chunk.tools.verify.accept import accept_changes

    label = printable(file)
    if not report.by_h5chunk:
        raise FileError(f"{label}: was not written by h5chunk, so it has no checksums: leave out accept")
    wrong = [problem for problem in report.problems if problem not in report.renamed]
    if wrong:
        raise FileError(
            f"{label}: accept replaces checksums only if the structure of the file is right, but {wrong[0]}: write "
            "valid values into the field as it is (file[NAME][...] = values). If the field was created anew, delete "
            f"{CHECKSUMS}/NAME, and write another file with h5chunk repack"
        )
    changes = accept_changes(file, options.accept)
    report = _verify_file(file, options.quick, options.trusted, progress)
    return replace(report, accepted=tuple(map(str, changes)))


def _verify_file(path: Path, quick: bool, trusted: bool, progress: Progress | None) -> VerifyReport:
    def show(done: tuple[Any, ...]) -> None:
        if progress:
            progress(*done)

    return in_child(path, _check, path, quick, trusted, on_message=show)


def _check(say: Say, path: Path, quick: bool, trusted: bool) -> VerifyReport:
    with ExitStack() as stack:
        with limited_memory(path, trusted):
            file = stack.enter_context(opened(path))
            file_check = _FileCheck(path, quick, read_header(file))
            file_check.survey(file, trusted)
        return file_check.run(say)


def _verify_folder(path: Paths, options: _VerifyOptions, progress: Progress | None, client: Any) -> FolderReport:
    """Check all files of a folder, in this process or on a cluster."""
    started = time.perf_counter()
    files = list_files(path)
    name = path if isinstance(path, (str, os.PathLike)) else files[0].parent
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    checked = [0] * len(files)  # bytes

    def say(number: int, done: int) -> None:
        checked[number] = done
        if progress is not None:
            progress("verify", sum(checked), sum(sizes))

    if client is None:
        reports = [_check_task((file, options), partial(say, number)) for number, file in enumerate(files)]
    else:
        tasks = {number: (url_of(file) or file.absolute(), options) for number, file in enumerate(files)}
        with connected(client) as cluster:
            found = dict(cluster.run(_check_task, tasks, say))
        reports = [replace(found[number], path=shown(file)) for number, file in enumerate(files)]
    names = [name_of(file) for file in files]
    missing = tuple(missing_shards(names))
    undamaged = [file for file, report in zip(files, reports, strict=True) if report.ok]
    wrong = [*wrong_counts(names), *_renamed(undamaged)]
    if not missing and len(undamaged) == len(files):
        wrong += _disagreements(files)
    return FolderReport(str(name), tuple(reports), missing, tuple(wrong), time.perf_counter() - started)


def _check_task(task: tuple[str | Path, _VerifyOptions], say: Callable[[int], None]) -> VerifyReport:
    """Check a file of a folder. If it cannot be opened, the error becomes the only problem of its report."""
    found, options = task
    file = list_files(found)[0] if isinstance(found, str) else found
    try:
        return _check_file(file, options, lambda stage, done, total: say(done))
    except FileError as error:
        size = file.stat().st_size if file.exists() else 0
        problems = (without_path(error, file),)
        return VerifyReport(shown(file), size, False, False, (), (), problems, (), seconds=0.0, read_bytes=0)


def _renamed(files: list[Path]) -> Iterator[str]:
    """Yield a message for each shard whose header contradicts the numbers in its file name."""
    for file in files:
        match = NUMBERED.fullmatch(name_of(file))
        if match is None:
            continue
        try:
            with opened(file) as shard:
                header = read_header(shard)
            options = header.options if header is not None else {}
            number, count = int(options["shard"]), int(options["shards"])
        except (H5ChunkError, ValueError, KeyError, TypeError):
            continue
        if (number, count) != (int(match[2]), int(match[3])):
            yield f"{printable(name_of(file))} was written as shard {number} of {count}, so the file was renamed"


def _disagreements(files: list[Path]) -> Iterator[str]:
    """Yield a message for each set of shards that cannot be read as one data set."""
    for name, count in sorted(shard_numbers(map(name_of, files))):
        matches = [(file, NUMBERED.fullmatch(name_of(file))) for file in files]
        shards = [file for file, match in matches if match and (match[1], int(match[3])) == (name, count)]
        if len(shards) < 2:
            continue
        try:
            open_reader(shards)
        except H5ChunkError as error:
            yield f"its shards do not form one data set: {error}"


class _FileCheck:
    """Check one file. First call `survey` to check its structure, then `run` to check its data."""

    def __init__(self, path: Path, quick: bool, header: Header | None) -> None:
        self._started = time.perf_counter()
        self._path, self._quick, self._header = path, quick, header
        self._datasets: list[tuple[CheckedDataset, np.ndarray]] = []  # with the indices of the chunks to read
        self._matrices: dict[str, MatrixCheck | ImagesCheck] = {}
        self._problems: list[str] = []
        self._renamed: list[str] = []  # messages about fields and checksums without a counterpart
        self._notes: list[str] = []

    def survey(self, file: h5py.File, trusted: bool) -> None:
        """Check the structure of the file, and list the datasets to read."""
        header, guard = self._header, Guard(self._path, trusted)
        datasets: dict[str, h5py.Dataset] = {}
        sparse: dict[str, h5py.Dataset] = {}  # mostly unwritten datasets, of which the written chunks are checked
        for name, item in guard.walk(file):
            if isinstance(item, FieldError):
                self._refuse(item)
                continue
            try:
                if not (header and name == f"{MATRIX}/data" and not item.id.get_storage_size()):  # has no values
                    guard.check_field(item, name)
                if not same_file(item, file):
                    self._notes.append(f"{name!r} is in another file; check that file too")
                    continue
                datasets[name] = item
            except FileError as error:
                self._refuse(error)
                if isinstance(error, UnsupportedError) and count_unwritten(item):
                    sparse[name] = item
        names = sorted(datasets)
        if header is not None:
            try:
                for problem in find_table_problems(file, header, names):
                    self._problems.append(problem)  # one by one, to keep them if an error follows
            except DAMAGES as error:
                self._problems.append(f"the group /{GROUP} cannot be read ({error})")
        data = [name for name in names if header is None or not name.startswith(f"{GROUP}/")]
        is_csr = header is not None and header.kind == CSR
        for prefix in find_matrix_groups(data):
            self._matrices[prefix] = MatrixCheck(file, self._path, prefix, is_csr and prefix == MATRIX)
        if header is not None:
            for prefix in find_image_groups(data):
                self._matrices[prefix] = ImagesCheck(file, self._path, prefix, header)
        for name in sorted([*data, *sparse]):
            self._add({**datasets, **sparse}, name)
        if header is not None:
            lost = lost_fields(file)
            messages = [f"there are checksums of {name!r}, but no such dataset: was it renamed?" for name in lost]
            self._problems += messages
            self._renamed += messages

    def _refuse(self, error: FileError) -> None:
        unread = isinstance(error, (TrustError, UnsupportedError))
        (self._notes if unread else self._problems).append(without_path(error, self._path))

    def _add(self, datasets: dict[str, h5py.Dataset], name: str) -> None:
        """Schedule a dataset and its checksums for reading, or add a note that explains why the dataset is not read."""
        dataset = datasets[name]
        if dataset.is_virtual or (dataset.chunks is None and dataset.external):
            self._notes.append(f"{name!r} has its values in other files; check those files too")
            return
        try:
            on_values = self._value_check(dataset, name)
            expected = self._read_checksums(datasets, name)
            checked = CheckedDataset(self._path, dataset, expected, on_values)
            if checked.unlisted:
                messages = self._notes if expected is None else self._problems
                messages.append(f"{name!r} is not checked ({checked.unlisted})")
                if not checked.num_unwritten:
                    return
            if expected is not None and len(expected) != checked.num_chunks:
                counted = count_text(checked.num_chunks, "chunk")
                self._problems.append(f"{name!r} has {counted}, but {len(expected)} checksums")
                checked = CheckedDataset(self._path, dataset, None, on_values)
        except UnsupportedError as error:  # such as a filter whose decoder is not installed
            self._refuse(error)
            return
        except DAMAGES as error:
            self._problems.append(without_path(error, self._path))
            return
        chunks = np.arange(checked.num_chunks) if expected is not None else checked.written
        if self._quick and len(chunks) > QUICK_CHUNKS:
            chunks = chunks[np.unique(np.linspace(0, len(chunks) - 1, QUICK_CHUNKS).astype(np.int64))]
            listed = f"{', '.join(map(str, chunks[:3]))}, ..., {chunks[-1]}"
            self._notes.append(f"{len(chunks)} of the {checked.num_chunks:,} chunks of {name!r} were read ({listed})")
        self._datasets.append((checked, chunks))

    def _value_check(self, dataset: h5py.Dataset, name: str) -> OnValues | None:
        """Return the function that checks the values of a dataset in a matrix; None for other datasets."""
        prefix, _, part = name.rpartition("/")
        matrix = self._matrices.get(prefix)
        if matrix is None or matrix.indptr is None or not is_stored_as(dataset, dataset.dtype):
            return None
        if isinstance(matrix, ImagesCheck):
            return None
        if part == "indices":
            return matrix.check_column_indices
        return matrix.check_entry_values if part == "data" and matrix.by_h5chunk else None

    def _read_checksums(self, datasets: dict[str, h5py.Dataset], name: str) -> np.ndarray | None:
        table = datasets.get(f"{CHECKSUMS}/{name}")
        if self._header is None:
            return None
        if table is None:
            if datasets[name].size and datasets[name].id.get_storage_size():  # unwritten data has no checksums
                is_field = name in CHECKED or name in self._header.fields
                message = f"{name!r} has no checksums"
                (self._problems if is_field else self._notes).append(message)
                self._renamed.append(message)
            return None
        if table.ndim != 1 or table.dtype != np.uint32:
            self._problems.append(f"the checksums of {name!r} are {table.dtype} {table.shape}, not a list of uint32")
            return None
        values: np.ndarray = table[()]
        return values

    def run(self, say: Say) -> VerifyReport:
        """Read and check all datasets."""
        total = sum(int(checked.table.sizes[chunks].sum()) for checked, chunks in self._datasets)
        done, bad = 0, []
        for checked, chunks in self._datasets:
            say(("verify", done, total))
            damages: list[Damage] = []
            for num_bytes, damaged in checked.check(chunks):
                done += num_bytes
                damages += damaged
                say(("verify", done, total))
            bad += [self._with_rows(damage) for damage in sorted(damages, key=lambda item: item.chunk)]
        fields = []
        for checked, chunks in self._datasets:
            pattern = self._header is not None and checked.name == f"{MATRIX}/data"  # stores no values
            known = pattern or checked.method == CHECKSUM
            unwritten = (0, "") if known else (checked.num_unwritten, checked.reads_as)
            num_chunks = max(len(checked.written), len(chunks))
            fields.append(Checked(checked.name, num_chunks, len(chunks), checked.method, *unwritten))
        for matrix in self._matrices.values():
            matrix.finish(not self._quick)
            self._problems += matrix.problems
            self._notes += matrix.notes
        return VerifyReport(
            path=shown(self._path),
            num_bytes=self._path.stat().st_size,
            by_h5chunk=self._header is not None,
            quick=self._quick,
            fields=tuple(fields),
            bad=tuple(bad),
            problems=tuple(self._problems),
            renamed=tuple(message for message in self._renamed if message in self._problems),
            notes=tuple(self._notes),
            seconds=time.perf_counter() - self._started,
            read_bytes=done,
        )

    def _with_rows(self, damage: Damage) -> Damage:
        """If the dataset is part of a matrix, replace the damaged elements by the rows that contain them."""
        prefix, _, part = damage.field.rpartition("/")
        matrix, entries = self._matrices.get(prefix), (damage.first_sample, damage.last_sample + 1)
        rows = matrix.rows(part, *entries) if matrix is not None and part in MATRIX_PARTS else None
        return damage if rows is None else replace(damage, first_sample=rows[0], last_sample=rows[1])
