"""Check that the fields of several files agree, and describe the files as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from h5chunk.errors import FieldError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import choose_window_chunks
from h5chunk.store.format.header import Header
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.reader import H5Reader

REMEDY = "the fields of all files must be equal: name others with fields=..., or read these files apart"
MATRIX_REMEDY = (
    "the values of all files must be stored alike: convert their sources together, or each with the same scale or "
    "binarize"
)


def check_names(readers: Sequence[H5Reader]) -> None:
    """Raise FieldError unless all files have the same fields."""
    first = readers[0]
    for reader in readers[1:]:
        if list(reader.fields) != list(first.fields):
            here, there = (", ".join(map(repr, each.fields)) for each in (reader, first))
            raise FieldError(f"{printable(reader.path)}: has {here}, but {printable(first.path)} has {there}: {REMEDY}")


def joined_field(readers: Sequence[H5Reader], name: str) -> Field | MatrixField:
    """Describe a field of all files, one behind the other, with the largest of their chunks.

    Raises
    ------
    FieldError
        They differ in type, shape, axes or scale, or only some are sparse matrices.
    """
    if any(isinstance(reader.fields[name], MatrixField) for reader in readers):
        return _joined_matrix(readers, name)
    fields = [field for reader in readers if isinstance(field := reader.fields[name], Field)]
    first = fields[0]
    _check_equal(readers, name, ("dtype", "sample_shape", "axes", "scale"), REMEDY)
    largest = max(fields, key=lambda each: (each.grid.filtered, each.grid.chunks is not None, each.grid.band_bytes))
    length = sum(field.grid.shape[0] for field in fields)
    shape = (length, *first.sample_shape)
    return replace(first, grid=ChunkGrid(shape, largest.grid.chunks, first.dtype.itemsize, largest.grid.filtered))


def _joined_matrix(readers: Sequence[H5Reader], name: str) -> MatrixField:
    fields: list[MatrixField] = []
    for reader in readers:
        field = reader.fields[name]
        if not isinstance(field, MatrixField):
            other = next(each.path for each in readers if isinstance(each.fields[name], MatrixField))
            raise FieldError(
                f"{printable(reader.path)}: field {name!r} holds dense rows, but in {printable(other)} it is a sparse "
                f"matrix: {REMEDY}"
            )
        fields.append(field)
    _check_equal(readers, name, ("num_columns", "index_dtype"), REMEDY)
    _check_equal(readers, name, ("value_dtype", "scale"), MATRIX_REMEDY)
    return replace(
        fields[0],
        num_rows=sum(field.num_rows for field in fields),
        num_entries=sum(field.num_entries for field in fields),
        chunk_samples=max(field.chunk_samples for field in fields),
        filtered=any(field.filtered for field in fields),
    )


def _check_equal(readers: Sequence[H5Reader], name: str, traits: Sequence[str], remedy: str) -> None:
    """Raise FieldError unless a field is the same in all files, as far as these traits of it go."""
    first = readers[0].fields[name]
    for reader in readers[1:]:
        for what in traits:
            here, there = getattr(reader.fields[name], what), getattr(first, what)
            if (here is None) != (there is None) or here != there:  # NumPy takes None for float64
                raise FieldError(
                    f"{printable(reader.path)}: field {name!r} has the {what.replace('_', ' ')} {_text(what, here)}, "
                    f"but in {printable(readers[0].path)} it is {_text(what, there)}: {remedy}"
                )


def with_chunks(field: Field | MatrixField, chunk_samples: int) -> Field | MatrixField:
    """Return a field as if its chunks were of so many samples; one without chunks stays so."""
    if isinstance(field, MatrixField):
        return replace(field, chunk_samples=chunk_samples)
    chunks = (chunk_samples, *field.grid.chunks[1:]) if field.grid.chunks else None
    return replace(field, grid=replace(field.grid, chunks=chunks))


def _text(what: str, value: object) -> str:
    if what == "value_dtype" and value is None:
        return "none (all are ones)"
    if value is None or (isinstance(value, str) and not value):
        return "unknown"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def joined_header(readers: Sequence[H5Reader], num_samples: int, chunk_samples: int, chunk_bytes: int) -> Header | None:
    """Return one header for all files; None if one of them is no h5chunk file.

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
    """Return the longest list of classes, of which the others must be the beginning."""
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
    """Return whether the files are shards of one conversion, shuffled together; some may be missing."""
    found: list[tuple[object, object]] = []
    for header in headers:
        if "shard" not in header.options:
            return False
        others = {name: value for name, value in header.options.items() if name != "shard"}
        found.append((header.options["shard"], sorted(others.items(), key=repr)))
    numbers, options_of_each = zip(*found, strict=True)
    same = all(options == options_of_each[0] for options in options_of_each)
    return same and len(set(numbers)) == len(numbers) and all(header.shuffled for header in headers)
