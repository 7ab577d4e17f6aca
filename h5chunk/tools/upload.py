"""Write the output of a command to an object store: make it on a local disk, and upload it once it is complete."""

from __future__ import annotations

import functools
import hashlib
import inspect
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from h5chunk.errors import FileError, OptionError, OutputError, printable
from h5chunk.remote.mirror import NO_OPTIONS, exists, put
from h5chunk.urls import is_url, parse

Command = TypeVar("Command", bound=Callable[..., Any])
FILES = 4  # files that are uploaded at a time; the parts of each are uploaded at the same time, too


def uploads(command: Command) -> Command:
    """Let the second argument of a command, its output, be a URL."""
    signature = inspect.signature(command)
    name = list(signature.parameters)[1]

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        if not is_url(given[name]):
            return command(*arguments, **options)
        given.update(given.pop("options", {}))
        url, overwrite = given.pop(name), given.pop("overwrite", False)
        if given.get("client") is not None:
            raise OptionError("client is given, but the output is a URL: write to a folder that all workers share")
        source = given.pop(next(iter(signature.parameters)))
        return _upload(url.rstrip("/"), lambda path: command(source, path, overwrite=True, **given), given, overwrite)

    return run  # type: ignore[return-value]


def _upload(url: str, make: Callable[[Path], Any], options: dict[str, Any], overwrite: bool) -> Any:
    """Make a file or a folder of files, upload it, and return its report. Raises OutputError."""
    if not parse(url)[1]:
        raise OutputError(f"{printable(url)}: is not the name of an object to write: give one, such as {url}/data.h5")
    if not overwrite and not options.get("dry_run") and exists(url):
        raise OutputError(f"{printable(url)}: already exists: give another name, or overwrite=True (--overwrite)")
    folder = NO_OPTIONS.root / "uploads" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / parse(url)[1]
    report = replace(make(path), path=url)
    if options.get("dry_run"):
        return report
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    urls = [f"{url}/{file.name}" if path.is_dir() else url for file in files]
    try:
        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(put, files, urls))
    except FileError as error:
        raise OutputError(f"{error}: the files are complete in {printable(folder)}: the same call continues") from None
    shutil.rmtree(folder)
    return report
