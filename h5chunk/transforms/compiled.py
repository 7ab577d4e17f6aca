"""Prepare Triton kernels in a thread, and launch them. PyTorch includes Triton for NVIDIA GPUs on Linux.

Kernels that an earlier process has compiled come from disk (`h5chunk.transforms.kernel_cache`). Otherwise, importing
Triton and compiling take a second, and may fail, for example if there is no C compiler or no folder for the cache.
Until a kernel is ready, and if that fails, slower torch operations compute the same values.

CUDA's driver launches kernels, which is several times as fast as a launch by Triton.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.native import cuda
from h5chunk.native.augment import BOX_HEIGHT, DOWN, ERASED, FULL_HEIGHT, HEIGHT, LEFT, TOP
from h5chunk.transforms.csr import CsrRows, SampleNumbers
from h5chunk.transforms.kernel_cache import ALIGNED, bits_of, path_of, prepared
from h5chunk.transforms.values import ValueRule

FEWEST_NUMBERS = 4 << 20  # in a smaller batch, launching the kernel takes longer than torch.addcmul; scripts/LOG.md
MAX_CHANNELS = 16  # a program holds all channels of its pixels
MAX_INT32 = (1 << 31) - 1
PIXELS = 1024  # pixels per program; 512 and 2048 are as fast
BLOCK = 256  # results, or entries of a sparse row, that a program handles at a time; see scripts/LOG.md
NUM_WARPS = 4  # of FusedKernel
ZEROS, DENSE_WARPS = 4096, 16  # of DenseKernel: values to clear at a time, and warps; see scripts/LOG.md
TAPS = 128  # weights that a program of augmentation computes at a time; see scripts/LOG.md
KERNELS = "h5chunk.transforms.kernels"  # the module that imports Triton
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def current_stream(device: int) -> int:
    """Return the handle of a GPU's current stream, without creating torch's stream object."""
    return int(torch._C._cuda_getCurrentRawStream(device))


class Compiling:
    """Base class of kernels that a thread prepares: their code comes from disk, or Triton compiles them.

    `is_ready` is False until then, and stays False if that fails.
    """

    def _prepare_in_thread(self, prepare: Callable[[], Any]) -> None:
        self.is_ready = False

        def run() -> None:
            with suppress(Exception):  # without a working Triton, torch operations are used
                prepare()
                self.is_ready = True

        # not a daemon: the interpreter would end such a thread inside of Triton's C++, which aborts the process
        self._thread = threading.Thread(target=run, name="h5chunk-compile")
        self._thread.start()

    def wait(self) -> bool:
        """Wait until the thread has ended, and return whether the kernel can be used."""
        self._thread.join()
        return self.is_ready


class FusedKernel(Compiling):
    """Computes ``out = images * scale + shift`` for uint8 images on a GPU, once the kernel is compiled.

    ``scale`` and ``shift`` are float32 on the GPU, each with one value or one value per channel. ``sample_shape`` is
    (C, H, W) with ``channel_axis`` 0, or (H, W, C) with ``channel_axis`` 2. ``channels_last`` is the memory format of
    ``out``, for (C, H, W).
    """

    def __init__(
        self,
        scale: torch.Tensor,
        shift: torch.Tensor,
        sample_shape: tuple[int, ...],
        channel_axis: int,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        self._shape, self._dtype, self._device = sample_shape, dtype, scale.device
        channels = sample_shape[0] if channels_last else scale.numel()
        numbers = (each.reshape(-1).expand(channels).contiguous() for each in (scale, shift))
        self._scale, self._shift = numbers
        self._pixels = math.prod(sample_shape) // channels
        planes, interleaved = (self._pixels, 1), (1, channels)
        source = interleaved if channels > 1 and channel_axis else planes
        out = interleaved if channels_last else source
        self._constants = self._pixels, *source, *out, channels, 1 << (channels - 1).bit_length(), PIXELS
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._launch: cuda.Launch | None = None
        self._prepare_in_thread(self._prepare)

    @staticmethod
    def suits(dtype: torch.dtype, scale: torch.Tensor) -> bool:
        """Return whether the kernel supports this dtype, and the device and size of ``scale``."""
        return scale.device.type == "cuda" and dtype in DTYPES and scale.numel() <= MAX_CHANNELS

    def _prepare(self) -> None:
        with torch.cuda.device(self._device):
            numbers = torch.arange(2 * math.prod(self._shape), device=self._device)
            images = numbers.to(torch.uint8).reshape(2, *self._shape)
            out, other = (self._empty(images) for _ in range(2))
            given = images, out, self._scale, self._shift
            self._launch = prepared(
                path_of(KERNELS, "scale_and_shift", given, {"constants": self._constants, "num_warps": NUM_WARPS}),
                2,
                (self._scale, self._shift),
                lambda: self._by_triton(images, out),
                lambda launch: self._by_driver(launch, images, other) and torch.equal(out, other),
            )

    def _empty(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros(images.shape, dtype=self._dtype, device=self._device).to(memory_format=self._format)

    @property
    def _index(self) -> int:
        return int(self._device.index)

    def _blocks(self, count: int) -> int:
        return count * -(-self._pixels // PIXELS)

    def __call__(self, images: torch.Tensor, out: torch.Tensor) -> bool:
        """Run the kernel, unless it is not compiled or the batch is too small; return whether it ran.

        Samples must follow each other in memory without gaps.
        """
        if not self.is_ready or images.numel() < FEWEST_NUMBERS:
            return False
        if self._launch is None or not self._by_driver(self._launch, images, out):
            with torch.cuda.device(self._device):
                self._by_triton(images, out)
        return True

    def _by_driver(self, launch: cuda.Launch, images: torch.Tensor, out: torch.Tensor) -> bool:
        places = images.data_ptr(), out.data_ptr()
        if (places[0] | places[1]) % ALIGNED:
            return False
        return launch(current_stream(self._index), self._blocks(len(images)), places)

    def _by_triton(self, images: torch.Tensor, out: torch.Tensor) -> Any:
        from h5chunk.transforms.kernels import scale_and_shift as kernel

        blocks = self._blocks(len(images))
        return kernel[(blocks,)](images, out, self._scale, self._shift, *self._constants, num_warps=NUM_WARPS)


class LoadedTable(NamedTuple):
    """The geometry table of n images on a GPU, and the resampling weights for each row and column of the results.

    ``taps`` is (n, 2, most + 1, longest side of a result) int32, or empty if nothing is resized. Only ``stream`` may
    use the tensors, because it fills them.
    """

    table: torch.Tensor
    taps: torch.Tensor
    most: int  # maximum number of source pixels that contribute to a row or column
    stream: torch.cuda.Stream


class AugmentKernel(Compiling):
    """Computes the images for a geometry table on a GPU, with the constants of a `Rule` of `pixels` on that GPU.

    If images are resized, a first launch computes the resampling weights. The other launch reads the images and writes
    the batch.
    """

    def __init__(self, rule: Any) -> None:
        self._rule, self._device = rule, rule.fill.device
        self._padding = rule.mode if rule.pads else "none"
        self._empty = torch.empty(0, dtype=torch.int32, device=self._device)
        numbers = (rule.fill if each is None else each for each in (rule.scale, rule.shift))
        self._constants = *numbers, rule.fill, rule.erased
        self._launches: dict[bool, cuda.Launch | None] = {}  # with and without numbers of rows
        self._weigh: cuda.Launch | None = None
        self._prepare_in_thread(self._prepare)

    @staticmethod
    def suits(rule: Any) -> bool:
        """Return whether the kernel supports this device and dtype."""
        is_held = rule.channels <= MAX_CHANNELS or not rule.out_interleaved  # offsets in an image have 32 bits
        return rule.fill.device.type == "cuda" and rule.dtype in (*DTYPES, torch.uint8) and is_held

    def _prepare(self) -> None:
        rule, device = self._rule, self._device
        table = np.zeros((1, ERASED + 4 * len(rule.erased)), np.int64)
        table[:, HEIGHT:DOWN] = 1  # an image and a box of one pixel
        table[:, TOP], table[:, LEFT] = 0, 0
        with torch.cuda.device(device):
            if rule.interpolation != "nearest":
                self._prepare_weights(torch.from_numpy(table).to(device))
            source = torch.full((rule.channels,), 100, dtype=torch.uint8, device=device)
            shape, kind = (1, rule.channels, *rule.size), {"dtype": rule.dtype, "device": device}
            loaded = self._load(table)
            for rows in (None, torch.zeros(1, dtype=torch.int64, device=device)):
                out, other, has_rows = torch.zeros(shape, **kind), torch.zeros(shape, **kind), rows is not None
                numbers = self._empty if rows is None else rows
                given = source, out, numbers, loaded.table, loaded.taps, 0, 0, loaded.most

                def is_right(launch: cuda.Launch, given: Any = given, other: torch.Tensor = other) -> bool:
                    return self._by_driver(launch, (given[0], other, *given[2:])) and torch.equal(given[1], other)

                self._launches[has_rows] = prepared(
                    path_of(KERNELS, "augment_images", (*given, *self._constants), self._options(given[3], has_rows)),
                    len(given),
                    self._constants,
                    partial(self._by_triton, has_rows, given),
                    is_right,
                )

    def _prepare_weights(self, table: torch.Tensor) -> None:
        taps, other = (self._empty_taps(1, 2).zero_() for _ in range(2))
        self._weigh = prepared(
            path_of(KERNELS, "weigh_taps", (table, taps, 2), {"constants": self._weights(table)}),
            3,
            (),
            lambda: self._weigh_by_triton(table, taps, 2),
            lambda launch: self._weigh_by_driver(launch, table, other, 2) and torch.equal(taps, other),
        )

    def load(
        self, table: np.ndarray, loaded: LoadedTable | None = None, *, of_one_size: bool = False
    ) -> LoadedTable | None:
        """Copy a table to the GPU and compute its weights, unless it is already ``loaded``.

        Return None if the kernel is not compiled yet.
        """
        if loaded is not None and loaded.stream == torch.cuda.current_stream(self._device):
            return loaded
        return self._load(table, of_one_size) if self.is_ready else None

    def __call__(
        self,
        source: torch.Tensor,
        loaded: LoadedTable,
        first: int,
        rows: torch.Tensor | None,
        row_bytes: int,
        out: torch.Tensor,
    ) -> None:
        """Fill ``out``, which is contiguous, with the results of the table's rows from ``first`` on.

        The image of result k starts at byte ``row_bytes * rows[k]`` of ``source``, or at ``row_bytes * k`` without
        ``rows``. ``source`` is 1-D uint8.
        """
        if not len(out):
            return
        numbers = self._empty if rows is None else rows
        given = source, out, numbers, loaded.table, loaded.taps, first, row_bytes, loaded.most
        launch = self._launches.get(rows is not None)
        if launch is None or not self._by_driver(launch, given):
            self._by_triton(rows is not None, given)

    def _by_driver(self, launch: cuda.Launch, given: tuple[Any, ...]) -> bool:
        """Launch the kernel through the CUDA driver, which is faster than Triton. Return whether that worked."""
        *tensors, first, row_bytes, most = given
        if row_bytes > MAX_INT32 or given[1].data_ptr() % ALIGNED:
            return False
        addresses = [each.data_ptr() for each in tensors]
        blocks, stream = self._blocks(len(given[1])), current_stream(int(self._device.index))
        return launch(stream, blocks, (*addresses, first, row_bytes, most))

    def _load(self, table: np.ndarray, of_one_size: bool = False) -> LoadedTable:
        rule, most, taps = self._rule, 2, self._empty
        there = torch.from_numpy(table).to(self._device, non_blocking=True)
        if rule.interpolation == "antialias" and len(table):
            sizes, results = table[0, HEIGHT:TOP], table[0, FULL_HEIGHT:DOWN]
            if not of_one_size:
                sizes, results = table[:, BOX_HEIGHT:FULL_HEIGHT].max(0), table[:, FULL_HEIGHT:DOWN].min(0)
            most = max(2, int((-(-2 * sizes // results)).max()))  # at least as many as needed
        with torch.cuda.device(self._device):
            if rule.interpolation != "nearest" and len(table):
                taps = self._empty_taps(len(table), most)
                if self._weigh is None or not self._weigh_by_driver(self._weigh, there, taps, most):
                    self._weigh_by_triton(there, taps, most)
            return LoadedTable(there, taps, most, torch.cuda.current_stream(self._device))

    def _empty_taps(self, count: int, most: int) -> torch.Tensor:
        return torch.empty((count, 2, most + 1, max(self._rule.size)), dtype=torch.int32, device=self._device)

    def _weights(self, table: torch.Tensor) -> tuple[Any, ...]:
        """The constants of the kernel that computes the weights."""
        rule, (height, width) = self._rule, self._rule.size
        antialias, longest = rule.interpolation == "antialias", max(height, width)
        return table.shape[1], height, width, longest, antialias, self._padding, TAPS

    def _weigh_by_driver(self, launch: cuda.Launch, table: torch.Tensor, taps: torch.Tensor, most: int) -> bool:
        launch.grid_y, launch.grid_z = 2, -(-max(self._rule.size) // TAPS)
        given = table.data_ptr(), taps.data_ptr(), most
        return not given[1] % ALIGNED and launch(current_stream(int(self._device.index)), len(table), given)

    def _weigh_by_triton(self, table: torch.Tensor, taps: torch.Tensor, most: int) -> Any:
        from h5chunk.transforms.kernels import weigh_taps as kernel

        return kernel[(len(table), 2, -(-max(self._rule.size) // TAPS))](table, taps, most, *self._weights(table))

    @property
    def _shape(self) -> tuple[bool, int, int, int]:
        """Whether channels are interleaved, the elements per result row, and the rows and row elements per program."""
        rule, width = self._rule, self._rule.size[1]
        interleaves = rule.out_interleaved and rule.channels > 1
        line_size = width * rule.channels if interleaves else width
        return interleaves, line_size, 16 if interleaves else 8, min(BLOCK, 1 << (line_size - 1).bit_length())

    def _blocks(self, count: int) -> int:
        _, line_size, block_rows, block = self._shape
        return count * -(-self._rule.size[0] // block_rows) * -(-line_size // block)

    def _options(self, table: torch.Tensor, has_rows: bool) -> dict[str, Any]:
        """The constants and options that the kernel is compiled for."""
        rule, (height, width) = self._rule, self._rule.size
        interleaves, _, block_rows, block = self._shape
        resamples = rule.interpolation != "nearest"
        registers = (64 if interleaves else 80) if resamples else None
        return {
            "columns": table.shape[1],
            "channels": rule.channels,
            "out_height": height,
            "out_width": width,
            "longest": max(height, width),
            "has_rows": has_rows,
            "planar": not rule.interleaved,
            "interleaves": interleaves,
            "scales": rule.scale is not None,
            "resamples": resamples,
            "antialias": rule.interpolation == "antialias",
            "padding": self._padding,
            "num_erased": len(rule.erased),
            "block_rows": block_rows,
            "block": block,
            "num_warps": 2 if interleaves and resamples else 1,
            "maxnreg": registers,
            "enable_fp_fusion": False,
        }

    def _by_triton(self, has_rows: bool, given: tuple[Any, ...]) -> Any:
        from h5chunk.transforms.kernels import augment_images as kernel

        with torch.cuda.device(self._device):
            blocks = (self._blocks(len(given[1])),)
            return kernel[blocks](*given, *self._constants, **self._options(given[3], has_rows))


class DenseKernel(Compiling):
    """Makes sparse rows dense on a GPU: ``out[i, indices[e]] = value`` for each entry e of row i, and zero elsewhere.

    Each program clears one row and writes its entries, so that a batch is written about once. ``like`` returns a
    `CsrRows` of one row on the device, with the dtypes for which to compile. The rule must have no steps except ``l2``,
    which divides each row by its Euclidean length.
    """

    def __init__(self, like: Callable[[], CsrRows], num_columns: int, rule: ValueRule, *, l2: bool = False) -> None:
        self._like, self._num_columns, self._rule, self._l2 = like, num_columns, rule, l2
        self._table: torch.Tensor | None = None
        self._launches: dict[bool, cuda.Launch | None] = {}  # with and without numbers of rows
        self._prepare_in_thread(self._prepare)
        if l2:  # torch adds in another order, so that the last bits would change once the kernel is compiled
            self.wait()

    def _prepare(self) -> None:
        rows, zero = self._like(), np.zeros(1, np.int64)
        device = rows.starts.device
        if rows.values is not None and self._rule.table is not None:
            self._table = torch.from_numpy(self._rule.table).to(device)
        with torch.cuda.device(device):
            for some in (rows, rows.take(SampleNumbers(zero, torch.from_numpy(zero).to(device)))):
                out, other = (torch.empty(1, self._num_columns, dtype=self._rule.dtype, device=device) for _ in "ab")
                given = self._given(some, out)

                def is_right(launch: cuda.Launch, some: CsrRows = some, both: Any = (out, other)) -> bool:
                    return self._by_driver(launch, some, both[1]) and torch.equal(*both)

                self._launches[some.numbers is not None] = prepared(
                    path_of(KERNELS, "make_rows_dense", given, self._options(some)),
                    len(given),
                    (),
                    partial(self._by_triton, some, out),
                    is_right,
                )

    @staticmethod
    def suits(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the kernel supports this device and dtype."""
        return device.type == "cuda" and dtype in DTYPES

    def __call__(self, rows: CsrRows, out: torch.Tensor) -> bool:
        """Fill ``out``, (rows, columns), unless the kernel is not compiled yet; return whether it ran."""
        if not self.is_ready:
            return False
        if len(rows):
            launch = self._launches.get(rows.numbers is not None)
            if launch is None or not self._by_driver(launch, rows, out):
                self._by_triton(rows, out)
        return True

    def _given(self, rows: CsrRows, out: torch.Tensor) -> tuple[Any, ...]:
        """The arguments of the kernel."""
        return (
            rows.starts,
            rows.indices,
            rows.indices if rows.values is None else rows.values,
            rows.starts if self._table is None else self._table,
            rows.starts if rows.numbers is None else rows.numbers.on_device,
            out,
            rows.first,
            float(self._rule.threshold or 0),
            self._rule.constant,
        )

    def _options(self, rows: CsrRows) -> dict[str, Any]:
        """The constants and options that the kernel is compiled for."""
        return {
            "num_columns": self._num_columns,
            "has_numbers": rows.numbers is not None,
            "has_values": rows.values is not None,
            "has_table": self._table is not None,
            "binarize": self._rule.threshold is not None,
            "l2": self._l2,
            "block": BLOCK,
            "zeros": ZEROS,
            "num_warps": DENSE_WARPS,
        }

    def _by_driver(self, launch: cuda.Launch, rows: CsrRows, out: torch.Tensor) -> bool:
        given = self._given(rows, out)
        addresses = [each.data_ptr() for each in given[:6]]
        if any(address % ALIGNED for address in addresses) or rows.first > MAX_INT32:
            return False
        stream = current_stream(int(out.device.index))
        return launch(stream, len(rows), (*addresses, given[6], *map(bits_of, given[7:])))

    def _by_triton(self, rows: CsrRows, out: torch.Tensor) -> Any:
        from h5chunk.transforms.kernels import make_rows_dense as kernel

        with torch.cuda.device(out.device):
            return kernel[(len(rows),)](*self._given(rows, out), **self._options(rows))
