"""The Triton kernel of augmentation gives the same bytes as the CPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.interpreted import INTERPRETED, passes_interpreted

import h5chunk
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    CenterCrop,
    Cutout,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from h5chunk.transforms.compiled import AugmentKernel
from h5chunk.transforms.csr import SampleNumbers, fresh
from h5chunk.transforms.images import AugmentConverter, ImagesByNumber

NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
LISTS = {
    "antialias": [RandomResizedCrop((9, 13)), RandomHorizontalFlip(), NORMALIZE],
    "bilinear": [RandomResizedCrop((14, 9), antialias=False), RandomErasing(1.0), ToDtype(torch.float16, scale=True)],
    "nearest": [RandomResizedCrop(11, interpolation="nearest-exact"), Cutout(4, (1.0, 2.0, 3.0))],
    "many taps": [Resize((5, 20)), CenterCrop((3, 6)), ToDtype(torch.float32, scale=True)],
    "constant": [RandomCrop(20, padding=6, fill=(7, 8, 9)), RandomHorizontalFlip(), NORMALIZE, RandomErasing(1.0)],
    "resized, reflect": [Resize((15, 12)), RandomCrop((12, 14), padding=4, padding_mode="reflect"), NORMALIZE],
    "edge": [RandomCrop((20, 24), padding=5, padding_mode="edge"), RandomHorizontalFlip()],
}


@pytest.mark.skipif(INTERPRETED, reason="these tests, once more")
def test_interpreted_kernel_equals_cpu() -> None:
    passes_interpreted(__file__, len(LISTS))


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
@pytest.mark.parametrize("name", LISTS)
def test_interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, axis = ((3, 22, 17), 0) if list(LISTS).index(name) % 2 else ((22, 17, 3), 2)
    batch = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8))
    draws = Draws(1, 2, np.arange(2))
    expected = AugmentConverter(LISTS[name], torch.uint8, shape, axis, fresh)(batch, False, draws)
    monkeypatch.setattr("h5chunk.transforms.images.MAX_TOGETHER", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(AugmentKernel, "suits", staticmethod(lambda rule: True))
    converter = AugmentConverter(LISTS[name], torch.uint8, shape, axis, fresh)
    converter.prepare(torch.device("cpu"))
    monkeypatch.setattr("h5chunk.transforms.pixels.augment_with_torch", None)
    converter.release()  # waits until the kernel is compiled
    assert torch.equal(converter(batch, False, draws), expected)
    if name != "antialias":
        return
    turned = ImagesByNumber(batch.flip(0), SampleNumbers(np.array([1, 0]), torch.tensor([1, 0])))
    assert torch.equal(converter(turned, False, draws), expected)
    whole = draws._replace(kept={}, whole=draws.samples)
    parts = [converter(batch[first : first + 1], False, whole.part(first, first + 1)) for first in range(2)]
    converter.release()
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("axes", ["NCHW", "NHWC", "channels_last"])
@pytest.mark.parametrize("name", LISTS)
def test_gpu_equals_cpu(name: str, axes: str, resident: bool, tmp_path: Path) -> None:
    path = tmp_path / "images.h5"
    shape = (40, 70, 90, 3) if axes == "NHWC" else (40, 3, 70, 90)
    with h5py.File(path, "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        file["images"].attrs["axes"] = "NHWC" if axes == "NHWC" else "NCHW"
        file["labels"] = np.arange(40)
    transforms = [*LISTS[name]]
    if axes == "channels_last":
        transforms = [each for each in transforms if not isinstance(each, ToDtype)]
        is_float = any(isinstance(each, Normalize) for each in transforms)
        transforms.append(ToDtype(torch.bfloat16 if is_float else torch.uint8, channels_last=True))
    epochs = []
    for device in ("cpu", "cuda"):
        options = {"device": device, "transforms": transforms, "resident": resident and device == "cuda"}
        with h5chunk.ChunkLoader(path, 16, **options) as loader:
            for pipeline in loader._maker._pipelines:
                pipeline.converter.release()  # waits until the kernel is compiled
            epochs.append([tuple(part.cpu() for part in batch) for batch in loader])
    for (images, labels), (others, numbers) in zip(*epochs, strict=True):
        assert images.dtype == others.dtype and torch.equal(images, others) and torch.equal(labels, numbers)
