"""The base of all reports: escaped lines of text, and JSON for programs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError, as_text, printable
from h5chunk.store.write.part_file import check_parent

MAX_LISTED = 6  # names per line


def list_some(names: Sequence[str]) -> str:
    """Count names and list the first few.

    >>> list_some(["cat", "dog"]), list_some(list("abcdefghij"))
    ('2: cat, dog', '10: a, b, c, d, e, f, ...')
    """
    more = ["..."] if len(names) > MAX_LISTED else []
    return f"{len(names):,}: {', '.join([*names[:MAX_LISTED], *more])}"


def rows(label: str, values: str | Iterable[object], limit: int | None = None) -> list[str]:
    """Return an indented line for each value, starting with ``label``.

    One more line counts the values beyond ``limit``. ``values`` may also be one string; an empty string gives no line.
    """
    values = list(filter(None, [values])) if isinstance(values, str) else list(values)
    more = [f"{len(values) - limit:,} more (--json lists all)"] if limit is not None and len(values) > limit else []
    return [f"  {f'{label} {value}'.lstrip()}" for value in [*values[:limit], *more]]


def values_text(dtype: str, scale: float) -> str:
    """Describe the dtype and scale in which the values of a matrix are stored.

    >>> values_text("float32", 1.0), values_text("uint8", 2.0)
    ('stored as float32', 'stored times 2 as uint8')
    """
    return f"stored as {dtype}" if scale == 1 else f"stored times {scale:g} as {dtype}"


UNBROKEN = "\0"  # stands for a space at which `wrap` breaks no line; neither names in files nor paths can contain it
HANGING = 20  # columns that must be left for the last column of a table, so that its lines continue below it


def code(text: str) -> str:
    """Mark code, or a command, in a line of a report, so that it can be copied even if the line is wrapped."""
    return text.replace(" ", UNBROKEN)


def wrap(line: str, width: int) -> list[str]:
    """Break a line at spaces into lines of at most ``width`` characters, if possible; 0 means that there is no limit.

    Further lines are indented like the last column of a table, or by two more spaces than the first line.

    >>> wrap("  note: see the file", 14), wrap("name  a b c", 9), wrap(code("import h5chunk"), 5)
    (['  note: see', '    the file'], ['name  a b', '  c'], ['import\\x00h5chunk'])
    """
    if not width or len(line) <= width:
        return [line]
    text = line.lstrip()
    start = len(line) - len(text)
    indent = start + 2
    column = max((gap.end() for gap in re.finditer(r"(?<=\S) {2,}", line)), default=0)
    if indent < column <= width - HANGING:
        indent = column
    indents: dict[str, Any] = {"initial_indent": " " * start, "subsequent_indent": " " * indent}
    return textwrap.wrap(text, width, **indents, break_long_words=False, break_on_hyphens=False)


class Report:
    """Base class of the dataclasses that commands print.

    A subclass implements `lines`, in which names from files are not escaped, and `code` marks what may be copied.
    ``str()`` escapes control characters in each line, so that names cannot break lines or control a terminal;
    ``to_json()`` keeps them.
    """

    def lines(self) -> Iterable[str]:
        """Return the report as lines of text."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name, for `to_json`."""
        return asdict(self)  # type: ignore[call-overload]

    def text(self, width: int = 0) -> str:
        """Return the report as text, with lines of at most ``width`` characters; 0 means that there is no limit.

        Code and commands are not broken.
        """
        escaped = (UNBROKEN.join(map(printable, line.split(UNBROKEN))) for line in self.lines())
        return "\n".join(part for line in escaped for part in wrap(line, width)).replace(UNBROKEN, " ")

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(_plain(self.facts()), indent=2)


def check_writable(path: Path) -> None:
    """Raise OutputError unless a picture or page can be written to a path, where a file may exist."""
    if path.is_dir():
        raise OutputError(f"{printable(path)} is a folder: use the name of a file")
    if not path.exists():
        check_parent(path)
    elif not os.access(path, os.W_OK):
        raise OutputError(f"{printable(path)} cannot be replaced, because it is not writable: use another path")


def shell_command(words: Iterable[str]) -> str:
    r"""Join words into a command that bash and zsh split into the same words, without control characters.

    >>> print(shell_command(["h5chunk", "info", "a b.h5", "x\x1b.h5"]))
    h5chunk info 'a b.h5' $'x\x1b.h5'
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def python_text(text: str) -> str:
    """Return a text as a Python literal without control characters, in double quotes if possible."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else ascii(text)


def _escaped(word: str) -> str:
    """Escape a word for use between the quotes of ``$''``."""
    bare = "".join(rf"\{letter}" if letter in "\\'" else letter for letter in word)
    return "".join(c if c.isprintable() else "".join(rf"\x{byte:02x}" for byte in os.fsencode(c)) for c in bare)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; infinity and NaN become None, and text that is not UTF-8 is escaped."""
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, dict):
        return {as_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return as_text(value) if isinstance(value, str) else value
