"""The notebooks run from the first cell to the last."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    names: dict[str, object] = {}
    printed = io.StringIO()
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    assert "Traceback" not in printed.getvalue()


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
