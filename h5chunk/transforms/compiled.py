"""Compile Triton kernels in a thread, and launch them. PyTorch includes Triton for NVIDIA GPUs on Linux.

Importing Triton and compiling take a second, and may fail, for example if there is no C compiler or no folder for the
cache. Until a kernel is compiled, and if that fails, slower torch operations compute the same values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.native import cuda
from h5chunk.native.augment import BOX_HEIGHT, DOWN, ERASED, FULL_HEIGHT, HEIGHT, LEFT, TOP
from h5chunk.transforms.csr import CsrRows, SampleNumbers, ValueRule

FEWEST_NUMBERS = 4 << 20  # in a smaller batch, launching the kernel takes longer than torch.addcmul; scripts/LOG.md
MAX_CHANNELS = 16  # a program holds all channels of its pixels
MAX_INT32 = (1 << 31) - 1
ALIGNED = 16  # Triton compiles a separate kernel for addresses that are not multiples of this many bytes
PIXELS = 1024  # pixels per program; 512 and 2048 are as fast
BLOCK = 256  # results, or entries of a sparse row, that a program handles at a time; see scripts/LOG.md
ZEROS, NUM_WARPS = 4096, 16  # of DenseKernel: values to clear at a time, and warps; see scripts/LOG.md
TAPS = 128  # weights that a program of augmentation computes at a time; see scripts/LOG.md
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def current_stream(device: int) -> int:
    """Return the handle of a GPU's current stream, without creating torch's stream object."""
    return int(torch._C._cuda_getCurrentRawStream(device))


class Compiling:
    """Base class of kernels that a thread compiles, by launching them once.

    ``_kernel`` is None until the kernel is compiled, and stays None if that fails.
    """

    def _compile_in_thread(self, first_launch: Callable[[], Any]) -> None:
        self._kernel: Any = None

        def run() -> None:
            with suppress(Exception):  # without a working Triton, torch operations are used
                self._kernel = first_launch()

        # not a daemon: the interpreter would end such a thread inside of Triton's C++, which aborts the process
        self._thread = threading.Thread(target=run, name="h5chunk-compile")
        self._thread.start()

    def wait(self) -> bool:
        """Wait until compilation has ended, and return whether the kernel can be used."""
        self._thread.join()
        return self._kernel is not None


class FusedKernel(Compiling):
    """Computes ``out = images * scale + shift`` for uint8 images on a GPU, once the kernel is compiled.

    ``scale`` and ``shift`` are float32 on the GPU, each with one value or one value per channel. ``sample_shape`` is
    (C, H, W) with ``channel_axis`` 0, or (H, W, C) with ``channel_axis`` 2. ``channels_last`` is the memory format of
    ``out``, for (C, H, W). The CUDA driver launches the compiled kernel, which is several times as fast as a launch by
    Triton.
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
        self._compile_in_thread(self._first_launch)

    @staticmethod
    def suits(dtype: torch.dtype, scale: torch.Tensor) -> bool:
        """Return whether the kernel supports this dtype, and the device and size of ``scale``."""
        return scale.device.type == "cuda" and dtype in DTYPES and scale.numel() <= MAX_CHANNELS

    def _first_launch(self) -> Any:
        from h5chunk.transforms.kernels import scale_and_shift as kernel

        with torch.cuda.device(self._device):
            numbers = torch.arange(2 * math.prod(self._shape), device=self._device)
            images = numbers.to(torch.uint8).reshape(2, *self._shape)
            out, other = (self._empty(images) for _ in range(2))
            compiled = self._by_triton(kernel, images, out)
            launch = launch_of(compiled, (self._scale, self._shift))
            if launch is not None and launch(current_stream(self._index), self._blocks(2), _addresses(images, other)):
                self._launch = launch if torch.equal(out, other) else None
        return kernel

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
        if self._kernel is None or images.numel() < FEWEST_NUMBERS:
            return False
        places = _addresses(images, out)
        if (
            self._launch is None
            or (places[0] | places[1]) % ALIGNED
            or not self._launch(current_stream(self._index), self._blocks(len(images)), places)
        ):
            with torch.cuda.device(self._device):
                self._by_triton(self._kernel, images, out)
        return True

    def _by_triton(self, kernel: Any, images: torch.Tensor, out: torch.Tensor) -> Any:
        blocks = self._blocks(len(images))
        return kernel[(blocks,)](images, out, self._scale, self._shift, *self._constants, num_warps=4)


def launch_of(compiled: Any, constants: Sequence[torch.Tensor], num_given: int = 2) -> cuda.Launch | None:
    """Return an object that launches a compiled Triton kernel through the CUDA driver; None if that is impossible.

    The first ``num_given`` parameters of the kernel are passed at each launch, and ``constants`` are the next ones.
    Triton adds its own parameters at the end, which are null for a kernel without scratch memory.
    """
    with suppress(Exception):  # another version of Triton
        context, metadata = cuda.context(), compiled.metadata
        launch = cuda.Launch(context, compiled.function)
        launch.arguments[num_given : num_given + len(constants)] = [each.data_ptr() for each in constants]
        launch.num_threads, launch.shared_bytes = 32 * metadata.num_warps, metadata.shared
        launch.kept = compiled, constants
        hidden = launch.num_parameters - num_given - len(constants)
        if context and hidden in range(3) and not metadata.global_scratch_size and not metadata.profile_scratch_size:
            return launch
    return None


def _addresses(images: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
    return images.data_ptr(), out.data_ptr()


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
    """Computes the images for a geometry table on a GPU, with the constants of a `Rule` of `augment_rule` on that GPU.

    If images are resized, a first launch computes the resampling weights. The other launch reads the images and writes
    the batch.
    """

    def __init__(self, rule: Any) -> None:
        self._rule, self._device = rule, rule.fill.device
        self._padding = rule.mode if rule.pads else "none"
        self._empty = torch.empty(0, dtype=torch.int32, device=self._device)
        numbers = (rule.fill if each is None else each for each in (rule.scale, rule.shift))
        self._constants = *numbers, rule.fill, rule.erased
        self._launches: dict[bool, cuda.Launch] = {}  # with and without numbers of rows
        self._compile_in_thread(self._first_launch)

    @staticmethod
    def suits(rule: Any) -> bool:
        """Return whether the kernel supports this device and dtype."""
        is_held = rule.channels <= MAX_CHANNELS or not rule.out_interleaved  # offsets in an image have 32 bits
        return rule.fill.device.type == "cuda" and rule.dtype in (*DTYPES, torch.uint8) and is_held

    def _first_launch(self) -> Any:
        from h5chunk.transforms import augment_kernel as kernels

        rule, device = self._rule, self._device
        table = np.zeros((1, ERASED + 4 * len(rule.erased)), np.int64)
        table[:, HEIGHT:DOWN] = 1  # an image and a box of one pixel
        table[:, TOP], table[:, LEFT] = 0, 0
        source = torch.full((rule.channels,), 100, dtype=torch.uint8, device=device)
        out, other = (torch.zeros(1, rule.channels, *rule.size, dtype=rule.dtype, device=device) for _ in range(2))
        loaded = self._load(kernels, table)
        for rows in (None, torch.zeros(1, dtype=torch.int64, device=device)):
            given = source, out, self._empty if rows is None else rows, loaded.table, loaded.taps, 0, 0, loaded.most
            compiled = self._by_triton(kernels, rows is not None, given)
            launch = launch_of(compiled, self._constants, len(given))
            if launch is not None and self._by_driver(launch, (source, other, *given[2:])) and torch.equal(out, other):
                self._launches[rows is not None] = launch
        return kernels

    def load(
        self, table: np.ndarray, loaded: LoadedTable | None = None, *, of_one_size: bool = False
    ) -> LoadedTable | None:
        """Copy a table to the GPU and compute its weights, unless it is already ``loaded``.

        Return None if the kernel is not compiled yet.
        """
        if loaded is not None and loaded.stream == torch.cuda.current_stream(self._device):
            return loaded
        return None if self._kernel is None else self._load(self._kernel, table, of_one_size)

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
        if launch is None or out.data_ptr() % ALIGNED or not self._by_driver(launch, given):
            self._by_triton(self._kernel, rows is not None, given)

    def _by_driver(self, launch: cuda.Launch, given: tuple[Any, ...]) -> bool:
        """Launch the kernel through the CUDA driver, which is faster than Triton. Return whether that worked."""
        *tensors, first, row_bytes, most = given
        if row_bytes > MAX_INT32:
            return False
        addresses = [each.data_ptr() for each in tensors]
        blocks, stream = self._blocks(len(given[1])), current_stream(int(self._device.index))
        return launch(stream, blocks, (*addresses, first, row_bytes, most))

    def _load(self, kernels: Any, table: np.ndarray, of_one_size: bool = False) -> LoadedTable:
        rule, (height, width), most, taps = self._rule, self._rule.size, 2, self._empty
        there = torch.from_numpy(table).to(self._device, non_blocking=True)
        antialias, longest = rule.interpolation == "antialias", max(height, width)
        if antialias and len(table):
            sizes, results = table[0, HEIGHT:TOP], table[0, FULL_HEIGHT:DOWN]
            if not of_one_size:
                sizes, results = table[:, BOX_HEIGHT:FULL_HEIGHT].max(0), table[:, FULL_HEIGHT:DOWN].min(0)
            most = max(2, int((-(-2 * sizes // results)).max()))  # at least as many as needed
        with torch.cuda.device(self._device):
            if rule.interpolation != "nearest" and len(table):
                taps = torch.empty((len(table), 2, most + 1, longest), dtype=torch.int32, device=self._device)
                kernels.weigh_taps[(len(table), 2, -(-longest // TAPS))](
                    there, taps, most, table.shape[1], height, width, longest, antialias, self._padding, TAPS
                )
            return LoadedTable(there, taps, most, torch.cuda.current_stream(self._device))

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

    def _by_triton(self, kernels: Any, has_rows: bool, given: tuple[Any, ...]) -> Any:
        rule, (height, width) = self._rule, self._rule.size
        interleaves, _, block_rows, block = self._shape
        resamples = rule.interpolation != "nearest"
        registers = (64 if interleaves else 80) if resamples else None
        with torch.cuda.device(self._device):
            return kernels.augment_images[(self._blocks(len(given[1])),)](
                *given,
                *self._constants,
                given[3].shape[1],
                rule.channels,
                height,
                width,
                max(height, width),
                has_rows,
                not rule.interleaved,
                interleaves,
                rule.scale is not None,
                resamples,
                rule.interpolation == "antialias",
                self._padding,
                len(rule.erased),
                block_rows,
                block,
                num_warps=2 if interleaves and resamples else 1,
                maxnreg=registers,
                enable_fp_fusion=False,
            )


class DenseKernel(Compiling):
    """Makes sparse rows dense on a GPU: ``out[i, indices[e]] = value`` for each entry e of row i, and zero elsewhere.

    Each program clears one row and writes its entries, so that a batch is written about once. ``like`` returns a
    `CsrRows` of one row on the device, with the dtypes for which to compile. The rule must have no steps except ``l2``,
    which divides each row by its Euclidean length.
    """

    def __init__(self, like: Callable[[], CsrRows], num_columns: int, rule: ValueRule, *, l2: bool = False) -> None:
        self._like, self._num_columns, self._rule, self._l2 = like, num_columns, rule, l2
        self._table: torch.Tensor | None = None
        self._compile_in_thread(self._first_launch)
        if l2:  # torch adds in another order, so that the last bits would change once the kernel is compiled
            self.wait()

    def _first_launch(self) -> Any:
        from h5chunk.transforms.kernels import make_rows_dense as kernel

        rows, zero = self._like(), np.zeros(1, np.int64)
        device = rows.starts.device
        if rows.values is not None and self._rule.table is not None:
            self._table = torch.from_numpy(self._rule.table).to(device)
        out = torch.empty(1, self._num_columns, dtype=self._rule.dtype, device=device)
        self._launch(kernel, rows, out)
        self._launch(kernel, rows.take(SampleNumbers(zero, torch.from_numpy(zero).to(device))), out)
        return kernel

    @staticmethod
    def suits(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the kernel supports this device and dtype."""
        return device.type == "cuda" and dtype in DTYPES

    def __call__(self, rows: CsrRows, out: torch.Tensor) -> bool:
        """Fill ``out``, (rows, columns), unless the kernel is not compiled yet; return whether it ran."""
        if self._kernel is None:
            return False
        if len(rows):
            self._launch(self._kernel, rows, out)
        return True

    def _launch(self, kernel: Any, rows: CsrRows, out: torch.Tensor) -> None:
        numbers = rows.starts if rows.numbers is None else rows.numbers.on_device
        values = rows.indices if rows.values is None else rows.values
        with torch.cuda.device(out.device):
            kernel[(len(rows),)](
                rows.starts,
                rows.indices,
                values,
                rows.starts if self._table is None else self._table,
                numbers,
                out,
                rows.first,
                self._num_columns,
                float(self._rule.threshold or 0),
                self._rule.constant,
                has_numbers=rows.numbers is not None,
                has_values=rows.values is not None,
                has_table=self._table is not None,
                binarize=self._rule.threshold is not None,
                l2=self._l2,
                block=BLOCK,
                zeros=ZEROS,
                num_warps=NUM_WARPS,
            )
