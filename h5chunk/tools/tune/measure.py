"""Settings measured on real data: through the loaders themselves, and plain h5py as people write it."""

from __future__ import annotations

import os
import time
from typing import Any

import h5py
import numpy as np

from h5chunk.store.format import open_file
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.tools.measure.disk import FileReads, locate
from h5chunk.tools.measure.machine import NotMeasured
from h5chunk.tools.model.settings import LOADER, Setting, cut_order, order_of
from h5chunk.tools.tune.clock import Budget
from h5chunk.tools.tune.study import Study


def open_trial(study: Study, setting: Setting, device: str, budget: Budget) -> Any:
    """Batches of a setting, whose ``rate(seconds)`` gives samples/s; to be closed."""
    from h5chunk.tools.measure.trial import dataset_trial, loader_trial

    path, fields, num_samples = study.path_of(setting, budget)
    order = cut_order(order_of(setting, study.facts), num_samples)
    trusted = study.reader.trusted
    if setting.way == LOADER:
        return loader_trial(path, order, fields=fields, device=device, trusted=trusted)
    return dataset_trial(path, order, fields=fields, num_workers=setting.num_workers, trusted=trusted)


def measure(study: Study, setting: Setting, device: str, budget: Budget, seconds: float) -> float:
    """Samples/s of a setting, warm."""
    trial = open_trial(study, setting, device, budget)
    try:
        return float(trial.rate(seconds))
    finally:
        trial.close()


class PlainLoop:
    """Single random samples by ``h5py.File(path)[name][i]``, stacked into batches: what most training loops do.

    Parameters
    ----------
    study : Study
    seed : int
        Of the random order.
    """

    def __init__(self, study: Study, seed: int = 0) -> None:
        self._file = open_file(study.reader.path)
        fields = [each for each in study.reader.fields.values() if not isinstance(each, MatrixField)]
        self._datasets = [self._file[each.dataset] for each in fields]
        self._matrix = self._file[study.reader.matrix.dataset] if study.reader.matrix is not None else None
        self._rng = np.random.default_rng(seed)
        self._num_samples = study.num_measured
        self._batch = min(study.facts.batch_size, study.facts.num_samples)

    def rate(self, seconds: float) -> float:
        """Samples/s over about so many seconds, at least one sample."""
        started, done = time.perf_counter(), 0
        deadline = started + seconds
        while time.perf_counter() < deadline or not done:
            samples: list[list[Any]] = [[] for _ in self._datasets]
            for row in self._rng.integers(0, self._num_samples, self._batch).tolist():
                for dataset, found in zip(self._datasets, samples, strict=True):
                    found.append(dataset[row])
                if self._matrix is not None:
                    self._read_row(self._matrix, row)
                done += 1
                if time.perf_counter() >= deadline:
                    break
            for found in samples:
                np.stack(found)
        return done / (time.perf_counter() - started)

    def _read_row(self, matrix: h5py.Group, row: int) -> None:
        start, stop = matrix["indptr"][row : row + 2].tolist()
        row_values = np.zeros(int(self._columns(matrix)), np.float32)
        row_values[matrix["indices"][start:stop]] = matrix["data"][start:stop]

    def _columns(self, matrix: h5py.Group) -> int:
        shape = matrix.attrs.get("shape", matrix.attrs.get("h5sparse_shape"))
        return int(shape[1])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def measure_cold(study: Study, setting: Setting, device: str, budget: Budget, seconds: float) -> float | None:
    """Samples/s from the disk, from the opening of the file on; None where it stays in the page cache."""
    path, _, _ = study.path_of(setting, budget)
    if study.matrix:
        return None
    reads = FileReads(path)
    try:
        if path == study.reader.path:
            reads.drop(locate(study.reader).chunks())
        else:
            with path.open("r+b") as file:
                os.fsync(file.fileno())  # what is not on disk yet cannot be dropped
            reads.drop([(0, path.stat().st_size)])
    except NotMeasured as reason:
        study.note(f"not measured from the disk: {reason}")
        return None
    finally:
        reads.close()
    from h5chunk.tools.measure.trial import first_epoch

    started = time.perf_counter()
    trial_path, fields, num_samples = study.path_of(setting, budget)
    order = cut_order(order_of(setting, study.facts), num_samples)
    options: dict[str, Any] = {"device": device, "num_workers": _workers(setting), "trusted": study.reader.trusted}
    num = first_epoch(trial_path, order, seconds, fields=fields, **options)
    return num / (time.perf_counter() - started)


def _workers(setting: Setting) -> int | None:
    return None if setting.way == LOADER else setting.num_workers
