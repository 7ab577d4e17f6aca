"""Recognise and split URLs of objects, and look up the local copies of opened objects."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")
URL = re.compile(rf"({'|'.join(SCHEMES)})://[^/]+/.*|({'|'.join(SCHEMES)})://[^/]+", re.DOTALL)
CUT = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")  # a URL that lacks one of its slashes

CHANGED = "the object was replaced or changed since it was first opened: open it again"
PATTERN = r"[*?\[]"  # characters that make a path a pattern, which names several files

SIGNATURE = re.compile(  # parameters of presigned URLs of S3, Google, Azure and CloudFront
    r"(?i)x-(amz|goog)-.+|response-.+|AWSAccessKeyId|GoogleAccessId|Signature|Expires|Policy|Key-Pair-Id"
    r"|s[vretp]|sig|spr|sip|sdd|ske|sks|skt|skv|skoid|sktid"
)


def is_url(path: object) -> bool:
    """Return whether a path is the URL of an object or a folder in a store.

    >>> is_url("s3://bucket/photos.h5"), is_url("photos.h5"), is_url("C://photos.h5")
    (True, False, False)
    """
    return isinstance(path, str) and URL.fullmatch(path) is not None


def is_cut_url(path: object) -> bool:
    """Return whether a path is a URL that was converted by `pathlib.Path`, which removes one of the two slashes.

    >>> from pathlib import Path
    >>> is_cut_url(Path("s3://bucket/photos.h5"))
    True
    """
    return isinstance(path, os.PathLike) and CUT.match(os.fspath(path)) is not None


def hint_for_url(path: object) -> str:
    """Return a hint for the error about a missing file, if its path is a URL with an unsupported scheme; else "".

    >>> hint_for_url("/folder/ftp:/host/a.h5")[:30], hint_for_url("photos.h5")
    (' (URLs with ftp:// are not rea', '')
    """
    match = re.search(r"(?:^|/)([a-z][a-z0-9+.-]+):/", str(path))  # also in a path that was made absolute
    if match is None or match[1] in SCHEMES:
        return ""
    return f" (URLs with {match[1]}:// are not read: use {', '.join(SCHEMES)}, or download the file)"


def parse(url: str) -> tuple[str, str]:
    """Split a URL into the folder and the object's name; the query of an HTTP URL stays with the folder.

    >>> parse("s3://bucket/a/photos.h5"), parse("https://host/a/photos.h5?sig=b/c")
    (('s3://bucket/a/', 'photos.h5'), ('https://host/a/?sig=b/c', 'photos.h5'))
    """
    path = without_query(url)
    folder, _, name = path.rpartition("/")
    return f"{folder}/{url[len(path) :]}", name


def without_query(url: str) -> str:
    """Remove the query from an HTTP URL: it may contain a signature, which messages must not show.

    >>> without_query("https://host/a.h5?sig=b"), without_query("s3://bucket/what?.h5")
    ('https://host/a.h5', 's3://bucket/what?.h5')
    """
    return url.partition("?")[0] if url.startswith("http") else url


def is_signed(url: str) -> bool:
    """Return whether the query of a URL consists only of a signature, so that other URLs can name the same object.

    >>> is_signed("https://host/a.h5?X-Amz-Date=1&X-Amz-Signature=b"), is_signed("https://host/a.h5?file=1&sig=b")
    (True, False)
    """
    names = {name for name, _ in parse_qsl(url[len(without_query(url)) :].lstrip("?"))}
    return bool(names) and all(SIGNATURE.fullmatch(name) for name in names)


def stable(url: str) -> str:
    """Remove the query from a URL if it consists of a signature, so that equal objects have equal URLs."""
    return without_query(url) if is_signed(url) else url


def url_of(path: Path) -> str:
    """Return the URL of which a path is the local copy; an empty string for other files."""
    mirror = local_copy_of(path)
    return "" if mirror is None else str(mirror.url)


def name_of(path: Path) -> str:
    """Return the name of a file; for a local copy, return the name of the remote object."""
    return parse(url_of(path))[1] or path.name


local_copies: dict[str, Any] = {}  # the `h5chunk.remote.mirror.Mirror` of each local copy, by its path


def local_copy_of(path: str | os.PathLike[str]) -> Any:
    """Return the mirror whose local copy is at a path; None for other files."""
    return local_copies.get(os.fspath(path)) if local_copies else None
