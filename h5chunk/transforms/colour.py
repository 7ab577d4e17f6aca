"""Change the colours of images: `ColorJitter`, and the converter of lists that contain it.

Every image has a row of a table, (n, 5) int32: the order of the steps, the factors of brightness, contrast and
saturation as the bits of float32, and the shift of the hue. C, a Triton kernel (`h5chunk.transforms.kernels`) and torch
operations change the pixels in place, and give the same bits, by this arithmetic:

- A step ``k`` of the order, from 0 on, is ``order >> 3 * k & 7``: 0 brightness, 1 contrast, 2 saturation, 3 hue, or 4
  for none. After each step, values are whole numbers from 0 to 255: fractions are cut off.
- The gray value of a pixel is ``(2989 * red + 5870 * green + 1140 * blue) // 10000``, or its value if there is one
  channel. Saturation and hue leave images of one channel as they are.
- With the factor f, brightness multiplies values by f; contrast is ``value * f + mean * (1 - f)``, where ``mean`` is
  the mean gray value of the image, ``256 * sum // count / 256``; and saturation is ``value * f + gray * (1 - f)``.
  Floats are rounded to float32 after each operation.
- With the difference ``delta`` of a pixel's largest and least value, and ``sector = delta * 2**16``, its hue is an
  integer from 0 to ``6 * sector``, to which the shift times ``delta`` is added. The shift is ``hue * 6 * 2**16``,
  rounded. With the offset k = 5 for red, 3 for green and 1 for blue, and ``h = (hue + k * sector) % (6 * sector)``, a
  channel has the value ``v = largest * 2**16 - max(0, min(h, 4 * sector - h, sector))``, which becomes the whole number
  ``v + v // 256 >> 16``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import OptionError
from h5chunk.machine import KeptThreads, own_cores
from h5chunk.native import cuda
from h5chunk.native.colour import jitter
from h5chunk.plan.draws import Draws
from h5chunk.store.read.source import Source
from h5chunk.transforms.compiled import KERNELS, Compiling, current_stream
from h5chunk.transforms.converter import Converter
from h5chunk.transforms.images import channel_axis
from h5chunk.transforms.kernel_cache import path_of, prepared

Range = tuple[float, float]
STREAM = 1 << 21  # of the draws; not one of those of crops and flips, which are equal for images and masks
BRIGHTNESS, CONTRAST, SATURATION, HUE, NOTHING = range(5)
ORDERS = np.array(list(permutations(range(4))))
PIXELS, WARPS = 2048, 8  # of the kernel: pixels at a time, and warps per image
IMAGES = 4  # that a thread takes at a time
TURN = 6 << 16  # the shift of the hue by which all colours stay


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue of each image at random, like torchvision's transform.

    The four changes are applied to each image in a random order, to whole numbers from 0 to 255. Values differ by at
    most 1 of 255 per change from those of torchvision on uint8. Images are uint8, of 3 channels, or of one channel,
    where only brightness and contrast change. Put it after crops, resizing and flips, and before the other transforms::

        [RandomResizedCrop(224), RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4, 0.1), Normalize(mean, std)]

    Parameters
    ----------
    brightness, contrast, saturation : float or (float, float), optional
        Range of the factor, or a number x for the range from max(0, 1 - x) to 1 + x. A factor of 0 gives a black image,
        a gray image whose pixels are equal, and an image in shades of gray; 1 changes nothing. Default: no change.
    hue : float or (float, float), optional
        Range of the shift of the hue, in turns, from -0.5 to 0.5; or a number x for the range from -x to x. Default: no
        change.

    Raises
    ------
    OptionError
        An argument is invalid; or the samples are not uint8, not of 1 or 3 channels, or windows or masks.
    """

    brightness: float | Range | None = None
    contrast: float | Range | None = None
    saturation: float | Range | None = None
    hue: float | Range | None = None

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            object.__setattr__(self, name, _range(name, getattr(self, name), 1.0, (0.0, math.inf)))
        object.__setattr__(self, "hue", _range("hue", self.hue, 0.0, (-0.5, 0.5)))

    @property
    def ranges(self) -> tuple[Range | None, ...]:
        """The ranges of the four changes."""
        return self.brightness, self.contrast, self.saturation, self.hue  # type: ignore[return-value]

    def draw(self, draws: Draws, table: np.ndarray) -> None:
        """Draw the changes of each image, and fill a table, (n, 5) int32, as the module describes it."""
        numbers = draws.uniform(STREAM, 5)
        orders = ORDERS[(numbers[4] * len(ORDERS)).astype(np.int64)]
        table[:, 0] = (np.where(np.isin(orders, self._steps), orders, NOTHING) << [0, 3, 6, 9]).sum(1)
        for step, (limits, number) in enumerate(zip(self.ranges, numbers, strict=False)):
            low, high = limits or (1.0, 1.0)
            value = low + number * (high - low)
            shift = np.rint(value * TURN) if step == HUE else value.astype(np.float32).view(np.int32)
            table[:, 1 + step] = shift

    @property
    def _steps(self) -> list[int]:
        return [step for step, limits in enumerate(self.ranges) if limits is not None]

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Change the colours of a batch, with random numbers from torch's generator."""
        shape = tuple(batch.shape[1:])
        axis = channel_axis(shape)
        check_images(self, batch.dtype, shape, axis)
        pixels = batch.contiguous().clone()
        jitter = Jitter(self, shape, axis)
        jitter(pixels, Draws(int(torch.randint(1 << 62, ())), 0, np.arange(len(batch))))
        return pixels


def _range(name: str, value: Any, centre: float, bounds: Range) -> Range | None:
    """Return the range of a change, or None if it changes nothing."""
    if value is None:
        return None
    try:
        if isinstance(value, (int, float)):
            low, high = max(centre - value, bounds[0]) if centre else -value, centre + value
        else:
            low, high = value
        low, high = float(low), float(high)
    except (TypeError, ValueError):
        raise OptionError(f"ColorJitter: {name} is {value!r}: pass a number, or a pair of them") from None
    if not (bounds[0] <= low <= high <= bounds[1] and math.isfinite(high)):
        limits = "at least 0" if centre else "from -0.5 to 0.5"
        raise OptionError(f"ColorJitter: {name} is {value!r}: pass numbers {limits}, or an ascending pair of them")
    return None if low == high == centre else (low, high)


def check_images(jitter: ColorJitter, dtype: torch.dtype, sample_shape: tuple[int, ...], axis: int) -> None:
    """Raise OptionError if samples are no images whose colours can be changed."""
    if dtype != torch.uint8:
        raise OptionError(f"{jitter} is for uint8, not for {dtype}: put it before ToDtype and Normalize")
    channels = sample_shape[axis] if len(sample_shape) == 3 else 1
    if len(sample_shape) not in (2, 3) or channels not in (1, 3):
        raise OptionError(
            f"{jitter} is for images of 1 or 3 channels, but samples have the shape {sample_shape}: leave it out"
        )


class JitterKernel(Compiling):
    """Changes the colours of images on a GPU in place, once the kernel is compiled.

    Each program changes one image, whose pixels are read twice if their mean is needed for contrast.
    """

    def __init__(self, channels: int, num_pixels: int, device: torch.device, *, interleaved: bool, contrasts: bool):
        self._options = {
            "num_pixels": num_pixels,
            "pixel_stride": channels if interleaved else 1,
            "channel_stride": 1 if interleaved else num_pixels,
            "channels": channels,
            "contrasts": contrasts,
            "block": PIXELS,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        }
        self._size, self._device = channels * num_pixels, device
        self._launch: cuda.Launch | None = None
        self._prepare_in_thread(self._prepare)

    @staticmethod
    def suits(device: torch.device) -> bool:
        """Return whether the kernel supports this device."""
        return device.type == "cuda"

    def _prepare(self) -> None:
        with torch.cuda.device(self._device):
            images, other = (torch.arange(self._size, device=self._device).to(torch.uint8) for _ in range(2))
            row = [0o3210, *np.array([0.5, 1.5, 2], np.float32).view(np.int32).tolist(), TURN // 3]
            table = torch.tensor([row], dtype=torch.int32, device=self._device)
            self._launch = prepared(
                path_of(KERNELS, "jitter_colours", (images, table), self._options),
                2,
                (),
                lambda: self._by_triton(images, table),
                lambda launch: self._by_driver(launch, other, table) and torch.equal(images, other),
            )

    def __call__(self, images: torch.Tensor, table: torch.Tensor) -> bool:
        """Change contiguous images, unless the kernel is not compiled yet; return whether it ran."""
        if not self.is_ready:
            return False
        table = table.to(self._device, non_blocking=True)
        if self._launch is None or not self._by_driver(self._launch, images, table):
            with torch.cuda.device(self._device):
                self._by_triton(images, table)
        return True

    def _by_driver(self, launch: cuda.Launch, images: torch.Tensor, table: torch.Tensor) -> bool:
        stream = current_stream(int(self._device.index))
        return launch(stream, len(table), (images.data_ptr(), table.data_ptr()))

    def _by_triton(self, images: torch.Tensor, table: torch.Tensor) -> Any:
        from h5chunk.transforms.kernels import jitter_colours as kernel

        return kernel[(len(table),)](images, table, **self._options)


class Jitter:
    """Changes the colours of batches in place. ``axis`` is that of the channels in a sample of ``sample_shape``."""

    def __init__(self, transform: ColorJitter, sample_shape: tuple[int, ...], axis: int) -> None:
        self._transform = transform
        self._channels = sample_shape[axis] if len(sample_shape) == 3 else 1
        self._num_pixels = math.prod(sample_shape) // self._channels
        self._interleaved = self._channels > 1 and axis == 2
        self.threads = KeptThreads("h5chunk-colour")
        self._kernel: JitterKernel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None}  # another process makes its own

    def prepare(self, device: torch.device) -> None:
        """Start to compile the kernel for batches on a device."""
        if self._kernel is None and JitterKernel.suits(device):
            contrasts = self._transform.contrast is not None
            options = {"interleaved": self._interleaved, "contrasts": contrasts}
            self._kernel = JitterKernel(self._channels, self._num_pixels, device, **options)

    def release(self) -> None:
        """Stop the threads, and wait for the one that compiles the kernel."""
        if self._kernel is not None:
            self._kernel.wait()
        self.threads.close()

    def __call__(self, images: torch.Tensor, draws: Draws) -> None:
        """Change contiguous uint8 images, on any device, by the draws of their samples."""
        if not images.numel():
            return
        table = torch.empty(len(images), 5, dtype=torch.int32, pin_memory=images.device.type == "cuda")
        self._transform.draw(draws, table.numpy())
        if self._kernel is not None and self._kernel(images, table):
            return
        if images.device.type == "cpu" and native.available():
            self._jitter_natively(images, table.numpy())
            return
        shape = (len(images), -1, self._channels) if self._interleaved else (len(images), self._channels, -1)
        pixels = images.view(shape)
        jitter_with_torch(pixels.mT if self._interleaved else pixels, table.numpy())

    def _jitter_natively(self, images: torch.Tensor, table: np.ndarray) -> None:
        image_bytes = self._channels * self._num_pixels

        def change(first: int) -> None:
            part, place = table[first : first + IMAGES], images.data_ptr() + first * image_bytes
            jitter(place, part, self._num_pixels, self._channels, interleaved=self._interleaved)

        self.threads.share(change, range(0, len(table), IMAGES), own_cores())


def jitter_with_torch(images: torch.Tensor, table: np.ndarray) -> None:
    """Change the colours of images, (n, channels, pixels) uint8, in place, with torch operations on any device."""
    factors = torch.from_numpy(table[:, 1:4].view(np.float32)).to(images.device)[:, :, None, None]
    shifts = torch.from_numpy(table[:, 4]).to(images.device)[:, None]
    for place in range(4):
        steps = table[:, 0] >> 3 * place & 7
        for step in np.unique(steps):
            rows = torch.from_numpy(np.flatnonzero(steps == step)).to(images.device)
            if step == NOTHING or (images.shape[1] == 1 and step in (SATURATION, HUE)):
                continue
            pixels = images[rows].int()
            if step == HUE:
                images[rows] = _turned(pixels, shifts[rows]).to(torch.uint8)
                continue
            factor = factors[rows, step]
            values = pixels * factor
            if step == CONTRAST:
                sums = 256 * _gray(pixels).long().sum((1, 2), keepdim=True)
                values += (sums // images.shape[2]).float() / 256 * (1 - factor)
            elif step == SATURATION:
                values += _gray(pixels) * (1 - factor)
            images[rows] = values.clamp_(0, 255).to(torch.uint8)


def _gray(pixels: torch.Tensor) -> torch.Tensor:
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.unbind(1)
    return ((2989 * red + 5870 * green + 1140 * blue) // 10000)[:, None]


def _turned(pixels: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Return pixels, (n, 3, pixels) int32, with the hue shifted by (n, 1) int32."""
    red, green, blue = pixels.unbind(1)
    high, low = pixels.amax(1), pixels.amin(1)
    delta = high - low
    hue = torch.where(
        high == red, green - blue, torch.where(high == green, 2 * delta + blue - red, 4 * delta + red - green)
    )
    hue = (hue << 16) + shifts * delta
    turn, sector = 6 * delta << 16, delta << 16
    hue = torch.where(hue < 0, hue + turn, hue)
    hue = torch.where(hue >= turn, hue - turn, hue)
    channels = []
    for offset in (5, 3, 1):
        own = hue + offset * sector
        own = torch.where(own >= turn, own - turn, own)
        below = torch.minimum(torch.minimum(own, 4 * sector - own).clamp(min=0), sector)
        value = (high << 16) - below
        channels.append((value + (value >> 8)) >> 16)
    return torch.stack(channels, 1)


class ColourConverter(Converter):
    """Converts images by the transforms before a `ColorJitter`, which give uint8, by this one, and by those after it.

    ``before`` and ``after`` are converters; ``after`` is None if there are no others. ``sample_shape`` and ``axis``
    describe the images between them.
    """

    is_random = True

    def __init__(
        self,
        before: Converter,
        transform: ColorJitter,
        after: Converter | None,
        sample_shape: tuple[int, ...],
        axis: int,
    ) -> None:
        check_images(transform, before.dtype, sample_shape, axis)
        self._before, self._after, self._jitter = before, after, Jitter(transform, sample_shape, axis)
        self.dtype = before.dtype if after is None else after.dtype
        self.sample_bytes = before.sample_bytes + (0 if after is None else after.sample_bytes)
        self.together_bytes, self.is_uncut, self.ahead = before.together_bytes, before.is_uncut, before.ahead
        self.takes_numbers = before.takes_numbers

    @property
    def decoder(self) -> str:  # type: ignore[override]
        return self._before.decoder

    def attach(
        self, source: Source, name_of: Callable[[int], str], num_threads: int | None, device: torch.device
    ) -> None:
        self._device, self._jitter.threads.limit = device, num_threads
        for part in self._parts:
            part.attach(source, name_of, num_threads, device)

    @property
    def _parts(self) -> Sequence[Converter]:
        return (self._before,) if self._after is None else (self._before, self._after)

    def prepare(self, device: torch.device) -> None:
        self._before.prepare(device)
        device = self._device if self.ahead else device  # batches that are made ahead are on the user's device
        self._jitter.prepare(device)
        if self._after is not None:
            self._after.prepare(device)

    def __call__(self, samples: Any, keep: bool, draws: Draws) -> torch.Tensor:
        return self._finished(self._before(samples, False, draws), draws)  # type: ignore[arg-type]

    def start(self, samples: Any, draws: Draws, then: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return self._before.start(samples, draws, lambda images: then(self._finished(images, draws)))

    def _finished(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Apply ColorJitter, and the transforms after it, to uint8 images that nothing else refers to."""
        self._jitter(images, draws)
        return images if self._after is None else self._after(images, True, draws)  # type: ignore[return-value]

    def decoding_bytes(self, batch_size: int) -> int:
        return sum(part.decoding_bytes(batch_size) for part in self._parts)

    def release(self) -> None:
        for part in self._parts:
            part.release()
        self._jitter.release()
