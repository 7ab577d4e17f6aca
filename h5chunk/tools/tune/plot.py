"""Draw the measured rates, one line per setting with its description."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, OutputError, printable
from h5chunk.tools.model.settings import Trial
from h5chunk.tools.tune.report import Recommendation
from h5chunk.tools.tune.search import PLAIN, TODAY

MOST_OTHERS = 12  # settings to draw of those that were measured only once
COLORS = {TODAY: "tab:blue", PLAIN: "tab:gray"}


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise OptionError or OutputError if a picture cannot be written to this path, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise OptionError('plot needs matplotlib, which is missing: pip install "h5chunk[plot]"') from None
    path, kinds = Path(path), FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(f"{printable(path)}: cannot be drawn: its suffix must be one of {', '.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise OutputError(f"{printable(path)}: its folder {printable(path.parent)} does not exist: make it first")


def plot(found: Recommendation, path: str | os.PathLike[str]) -> None:
    """Draw the rates of the measured settings to a file, whose suffix chooses the format, after `check_plot`."""
    from matplotlib.figure import Figure

    others = _others(found)
    figure = Figure(figsize=(9, 1.6 + 0.42 * (len(found.rows) + len(others))), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, found, others)
    axes.set_xscale("log")
    axes.set_xlabel("samples/s (bars: where 95 % of the turns lie, against today's rate)")
    figure.suptitle(f"{printable(Path(found.path).name)}: {found.headline()}", fontsize=9, wrap=True)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{printable(path)}: cannot be drawn: {error}") from None
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written: {error.strerror}") from None


def _others(found: Recommendation) -> list[Trial]:
    """Return the fastest of the settings that were measured but are not in the report's table."""
    shown = {row.setting for row in found.rows}
    others = [each for each in found.candidates if each.rate is not None and each.setting not in shown]
    return sorted(others, key=lambda each: each.rate or 0.0, reverse=True)[:MOST_OTHERS]


def _draw(axes: Any, found: Recommendation, others: list[Trial]) -> None:
    """Draw a line for each row of the report, then one for each other setting."""
    labels, today = list[str](), found.row(TODAY).rate
    for place, row in enumerate(found.rows):
        color = "tab:red" if row.name == found.chosen != TODAY else COLORS.get(row.name, "tab:green")
        axes.plot(row.rate, place, "o", color=color)
        if row.times is not None:
            ends = [max(limit, 1e-3) * today for limit in (row.times.low, min(row.times.high, 1e3))]
            axes.plot(ends, [place, place], color=color, linewidth=2)
        title = f"{row.name}{', recommended' if row.name == found.chosen else ''}"
        labels.append("\n".join([title, *_about(row.description, row.effective_batch, found.batch_size)]))
    for place, trial in enumerate(others, len(labels)):
        axes.plot(trial.rate, place, "o", color="tab:gray", fillstyle="none")
        setting = f"{trial.setting} (measured once)"
        labels.append("\n".join(_about(setting, trial.effective_batch, found.batch_size)))
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)


def _about(setting: str, effective: float | None, batch_size: int) -> list[str]:
    """Return the lines of a label: the setting, and its effective batch if that is smaller than the batch."""
    mixes = effective is None or effective >= batch_size
    worth = "" if mixes else f"; a batch of {batch_size} mixes like {effective:.0f} shuffled samples"
    return textwrap.wrap(f"{setting}{worth}", 64)
