"""Find the samples of a data set for which a condition is true, a part of the data set at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, H5ChunkError, OptionError, count_text, names_text
from h5chunk.plan.condition import Column, Condition
from h5chunk.store.hdf5.child import in_child
from h5chunk.store.read.fields import NAME_FIELDS, columns_of

if TYPE_CHECKING:
    from h5chunk.feed.dataset import ChunkDataset

PART_SAMPLES = 1 << 20  # limit on the samples whose values are in memory at a time, and are passed to a function
PART_BYTES = 64 << 20  # limit on the size of their values, after the first part
FIRST_SAMPLES = 1 << 12  # samples of the first part, which shows how large values are
Function = Callable[[Mapping[str, np.ndarray]], Any]


def find_samples(dataset: ChunkDataset, condition: str | Function) -> np.ndarray:
    """Return the numbers of the samples for which a condition is true: (n,) int64, ascending.

    Raises OptionError if the condition is invalid, or false for all samples.
    """
    parsed = Condition(condition) if isinstance(condition, str) else None
    columns, found = _Columns(dataset, parsed), [np.empty(0, np.int64)]
    for values in _parts(columns):
        found.append(np.flatnonzero(_mask(condition if parsed is None else parsed, values)) + values.start)
    numbers = np.concatenate(found)
    if not len(numbers):
        text = repr(condition) if parsed is None else repr(parsed.text)
        seen = "".join(f"; {name} is from {low} to {high}" for name, (low, high) in columns.ranges.items())
        seen += "".join(f"; {name} has values such as {example!r}" for name, example in columns.examples.items())
        raise OptionError(
            f"the condition {text} is false for all {count_text(len(dataset), 'sample')}{seen}: change the condition"
        )
    return numbers


def read_column(dataset: ChunkDataset, name: str) -> Iterator[tuple[int, Column]]:
    """Read a field, or ``source_name`` or ``sample_number``. Yields the first sample and the values of each part."""
    for values in _parts(_Columns(dataset, None)):
        yield values.start, values.column(name)


def _parts(columns: _Columns) -> Iterator[_Values]:
    """Yield the values of consecutive samples. There is at least one part."""
    start, size, num_samples = 0, FIRST_SAMPLES, len(columns.dataset)
    while not start or start < num_samples:
        values = _Values(columns, start, min(start + min(size, PART_SAMPLES), num_samples))
        yield values
        size = max(1, PART_BYTES * values.num_samples // max(1, values.num_bytes))
        start += max(1, values.num_samples)


def _mask(condition: Any, values: _Values) -> np.ndarray:
    """Return for which samples a condition or a function is true: (n,) bool."""
    if isinstance(condition, Condition):
        return condition.mask(values.column, values.num_samples)
    if not callable(condition):
        raise OptionError(f"condition is a {type(condition).__name__}: pass a str, or a function of the values")
    mask = np.asarray(condition(values))
    if mask.dtype != bool or mask.shape != (values.num_samples,):
        raise OptionError(
            f"the condition returns {mask.dtype} of shape {mask.shape}: return a bool for each sample, of shape "
            f"({values.num_samples},), as in lambda values: values['labels'] == 1"
        )
    return mask


class _Columns:
    """The fields of a data set that have one value per sample. Each is opened when it is first used."""

    def __init__(self, dataset: ChunkDataset, condition: Condition | None) -> None:
        self.dataset, self._condition = dataset, condition
        self.ranges: dict[str, tuple[Any, Any]] = {}  # the smallest and largest number of each field that was read
        self.examples: dict[str, str] = {}  # the first string of each field that was read
        self._opened: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Any]] = {}

    @cached_property
    def names(self) -> list[str]:
        """The fields of the data set with one value per sample."""
        fields = {name: self.dataset.field(name) for name in self.dataset.fields}
        return [name for name, field in fields.items() if not field.sample_shape]

    def read(self, name: str, samples: np.ndarray) -> Column:
        """Read values of samples, given their numbers in the file: (n,)."""
        try:
            if name not in self._opened:
                self._opened[name] = self._open(name)
            read, categories = self._opened[name]
            values = read(samples)
        except (FieldError, OptionError) as error:
            if self._condition is None:
                raise
            problem = str(error).removesuffix(f": {NAME_FIELDS}")
            problem += (
                f"; the fields with one value per sample are {names_text(self._usable)}{self._condition.hint(name)}"
            )
            raise type(error)(self._condition.error(name, problem)) from None
        if values.dtype.kind in "biuf" and len(values):
            bounds = np.fmin.reduce(values), np.fmax.reduce(values)
            low, high = self.ranges.get(name, bounds)
            self.ranges[name] = min(low, bounds[0]), max(high, bounds[1])
        if values.dtype.kind == "U" and len(values):
            self.examples.setdefault(name, str(values[0]))
        is_coded = categories is not None and values.dtype.kind == "i"
        return Column(values, values < 0 if is_coded else False, categories)

    @property
    def _usable(self) -> list[str]:
        """The names that a condition may have: of fields, of other datasets of the first file, and `own_columns`."""
        found, own = self.names, dict(self.dataset.own_columns)
        for name in [*own]:
            try:
                own[name](np.empty(0, np.int64))
            except FieldError:  # the files have no names of samples
                del own[name]
        with suppress(H5ChunkError):
            first = self.dataset.new_reader().readers[0]
            found = found + in_child(first.path, columns_of, first.path, first.trusted, first.num_samples)
        return list(dict.fromkeys((*found, *own)))

    def _open(self, name: str) -> tuple[Callable[[np.ndarray], np.ndarray], Any]:
        if name in self.dataset.own_columns and name not in self.dataset.fields:
            return self.dataset.own_columns[name], None
        read = self.dataset.reader_of(name)
        has_categories = self.dataset.has_categories(name)
        return read, partial(self.dataset.categories, name) if has_categories else None


class _Values(Mapping[str, np.ndarray]):
    """The values of some samples of a data set, by field: (n,) each, read when they are first used."""

    def __init__(self, columns: _Columns, start: int, stop: int) -> None:
        self.start, self.num_samples = start, stop - start
        self._columns, self._read = columns, dict[str, Column]()
        subset = columns.dataset.subset_samples
        self._samples = np.arange(start, stop) if subset is None else subset[start:stop]

    def column(self, name: str) -> Column:
        """Return a field with the names of its categories."""
        if name not in self._read:
            self._read[name] = self._columns.read(name, self._samples)
        return self._read[name]

    @property
    def num_bytes(self) -> int:
        """Size of the values that were read, in bytes."""
        return sum(column.values.nbytes for column in self._read.values())

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.column(name).values)

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)
