"""Recognise the format of a source by its suffix, its first bytes, or the members of an archive or HDF5 file."""

from __future__ import annotations

import functools
import os
import posixpath
import zipfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from h5chunk.errors import FileError, SourceError, WorkerError, printable
from h5chunk.sources.container import PACKED_MAGICS, BoundedFile
from h5chunk.stamp import stamp_of

HEAD_BYTES = 1 << 12
MAX_ZIP_DIRECTORY_BYTES = 1 << 20  # a zip with a larger directory is neither a matrix nor a file of arrays
MAX_HDF5_LINKS = 1000
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz")
ZIP_MAGIC = b"PK\x03\x04"
NPY_MAGIC = b"\x93NUMPY"
EXTENSIONS = (
    b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp", b".gif", b".jfif", b".jpe",
    b".pjpeg", b".pjp", b".apng", b".pbm", b".pnm",
)  # fmt: skip
SYSTEM = {  # names, in lower case, of files and folders of systems and tools, which are no data
    b"__macosx", b".ds_store", b".git", b".ipynb_checkpoints", b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"@eadir",
}  # fmt: skip
PACKINGS = (".gz", ".bz2", ".xz", ".zst")
AS_MANIFEST = (
    "to convert the images, pass their folder as the source, and this file as its manifest: h5chunk convert FOLDER "
    "OUTPUT.h5 --manifest TABLE"
)
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def is_path(source: Any) -> bool:
    """Return whether a source is a path, to a file that may not exist, rather than another object."""
    return isinstance(source, (str, os.PathLike))


def names_image(value: Any) -> bool:
    """Return whether a value is text that ends like the name of an image."""
    return isinstance(value, (str, bytes)) and os.fsencode(value).lower().endswith(EXTENSIONS)


def names_file(value: Any) -> bool:
    """Return whether a value is a path of a file, or text that is the path of an existing one or ends like an image."""
    if not isinstance(value, (str, bytes)):
        return isinstance(value, os.PathLike)
    path = os.fsencode(value)
    try:
        return bool(path) and (os.path.lexists(path) or (path.lower().endswith(EXTENSIONS) and b"://" not in path))
    except ValueError:  # it contains a NUL byte
        return False


def refuse_names(values: Iterable[Any], name: str) -> None:
    """Raise SourceError if the first values of field ``name`` are names of files, whose contents would not be stored.

    To be called for samples of which nothing but numbers and strings would be stored.
    """
    first = list(islice(values, 3))
    if first and all(map(names_file, first)):
        raise SourceError(
            f"field {printable(name)!r} contains names of files, such as {printable(first[0])}, which would be stored "
            "in place of their contents: for images, pass their folder, with a table of their names and labels as "
            "--manifest, or a data set that returns the images; to store the names, write them to a .parquet"
        )


def read_head(source: Any) -> bytes:
    """Read the first `HEAD_BYTES` of a regular file; return b"" for any other source."""
    try:
        if is_path(source) and os.path.isfile(source):
            with open(source, "rb") as file:  # noqa: PTH123
                return file.read(HEAD_BYTES)
    except (OSError, ValueError):
        pass
    return b""


def has_suffix(source: Any, *suffixes: str) -> bool:
    """Return whether a source is a regular file with one of these suffixes, in any case, even if .gz follows."""
    if not is_path(source):
        return False
    stem, suffix = posixpath.splitext(os.fsencode(source).decode("utf-8", "backslashreplace").lower())
    suffix = posixpath.splitext(stem)[1] if suffix in PACKINGS else suffix
    return suffix in suffixes and os.path.isfile(source)


def may_be_archive(source: Any, head: bytes) -> bool:
    """Return whether a regular file is a zip or tar by its content."""
    return head[257:262] == b"ustar" or zipfile.is_zipfile(source)


def zip_members(source: Any, head: bytes) -> set[str]:
    """Return the names of the members of a zip with a small directory; an empty set for any other source."""
    if not head.startswith(ZIP_MAGIC):
        return set()
    try:
        with BoundedFile(source, MAX_ZIP_DIRECTORY_BYTES, zipfile.BadZipFile) as file, zipfile.ZipFile(file) as archive:
            return set(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return set()


def hdf5_members(source: Any, head: bytes) -> dict[str, set[str]]:
    """Return the names at the root of an HDF5 file, with the names in each group; empty for any other source.

    Raises SourceError if HDF5 cannot open the file.
    """
    if not head.startswith(HDF5_MAGIC):
        return {}
    path = Path(os.fsdecode(source))
    return _members_of(path, stamp_of(path, with_ctime=True))


@functools.lru_cache(16)
def _members_of(path: Path, stamp: tuple[int, ...]) -> dict[str, set[str]]:
    """Read the names in an HDF5 file in a child process, which the file may crash."""
    from h5chunk.store.hdf5.child import in_child

    try:
        return in_child(path, _read_members, path)
    except (FileError, WorkerError) as error:
        raise SourceError(str(error)) from None


def _read_members(path: Path) -> dict[str, set[str]]:
    import h5py

    from h5chunk.store.hdf5.child import limited_memory
    from h5chunk.store.hdf5.open import DAMAGES, opened

    with limited_memory(path), opened(path) as file:
        try:
            names = list(islice(file, MAX_HDF5_LINKS))
            own = [name for name in names if isinstance(file.get(name, getlink=True), h5py.HardLink)]
            return {name: set(file[name]) if isinstance(file[name], h5py.Group) else set() for name in own}
        except DAMAGES:
            return {}


def is_hdf5(source: Any, head: bytes) -> bool:
    """Return whether a regular file is HDF5. Its first bytes may follow a user block of 512, 1024, 2048, ... bytes."""
    if head.startswith(HDF5_MAGIC):
        return True
    try:
        with open(source, "rb") as file:  # noqa: PTH123
            size, offset = os.fstat(file.fileno()).st_size, 512
            while offset < size:
                file.seek(offset)
                if file.read(len(HDF5_MAGIC)) == HDF5_MAGIC:
                    return True
                offset *= 2
    except (OSError, ValueError):
        pass
    return False


def text_lines(source: Any, head: bytes) -> list[bytes]:
    """Return the first lines of a text file, compressed or not; an empty list for any other source."""
    if not head or (b"\0" in head and not head.startswith((*PACKED_MAGICS, *UTF16_MARKS))):
        return []
    from h5chunk.sources.matrix.text import TextFile

    try:
        return TextFile(source).head_lines()
    except (SourceError, ImportError):
        return []
