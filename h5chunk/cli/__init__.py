"""The command line: a thin layer of arguments, progress bars and exit codes around the functions of `h5chunk.tools`.

Exit codes: 0 for success, 1 for an expected error (one line on standard error), 2 for invalid arguments, 130 for
Ctrl-C.
"""

from __future__ import annotations

from h5chunk.cli import commands
from h5chunk.cli.group import main

__all__ = ["commands", "main"]
