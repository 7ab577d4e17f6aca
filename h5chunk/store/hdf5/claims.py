"""Check the sizes and types that datasets and attributes claim against the bytes that the file stores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import h5py

from h5chunk.errors import FieldError, FileError, TrustError, UnsupportedError
from h5chunk.plan.layout import human_bytes
from h5chunk.store.hdf5.chunk_table import is_variable
from h5chunk.store.hdf5.codecs import BITSHUFFLE, KNOWN_FILTERS

MAX_RATIO = 1032  # highest ratio of gzip
SLACK_BYTES = 64 << 20  # bytes that may be claimed without being stored: a dataset of only the fill value
SLACK_CHUNKS = 1 << 20  # the same limit as a number of chunks, with 20 bytes of table each
MAX_INFLATED_BYTES = 256 << 20  # larger chunks must be stored in a size that gzip could decode to them
MAX_ATTRIBUTE_BYTES = 1 << 20


def check_filters(properties: h5py.h5p.PropDCID, where: str, *, trusted: bool, remedy: str = "") -> None:
    """Raise TrustError for an unknown filter, FieldError for a filter that is repeated, or has invalid parameters."""
    codes = []
    for number in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(number)
        if code == BITSHUFFLE and len(values) >= 3 and not values[2]:  # HDF5 would crash
            raise FieldError(f"{where} is packed with filter bitshuffle for elements of 0 bytes: it is damaged")
        if code in (h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_NBIT) and len(values) >= 3:
            count = math.prod(properties.get_chunk())
            if values[2] != count:  # these would crash HDF5, too
                raise FieldError(
                    f"{where} is packed with filter {KNOWN_FILTERS[code]} for chunks of {values[2]} elements but they "
                    f"have {count}: it is damaged"
                )
        if code not in KNOWN_FILTERS and not trusted:
            label = ascii(name.decode(errors="replace")[:40])
            raise TrustError(
                f"{where} is packed with filter {code} ({label}), which would load a plugin: write it with another "
                f"filter (h5repack -f GZIP=4){remedy and '; '}{remedy}"
            )
        codes.append(code)
    twice = next((code for code in codes if codes.count(code) > 1), None)
    if twice is not None:
        label = KNOWN_FILTERS.get(twice, str(twice))
        raise FieldError(f"{where} has filter {label} more than once, like a decompression bomb: use h5repack")


def check_claims(dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, where: str) -> None:
    """Raise FieldError unless shape, chunks and stored bytes are consistent with each other and with the file."""
    shape, item_bytes = dataset.id.get_space().shape, dataset.id.get_type().get_size()
    claimed, stored = math.prod(shape) * item_bytes, dataset.id.get_storage_size()
    file_bytes = dataset.file.id.get_filesize()
    if stored > file_bytes:
        raise FieldError(
            f"{where} claims {stored} stored bytes but the file has {file_bytes}: damaged, or its chunks overlap"
        )
    layout = properties.get_layout()
    if layout == h5py.h5d.CHUNKED:
        _check_chunk_claims(dataset, properties, where, claimed, stored)
    elif stored and stored < claimed:
        raise FieldError(f"{where} has a shape of {claimed} bytes, but {stored} are stored: it is damaged")
    elif not stored and claimed > SLACK_BYTES:
        raise UnsupportedError(f"{where} claims {human_bytes(claimed)}, but nothing was ever written: write it first")
    elif layout == h5py.h5d.CONTIGUOUS and stored and (dataset.id.get_offset() or 0) + claimed > file_bytes:
        raise FieldError(f"{where} extends beyond the end of the file: it is damaged")


def _check_chunk_claims(
    dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, where: str, claimed: int, stored: int
) -> None:
    shape, chunks = dataset.id.get_space().shape, properties.get_chunk()
    chunk_bytes = math.prod(chunks) * dataset.id.get_type().get_size()
    if not stored and chunk_bytes > MAX_INFLATED_BYTES:
        size = human_bytes(chunk_bytes)
        raise UnsupportedError(f"{where} has chunks of {size}, and none was ever written: write one")
    if chunk_bytes > max(MAX_INFLATED_BYTES, MAX_RATIO * stored):
        raise FieldError(
            f"{where} has chunks of {human_bytes(chunk_bytes)} but {human_bytes(stored)} are stored: damaged, or "
            "a decompression bomb"
        )
    expected = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    there = dataset.id.get_num_chunks()
    if there > expected:
        raise FieldError(f"{where} has {there} chunks, but its shape has only {expected}: it is damaged")
    unwritten = (expected - there) * chunk_bytes
    if expected - there > SLACK_CHUNKS:
        raise UnsupportedError(
            f"{where} has {expected} chunks of which only {there} were ever written: write them first"
        )
    if unwritten > SLACK_BYTES + MAX_RATIO * stored:
        raise UnsupportedError(
            f"{where} claims {human_bytes(claimed)} but only {human_bytes(stored)} were ever written: write it first"
        )


def check_attributes(item: h5py.HLObject, where: str, names: Iterable[str] | None = None) -> None:
    """Raise FileError unless all attributes, or the attributes with these names, are small and of fixed-size types.

    HDF5 may crash on damaged attributes: when it lists them, because it trusts their count, and when it opens one.
    """
    for name in item.attrs if names is None else [name for name in names if name in item.attrs]:
        attribute = item.attrs.get_id(name)
        if is_variable(attribute.get_type()):
            raise FileError(f"{where}: attribute {name!r} is of variable length: damaged, or not written by h5chunk")
        if attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES:
            size, limit = human_bytes(attribute.get_storage_size()), human_bytes(MAX_ATTRIBUTE_BYTES)
            raise FileError(f"{where}: attribute {name!r} has {size} but the limit is {limit}: damaged")


def small_attribute(item: h5py.HLObject, name: str, default: Any = None) -> Any:
    """Read an attribute; return the default if it is missing, large or of variable length."""
    if name not in item.attrs:
        return default
    attribute = item.attrs.get_id(name)
    if is_variable(attribute.get_type()) or attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES:
        return default
    return item.attrs[name]
