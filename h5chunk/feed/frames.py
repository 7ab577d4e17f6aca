"""Windows of frames in memory. Each distinct frame is stored once, and windows refer to it by its position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.attributes import cached_property
from h5chunk.errors import MAX_NUMBER
from h5chunk.feed.layout import ArrayShape
from h5chunk.store.read.windows import WindowReader
from h5chunk.transforms.csr import Allocate, SampleNumbers
from h5chunk.transforms.hold_out import as_array

SMALL_FRAME = 256  # frames of at most this many bytes are copied window by window, larger ones one by one


class FrameBuffers(NamedTuple):
    """Memory for the frames of one read: ``rows``, (m,) int64, ascending, and ``values``, (m, frame_bytes) uint8."""

    rows: np.ndarray
    values: np.ndarray


class Frames:
    """The distinct frames of n windows, ``values``, (m, ...), and ``table``, int64, which locates the windows in them.

    If ``steps`` is (k,) int64, the table is (n, 3). Each row has the positions in ``values`` of the window's current
    time step, and of the first and the last frame that the window may use; ``steps`` has the offsets of the window's
    frames from the current time step. If ``steps`` is None, the table is (n, k), with the position of each frame. These
    tensors are on the same device. ``rows``, (m,) int64, are the rows of the frames in the file.
    """

    def __init__(self, values: torch.Tensor, table: torch.Tensor, rows: np.ndarray, steps: torch.Tensor | None) -> None:
        self.values, self.table, self.rows, self.steps = values, table, rows, steps

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, some: slice) -> Frames:
        return Frames(self.values, self.table[some], self.rows, self.steps)

    @property
    def positions(self) -> torch.Tensor:
        """The position of each frame in ``values``: (n, k) int64."""
        if self.steps is None:
            return self.table
        anchors, firsts, lasts = (self.table[:, column, None] for column in range(3))
        return torch.minimum(torch.maximum(anchors + self.steps, firsts), lasts)

    def take(self, numbers: SampleNumbers) -> Frames:
        """Select windows by their numbers. Frames are not copied."""
        if self.table.device.type == "cpu":
            some = torch.from_numpy(self.table.numpy()[numbers.host])
        else:
            some = self.table.index_select(0, numbers.on_device)
        return Frames(self.values, some, self.rows, self.steps)

    def gathered(self, allocate: Allocate) -> torch.Tensor:
        """Return the frames of all windows, (n, k, ...). On the CPU, the memory comes from ``allocate``."""
        num_frames = self.table.shape[1] if self.steps is None else len(self.steps)
        shape = (len(self.table), num_frames, *self.values.shape[1:])
        if self.values.device.type != "cpu":
            return self.values.index_select(0, self.positions.reshape(-1)).view(shape)
        out = allocate(shape, self.values.dtype)
        frame_items = math.prod(shape[2:])
        if self.steps is None or not 0 < frame_items * out.itemsize <= SMALL_FRAME or num_frames == 1:
            np.take(as_array(self.values), self.positions.numpy(), axis=0, out=as_array(out), mode="clip")
        else:
            self._copy_runs(as_array(out).reshape(len(out), num_frames * frame_items), frame_items)
        return out

    def _copy_runs(self, out: np.ndarray, frame_items: int) -> None:
        """Gather windows of small frames. Copy all frames of a window at once if they are consecutive."""
        assert self.steps is not None
        steps, table, values = self.steps.numpy(), self.table.numpy(), as_array(self.values).reshape(-1)
        starts, ends = table[:, 0] + steps[0], table[:, 0] + steps[-1]
        is_run = (starts >= table[:, 1]) & (ends <= table[:, 2]) & (steps[-1] - steps[0] + 1 == len(steps))
        if is_run.any():
            runs = np.lib.stride_tricks.sliding_window_view(values, out.shape[1])
            out[is_run] = runs[starts[is_run] * frame_items]
        if not is_run.all():
            others = Frames(self.values, self.table[torch.from_numpy(~is_run)], self.rows, self.steps).positions.numpy()
            out[~is_run] = np.take(values.reshape(-1, frame_items), others, axis=0).reshape(len(others), -1)


@dataclass(frozen=True)
class FrameLayout:
    """The memory layout of a field of windows. ``max_frames(n)`` is the maximum number of frames in n windows."""

    reader: WindowReader
    name: str
    dtype: torch.dtype
    max_frames: Callable[[int], int]
    _steps: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        return self.reader.fields[self.name].sample_shape[1:]

    @cached_property
    def _table_width(self) -> int:
        return 3 if self.reader.is_dense(self.name) else len(self.reader.steps[self.name])

    @property
    def sample_bytes(self) -> int:
        """Estimated bytes per window: one frame, because windows share the others, and a row of the table."""
        return self.reader.source_of(self.name).fields[self.name].grid.sample_bytes + 8 * self._table_width

    def frames(self, values: torch.Tensor, table: torch.Tensor, rows: np.ndarray) -> Frames:
        """Return the windows that ``table``, as returned by `WindowReader.distinct_rows`, locates in ``values``."""
        steps = None
        if self.reader.is_dense(self.name):
            if values.device not in self._steps:
                self._steps[values.device] = torch.from_numpy(self.reader.steps[self.name]).to(values.device)
            steps = self._steps[values.device]
        return Frames(values, table, rows, steps)

    def arrays(self, num_frames: int, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for this many frames and windows."""
        return [((num_frames, *self._frame_shape), self.dtype), ((num_samples, self._table_width), torch.int64)]

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of arrays that are large enough for any read of this many windows."""
        return self.arrays(self.max_frames(num_samples), num_samples)

    def for_any(self) -> FrameLayout:
        """Return the layout for reads of any windows, in memory of their own."""
        return replace(self, max_frames=lambda _: MAX_NUMBER)

    def of_pieces(self, rows: np.ndarray | None) -> FrameLayout:
        """Return the layout for reads of consecutive ones of these windows. None means all windows."""
        return replace(self, max_frames=self.reader.frames_of_pieces(self.name, rows))


class FrameWindow:
    """The windows of one field that are read together. ``shapes`` has the shapes and dtypes of the arrays for them."""

    def __init__(self, layout: FrameLayout, samples: np.ndarray) -> None:
        self._layout = layout
        self._rows, self._table = layout.reader.distinct_rows(layout.name, samples)
        if len(self._rows) > (most := layout.max_frames(len(samples))):
            raise AssertionError(f"{len(samples)} windows have {len(self._rows)} frames, but memory for only {most}")
        self.shapes = layout.arrays(len(self._rows), len(samples))

    def destination(self, arrays: Any) -> FrameBuffers:
        """Fill in the table of the windows, and return the memory into which readers write the frames."""
        values, table = map(as_array, arrays)
        table[:] = self._table
        del self._table  # it is larger than the frames if they are small
        return FrameBuffers(self._rows, values.reshape(len(values), -1 if values.size else 0).view(np.uint8))

    def check(self) -> None:
        """Do nothing, because all bytes are valid frames."""

    def samples(self, arrays: Any) -> Frames:
        return self._layout.frames(arrays[0], arrays[1], self._rows)
