"""Measure the rate of a setting with the loaders themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """Measure samples/s of a setting, from the page cache."""
    from h5chunk.tools.measure.batches import BatchRate

    batches = BatchRate(_open(study, setting, device, budget))
    try:
        return batches.rate(seconds, MOST_LEAD * seconds)
    finally:
        batches.close()
