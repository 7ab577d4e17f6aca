"""Transforms of batches, which change the values of a field on their way to the network.

A transform is any callable that takes the batch of a field and returns it changed: a transform of this module, of
torchvision's ``v2``, or a function. A list of them is applied in order, on the device of the batch::

    from h5chunk.transforms import Normalize, ToDtype

    ChunkLoader("photos.h5", 256, transforms=[Normalize(mean, std), ToDtype(torch.bfloat16, channels_last=True)])
    ChunkLoader("photos.h5", 256, transforms=[RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(mean, std)])
    ChunkLoader("cells.h5", 256, transforms={"X": [Log1p(10_000), Dense(torch.bfloat16)], "labels": [to_one_hot]})

The transforms of this module are frozen dataclasses, and can be called like any function of a batch. Those at the start
of a list are computed together, in one kernel and with one rounding at the end: crops, resizing, flips, `Cutout`,
`RandomErasing`, `Normalize` and `ToDtype` for images, with another kernel for `ColorJitter`; the last two for other
dense fields; `Binarize`, `L2`, `Log1p`, `HoldOut`, `Dense` and `Csr` for a matrix, whose rows stay sparse until they
are on the device. Without transforms, images keep their stored values, and rows of a matrix become dense float32.

The random transforms of images use different random numbers for each sample. These depend only on the seed of the
loader or sampler, the epoch, the sample's number in the file and the transform's position among the random transforms
of its list: they are the same for all batch sizes, ranks, workers, devices and readers, and after resuming. So fields
with equal lists, such as images and masks, are changed in the same way; a list that crops or flips only the first of
them raises OptionError::

    augment = [RandomCrop(224), RandomHorizontalFlip()]
    ChunkLoader("pairs.h5", 32, transforms={"images": [*augment, Normalize(mean, std)], "masks": augment})

If an epoch uses a sample several times, because of ``echo`` or ``weights``, each use has different random numbers.
With any sampler other than `h5chunk.ChunkSampler`, they come from torch's random generator.

`MixUp` and `CutMix`, or a `RandomChoice` of these, come last in the list of the images. They mix the samples of each
batch, and its labels, with random numbers that depend on the first sample of the batch.

Other random transforms usually use the same random numbers for a whole batch: see `per_sample`. Other transforms of
several fields together belong in the training loop.
"""

from __future__ import annotations

from h5chunk.transforms.augment import (
    AlternatingFlip,
    CenterCrop,
    Cutout,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from h5chunk.transforms.colour import ColorJitter
from h5chunk.transforms.hold_out import HoldOut
from h5chunk.transforms.mixing import CutMix, MixUp, RandomChoice
from h5chunk.transforms.normalize import Normalize, ToDtype
from h5chunk.transforms.per_sample import per_sample
from h5chunk.transforms.ragged import Nested, Pack, Pad
from h5chunk.transforms.rows import Csr, Dense
from h5chunk.transforms.values import L2, Binarize, Log1p

__all__ = [
    "L2",
    "AlternatingFlip",
    "Binarize",
    "CenterCrop",
    "ColorJitter",
    "Csr",
    "CutMix",
    "Cutout",
    "Dense",
    "HoldOut",
    "Log1p",
    "MixUp",
    "Nested",
    "Normalize",
    "Pack",
    "Pad",
    "RandomChoice",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "ToDtype",
    "per_sample",
]
