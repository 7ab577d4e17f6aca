"""The samples of HDF5 files in which each sample is a dataset, a group of datasets, or a whole file; and their index.

An index is stored as ``NAME.h5chunk-index-KEY.npz`` next to a file, or as ``.h5chunk-index-KEY.npz`` in the folder that
all files have in common. It is an ordinary .npz file, whose CRC-32 checksums show damage, with these arrays:

- ``header``, bytes of a JSON object: ``version``; ``made_for``, the patterns, attributes and trust; ``files``, their
  paths relative to the folder; and ``fields``, the name, kinds of storage, member and names of the values of each
  field.
- ``stamps``, (files, 3): the size and modification time of each file, and the CRC-32 of some of its bytes.
- ``starts``, (files + 1,): the first sample of each file.
- ``names``, bytes, and ``ends``, (n,): the keys of all samples one after another, and the end of each.
- ``column NAME``, (n, ...): the values of an attribute, or of a field of strings of variable length.
- ``FIELD ARRAY`` with the number of a field: the arrays of `FieldIndex`, and ``dtype``, without values, for its dtype.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, FileError, names_text, printable
from h5chunk.remote.mirror import NO_OPTIONS
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.attributes import join_columns
from h5chunk.store.hdf5.patterns import fill
from h5chunk.store.hdf5.types import NARROW_FLOATS
from h5chunk.urls import local_copy_of, stable, url_of

VERSION = 6
LOOKED_AT, LOOK_BYTES = 16, 4 << 10  # number of the pieces of a file that its stamp covers, and their size
STAMP_THREADS, STAMP_FILES = 16, 256  # that read stamps, and the files that each reads at once
MAX_BYTES = 1 << 62  # limit on the total size of a field's samples, and on offsets
THROUGH_HDF5, CONTIGUOUS = -1, 0  # kinds of storage: the latter is that of bytes as in memory; others follow
ARRAYS = {"shapes": "<i8", "kinds": "<i4", "offsets": "<i8", "sizes": "<i8", "masks": "<u4"}


class Wanted(NamedTuple):
    """The fields and attributes of samples that an index lists, and how: what `list_samples` looks for in a file.

    ``patterns`` has the path of each field by name, with a ``*`` for each part of a sample's key. Without ``*``, each
    file is a sample. ``attributes`` has the value of samples that lack an attribute, or None, by name.
    """

    patterns: Mapping[str, str]
    attributes: Mapping[str, Any]
    trusted: bool = False
    kinds: str = "biufcSV"  # kinds of NumPy dtypes that a field may have
    decode: str = ""  # how packed numbers are converted

    @property
    def outer(self) -> str:
        """The path of a sample, with ``*`` for the parts of its key; empty if each file is a sample."""
        before, star, _ = next(iter(self.patterns.values())).rpartition("*")
        return before + star

    @property
    def inner(self) -> dict[str, str]:
        """The path of each field within a sample, which is empty if the sample is a dataset."""
        return {name: pattern[len(self.outer) :].strip("/") for name, pattern in self.patterns.items()}

    def made_for(self) -> list[Any]:
        """Return the JSON object that identifies an index of these."""
        defaults = [[name, repr(value)] for name, value in self.attributes.items()]
        return [[list(each) for each in self.patterns.items()], defaults, self.trusted, self.kinds, self.decode]


@dataclass
class FieldIndex:
    """The stored blocks of the samples of one field.

    A block is a chunk, or all values of a contiguous sample, or of one that only HDF5 can read. ``shapes``, (n, axes),
    is the shape of each sample, with the axes of array types, and ``kinds``, (n,), is `THROUGH_HDF5`, `CONTIGUOUS`, or
    1 + the index of a description in ``coded``. The blocks of a sample follow those of the sample before it, in the
    order of their places in it; samples without values have none. ``offsets`` (-1 for `THROUGH_HDF5`), ``sizes`` (in
    the file) and ``masks`` (of skipped filters) have one element for each block. ``member`` has the names that lead to
    a member of a compound type, and ``names`` those of the values of an enumeration.

    A description has the shape of a chunk, which is empty for contiguous samples; the size of an element in the file
    and in memory; and a text that identifies the filters, the type in the file and its packing.
    """

    dtype: np.dtype
    coded: list[Any]  # [chunk shape, stored bytes, bytes in memory, text]
    shapes: np.ndarray
    kinds: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray
    varies: bool = dataclass_field(default=False)  # whether samples of other files differ in length from these
    member: tuple[str, ...] = ()
    names: dict[int, str] = dataclass_field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first sample."""
        return tuple(self.shapes[0].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sample along its first axis: (n,) int64. It is 1 if samples have no axes."""
        return self.shapes[:, 0] if self.shapes.shape[1] else np.ones(len(self.shapes), np.int64)

    @property
    def is_ragged(self) -> bool:
        """True if samples differ in length."""
        return self.varies or bool((self.lengths != self.lengths[:1]).any())

    @property
    def step_items(self) -> int:
        """Number of elements in one step along the first axis."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def sample_bytes(self) -> np.ndarray:
        """Return the size of each sample in bytes: (n,) int64."""
        return self.shapes.prod(1, dtype=np.int64) * self.dtype.itemsize

    def block_shapes(self) -> np.ndarray:
        """Return the shape of a block of each sample: (n, axes) int64."""
        none = [0] * self.shapes.shape[1]
        chunks = np.array([none, none, *(chunk or none for chunk, *_ in self.coded)], np.int64)[self.kinds + 1]
        return np.where(chunks > 0, chunks, self.shapes)

    def num_blocks(self) -> np.ndarray:
        """Return the number of blocks of each sample: (n,) int64."""
        return (-(-self.shapes // np.maximum(self.block_shapes(), 1))).prod(1, dtype=np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """The first block of each sample: (n,) int64."""
        counts = self.num_blocks()
        return np.cumsum(counts) - counts

    def take(self, rows: np.ndarray) -> FieldIndex:
        """Return the index of some samples, with only their blocks."""
        blocks = runs(self.first[rows], self.num_blocks()[rows])
        own: dict[str, Any] = {name: getattr(self, name)[blocks] for name in ("offsets", "sizes", "masks")}
        return replace(self, shapes=self.shapes[rows], kinds=self.kinds[rows], **own)

    def check(self, num_samples: int) -> None:
        """Raise ValueError if arrays do not fit each other, so that reading them could leave memory."""
        if self.shapes.ndim != 2 or not num_samples == len(self.shapes) == len(self.kinds):
            raise ValueError("arrays differ in length")
        if not self.dtype.isnative or (self.dtype.kind not in "biufcS" and self.dtype not in NARROW_FLOATS.values()):
            raise ValueError("impossible type")
        sizes = self.shapes.astype(np.float64).prod(1) * self.dtype.itemsize
        if (self.shapes < 0).any() or sizes.sum() >= MAX_BYTES or (self.shapes[:, 1:] != self.shapes[:1, 1:]).any():
            raise ValueError("impossible shapes")
        if ((self.kinds < THROUGH_HDF5) | (self.kinds > len(self.coded))).any():
            raise ValueError("unknown kinds of storage")
        for chunk, *element_bytes, _ in self.coded:
            if len(chunk) not in (0, self.shapes.shape[1]) or any(
                type(side) is not int or not 0 < side < 1 << 40 for side in (*chunk, *element_bytes)
            ):
                raise ValueError("impossible chunks")
        counts = self.num_blocks()
        if not counts.sum() == len(self.offsets) == len(self.sizes) == len(self.masks):
            raise ValueError("blocks that are not listed")
        through = np.repeat(self.kinds == THROUGH_HDF5, counts)
        if ((self.offsets < 0) != through).any() or max(
            self.offsets.max(initial=0), self.sizes.max(initial=0)
        ) >= MAX_BYTES:
            raise ValueError("impossible blocks")
        for kind, (chunk, stored, in_memory, _) in enumerate([([], 1, 1, ""), *self.coded]):
            own = np.flatnonzero((self.kinds == kind) & (counts > 0))
            if not chunk and (self.sizes[self.first[own]] * in_memory != self.sample_bytes()[own] * stored).any():
                raise ValueError("shapes that differ from the stored bytes")


def runs(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers first, first + 1, ... of each run, one run after another: (sum of counts,) int64."""
    # the n-th number of a run is n more than its first one, in the result and in what it refers to
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)


class KeyedIndex(NamedTuple):
    """The samples of some files.

    ``names``, uint8, has the concatenated keys of all samples, and ``ends``, (n,), the end of each key. ``columns`` has
    the values of each attribute, (n, ...), and of each field of strings of variable length, (n,). ``starts``,
    (files + 1,), is the first sample of each file.
    """

    names: np.ndarray
    ends: np.ndarray
    fields: dict[str, FieldIndex]
    columns: dict[str, np.ndarray]
    starts: np.ndarray

    @property
    def num_samples(self) -> int:
        return len(self.ends)

    def name(self, number: int) -> str:
        """Return the key of a sample: the texts that each ``*`` matches in its path, joined by ``/``."""
        start = int(self.ends[number - 1]) if number else 0
        return self.names[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")

    def take(self, files: Sequence[int]) -> KeyedIndex:
        """Return the samples of some files, in this order of the files."""
        if list(files) == list(range(len(self.starts) - 1)):
            return self
        starts = np.cumsum([0, *np.diff(self.starts)[list(files)].tolist()])
        rows = runs(self.starts[list(files)], np.diff(starts))
        lengths = np.diff(self.ends, prepend=0)[rows]
        ends, letters = np.cumsum(lengths), runs(self.ends[rows] - lengths, lengths)
        fields = {name: field.take(rows) for name, field in self.fields.items()}
        return KeyedIndex(
            self.names[letters], ends, fields, {name: column[rows] for name, column in self.columns.items()}, starts
        )

    def check(self, num_files: int, wanted: Wanted) -> None:
        """Raise ValueError if arrays do not fit each other, or if the index is for other fields or attributes."""
        if (
            not self.num_samples
            or not self.fields
            or sorted([*self.fields, *self.columns]) != sorted([*wanted.patterns, *wanted.attributes])
            or not {*wanted.attributes} <= {*self.columns}
        ):
            raise ValueError("fields or attributes that were not requested")
        lengths, counts = np.diff(self.ends, prepend=0), np.diff(self.starts, prepend=0)
        if (lengths < 1).any() or lengths.sum() != len(self.names) or self.names.dtype != np.uint8:
            raise ValueError("impossible names")
        if len(counts) != num_files + 1 or (counts < 0).any() or counts[0] or counts.sum() != self.num_samples:
            raise ValueError("impossible files")
        if any(len(column) != self.num_samples or column.dtype.kind not in "biufS" for column in self.columns.values()):
            raise ValueError("impossible attributes")
        for field in self.fields.values():
            field.check(self.num_samples)


def joined(parts: Sequence[KeyedIndex], wanted: Wanted) -> KeyedIndex:
    """Join the indexes of several files, or ranges of samples. Raises FieldError if they differ in shape or dtype."""
    if len(parts) == 1:
        return parts[0]
    fields = {}
    for part in parts:
        if odd := part.fields.keys() ^ parts[0].fields.keys():
            where = f"sample {printable(fill(wanted.outer, part.name(0)) or part.name(0))}"
            raise FieldError(f"{where}: {min(odd)!r} has strings, and numbers in other samples: leave it out")
    for name, model in parts[0].fields.items():
        own = [part.fields[name] for part in parts]
        for part, field in zip(parts, own, strict=True):
            where = f"sample {printable(fill(wanted.outer, part.name(0)) or part.name(0))}"
            if field.dtype != model.dtype or field.shape[1:] != model.shape[1:] or len(field.shape) != len(model.shape):
                raise differs(where, name, (field.shape, field.dtype), (model.shape, model.dtype))
            if field.names != model.names or field.member != model.member:
                raise FieldError(
                    f"{where} has an enumeration with the names {names_text(field.names.values())} in {name!r}, but "
                    f"the first sample has {names_text(model.names.values())}: open the files as separate data sets"
                )
        coded: dict[str, tuple[int, Any]] = {}  # number and description of each kind
        for kind in (kind for field in own for kind in field.coded):
            coded.setdefault(repr(kind), (len(coded) + 1, kind))
        arrays: dict[str, list[np.ndarray]] = {array: [getattr(field, array) for field in own] for array in ARRAYS}
        for number, field in enumerate(own):
            numbers = [THROUGH_HDF5, CONTIGUOUS, *(coded[repr(kind)][0] for kind in field.coded)]
            arrays["kinds"][number] = np.array(numbers, np.int32)[field.kinds + 1]
        whole: dict[str, Any] = {array: np.concatenate(values) for array, values in arrays.items()}
        whole |= {"member": model.member, "names": model.names}
        fields[name] = FieldIndex(model.dtype, [kind for _, kind in coded.values()], **whole)
    letters = np.cumsum([0, *(len(part.names) for part in parts)])
    columns = {
        name: join_columns(name, [part.columns[name] for part in parts], wanted.attributes.get(name))
        for name in parts[0].columns
    }
    return KeyedIndex(
        np.concatenate([part.names for part in parts]),
        np.concatenate([part.ends + before for part, before in zip(parts, letters, strict=False)]),
        fields,
        columns,
        np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part.starts) for part in parts]))]),
    )


def differs(where: str, name: str, found: tuple[Any, Any], first: tuple[Any, Any]) -> FieldError:
    """Return the error about a sample whose shape and dtype do not fit those of the first sample."""
    return FieldError(
        f"{where} has {found[1]} {list(found[0])} in {name!r}, but the first sample has {first[1]} {list(first[0])}: "
        "samples may differ only in the length of the first axis"
    )


Stamp = tuple[int, int, int]  # size and modification time of a file, and a checksum of pieces of it


def stamps_of(files: Sequence[Path], wanted: Wanted) -> list[Stamp]:
    """Return the stamps of files. Raises FileError if one is missing.

    The checksum distinguishes files to which programs have given the same modification time. It is 0 if each file is a
    sample, because there are many, and for remote objects, whose stamps identify their versions.
    """
    parts = [files[start : start + STAMP_FILES] for start in range(0, len(files), STAMP_FILES)]
    with ThreadPoolExecutor(STAMP_THREADS) as pool:  # network file systems answer slowly
        found = pool.map(lambda part: [_stamp(path, with_bytes=bool(wanted.outer)) for path in part], parts)
        return [stamp for part in found for stamp in part]


def _stamp(path: Path, *, with_bytes: bool) -> Stamp:
    if not (stamp := stamp_of(path)):
        raise FileError(f"{printable(path)}: no such file")
    checksum = 0
    if with_bytes and path.is_file() and stamp[2] and local_copy_of(path) is None:
        last = max(0, stamp[2] - LOOK_BYTES)
        offsets = np.linspace(0, last, min(LOOKED_AT, last // LOOK_BYTES + 1)).astype(np.int64)
        try:
            with path.open("rb", buffering=0) as file:
                for offset in offsets.tolist():
                    checksum = zlib.crc32(os.pread(file.fileno(), LOOK_BYTES, offset), checksum)
        except OSError as error:
            raise FileError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    return stamp[2], stamp[3], checksum


def names_in_folder(files: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the folder, or URL of a folder, that contains all files or folders with them; and their names in it."""
    texts = [stable(url_of(file)) or str(file) for file in files]
    folders = [text.split("/")[:-1] for text in texts]
    # the first and the last in sorted order have in common what all have in common
    common = takewhile(lambda pair: pair[0] == pair[1], zip(min(folders), max(folders), strict=False))
    folder = "/".join(part for part, _ in common)
    return folder or "/", [text[len(folder) :].lstrip("/") for text in texts]


class StoredIndex:
    """The place of an index of files: next to them or, if that cannot be written, in the user's cache folder.

    The index of remote objects is in the folder of their local copies.
    """

    def __init__(self, files: Sequence[Path], wanted: Wanted) -> None:
        self._wanted = wanted
        self.folder, self.files = names_in_folder(files)
        key = hashlib.sha256(json.dumps(wanted.made_for()).encode()).hexdigest()[:12]
        one = self.files[0] if len(files) == 1 else ""
        name, mirror = f".h5chunk-index-{key}.npz", local_copy_of(files[0])
        root = NO_OPTIONS.root if mirror is None else mirror.options.root
        where = f"{self.folder}/{one}" if mirror is not None else (Path(self.folder) / one).resolve()
        place = root / "indexes" / (hashlib.sha256(os.fsencode(where)).hexdigest()[:16] + name)
        self._places = [place] if mirror is not None else [Path(self.folder) / (one + name), place]

    def load(self) -> tuple[KeyedIndex | None, dict[str, Stamp]]:
        """Load the index, and the stamps of the files that it covers. Warns if an index exists, but cannot be used."""
        for place in self._places:
            try:
                return self._load(place)
            except OSError as error:
                missing = error.errno in (errno.ENOENT, errno.ENAMETOOLONG, errno.ENOTDIR)
                reason = "" if missing else f"it cannot be read ({error.strerror})"
            # the errors of json, zipfile and NumPy for damaged files
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError, EOFError,
                    MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
                reason = f"it is damaged ({error})"
            if reason:
                warnings.warn(f"{printable(place)}: the index is rebuilt, because {reason}", stacklevel=5)
        return None, {}

    def _load(self, place: Path) -> tuple[KeyedIndex, dict[str, Stamp]]:
        if place.exists() and not place.is_file():
            raise OSError(errno.EISDIR, "it is not a regular file")
        with place.open("rb") as file, zipfile.ZipFile(file) as members:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                raise ValueError("compressed arrays")
            file.seek(0)
            arrays = dict(np.load(file, allow_pickle=False).items())
        header = json.loads(arrays["header"].tobytes())
        if header["version"] != VERSION or header["made_for"] != self._wanted.made_for():
            raise ValueError("made for other samples")
        fields = {}
        for number, (name, coded, member, names) in enumerate(header["fields"]):
            own = {array: arrays[f"{number} {array}"] for array in ARRAYS}
            if any(own[array].dtype != np.dtype(kind) for array, kind in ARRAYS.items()):
                raise ValueError("impossible arrays")
            if own["shapes"].shape[0] == 1:  # all samples have the same shape
                own["shapes"] = np.broadcast_to(own["shapes"], (len(own["kinds"]), own["shapes"].shape[1]))
            fields[name] = FieldIndex(
                arrays[f"{number} dtype"].dtype,
                coded,
                **own,
                member=tuple(map(str, member)),
                names={int(value): str(each) for value, each in names},
            )
        known = (*self._wanted.attributes, *self._wanted.patterns)
        columns = {name: arrays[f"column {name}"] for name in known if name not in fields}
        index = KeyedIndex(arrays["names"], arrays["ends"], fields, columns, arrays["starts"])
        index.check(len(header["files"]), self._wanted)
        if arrays["stamps"].shape != (len(header["files"]), 3):
            raise ValueError("impossible stamps")
        return index, dict(zip(map(str, header["files"]), map(tuple, arrays["stamps"].tolist()), strict=True))

    def save(self, index: KeyedIndex, stamps: Mapping[str, Stamp]) -> None:
        """Store an index atomically at the first place that can be written. Warns if there is none."""
        header = {
            "version": VERSION,
            "made_for": self._wanted.made_for(),
            "files": list(stamps),
            "fields": [
                (name, field.coded, field.member, [*field.names.items()]) for name, field in index.fields.items()
            ],
        }
        arrays: dict[str, Any] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "stamps": np.array([*stamps.values()], np.int64),
        }
        arrays |= {"names": index.names, "ends": index.ends, "starts": index.starts}
        arrays |= {f"column {name}": column for name, column in index.columns.items()}
        for number, field in enumerate(index.fields.values()):
            arrays |= {f"{number} {array}": getattr(field, array).astype(kind) for array, kind in ARRAYS.items()}
            arrays[f"{number} dtype"] = np.empty(0, field.dtype)
            if (field.shapes == field.shapes[:1]).all():  # one row is enough
                arrays[f"{number} shapes"] = arrays[f"{number} shapes"][:1]
        problems = []
        for place in self._places:
            temporary = place.with_name(f"{secrets.token_hex(8)}.tmp")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if not os.access(place.parent, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                with temporary.open("xb") as file:
                    np.savez(file, **arrays)
                os.replace(temporary, place)
            except OSError as error:
                problems.append(f"{printable(place)} ({error.strerror})")
                with suppress(OSError):
                    temporary.unlink()
            else:
                return
        warnings.warn(f"the index cannot be stored, and is rebuilt each time: {'; '.join(problems)}", stacklevel=5)
