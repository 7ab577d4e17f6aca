"""Apply a transform to each sample of a batch separately, with different random numbers for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws

DRAW_ONCE = {  # random transforms of torchvision whose names do not begin with Random
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "ElasticTransform",
    "GaussianNoise",
    "RandAugment",
    "ScaleJitter",
    "TrivialAugmentWide",
}
OURS = {
    "ColorJitter",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
}  # in h5chunk.transforms
NO_NUMBERS = "its random numbers depend on the numbers of the samples, which functions do not get"
STREAM = 1 << 30  # of the draws that seed torch


@dataclass(frozen=True)
class PerSample:
    """A transform that is applied to each sample of a batch separately. `per_sample` creates it."""

    transform: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Apply the transform. torch's random generators are not seeded."""
        return self._stacked([self.transform(sample) for sample in batch], batch)

    def with_draws(self, batch: torch.Tensor, draws: Draws, number: int) -> torch.Tensor:
        """Apply the transform to each sample with torch's generators seeded for it, then restore their state.

        These are the generators of the CPU and of the batch's device. Those of other GPUs are left alone, which
        `torch.manual_seed` would not do.
        """
        seeds = (draws.uniform(STREAM + number, 1)[0] * 2.0**53).astype("int64").tolist()
        generators = [torch.default_generator]
        if batch.device.type == "cuda":
            generators.append(torch.cuda.default_generators[batch.device.index])
        states = [generator.get_state() for generator in generators]
        results = []
        try:
            for sample, seed in zip(batch, seeds, strict=True):
                for generator in generators:
                    generator.manual_seed(seed)
                results.append(self.transform(sample))
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return self._stacked(results, batch)

    def _stacked(self, results: list[torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        if not results:  # the batch is empty
            return batch
        shapes = {tuple(result.shape) for result in results}
        if len(shapes) > 1:
            raise OptionError(
                f"per_sample: results of {self.transform} differ in shape ({sorted(shapes)[:2]}): make them equal"
            )
        return torch.stack(results)


def per_sample(transform: Callable[[torch.Tensor], torch.Tensor]) -> PerSample:
    """Apply a transform to each sample of a batch separately, so that samples get different random numbers.

    ::

        ChunkLoader("photos.h5", 256, transforms=[RandomResizedCrop(224), per_sample(v2.RandomRotation(9)), normalize])

    Torchvision's random transforms use the same random numbers for all samples of a call, that is, of a batch. In a
    `ChunkLoader`, torch's random generators of the CPU and of the batch's device are seeded from the loader's seed, the
    epoch and the sample's number before each call, so that the result depends on nothing else; put it before functions
    of batches. It is slow:
    the transforms of `h5chunk.transforms` take a few microseconds per image, other transforms take hundreds.

    Parameters
    ----------
    transform : callable
        Takes a sample, such as a (C, H, W) tensor, on the device of the batch, and returns the changed sample. All
        results of a batch must have the same shape.

    Raises
    ------
    OptionError
        ``transform`` cannot be called.
    """
    if isinstance(transform, type) or not callable(transform):
        raise OptionError(f"per_sample: transform is {transform!r}: pass an object or function that can be called")
    return PerSample(transform)


def split_per_sample(transforms: tuple[Any, ...]) -> tuple[tuple[PerSample, ...], tuple[Any, ...]]:
    """Divide transforms into the leading `PerSample` ones and the others. Raise OptionError for a late `PerSample`."""
    leading = tuple(takewhile(lambda transform: isinstance(transform, PerSample), transforms))
    others = transforms[len(leading) :]
    for late in (transform for transform in others if isinstance(transform, PerSample)):
        raise OptionError(f"{late} comes after {others[0]}: put it first, as {NO_NUMBERS}")
    _warn_if_drawn_once(others)
    return leading, others


def _warn_if_drawn_once(transforms: tuple[Any, ...]) -> None:
    """Warn about transforms of torchvision that use the same random numbers for a whole batch."""
    for transform in transforms:
        for part in _with_parts(transform):
            name = type(part).__name__
            is_random = name.startswith("Random") or name in DRAW_ONCE
            if is_random and type(part).__module__.startswith("torchvision.transforms"):
                alternative = f"use h5chunk.transforms.{name}, or " if name in OURS else ""
                warnings.warn(
                    f"{name} of torchvision draws once for all samples of a batch: {alternative}use "
                    f"per_sample({name}(...)), which draws for each sample",
                    stacklevel=6,
                )


def _with_parts(transform: Any) -> Iterator[Any]:
    """Yield a transform and, if it is a ``Compose`` or similar, the transforms that it contains."""
    yield transform
    parts = getattr(transform, "transforms", ())
    for part in parts if isinstance(parts, (list, tuple, torch.nn.ModuleList)) else ():
        yield from _with_parts(part)
