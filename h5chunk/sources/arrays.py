"""Read arrays whose first axis is the sample axis, from .npy and .npz files, or from NumPy arrays and dicts of them.

| array | becomes |
| --- | --- |
| one dimension | a column, unless the array is larger than 64 MiB or the only one |
| more dimensions | a field with the name of the member or key; ``data`` if there is a single array without a name |
| bool | uint8 |
| text (``U``), Python strings | UTF-8 of fixed length |
| Python objects other than strings, complex numbers, dates | refused |

The samples of a .npy file, or of an uncompressed member of an .npz, are read one by one. Compressed members and arrays
in Fortran order are loaded into memory, up to a size limit.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from h5chunk.errors import OptionError, SourceError, allowing, exact_bytes, names_text, printable
from h5chunk.sample_source import OpenContext, SampleField
from h5chunk.sources.container import ZIP_LOCAL_HEADER, StoredFile
from h5chunk.sources.kinds import ColumnOptions
from h5chunk.sources.listing import check_source
from h5chunk.sources.numpy_files import open_npz, read_header
from h5chunk.sources.recognise import NPY_MAGIC, is_path, refuse_names, zip_members
from h5chunk.sources.samples import DATA, Samples, field_dtype, largest_first
from h5chunk.stamp import source_stamp

MAX_COLUMN_BYTES = 64 << 20


class StoredArray:
    """An uncompressed C-order array in a file. Indexing reads one sample from the file."""

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._file, self._offset = StoredFile(path), offset
        self.shape, self.dtype = shape, dtype
        self._sample_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __getitem__(self, index: int) -> np.ndarray:
        return self._read(index, 1)[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._read(0, self.shape[0])

    def _read(self, start: int, count: int) -> np.ndarray:
        data = self._file.read_at(self._offset + start * self._sample_bytes, count * self._sample_bytes)
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


def _fixed_length(array: Any) -> Any:
    """Convert strings to UTF-8 of fixed length. Arrays of other Python objects are returned unchanged."""
    if array.dtype.kind == "U":
        return np.char.encode(np.asarray(array), "utf-8")
    objects = np.asarray(array)
    values = objects.reshape(-1).tolist()
    if not values or not all(isinstance(value, (str, bytes)) for value in values):
        return array
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return np.array(encoded, f"S{max(1, *map(len, encoded))}").reshape(objects.shape)


class ArraySource(Samples):
    """Arrays of shape (num_samples, ...), from the file ``path`` or from memory."""

    kind = "arrays"
    noun = "arrays"
    Options = ColumnOptions

    def __init__(self, arrays: Mapping[str, Any], path: str | None = None) -> None:
        self._path = path
        self._num_samples = _common_length(arrays, printable(path) if path else "the arrays")
        self._arrays = {
            name: _fixed_length(array) if array.dtype.kind in "UO" else array for name, array in arrays.items()
        }
        if path is None and all(len(array.shape) == 1 for array in self._arrays.values()):
            for name, array in self._arrays.items():
                refuse_names(array[:3].tolist(), name)
        fields = {
            name: SampleField(tuple(array.shape[1:]), field_dtype(name, array.dtype))
            for name, array in self._arrays.items()
        }
        columns = [
            name for name, array in self._arrays.items() if len(array.shape) == 1 and array.nbytes <= MAX_COLUMN_BYTES
        ]
        self.fields = largest_first({name: field for name, field in fields.items() if name not in columns})
        if not self.fields:
            main = next(iter(largest_first(fields)))
            columns.remove(main)
            self.fields = {main: fields[main]}
        self.columns = {name: np.asarray(self._arrays[name]).astype(fields[name].dtype) for name in columns}
        self.options = {"fields": list(self._arrays)}
        if path is None:
            self.notes = ["changes to arrays in Python cannot be detected, so an interrupted conversion starts over"]

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
    def open(cls, source: Any, options: ColumnOptions, context: OpenContext) -> ArraySource:
        if isinstance(source, Mapping):
            names = [*map(str, source)]
            chosen = _chosen(names, options.columns, "the arrays")
            return cls({str(name): np.asarray(array) for name, array in source.items() if str(name) in chosen})
        if not is_path(source):
            return cls({DATA: np.asarray(source)})
        path = os.fspath(source)
        check_source(Path(path))
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                is_npy = file.read(len(NPY_MAGIC)) == NPY_MAGIC
                file.seek(0)
                if is_npy:
                    num_bytes = os.fstat(file.fileno()).st_size
                    return cls({DATA: _open_array(path, file, printable(path), num_bytes, 0, context)}, path)
            return cls(dict(_open_members(path, options.columns, context)), path)
        except OSError as error:
            raise SourceError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None

    def __len__(self) -> int:
        return self._num_samples

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        if self._path is None:
            return None
        return {"kind": self.kind, "stamp": source_stamp(self._path)}, ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        for name, target in out.items():  # arrays need no decoding, so `values` is not called
            target[...] = self._arrays[name][index]
        return ()


def _is_array(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("__array__", "shape", "dtype"))


def _common_length(arrays: Mapping[str, Any], label: str) -> int:
    """Return the common length of all arrays; messages call their source ``label``.

    Raises SourceError if lengths differ, or if an array is empty or a single number.
    """
    for name, array in arrays.items():
        where = f"{label}: {printable(name)!r}"
        if not array.shape:
            raise SourceError(f"{where} is a single number: {_remedy(arrays)}")
        if not math.prod(array.shape):
            remedy = "one element per sample" if array.shape[0] else "one sample"
            raise SourceError(f"{where} of shape {tuple(array.shape)} is empty: it needs at least {remedy}")
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    first = next(iter(lengths), "")
    for name, length in lengths.items():
        if length != lengths[first]:
            raise SourceError(
                f"{label}: {printable(first)!r} has {lengths[first]:,} samples but {printable(name)!r} has {length:,}: "
                f"{_remedy(arrays)}"
            )
    if not lengths:
        raise SourceError(f"{label}: contains no arrays")
    return lengths[first]


def _remedy(arrays: Mapping[str, Any]) -> str:
    """Return the remedy for an error message: select the arrays that are as long as the largest array."""
    if any(name.endswith("indptr") for name in arrays):
        return (
            "they look like the parts of a sparse matrix: save it with scipy.sparse.save_npz, and convert that .npz; "
            "or select arrays of samples (--columns)"
        )
    largest = max(arrays.values(), key=lambda array: (len(array.shape) > 0, array.nbytes))
    if not largest.shape:
        return "pass arrays whose first axis is the sample axis"
    alike = [name for name, array in arrays.items() if array.shape[:1] == largest.shape[:1]]
    return f"select arrays of equal length (--columns {printable(','.join(alike[:12]))}{',...' * (len(alike) > 12)})"


def _chosen(names: Sequence[str], columns: Sequence[str] | None, label: str) -> Sequence[str]:
    missing = next((name for name in columns or () if name not in names), None)
    if missing is not None:
        raise OptionError(f"{label}: there is no array {missing!r}: choose from {names_text(names)}")
    return names if columns is None else columns


def _open_members(
    path: str, columns: Sequence[str] | None, context: OpenContext
) -> Iterator[tuple[str, StoredArray | np.ndarray]]:
    with open_npz(path) as archive:
        names = [info.filename.removesuffix(".npy") for info in archive.infolist()]
        chosen = _chosen(names, columns, printable(path))
        for info in archive.infolist():
            if info.filename.removesuffix(".npy") not in chosen:
                continue
            start = None
            if info.compress_type == zipfile.ZIP_STORED:
                header = StoredFile(path).read_at(info.header_offset, ZIP_LOCAL_HEADER.size)
                start = info.header_offset + len(header) + sum(ZIP_LOCAL_HEADER.unpack(header))
            label = f"{printable(path)}: member {printable(info.filename)}"
            with archive.open(info) as file:
                array = _open_array(path, file, label, info.file_size, start, context)
            yield info.filename.removesuffix(".npy"), array


def _open_array(
    path: str, file: IO[bytes], label: str, file_size: int, start: int | None, context: OpenContext
) -> StoredArray | np.ndarray:
    """Open an array in .npy format, which ``file`` reads, and which has ``file_size`` bytes with its header.

    ``start`` is its offset in the file at ``path``; None if it is compressed. Uncompressed C-order arrays are read on
    demand. Other arrays are loaded into memory. Messages call the array ``label``.
    """
    shape, is_fortran, dtype = read_header(file, label)
    field_dtype(label, dtype if dtype.kind != "U" else np.dtype("S1"))
    num_bytes, num_stored = math.prod(shape) * dtype.itemsize, file_size - file.tell()
    if num_bytes != num_stored:
        raise SourceError(
            f"{label}: shape {shape} and dtype {dtype} require {num_bytes} bytes, but {num_stored} are stored: it is "
            "damaged or truncated"
        )
    is_fortran = is_fortran and len(shape) > 1
    if start is not None and not is_fortran:
        return StoredArray(path, start + file.tell(), shape, dtype)
    if num_bytes > context.memory_bytes:
        raise SourceError(
            f"{label} is compressed or in Fortran order, so it needs {exact_bytes(num_bytes)} of memory, over the "
            f"limit of {exact_bytes(context.memory_bytes)}: save it in C order and uncompressed (np.save, np.savez), "
            f"or allow more memory (--memory-bytes {allowing(num_bytes)})"
        )
    return np.frombuffer(file.read(num_bytes), dtype).reshape(shape, order="F" if is_fortran else "C")
