"""Run the command line in this process, or on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from click.testing import CliRunner, Result

from h5chunk.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def check_error(result: Result, message: str) -> None:
    """Exit code 1, one line on standard error, nothing else."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


def on_terminal(*arguments: object) -> tuple[str, str]:
    """What the command prints to (standard output, a terminal as standard error)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    try:
        command = [sys.executable, "-m", "h5chunk", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        output = process.communicate(timeout=60)[0]
        drawn = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # nothing more
                break
            if not block:
                break
            drawn += block
    finally:
        os.close(ours)
    assert process.returncode == 0
    return output.decode(), drawn.decode()
