"""Read the fields that `h5chunk.info` names, where readers have no default fields for a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from h5chunk.errors import FieldError, H5ChunkError
from h5chunk.store.read.files import Paths
from h5chunk.tools.info.info import info
from h5chunk.tools.info.report import FileInfo

Fields = Mapping[str, str] | Sequence[str] | None
Opened = TypeVar("Opened")


def with_usual_fields(
    open_fields: Callable[[Fields], Opened], path: Paths, fields: Fields, trusted: bool
) -> tuple[Opened, Fields]:
    """Call a function with the fields to read, and return its result with these fields.

    If ``fields`` is None and the function raises FieldError, it is called again with the fields of the ChunkDataset
    that `h5chunk.info` recommends for the file. If there is none, the error is raised.
    """
    try:
        return open_fields(fields), fields
    except FieldError as error:
        found = _fields_of_info(path, trusted) if fields is None and type(error) is FieldError else None
        if not found:
            raise
    return open_fields(found), found


def _fields_of_info(path: Paths, trusted: bool) -> list[str]:
    """Return the fields of the ChunkDataset that `h5chunk.info` recommends; empty if it recommends none."""
    try:
        found = info(path, trusted=trusted)
    except H5ChunkError:
        return []
    is_dataset = isinstance(found, FileInfo) and any("ChunkDataset(" in line for line in found.code)
    return list(found.fields) if isinstance(found, FileInfo) and is_dataset else []
