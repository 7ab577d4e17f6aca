"""What a tuner left beside a file, readers take."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from h5chunk import ChunkDataset, ChunkLoader
from h5chunk.errors import FileError
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.recommendation import sidecar_of
from h5chunk.store.write.new_file import write_recommendation


def test_readers_take_what_lies_beside_a_file(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.zeros((4000, 3, 4, 4), np.uint8), chunks=(8, 3, 4, 4))
    assert ChunkDataset(path).window_chunks != 7
    cache = CacheSettings(521, 123_456, 0.25)
    write_recommendation(path, 7, cache, dataset="images", num_samples=4000, chunk_samples=8)
    assert ChunkDataset(path).window_chunks == ChunkLoader(path, 8).order.window_chunks == 7
    assert ChunkDataset(path).cache == cache
    write_recommendation(path, 7, cache, dataset="images", num_samples=3999, chunk_samples=8)
    assert ChunkDataset(path).window_chunks != 7
    sidecar_of(path).write_text("{")
    with pytest.raises(FileError, match=r"a\.h5\.h5chunk\.json"):
        _ = ChunkDataset(path).window_chunks
