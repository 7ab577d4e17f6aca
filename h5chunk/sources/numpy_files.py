"""Validate .npy headers and .npz members before memory is allocated. Nothing is ever unpickled.

Reference: the documentation of numpy.lib.format (the .npy format) and of numpy.savez.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.machine import warnings_filtered
from h5chunk.sources.container import DAMAGES, BoundedFile
from h5chunk.sources.recognise import MAX_ZIP_DIRECTORY_BYTES
from h5chunk.store.hdf5.guard import MAX_RATIO

MAX_HEADER_BYTES = MAX_SMALL_BYTES = 1 << 16
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape of a .npy array, whether it is in Fortran order, and its dtype. Messages call it ``name``.

    The file position is then at the first value. Raises SourceError if the file is not an array, or if the array
    contains Python objects.
    """
    try:
        with warnings_filtered("error"):  # warnings about headers of Python 2
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise SourceError(f"{name}: version {version} of the .npy format is not supported: save it again")
            size = file.read(2 * version[0])
            length = int.from_bytes(size, "little")
            if length > MAX_HEADER_BYTES:
                raise SourceError(f"{name}: claims a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_column, dtype = read(io.BytesIO(size + file.read(length)))
    except SourceError:
        raise
    except Exception as error:  # a header is a Python literal, and parsing it raises many types of errors
        raise SourceError(f"{name} is not a .npy array: {(str(error).splitlines() or ['damaged'])[0]}") from None
    if any(length < 0 for length in shape):
        raise SourceError(f"{name} claims the invalid shape {shape}: save it again")
    if dtype.hasobject:
        raise SourceError(f"{name} contains Python objects, which are never unpickled: save plain numbers")
    return shape, by_column, dtype


@contextmanager
def open_npz(path: str) -> Iterator[zipfile.ZipFile]:
    """Open an .npz in a context, after validating the sizes of its members. Raises SourceError if it is damaged."""
    label = printable(path)
    try:
        with BoundedFile(path, MAX_ZIP_DIRECTORY_BYTES, zipfile.BadZipFile) as file, zipfile.ZipFile(file) as archive:
            file.limit = None
            _check_members(label, archive, os.fstat(file.fileno()).st_size)
            yield archive
    except (SourceError, OptionError):
        raise
    except (*DAMAGES, OSError) as error:
        raise SourceError(f"{label}: damaged, or not an .npz: {error}") from None


def _check_members(label: str, archive: zipfile.ZipFile, num_bytes: int) -> None:
    repeated = next((name for name, count in Counter(archive.namelist()).items() if count > 1), None)
    if repeated is not None:
        raise SourceError(f"{label}: two members have the name {repeated!r}: save it again")
    claimed = sum(member.compress_size for member in archive.infolist())
    if claimed > num_bytes:
        raise SourceError(
            f"{label}: its members claim {claimed} bytes, but the file has {num_bytes}, so they overlap: save it again"
        )
    for member in archive.infolist():
        packed, size, name = member.compress_size, member.file_size, printable(member.filename)
        if member.flag_bits & 1 or member.compress_type not in PACKINGS:
            raise SourceError(
                f"{label}: member {name!r} is encrypted, or compressed by an unsupported method: save it again"
            )
        if size > MAX_RATIO * packed + MAX_SMALL_BYTES:
            raise SourceError(
                f"{label}: member {name!r} claims that {packed} bytes decompress to {size}, which is impossible: save "
                "it again"
            )
