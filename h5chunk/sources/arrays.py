"""Arrays, of which the first axis counts samples: .npy, .npz, and arrays given in Python, alone or in a dict.

| array | becomes |
| --- | --- |
| of numbers, of one dimension | a column, unless it is larger than 64 MiB or there is no other array |
| of more dimensions | a field, called ``data`` if it is the only one of a file, or as its member or key |
| bool | uint8 |
| fixed-length text (``U``) | UTF-8 |
| Python objects, complex numbers, dates | refused |

A .npy file, and a member of an .npz that is not compressed, are read sample by sample, in place. Compressed members are
unpacked into memory, up to a limit. Source: numpy.lib.format (the .npy format), numpy.savez.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from h5chunk.errors import SourceError, human_bytes, printable
from h5chunk.source import OpenContext, SampleField
from h5chunk.sources.container import BoundedFile, StoredFile
from h5chunk.sources.matrix.npy import read_header
from h5chunk.sources.options import Options
from h5chunk.sources.recognise import MAX_ZIP_DIRECTORY_BYTES, NPY_MAGIC, is_path, zip_members
from h5chunk.sources.samples import Samples, field_dtype
from h5chunk.stamp import stamp_of

DATA = "data"
MAX_COLUMN_BYTES = 64 << 20
MAX_RATIO = 1032  # deflate cannot give more bytes for one
MAX_SMALL_BYTES = 1 << 16
LOCAL_HEADER = struct.Struct("<26x2H")  # of a member of a zip: the lengths of its name and extra field
DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error)


class StoredArray:
    """An array in a file, in C order, of which samples are read when they are asked for.

    Attributes
    ----------
    shape : tuple of int
    dtype : np.dtype
    """

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._file, self._offset = StoredFile(path), offset
        self.shape, self.dtype = shape, dtype
        self._sample_bytes = math.prod(shape[1:]) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._sample_bytes

    def __getitem__(self, index: int) -> np.ndarray:
        return self._read(index, 1)[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._read(0, self.shape[0])

    def _read(self, start: int, count: int) -> np.ndarray:
        data = self._file.read_at(self._offset + start * self._sample_bytes, count * self._sample_bytes)
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


class ArraySource(Samples):
    """Arrays of one length: a `h5chunk.source.SampleSource`.

    Parameters
    ----------
    arrays : mapping of str to array
        Of shape (num_samples, ...).
    path : str, optional
        The file that they are in.
    """

    kind = "arrays"
    noun = "arrays"

    def __init__(self, arrays: Mapping[str, Any], path: str | None = None) -> None:
        super().__init__()
        self._path = path
        self._num_samples = _common_length(arrays, printable(path) if path else "the arrays")
        self._arrays = {name: _without_text(array) for name, array in arrays.items()}
        dtypes = {name: field_dtype(name, array.dtype) for name, array in self._arrays.items()}
        by_size = sorted(self._arrays, key=lambda name: -self._arrays[name].nbytes)
        is_column = [len(self._arrays[name].shape) == 1 and _is_small(self._arrays[name]) for name in by_size]
        kept = [name for name, small in zip(by_size, is_column, strict=True) if not small] or by_size[:1]
        self.fields = {name: SampleField(tuple(self._arrays[name].shape[1:]), dtypes[name]) for name in kept}
        self.columns = {
            name: np.asarray(array).astype(dtypes[name])
            for name, array in self._arrays.items()
            if name not in self.fields
        }
        self.options = {"fields": list(self._arrays)}
        if path is None:
            self.notes = ["arrays given in Python have no date: a conversion that is stopped starts anew"]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        if is_path(source):
            members = zip_members(source, head)
            is_npz = bool(members) and all(name.endswith(".npy") for name in members)
            return head.startswith(NPY_MAGIC) or (is_npz and "format.npy" not in members)
        if isinstance(source, Mapping):
            return bool(source) and all(map(_is_array, source.values()))
        return _is_array(source)

    @classmethod
    def open(cls, source: Any, options: Options, context: OpenContext) -> ArraySource:
        if isinstance(source, Mapping):
            return cls({str(name): np.asarray(array) for name, array in source.items()})
        if not is_path(source):
            return cls({DATA: np.asarray(source)})
        path = os.fspath(source)
        try:
            return cls(dict(_open_file(path, context.memory_bytes)), path)
        except OSError as error:
            raise SourceError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None

    def __len__(self) -> int:
        return self._num_samples

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        if self._path is None:
            return None
        return {"kind": self.kind, "stamp": stamp_of(self._path, with_ctime=True)}, ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        for name, values in out.items():
            values[...] = self._arrays[name][index]
        return ()


def _is_array(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("__array__", "shape", "dtype"))


def _is_small(array: Any) -> bool:
    return array.nbytes <= MAX_COLUMN_BYTES


def _without_text(array: Any) -> Any:
    return np.char.encode(np.asarray(array), "utf-8") if array.dtype.kind == "U" else array


def _common_length(arrays: Mapping[str, Any], shown: str) -> int:
    """Return the length of all arrays, or say which of them differ."""
    for name, array in arrays.items():
        where = f"{shown}: {printable(name)!r}"
        if not array.shape:
            raise SourceError(f"{where} is a single number: give arrays whose first axis counts samples")
        if not math.prod(array.shape):
            raise SourceError(f"{where} of shape {tuple(array.shape)} is empty: give at least one sample")
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    first = next(iter(lengths), "")
    for name, length in lengths.items():
        if length != lengths[first]:
            raise SourceError(
                f"{shown}: {printable(first)!r} has {lengths[first]} samples but {printable(name)!r} has {length}: "
                "give arrays of one length, or convert them one by one"
            )
    if not lengths:
        raise SourceError(f"{shown}: holds no array")
    return lengths[first]


def _open_file(path: str, memory_bytes: int) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:  # noqa: PTH123
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            file.seek(0)
            yield DATA, _open_npy(path, file, memory_bytes)
            return
    yield from _open_npz(path, memory_bytes)


def _open_npy(path: str, file: IO[bytes], memory_bytes: int) -> Any:
    shown = printable(path)
    shape, is_fortran, dtype = _read_shape(file, shown)
    num_bytes = _claimed_bytes(shown, shape, dtype, os.fstat(file.fileno()).st_size - file.tell())
    if is_fortran:
        return _in_c_order(_read_all(file, shown, num_bytes, memory_bytes), shape, dtype)
    return StoredArray(path, file.tell(), shape, dtype)


def _claimed_bytes(shown: str, shape: tuple[int, ...], dtype: np.dtype, num_there: int) -> int:
    """Return the bytes that an array takes, which must be those that are there."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != num_there:
        raise SourceError(
            f"{shown}: shape {shape} of {dtype} takes {num_bytes} bytes but {num_there} are there: it is damaged or "
            "cut short"
        )
    return num_bytes


def _read_shape(file: IO[bytes], shown: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    shape, is_fortran, dtype = read_header(file, shown)
    field_dtype(shown, dtype if dtype.kind != "U" else np.dtype("S1"))
    return shape, is_fortran and len(shape) > 1, dtype


def _open_npz(path: str, memory_bytes: int) -> Iterator[tuple[str, Any]]:
    shown = printable(path)
    try:
        with BoundedFile(path, MAX_ZIP_DIRECTORY_BYTES, zipfile.BadZipFile) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if len(set(names)) < len(names):
                raise SourceError(f"{shown}: two members have one name: save it again")
            for info in archive.infolist():
                yield info.filename.removesuffix(".npy"), _open_member(path, archive, info, memory_bytes)
    except DAMAGES as error:
        raise SourceError(f"{shown}: damaged, or no .npz: {error}") from None


def _open_member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, memory_bytes: int) -> Any:
    """An array of an .npz: in its place if it is stored as it is, else unpacked."""
    shown = f"{printable(path)}: member {printable(info.filename)}"
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if info.flag_bits & 1 or not (is_stored or info.compress_type == zipfile.ZIP_DEFLATED):
        raise SourceError(f"{shown} is encrypted or packed unusually: save it again")
    if info.file_size > MAX_RATIO * info.compress_size + MAX_SMALL_BYTES:
        raise SourceError(f"{shown} claims {info.file_size} bytes out of {info.compress_size}: it is damaged")
    with archive.open(info) as file:
        shape, is_fortran, dtype = _read_shape(file, shown)
        num_bytes = _claimed_bytes(shown, shape, dtype, info.file_size - file.tell())
        if is_stored and not is_fortran:
            return StoredArray(path, _start_of_member(path, info) + file.tell(), shape, dtype)
        return _in_c_order(_read_all(file, shown, num_bytes, memory_bytes), shape, dtype, is_fortran)


def _start_of_member(path: str, info: zipfile.ZipInfo) -> int:
    header = StoredFile(path).read_at(info.header_offset, LOCAL_HEADER.size)
    return info.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))


def _read_all(file: IO[bytes], shown: str, num_bytes: int, memory_bytes: int) -> bytes:
    if num_bytes > memory_bytes:
        raise SourceError(
            f"{shown} takes {human_bytes(num_bytes)} of memory, as its samples do not lie one behind the other, but "
            f"the limit is {human_bytes(memory_bytes)}: save it in C order and uncompressed (np.save, np.savez)"
        )
    return file.read(num_bytes)


def _in_c_order(data: bytes, shape: tuple[int, ...], dtype: np.dtype, is_fortran: bool = True) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")
