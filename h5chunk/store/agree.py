"""What several files say together: fields that must be equal, and what is true of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from h5chunk.errors import FieldError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import choose_window_chunks
from h5chunk.store.fields import Field
from h5chunk.store.format import Header
from h5chunk.store.matrixfield import MatrixField
from h5chunk.store.reader import H5Reader

REMEDY = "the fields of all files must be equal: name others with fields=..., or read these files apart"


def check_names(readers: Sequence[H5Reader]) -> None:
    """Raise FieldError unless all files have the same fields."""
    first = readers[0]
    for reader in readers[1:]:
        if list(reader.fields) != list(first.fields):
            here, there = (", ".join(map(repr, each.fields)) for each in (reader, first))
            raise FieldError(f"{printable(reader.path)}: has {here}, but {printable(first.path)} has {there}: {REMEDY}")


def joined_field(readers: Sequence[H5Reader], name: str) -> Field:
    """A field of all files, one behind the other; its chunks are the largest ones that there are.

    Raises
    ------
    FieldError
        They differ in type, shape, axes or scale; or are sparse matrices.
    """
    fields: list[Field] = []
    for reader in readers:
        field = reader.fields[name]
        if isinstance(field, MatrixField):
            raise FieldError(
                f"{printable(reader.path)}: {name!r} is a sparse matrix, of which several files cannot be read as one "
                "yet: convert its sources into one file, or pack dense rows (convert --dense)"
            )
        fields.append(field)
    first = fields[0]
    for reader, field in zip(readers, fields, strict=True):
        for what in ("dtype", "sample_shape", "axes", "scale"):
            here, there = getattr(field, what), getattr(first, what)
            if here != there:
                raise FieldError(
                    f"{printable(reader.path)}: field {name!r} has the {what.replace('_', ' ')} {_text(here)}, but in "
                    f"{printable(readers[0].path)} it is {_text(there)}: {REMEDY}"
                )
    largest = max(fields, key=lambda each: (each.grid.filtered, each.grid.chunks is not None, each.grid.band_bytes))
    length = sum(field.grid.shape[0] for field in fields)
    shape = (length, *first.sample_shape)
    return replace(first, grid=ChunkGrid(shape, largest.grid.chunks, first.dtype.itemsize, largest.grid.filtered))


def with_chunks(field: Field, chunk_samples: int) -> Field:
    """The same, as if its chunks were of so many samples; without any it stays without."""
    chunks = (chunk_samples, *field.grid.chunks[1:]) if field.grid.chunks else None
    return replace(field, grid=replace(field.grid, chunks=chunks))


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value) if value not in ("", None) else "unknown"


def joined_header(readers: Sequence[H5Reader], num_samples: int, chunk_samples: int, chunk_bytes: int) -> Header | None:
    """What all files say of themselves; None if one of them is not ours.

    Raises
    ------
    FieldError
        A label means another class in one file than in another.
    """
    class_names = _class_names(readers)
    headers = [reader.header for reader in readers if reader.header is not None]
    if len(headers) < len(readers):
        return None
    num_chunks = -(-num_samples // chunk_samples)
    window_chunks = max(header.window_chunks for header in headers)
    if all(header.window_chunks * header.chunk_samples >= header.num_samples for header in headers):
        window_chunks = choose_window_chunks(chunk_bytes, num_chunks)  # all chunks of each: that was the limit
    return replace(
        headers[0],
        num_samples=num_samples,
        chunk_samples=chunk_samples,
        window_chunks=window_chunks,
        cache=max((header.cache for header in headers), key=lambda cache: cache.nbytes),
        shuffled=_are_shards(headers),
        class_names=class_names,
    )


def _class_names(readers: Sequence[H5Reader]) -> tuple[str, ...]:
    """The longest list of classes; the others must be its beginning."""
    named = [reader for reader in readers if reader.header is not None and reader.header.class_names]
    if not named:
        return ()
    longest = max(named, key=lambda reader: len(reader.header.class_names))  # type: ignore[union-attr]
    there = longest.header.class_names  # type: ignore[union-attr]
    for reader in named:
        here = reader.header.class_names  # type: ignore[union-attr]
        for label, (name, other) in enumerate(zip(here, there, strict=False)):
            if name != other:
                raise FieldError(
                    f"{printable(reader.path)}: label {label} means {name!r}, but in {printable(longest.path)} it is "
                    f"{other!r}: labels must mean the same in all files: convert their sources together, or read "
                    "these files apart"
                )
    return there


def _are_shards(headers: Sequence[Header]) -> bool:
    """Whether the files are shards of one conversion that shuffled all of them together; some may be missing."""
    found: list[tuple[object, object]] = []
    for header in headers:
        try:
            options = json.loads(header.options)
            found.append((options.pop("shard"), sorted(options.items(), key=repr)))
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
    numbers, options_of_each = zip(*found, strict=True)
    same = all(options == options_of_each[0] for options in options_of_each)
    return same and len(set(numbers)) == len(numbers) and all(header.shuffled for header in headers)
