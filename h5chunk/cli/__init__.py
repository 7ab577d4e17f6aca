"""The command line: arguments, progress bars and exit codes around the functions of `h5chunk.tools`.

Exit codes: 0 success, 1 an expected error (one line on standard error), 2 arguments that cannot be parsed, 130 Ctrl-C.
"""

from __future__ import annotations

from h5chunk.cli import commands
from h5chunk.cli.group import main

__all__ = ["commands", "main"]
