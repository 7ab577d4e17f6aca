"""Measure settings on the data under study, through the loaders themselves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from h5chunk.tools.measure.disk import FileReads, locate
from h5chunk.tools.measure.machine import NotMeasured
from h5chunk.tools.model.settings import LOADER, Setting, cut_order, order_of
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.study import Study

if TYPE_CHECKING:
    from h5chunk.tools.measure.batches import Epochs

MOST_LEAD = 3  # times the seconds of a measurement, to use up what was read ahead


def _open(study: Study, setting: Setting, device: str, budget: TimeBudget) -> Epochs:
    from h5chunk.tools.measure.batches import make_dataset, open_dataset, open_loader

    path, fields, num_samples = study.path_of(setting, budget)
    order = cut_order(order_of(setting, study.facts), num_samples)
    dataset = make_dataset(path, fields, study.reader.trusted)
    if setting.way == LOADER:
        return open_loader(dataset, order, device=device)
    return open_dataset(dataset, order, num_workers=setting.num_workers)


def measure(study: Study, setting: Setting, device: str, budget: TimeBudget, seconds: float) -> float:
    """Samples/s of a setting, from the page cache."""
    from h5chunk.tools.measure.batches import BatchRate

    batches = BatchRate(_open(study, setting, device, budget))
    try:
        return batches.rate(seconds, MOST_LEAD * seconds)
    finally:
        batches.close()


def measure_cold(study: Study, setting: Setting, device: str, budget: TimeBudget, seconds: float) -> float | None:
    """Samples/s from the disk, from the opening of the file on; None where it stays in the page cache."""
    from h5chunk.tools.measure.batches import first_epoch_rate

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
    return first_epoch_rate(lambda: _open(study, setting, device, budget), seconds)
