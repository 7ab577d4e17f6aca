"""Windows of frames in memory. Each distinct frame is stored once, and windows refer to it by its position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.feed.layout import ArrayShape
from h5chunk.store.read.windows import WindowReader
from h5chunk.transforms.csr import Allocate, SampleNumbers


class FrameRoom(NamedTuple):
    """Memory for the frames of one read: ``rows``, (m,) int64, ascending, and ``values``, (m, frame_bytes) uint8."""

    rows: np.ndarray
    values: np.ndarray


class Frames:
    """The distinct frames of n windows, ``values``, (m, ...), and ``table``, (n, k) int64.

    ``table[i]`` has the positions in ``values`` of the k frames of window i. Both are on the same device. ``rows``,
    (m,) int64, are the rows of the frames in the file.
    """

    def __init__(self, values: torch.Tensor, table: torch.Tensor, rows: np.ndarray) -> None:
        self.values, self.table, self.rows = values, table, rows

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, some: slice) -> Frames:
        return Frames(self.values, self.table[some], self.rows)

    def take(self, numbers: SampleNumbers) -> Frames:
        """Select windows by their numbers. Frames are not copied."""
        if self.table.device.type == "cpu":
            return Frames(self.values, torch.from_numpy(self.table.numpy()[numbers.host]), self.rows)
        return Frames(self.values, self.table.index_select(0, numbers.on_device), self.rows)

    def gathered(self, allocate: Allocate) -> torch.Tensor:
        """Return the frames of all windows, (n, k, ...). On the CPU, the memory comes from ``allocate``."""
        shape = (*self.table.shape, *self.values.shape[1:])
        if self.values.device.type != "cpu":
            return self.values.index_select(0, self.table.reshape(-1)).view(shape)
        out = allocate(shape, self.values.dtype)
        np.take(self.values.numpy(), self.table.numpy(), axis=0, out=out.numpy(), mode="clip")
        return out


@dataclass(frozen=True)
class FrameLayout:
    """The memory layout of a field of windows. ``max_frames(n)`` is the maximum number of frames in n windows."""

    reader: WindowReader
    name: str
    dtype: torch.dtype
    max_frames: Callable[[int], int]

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        return self.reader.fields[self.name].sample_shape[1:]

    @property
    def _num_frames(self) -> int:
        return len(self.reader.steps[self.name])

    @property
    def sample_bytes(self) -> int:
        """Estimated bytes per window: one frame, as windows share the others, and the positions of all its frames."""
        return self.reader.frames.fields[self.name].grid.sample_bytes + 8 * self._num_frames

    def arrays(self, num_frames: int, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for this many frames and windows."""
        return [((num_frames, *self._frame_shape), self.dtype), ((num_samples, self._num_frames), torch.int64)]

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of arrays that are large enough for any read of this many windows."""
        return self.arrays(self.max_frames(num_samples), num_samples)

    def of_pieces(self) -> FrameLayout:
        """Return the layout for reads of consecutive windows."""
        return replace(self, max_frames=self.reader.frames_of_pieces(self.name))


class FrameWindow:
    """The windows of one field that are read together. ``shapes`` has the shapes and dtypes of the arrays for them."""

    def __init__(self, layout: FrameLayout, samples: np.ndarray) -> None:
        self._rows, self._table = layout.reader.distinct_rows(layout.name, samples)
        if len(self._rows) > (most := layout.max_frames(len(samples))):
            raise AssertionError(f"{len(samples)} windows have {len(self._rows)} frames, but memory for only {most}")
        self.shapes = layout.arrays(len(self._rows), len(samples))

    def destination(self, arrays: Any) -> FrameRoom:
        """Fill in the positions of the frames, and return the memory into which readers write the frames."""
        values, table = (array.numpy() for array in arrays)
        table[:] = self._table
        return FrameRoom(self._rows, values.reshape(len(values), -1 if values.size else 0).view(np.uint8))

    def check(self) -> None:
        """Do nothing, because any bytes are valid."""

    def samples(self, arrays: Any) -> Frames:
        return Frames(arrays[0], arrays[1], self._rows)
