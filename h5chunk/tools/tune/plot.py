"""Plot samples/s against what a batch is worth: every setting is a dot, the choice is marked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, OutputError, printable
from h5chunk.tools.model.settings import Candidate, Setting, frontier
from h5chunk.tools.tune.report import CHOSEN, TODAY, Recommendation


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise OptionError or OutputError if a picture cannot be drawn there, before anything is measured."""
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
    """Draw the frontier of rate against effective batch.

    Parameters
    ----------
    found : Recommendation
    path : path
        The picture to write, after `check_plot`; its ending says of which kind, such as .png.

    Raises
    ------
    OptionError
        matplotlib writes no such kind.
    OutputError
        The picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, found)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{printable(path)}: cannot be drawn: {error}") from None
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written: {error.strerror}") from None


def _draw(axes: Any, found: Recommendation) -> None:
    kinds = ((True, "tab:blue", "allowed"), (False, "tab:gray", "too much memory or mixes too little"))
    for allowed, color, word in kinds:
        for measured in (True, False):
            some = [
                each
                for each in found.candidates
                if each["allowed"] == allowed and (each["measured_rate"] is not None) == measured
            ]
            if some:
                how = "measured" if measured else "predicted"
                look: dict[str, Any] = {"color": color} if measured else {"facecolors": "none", "edgecolors": color}
                rates, worths = [_rate(each) for each in some], [_worth(each, found) for each in some]
                axes.scatter(rates, worths, label=f"{how}, {word}", zorder=3 if measured else 2, **look)
    best = frontier([_candidate(each, found) for each in found.candidates])
    ends = [each.effective_batch for each in best]
    axes.plot([each.rate for each in best], ends, color="tab:blue", linewidth=1, zorder=1, label="frontier")
    for name, marker in ((CHOSEN, "*"), (TODAY, "D")):
        row = found.row(name)
        worth = found.batch_size if row.effective_batch is None else row.effective_batch
        style: dict[str, Any] = {"color": "tab:red", "edgecolors": "black", "zorder": 4}
        axes.scatter([row.rate], [worth], marker=marker, s=180, label=name, **style)
    axes.axhline(found.min_effective_batch, color="tab:gray", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1 * found.batch_size)
    axes.set_xlabel("samples/s")
    axes.set_ylabel(f"a batch of {found.batch_size} is worth")
    axes.set_title(f"{printable(Path(found.path).name)}: {found.row(CHOSEN).description}", fontsize=10)
    axes.figure.legend(fontsize=8, loc="outside lower center", ncols=3)


def _rate(each: dict[str, Any]) -> float:
    return float(each["predicted_rate"] if each["measured_rate"] is None else each["measured_rate"])


def _worth(each: dict[str, Any], found: Recommendation) -> float:
    """Of unknown quality: the whole batch."""
    return float(found.batch_size if each["effective_batch"] is None else each["effective_batch"])


def _candidate(each: dict[str, Any], found: Recommendation) -> Candidate:
    setting = Setting(each["way"], each["chunk_samples"], each["window_chunks"])
    return Candidate(setting, _rate(each), each["memory_bytes"], _worth(each, found))
