"""Write a report as a self-contained HTML page with the ladder and a timeline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from h5chunk.errors import OutputError, printable
from h5chunk.tools.doctor.report import DoctorReport
from h5chunk.tools.model.seen import Seen

WIDTH, BAR, GAP, LEFT = 720, 22, 8, 240  # pixels
SHOWN = 60  # iterations in the timeline
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 2em } code { background: #f3f3f3; padding: 0 .2em }
svg text { font: 12px system-ui, sans-serif } li { margin: .5em 0 } .key { font-size: 13px; color: #555 }
pre { white-space: pre-wrap }
"""
STEP, WAIT = "#4878a8", "#d9822b"


def write_page(report: DoctorReport, path: Path) -> None:
    """Write the page. Raise OutputError if the file cannot be written."""
    found = figures(report) if report.diagnosis is not None else f"<h1>{escape(report.reason)}</h1>"
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>h5chunk doctor</title><style>{STYLE}</style>"
    text = f"{head}\n{found}\n<h2>All figures</h2><pre>{escape(str(report))}</pre></html>\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written ({error.strerror})") from None


def figures(report: DoctorReport) -> str:
    """Return the verdict, the ladder, a timeline and the fixes as HTML."""
    assert report.diagnosis is not None and report.seen is not None
    fixes = "".join(
        f"<li><b>{escape(fix.name)}</b>: {escape(fix.gain_text)}<br><code>{escape(fix.code)}</code></li>"
        for fix in report.diagnosis.fixes
    )
    key = f"<span style='color:{STEP}'>■</span> the step <span style='color:{WAIT}'>■</span> waiting for a batch"
    return f"""<h1>{escape(report.verdict)}</h1>
<h2>Training, in {report.seen.unit}/s, as one stage after another is added</h2>
{_ladder(report)}
<h2>The last {min(SHOWN, len(report.seen.steps))} iterations</h2>
{_timeline(report.seen)}
<p class='key'>{key}</p>
<h2>{"Fixes, by predicted gain" if fixes else "No fix is known"}</h2><ol>{fixes}</ol>
{f"<p>Checked: {escape(str(report.check))}.</p>" if report.check is not None else ""}"""


def _ladder(report: DoctorReport) -> str:
    rungs = report.rates()
    top, rows = max(rate for _, rate, _ in rungs), []
    for number, (name, rate, _) in enumerate(rungs):
        y, width = number * (BAR + GAP), max(2.0, (WIDTH - LEFT - 110) * rate / top)
        rows.append(f"<text x='{LEFT - 8}' y='{y + 16}' text-anchor='end'>{escape(name)}</text>")
        rows.append(_bar(LEFT, y, width, STEP if number < len(rungs) - 1 else "#888"))
        rows.append(f"<text x='{LEFT + width + 6:.0f}' y='{y + 16}'>{rate:,.0f}</text>")
    return _svg(rows, len(rungs) * (BAR + GAP))


def _timeline(seen: Seen) -> str:
    """Draw when training waited and worked in the last iterations, along a common time axis."""
    pairs = list(zip(seen.waits, seen.steps, strict=True))[-SHOWN:]
    total, x, rows = sum(map(sum, pairs)), 0.0, [f"<text x='0' y='{BAR + 20}'>0 s</text>"]
    for seconds, color in (
        (seconds, color) for pair in pairs for seconds, color in zip(pair, (WAIT, STEP), strict=True)
    ):
        width = WIDTH * seconds / max(1e-9, total)
        rows.append(_bar(x, 0, width, color))
        x += width
    return _svg([*rows, f"<text x='{WIDTH}' y='{BAR + 20}' text-anchor='end'>{total:.3g} s</text>"], BAR + 26)


def _bar(x: float, y: float, width: float, color: str) -> str:
    return f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{BAR}' fill='{color}'/>"


def _svg(rows: list[str], height: int) -> str:
    return f"<svg width='{WIDTH}' height='{height}' role='img'>{''.join(rows)}</svg>"
