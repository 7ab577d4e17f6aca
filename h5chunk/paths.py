"""Check the paths that callers pass, and expand ``~`` in them."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from h5chunk.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])


def expanded(path: Any) -> Any:
    """Expand ``~`` or ``~user`` at the start of a path, unless there is a file of that name.

    The URL of a local file becomes its path. Others are returned as is.

    >>> expanded("~/data.h5") == os.path.expanduser("~/data.h5"), expanded("data.h5"), expanded("~")
    (True, 'data.h5', '~')
    >>> expanded("file:///data/my%20images.h5")
    '/data/my images.h5'
    """
    if isinstance(path, str) and re.match(r"file://(localhost)?/", path):
        return unquote(path.removeprefix("file://").removeprefix("localhost"))
    if isinstance(path, (str, os.PathLike)) and str(path).startswith("~") and "/" in str(path):
        whole = os.path.expanduser(path)
        return path if os.path.lexists(path) else type(path)(whole) if isinstance(path, Path) else whole
    return path


def check_path(path: Any, name: str = "path") -> None:
    """Raise OptionError if an argument is an open file, or the content of a file, instead of a path."""
    kind, remedy = type(path), ""
    title = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    if title in ("h5py.File", "h5py.Group"):
        remedy = "pass the path of the file, file.filename, and close it or open it for reading only"
    elif title == "h5py.Dataset" and name != "source":  # a source may be an array
        remedy = "pass the path of the file, dataset.file.filename, and the name of the dataset as a field"
    elif isinstance(path, (bytes, bytearray, memoryview)):
        title = kind.__name__
        remedy = "pass a path as text (os.fsdecode), or write the content to a file and pass its path"
    elif hasattr(path, "read") and hasattr(path, "seek"):
        title = kind.__name__
        has_name = isinstance(getattr(path, "name", None), str)
        remedy = "pass its path, file.name" if has_name else "write its content to a file, and pass the path of that"
        if getattr(path, "fs", None) is not None:
            remedy = "pass its URL as text, or download it (fs.get) and pass the path of the copy"
    elif kind.__module__.startswith("fsspec"):
        remedy = "pass its URL as text, or download it (fs.get) and pass the path of the copy"
    if remedy:
        is_open = title != kind.__name__ or hasattr(path, "read")
        what = "an open file object" if is_open else "the content of a file"
        raise OptionError(f"{name} is {what} ({title}) instead of a path: {remedy}")


def takes_paths(*names: str) -> Callable[[F], F]:
    """Make a function expand ``~`` in all arguments that are paths, and refuse open files as some of them."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                bound = signature.bind(*args, **options)
            except TypeError:
                return function(*args, **options)  # its own error
            for name in names:
                check_path(bound.arguments.get(name), name)
            return function(*map(_expanded_all, args), **{name: _expanded_all(options[name]) for name in options})

        return call  # type: ignore[return-value]

    return decorate


def _expanded_all(value: Any) -> Any:
    return [expanded(item) for item in value] if type(value) is list else expanded(value)
