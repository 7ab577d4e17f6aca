"""Draw tables of random geometry in C. The results equal those of the transforms' `change` and `boxes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from h5chunk.errors import MAX_SIDE
from h5chunk.native import augment
from h5chunk.native.augment import ERASED
from h5chunk.plan.draws import Draws, stream_key
from h5chunk.plan.permutation import Indices
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
from h5chunk.transforms.geometry import ERASING, Size


class NativeDraws:
    """The steps of a list of transforms, in the format of ``draws.c``; ``size`` is the size of the results."""

    def __init__(self, geometric: Sequence[Any], erasers: Sequence[Any], size: Size) -> None:
        self._transforms, self._sides = (*geometric, *erasers), np.array(size, np.int64)
        randoms = np.cumsum([0, *(transform.is_random for transform in geometric)]).tolist()
        self._streams = [*randoms[:-1], *range(ERASING, ERASING + len(erasers))]
        self._steps = np.zeros(len(self._transforms), augment.STEP)
        for step, transform in zip(self._steps, self._transforms, strict=True):
            for name, value in _step(transform).items():
                step[name] = value

    def fill(self, table: Indices, heights: Indices, widths: Indices, draws: Draws) -> bool:
        """Draw the geometry of n images into ``table``, (n, columns).

        ``heights`` and ``widths`` are (n,), or (1,) if all images have one size. Return False if an image is too small
        for a transform.
        """
        assert table.shape == (len(draws.samples), ERASED + 4 * np.count_nonzero(self._steps["kind"] >= augment.CUTOUT))
        steps = self._steps.copy()
        for number, (transform, stream) in enumerate(zip(self._transforms, self._streams, strict=True)):
            from_draws = draws
            if isinstance(transform, AlternatingFlip):
                from_draws = draws.of_all_epochs()
                steps["flag"][number] = (draws.epoch + draws.use) % 2
            steps["key"][number] = stream_key(from_draws.seed, from_draws.epoch, from_draws.use, stream)
        return augment.draw(steps, draws.samples, (heights, widths), self._sides, MAX_SIDE, table)


def _step(transform: Any) -> dict[str, Any]:
    """Return the fields of a step for ``draws.c``; fields that are left out are 0."""
    match transform:
        case RandomResizedCrop(size=(height, width), scale=scale, ratio=ratio):
            return {"kind": augment.BOX, "height": height, "width": width, **_ranges(scale, ratio)}
        case RandomCrop(size=(height, width), padding=(left, top, right, bottom), padding_mode=mode):
            sides = {"left": left, "top": top, "right": right, "bottom": bottom}
            padding = {"flag": 1, "reflects": mode == "reflect"}
            return {"kind": augment.CROP, "height": height, "width": width, **sides, **padding}
        case CenterCrop(size=(height, width)):
            return {"kind": augment.CROP, "height": height, "width": width}
        case Resize(size=int() as shorter):
            return {"kind": augment.RESIZE, "height": shorter}
        case Resize(size=(height, width)):
            return {"kind": augment.RESIZE, "height": height, "width": width}
        case RandomHorizontalFlip(p=p):
            return {"kind": augment.FLIP, "p": p}
        case AlternatingFlip():
            return {"kind": augment.FLIP, "p": 0.5}
        case Cutout(size=side):
            return {"kind": augment.CUTOUT, "height": side}
        case RandomErasing(p=p, scale=scale, wide_ratio=ratio):
            return {"kind": augment.ERASE, "p": p, **_ranges(scale, ratio)}
    raise TypeError(f"{transform} has no step")


def _ranges(scale: tuple[float, float], ratio: tuple[float, float]) -> dict[str, Any]:
    return {"scale": scale, "ratio": ratio, "log_ratio": [math.log2(limit) for limit in ratio]}
