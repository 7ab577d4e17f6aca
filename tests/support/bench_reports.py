"""Check that a report of bench is complete."""

from __future__ import annotations

import json

import pytest

import h5chunk
from h5chunk.tools.measure.stages import (
    CACHED,
    DATALOADER,
    DISK,
    LIMITS,
    LOADER,
    MEMORY,
    READERS,
    TO_DEVICE,
)

QUICK = {"budget_s": 0.2, "batch_size": 16, "workers": [0]}
NAMES = [
    (LIMITS, MEMORY), (LIMITS, CACHED), (LIMITS, DISK), (LIMITS, TO_DEVICE),
    (READERS, "direct"), (READERS, "h5py"), (DATALOADER, "0 workers"),
    (LOADER, "reuse=False"), (LOADER, "reuse=True"), (LOADER, "resident=True"),
]  # fmt: skip


def little_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let bench find so much free memory."""
    monkeypatch.setattr("h5chunk.tools.bench.bench.available_bytes", lambda: num_bytes)


def check_report(report: h5chunk.BenchReport, not_measured: set[str] = frozenset()) -> None:
    """All figures are there, and those named, and only those, say why they were not measured."""
    assert [(each.group, each.name) for each in report.figures] == NAMES
    for each in report.figures:
        if each.name in {TO_DEVICE, *not_measured}:
            assert each.samples_per_s is each.bytes_per_s is each.ratio is None
            assert each.note
        else:
            assert each.samples_per_s > 0 and each.bytes_per_s > 0 and each.rates, each
            assert (each.ratio is None) == (each.limit is None)
            assert each.limit or each.name in (MEMORY, DISK, CACHED)
    assert report.verdict.startswith("Slowest stage: ") and "\n" not in report.verdict
    assert report.seconds < 20
    json.loads(report.to_json(), parse_constant=pytest.fail)
    assert all(each.name in str(report) for each in report.figures)
