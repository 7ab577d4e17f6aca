"""From uint8 windows to what the network takes: on the CPU, or on a GPU with a stream of its own.

On a GPU a slot is a pair of buffers, pinned host memory and device memory. Two events guard its reuse: the host
overwrites the pinned buffer only after the copy out of it is done, and a copy overwrites the device buffer only after
the consumer's kernels that read it are done. Batches are made on the consumer's stream, so that nothing else needs a
guard: no ``record_stream``, no new stream an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from h5chunk.errors import OptionError
from h5chunk.feed.memory import BatchMemory

ALIGNMENT = 512  # of a field in a slot's buffer


@dataclass(frozen=True)
class FieldSpace:
    """Shape and dtype of a field's samples in a slot."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample_shape) * self.dtype.itemsize


Spaces = Mapping[str, FieldSpace]


class CpuSlot:
    """A window in ordinary memory. Each window gets memory of its own from ``memory``, or, reused, the same again."""

    def __init__(self, spaces: Spaces, num_samples: int, memory: BatchMemory | None) -> None:
        self._spaces, self._memory = spaces, memory
        self._held: dict[str, torch.Tensor] = {}
        if memory is None:
            self._held = {
                name: BatchMemory().empty((num_samples, *space.sample_shape), space.dtype)
                for name, space in spaces.items()
            }
        self.tensors: dict[str, torch.Tensor] = {}

    def begin(self, num_samples: int) -> dict[str, memoryview]:
        for name, space in self._spaces.items():
            if self._memory is None:
                self.tensors[name] = self._held[name][:num_samples]
            else:
                self.tensors[name] = self._memory.empty((num_samples, *space.sample_shape), space.dtype)
        return {name: _bytes_of(tensor) for name, tensor in self.tensors.items()}

    def send(self) -> None:
        """It is where it shall be."""

    def batch(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """Samples ``first`` to ``last`` of the window."""
        return {name: tensor[first:last].data for name, tensor in self.tensors.items()}

    def release(self) -> None:
        """The consumer is done with all batches of the window."""
        if self._memory is not None:
            self.tensors = {}


class CudaSlot:
    """A window in pinned memory and its copy on the device: one buffer each for all fields, one copy for a window.

    All calls that take the GIL in turns cost several times their time beside threads that read: so views are made once.
    """

    def __init__(
        self, spaces: Spaces, num_samples: int, batch_size: int, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        self._device, self._stream = device, stream
        starts, end = {}, 0
        for name, space in spaces.items():
            starts[name] = end
            end += -(-num_samples * space.sample_bytes // ALIGNMENT) * ALIGNMENT
        self._pinned = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(end, dtype=torch.uint8, device=device)
        whole = self._pinned.numpy().data
        self._bytes = {n: whole[starts[n] : starts[n] + num_samples * s.sample_bytes] for n, s in spaces.items()}
        self._spaces, self._num_samples = spaces, num_samples
        self._fields = {
            name: self._there[starts[name] : starts[name] + num_samples * space.sample_bytes]
            .view(space.dtype)
            .view(num_samples, *space.sample_shape)
            for name, space in spaces.items()
        }
        self._batches = {
            (first, first + batch_size): self._cut(first, first + batch_size)
            for first in range(0, num_samples - batch_size + 1, batch_size)
        }
        self._copied = torch.cuda.Event()
        self._consumed = torch.cuda.Event()

    def begin(self, num_samples: int) -> dict[str, memoryview]:
        if not self._copied.query():
            self._copied.synchronize()  # the host may overwrite the pinned buffer
        if num_samples == self._num_samples:
            return self._bytes
        return {name: self._bytes[name][: num_samples * space.sample_bytes] for name, space in self._spaces.items()}

    def send(self) -> None:
        """Start the copy to the device."""
        self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
        with torch.cuda.stream(self._stream):
            self._there.copy_(self._pinned, non_blocking=True)
        self._copied.record(self._stream)

    def batch(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """Views of the device buffer, ordered behind the copy on the current stream; valid until `release`."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        ready = self._batches.get((first, last))
        return self._cut(first, last) if ready is None else ready

    def _cut(self, first: int, last: int) -> dict[str, torch.Tensor]:
        return {name: field[first:last] for name, field in self._fields.items()}

    def release(self) -> None:
        """The consumer has queued, on its current stream, all that reads the device buffer."""
        self._consumed.record(torch.cuda.current_stream(self._device))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Convert:
    """Samples as the file has them to the numbers that the network takes, in one kernel.

    uint8 counts as 0..1, as torchvision does it; floats are taken as they are; other integers are only cast.

    Parameters
    ----------
    stored : torch.dtype
        In the file.
    dtype : torch.dtype, optional
        None: float32 if ``normalize`` is given, else as stored.
    normalize : (mean, std), optional
        One number, or one a channel, each.
    channels_last : bool
        Memory format of batches of images.
    channel_axis : int
        Axis of the channels in a sample: 0 for (C, H, W), 2 for (H, W, C).

    Raises
    ------
    OptionError
        They do not fit each other.
    """

    def __init__(
        self,
        stored: torch.dtype,
        dtype: torch.dtype | None,
        normalize: tuple[Sequence[float] | float, Sequence[float] | float] | None,
        channels_last: bool,
        sample_shape: tuple[int, ...],
        channel_axis: int,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionError(f"dtype is {dtype!r}: give a torch.dtype, such as torch.bfloat16")
        self.dtype = dtype or (torch.float32 if normalize is not None else stored)
        if normalize is not None and not self.dtype.is_floating_point:
            raise OptionError(f"normalize gives fractions but dtype is {self.dtype}: give a floating dtype")
        if normalize is not None and not (stored == torch.uint8 or stored.is_floating_point):
            raise OptionError(f"normalize is for uint8 and floats, but the field is {stored}: use transform")
        self._scaled = normalize is not None or (stored == torch.uint8 and self.dtype.is_floating_point)
        if channels_last and (len(sample_shape) != 3 or channel_axis != 0):
            raise OptionError(f"channels_last needs samples of (C, H, W), these are {sample_shape}")
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        unit = 255 if stored == torch.uint8 else 1
        self._scale, self._shift = _scale_and_shift(normalize, unit, sample_shape, channel_axis)

    def to(self, device: torch.device) -> None:
        """Put the constants on the device."""
        self._scale, self._shift = self._scale.to(device), self._shift.to(device)

    def __call__(self, images: torch.Tensor, keep: bool) -> torch.Tensor:
        """The batch as it was asked for; ``keep``: the input may be handed on as it is."""
        if images.dtype == self.dtype and not self._scaled:
            if keep and images.is_contiguous(memory_format=self._format):
                return images
            return images.clone(memory_format=self._format)
        out = torch.empty(images.shape, dtype=self.dtype, device=images.device, memory_format=self._format)
        if not self._scaled:
            return out.copy_(images)
        return torch.addcmul(self._shift, images, self._scale, out=out)


def _scale_and_shift(
    normalize: tuple[Sequence[float] | float, Sequence[float] | float] | None,
    unit: int,
    sample_shape: tuple[int, ...],
    channel_axis: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / unit - mean) / std as x * scale + shift, float32, to be broadcast over samples."""
    try:
        mean, std = normalize if normalize is not None else (0.0, 1.0)
        means, stds = torch.as_tensor(mean, dtype=torch.float64), torch.as_tensor(std, dtype=torch.float64)
        if torch.broadcast_tensors(means, stds)[0].ndim > 1:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"normalize is {normalize!r}: give (mean, std), each a number or one a channel") from None
    if (stds == 0).any():
        raise OptionError(f"normalize has a std of 0: {std}")
    scale, shift = 1 / (unit * stds), -means / stds
    shape = [1] * len(sample_shape)
    for values, name in ((scale, "std"), (shift, "mean")):
        if values.numel() > 1:
            channels = sample_shape[channel_axis] if sample_shape else 1
            if values.numel() != channels:
                raise OptionError(f"normalize has {values.numel()} values of {name} for {channels} channels")
            shape[channel_axis] = channels
    scale, shift = scale.expand(math.prod(shape)), shift.expand(math.prod(shape))
    return scale.reshape(shape).float(), shift.reshape(shape).float()
