"""If a source is a URL, download it to a hidden folder beside the output, from which the command then reads it."""

from __future__ import annotations

import functools
import glob
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from h5chunk import errors, stamp
from h5chunk.errors import FileError, SourceError, human_bytes, printable
from h5chunk.remote.mirror import save
from h5chunk.store.write.journal import has_command_id
from h5chunk.store.write.part_file import check_missing, check_parent, parse_output
from h5chunk.tools.progress import Progress
from h5chunk.urls import is_cut_url, is_url, parse, without_query

Command = TypeVar("Command", bound=Callable[..., Any])


def downloads(command: Command) -> Command:
    """Decorate a command so that its argument ``source`` may be a URL, or a list that contains URLs.

    The other positional argument is the file that the command writes, beside which the copy is kept until the command
    has succeeded.
    """
    signature = inspect.signature(command)
    names = list(signature.parameters)[:2]
    output = next(name for name in names if name != "source")

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        source = given["source"]
        if not any(map(_is_remote, _items(source))):
            return command(*arguments, **options)
        path = parse_output(given[output], folder=True)
        given.update(given.pop("options", {}))
        folder = path.absolute().with_name(f".{path.name}{stamp.DOWNLOADS}")
        check_parent(path)
        if "overwrite" in signature.parameters and not given.get("overwrite") and not has_command_id(path):
            check_missing(path)  # before the download
        with _downloaded(source, folder, given) as local:
            first_two = [local if name == "source" else given[name] for name in names]
            return command(*first_two, **{name: value for name, value in given.items() if name not in names})

    return run  # type: ignore[return-value]


def _is_remote(source: Any) -> bool:
    return is_url(source) or is_cut_url(source)


def _items(source: Any) -> list[Any]:
    return list(source) if isinstance(source, (list, tuple)) else [source]


@contextmanager
def _downloaded(source: Any, folder: Path, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the source with local paths instead of URLs. After an error, and after a dry run, the copies are kept."""
    if item := next(filter(is_cut_url, _items(source)), None):
        raise SourceError(f"{printable(item)}: pass the URL as a string, because Path removes one of its slashes")
    keep, notify = options.get("dry_run"), options.get("notify") or (lambda line: None)
    shown: dict[str, str] = {}
    try:
        progress = options.get("progress")
        found = [_download(item, folder, progress, shown) if is_url(item) else item for item in _items(source)]
        errors.shown_as.update(shown)
        yield found if isinstance(source, (list, tuple)) else found[0]
    except BaseException:
        keep = True
        raise
    finally:
        for local in shown:
            errors.shown_as.pop(local, None)
        num_bytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        if keep and num_bytes:
            notify(
                f"{human_bytes(num_bytes)} of the source were downloaded, and are kept for the next run of this "
                f"command; to free their space, delete {printable(folder)}"
            )
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _download(url: str, folder: Path, progress: Progress | None, shown: dict[str, str]) -> str:
    """Download the files of a URL, and return their local path or pattern.

    Adds the text that messages show instead of each local path to ``shown``.
    """
    try:
        path = save(url, folder, lambda done, total: progress("fetch", done, total) if progress else None)
    except FileError as error:
        raise SourceError(str(error)) from None
    if path.exists():
        shown |= {str(path): without_query(url), f"{path}/": f"{without_query(url).rstrip('/')}/"}
        return str(path)
    local = os.path.join(glob.escape(str(path.parent)), path.name)
    shown |= {local: url, f"{path.parent}/": parse(url)[0]}
    return local
