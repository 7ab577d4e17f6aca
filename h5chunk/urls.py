"""Recognise URLs of objects, split them, and find the local copies of objects that were opened."""

from __future__ import annotations

import os
import re
from typing import Any

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")
URL = re.compile(rf"({'|'.join(SCHEMES)})://[^/]+/.*|({'|'.join(SCHEMES)})://[^/]+", re.DOTALL)
CUT = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")


def is_url(path: object) -> bool:
    """Return whether a path is the URL of an object or a folder in a store.

    >>> is_url("s3://bucket/photos.h5"), is_url("photos.h5"), is_url("C://photos.h5")
    (True, False, False)
    """
    return isinstance(path, str) and URL.fullmatch(path) is not None


def is_cut_url(path: object) -> bool:
    """Return whether a path is a URL that went through `pathlib.Path`, which leaves out a slash.

    >>> from pathlib import Path
    >>> is_cut_url(Path("s3://bucket/photos.h5"))
    True
    """
    return isinstance(path, os.PathLike) and CUT.match(os.fspath(path)) is not None


def parse(url: str) -> tuple[str, str]:
    """Split a URL into the folder and the name in it.

    >>> parse("s3://bucket/a/photos.h5")
    ('s3://bucket/a/', 'photos.h5')
    """
    folder, _, name = url.rpartition("/")
    return f"{folder}/", name


local_copies: dict[str, Any] = {}  # the `h5chunk.remote.mirror.Mirror` of each local copy, by its path


def local_copy_of(path: str | os.PathLike[str]) -> Any:
    """Return the mirror whose local copy is at a path; None for other files."""
    return local_copies.get(os.fspath(path)) if local_copies else None
