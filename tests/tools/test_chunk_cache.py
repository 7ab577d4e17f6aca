"""The chunk cache that reports print serves the share of reads that they say, in h5py itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from support.commands import run
from support.foreign import chunk_table, counting_file, make_file, values

import h5chunk
from h5chunk.plan.order import INTERLEAVE

SHAPE = (6, 10)
CACHE = ("rdcc_nslots", "rdcc_nbytes", "rdcc_w0")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    """Windows of two chunks of 480 bytes, so that the open windows have a part of the file."""
    monkeypatch.setattr("h5chunk.plan.layout.OPEN_WINDOWS_BYTES", 2 * 480 * INTERLEAVE)


def share_served(path: Path, code: str, samples: Iterable[int]) -> float:
    """Read samples with h5py's cache as in ``code``, and return the share of reads of chunks that read no bytes."""
    settings: dict[str, Any] = {}
    recorder = type("h5py", (), {"File": staticmethod(lambda _, **options: settings.update(options))})
    eval(code, {"h5py": recorder})
    assert set(settings) == set(CACHE)
    file, offsets = counting_file(path), set(chunk_table(path))
    with h5py.File(file, "r", **settings) as opened:
        images = opened["images"]
        assert images.id.get_access_plist().get_chunk_cache() == tuple(settings[name] for name in CACHE)
        file.reads.clear()
        samples = list(samples)
        for sample in samples:
            images[sample]
        per_sample = len(offsets) // -(-len(images) // images.chunks[0])
    return 1 - sum(offset in offsets for offset, _ in file.reads) / (len(samples) * per_sample)


@pytest.mark.parametrize("batch_size", [4, 256])
@pytest.mark.parametrize("chunks", [(8, 6, 10), (8, 3, 5)], ids=["whole samples", "cut samples"])
def test_the_shares_are_those_of_h5py(tmp_path: Path, chunks: tuple[int, ...], batch_size: int) -> None:
    data = values((4000, *SHAPE), "u1")
    path = make_file(tmp_path / "a.h5", images=(data, {"chunks": chunks, "compression": "gzip"}))
    found = h5chunk.info(path).chunk_cache
    assert 0 < found.cache.nbytes < 4000 * 60 / 3
    order = np.concatenate([*h5chunk.ChunkSampler(h5chunk.ChunkDataset(path), batch_size)])
    assert share_served(path, found.code, order) == pytest.approx(found.served_in_order, abs=1e-9)
    at_random = np.random.default_rng(0).permutation(4000)
    assert share_served(path, found.code, at_random) == pytest.approx(found.served_at_random, abs=0.006)
    assert found.served_at_random < 0.4 < 0.8 < found.served_in_order


def test_convert_info_and_tune_print_the_cache_and_the_call(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    images = np.arange(4000 * 60).astype("u1").reshape(4000, *SHAPE)
    converted = h5chunk.convert({"images": images, "labels": np.arange(4000)}, path, chunk_samples=8)
    code = converted.chunk_cache.code
    order = np.concatenate([*h5chunk.ChunkSampler(h5chunk.ChunkDataset(path), 4)])
    assert share_served(path, code, order) == pytest.approx(converted.chunk_cache.served_in_order, abs=1e-9)
    assert "8 samples per chunk, as requested" in str(converted) and f"for readers with h5py: {code}" in str(converted)
    text = run("info", path).stdout
    assert f"for readers with h5py: {code}" in text and "chunk cache nslots=500, nbytes=23,520, w0=0" in text
    assert "87.5 % of the reads of chunks in the order of ChunkSampler" in text
    assert json.loads(run("info", path, "--json").stdout)["chunk_cache"]["served_in_order"] == 0.875
    tuned = run("tune", path, "--budget", "1", "--workers", "0").stdout
    assert "h5py, chunk cache" in tuned and "for readers with h5py: h5py.File(" in tuned


def test_a_matrix_has_a_cache_for_its_entries(tmp_path: Path) -> None:
    from support.matrices import random_matrix, write

    found = h5chunk.info(write(tmp_path / "a.h5", random_matrix(300, 20, 3))).chunk_cache
    with h5py.File(tmp_path / "a.h5") as file:
        attributes = file["h5chunk"].attrs
        assert [getattr(found.cache, name[5:]) for name in CACHE] == [attributes[name] for name in CACHE]
    assert "entries per chunk" in found.reason


def test_tune_apply_does_not_change_the_cache_for_single_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    h5chunk.convert({"images": np.arange(120 * 60).astype("u1").reshape(120, *SHAPE)}, path, chunk_samples=4)
    h5chunk.tune(path, budget_s=0.5, workers=(0,), apply=True)
    found = h5chunk.info(path).chunk_cache
    order = np.concatenate([*h5chunk.ChunkSampler(h5chunk.ChunkDataset(path), 256)])
    assert share_served(path, found.code, order) == pytest.approx(found.served_in_order, abs=1e-9)
    assert found.served_in_order == 0.75


def test_kept_images_are_read_without_a_cache(tmp_path: Path) -> None:
    photos = image_folder(tmp_path)
    for path, options in ((tmp_path / "kept.h5", {"keep_encoded": True}), (tmp_path / "raw.h5", {"keep_size": True})):
        converted, found = h5chunk.convert(photos, path, **options).chunk_cache, h5chunk.info(path).chunk_cache
        assert converted.code == found.code and "rdcc_nbytes=0" in found.code
        with h5py.File(path) as file:
            assert found.chunks == file["images/data"].chunks


def image_folder(parent: Path) -> Path:
    """Make images of two sizes."""
    (parent / "photos").mkdir()
    for number in range(40):
        Image.fromarray(values((8 + number % 2, 9, 3), "u1")).save(parent / "photos" / f"{number}.png")
    return parent / "photos"
