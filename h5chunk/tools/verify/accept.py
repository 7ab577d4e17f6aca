"""Accept values that were changed on purpose: replace the checksums of fields by those of their present chunks.

The checksums of a field are one run of bytes, which is overwritten. If that is interrupted, verify names the chunks
whose checksums are still old, and the same call completes the work. A renamed or deleted field needs another structure:
a copy of the file is changed, and then replaces the file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, count_text, printable
from h5chunk.remote.pages import write_at
from h5chunk.store.format.spec import CHECKSUMS, GROUP, ArraySpec, FileSpec, Region, create_objects, region_of
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import open_file, opened
from h5chunk.store.read.scan import CheckedDataset
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import writing


class Accepted(NamedTuple):
    """New checksums of a dataset."""

    name: str
    sums: np.ndarray | None  # (num_chunks,) uint32; None if the dataset no longer exists
    num_changed: int
    offset: int | None  # position of the old checksums in the file; None if there are none

    def __str__(self) -> str:
        if self.sums is None:
            return f"{self.name} no longer exists, so its checksums are deleted"
        changed = f"{self.num_changed:,} of {count_text(len(self.sums), 'chunk')}"
        return f"{self.name}: {changed} {'had changed' if self.offset is not None else 'had no checksums'}"


def accept_changes(path: Path, fields: tuple[str, ...]) -> list[Accepted]:
    """Replace the checksums of fields. The caller has checked the structure of the file.

    Raises FieldError if the file has no such field, and FileError if a chunk of one cannot be read.
    """
    found = in_child(path, _new_checksums, path, fields)
    changed = [each for each in found if each.num_changed]
    with writing(path):
        if any(each.offset is None or each.sums is None for each in changed):
            _replace_file(path, changed)
        else:
            with path.open("r+b", buffering=0) as file:
                for each in changed:
                    assert each.sums is not None and each.offset is not None
                    write_at(file.fileno(), each.sums.tobytes(), each.offset)
                os.fsync(file.fileno())
    return found


def _new_checksums(path: Path, fields: tuple[str, ...]) -> list[Accepted]:
    found: list[Accepted] = []
    with limited_memory(path), opened(path) as file:
        guard = Guard(path)
        datasets = {name: item for name, item in guard.walk(file) if isinstance(item, h5py.Dataset)}
        for field in fields:
            names = [name for name in datasets if _is_in(field, name)]
            lost = [name for name in datasets if name.startswith(f"{CHECKSUMS}/")]
            lost = [name[len(CHECKSUMS) + 1 :] for name in lost]
            lost = [name for name in lost if _is_in(field, name) and name not in datasets]
            if not names and not lost:
                raise FieldError(f"{printable(path)}: has no field {field!r}, and no checksums of one")
            found += [Accepted(name, None, 1, None) for name in lost]
            found += [_checksums_of(path, datasets, guard, name) for name in names if datasets[name].size]
    return found


def _is_in(field: str, name: str) -> bool:
    """Return whether a dataset is a field, or part of one, such as a matrix; not in the group of h5chunk."""
    return (name == field or name.startswith(f"{field}/")) and not name.startswith(f"{GROUP}/")


def _checksums_of(path: Path, datasets: dict[str, h5py.Dataset], guard: Guard, name: str) -> Accepted:
    table = datasets.get(f"{CHECKSUMS}/{name}")
    dataset, offset = datasets[name], None if table is None else region_of(table).offset
    guard.check_field(dataset, name)
    count = CheckedDataset(path, dataset).num_chunks
    old = np.zeros(count, np.uint32) if table is None else table[()]
    if old.shape != (count,) or old.dtype != np.uint32 or not count:
        raise FileError(
            f"{printable(path)}: {name!r} has {count_text(count, 'chunk')}, but its checksums are {old.dtype} "
            f"{old.shape}: a changed structure cannot be accepted: convert the data again"
        )
    sums = old.copy()
    for _, damages in CheckedDataset(path, dataset, old).check(np.arange(count)):
        for damage in damages:
            if damage.actual is None or damage.actual == damage.expected:
                raise FileError(
                    f"{printable(path)}: chunk {damage.chunk} of {name!r} {damage.problem}, so it is damaged"
                )
            sums[damage.chunk] = damage.actual
    return Accepted(name, sums, count if table is None else int((sums != old).sum()), offset)


def _replace_file(path: Path, changed: list[Accepted]) -> None:
    """Replace the file by a copy with other tables of checksums."""

    def create(part: Path) -> dict[str, Region]:
        shutil.copyfile(path, part)
        shutil.copymode(path, part)
        with h5py.File(part, "r+", libver=("v110", "latest"), locking=False) as file:
            for each in changed:
                table = f"{CHECKSUMS}/{each.name}"
                if table in file and (each.sums is None or each.offset is None):
                    del file[table]
                if each.sums is not None and table not in file:
                    create_objects(file, FileSpec({table: ArraySpec(each.sums.shape, each.sums.dtype)}, {}))
                if each.sums is not None:
                    file[table][...] = each.sums
        return {}

    with open_file(path), NewFile(path, overwrite=True) as new:  # an error if another process writes the file
        new.make(path.stat().st_size, create)
        new.commit()
