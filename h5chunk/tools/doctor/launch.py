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
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from h5chunk.errors import OptionError, SourceError

VARIABLE = "H5CHUNK_DOCTOR"
SITE = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path or ".") != here]
own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = own
from h5chunk.tools.doctor.launch import start
start()
"""


def run_command(command: Sequence[str], folder: Path, options: dict[str, Any], variables: dict[str, str]) -> int:
    """Run a training command, and return its exit status. Its processes write measurements to ``folder``."""
    (folder / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, **variables, VARIABLE: json.dumps({"folder": str(folder), **options})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    try:
        process = subprocess.Popen(list(command), env=environment, stdout=2)
    except OSError as error:
        raise SourceError(f"{command[0]}: cannot be run ({error.strerror})") from None
    try:
        return process.wait()
    except KeyboardInterrupt:
        if not _is_in_foreground():  # otherwise the terminal sent it to the command as well
            process.send_signal(signal.SIGINT)
        process.wait()
        return 0


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def check_command(command: Sequence[str]) -> None:
    """Raise OptionError if the command is empty."""
    if not command or not command[0]:
        raise OptionError("the command is missing: specify it after --, such as h5chunk doctor -- python train.py")


def start() -> None:
    """Install the hooks in this process once torch has been imported."""
    if VARIABLE in os.environ:
        sys.meta_path.insert(0, _AfterImport(json.loads(os.environ[VARIABLE])))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Install hooks when torch or the module of ChunkLoader is imported for the first time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._awaited = options, {"torch", "h5chunk.feed.loader"}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in self._awaited:
            return None
        self._awaited.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), self._install(module))  # type: ignore
        return spec

    def _install(self, module: ModuleType) -> None:
        from h5chunk.tools.doctor import watch

        if module.__name__ == "torch":
            watch.install(**self._options)
        else:
            watch.watch_chunk_loader(module)
