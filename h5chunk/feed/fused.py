"""Bytes to normalised floats in one kernel of Triton, which PyTorch brings along for NVIDIA's GPUs on Linux.

torch.addcmul does the same in one kernel too, with the same bits, but takes five times as long where the types differ
(scripts/LOG.md). It does so until Triton is imported and has compiled, which takes a second, in a thread; and for good
where that fails: without a C compiler, say, or a folder to cache in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

FEWEST_NUMBERS = 4 << 20  # of a batch; with fewer, launching it takes longer than torch.addcmul; scripts/LOG.md
MOST_CHANNELS = 16  # a program holds all channels of its pixels
PIXELS = 1024  # of a program; 512 to 2048 made no difference
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Compiling:
    """A kernel that a thread compiles, by launching it once.

    Parameters
    ----------
    first_launch : callable
        Gives the kernel.

    Attributes
    ----------
    kernel : Any
        None until it is compiled; for good where that fails.
    """

    def __init__(self, first_launch: Callable[[], Any]) -> None:
        self.kernel: Any = None
        self._thread = threading.Thread(target=self._compile, args=(first_launch,), name="h5chunk-compile", daemon=True)
        self._thread.start()

    def _compile(self, first_launch: Callable[[], Any]) -> None:
        with suppress(Exception):  # no Triton, or one that does not work here: there are other ways
            self.kernel = first_launch()

    def wait(self) -> bool:
        """Wait until it is compiled or has failed, and say whether it can be used."""
        self._thread.join()
        return self.kernel is not None


class FusedKernel:
    """``out = images * scale + shift`` for uint8 images on a GPU, as soon as it is compiled.

    Parameters
    ----------
    scale, shift : float32, on the GPU
        One number or one a channel each, as many in both.
    channel_axis : int
        Of a sample: 0 for (C, H, W), 2 for (H, W, C).
    channels_last : bool
        The memory format of ``out``, for (C, H, W).
    """

    def __init__(self, scale: torch.Tensor, shift: torch.Tensor, channel_axis: int, channels_last: bool) -> None:
        self._scale, self._shift = scale.reshape(-1).contiguous(), shift.reshape(-1).contiguous()
        self._channel_axis, self._channels_last = channel_axis, channels_last
        self._compiling = Compiling(self._first_launch)

    @staticmethod
    def suits(dtype: torch.dtype, scale: torch.Tensor) -> bool:
        """Whether it is made for such numbers."""
        return scale.device.type == "cuda" and dtype in DTYPES and scale.numel() <= MOST_CHANNELS

    def wait(self) -> bool:
        """Wait until it is compiled or has failed, and say whether it can be used."""
        return self._compiling.wait()

    def _first_launch(self) -> Any:
        from h5chunk.feed.kernels import scale_and_shift as kernel

        image = torch.ones(1, 1, 16, dtype=torch.uint8, device=self._scale.device)
        self._launch(kernel, image, torch.empty(1, 1, 16, device=self._scale.device), self._scale, self._shift)
        return kernel

    def __call__(self, images: torch.Tensor, out: torch.Tensor) -> bool:
        """Do it, unless it is not compiled or the batch is too small; says whether it is done."""
        if self._compiling.kernel is None or images.numel() < FEWEST_NUMBERS:
            return False
        channels, scale, shift = self._scale.numel(), self._scale, self._shift
        if self._channels_last:
            channels = images.shape[1]
            source = images.view(len(images), channels, -1)
            there = out.permute(0, 2, 3, 1).view(len(out), -1, channels).transpose(1, 2)
            if scale.numel() != channels:
                scale, shift = scale.expand(channels).contiguous(), shift.expand(channels).contiguous()
                self._scale, self._shift = scale, shift
        elif channels > 1 and self._channel_axis:
            source = images.view(len(images), -1, channels).transpose(1, 2)
            there = out.view(len(out), -1, channels).transpose(1, 2)
        else:
            source, there = images.view(len(images), channels, -1), out.view(len(out), channels, -1)
        self._launch(self._compiling.kernel, source, there, scale, shift)
        return True

    @staticmethod
    def _launch(kernel: Any, source: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> None:
        """(n, channels, pixels) each, of any strides within a sample; samples lie one behind the other."""
        num_samples, channels, pixels = source.shape
        programs = num_samples * -(-pixels // PIXELS)
        padded = 1 << (channels - 1).bit_length()
        strides = (*source.stride()[1:], *out.stride()[1:])
        with torch.cuda.device(source.device):
            kernel[(programs,)](source, out, scale, shift, pixels, *strides, channels, padded, PIXELS, num_warps=4)
