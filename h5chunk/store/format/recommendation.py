"""Read the recommendation of `h5chunk tune`, which is stored next to a file in ``NAME.h5chunk.json``.

The recommendation overrides the window and the cache in the header of an h5chunk file. It is a JSON object with the
keys ``version`` (1), ``window_chunks``, ``cache`` ([nslots, nbytes, w0]), and three keys for the data that it applies
to: ``dataset`` (a path in the file), ``num_samples`` and ``chunk_samples``. If the data has changed, the recommendation
is ignored.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.plan.cache import CacheSettings

VERSION = 1
SUFFIX = ".h5chunk.json"
MAX_BYTES = 1 << 16
NO_SIDECAR = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

Recommended = tuple[int, CacheSettings]  # the window in chunks, and the cache of one process that reads all batches


def sidecar_of(path: str | os.PathLike[str]) -> Path:
    """Return the path of the recommendation for a file, ``NAME.h5chunk.json``."""
    path = Path(path)
    return path.with_name(path.name + SUFFIX)


def read_recommendation(path: str | os.PathLike[str], **made_for: str | int) -> Recommended | None:
    """Read the recommended window and cache of a file. Returns None if there is no recommendation for the current data.

    ``made_for`` describes the data: ``dataset`` (path of the main field), ``num_samples`` and ``chunk_samples``. Raises
    FileError if the recommendation is damaged or cannot be read.
    """
    sidecar = sidecar_of(path)
    try:
        with sidecar.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        if error.errno in NO_SIDECAR:
            return None
        raise FileError(f"{printable(sidecar)} cannot be read ({error.strerror}): delete it") from None
    try:
        content = json.loads(text)
        if int(content["version"]) > VERSION:
            return None
        if any(content.get(name) != value for name, value in made_for.items()):
            return None
        window_chunks = int(content["window_chunks"])
        if window_chunks < 1:
            raise ValueError("window_chunks must be at least 1")
        return window_chunks, CacheSettings.of(content["cache"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OptionError) as error:
        raise FileError(
            f"{printable(sidecar)} is damaged ({error}): delete it, and run h5chunk tune --apply to make a new one"
        ) from None
