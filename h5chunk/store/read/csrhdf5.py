"""Rows of a CSR matrix through HDF5 and its chunk cache: for the layouts and filters that only HDF5 reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.plan.cache import CacheSettings
from h5chunk.store.guard.checksums import NO_SUMS, ChunkChecks, Sums
from h5chunk.store.read.chunktable import list_chunks
from h5chunk.store.read.csrrows import CsrRoom
from h5chunk.store.read.matrixfield import MatrixField

GAP_BYTES = 48 << 10  # between two rows: to read it as well takes the time of a call; scripts/sweep_reads.py


class CsrHandle:
    """The open datasets of a matrix, each with a chunk cache.

    Parameters
    ----------
    file : h5py.File
    field : MatrixField
    indptr : (num_rows + 1,) int64
    cache : CacheSettings, optional
        Of ``indices`` and of ``data``, each.
    sums : mapping of str to Checksums
        What is to be checked.
    """

    def __init__(
        self,
        file: h5py.File,
        field: MatrixField,
        indptr: np.ndarray,
        cache: CacheSettings | None,
        sums: Sums = NO_SUMS,
    ) -> None:
        self._file, self._indptr = file, indptr
        self._gap = max(1, GAP_BYTES // max(1, field.entry_bytes))
        self._indices = _open(file, f"{field.dataset}/indices", cache)
        self._values = None if field.value_dtype is None else _open(file, f"{field.dataset}/data", cache)
        parts = {f"{field.name}/indices": self._indices, f"{field.name}/data": self._values}
        self._checks = [
            ChunkChecks(Path(file.filename), name, dataset, list_chunks(dataset), sums[name], indptr)
            for name, dataset in parts.items()
            if name in sums and dataset is not None and len(dataset)
        ]

    def cache(self) -> CacheSettings:
        """What HDF5 says of the cache of ``indices``."""
        nslots, nbytes, w0 = self._indices.id.get_access_plist().get_chunk_cache()
        return CacheSettings(max(1, nslots), nbytes, w0)

    def read(self, rows: np.ndarray, out: CsrRoom) -> None:
        """Read rows, in any order; ``out.starts`` is there already.

        Rows that lie near each other are read with one call, and what lies between them with them.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        firsts, ends = self._indptr[rows[order]], self._indptr[rows[order] + 1]
        counts, places = ends - firsts, out.starts[:-1][order]
        for checks in self._checks:
            checks.check_entries(self._file.id.get_vfd_handle(), firsts[counts > 0], counts[counts > 0])
        borders = np.flatnonzero(firsts[1:] - ends[:-1] > self._gap) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
            low, high = int(firsts[start]), int(ends[start:stop].max(initial=0))
            if high <= low:
                continue
            sizes = counts[start:stop]
            before = np.cumsum(sizes) - sizes
            entries = np.arange(int(sizes.sum()))
            wanted = np.repeat(firsts[start:stop] - low - before, sizes) + entries
            there = np.repeat(places[start:stop] - before, sizes) + entries
            out.indices[there] = self._indices[low:high][wanted]
            if self._values is not None and out.values is not None:
                out.values[there] = self._values[low:high][wanted]


def _open(file: h5py.File, name: str, cache: CacheSettings | None) -> h5py.Dataset:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if cache is not None:
        access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
