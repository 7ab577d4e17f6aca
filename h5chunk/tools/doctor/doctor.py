"""Diagnose a training loop: run a command with the hooks, or watch a loop in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from h5chunk.errors import OptionError, SourceError, UtilisationError
from h5chunk.tools.doctor.launch import check_command, run_command
from h5chunk.tools.doctor.report import Check, DoctorReport
from h5chunk.tools.measure.checks import check_budget


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
    seconds : float, optional
        End the command, or end watching, after this many seconds of training. Default: watch until the end.
    epochs : int, optional
        End the command, or end watching, after this many epochs.
    check : bool
        Run the command again with the first fix that can be applied without editing the script, and compare the
        measured gain with the predicted one.
    html : str or Path, optional
        Also write the report as a self-contained HTML page.
    assert_util : float, optional
        Raise an error if the GPU (or, without one, the step) works for less than this share of the time, such as 0.95.

    Returns
    -------
    DoctorReport
        Print it, or read its ``verdict``, ``utilisation`` and ``diagnosis``. With ``loader``, it is a context manager,
        and is filled at the end of the ``with`` block.

    Raises
    ------
    OptionError
        An argument is invalid.
    SourceError
        The command cannot be run, or no training loop of at least 12 batches was seen.
    OutputError
        The HTML page cannot be written.
    UtilisationError
        Utilisation is below ``assert_util``. The error's attribute ``report`` holds the report.
    """
    if seconds is not None:
        check_budget(seconds, "seconds")
    if assert_util is not None and not 0 < assert_util <= 1:
        raise OptionError(f"assert_util is {assert_util!r}: use a share above 0, up to 1")
    limits = {name: value for name, value in (("seconds", seconds), ("epochs", epochs)) if value}
    if loader is not None:
        if command or check:
            raise OptionError("a loader cannot be combined with command or check: pass either a loader or a command")
        return WatchedLoop(loader, step, limits, html, assert_util)
    if step is not None:
        raise OptionError("a step cannot be combined with a command: pass it together with a loader")
    check_command(command)
    report = _diagnose_command(command, {**limits, "end": True}, {})
    if check:
        report.check = _check(command, {**limits, "end": True}, report)
    _finish(report, html, assert_util)
    return report


def _diagnose_command(command: Sequence[str], options: dict[str, Any], variables: dict[str, str]) -> DoctorReport:
    with tempfile.TemporaryDirectory(prefix="h5chunk-doctor-") as folder:
        status = run_command(command, Path(folder), options, variables)
        report = DoctorReport()
        try:
            report.fill(Path(folder))
        except SourceError as error:
            raise (SourceError(f"{command[0]} failed with status {status}; {error}") if status else error) from None
        if status:
            report.notes.append(f"the command ended with status {status}")
    return report


def _check(command: Sequence[str], options: dict[str, Any], report: DoctorReport) -> Check | None:
    """Run the command again with the first fix that can be applied without editing the script.

    Returns None, and adds a note, if there is no such fix.
    """
    assert report.seen is not None and report.diagnosis is not None
    fix = next((fix for fix in report.diagnosis.fixes if fix.apply), None)
    if fix is None:
        report.notes.append("no fix can be checked without changing the script")
        return None
    threads = {"OMP_NUM_THREADS": str(fix.apply["threads"])} if "threads" in fix.apply else {}
    after = _diagnose_command(command, {**options, "fix": fix.apply}, threads).seen
    assert after is not None
    return Check(fix.name, fix.gain.value, fix.gain.low, fix.gain.high, after.rate / report.seen.rate)


def _finish(report: DoctorReport, html: str | Path | None, assert_util: float | None) -> None:
    if html is not None:
        from h5chunk.tools.doctor.page import write_page

        write_page(report, Path(html))
    if assert_util is not None and report.utilisation < assert_util:
        error = UtilisationError(f"utilisation is {report.utilisation:.3f}, below {assert_util}: {report.verdict}")
        error.report = report
        raise error


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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from h5chunk.tools.doctor import watch
        from h5chunk.tools.doctor.describe import time_step

        watch.remove()  # without the last iteration, in which workers may have been stopped
        try:
            if kind is None:
                batch = self._watch.batch
                cached = None if batch is None else time_step(self._step, batch)
                self.fill(Path(self._folder.name), vars(self._loader).get("_doctor_number"), cached)
                _finish(self, *self._last)
        finally:
            self._folder.cleanup()
            del self._loader, self._step, self._watch  # so that a kept report does not keep the data in memory
