"""Run the code that `h5chunk info` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.commands import run


def printed_code(*arguments: object) -> str:
    """The lines of Python in the output of `h5chunk info`, which are indented by four spaces or more."""
    lines = run("info", *arguments).stdout.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("    import ")), len(lines))
    code = []
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        code.append(line[4:])
    return "\n".join(code)


def run_code(path: Path, *options: str) -> dict[str, Any]:
    """Run the printed lines as they are; returns their variables."""
    scope: dict[str, Any] = {"__name__": "printed"}
    exec(printed_code(path, *options), scope)
    return scope
