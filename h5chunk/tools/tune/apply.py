"""Puts window and cache where readers take them from: into the header of a file of ours, or beside one of others."""

from __future__ import annotations

from h5chunk.plan.cache import CacheSettings
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.retune import rewrite_header
from h5chunk.store.sidecar import forget_recommendation, write_recommendation


def apply_recommendation(reader: H5Reader, window_chunks: int, cache: CacheSettings) -> str:
    """Store a recommendation for a file; gives where.

    Raises
    ------
    OutputError
        It cannot be written; what was recommended before stays.
    """
    if reader.header is not None and rewrite_header(reader.path, window_chunks, cache):
        forget_recommendation(reader.path)  # of a time when the header could not be changed
        return str(reader.path)
    return str(
        write_recommendation(
            reader.path,
            window_chunks,
            cache,
            dataset=reader.main.dataset,
            num_samples=reader.num_samples,
            chunk_samples=reader.chunk_samples,
        )
    )
