"""The Triton kernels of ColorJitter, MixUp and CutMix give the same bytes as the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.foreign import make_file, values
from support.interpreted import INTERPRETED, passes_interpreted

import h5chunk
from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.transforms import (
    ColorJitter,
    CutMix,
    MixUp,
    Normalize,
    RandomChoice,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from h5chunk.transforms.colour import Jitter, JitterKernel
from h5chunk.transforms.mixing import Mixer, MixKernel

JITTERS = {
    "all": ColorJitter(0.4, 0.4, 0.4, 0.1),
    "without contrast": ColorJitter(saturation=2, hue=0.5),
    "gray": ColorJitter(contrast=(0.2, 3)),
}
SHAPES = {"planar": ((3, 22, 17), 0), "interleaved": ((22, 17, 3), 2), "gray": ((1, 22, 17), 0)}
MIXINGS = {
    "mixup": MixUp(num_classes=1100),
    "cutmix": CutMix(alpha=0.3, num_classes=1100),
    "choice": RandomChoice([MixUp(num_classes=1100), CutMix(num_classes=1100)]),
}
BATCHES = {  # without bfloat16, which the interpreter does not round
    "planar": torch.rand(5, 3, 22, 17),
    "interleaved": torch.rand(5, 22, 17, 3),
    "channels_last": torch.rand(5, 3, 22, 17).half().contiguous(memory_format=torch.channels_last),
    "windows": torch.rand(5, 2, 3, 8, 17),
    "bytes": torch.from_numpy(values((5, 3, 22, 17), np.uint8)),
    "alone": torch.rand(1, 3, 22, 17),
    "rows": torch.rand(5, 1500),
}
AXES = {"interleaved": 2, "windows": 1}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(INTERPRETED, reason="these tests, once more")
def test_interpreted_kernels_equal_cpu() -> None:
    passes_interpreted(__file__, len(JITTERS) * len(SHAPES) + len(MIXINGS) * len(BATCHES) + 1)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", JITTERS)
def test_interpreted_colours(name: str, shape: str, without_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_shape, axis = SHAPES[shape]
    images, draws = torch.from_numpy(values((9, *sample_shape), np.uint8)), Draws(1, 2, np.arange(9))
    expected, found = images.clone(), images.clone()
    jitter = Jitter(JITTERS[name], sample_shape, axis)
    jitter(expected, draws)
    monkeypatch.setattr(JitterKernel, "suits", staticmethod(lambda device: True))
    jitter.prepare(torch.device("cpu"))
    jitter.release()  # waits until the kernel is compiled
    monkeypatch.setattr("h5chunk.transforms.colour.jitter_with_torch", None)
    jitter(found, draws)
    assert torch.equal(found, expected)
    assert not torch.equal(found, images) or (shape, name) == ("gray", "without contrast")


class Described:
    """A field, as far as mixing describes it."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.sample_shape, self.dtype = (
            tuple(batch.shape[1:]),
            batch.float().numpy().dtype if batch.ndim > 1 else np.dtype(int),
        )


def mixer_of(name: str, images: torch.Tensor, labels: torch.Tensor, axis: int) -> Mixer:
    mixer = Mixer(("images", MIXINGS[name]), {"images": Described(images), "labels": Described(labels)}, [1, 1])
    mixer._axis = axis
    return mixer


@interpreted
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", MIXINGS)
def test_interpreted_mixing(name: str, kind: str, without_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    images, axis, scores = BATCHES[kind], AXES.get(kind, 0), torch.rand(len(BATCHES[kind]), 1100)
    name = {"bytes": "cutmix", "rows": "mixup"}.get(kind, name)
    for labels in (torch.arange(0, 1100, 250)[: len(images)], scores, scores.half()):
        for seed in range(3):
            expected = mixer_of(name, images, labels, axis)((images, labels), seeds := np.array([1, seed], np.uint32))
            with monkeypatch.context() as patched:
                patched.setattr(MixKernel, "suits", staticmethod(lambda images, labels: True))
                mixer = mixer_of(name, images, labels, axis)
                mixer((images, labels), seeds)
                mixer.release()  # waits until the kernel is compiled
                patched.setattr("h5chunk.transforms.mixing.blend_with_torch", None)
                patched.setattr("h5chunk.transforms.mixing.blend_labels", None)
                found = mixer((images, labels), seeds)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@interpreted
def test_interpreted_labels_that_are_no_class(without_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has NaN, and the next one raises."""
    monkeypatch.setattr(MixKernel, "suits", staticmethod(lambda images, labels: True))
    images, labels = BATCHES["planar"], torch.tensor([0, 1, 1100, 3, 4])
    mixer = mixer_of("mixup", images, labels, 0)
    mixer((images, labels.clamp(0, 5)))
    mixer.release()
    _, soft = mixer((images, labels))
    assert soft.isnan().all(1).tolist() == [False, False, True, True, False]
    with pytest.raises(OptionError, match="a label is 1100, but num_classes is 1100"):
        mixer((images, labels.clamp(0, 5)))
    assert not mixer((images, labels.clamp(0, 5)))[1].isnan().any()


LISTS = {
    "all": [RandomResizedCrop(20), RandomHorizontalFlip(), JITTERS["all"], Normalize((0.4, 0.5, 0.6), 0.25)],
    "bytes": [JITTERS["all"], CutMix(num_classes=7)],
    "erased": [JITTERS["without contrast"], RandomErasing(1.0), ToDtype(torch.float16, scale=True)],
    "mixup": [Normalize(0.4, 0.5), ToDtype(torch.bfloat16), MixUp(num_classes=7)],
    "choice": [JITTERS["gray"], Normalize(0.4, 0.5), RandomChoice([MixUp(num_classes=7), CutMix(num_classes=7)])],
}


def are_compiled(loader: h5chunk.ChunkLoader) -> bool:
    """Wait until all kernels are compiled, and return whether they are used."""
    converter = loader._maker._pipelines[0].converter
    found = [getattr(converter, "_jitter", None), loader._mixer]
    return all(own._kernel.wait() for own in found if own is not None)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("axes", ["NCHW", "NHWC", "channels_last"])
@pytest.mark.parametrize("name", LISTS)
def test_gpu_equals_cpu(name: str, axes: str, resident: bool, tmp_path: Any) -> None:
    """Also before the kernels are compiled, and in channels_last."""
    shape = (50, 70, 90, 3) if axes == "NHWC" else (50, 3, 70, 90)
    path = make_file(tmp_path / "a.h5", images=(values(shape, np.uint8), {}), labels=(np.arange(50) % 7, {}))
    transforms: list[Any] = [*LISTS[name]]
    if axes == "channels_last":
        mixings = [each for each in transforms if hasattr(each, "blend")]
        transforms = [each for each in transforms if each not in mixings and not isinstance(each, ToDtype)]
        is_float = any(isinstance(each, Normalize) for each in transforms)
        transforms += [ToDtype(torch.bfloat16 if is_float else torch.uint8, channels_last=True), *mixings]
    epochs = []
    for device in ("cpu", "cuda"):
        options = {"device": device, "transforms": transforms, "resident": resident and device == "cuda"}
        with h5chunk.ChunkLoader(path, 16, **options) as loader:
            for _ in range(2):
                epochs.append([tuple(part.cpu() for part in batch) for batch in loader])
                loader.set_epoch(0)
                assert device == "cpu" or are_compiled(loader)
    expected, *others = epochs
    for found in others:
        for one, other in zip(expected, found, strict=True):
            for own, part in zip(one, other, strict=True):
                assert own.dtype == part.dtype and torch.equal(own, part)


@pytest.mark.gpu
@on_gpu
def test_images_of_any_size_on_a_gpu(tmp_path: Any) -> None:
    folder = tmp_path / "photos"
    for number in range(48):
        (folder / str(number % 3)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(values((40 + number, 90 - number, 3), np.uint8))
        image.save(folder / str(number % 3) / f"{number}.png")
    h5chunk.convert(folder, tmp_path / "any.h5", keep_size=True)
    mixing = RandomChoice([MixUp(num_classes=3), CutMix(num_classes=3)])
    transforms = [RandomResizedCrop(32), JITTERS["all"], Normalize(0.4, 0.5), mixing]
    epochs = []
    for device in ("cpu", "cuda"):
        with h5chunk.ChunkLoader(tmp_path / "any.h5", 16, device=device, transforms=transforms) as loader:
            epochs += [[tuple(part.cpu() for part in batch) for batch in loader]]
            loader.set_epoch(0)
            if device == "cuda":
                assert are_compiled(loader)
                epochs += [[tuple(part.cpu() for part in batch) for batch in loader]]
    for batches in zip(*epochs, strict=True):
        for expected, *others in zip(*batches, strict=True):
            assert all(torch.equal(expected, other) for other in others)


@pytest.mark.gpu
@on_gpu
def test_labels_that_are_no_class_on_a_gpu(tmp_path: Any) -> None:
    path = make_file(tmp_path / "a.h5", images=(values((64, 3, 8, 8), np.uint8), {}), labels=(np.arange(64), {}))
    transforms = [Normalize(0.4, 0.5), MixUp(num_classes=48)]
    with h5chunk.ChunkLoader(path, 16, device="cuda", shuffle=False, transforms=transforms) as loader:
        next(iter(loader))
        assert are_compiled(loader)
        loader.set_epoch(0)
        *_, (_, labels) = loader
        assert labels.isnan().any()
        torch.cuda.synchronize()
        loader.set_epoch(0)
        with pytest.raises(OptionError, match=r"a label is [0-9]+, but num_classes is 48"):
            next(iter(loader))
