"""A source of samples in memory, of several fields of different types, for tests of what writes and reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import SampleError
from h5chunk.sample_source import Names, SampleField, SampleSource
from h5chunk.store.write.samples import SampleJob
from h5chunk.tools.convert.options import SampleOptions
from h5chunk.tools.convert.report import ConvertReport
from h5chunk.tools.convert.run import Notify, SampleRun
from h5chunk.tools.convert.samples import prepare, split_job

FIELDS = {
    "depth": SampleField((7, 5), np.dtype(np.float32), "NHW"),
    "image": SampleField((6, 4, 3), np.dtype(np.uint8), "NHWC"),
    "age": SampleField((), np.dtype(np.int64)),
    "word": SampleField((2,), np.dtype("S3")),
}


def values_of(index: int, fields: Mapping[str, SampleField]) -> dict[str, np.ndarray]:
    """What sample ``index`` has in each field."""
    values = {}
    for name, each in fields.items():
        random = np.random.default_rng([index, *name.encode()])
        if each.dtype.kind == "S":
            values[name] = np.full(each.shape, f"w{index % 90}".encode(), each.dtype)
        else:
            values[name] = np.asarray(random.integers(0, 200, each.shape) * 1.25).astype(each.dtype)
    return values


@dataclass
class MemorySource(SampleSource):
    """Samples ``first`` to ``first + count``; those in ``bad`` cannot be read, ``counted`` are read by this process."""

    count: int
    first: int = 0
    fields: Mapping[str, SampleField] = field(default_factory=lambda: FIELDS)
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    categories: Mapping[str, list[str]] = field(default_factory=dict)
    bad: Sequence[int] = ()
    named: bool = False
    resumable: bool = True
    kill_at: int | None = None
    counted: list[int] = field(default_factory=list)

    kind = "memory"
    options: Mapping[str, Any] = field(default_factory=dict)
    ignored = ()
    notes = ()

    @property
    def names(self) -> Names | None:
        return Names(f"{self.first + i}".encode() for i in range(self.count)) if self.named else None

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"sample {index}"

    def read_columns(self) -> None:
        """All columns are known."""

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stamp(self, index: int) -> tuple[int, ...]:
        return (self.first + index,)

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        return ({"first": self.first}, ()) if self.resumable else None

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> Sequence[str]:
        if index == self.kill_at:
            os._exit(9)
        self.counted.append(index)
        for name, values in values_of(self.first + index, self.fields).items():
            out[name][...] = values
        if index in self.bad:
            raise SampleError("cannot be read")
        return ("read",)

    def disagreement(self) -> str:
        return "shapes differ"


def job_of(source: MemorySource, path: Path, **options: Any) -> SampleJob:
    """What is settled of a file of a source; to be written in this process if nothing else is said."""
    return prepare(source, path, SampleOptions(**{"workers": 0, **options}))


def write(
    source: MemorySource, path: Path, overwrite: bool = False, notify: Notify | None = None, **options: Any
) -> ConvertReport:
    """Write a file of a source, in this process if nothing else is said."""
    job, how = job_of(source, path, **options), SampleOptions(**{"workers": 0, **options})
    return SampleRun(job, split_job(job, how), overwrite, False, None, notify, perf_counter()).report(())


def check_samples(path: Path, numbers: Sequence[int], fields: Mapping[str, SampleField] = FIELDS) -> None:
    """The file has these samples, in the order that its index says, of the types that they had."""
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][()].tolist()
        assert sorted(index) == sorted(numbers)
        for name, each in fields.items():
            dataset = file[name]
            assert (dataset.shape[1:], dataset.dtype.str) == (each.shape, each.dtype.str)
            expected = np.array([values_of(number, {name: each})[name] for number in index])
            np.testing.assert_array_equal(dataset[()], expected)
