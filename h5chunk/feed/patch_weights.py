"""Find and read the weights that determine where patches of volumes are placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from h5chunk.errors import OptionError, printable
from h5chunk.store.read.volumes import WEIGHTS, VolumeBoxes

Weights = str | Mapping[str, Callable[[np.ndarray], Any]]


def weights_field(weights: Weights | None, fields: Mapping[str, str]) -> tuple[dict[str, str], Any]:
    """Return {`WEIGHTS`: the dataset of weights}, and the function that converts its values to weights.

    Returns an empty dictionary and None if there are no weights. Raises OptionError if ``weights`` is invalid.
    """
    if weights is None:
        return {}, None
    if isinstance(weights, Mapping):
        if len(weights) != 1 or not all(callable(each) for each in weights.values()):
            raise OptionError(f"weights is {weights!r}: pass a mapping of one field to a function of its values")
        ((name, function),) = weights.items()
    else:
        name, function = weights, lambda values: values != 0 if values.dtype.kind in "biu" else values
    if not isinstance(name, str):
        raise OptionError(f"weights is {weights!r}: pass a field or dataset, or a mapping of it to a function")
    return {WEIGHTS: fields.get(name, name)}, function


def read_weights(
    boxes: VolumeBoxes, function: Callable[[np.ndarray], Any], volume: int, box: Sequence[slice]
) -> np.ndarray:
    """Read a box of a volume's dataset of weights, and convert its values by ``function``: float64, of the box's shape.

    Raises OptionError if the dataset has axes that are not spatial, or if the weights have another shape, are negative,
    or have no finite sum.
    """
    shape = boxes.field.shape(volume)
    if len(shape) != len(box):
        raise OptionError(
            f"the weights have the shape {shape}, but need {len(box)} axes: use a dataset without a channel axis"
        )
    values = boxes.read(volume, box)
    if values.dtype.names:  # a type that NumPy lacks
        bits = torch.from_numpy(values.view(np.uint8))
        values = bits.view(getattr(torch, values.dtype.names[0])).float().numpy()
    weights = np.asarray(function(values), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        total = weights.sum()
    if weights.shape != values.shape or not np.isfinite(total) or (weights < 0).any():
        raise OptionError(
            f"the weights of a block of {printable(boxes.field.stored[volume][1].name)!r} of shape {values.shape} have "
            f"the shape {weights.shape}, and range from {weights.min(initial=0)} to {weights.max(initial=0)}: each "
            "voxel needs a finite weight of at least 0"
        )
    return weights
