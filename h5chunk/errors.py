"""Exception classes of h5chunk, and functions that format messages.

The command line prints the message of an `H5ChunkError` and exits with status 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any


class H5ChunkError(Exception):
    """Base class of the exceptions of h5chunk; ``str()`` returns the message as one printable line.

    Parameters
    ----------
    *args : object
        The first argument is the message.
    message : str, optional
        A message of several lines, used instead of ``args``. torch passes one with the traceback of a worker.
    """

    report: Any = None  # the report of what a command did before the error, if it did something
    message = "(unset)"  # torch passes ``message`` by name to exception classes that have this attribute

    def __init__(self, *args: object, message: str | None = None) -> None:
        super().__init__(*args if message is None else (message,))
        self._has_lines = message is not None

    def __str__(self) -> str:  # without this, OSError and KeyError would reformat the message
        text = str(self.args[0]) if self.args else ""
        return "\n".join(map(printable, text.split("\n"))) if self._has_lines else printable(text)


class OptionError(H5ChunkError, ValueError):
    """An argument or option is invalid."""


class MissingPackageError(H5ChunkError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


class SourceError(H5ChunkError, ValueError):
    """The raw data is missing, empty or inconsistent."""


class SampleError(SourceError):
    """A sample of the source cannot be used."""


class ShapeError(SampleError):
    """The shape of a sample differs from that of earlier samples, and no option allows this."""


class OutputError(H5ChunkError, OSError):
    """The output cannot be written: it exists, is in use, or the disk is full."""


class FileError(H5ChunkError, OSError):
    """A file cannot be read: it is missing, damaged, of the wrong kind, or has changed since it was opened."""


class ChangedError(FileError):
    """A file was changed, replaced, removed or closed since it was opened, or cannot be opened again.

    No data set skips this error.
    """


class FieldError(FileError, KeyError):
    """A file lacks a requested field, or a dataset in it cannot be used as a field."""


class UnsupportedError(FieldError):
    """The content of a file is valid HDF5 but not supported, such as a huge dataset that was never written."""


class TrustError(FieldError):
    """A file refers to other files or needs plugins, which is allowed only with ``trusted=True``."""


def is_of_data(error: BaseException | None) -> bool:
    """Return whether an error is due to damaged data: not to a file that changed, nor to how it was opened."""
    return isinstance(error, FileError) and not isinstance(error, (ChangedError, FieldError))


class StateError(H5ChunkError, ValueError):
    """A saved state is invalid, or belongs to another file, seed, batch size or order."""


class WorkerError(H5ChunkError, RuntimeError):
    """A worker process died, or a reader thread hangs."""


class UtilisationError(H5ChunkError, AssertionError):
    """The GPU utilisation of a training run is below the minimum that was passed to `h5chunk.doctor`, or unknown.

    The attribute ``report`` is the `h5chunk.DoctorReport` of the run.
    """


MAX_NUMBER = (1 << 63) - 1  # the largest int64
MAX_SIDE = 1 << 14  # largest height or width of an image to augment, so that their product fits in 32 bits


def check_whole(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Convert a Python or NumPy integer to int.

    Raises OptionError if ``value`` is not an integer from ``minimum`` to ``maximum``, both inclusive; its message calls
    the value ``name``. Without ``maximum``, the limit is `MAX_NUMBER`.
    """
    is_whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)
    if is_whole and minimum <= value <= (MAX_NUMBER if maximum is None else maximum):
        return int(value)
    is_huge = is_whole and value > MAX_NUMBER
    is_open = maximum is None and not is_huge
    limits = f", at least {minimum}" if is_open else f" from {minimum} to {maximum or MAX_NUMBER}"
    raise OptionError(f"{name} is {value!r}: pass a whole number{limits}")


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False; otherwise raise OptionError, whose message calls it ``name``."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: pass True or False")
    return value


shown_as: dict[str, str] = {}  # paths of local copies (folders end with a slash), and the URLs to display instead


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text for messages; for the local copy of a remote object, return the object's URL."""
    text = os.fspath(path)
    for local, url in shown_as.items():
        if text == local or (local.endswith("/") and text.startswith(local)):
            return url + text[len(local) :]
    return text


def as_text(name: str | bytes | os.PathLike[str]) -> str:
    r"""Return a name as text that UTF-8 can encode: bytes that are not UTF-8, and lone surrogates, are escaped.

    >>> as_text(b"caf\xe9.jpg")
    'caf\\xe9.jpg'
    """
    path = os.fspath(name)
    text = path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path
    return re.sub("[\ud800-\udfff]", _escape, text)


def printable(name: str | bytes | os.PathLike[str]) -> str:
    r"""Escape a name, or a line of a message, so that any terminal can print it safely.

    Line breaks, control characters, invisible characters and characters that change the text direction are escaped.

    >>> printable("images\nverified\x1b[2K")
    'images\\nverified\\x1b[2K'
    """
    text = as_text(shown(name) if shown_as and not isinstance(name, bytes) else name)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _escape(match: re.Match[str]) -> str:
    """Escape a lone surrogate; one that ``surrogateescape`` produced is escaped as the original byte."""
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def human_bytes(num_bytes: float) -> str:
    """Format a number of bytes for display.

    >>> human_bytes(1204224)
    '1.1 MiB'
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} {'byte' if num_bytes == 1 else 'bytes'}"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def allowing(num_bytes: int) -> str:
    """Return a limit on memory, for the command line, that allows a number of bytes.

    >>> allowing(3 << 30), allowing(100)
    ('4G', '1G')
    """
    return f"{num_bytes // (1 << 30) + 1}G"


def exact_bytes(num_bytes: int) -> str:
    """Format a number of bytes for a message that compares it with a limit, so that close numbers differ.

    >>> exact_bytes(1204224)
    '1,204,224 bytes (1.1 MiB)'
    """
    text = human_bytes(num_bytes)
    return text if num_bytes < 1024 else f"{num_bytes:,} bytes ({text})"


def difference_text(first: Sequence[Any], second: Sequence[Any], path: str, other_path: str) -> str:
    """Describe which names occur in only one of two files, or else where their order first differs.

    >>> difference_text([b"A", b"C"], [b"A", b"B"], "x.h5", "y.h5")
    "1 only in x.h5, such as 'C'; 1 only in y.h5, such as 'B'"
    """
    only = {path: sorted({*first} - {*second}, key=str), other_path: sorted({*second} - {*first}, key=str)}
    parts = [
        f"{len(names):,} only in {where}, such as {', '.join(map(_quoted, names[:3]))}"
        for where, names in only.items()
        if names
    ]
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    position = next(differing, min(len(first), len(second)))
    return "; ".join(parts) or f"they differ from position {position} on"


def _quoted(name: Any) -> str:
    return repr(as_text(name)) if isinstance(name, (str, bytes)) else str(name)


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> count_text(1, "chunk"), count_text(2000, "entry"), count_text(2, "batch")
    ('1 chunk', '2,000 entries', '2 batches')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def names_text(names: Iterable[object], limit: int = 8) -> str:
    """Join names for a message, and replace all but the first ``limit`` by their number.

    >>> names_text("abcde", limit=3), names_text(["a", "b"])
    ('a, b, c and 2 more', 'a, b')
    """
    words = [printable(str(name)) for name in names]
    more = f" and {len(words) - limit:,} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def closed(path: str | bytes | os.PathLike[str]) -> ChangedError:
    """Return the error for a read of a file that was closed meanwhile."""
    return ChangedError(f"{printable(path)}: the file was closed while it was read")


def lost_by_fork(path: Path) -> ChangedError:
    """Return the error for a read in a forked process, which does not inherit the reader threads."""
    return ChangedError(
        f"{printable(path)}: this process was forked during an iteration, and has no reader threads: start a new "
        "iteration in it"
    )
