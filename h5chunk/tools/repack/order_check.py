"""Find what a shuffle of a file's samples would make wrong.

A shuffle permutes the rows of the fields, and copies all other content. Other content may still belong to samples: a
row of labels, (1, n); several rows per sample, with their lengths or offsets; numbers of rows, such as ``train_idx``;
an index over a table; a group per sample; or an attribute with such values. `find_dependent` yields everything that is
not certain to be independent of the order. These are certain: scalars, lists of fewer texts than samples, numbers that
are neither numbers of rows nor lengths of runs of rows, and axes as long as another axis of a field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5o, h5t

from h5chunk.errors import FileError, as_text, printable
from h5chunk.sample_source import shape_text
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.guard import check_filters, check_stored_size
from h5chunk.store.hdf5.open import DAMAGES
from h5chunk.store.rewrite.survey import DatasetFacts, Survey, attribute_names, refers_to_regions
from h5chunk.tools.repack.fields import Samples

FEW = 4  # so few whole numbers, such as the size of an image, are numbers of rows only if their name says so
FEW_KINDS = 2  # so few different values are flags
SHORT = 16  # the lengths of so short axes mean nothing
MAX_TEXTS = 1000  # longer lists of texts are names
BLOCK_VALUES = 1 << 20  # values that are read at a time
REGIONS = "refers to regions of datasets, whose samples a shuffle would move"
# words in names of datasets that contain numbers of samples
ROWS_OF_OTHERS = {"neighbors", "neighbours", "knn", "parent", "parents", "next", "prev", "previous", "edges", "links"}
ROWS_OF_OTHERS |= {"order", "perm", "permutation", "duplicate", "duplicates", "match", "matches", "partner", "partners"}
ROWS_OF_OTHERS |= {"anchor", "anchors", "positive", "positives", "negative", "negatives"}
INDEXES = {"idx", "idxs", "index", "indices", "indexes", "ind", "inds", "row", "rows", "pairs", "members", "selected"}
RUNS = {"start", "starts", "begin", "end", "ends", "stop", "stops", "offset", "offsets", "ptr", "indptr", "boundary"}
SPANS = {"span", "spans", "slice", "slices", "segments", "intervals"}
RUNS |= {"first", "boundaries", "lengths", "counts", "sizes"} | SPANS
SPLITS = {"split", "splits", "train", "training", "test", "testing", "val", "validation", "dev", "fold", "folds"}
SPLITS |= {"subset", "holdout", "selection"}
ROW_NUMBERS = ROWS_OF_OTHERS | INDEXES | RUNS | SPLITS
LISTS = SPANS | {"idx", "index", "indices", "split", "splits", "fold", "folds"}  # groups of lists of rows
OTHER_AXES = {"classes", "categories", "vocab", "vocabulary", "columns", "features"}  # names along another axis
# attributes of HDF5, netCDF and AnnData whose meaning is known
KNOWN_ATTRIBUTES = {"DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Coordinates", "shape", "h5sparse_shape", "valid_range"}
KNOWN_ATTRIBUTES |= {"actual_range", "flag_values", "flag_masks"}


@dataclass(frozen=True)
class Dependent:
    """Something that may depend on the order of the samples."""

    name: str  # as --keep takes it: a dataset, a group, or OBJECT@ATTRIBUTE
    reason: str
    remedy: str = ""  # if --keep is none


@dataclass
class _Numbers:
    """Facts about the whole numbers in a dataset, a column of it, or an attribute."""

    limit: int | None  # values above are of no interest; None: no limit
    count: int = 0
    total: int = 0
    lowest: int = 0
    highest: int = 0
    first: int = 0
    last: int = 0
    ascending: bool = True
    some: set[int] = field(default_factory=set)  # a few different values
    whole: bool = True  # False: there are fractions, values below -1 or above the limit; the other facts are unknown
    can_count: bool = True  # whether the type can hold the number of each sample

    def add(self, values: np.ndarray) -> None:
        if not self.whole or not len(values):
            return
        values = values.reshape(-1)
        negative = values[values < 0]
        if len(negative) and (negative == negative[0]).all():  # a number that stands for none
            values = np.where(values < 0, -1, values)
        highest = float(values.max())
        in_range = float(values.min()) >= -1 and highest < 1 << 62  # False for NaN
        has_fractions = values.dtype.kind == "f" and bool((values % 1 != 0).any())
        if not in_range or has_fractions or (self.limit is not None and highest > self.limit):
            self.whole = False
            return
        numbers = values.astype(np.int64)
        if len(self.some) <= FEW_KINDS:
            self.some |= set(np.unique(numbers)[: FEW_KINDS + 1].tolist())
        self.ascending &= bool((np.diff(numbers, prepend=self.last if self.count else numbers[0]) >= 0).all())
        self.lowest = int(numbers.min()) if not self.count else min(self.lowest, int(numbers.min()))
        self.highest = max(self.highest, int(numbers.max()))
        self.first = self.first if self.count else int(numbers[0])
        self.last = int(numbers[-1])
        self.count += len(numbers)
        self.total += int(numbers.sum())


def find_dependent(
    file: h5py.File, survey: Survey, samples: Samples, named: set[bytes], kept: set[bytes]
) -> Iterator[Dependent]:
    """Yield what may depend on the order of the samples.

    ``named`` are the paths of the fields that the user named, and ``kept`` what the user declared independent: paths of
    datasets and groups, and ``OBJECT@ATTRIBUTE``.
    """
    yield from _Search(file, survey, samples, named, kept).run()


@dataclass
class _Search:
    file: h5py.File
    survey: Survey
    samples: Samples
    named: set[bytes]
    kept: set[bytes]
    run_ends: dict[int, str] = field(default_factory=dict)  # sums and last values of fields that may divide others

    def run(self) -> Iterator[Dependent]:
        n, samples = self.samples.num_samples, self.samples
        if n < 2:
            return
        by_sample = [group for group in samples.ragged if group.has_samples and group.shape[0] == n]
        ragged = {facts.path for group in samples.ragged for facts in group.parts}
        fields = {facts.path: facts for facts in (*samples.fields, *samples.other_datasets)}
        moved = {*fields, *(facts.path for group in by_sample for facts in group.parts)}
        self.own_axes = {size for facts in fields.values() for size in (facts.shape or ())[1:]}
        self.own_axes |= {group.shape[1] for group in by_sample}
        self.own_axes.discard(n)
        for group in samples.ragged:
            if group.shape[1] == n:
                reason = f"is a matrix of {group.shape[0]} x {group.shape[1]}, which has the samples along its columns"
                yield Dependent(printable(group.path), reason)
        for facts in fields.values():
            if facts.path not in self.named:
                yield from self._field(facts)
        for facts in self.survey.datasets.values():
            path = facts.path
            if path in moved | ragged or self._is_kept(path) or _is_own(path):
                continue
            doubt = _refers(facts) or self._dataset(facts)
            if doubt is not None:
                yield Dependent(facts.name, f"({shape_text(facts.shape or ())} {facts.dtype}) {doubt}")
        yield from self._groups(moved | ragged)
        yield from self._attributes()

    def _is_kept(self, path: bytes) -> bool:
        """Return whether the user declared this object, or a group that contains it, independent of the order."""
        parents = accumulate(path.split(b"/"), lambda parent, name: parent + b"/" + name)
        return any(parent in self.kept for parent in parents)

    # ---- fields, whose rows move

    def _field(self, facts: DatasetFacts) -> Iterator[Dependent]:
        n, words = self.samples.num_samples, _words(facts.name)
        doubt = _refers(facts)
        if doubt is not None:
            yield Dependent(facts.name, doubt)
            return
        remedy = f"--fields {facts.name} to move its rows, or --keep {facts.name}"
        if (facts.shape or ())[1:2] == (n,):
            yield Dependent(facts.name, f"has the samples along two axes ({shape_text(facts.shape or ())})", remedy)
            return
        if len(facts.shape or ()) == 1 and (words & OTHER_AXES or ("names" in words and len(words) > 1)):
            values = self._values(facts)
            texts = [value for block in values or () for value in block.tolist()] if facts.kind in "SO" else []
            if len(set(texts)) == n and isinstance(texts[0], (bytes, str)):
                yield Dependent(facts.name, f"may be {n} names of something else than the {n} samples", remedy)
        is_list = len(facts.shape or ()) == 1 or (len(facts.shape or ()) == 2 and words & ROW_NUMBERS)
        if is_list and facts.kind in "iufV":  # other fields may be large, and are not read
            for name, numbers in self._numbers(facts, None).items():
                words = _words(name)
                refers = words & ROWS_OF_OTHERS or (len(facts.shape or ()) == 2 and words & ROW_NUMBERS)
                if not numbers.whole:
                    continue
                if refers and numbers.count >= n and n // 2 <= numbers.highest <= n:
                    yield Dependent(facts.name, f"may contain the numbers of other samples ({name})", remedy)
                if numbers.lowest >= 0 and numbers.count == n:
                    self.run_ends |= {numbers.total: name} | ({numbers.last: name} if numbers.ascending else {})

    # ---- other datasets

    def _dataset(self, facts: DatasetFacts) -> str | None:
        if (reason := self._opaque(self._open(facts.path).id.get_type(), facts.shape or ())) is not None:
            return reason
        if not facts.shape or 0 in facts.shape:
            values = self._values(facts) if facts.shape == () and facts.kind in "SO" else None
            return self._text(next(iter(values), None)) if values is not None else None
        scales = self._axes_of_scale(facts)
        if 0 in scales:
            return "is a dimension scale of the samples"
        reason = self._shape(facts.shape, lambda: self._repeats(facts)) if not scales else None
        if reason is None and facts.shape == (-(-self.samples.num_samples // 8),) and facts.dtype == "uint8":
            reason = (
                f"may be one bit for each of the {self.samples.num_samples} samples" if facts.shape[0] > 7 else None
            )
        if reason is None and facts.kind in "SO" and math.prod(facts.shape) <= MAX_TEXTS:
            reason = self._text(next(iter(self._values(facts) or ()), None))
        if reason is None and not scales:
            reason = self._rows_in(facts.name, self._numbers(facts, self.samples.num_samples))
        return reason

    def _shape(self, shape: tuple[int, ...], repeats: Callable[[], bool] = lambda: True) -> str | None:
        """Return why values of this shape may belong to samples; None if their shape is no reason."""
        n = self.samples.num_samples
        if n in shape:
            return f"has an axis of {n}, the number of samples"
        if n in accumulate(shape, lambda x, y: x * y) or n in accumulate(shape[::-1], lambda x, y: x * y):
            return f"has axes that together are as long as the {n} samples"
        rows = next((size for size in shape if size > n and size not in self.own_axes), 0)
        if rows == n + 1:
            return f"has an axis of {rows}, like the offsets of {n} samples"
        if rows % n == 0 and rows:
            return f"has an axis of {rows}, which is {rows // n} times the number of samples"
        if (name := self.run_ends.get(shape[0])) is not None and shape[0] > SHORT:
            return f"has as many rows as {name!r} adds up to"
        if rows:
            return f"has an axis of {rows}, so there may be several elements for each of the {n} samples"
        rows = shape[0]
        if rows > SHORT and n % rows == 0 and rows not in self.own_axes and repeats():
            return f"may have a row for each {n // rows} of the {n} samples"
        return None

    def _rows_in(self, name: str, columns: dict[str, _Numbers]) -> str | None:
        """Return why these numbers may be numbers of samples, or lengths or offsets of runs of samples."""
        n = self.samples.num_samples
        for column, numbers in columns.items():
            shown, is_named = "" if column == name else f" (column {column})", bool(_words(column) & ROW_NUMBERS)
            if not numbers.whole or not numbers.count:
                continue
            if numbers.count > 2 and numbers.lowest >= 0 and numbers.total == n:
                return f"has values that add up to the number of samples{shown}"
            if numbers.count > 2 and numbers.ascending and (numbers.first, numbers.last) == (0, n):
                return f"has values that may be offsets of samples{shown}"
            varied = len(numbers.some) > FEW_KINDS
            if numbers.can_count and (is_named or (numbers.count > FEW and varied)):
                return f"has values that may be numbers of samples{shown}"
        return None

    def _opaque(self, kind: h5t.TypeID, shape: tuple[int, ...]) -> str | None:
        """Return why bytes of no known meaning, such as a pickle, may belong to samples: they are many enough."""
        num_bytes, n = kind.get_size() * math.prod(shape), self.samples.num_samples
        if isinstance(kind, h5t.TypeOpaqueID) and 8 * num_bytes >= n > SHORT:
            return f"has {num_bytes:,} bytes of unknown meaning, which may belong to the {n} samples"
        return None

    def _text(self, values: np.ndarray | None) -> str | None:
        """Return why texts may depend on the order: they have a line per sample, or list numbers of samples."""
        pending: list[tuple[str, Any]] = []
        for value in values.reshape(-1)[:MAX_TEXTS] if values is not None else ():
            text = as_text(value).strip() if isinstance(value, (bytes, str)) else ""
            if text.count("\n") + 1 == self.samples.num_samples > SHORT:
                return f"has {self.samples.num_samples} lines, the number of samples"
            if re.fullmatch(r"-?[0-9]+([,;\s]+-?[0-9]+)+", text):
                pending.append(("its text", [int(number) for number in re.findall("-?[0-9]{1,18}", text)]))
            elif text.startswith(("[", "{")):
                with suppress(ValueError, RecursionError):
                    pending.append(("its JSON", json.loads(text)))
        for name, item in pending:  # the list grows during the iteration
            if isinstance(item, (dict, list)) and len(item) == self.samples.num_samples > SHORT:
                return f"has {len(item)} entries in {name!r}, the number of samples"
            if isinstance(item, dict):
                pending += item.items()
            elif isinstance(item, list) and item and all(type(value) in (int, float) for value in item):
                numbers = _Numbers(self.samples.num_samples)
                numbers.add(np.array(item, float))
                reason = self._shape((len(item),)) or self._rows_in(name, {name: numbers})
                if reason is not None:
                    return f"has a list of {len(item)} in {name!r} that {reason}"
            elif isinstance(item, list):
                pending += ((name, value) for value in item)
        return None

    def _axes_of_scale(self, facts: DatasetFacts) -> set[int]:
        """Return the axes of fields that the dataset is a dimension scale of."""
        axes = set[int]()
        dataset = self._open(facts.path)
        if "REFERENCE_LIST" not in dataset.attrs:
            return axes
        fields = {each.path for each in (*self.samples.fields, *self.samples.other_datasets)}
        try:
            for entry in dataset.attrs["REFERENCE_LIST"]:
                if self.file[entry[0]].name.encode().strip(b"/") in fields:
                    axes.add(int(entry[1]))
        except DAMAGES:
            return {0}
        return axes

    # ---- values

    def _open(self, path: bytes) -> h5py.Dataset:
        return h5py.Dataset(h5d.open(self.file.id, path))

    def _values(self, facts: DatasetFacts) -> Iterator[np.ndarray] | None:
        """Return blocks of the values; None if they cannot be read safely."""
        dataset = self._open(facts.path)
        try:
            properties = dataset.id.get_create_plist()
            check_filters(properties, facts.name, trusted=False)
            check_stored_size(dataset, properties, facts.name)
            dataset.dtype  # noqa: B018  # raises TypeError for types that NumPy does not have
        except (FileError, TypeError):
            return None
        if not dataset.shape:
            return iter([np.asarray(dataset[()])])
        step = max(1, BLOCK_VALUES // max(1, math.prod(dataset.shape[1:])))
        return (dataset[first : first + step] for first in range(0, len(dataset), step))

    def _numbers(self, facts: DatasetFacts, limit: int | None) -> dict[str, _Numbers]:
        """Return facts about the numbers in a dataset, by column."""
        columns: dict[str, _Numbers] = {}
        if facts.kind not in "iufVO":
            return columns
        try:
            for block in self._values(facts) or ():
                for name, values in _columns(facts.name, block):
                    columns.setdefault(name, self._new(limit, values.dtype)).add(values)
                if not any(numbers.whole for numbers in columns.values()):
                    break
        except DAMAGES:  # such as damaged chunks; the copy keeps them as they are
            columns.clear()
        return columns

    def _new(self, limit: int | None, dtype: np.dtype) -> _Numbers:
        highest = np.iinfo(dtype).max if dtype.kind in "iu" else np.inf
        return _Numbers(limit, can_count=bool(highest >= self.samples.num_samples - 1))

    def _repeats(self, facts: DatasetFacts) -> bool:
        """Return whether a list of texts has one twice, like labels and unlike names; True for numbers."""
        if facts.kind not in "SO" or len(facts.shape or ()) != 1:
            return True
        try:
            texts = [value for block in self._values(facts) or () for value in block.tolist()]
            return len(set(texts)) < len(texts)
        except (*DAMAGES, TypeError):
            return True

    # ---- groups and attributes

    def _groups(self, known: set[bytes]) -> Iterator[Dependent]:
        """Yield the groups that may have a member for each sample."""
        members: dict[bytes, list[str]] = {}
        for node in self.survey.nodes:
            if node.path not in known and not self._is_kept(node.path) and not _is_own(node.path):
                members.setdefault(node.parent, []).append(as_text(node.name))
        for path, names in members.items():
            numbered = None if self._is_kept(path) else self._names(names, "members")
            if numbered is not None:
                yield Dependent(printable(path) or "/", numbered)

    def _names(self, names: list[str], noun: str) -> str | None:
        n, numbers = self.samples.num_samples, _Numbers(self.samples.num_samples)
        digits = [match[0] for name in names if (match := re.search(r"[0-9]{1,15}$", name))]
        numbers.add(np.array(digits, np.int64))
        is_numbered = numbers.whole and numbers.count > 1 and (numbers.count > SHORT or all(map(str.isdecimal, names)))
        if is_numbered or len(names) >= n > SHORT:
            return f"has {len(names)} {noun}, such as {printable(names[0])!r}, which may belong to one sample each"
        return None

    def _attributes(self) -> Iterator[Dependent]:
        for path in sorted(self.survey.paths.values()):
            if _is_own(path) or path == GROUP.encode():
                continue
            item = h5o.open(self.file.id, path or b"/")
            names = [name for name in attribute_names(item) if as_text(name) not in KNOWN_ATTRIBUTES]
            names = [name for name in names if path + b"@" + name not in self.kept]
            if (reason := self._names(list(map(as_text, names)), "attributes")) is not None:
                remedy = f"delete the attributes of {printable(path) or 'the file'!r}"
                yield Dependent(printable(path) or "/", reason, remedy)
                continue
            for name in names:
                attribute = h5a.open(item, name)
                if (reason := self._attribute(attribute, printable(name))) is not None:
                    yield Dependent(f"{printable(path)}@{printable(name)}", reason)

    def _attribute(self, attribute: h5a.AttrID, name: str) -> str | None:
        kind, shape = attribute.get_type(), attribute.shape
        if refers_to_regions(kind):
            return REGIONS
        if shape is None or 0 in shape:
            return None
        if (reason := self._opaque(kind, shape)) is not None:
            return reason
        if shape and (reason := self._shape(shape)) is not None:
            return reason
        try:
            values = np.empty(shape, attribute.dtype)
            attribute.read(values)
        except DAMAGES:
            return None
        if values.dtype.kind in "SO" and values.size <= MAX_TEXTS and (reason := self._text(values)) is not None:
            return reason
        if shape == () and (values.dtype.kind != "O" or isinstance(values[()], (bytes, str))):
            return None
        columns: dict[str, _Numbers] = {}
        for column, numbers in _columns(name, values):
            columns.setdefault(column, self._new(self.samples.num_samples, numbers.dtype)).add(numbers)
        return self._rows_in(name, columns)


def _refers(facts: DatasetFacts) -> str | None:
    """Return why the values, whatever their shape, refer to rows that a shuffle moves; None if they do not."""
    if facts.has_region_references:
        return REGIONS
    if facts.shape and any(name.startswith(b"_i_") for name in facts.path.split(b"/")):
        return "belongs to an index of PyTables over rows that a shuffle moves"
    return None


def _columns(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the numbers of an array, flat: of each column of a table, and of all elements of variable length."""
    if values.dtype.names:
        for column in values.dtype.names:
            yield from _columns(f"{name}.{column}", values[column])
    elif values.dtype.kind == "O":
        parts = [part.reshape(-1) for part in values.reshape(-1) if isinstance(part, np.ndarray) and part.size]
        if parts and all(part.dtype.kind in "iuf" for part in parts):
            yield name, np.concatenate(parts)
    elif values.dtype.kind in "iuf" and h5py.check_enum_dtype(values.dtype) is None:
        yield name, values.reshape(-1)


def _words(name: str) -> set[str]:
    """Split the last part of a path into words, and add the words of its groups that tell of lists of rows.

    >>> sorted(_words("mine/splits/trainIdx_2"))
    ['idx', 'splits', 'train']
    """
    parts = (re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part) for part in re.split(r"[/.@]", name))
    *parents, last = ({word.lower() for word in words} for words in parts)
    return last | (set().union(*parents) & LISTS)


def _is_own(path: bytes) -> bool:
    """Return whether an object belongs to the group of h5chunk, whose tables move with the samples."""
    return path.startswith(f"{GROUP}/".encode())
