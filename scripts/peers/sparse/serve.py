"""Run one contender in its own process, with commands on standard input: see `bench_sparse.py`.

    python -m peers.sparse.serve JSON      # {"module", "form", "settings", "source", "batch_size"}

Each line of input is a command, and is answered by a line of JSON. ``first`` builds the contender (and its file, if it
is missing), and runs an epoch that compares every row by its checksum. ``epoch N`` runs a timed epoch. ``check N``
compares again. Libraries write to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from peers.sparse.checks import Checker, Wrong
from peers.sparse.matrix import Source


def file_path(module: str, kind: type, source: Source, settings: dict) -> Path:
    """Return the path of the contender's file for these settings."""
    marks = [f"{name}={settings[name]}" for name in kind.FILE_SETTINGS if name in settings]
    return Path(source.folder) / "-".join([module, source.name, *marks])


def make(kind: type, source: Source, path: Path, settings: dict) -> None:
    """Make the file, which gets its name once it is complete."""
    if not hasattr(kind, "make") or path.exists():
        return
    part = path.with_name(f"{path.name}.part")
    if part.exists():
        raise Wrong(f"{part} was left by a run that ended early: remove it")
    kind.make(source, part, **{name: settings[name] for name in kind.FILE_SETTINGS if name in settings})
    part.rename(path)


def timed(batches: Iterator, checker: Checker) -> dict[str, Any]:
    """Run an epoch; return its rows, seconds, and processor time without workers.

    The last row of each batch is checked after the clock has stopped.
    """
    started, cpu = time.perf_counter(), time.process_time()
    rows, probes = 0, []
    for batch in batches:
        rows += batch.shape[0]
        probes.append(checker.last_row(batch))
        del batch
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    for probe in probes:
        checker.check_row(probe)
    return {"rows": rows, "seconds": seconds, "cpu_seconds": cpu}


class Server:
    def __init__(self, request: dict) -> None:
        self.source = Source(**request["source"])
        self.settings, self.batch_size, self.form = request["settings"], request["batch_size"], request["form"]
        self.kind = import_module(f"peers.sparse.{request['module']}").Contender
        self.path = file_path(request["module"], self.kind, self.source, self.settings)

    def first(self) -> dict[str, Any]:
        make(self.kind, self.source, self.path, self.settings)
        self.contender = self.kind(self.source, self.path, self.batch_size, self.form, **self.settings)
        if hasattr(self.contender, "run"):
            self.contender.run(0)
            return {}
        self.checker = Checker(self.source, self.batch_size, self.form)
        return self.checker.epoch(self.contender.epoch(0))

    def epoch(self, number: int) -> dict[str, Any]:
        """Time the second of two epochs in a row, because the first starts with data that was read ahead."""
        if not hasattr(self.contender, "run"):
            for _ in self.contender.epoch(2 * number - 1):
                pass
            return timed(self.contender.epoch(2 * number), self.checker)
        self.contender.run(2 * number - 1)
        started, cpu = time.perf_counter(), time.process_time()
        rows = self.contender.run(2 * number)
        seconds = time.perf_counter() - started
        return {"rows": rows, "seconds": seconds, "cpu_seconds": time.process_time() - cpu}

    def check(self, number: int) -> dict[str, Any]:
        """Compare another epoch, like the command ``first``."""
        return self.checker.epoch(self.contender.epoch(number)) if hasattr(self, "checker") else {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server: Server | None = None
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            server = server or Server(json.loads(sys.argv[1]))
            answer = getattr(server, command)(*map(int, arguments))
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
