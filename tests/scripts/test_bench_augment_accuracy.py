"""The comparison of accuracies, with h5chunk in the place of torchvision, which need not be installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.scripts import load, one_thread

__all__ = ["one_thread"]

script = load("bench_augment_accuracy")


def test_shapes() -> None:
    still, moved = (script.make_shapes(40, np.random.default_rng(0), moved=each) for each in (False, True))
    for images, labels in (still, moved):
        assert images.shape == (40, 3, 32, 32) and images.dtype == np.uint8 and sorted({*labels}) == list(range(10))
    assert len(np.unique(np.concatenate([still[0], moved[0]]), axis=0)) == 80


def test_equal_loaders_reach_the_same(monkeypatch, capsys) -> None:
    command = "x --seeds 2 --epochs 1 --count 40 20 --device cpu --margin 100"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(script, "torchvisions_loader", script.our_loader)
    with pytest.raises(SystemExit, match="augmentation gains less"):  # than 100 points
        script.main()
    printed = capsys.readouterr().out
    assert printed.count("difference: +0.00 +- 0.00 points") == 2 and "no augmentation: " in printed
