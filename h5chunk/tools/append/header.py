"""What a file that was appended to says about itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

import h5chunk
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.store.format import FORMAT_VERSION, Header
from h5chunk.store.write.appended import OldFile


def header_attributes(num_samples: int, window_chunks: int, cache: CacheSettings, options: str) -> dict[str, Any]:
    """Attributes of ``/h5chunk`` that are others in a file that was appended to."""
    return {
        "format_version": np.int64(FORMAT_VERSION),
        "h5chunk_version": h5chunk.__version__,
        "num_samples": np.int64(num_samples),
        "window_chunks": np.int64(window_chunks),
        "rdcc_nslots": np.int64(cache.nslots),
        "rdcc_nbytes": np.int64(cache.nbytes),
        "rdcc_w0": np.float64(cache.w0),
        "shuffled": np.uint8(0),
        "options": options,
    }


def longer_layout(header: Header, num_samples: int, sample_bytes: int) -> tuple[Layout, CacheSettings]:
    """Layout and cache of a longer file: its own chunks; its own window and cache where a tuner settled them."""
    size = header.chunk_samples
    was, layout = (plan_layout(count, sample_bytes, size) for count in (header.num_samples, num_samples))
    if header.window_chunks != was.window_chunks:
        layout = replace(layout, window_chunks=header.window_chunks)
    return layout, layout.cache if header.cache == was.cache else header.cache


def options_with(old: OldFile, **record: Any) -> str:
    """The options of the file, with one more addition."""
    before = old.options.get("appended")
    records = [*(before if isinstance(before, list) else []), record]
    return json.dumps(old.options | {"appended": records}, sort_keys=True)
