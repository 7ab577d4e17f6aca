"""Sizes and durations are read with their units, and anything else is an error that shows valid ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.commands import run
from support.foreign import make_file

from h5chunk.errors import OptionError
from h5chunk.tools.units import parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "number"), [("1GiB", 1 << 30), ("1.5g", 3 << 29), (" 64 MB ", 64 << 20), ("2k", 2048), ("77", 77)]
)
def test_sizes(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("10s", 10), ("2m", 120), ("2min", 120), ("1.5h", 5400), (" .5 S ", 0.5)]
)
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


NEITHER = [
    "",
    "GiB",
    "much",
    "1 e",
    "inf",
    "nan",
    "-1",
    "1e9",
    "1e9s",
    "1_0",
    "ms",
    "1ib",
    "2mm",
    "1m30s",
    "0x10",
    "1\nk",
]


@pytest.mark.parametrize("text", NEITHER)
def test_other_texts_are_errors_that_show_valid_ones(text):
    with pytest.raises(OptionError, match="is not a size: use a number of bytes, or a size such as "):
        parse_bytes(text)
    with pytest.raises(OptionError, match="is not a time: use a number of seconds, or a time such as 500ms, 60s"):
        parse_seconds(text)


def test_a_budget_of_half_a_second_is_one(tmp_path):
    path = make_file(tmp_path / "a.h5", images=(np.zeros((600, 8), "u1"), {}))
    result = run("bench", path, "--budget", "500ms", "--json", "--workers", "0")
    assert result.exit_code == 0 and 0.3 < json.loads(result.stdout)["seconds"] < 30
    for command in (["bench", path, "--budget", "soon"], ["doctor", "--seconds", "soon", "--", "x"]):
        result = run(*command)
        assert result.exit_code == 2 and "'soon' is not a time" in result.stderr
