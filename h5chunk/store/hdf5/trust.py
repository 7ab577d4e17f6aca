"""Follow links, views and external storage of a trusted file within its folder.

HDF5 looks for the file of a link in several places, and takes the first that it can open. Here the same places are
looked at, in the same order, and the first that is there must lie in the folder of the trusted file, or below it, after
all links of the system are resolved.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from h5chunk.errors import FieldError, TrustError, printable

PREFIXES = {"an external link": "HDF5_EXT_PREFIX", "a view": "HDF5_VDS_PREFIX", "storage": "HDF5_EXTFILE_PREFIX"}


class Trust:
    """The folder that data may come from: that of the trusted file."""

    def __init__(self, path: Path) -> None:
        self.folder = path.resolve().parent

    def check(self, target: Path, where: str, target_name: str) -> None:
        """Raise TrustError unless a file lies in the trusted folder and is a regular one."""
        real = target.resolve()
        if not real.is_relative_to(self.folder):
            raise TrustError(
                f"{where} leads to {target_name!r}, which lies outside of the file's folder {printable(self.folder)}: "
                "copy what it leads to into that folder, or name that file itself"
            )
        if not stat.S_ISREG(os.stat(real).st_mode):
            raise TrustError(f"{where} leads to {target_name!r}, which is not a regular file")

    @contextmanager
    def opened(self, base: str, target: str, where: str, what: str) -> Iterator[h5py.File | None]:
        """Open the file that a link or view in the file ``base`` leads to; None if HDF5 finds none either.

        Raises TrustError if it lies outside of the trusted folder, FieldError if it cannot be opened.
        """
        if what == "a view" and target == ".":
            with h5py.File(base, "r") as file:
                yield file
            return
        if what == "a view" and "%" in target:  # one of many, by number: they lie in one folder
            folder, _, last = target.rpartition("/")
            place = _places(base, f"{folder}/" if folder else ".", "a view")[0]
            if "%" in folder or not place.resolve().is_relative_to(self.folder):
                raise TrustError(
                    f"{where} is a view of {last!r} in {printable(place)}, outside of the file's folder: copy it there"
                )
            yield None
            return
        found = next((place for place in _places(base, target, what) if place.exists()), None)
        if found is None:
            yield None
            return
        self.check(found, where, target)
        try:
            file = h5py.File(found, "r")
        except OSError as error:
            raise FieldError(f"{where} leads to {target!r}, which cannot be opened: {error}") from None
        with file:
            yield file

    def check_storage(self, target: str, where: str) -> None:
        """Raise TrustError unless a file of external storage lies in the trusted folder."""
        found = next((place for place in _places("", target, "storage") if place.exists()), None)
        if found is None:
            raise FieldError(f"{where} keeps its values in {target!r}, which is not there")
        self.check(found, where, target)


def _places(base: str, target: str, what: str) -> list[Path]:
    """List the places where HDF5 looks for a file. Source: H5F_prefix_open_file in H5Fint.c; H5D__build_file_prefix."""
    prefix = os.environ.get(PREFIXES[what], "")
    places = [Path(target)] if Path(target).is_absolute() else []
    if Path(target).is_absolute() and what != "storage":
        target = Path(target).name
    folder = Path(base).parent
    prefixes = [Path(part.replace("${ORIGIN}", str(folder))) for part in prefix.split(":") if part]
    if what == "storage":
        return places or [*(part / target for part in prefixes[:1]), Path(target)]
    return [*places, *(part / target for part in prefixes), folder / target, Path(target), folder.resolve() / target]
