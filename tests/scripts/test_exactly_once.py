"""The scripts that count what is missed or repeated, and that train on several GPUs: small, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.foreign import make_file, values

from h5chunk.plan.order import Order

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import exactly_once  # noqa: E402

ORDER = Order(101, 4, 24, 2, 6, seed=1, lanes=12)


def arrays(*steps: list[int]) -> list[np.ndarray]:
    return [np.array(step, int) for step in steps]


@pytest.mark.parametrize(
    ("found", "missed", "repeated", "other_steps"),
    [
        (arrays([0, 1], [2, 3]), 0, 0, 0),
        (arrays([0, 1], [2]), 1, 0, 1),
        (arrays([0, 1], [0, 1]), 2, 2, 1),
        (arrays([2, 3], [0, 1]), 0, 0, 2),
        (arrays([0, 1], [2, 3], [3]), 0, 1, 1),
        (arrays(), 4, 0, 2),
    ],
)
def test_what_is_missed_and_repeated_is_counted(found, missed, repeated, other_steps):
    count = exactly_once.Count()
    count.add(arrays([0, 1], [2, 3]), found)
    assert (count.missed, count.repeated, count.other_steps) == (missed, repeated, other_steps)
    assert count.is_clean == (not missed + repeated + other_steps)


@pytest.mark.parametrize("tail", exactly_once.TAILS)
def test_the_order_misses_and_repeats_nothing(tail):
    count = exactly_once.Count()
    exactly_once.pure_cases(replace(ORDER, **exactly_once.TAILS[tail]), tail, count)
    assert count.is_clean and count.cases == (4 if tail == "drop_last" else 5) * 18 * 18


def test_an_order_that_misses_samples_is_noticed(monkeypatch):
    batches = Order.batches
    monkeypatch.setattr(Order, "batches", lambda order, start=0: batches(order, start + (start > 1)))
    count = exactly_once.Count()
    exactly_once.pure_cases(ORDER, "exact", count)
    assert count.missed and not count.is_clean


def test_an_epoch_that_is_not_exact_is_noticed():
    steps = [np.sort(batch) for batch in ORDER.batches()]
    exactly_once.check_whole(steps, 101, 24, "exact")
    for wrong, tail in ((steps[1:], "exact"), ([*steps, steps[0]], "exact"), (steps, "pad"), (steps, "drop_last")):
        with pytest.raises(SystemExit, match="misses or repeats samples"):
            exactly_once.check_whole(wrong, 101, 24, tail)


def test_training_on_two_processes(tmp_path):
    images = (values((200, 3, 16, 16), np.uint8), {"chunks": (8, 3, 16, 16)})
    path = make_file(tmp_path / "a.h5", images=images, labels=(np.arange(200) % 10, {}))
    options = ["--gpus", "2", "--model", "cnn", "--batch-size", "16", "--block", "1", "--blocks", "2"]
    command = [sys.executable, SCRIPTS / "train_ddp.py", path, *options, "--json", tmp_path / "a.json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "2 GPUs: " in said and "images/s a GPU" in said
    found = json.loads((tmp_path / "a.json").read_text())["gpus"]["2"]
    assert len(found["real_over_cached"]) == 2 and all(len(rank["real"]) == 2 for rank in found["ranks"])
