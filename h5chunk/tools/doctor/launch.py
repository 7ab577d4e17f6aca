"""Run a training script with the hooks of `h5chunk.tools.doctor.watch`, without changing it.

A ``sitecustomize.py`` in a temporary folder on PYTHONPATH calls `start` in each Python process of the command. `start`
installs the hooks once torch has been imported, and the hooks of ChunkLoader once its module has been imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from h5chunk.errors import OptionError, SourceError, printable

VARIABLE = "H5CHUNK_DOCTOR"
STARTED, TORCH = "started", "torch"  # files in the folder of measurements: a process was started, and imported torch
NOTICE_S = 60  # seconds after which the user is told that nothing has been measured
GRACE_S = 5.0  # seconds to wait for the other processes of a command that was ended by a signal
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # terminals send these to all processes of a command
ENDING = (*FROM_TERMINAL, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)  # clusters send SIGUSR1 and SIGUSR2 before the time is over
SITE = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path or ".") != here]
own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = own
try:
    from h5chunk.tools.doctor.launch import start
except Exception:  # another Python, which does not have h5chunk
    start = int
start()
"""


def run_command(
    command: Sequence[str], folder: Path, options: dict[str, Any], variables: dict[str, str], stdout: int | None = None
) -> int:
    """Run a training command, and return its exit status. Its processes write measurements to ``folder``.

    Signals that this process receives meanwhile are forwarded to the command.
    """
    (folder / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, **variables, VARIABLE: json.dumps({"folder": str(folder), **options})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    with Forwarding() as signals:
        try:
            process = subprocess.Popen(list(command), env=environment, stdout=stdout)
        except OSError as error:
            raise SourceError(f"{printable(command[0])}: cannot be run ({error.strerror})") from None
        signals.forward_to(process)
        try:
            process.wait(NOTICE_S)
        except subprocess.TimeoutExpired:
            if not has_measured(folder):
                print(f"h5chunk doctor: after {NOTICE_S} s, {why_nothing(folder)}", file=sys.stderr, flush=True)
        return process.wait()


def has_measured(folder: Path) -> bool:
    """Return whether a process has written measurements to the folder."""
    return any(folder.glob("*.jsonl"))


def why_nothing(folder: Path) -> str:
    """Say why no process of a command has measured a training loop so far, and what can be measured."""
    if not (folder / STARTED).exists():
        return (
            "no Python process of the command could be watched: the command must start Python in an environment that "
            "has h5chunk, without the options -I, -E and -S"
        )
    if not (folder / TORCH).exists():
        return "no process of the command has imported torch, so there was no training to measure"
    return (
        "no loop over a torch DataLoader or a ChunkLoader, and no optimizer of torch.optim, has been seen: to see what "
        "another loop waits for, let torch.utils.data.DataLoader(dataset, batch_size=None) yield its batches, where "
        "dataset is an IterableDataset"
    )


def check_command(command: Sequence[str]) -> None:
    """Raise OptionError if the command is empty."""
    if isinstance(command, (str, bytes)):
        raise OptionError(f"command is {command!r}: pass a list of the program and its arguments")
    if not command or not command[0]:
        raise OptionError("the command is missing: specify it after --, such as h5chunk doctor -- python train.py")


def start() -> None:
    """Install the hooks in this process once torch has been imported. Errors are ignored: training must not fail."""
    with suppress(Exception):
        options = json.loads(os.environ[VARIABLE])
        Path(options["folder"], STARTED).touch()
        sys.meta_path.insert(0, _AfterImport(options))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Install hooks when torch or the module of ChunkLoader is imported for the first time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._awaited = options, {"torch", "h5chunk.feed.loader"}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in self._awaited:
            return None
        self._awaited.discard(name)
        spec = None
        with suppress(Exception):  # then the import goes on without hooks
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (execute(module), self._install(module))  # type: ignore
        return spec

    def _install(self, module: ModuleType) -> None:
        with suppress(Exception):
            from h5chunk.tools.doctor import watch

            if module.__name__ == "torch":
                Path(self._options["folder"], TORCH).touch()
                watch.install(**self._options)
            else:
                watch.watch_chunk_loader(module)


class Forwarding:
    """A context in which this process forwards signals to a command, so that it cannot go on without this process.

    Signals other than those of a terminal go to the command alone, which may want to save its state and to end its own
    processes. Those that are left when it has ended get the signal, too.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self._descendants: dict[int, str] = {}  # the times when they started, by process ID

    def __enter__(self) -> Forwarding:
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            for number in FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # such as SIGHUP under nohup
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        """Forward the signals that were received already, and all later ones, to this process."""
        self._process = process
        for number in list(self._received):
            self._forward(number)

    def _receive(self, number: int, _frame: Any) -> None:
        self._received.append(number)
        if self._process is not None:
            self._forward(number)

    def _forward(self, number: int) -> None:
        assert self._process is not None
        self._descendants.update(_descendants(self._process.pid))
        if number not in FROM_TERMINAL:
            self._process.send_signal(number)
        elif not _is_in_foreground():  # otherwise the terminal sent it to all of them
            for process in (self._process.pid, *self._descendants):
                _send(process, number)

    def __exit__(self, *_: Any) -> None:
        if ending := [number for number in self._received if number in ENDING]:
            left = self._left()
            for process in left:
                _send(process, ending[-1])
            deadline = time.monotonic() + GRACE_S
            while left and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._left()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _left(self) -> list[int]:
        """Return the descendants that still run, and are not other processes with the same ID."""
        return [process for process, started in self._descendants.items() if _stat(process)[1] == started]


def _send(process: int, number: int) -> None:
    with suppress(OSError):  # it has ended
        os.kill(process, number)


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return False


def _stat(process: int) -> tuple[int, str]:
    """Return the parent of a process, and when it started; (0, "") if it has ended or the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        state, parent, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":
            return int(parent), fields[17]
    return 0, ""


def _descendants(process: int) -> dict[int, str]:
    """Return when each child of a process, and each of their children, started. Empty if the system does not say."""
    children: dict[int, list[tuple[int, str]]] = {}
    with suppress(OSError):
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                parent, started = _stat(int(path.name))
                children.setdefault(parent, []).append((int(path.name), started))
    found, waiting = dict[int, str](), [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += [child for child, _ in below]
    return found
