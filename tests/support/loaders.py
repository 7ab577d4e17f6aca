"""Loaders that read in a certain way, as users choose it by the environment variable ``H5CHUNK_READER``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import h5chunk
from h5chunk.store.read.field_readers import reading


def loader_by(*args: Any, reader: str | None = None, **options: Any) -> h5chunk.ChunkLoader:
    """Return a ChunkLoader that reads its fields with this reader: "auto", "direct" or "h5py"."""
    with nullcontext() if reader is None else reading(reader):
        return h5chunk.ChunkLoader(*args, **options)


def by_sample(*feeds: Any) -> dict[int, list[bytes]]:
    """The images of each sample, in the epochs of these loaders of images and sample numbers."""
    found: dict[int, list[bytes]] = {}
    for feed in feeds:
        for images, numbers in feed:
            for image, number in zip(images, numbers.tolist(), strict=True):
                found.setdefault(number, []).append(image.numpy().tobytes())
    return dict(sorted(found.items()))
