"""Plot samples/s against effective batch size, one dot per setting, with the recommendation marked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, OutputError, printable
from h5chunk.tools.model.settings import frontier
from h5chunk.tools.tune.report import CHOSEN, TODAY, Recommendation


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise OptionError or OutputError, before anything is measured, if a picture cannot be written to this path."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise OptionError('plot needs matplotlib, which is missing: pip install "h5chunk[plot]"') from None
    path, kinds = Path(path), FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(f"{printable(path)}: cannot be drawn: its ending is none of {', '.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise OutputError(f"{printable(path)}: its folder {printable(path.parent)} does not exist: make it first")


def plot(found: Recommendation, path: str | os.PathLike[str]) -> None:
    """Draw the frontier of rate against effective batch, after `check_plot`; the path's suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, found)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1 * found.batch_size)
    axes.set_xlabel("samples/s")
    axes.set_ylabel(f"a batch of {found.batch_size} is worth")
    axes.set_title(f"{printable(Path(found.path).name)}: {found.row(CHOSEN).description}", fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{printable(path)}: cannot be drawn: {error}") from None
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written: {error.strerror}") from None


def _draw(axes: Any, found: Recommendation) -> None:
    """Draw all settings, the frontier, and the rows of the report. An unknown effective batch is a whole batch."""

    def worth(effective_batch: float | None) -> float:
        return float(found.batch_size if effective_batch is None else effective_batch)

    candidates = [replace(each, effective_batch=worth(each.effective_batch)) for each in found.candidates]
    for allowed, measured in ((True, True), (True, False), (False, True), (False, False)):
        some = [e for e in candidates if e.allowed == allowed and (e.measured_rate is not None) == measured]
        if some:
            color, word = ("tab:blue", "allowed") if allowed else ("tab:gray", "too much memory or mixes too little")
            label = f"{'measured' if measured else 'predicted'}, {word}"
            style: dict[str, Any] = {"color": color} if measured else {"facecolors": "none", "edgecolors": color}
            axes.scatter([e.rate for e in some], [e.effective_batch for e in some], label=label, zorder=2, **style)
    best = frontier(candidates)
    rates, ends = [each.rate for each in best], [each.effective_batch for each in best]
    axes.plot(rates, ends, color="tab:blue", linewidth=1, zorder=1, label="frontier")
    for name, marker in ((CHOSEN, "*"), (TODAY, "D")):
        row = found.row(name)
        style = {"marker": marker, "s": 180, "color": "tab:red", "edgecolors": "black", "zorder": 4}
        axes.scatter([row.rate], [worth(row.effective_batch)], label=name, **style)
    axes.axhline(found.min_effective_batch, color="tab:gray", linestyle="--", linewidth=1)
