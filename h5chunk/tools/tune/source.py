"""Prepare the tuning of a source that is not converted yet: make a small file of the same shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import human_bytes
from h5chunk.sources.open import find_kind
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.convert.convert import convert, foresee_convert
from h5chunk.tools.convert.report import ConvertPlan
from h5chunk.tools.convert.report_matrix import MatrixPlan
from h5chunk.tools.measure.machine import available_bytes
from h5chunk.tools.model.settings import DataFacts
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.study import Study, most_samples, study_file, write_rows

CONVERT_SHARE = 0.25  # of the budget: a sparse source that takes less is converted as a whole
RANDOM_BYTES = 16 << 20  # of pixels, which are used again and again: what they are changes no rate


def is_source(path: str | os.PathLike[str]) -> bool:
    """Whether a path exists and is not an HDF5 file: then it has to be converted first."""
    return os.path.exists(path) and not (Path(path).is_file() and h5py.is_hdf5(path))


def study_source(
    source: str | os.PathLike[str],
    *,
    batch_size: int,
    size: tuple[int, int] | None,
    folder: Path,
    budget: TimeBudget,
) -> Study:
    """Inspect a source and write a file of the same shape to measure.

    Parameters
    ----------
    source : path
        Images or a sparse matrix, as `h5chunk.convert` takes them.
    batch_size : int
    size : (height, width), optional
        That images will be brought to.
    folder : Path
        For the file.
    budget : TimeBudget

    Raises
    ------
    SourceError, SampleError, OptionError
        As `h5chunk.plan_convert`, but for the room on the disk.
    OutputError
        There is no room for a sample of it.
    """
    options: dict[str, Any] = {} if size is None else {"size": size, "fit": "stretch"}
    if "split_folders" in find_kind(source).Options.names():
        options["split_folders"] = "no"  # classes or splits, images lie as they lie
    try:
        plan = foresee_convert(source, folder / "plan.h5", **options)
    except SourceError:
        _check_files(Path(source))
        raise
    if isinstance(plan, MatrixPlan):
        study = _matrix(source, plan, batch_size, folder, budget)
    else:
        study = _images(plan, batch_size, folder)
    study.source = str(source)
    study.note("not converted yet: rates are those of a file of this shape, read from the page cache")
    return study


def _check_files(folder: Path) -> None:
    """Raise OptionError for a folder of files that are converted already."""
    if folder.is_dir() and (found := sorted(each for each in folder.glob("*.h5") if h5py.is_hdf5(each))):
        raise OptionError(
            f"{printable(folder)}: holds files that are converted already, and tune takes one: give "
            f"{printable(found[0])}, whose window and cache will do for files like it"
        )


def _images(plan: ConvertPlan, batch_size: int, folder: Path) -> Study:
    """Make a file of random pixels and other fields, in the chunks that convert would choose."""
    layout, shape = plan.layout, tuple(plan.sample_shape)
    dtypes = {name: np.dtype(dtype) for name, dtype in plan.fields.items()}
    shapes = plan.shapes
    sample_bytes = sum(int(np.prod(shapes[name])) * dtype.itemsize for name, dtype in dtypes.items())
    if (room := available_bytes() // 4) < sample_bytes:
        given, limit = human_bytes(sample_bytes), human_bytes(room)
        raise OptionError(f"a sample is {given}, but tune takes at most {limit} here: give a smaller --size (size=)")
    count = min(plan.num_samples, most_samples(batch_size, sample_bytes))
    few = max(1, min(count, RANDOM_BYTES // sample_bytes))
    rows = {name: _random(dtype, (few, *shapes[name])) for name, dtype in dtypes.items()}
    path = folder / "source.h5"
    write_rows(path, rows, count, layout.chunk_samples)
    named = {name: f"f{number}" for number, name in enumerate(rows)}
    facts = DataFacts(
        grid=ChunkGrid((plan.num_samples, *shape), (layout.chunk_samples, *shape), 1),
        sample_bytes=sample_bytes,
        chunk_samples=layout.chunk_samples,
        batch_size=batch_size,
        window_chunks=layout.window_chunks,
        shuffled=True,
        loads=all(dtype.kind != "S" for dtype in dtypes.values()),
    )
    return Study(H5Reader(path, named), named, facts, None, folder, count, rows=rows)


def _random(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(0).bytes(num_bytes), dtype).reshape(shape)


def _matrix(
    source: str | os.PathLike[str], plan: MatrixPlan, batch_size: int, folder: Path, budget: TimeBudget
) -> Study:
    """Convert the matrix itself, if that takes little time."""
    if plan.estimated_s >= CONVERT_SHARE * budget.seconds:
        raise SourceError(
            f"{printable(source)}: converting it takes about {plan.estimated_s:.0f} s: give a --budget of "
            f"{plan.estimated_s / CONVERT_SHARE:.0f}s, or convert it first"
        )
    convert(source, folder / "source.h5")
    return study_file(folder / "source.h5", {"X": "X"}, batch_size=batch_size, group_by=None, folder=folder)
