"""Diagnose a training loop: run a command with the hooks, or watch a loop in this process."""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from h5chunk.errors import OptionError, OutputError, UtilisationError, check_whole
from h5chunk.paths import expanded
from h5chunk.tools.doctor.collect import was_ended
from h5chunk.tools.doctor.launch import check_command, run_command
from h5chunk.tools.doctor.report import Check, DoctorReport
from h5chunk.tools.measure.checks import check_budget
from h5chunk.tools.report import check_writable


def doctor(
    loader: Any = None,
    step: Callable[[Any], object] | None = None,
    *,
    command: Sequence[str] = (),
    seconds: float | None = None,
    epochs: int | None = None,
    check: bool = False,
    html: str | Path | None = None,
    assert_util: float | None = None,
    stdout: int | None = None,
) -> DoctorReport:
    """Diagnose a training loop: find what it waits for, and predict the gain of each change.

    Watch a loop over a DataLoader or `ChunkLoader` in this process; training is not changed::

        with h5chunk.doctor(loader) as report:
            for images, labels in loader:
                train(images, labels)
        print(report)

    or run a command that trains: ``h5chunk.doctor(command=["python", "train.py"], seconds=60)``.

    Parameters
    ----------
    loader : DataLoader or ChunkLoader, optional
        The loader to watch.
    step : callable, optional
        A function that trains with one batch. After the block, it is called up to 110 times with the last batch, to
        measure the speed of training without waiting. This trains the model further, but restores the state of torch's
        random number generators.
    command : sequence of str, optional
        A program with its arguments, instead of ``loader``. It must start Python in an environment with h5chunk.
        Signals are forwarded to it.
    seconds : float, optional
        End the command, or end watching, after this many seconds of training. Default: watch until the end.
    epochs : int, optional
        End the command, or end watching, after this many epochs, at least 1.
    check : bool
        Run the command again with the first fix that can be applied without editing the script, and compare the
        measured gain with the predicted one.
    html : str or Path, optional
        Also write the report as a self-contained HTML page.
    assert_util : float, optional
        Raise an error if the GPU (or, without one, the step) works for less than this share of the time, such as 0.95,
        or if this is unknown.
    stdout : int, optional
        Where the command's standard output goes, as for `subprocess.Popen`. Default: this process's standard output.

    Returns
    -------
    DoctorReport
        Print it, or read its ``verdict``, ``utilisation`` and ``diagnosis``, or ``reason`` if there is no diagnosis,
        such as after fewer than 12 batches. ``status`` is the exit status of the command. With ``loader``, the report
        is a context manager, and is filled at the end of the ``with`` block.

    Raises
    ------
    OptionError
        An argument is invalid.
    SourceError
        The command cannot be run.
    OutputError
        The HTML page cannot be written. Where this shows only at the end, the attribute ``report`` holds the report.
    UtilisationError
        Utilisation is below ``assert_util`` or unknown. The error's attribute ``report`` holds the report.
    """
    if seconds is not None:
        check_budget(seconds, "seconds")
    if epochs is not None:
        epochs = check_whole("epochs", epochs, 1)
    html = expanded(html)
    if html is not None:
        check_writable(Path(html))
    if assert_util is not None and not 0 < assert_util <= 1:
        raise OptionError(f"assert_util is {assert_util!r}: use a share above 0, up to 1")
    limits = {name: value for name, value in (("seconds", seconds), ("epochs", epochs)) if value is not None}
    if loader is not None:
        if command or check:
            raise OptionError("a loader cannot be combined with command or check: pass either a loader or a command")
        if isinstance(loader, (str, bytes)):
            raise OptionError(f"loader is {loader!r}: pass a DataLoader, or command=['python', 'train.py']")
        return WatchedLoop(loader, step, limits, html, assert_util)
    if step is not None:
        raise OptionError("a step cannot be combined with a command: pass it together with a loader")
    check_command(command)
    run = partial(_diagnose_command, command, stdout)
    report = run({**limits, "end": True}, {})
    if check and not report.status:
        report.check = _check(run, {**limits, "end": True}, report)
    _finish(report, html, assert_util)
    return report


def _diagnose_command(
    command: Sequence[str], stdout: int | None, options: dict[str, Any], variables: dict[str, str]
) -> DoctorReport:
    with tempfile.TemporaryDirectory(prefix="h5chunk-doctor-") as folder:
        status = run_command(command, Path(folder), options, variables, stdout)
        report = DoctorReport()
        report.fill(Path(folder))
        if was_ended(Path(folder)):
            if status:
                report.notes.append(f"when doctor ended the command, its status was {status}")
        elif status:
            report.status = status if status > 0 else 128 - status
            how = f"with status {status}" if status > 0 else f"by signal {-status} ({signal.strsignal(-status)})"
            report.notes.append(f"the command ended {how}")
    return report


def _check(run: Callable[..., DoctorReport], options: dict[str, Any], report: DoctorReport) -> Check | None:
    """Run the command again with the first fix that can be applied without editing the script.

    Returns None, and adds a note, if there is no such fix, or if it cannot be measured.
    """
    fixes = [] if report.diagnosis is None else report.diagnosis.fixes
    fix = next((fix for fix in fixes if fix.apply), None)
    if fix is None or report.seen is None:
        report.notes.append("no fix can be checked without changing the script")
        return None
    threads = {"OMP_NUM_THREADS": str(fix.apply["threads"])} if "threads" in fix.apply else {}
    after = run({**options, "fix": fix.apply}, threads)
    if after.seen is None or after.status:
        report.notes.append(f"{fix.name} could not be checked: {'; '.join(filter(None, [after.reason, *after.notes]))}")
        return None
    return Check(fix.name, fix.gain.value, fix.gain.low, fix.gain.high, after.seen.rate / report.seen.rate)


def _finish(report: DoctorReport, html: str | Path | None, assert_util: float | None) -> None:
    """Write the page, and check the utilisation. Errors have the report as an attribute, so that it is not lost."""
    try:
        if html is not None:
            from h5chunk.tools.doctor.page import write_page

            write_page(report, Path(html))
        if assert_util is not None and not report.utilisation >= assert_util:
            known = f"{report.utilisation:.3f}, below {assert_util}"
            is_unknown = math.isnan(report.utilisation)
            problem = f"unknown, so that it cannot be compared with {assert_util}" if is_unknown else known
            raise UtilisationError(f"utilisation is {problem}: {report.verdict or report.reason}")
    except (OutputError, UtilisationError) as error:
        error.report = report
        raise


class WatchedLoop(DoctorReport):
    """A report that is filled at the end of a ``with`` block."""

    def __init__(self, loader: Any, step: Any, limits: dict[str, Any], *last: Any) -> None:
        super().__init__()
        self._loader, self._step, self._limits, self._last = loader, step, limits, last

    def __enter__(self) -> WatchedLoop:
        from h5chunk.tools.doctor import watch

        self._folder = tempfile.TemporaryDirectory(prefix="h5chunk-doctor-")
        self._watch = watch.install(self._folder.name, batch=self._step is not None, **self._limits)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        from h5chunk.tools.doctor import watch
        from h5chunk.tools.doctor.describe import time_step

        watch.remove()  # without the last iteration, in which workers may have been stopped
        try:
            if kind is None:
                batch, cached = self._watch.batch, None
                if batch is not None:
                    try:
                        cached = time_step(self._step, batch)
                    except Exception as error:
                        self.notes.append(f"the step was not timed, because it raised {type(error).__name__}")
                self.fill(Path(self._folder.name), getattr(self._loader, "__dict__", {}).get("_doctor_number"), cached)
                _finish(self, *self._last)
        finally:
            self._folder.cleanup()
            del self._loader, self._step, self._watch  # so that a kept report does not keep the data in memory
