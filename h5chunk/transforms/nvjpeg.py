"""Decode batches of JPEGs on a GPU with torchvision's nvJPEG, if torchvision is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch

Decode = Callable[
    [Sequence[np.ndarray], Sequence[tuple[int, int]], np.ndarray, Callable[[int], torch.Tensor], torch.device],
    torch.Tensor,
]
FRAME_MARKERS = [marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC)]  # SOF0 to SOF15
SEGMENT_BYTES = 9  # of the beginning of a frame: marker, length, precision, height and width
MAX_SEGMENTS = 100  # before the frame


@cache
def find_decoder() -> tuple[str, Decode] | None:
    """Return the name of the GPU decoder and its function, or None if torchvision is not installed."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        return "JPEG by nvJPEG of torchvision", partial(_decoded, partial(decode_jpeg, mode=ImageReadMode.RGB))
    except (ImportError, RuntimeError, OSError):  # torchvision raises the others if it does not fit torch
        return None


def jpeg_sizes(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the heights and widths in the headers of JPEGs: (n, 2) int64, with zeros if an image is not a valid JPEG.

    ``data`` is 1-D uint8, and the bytes of image i are ``data[starts[i] : stops[i]]``.
    """
    sizes, at, left = np.zeros((len(starts), 2), np.int64), starts + 2, np.arange(len(starts))
    for _ in range(MAX_SEGMENTS):
        left = left[at[left] + SEGMENT_BYTES <= stops[left]]
        if not len(left):
            break
        segments = data[at[left, None] + np.arange(SEGMENT_BYTES)].astype(np.int64)
        is_frame = (segments[:, 0] == 0xFF) & np.isin(segments[:, 1], FRAME_MARKERS)
        sizes[left[is_frame]] = segments[is_frame][:, [5, 7]] << 8 | segments[is_frame][:, [6, 8]]
        at[left] += np.where(segments[:, 1] == 0xFF, 1, 2 + (segments[:, 2] << 8 | segments[:, 3]))
        left = left[(segments[:, 0] == 0xFF) & ~is_frame]
    return sizes


def _accepted(decode: Callable[..., list[torch.Tensor]], encoded: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Decode images, with None for each image that the decoder refuses. The list is halved to find these images."""
    if not encoded:
        return []
    try:
        return list(decode(encoded))
    except RuntimeError:  # one of them is damaged, or has an unsupported colour space
        half = len(encoded) // 2
        return [*_accepted(decode, encoded[:half]), *_accepted(decode, encoded[half:])] if half else [None]


def _decoded(
    decode: Callable[..., list[torch.Tensor]],
    data: Sequence[np.ndarray],
    sizes: Sequence[tuple[int, int]],
    is_sound: np.ndarray,
    by_cpu: Callable[[int], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the pixels of all images, each (C, H, W), in one 1-D tensor.

    ``is_sound``, (n,) bool, marks the upright JPEGs whose headers have the recorded sizes. Only these are decoded by
    nvJPEG, because it allocates memory for any size in a header. The CPU decodes the others, and those that nvJPEG
    refuses.
    """
    taken = np.flatnonzero(is_sound).tolist()
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
