"""Write, read and check the header of an h5chunk file: the attributes of its group ``/h5chunk``."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.errors import FileError, as_text, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.spec import FORMAT_VERSION, GROUP
from h5chunk.store.hdf5.guard import check_beside
from h5chunk.store.hdf5.open import damages_are

_NUMBERS = {
    "num_samples": np.int64,
    "chunk_samples": np.int64,
    "window_chunks": np.int64,
    "seed": np.uint64,
    "shuffled": np.uint8,
}
_CACHE = ("rdcc_nslots", "rdcc_nbytes", "rdcc_w0")
_ATTRIBUTES = ("format_version", "h5chunk_version", "kind", *_NUMBERS, *_CACHE, "options")


@dataclass(frozen=True)
class Header:
    """The header of an h5chunk file.

    The cache is recommended for one process that reads all open windows. ``options`` are what the command that wrote
    the file was asked for, if the file says it; ``kind`` is ``csr`` or ``dense`` of a matrix, else empty.
    """

    format_version: int
    num_samples: int
    chunk_samples: int
    window_chunks: int
    cache: CacheSettings
    shuffled: bool
    seed: int
    options: dict[str, Any]
    class_names: tuple[str, ...]
    kind: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that are read where none are named, as the file records them."""
        names = self.options.get("fields")
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return tuple(name for name in names if name and name.isprintable() and "/" not in name)


def header_attributes(
    *, cache: CacheSettings, options: Mapping[str, Any], kind: str = "", **numbers: int
) -> dict[str, Any]:
    """Return attributes of ``/h5chunk``, of the types that the specification gives them.

    ``options`` must be for JSON; ``kind`` is empty, ``csr`` or ``dense``; ``numbers`` are those of ``num_samples``,
    ``chunk_samples``, ``window_chunks``, ``seed`` and ``shuffled`` that are set.
    """
    attributes: dict[str, Any] = {"format_version": np.int64(FORMAT_VERSION), "h5chunk_version": h5chunk.__version__}
    if kind:
        attributes["kind"] = kind
    attributes |= {name: _NUMBERS[name](value) for name, value in numbers.items()}
    values = np.int64(cache.nslots), np.int64(cache.nbytes), np.float64(cache.w0)
    return {**attributes, **dict(zip(_CACHE, values, strict=True)), "options": json.dumps(options, sort_keys=True)}


def read_header(file: h5py.File) -> Header | None:
    """Read the header of a file; None if h5chunk did not write it. FileError: it is of a newer format, or damaged."""
    check_beside(file, GROUP, _ATTRIBUTES)
    group = file.get(GROUP)
    if not isinstance(group, h5py.Group) or "format_version" not in group.attrs:
        return None
    shown = printable(file.filename)
    with damages_are(FileError, f"{shown}: damaged: what its group /{GROUP} says cannot be", AttributeError):
        attrs = group.attrs
        version = int(attrs["format_version"])
        if version > FORMAT_VERSION:
            raise FileError(
                f"{shown}: format version {version} but this h5chunk reads up to {FORMAT_VERSION}: install a newer one"
            )
        num_samples, chunk_samples, window_chunks, seed, shuffled = (int(attrs[name]) for name in _NUMBERS)
        if num_samples < 1 or chunk_samples < 1 or window_chunks < 1:
            raise ValueError("num_samples, chunk_samples and window_chunks must be at least 1")
        return Header(
            format_version=version,
            num_samples=num_samples,
            chunk_samples=chunk_samples,
            window_chunks=window_chunks,
            cache=CacheSettings(int(attrs["rdcc_nslots"]), int(attrs["rdcc_nbytes"]), float(attrs["rdcc_w0"])),
            shuffled=bool(shuffled),
            seed=seed,
            options=_parse_options(bytes(attrs["options"])),
            class_names=_read_class_names(group.get("class_names")),
            kind=bytes(attrs.get("kind", b"")).decode("utf-8", "replace"),
        )


def _read_class_names(table: h5py.Dataset | None) -> tuple[str, ...]:
    if table is None:
        return ()
    if table.dtype.kind != "S":  # variable-length strings of a bad file can hang HDF5
        raise ValueError("class_names are not of a fixed length")
    return tuple(map(as_text, table[()].tolist()))


def _parse_options(text: bytes) -> dict[str, Any]:
    try:
        options = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return options if isinstance(options, dict) else {}


def checksums_of(file: h5py.File, start: int = 0) -> int:
    """Return one CRC-32 of all checksums that an h5chunk file holds, continued from ``start``."""
    total = start

    def add(name: str, item: h5py.Dataset | h5py.Group) -> None:
        nonlocal total
        if isinstance(item, h5py.Dataset) and item.dtype == np.uint32:
            total = zlib.crc32(item[()].tobytes(), zlib.crc32(name.encode(), total))

    group = file.get(f"{GROUP}/checksums")
    if isinstance(group, h5py.Group):
        group.visititems(add)
    return total
