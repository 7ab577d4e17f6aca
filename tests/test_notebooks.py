"""The notebooks run from the first cell to the last, in any folder and on nothing but what they make."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import h5chunk

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


@pytest.mark.parametrize("options", [{}, {"resident": True}, {"reuse": True}], ids=str)
def test_hard_examples_resume(options: dict[str, bool], tmp_path: Path) -> None:
    """With the losses that training has set since the next batches were drawn, and with these batches."""
    cell = next(cell for cell in cells_of(ROOT / "notebooks/images.ipynb") if "class HardExamples" in cell)
    names: dict[str, Any] = {"torch": torch}
    exec(cell.split("\nsampler =")[0], names)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(400)
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x"])

    def trained(count: int | None, state: Any = None) -> tuple[list[list[int]], Any, torch.Tensor]:
        sampler, batches = names["HardExamples"](400, 4), []
        with h5chunk.ChunkLoader(dataset, batch_sampler=sampler, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for (numbers,) in chain.from_iterable(loader for _ in range(3)):
                batches.append(numbers.tolist())
                sampler.losses[numbers] = torch.where(numbers % 3 == 2, 0.9, 0.1) / len(batches[-1])
                sampler.losses[numbers.max()] += sum(batches[-1]) / 1000  # no two batches teach the same
                if len(batches) == count:
                    break
            return batches, loader.state_dict(), sampler.losses.clone()

    whole = trained(250)
    for stop in (1, 7, 20, 98, 100, 101, 130):
        before, state, losses = trained(stop)
        assert torch.equal(state["sampler"]["losses"], losses)
        after, last, losses = trained(250 - stop, state)
        assert before + after == whole[0] and torch.equal(losses, whole[2])
        assert {name: value for name, value in last.items() if name != "sampler"} == {
            name: value for name, value in whole[1].items() if name != "sampler"
        }


def test_the_readme_links_to_every_notebook() -> None:
    linked = re.findall(r"\]\((notebooks/\w+\.ipynb)\)", (ROOT / "README.md").read_text())
    assert {ROOT / name for name in linked} == set(NOTEBOOKS) and len(NOTEBOOKS) <= 6


def test_links_of_the_readme_exist() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
