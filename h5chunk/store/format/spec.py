"""Specification of the files that h5chunk writes, version 2.

A file is plain HDF5 (library version bounds v1.10, superblock 3), which any tool for HDF5 1.10 can read. Files that
`h5chunk convert` writes have no variable-length types, no links other than hard ones, and no time stamps:
equal input, options and library versions give equal bytes. No dataset in them has a filter, except ``/X`` of a file of
dense rows.

Fields
------
A field is a dataset at the root whose first axis counts samples; all fields have the same length N. A file of images
has

``/images``
    uint8, (N, C, H, W), or (N, H, W, C) for layout nhwc. Attribute ``axes``: ``NCHW`` or ``NHWC``, fixed string.
``/masks``, or the name of another column or folder
    Further images of the samples, stored like ``/images``; or masks, uint8, (N, H, W), with the unchanged pixel values
    of the source, ``axes`` ``NHW``. ``options`` then has the key ``fields`` (below) and, unless masks were recognised
    by their name, ``mask_column``: the names of the fields that are masks.
``/labels``
    (N,), int64 if samples have a class or an integer label, float64 if labels are fractions.
``/split``
    (N,), UTF-8 strings of fixed length: the name of the top folder of the source that contained the sample. Only if the
    top folders were splits, such as ``train`` and ``val``; ``options`` then has ``split_folders``: ``yes``.
others
    Columns of a manifest: (N,), uint8, int8, int64 or float64, or UTF-8 strings of fixed length, padded with zeros.

A file of other samples, such as arrays, the rows of a table or the items of a data set in Python, has fields of any
name and shape: (N, ...) of integers, floats, or strings of fixed length. ``options`` then has the key ``fields``: the
names of the fields that readers read by default, in this order.

Each field has chunks of (k, ...) with k <= N, which contain whole samples; k is the same for all fields. A field has no
filter and fixed maximum dimensions. Its space is allocated early, and no fill value is written. HDF5 therefore stores
only the address of the first chunk, in its "implicit" index or, if k = N, in its "single chunk" index. In both cases
the chunks of a field are one run of bytes in order, with chunk i at ``offset + i * chunk_bytes``. The last chunk has
its full size; the bytes after the last sample are zero. Fields of at least 64 KiB start at a multiple of 4096.

Images of any size
------------------
``convert --keep-encoded`` and ``--keep-size`` write, in place of the dataset ``/images``, a group of that name (or of
the name of a table's column), in row order:

``/images``
    Attributes ``form``, fixed string: ``encoded`` or ``raw``; ``channels``, uint8: 3 (RGB) or 1 (grey).
``/images/data``
    uint8, (num_bytes,), in chunks of 8 MiB, or in one smaller chunk: all images, concatenated. If ``form`` is
    ``encoded``, an image is the content of an image file (JPEG, PNG, WebP, BMP, PPM, TIFF or GIF); if it is ``raw``,
    an image is its pixels, (H, W, channels).
``/images/offsets``
    int64, (N + 1,), contiguous: the bytes of image i run from ``offsets[i]`` to ``offsets[i + 1]``, excluded.
``/images/heights``, ``/images/widths``
    uint32, (N,), contiguous: the size of each image after EXIF rotation.
``/images/orientations``
    uint8, (N,), contiguous: the EXIF orientation, 1 to 8, that must be applied to the decoded pixels; 1 means none.

Other fields are as above; ``chunk_samples`` is the number of samples in a nominal chunk, as in a sparse matrix.
``checksums`` has ``images/data`` and, with one value each, the four tables.

Sparse matrices
---------------
A sample is a row of the matrix, and N is the number of rows. In place of ``/images`` there is the group ``/X``, as
AnnData writes a CSR matrix (`anndata.io.sparse_dataset`, `anndata.io.read_elem`), in row order:

``/X``
    Attributes ``encoding-type``: ``csr_matrix`` and ``encoding-version``: ``0.1.0``, fixed strings; ``shape`` int64
    (2,): rows, columns; ``scale`` float64: value = stored value / ``scale``; ``pattern`` uint8: 1 if all values are 1
    and none is stored; ``time_order`` uint8: 1 if the entries of each row are sorted by their times instead of by
    their columns; absent otherwise.
``/X/indptr``
    int64, (N + 1,), contiguous: the entries of row i run from ``indptr[i]`` to ``indptr[i + 1]``, excluded.
``/X/indices``
    (num_entries,): the column index of each entry. No column occurs twice in a row, and the columns of a row are
    ascending unless ``time_order`` is 1. The type is the narrowest of uint8, uint16, uint32 and uint64 that can store
    all column indices.
``/X/data``
    (num_entries,), uint8: the code of each entry, 1 to 255; or, since version 2, float16 or float32: the value of each
    entry, finite and not zero; ``scale`` is then 1. In a pattern, which is uint8, no chunk was ever written and the
    fill value is 1, so that HDF5 returns ones without reading the file.

``indices`` and ``data`` have chunks with equal numbers of entries (about 1 MiB of indices, or all entries), which are
not aligned with rows. Like a field, each is one run of bytes: entry e of ``indices`` is at ``offset + e * itemsize``. A
matrix without entries has datasets of length 0. Other fields (columns of AnnData's ``obs``, labels) are datasets at the
root as above, in chunks of (chunk_samples,), of any integer or float type, or strings; booleans are uint8.

In ``/h5chunk``, ``kind`` is ``csr``, and ``chunk_samples`` is the number of rows in a nominal chunk: a power of two, or
N if that is smaller, with at most 256 KiB of entries on average. The order of an epoch permutes nominal chunks; only
the other fields are stored in such chunks. The recommended cache is for a process that reads rows through HDF5. In
addition to the tables below, there may be

``row_ids``, ``column_ids``
    int64 or fixed-length UTF-8 strings, (N,) and (columns,): the id or name of row i or column j in the source.
``column_symbols``
    Fixed-length UTF-8 strings, (columns,): readable names, such as symbols of genes, if the source has them too.
``column_index``
    int64, (columns,): column j is column ``column_index[j]`` of the source. Only if columns were left out.
``categories/<field>``
    The names of the categories of a column of ``obs``; see below.

``source_index`` numbers all rows of the source from 0: in the order of the source, or, if rows have ids, in ascending
order of the ids. ``column_index`` numbers the columns in the same way. With ``--ids-from OLD.h5``, columns whose ids
are in OLD.h5 come first, in the order of that file; with ``--keep-rows``, so do rows. Rows that were filtered out leave
gaps.

A file of dense rows has a dataset ``/X`` instead of the group: (N, columns), of one of the types of ``/X/data``, with
the attributes ``scale`` and ``pattern``, in chunks of (chunk_samples, columns), with or without gzip; ``kind`` is
``dense``. If it is compressed, HDF5 has an index of its chunks, which are stored in order.

The group ``/h5chunk``
----------------------
attributes
    ``format_version`` int64: 2, or 1, in which matrices have no floats. ``h5chunk_version``: the version that wrote it.
    ``kind``: ``csr`` or ``dense``; absent if samples are not rows of a matrix. ``num_samples``, ``chunk_samples``,
    ``window_chunks`` int64: N, k, and the recommended number of chunks to shuffle together. ``rdcc_nslots``,
    ``rdcc_nbytes`` int64 and ``rdcc_w0`` float64: recommended chunk cache of one process that reads all open windows
    (see `h5chunk.plan.order`). ``seed`` uint64 and ``shuffled`` uint8: how samples were permuted. ``options``: JSON,
    the options of the command; in a shard also ``shard`` and ``shards``: its number, from 0, and the number of shards.
    All strings have fixed length.
``checksums/<field>``
    uint32, (num_chunks,): CRC-32 (like zlib's) of the stored bytes of each chunk, including padding. For a sparse
    matrix, ``checksums/X/indptr`` (a single value), ``checksums/X/indices`` and, except for a pattern,
    ``checksums/X/data``.
``source_index``
    int64, (N,): row i of every field is sample ``source_index[i]`` of the source, counted in ImageFolder's order, split
    by split if there are splits, or in the order of the manifest's lines. Skipped samples leave gaps.
``source_names``, ``source_name_ends``
    uint8 and int64 (N,): paths relative to the source, in row order, concatenated; name i ends before byte
    ``source_name_ends[i]``. Only if samples have names.
``class_names``
    Fixed-length UTF-8 strings, (num_classes,): name of each label. Only if labels are classes that have names.
``categories/<field>``
    Names of the codes of another field, like ``class_names``; code -1 means missing.

Files that were repacked
------------------------
`h5chunk repack` preserves all of the above, and updates the group: ``options`` gets the key ``repack``, and a shuffle
permutes ``source_index``, ``row_ids`` and ``source_names`` as well. Fields, the parts of ``/X`` and the bytes of images
(then in chunks of 1 MiB) may be compressed. HDF5 then has an index of their chunks, which are stored in order, and
checksums cover the stored bytes.

If another HDF5 file is repacked with a shuffle, window or cache, the result gets the group, but without ``kind``,
``class_names``, ``source_names`` and, unless it was shuffled, ``source_index``. The types, soft links, attributes and
user block of the file are preserved; after a user block of less than 4096 bytes, fields start at multiples of its size.
Its fields are all datasets with ``num_samples`` rows and elements of a fixed size, in any group, of any type and name.
``checksums`` has these fields, and the parts of sparse matrices, by their paths. Datasets of other types keep their
chunks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from h5chunk.store.hdf5.chunk_table import list_chunks

FORMAT_VERSION = 2
GROUP = "h5chunk"
CHECKSUMS = f"{GROUP}/checksums"
LIBVER = ("v110", "v110")
ALIGNMENT = 4096
ALIGNMENT_THRESHOLD = 64 << 10  # smaller datasets are not aligned
HEADER_BYTES = 16 << 10  # approximate size of a file's metadata
IMAGE_TABLES = {"offsets": "i8", "heights": "u4", "widths": "u4", "orientations": "u1"}  # of images of any size
GZIP_LEVEL = 1  # for dense rows, mostly zeros, higher levels take three times as long and save a few percent


@dataclass(frozen=True)
class ArraySpec:
    """A dataset to write, which is contiguous unless it has ``chunks``.

    If there is a ``fill`` value, no elements are written, and all read as this value. With ``gzip``, chunks are
    compressed (`h5chunk.store.write.targets.CompressedTarget`).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...] | None = None
    fill: int | None = None
    gzip: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the dataset in the file in bytes, or 0 if it is compressed or has a fill value."""
        if self.fill is not None or self.gzip:
            return 0
        shape = self.shape
        if self.chunks:
            shape = tuple(-(-size // chunk) * chunk for size, chunk in zip(shape, self.chunks, strict=True))
        return math.prod(shape) * self.dtype.itemsize


def field_spec(
    num_samples: int, chunk_samples: int, sample_shape: tuple[int, ...], dtype: np.dtype, *, gzip: bool = False
) -> ArraySpec:
    """Return the specification of a field's dataset. Its chunks contain whole samples."""
    return ArraySpec((num_samples, *sample_shape), dtype, (chunk_samples, *sample_shape), gzip=gzip)


@dataclass(frozen=True)
class FileSpec:
    """All datasets and attributes of a file to write, by path, without the data.

    Data is stored in the order of ``datasets``, so the field with the largest samples should come first.
    """

    datasets: dict[str, ArraySpec]
    attributes: dict[str, Mapping[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Approximate size of the file in bytes, without compressed data."""
        return HEADER_BYTES + sum(dataset.num_bytes for dataset in self.datasets.values())


@dataclass(frozen=True)
class Region:
    """The byte range of a dataset in the file."""

    offset: int
    num_bytes: int


def new_file(
    path: str | os.PathLike[str], creation: h5py.h5p.PropFCID, libver: tuple[str, str], alignment: int
) -> h5py.h5f.FileID:
    """Create an empty file without time stamps. h5py before 3.16 would write one into the root group."""
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    versions = {"v110": h5py.h5f.LIBVER_V110, "latest": h5py.h5f.LIBVER_LATEST}
    access.set_libver_bounds(*(versions[version] for version in libver))
    access.set_alignment(ALIGNMENT_THRESHOLD, alignment)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_file_locking(False, True)
    return h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fcpl=creation, fapl=access)


def make_group(parent: h5py.Group, path: str) -> h5py.Group:
    """Return the group at a path. Missing groups are created, without time stamps."""
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    for name in path.split("/"):
        if name not in parent:
            h5py.h5g.create(parent.id, name.encode(), gcpl=creation)
        parent = parent[name]
    return parent


def create_file(path: str | os.PathLike[str], spec: FileSpec) -> dict[str, Region]:
    """Create a file with all its metadata, and return the byte range for the data of each dataset, by path.

    Datasets that need no space, such as empty ones, have no byte range.
    """
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    with h5py.File(new_file(path, creation, LIBVER, ALIGNMENT)) as file:
        datasets = create_objects(file, spec)
        return {name: region_of(dataset) for name, dataset in datasets.items() if dataset.id.get_storage_size()}


def create_objects(file: h5py.File, spec: FileSpec) -> dict[str, h5py.Dataset]:
    """Create the objects of a specification in a file, and return its datasets by path."""
    datasets = {path: _create_dataset(file, path, array) for path, array in spec.datasets.items()}
    make_group(file, CHECKSUMS)
    for path, attributes in spec.attributes.items():
        for name, value in attributes.items():  # h5py would store a ``str`` with variable length
            file[path].attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
    return datasets


def _create_dataset(file: h5py.File, path: str, array: ArraySpec) -> h5py.Dataset:
    """Create a dataset without writing to it. Its space is allocated, unless it has a fill value or gzip."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if array.fill is not None:
        properties.set_fill_value(np.array(array.fill, array.dtype))
        properties.set_fill_time(h5py.h5d.FILL_TIME_IFSET)
    if array.fill is not None or array.gzip:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
    if array.chunks:
        properties.set_chunk(array.chunks)
    else:
        properties.set_layout(h5py.h5d.CONTIGUOUS)
    if array.gzip:
        properties.set_deflate(GZIP_LEVEL)
    dtype = array.dtype
    if dtype.kind == "S":
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    kind = h5py.h5t.py_create(dtype, logical=True)
    space = h5py.h5s.create_simple(array.shape)
    parent, _, name = path.rpartition("/")
    group = make_group(file, parent) if parent else file
    return h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space, properties))


def region_of(dataset: h5py.Dataset) -> Region:
    """Return the byte range of a dataset that has no filter."""
    table = list_chunks(dataset)
    if not table.is_one_run:
        raise RuntimeError(f"the chunks of {dataset.name} are not one run of bytes in this version of HDF5")
    return Region(int(table.offsets[0]), int(table.sizes.sum()))
