"""Store an index of an HDF5 file whose samples are datasets, in ``NAME.h5chunk-index-KEY`` next to the file.

The first line is a JSON object with these keys:

- ``version``: 3.
- ``stamp``: the size and modification time of the file, and the CRC-32 of some of its bytes (see `stamp_with_bytes`),
  which must match for the index to be used.
- ``made_for``: the patterns, attributes and range of samples.
- ``fields``: the shape, dtype and kinds of storage of each field.
- ``arrays``: the name, dtype and length of each array that follows the first line.
- ``checksum``: the CRC-32 of these arrays.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.remote.mirror import NO_OPTIONS
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.attributes import join_columns

VERSION = 3
LOOKED_AT, LOOK_BYTES = 16, 4 << 10  # number of the pieces of a file that its stamp covers, and their size
MAX_HEADER = 64 << 20
MAX_BYTES = 1 << 62  # limit on the total size of a field's samples
THROUGH_HDF5, CONTIGUOUS = -1, 0  # kinds of storage; chunked kinds follow
ARRAYS = {"lengths": "<i8", "places": "<i8", "kinds": "<i4", "offsets": "<i8", "sizes": "<i8", "masks": "<u4"}


@dataclass
class FieldIndex:
    """The byte ranges of the samples of one field.

    ``shape`` is the shape of the first sample, and ``lengths``, (n,), is the length of each sample along the first
    axis. ``kinds``, (n,), is `THROUGH_HDF5`, `CONTIGUOUS`, or 1 + the index of a description in ``chunked``.
    ``places``, (n,), is the offset of a contiguous sample. For a chunked sample, it is the index of the first chunk in
    ``offsets``, ``sizes`` and ``masks``. ``varies`` is True if samples of other files differ in length from these.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunked: list[Any]  # [chunk shape, filters]
    lengths: np.ndarray
    places: np.ndarray
    kinds: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray
    varies: bool = dataclass_field(default=False, init=False)

    @property
    def is_ragged(self) -> bool:
        """True if samples differ in length."""
        return self.varies or bool(len(self.lengths) and (self.lengths != self.lengths[0]).any())

    @property
    def step_items(self) -> int:
        """Number of elements in one step along the first axis."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def sample_bytes(self) -> np.ndarray:
        """Return the size of each sample in bytes: (n,) int64."""
        return self.lengths * self.step_items * self.dtype.itemsize

    def check(self, num_samples: int, file_bytes: int) -> None:
        """Raise ValueError if a value is impossible for a file of this size."""
        if self.dtype.kind not in "biuf" or not self.dtype.isnative:
            raise ValueError("impossible type")
        step_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if len(self.shape) > 32 or any(axis < 0 for axis in self.shape) or step_bytes >= MAX_BYTES:
            raise ValueError("impossible shape")
        if not len(self.lengths) == len(self.places) == len(self.kinds) == num_samples:
            raise ValueError("arrays differ in length")
        if not len(self.offsets) == len(self.sizes) == len(self.masks):
            raise ValueError("chunks differ in length")
        if (self.lengths < 0).any() or self.lengths.sum(dtype=np.float64) * step_bytes >= MAX_BYTES:
            raise ValueError("impossible lengths")
        if self.lengths[0] != (self.shape or (1,))[0] or not (self.shape or (self.lengths == 1).all()):
            raise ValueError("lengths that differ from the shape")
        plain = self.kinds == CONTIGUOUS
        if (self.places[plain] < 0).any() or (self.places[plain] > file_bytes - self.sample_bytes()[plain]).any():
            raise ValueError("samples beyond the end of the file")
        if (self.offsets < 0).any() or (self.sizes <= 0).any() or (self.offsets > file_bytes - self.sizes).any():
            raise ValueError("chunks beyond the end of the file")
        if ((self.kinds < THROUGH_HDF5) | (self.kinds > len(self.chunked))).any():
            raise ValueError("unknown kinds of storage")
        steps, across = [1], [0]  # along the first axis, and chunks across the other axes, by kind
        for chunk, _ in self.chunked:
            if len(chunk) != len(self.shape) or any(type(side) is not int or not 0 < side < 1 << 40 for side in chunk):
                raise ValueError("impossible chunks")
            steps.append(chunk[0])
            across.append(math.prod(-(-side // step) for side, step in zip(self.shape[1:], chunk[1:], strict=True)))
        own = self.kinds > CONTIGUOUS
        kinds, places = self.kinds[own], self.places[own]
        num_chunks = -(-self.lengths[own] // np.array(steps)[kinds]) * np.array(across)[kinds]
        if (places < 0).any() or (places > len(self.offsets) - num_chunks).any():
            raise ValueError("chunks that are not listed")


@dataclass
class KeyedIndex:
    """The samples of a file.

    ``names``, uint8, has the concatenated names of all samples, and ``ends``, (n,), the end of each name. ``columns``
    has the values of each attribute, (n,).
    """

    names: np.ndarray
    ends: np.ndarray
    fields: dict[str, FieldIndex]
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, number: int) -> str:
        """Return the text that ``*`` matches in the path of a sample."""
        start = int(self.ends[number - 1]) if number else 0
        return self.names[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")

    def check(self, file_bytes: int, fields: Sequence[str], attributes: Sequence[str]) -> None:
        """Raise ValueError if a value is impossible, or if the index is for other fields or attributes."""
        if not len(self) or sorted(self.fields) != sorted(fields) or sorted(self.columns) != sorted(attributes):
            raise ValueError("fields or attributes that were not requested")
        if (np.diff(self.ends, prepend=0) < 1).any() or int(self.ends[-1:].sum()) != len(self.names):
            raise ValueError("impossible names")
        if any(len(column) != len(self) for column in self.columns.values()):
            raise ValueError("attributes differ in length")
        for field in self.fields.values():
            field.check(len(self), file_bytes)


def joined(parts: Sequence[KeyedIndex], differ: Callable[[str, int, FieldIndex, FieldIndex], Exception]) -> KeyedIndex:
    """Join the indexes of ranges of samples. ``differ`` creates the error for parts that differ in shape or dtype."""
    first, starts = parts[0], np.cumsum([0, *(len(part) for part in parts)])
    fields = {}
    for name, model in first.fields.items():
        own = [part.fields[name] for part in parts]
        for number, field in enumerate(own):
            if field.dtype != model.dtype or field.shape[1:] != model.shape[1:] or len(field.shape) != len(model.shape):
                raise differ(name, int(starts[number]), field, model)
        chunked: dict[str, tuple[int, Any]] = {}  # number and description of each kind
        arrays: dict[str, list[np.ndarray]] = {array: [] for array in ARRAYS}
        num_chunks = 0
        for field in own:
            for kind in field.chunked:
                chunked.setdefault(repr(kind), (len(chunked) + 1, kind))
            numbers = np.array([THROUGH_HDF5, CONTIGUOUS, *(chunked[repr(kind)][0] for kind in field.chunked)])
            for array in ARRAYS:
                arrays[array].append(getattr(field, array))
            arrays["places"][-1] = field.places + num_chunks * (field.kinds > CONTIGUOUS)
            arrays["kinds"][-1] = numbers[field.kinds + 1].astype(np.int32)
            num_chunks += len(field.offsets)
        whole = {array: np.concatenate(values) for array, values in arrays.items()}
        fields[name] = FieldIndex(model.shape, model.dtype, [kind for _, kind in chunked.values()], **whole)
    before = np.cumsum([0, *(len(part.names) for part in parts)])
    ends = np.concatenate([part.ends + start for part, start in zip(parts, before, strict=False)])
    columns = {name: join_columns(name, [part.columns[name] for part in parts]) for name in first.columns}
    return KeyedIndex(np.concatenate([part.names for part in parts]), ends, fields, columns)


def stamp_with_bytes(path: Path) -> tuple[int, ...]:
    """Return the stamp of a file without its device and inode, and a checksum of pieces of the file.

    The checksum distinguishes files to which programs have given the same modification time. The result is empty if the
    file is missing.
    """
    stamp, checksum = stamp_of(path)[2:], 0
    if not stamp or not path.is_file():
        return stamp
    try:
        with path.open("rb", buffering=0) as file:
            for offset in np.linspace(0, max(0, stamp[0] - LOOK_BYTES), LOOKED_AT).astype(np.int64).tolist():
                checksum = zlib.crc32(os.pread(file.fileno(), LOOK_BYTES, offset), checksum)
    except OSError as error:
        raise FileError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    return *stamp, checksum


def index_paths(path: Path, made_for: Any) -> list[Path]:
    """Return the possible paths of the index of a file, which are next to the file and in the user's cache folder."""
    key = hashlib.sha256(json.dumps(made_for).encode()).hexdigest()[:12]
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    name = f".h5chunk-index-{key}"
    return [path.with_name(path.name + name), NO_OPTIONS.root / "indexes" / (place + name)]


@contextmanager
def locked_folder(targets: Sequence[Path]) -> Iterator[tuple[Path, Path] | None]:
    """Lock a folder for the parts of an index in a context, so that no other process builds the same index.

    The context's value is the first path of ``targets`` that can be written, and the folder beside it, or None if no
    path can be written.
    """
    problems: list[str] = []
    for target in targets:
        folder = target.with_name(f"{target.name}.parts")
        try:
            descriptor = _lock(folder)
        except OSError as error:
            problems.append(f"{printable(target)} ({error.strerror})")
            continue
        try:
            yield target, folder
        finally:
            with suppress(OSError):  # the folder has parts for the next run
                folder.rmdir()
            os.close(descriptor)
        return
    warnings.warn(f"the index cannot be stored, and is rebuilt each time: {'; '.join(problems)}", stacklevel=4)
    yield None


def _lock(folder: Path) -> int:
    """Create a folder, lock it, and return its descriptor."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    while True:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # the process that had the lock has removed the folder
                if os.path.samestat(folder.stat(), os.fstat(descriptor)):
                    return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def remove_stale(path: Path, stamp: tuple[int, ...]) -> None:
    """Remove the indexes next to a file that were built for an earlier version of it, with any patterns."""
    with suppress(OSError):
        for other in path.parent.iterdir():
            if other.name.startswith(f"{path.name}.h5chunk-index-") and other.is_file():
                with suppress(ValueError, KeyError, TypeError, RecursionError), other.open("rb") as file:
                    header = json.loads(file.readline(MAX_HEADER))
                    if header["made_for"] and header["stamp"] != list(stamp):
                        other.unlink()


def save_index(
    target: Path, folder: Path, path: Path, stamp: tuple[int, ...], made_for: Any, index: KeyedIndex
) -> None:
    """Store an index atomically, with a temporary file in ``folder``.

    ``stamp`` is the stamp that the file had before its samples were listed.
    """
    arrays: dict[str, np.ndarray] = {"names": index.names, "ends": index.ends}
    arrays |= {f"column/{name}": column for name, column in index.columns.items()}
    for name, field in index.fields.items():
        arrays |= {f"{array}/{name}": getattr(field, array).astype(kind) for array, kind in ARRAYS.items()}
    body = [np.ascontiguousarray(array).view(np.uint8) for array in arrays.values() if array.size]
    header = {
        "version": VERSION,
        "stamp": stamp,
        "made_for": made_for,
        "fields": {name: [field.shape, field.dtype.str, field.chunked] for name, field in index.fields.items()},
        "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        "checksum": _checksum(body),
    }
    temporary = folder / f"{secrets.token_hex(8)}.tmp"  # another host may write to the same folder
    try:
        with temporary.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            for array in body:
                file.write(array.data)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(
            f"{printable(target)}: the index of {printable(path)} cannot be written ({error.strerror})"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def load_index(target: Path, stamp: tuple[int, ...], made_for: Any) -> KeyedIndex | str:
    """Load an index. If that is impossible, return the reason, which is empty if there is no index."""
    try:
        if target.exists() and not target.is_file():
            return "it is not a regular file"
        with target.open("rb") as file:
            line = file.readline(MAX_HEADER)
            header = json.loads(line)
            if header["version"] != VERSION or header["made_for"] != made_for:
                return "it was made for other samples"
            if header["stamp"] != list(stamp):
                return "the file has changed since it was indexed"
            arrays = _read_arrays(file, header["arrays"], os.fstat(file.fileno()).st_size - len(line))
        body = [array.view(np.uint8) for array in arrays.values() if array.size]
        if _checksum(body) != header["checksum"]:
            return "it is damaged (wrong checksum)"
        index = _index_of(header["fields"], arrays)
        index.check(stamp[0], [name for name, _ in made_for[0]], made_for[1])
    except OSError as error:
        return "" if error.errno in (errno.ENOENT, errno.ENAMETOOLONG) else f"it cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        return f"it is damaged ({error})"
    return index


def _checksum(arrays: Sequence[np.ndarray]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array.data, checksum)
    return checksum


def _read_arrays(file: Any, listed: Any, num_bytes: int) -> dict[str, np.ndarray]:
    """Read arrays with these names, dtypes and lengths, which must fill the rest of the file."""
    kinds = [(str(name), np.dtype(str(kind)), int(length)) for name, kind, length in listed]
    if any(kind.kind not in "biufS" or length < 0 for _, kind, length in kinds):
        raise ValueError("impossible arrays")
    if sum(kind.itemsize * length for _, kind, length in kinds) != num_bytes:
        raise ValueError("cut short")
    return {name: np.frombuffer(file.read(kind.itemsize * length), kind) for name, kind, length in kinds}


def _index_of(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> KeyedIndex:
    made = {}
    for name, (shape, dtype, chunked) in fields.items():
        own = {array: arrays[f"{array}/{name}"] for array in ARRAYS}
        if any(own[array].dtype != np.dtype(kind) for array, kind in ARRAYS.items()):
            raise ValueError("impossible arrays")
        made[name] = FieldIndex(tuple(map(int, shape)), np.dtype(str(dtype)), list(chunked), **own)
    columns = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith("column/")}
    if arrays["names"].dtype != np.uint8 or arrays["ends"].dtype != np.int64:
        raise ValueError("impossible names")
    return KeyedIndex(arrays["names"], arrays["ends"], made, columns)
