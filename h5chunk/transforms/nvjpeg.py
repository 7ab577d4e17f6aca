"""Decode JPEG on a GPU, in batches, by the nvJPEG of torchvision, if that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch

Decode = Callable[
    [Sequence[np.ndarray], Sequence[tuple[int, int]], np.ndarray, Callable[[int], torch.Tensor], torch.device],
    torch.Tensor,
]


@cache
def find_decoder() -> tuple[str, Decode] | None:
    """Return the name of the GPU decoder, and its function; None if torchvision is not installed."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        return "JPEG by nvJPEG of torchvision", partial(_decoded, partial(decode_jpeg, mode=ImageReadMode.RGB))
    except (ImportError, RuntimeError, OSError):  # torchvision raises the others if it does not fit torch
        return None


def _accepted(decode: Callable[..., list[torch.Tensor]], encoded: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Decode images; the result has None for images that the decoder refuses, which are found by halving the list."""
    if not encoded:
        return []
    try:
        return list(decode(encoded))
    except RuntimeError:  # one of them is not sound, or of other colours
        half = len(encoded) // 2
        return [*_accepted(decode, encoded[:half]), *_accepted(decode, encoded[half:])] if half else [None]


def _decoded(
    decode: Callable[..., list[torch.Tensor]],
    data: Sequence[np.ndarray],
    sizes: Sequence[tuple[int, int]],
    orientations: np.ndarray,
    by_cpu: Callable[[int], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the pixels of all images, (C, H, W) each, end to end.

    An image that is not a JPEG, is turned, or that nvJPEG refuses, is decoded by the CPU.
    """
    taken = [number for number, each in enumerate(data) if each[0] == 0xFF and orientations[number] == 1]
    encoded = [torch.from_numpy(data[number]) for number in taken]
    found = dict(zip(taken, _accepted(partial(decode, device=device), encoded), strict=True))
    parts = []
    for number, size in enumerate(sizes):
        image = found.get(number)
        if image is None or tuple(image.shape) != (3, *size):
            image = by_cpu(number).permute(2, 0, 1).contiguous().to(device)
        parts.append(image.reshape(-1))
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return joined
