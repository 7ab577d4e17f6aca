"""The notebooks run from the first cell to the last, in any folder and on nothing but what they make."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDED = {
    "matrices": ["pyarrow", "scipy.sparse"],
    "episodes": ["matplotlib"],
    "tune": ["matplotlib"],
    "resume": ["obstore"],
}


def cells_of(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_outside_of_the_checkout(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED.get(path.stem, ()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells_of(path)):
            exec(compile(cell, f"{path.name}, cell {number}", "exec"), names)
    assert "Traceback" not in printed.getvalue()


def test_the_readme_links_to_every_notebook() -> None:
    linked = re.findall(r"\]\((notebooks/\w+\.ipynb)\)", (ROOT / "README.md").read_text())
    assert {ROOT / name for name in linked} == set(NOTEBOOKS) and len(NOTEBOOKS) <= 6


def test_links_of_the_readme_exist() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
