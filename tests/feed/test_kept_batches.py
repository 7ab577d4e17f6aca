"""Batches belong to the caller: later windows, epochs and changes in place leave those that are kept as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import h5chunk
from h5chunk.transforms import L2, Csr, Dense, HoldOut, Log1p, Normalize, Pack, Pad, ToDtype

COUNT, CHUNK, BATCH = 240, 12, 10
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with chunks of a few rows, so that all slots are used again and again."""
    path = tmp_path_factory.mktemp("kept") / "a.h5"
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, COUNT)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with h5py.File(path, "w") as file:
        for name, shape, kind in (("u1", (3, 4, 4), "u1"), ("f4", (6,), "f4"), ("i8", (), "i8"), ("f8", (6,), "f8")):
            data = rng.integers(0, 200, (COUNT, *shape)).astype(kind)
            file.create_dataset(name, data=data, chunks=(CHUNK, *shape))
            file.create_dataset(f"z-{name}", data=data, chunks=(CHUNK, *shape), compression="gzip")
        file.create_dataset("tokens", data=np.arange(starts[-1], dtype="i4"), chunks=(30,))
        file["lengths"], file["frames"] = lengths, rng.random((COUNT, 3)).astype("f4")
        for name, value, index in (("f4-i4", "f4", "i4"), ("f8-i8", "f8", "i8"), ("u1-u2", "u1", "u2")):
            group = file.create_group(f"matrices/{name}")
            group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [COUNT, 9]})
            columns = np.concatenate([np.sort(rng.permutation(9)[:length]) for length in lengths])
            group.create_dataset("indices", data=columns.astype(index), chunks=(40,))
            group.create_dataset("data", data=rng.integers(1, 9, starts[-1]).astype(value), chunks=(40,))
            group["indptr"] = starts
        for i in range(COUNT):
            file[f"keyed/{i:03}"] = rng.random(7).astype("f4")
        file.create_dataset("volumes/0", data=rng.random((16, 16, 16)).astype("f4"), chunks=(4, 4, 4))
    return path


def matrix(name: str, *transforms: Any) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
    data = f"matrices/{name}"
    return lambda path: (h5chunk.ChunkDataset(path, fields=[data]), {"transforms": list(transforms)})


def fields(*names: str, **transforms: Any) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
    return lambda path: (
        h5chunk.ChunkDataset(path, fields=list(names)),
        {"transforms": transforms} if transforms else {},
    )


def tokens(transform: Any) -> Callable[[Path], tuple[Any, dict[str, Any]]]:
    def make(path: Path) -> tuple[Any, dict[str, Any]]:
        data = h5chunk.ChunkDataset(path, fields=["tokens"], lengths={"tokens": "lengths"})
        return data, {"transforms": {"tokens": [transform]}}

    return make


KINDS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "rows": fields("u1", "f4", "i8", "f8"),
    "compressed rows": fields("z-u1", "z-f4", "z-i8", "z-f8"),
    "same type": fields("f4", "f8", f4=[ToDtype(torch.float32)], f8=[ToDtype(torch.float64)]),
    "normalised": fields("f4", f4=[Normalize(0.0, 1.0)]),
    "padded": tokens(Pad()),
    "packed": tokens(Pack()),
    "windows": lambda path: (h5chunk.Windows(path, {"frames": "frames"}, length=4), {}),
    "keyed": lambda path: (h5chunk.Keyed(path, "keyed/*"), {}),
}
for _name, _dtype in (("f4-i4", torch.float32), ("f8-i8", torch.float64), ("u1-u2", torch.float32)):
    for _layout in (Csr, Dense):
        KINDS[f"{_name} {_layout.__name__}"] = matrix(_name, _layout(_dtype))
        KINDS[f"{_name} {_layout.__name__} Log1p L2"] = matrix(_name, Log1p(), L2(), _layout(_dtype))
        KINDS[f"{_name} {_layout.__name__} HoldOut"] = matrix(_name, _layout(_dtype), HoldOut(0.5))


def tensors(batch: Any) -> list[torch.Tensor]:
    """All memory of a batch, as dense tensors."""
    if not isinstance(batch, torch.Tensor):
        return [tensor for part in batch for tensor in tensors(part)]
    if batch.layout == torch.sparse_csr:
        return [batch.crow_indices(), batch.col_indices(), batch.values()]
    return [batch]


def check_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(found) == len(expected) > 0
    for batch, other in zip(found, expected, strict=True):
        for tensor, same in zip(batch, other, strict=True):
            assert tensor.dtype == same.dtype
            torch.testing.assert_close(tensor.cpu(), same, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_batches_stay_as_they_were(path: Path, kind: str, device: str, resident: bool, shuffle: bool) -> None:
    data, options = KINDS[kind](path)
    sampler = h5chunk.ChunkSampler(data, BATCH, shuffle=shuffle, window_chunks=1, seed=3)
    with h5chunk.ChunkLoader(data, batch_sampler=sampler, device=device, resident=resident, **options) as loader:
        kept, copies = [], []
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                kept.append(tensors(batch))
                copies.append([tensor.clone().cpu() for tensor in kept[-1]])
        check_equal(kept, copies)
        for batch in kept:
            for tensor in batch:
                tensor.zero_()
        loader.set_epoch(0)
        again = [[tensor.cpu() for tensor in tensors(batch)] for batch in loader]
        check_equal(again, copies[: len(again)])
