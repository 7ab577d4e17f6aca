"""Check the structure of a file, every chunk against its checksum, and its tables for contradictions.

Other HDF5 files have no checksums: then every chunk is decoded, which shows what a filter can notice, and plain
bytes are only read. A bit that flipped in those cannot be seen by anybody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, TrustError, UnsupportedError, printable
from h5chunk.machine import available_cores
from h5chunk.store.format.header import Header, read_header
from h5chunk.store.format.matrix import CSR, MATRIX
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import count_unwritten
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.library import is_stored_as
from h5chunk.store.hdf5.open import DAMAGES, opened
from h5chunk.store.hdf5.ranges import open_descriptor
from h5chunk.store.read.fields import MATRIX_PARTS
from h5chunk.store.read.files import Paths, list_files
from h5chunk.store.read.scan import CHECKSUM, MEMORY_BYTES, CheckedDataset, Damage, Look, check_parts
from h5chunk.tools.progress import Progress
from h5chunk.tools.verify.folder import verify_folder
from h5chunk.tools.verify.report import BadChunk, Checked, FolderReport, VerifyReport
from h5chunk.tools.verify.tables import MatrixCheck, find_matrices, look_at_tables

QUICK_CHUNKS = 32  # of each dataset
MAX_THREADS = 8
CHECKSUMS = f"{GROUP}/checksums/"
OURS = ("images", "labels", "X", "X/indptr", "X/indices", "X/data")


def verify(
    path: Paths,
    *,
    quick: bool = False,
    repair: str | os.PathLike[str] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    trusted: bool = False,
    progress: Progress | None = None,
) -> VerifyReport | FolderReport:
    """Check an HDF5 file, or all files of a folder.

    Parameters
    ----------
    path : path or sequence of paths
        Of a folder, a pattern or a list, all files are checked; of shards ``NAME-00000-of-00012.h5`` also whether any
        is missing, and whether they can be read as one.
    quick : bool
        Of each dataset look at 32 chunks only, evenly spaced from the first to the last.
    repair : path, optional
        What the file was converted from: bad chunks of images and labels are written anew from it, where that gives
        the bytes that the checksum says.
    manifest : path, optional
        The manifest that it was converted with; to repair the fields that came from it.
    trusted : bool
        Whether links are followed, see `h5chunk.store.hdf5.guard`. Views and external storage are looked at where they
        lie, not here, in any case.
    progress : callable, optional
        Called as ``progress("verify", done_bytes, total_bytes)``.

    Returns
    -------
    VerifyReport or FolderReport
        ``report.ok`` says whether anything is wrong.

    Raises
    ------
    FileError
        It cannot be opened, or what it says of itself cannot be; or there is no file in the folder.
    SourceError
        What to repair from cannot be used.
    """

    def check(file: Path, progress: Progress | None) -> VerifyReport:
        return _verify_file(file, quick, repair, manifest, trusted, progress)

    if isinstance(path, (str, os.PathLike)) and (Path(path).is_file() or list_files(path) == [Path(path)]):
        return check(Path(path), progress)
    return verify_folder(path, check, progress)


def _verify_file(
    path: Path,
    quick: bool,
    repair: str | os.PathLike[str] | None,
    manifest: str | os.PathLike[str] | None,
    trusted: bool,
    progress: Progress | None,
) -> VerifyReport:

    def heard(told: tuple[str, int, int]) -> None:
        if progress:
            progress(*told)

    found = in_child(lambda say: _check_file(path, quick, trusted, say), lambda: printable(path), heard)
    if repair is None or not found.bad:
        return found
    from h5chunk.tools.verify.repair import repair_chunks

    repaired, bad = repair_chunks(path, list(found.bad), repair, manifest)
    if repaired and found.problems:  # some may be gone
        found = _verify_file(path, quick, None, None, trusted, progress)
    return replace(found, bad=tuple(bad), repaired=tuple(repaired))


def _check_file(path: Path, quick: bool, trusted: bool, say: Callable[[tuple[str, int, int]], None]) -> VerifyReport:
    started = time.perf_counter()
    with ExitStack() as stack:
        with limited_memory(path):
            file = stack.enter_context(opened(path))
            job = _survey(file, path, trusted, quick)
        read_bytes = _check_all(job, say)
        for matrix in job.matrices.values():
            matrix.finish(not quick)
            job.problems += matrix.problems
            job.notes += matrix.notes
        bad = sorted(job.bad, key=lambda each: (job.numbers[each.field], each.chunk))
        header = job.header
    return VerifyReport(
        path=str(path),
        num_bytes=path.stat().st_size,
        by_h5chunk=header is not None,
        quick=quick,
        fields=tuple(job.checked()),
        bad=tuple(bad),
        problems=tuple(job.problems),
        notes=tuple(job.notes),
        seconds=time.perf_counter() - started,
        read_bytes=read_bytes,
    )


@dataclass
class _Job:
    """The datasets to check, and the results."""

    path: Path
    header: Header | None
    datasets: list[tuple[CheckedDataset, np.ndarray]] = field(default_factory=list)
    matrices: dict[str, MatrixCheck] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[BadChunk] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, int]:
        return {each.name: number for number, (each, _) in enumerate(self.datasets)}

    def checked(self) -> Iterator[Checked]:
        """Yield how each dataset was checked."""
        for each, chunks in self.datasets:
            pattern = self.header is not None and each.name == f"{MATRIX}/data"  # ones that are never written
            unwritten = (0, "") if pattern or each.by == CHECKSUM else (each.num_unwritten, each.reads_as)
            yield Checked(each.name, max(len(each.written), len(chunks)), len(chunks), each.by, *unwritten)


def _survey(file: h5py.File, path: Path, trusted: bool, quick: bool) -> _Job:
    """Check the structure of a file, and list the datasets to read."""
    job = _Job(path, read_header(file))
    guard = Guard(path, trusted)
    found: dict[str, h5py.Dataset] = {}
    sparse: dict[str, h5py.Dataset] = {}  # hardly ever written: readers refuse them, but what is there can be checked
    for name, item in guard.walk(file):
        if isinstance(item, FieldError):
            _refuse(job, item)
            continue
        try:
            if not (job.header and name == f"{MATRIX}/data" and not item.id.get_storage_size()):  # ones of a pattern
                guard.check_field(item, name)
            if not same_file(item, file):
                job.notes.append(f"{name!r} lies in another file: check that one")
                continue
            found[name] = item
        except FileError as error:
            _refuse(job, error)
            if isinstance(error, UnsupportedError) and count_unwritten(item):
                sparse[name] = item
    names = sorted(found)
    is_csr = job.header is not None and job.header.kind == CSR
    if job.header is not None:
        job.problems += _whole(look_at_tables(file, job.header, names))
    data = [name for name in names if job.header is None or not name.startswith(f"{GROUP}/")]
    job.matrices = find_matrices(file, path, data, is_csr)
    for name in sorted([*data, *sparse]):
        _add(job, {**found, **sparse}, name, quick)
    if job.header is not None:
        lost = [name[len(CHECKSUMS) :] for name in names if name.startswith(CHECKSUMS)]
        job.problems += [f"there are checksums of {name!r}, but no such dataset" for name in lost if name not in found]
    return job


def _whole(problems: Iterator[str]) -> list[str]:
    """List all problems; tables that HDF5 cannot read are one more."""
    found = []
    try:
        for each in problems:
            found.append(each)
    except DAMAGES as error:
        found.append(f"the group /{GROUP} cannot be read: {error}")
    return found


def _refuse(job: _Job, error: FileError) -> None:
    what = str(error).removeprefix(f"{printable(job.path)}: ")
    (job.notes if isinstance(error, (TrustError, UnsupportedError)) else job.problems).append(what)


def _add(job: _Job, found: dict[str, h5py.Dataset], name: str, quick: bool) -> None:
    """Add a dataset, with its checksums."""
    dataset = found[name]
    if dataset.is_virtual or (dataset.chunks is None and dataset.external):
        job.notes.append(f"{name!r} has its values in other files: check those")
        return
    prefix, _, part = name.rpartition("/")
    matrix = job.matrices.get(prefix)
    try:
        expected = _checksums(job, found, name)
        each = CheckedDataset(job.path, dataset, expected, _look(matrix, part, dataset))
        if each.unlisted:
            said = job.notes if expected is None else job.problems
            said.append(f"{name!r} is not checked: {each.unlisted}")
            if not each.num_unwritten:
                return
        if expected is not None and len(expected) != each.num_chunks:
            job.problems.append(f"{name!r} has {each.num_chunks} chunks but {len(expected)} checksums")
            each = CheckedDataset(job.path, dataset, None, _look(matrix, part, dataset))
    except DAMAGES as error:
        job.problems.append(str(error).removeprefix(f"{printable(job.path)}: "))
        return
    chunks = np.arange(each.num_chunks) if expected is not None else each.written
    if quick and len(chunks) > QUICK_CHUNKS:
        chunks = chunks[np.unique(np.linspace(0, len(chunks) - 1, QUICK_CHUNKS).astype(np.int64))]
        shown = ", ".join(map(str, chunks[:3]))
        job.notes.append(
            f"{name!r}: of {each.num_chunks:,} chunks, {len(chunks)} were read: {shown}, ..., {chunks[-1]}"
        )
    job.datasets.append((each, chunks))


def _checksums(job: _Job, found: dict[str, h5py.Dataset], name: str) -> np.ndarray | None:
    table = found.get(f"{CHECKSUMS}{name}")
    if job.header is None:
        return None
    if table is None:
        if found[name].size and found[name].id.get_storage_size():  # where nothing was written, nothing has a checksum
            is_field = name in OURS or name in job.header.fields
            (job.problems if is_field else job.notes).append(f"{name!r} has no checksums")
        return None
    if table.ndim != 1 or table.dtype != np.uint32:
        job.problems.append(f"the checksums of {name!r} are {table.dtype} {table.shape}, not a list of uint32")
        return None
    values: np.ndarray = table[()]
    return values


def _look(matrix: MatrixCheck | None, part: str, dataset: h5py.Dataset) -> Look | None:
    if matrix is None or matrix.columns is None or not is_stored_as(dataset, dataset.dtype):
        return None
    return matrix.columns if part == "indices" else matrix.look_at_codes if part == "data" and matrix.ours else None


def _check_all(job: _Job, say: Callable[[tuple[str, int, int]], None]) -> int:
    """Read and check all datasets; return the bytes."""
    total = sum(int(each.table.sizes[chunks].sum()) for each, chunks in job.datasets)
    done = 0
    descriptor = open_descriptor(job.path)
    try:
        for each, chunks in job.datasets:
            say(("verify", done, total))
            threads = max(1, min(available_cores(), MAX_THREADS, MEMORY_BYTES // each.thread_bytes()))
            for came in check_parts(each.parts(chunks), descriptor, threads):
                done += came.num_bytes
                job.bad += [_bad(job, each, damage) for damage in came.damages]
                say(("verify", done, total))
    finally:
        os.close(descriptor)
    return done


def _bad(job: _Job, each: CheckedDataset, damage: Damage) -> BadChunk:
    prefix, _, part = each.name.rpartition("/")
    matrix = job.matrices.get(prefix)
    first, last = each.table.rows(damage.chunk)
    if matrix is not None and part in MATRIX_PARTS:
        first, last = matrix.rows(part, first, last + 1) or (first, last)
    offset, num_bytes = each.place(damage.chunk)
    return BadChunk(each.name, damage.chunk, first, last, offset, num_bytes, damage.what, damage.expected, damage.found)
