"""The encodings of AnnData's elements: how a group or dataset stores a matrix, a table or a column.

An element names its encoding and the version of it in the attributes ``encoding-type`` and ``encoding-version``.
Elements from before 2020 have neither. Source: AnnData's on-disk format.
"""

from __future__ import annotations

from collections.abc import Callable

import h5py

from h5chunk.errors import H5ChunkError
from h5chunk.store.hdf5.strings import read_words

TYPE, VERSION = "encoding-type", "encoding-version"
NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")  # groups of values and mask
VERSIONS = {  # the versions of the encodings that h5chunk reads
    "anndata": ("0.1.0",),
    "raw": ("0.1.0",),
    "dict": ("0.1.0",),
    "dataframe": ("0.1.0", "0.2.0"),
    "csr_matrix": ("0.1.0",),
    "csc_matrix": ("0.1.0",),
    "array": ("0.2.0",),
    "string-array": ("0.2.0",),
    "rec-array": ("0.2.0",),
    "categorical": ("0.2.0",),
    **dict.fromkeys(NULLABLE, ("0.1.0",)),
}


def read_encoding(item: h5py.HLObject, error: Callable[[str], H5ChunkError]) -> str:
    """Return the encoding of an element, or an empty string if it names none.

    ``error`` creates the error for an unknown encoding, or an unknown version of one. A missing version is accepted.
    """
    kind, version = (" ".join(read_words(item, name, error)) for name in (TYPE, VERSION))
    if kind and kind not in VERSIONS:
        raise error(
            f"has AnnData's encoding {kind!r}, which is not supported: store it as a dense array, csr_matrix or "
            "csc_matrix, or, in a table, as numbers, strings or categories"
        )
    if kind and version and version not in VERSIONS[kind]:
        known = " and ".join(VERSIONS[kind])
        raise error(
            f"has AnnData's encoding {kind!r} in version {version}, but only {known} is supported: write the file with "
            "an older version of anndata"
        )
    return kind
