"""Plot the measured rates, with a line per setting."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, OutputError, printable
from h5chunk.extras import load
from h5chunk.tools.model.settings import Trial
from h5chunk.tools.report import check_writable
from h5chunk.tools.tune.report import Recommendation
from h5chunk.tools.tune.search import PLAIN, TODAY

MAX_OTHERS = 12  # maximum number of settings to draw that were measured only once
COLORS = {TODAY: "tab:blue", PLAIN: "tab:gray"}


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise OptionError or OutputError if a picture cannot be written to this path."""
    bases = load("matplotlib.backend_bases", "plot")
    path, kinds = Path(path), bases.FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(f"{printable(path)}: is not a picture: use one of the suffixes {', '.join(sorted(kinds))}")
    check_writable(path)


def plot(report: Recommendation, path: str | os.PathLike[str]) -> None:
    """Plot the rates of the measured settings to a file in the format of its suffix. Call `check_plot` first."""
    from matplotlib.figure import Figure

    others = _others(report)
    figure = Figure(figsize=(9, 1.6 + 0.42 * (len(report.rows) + len(others))), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, report, others)
    axes.set_xscale("log")
    axes.set_xlabel("samples/s (bars: range of 95 % of the turns, relative to today's rate)")
    figure.suptitle(f"{printable(Path(report.path).name)}: {report.headline()}", fontsize=9, wrap=True)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{printable(path)}: cannot be drawn ({error})") from None
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written ({error.strerror})") from None


def _others(report: Recommendation) -> list[Trial]:
    """Return the fastest of the measured settings that are not in the report's table."""
    in_rows = {row.setting for row in report.rows}
    others = [trial for trial in report.candidates if trial.rate is not None and trial.setting not in in_rows]
    return sorted(others, key=lambda trial: trial.rate or 0.0, reverse=True)[:MAX_OTHERS]


def _draw(axes: Any, report: Recommendation, others: list[Trial]) -> None:
    """Draw a line for each row of the report, then a line for each other setting."""
    labels, today = list[str](), report.row(TODAY).rate
    for height, row in enumerate(report.rows):
        color = "tab:red" if row.name == report.chosen != TODAY else COLORS.get(row.name, "tab:green")
        axes.plot(row.rate, height, "o", color=color)
        if row.times is not None:
            ends = [max(limit, 1e-3) * today for limit in (row.times.low, min(row.times.high, 1e3))]
            axes.plot(ends, [height, height], color=color, linewidth=2)
        title = f"{row.name}{', recommended' if row.name == report.chosen else ''}"
        labels.append("\n".join([title, *_about(row.description, row.effective_batch, report.batch_size)]))
    for height, trial in enumerate(others, len(labels)):
        axes.plot(trial.rate, height, "o", color="tab:gray", fillstyle="none")
        setting = f"{trial.setting} (measured once)"
        labels.append("\n".join(_about(setting, trial.effective_batch, report.batch_size)))
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)


def _about(setting: str, effective: float | None, batch_size: int) -> list[str]:
    """Return the lines of a label: the setting, and its effective batch if this is smaller than the batch."""
    mixes = effective is None or effective >= batch_size
    worth = "" if mixes else f"; a batch of {batch_size} is as diverse as {effective:.0f} shuffled samples"
    return textwrap.wrap(f"{setting}{worth}", 64)
