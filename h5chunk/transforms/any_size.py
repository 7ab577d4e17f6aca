"""Convert images of any size: decode them in threads, a few batches ahead, then crop and resize them in one step.

On the CPU, each thread takes one image of a batch at a time, decodes it, and augments it into the memory of the batch.
This is done in C if `h5chunk.native.jpeg` can decode the image. For a GPU, the images of a batch are decoded into one
buffer and augmented on the GPU. If there are few threads, nvJPEG decodes them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import MAX_SIDE, FieldError, FileError, OptionError, SampleError, WorkerError
from h5chunk.machine import own_cores
from h5chunk.native import jpeg
from h5chunk.native.augment import (
    BOX_HEIGHT,
    BOX_WIDTH,
    FULL_HEIGHT,
    FULL_WIDTH,
    HEIGHT,
    LEFT,
    OFFSET,
    TOP,
    WIDTH,
    ImageRule,
)
from h5chunk.plan.draws import Draws
from h5chunk.store.read.ragged import ImagesField, ImageSizes
from h5chunk.store.read.source import Source
from h5chunk.transforms.augment import AUGMENTING, check_order, drawing_of
from h5chunk.transforms.converter import Converter
from h5chunk.transforms.csr import CsrRows
from h5chunk.transforms.geometry import Size
from h5chunk.transforms.nvjpeg import find_decoder, jpeg_sizes
from h5chunk.transforms.pixels import Pixels, make_rule

MAX_THREADS = 12  # unless the user asks for more
ENOUGH_THREADS = 8  # to decode for a GPU; nvJPEG is no faster than these, and uses part of the GPU's time
GAP = 2  # a JPEG is scaled while it is decoded only if a box stays this many times larger than its result
REMEDY = "add RandomResizedCrop(224), or Resize(256) and CenterCrop(224), to transforms"

Take = Callable[[], int | None]  # returns the index of an image that the caller must decode, or None at the end
_local = threading.local()


class Pending:
    """A batch whose images are being decoded. `result` waits for it."""

    def __init__(
        self, parts: Sequence[Future[Any]], finish: Callable[[], torch.Tensor], stop: Callable[[], None] = lambda: None
    ) -> None:
        self._parts, self._finish, self._stop, self._process = parts, finish, stop, os.getpid()
        self.then: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch

    def result(self) -> torch.Tensor:
        """Return the batch, or raise the error of one of its images. Raise WorkerError in a fork."""
        if self._process != os.getpid():
            raise WorkerError("a forked process lacks the decoding threads: start a new iteration in it")
        try:
            for part in self._parts:
                part.result()
        except BaseException:
            self.drop()
            raise
        return self.then(self._finish())

    def drop(self) -> None:
        """Cancel the decoding, and wait until no thread reads the images or writes to the batch."""
        self._stop()
        for part in self._parts if self._process == os.getpid() else ():
            if not part.cancel():
                part.exception()


class AnySizeConverter(Converter):
    """Converts images of any size: `CsrRows` of bytes."""

    is_uncut = is_random = True
    ahead = 2  # batches that are decoded while the caller uses another

    def __init__(
        self,
        transforms: Sequence[Any],
        field: ImagesField,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        if not any(isinstance(each, AUGMENTING) for each in transforms):
            raise OptionError(f"the images of field {field.name!r} differ in size: {REMEDY}")
        check_order(transforms)
        size = _size_after(transforms, field)
        self._drawing = drawing_of(transforms)
        self._drawing.size = size
        rule = make_rule(transforms, (field.channels, *size), 0, size, is_mask=False)
        self._pixels, self.dtype, self._allocate = Pixels(replace(rule, interleaved=True)), rule.dtype, allocate
        self.sample_bytes = rule.channels * math.prod(size) * self.dtype.itemsize
        self.result_shape = rule.shape(1)[1:]
        self.threads = self._pixels.threads
        self._field, self._device = field, torch.device("cpu")
        self._decode_batch: Callable[..., torch.Tensor] | None = None
        self.decoder, self._num_threads = "pixels" if field.form == "raw" else "", 1

    def prepare(self, device: torch.device) -> None:
        on_gpu = self._field.form == "encoded" and self._device.type == "cuda" and self._field.channels == 3
        if on_gpu and self._num_threads < ENOUGH_THREADS and (found := find_decoder()) is not None:
            self.decoder, self._decode_batch = found
            self._pixels.rule = replace(self._pixels.rule, interleaved=False)
        if not self.decoder:
            from h5chunk.sources import decode_any

            self.decoder = "JPEG by simplejpeg" if decode_any.simplejpeg else decode_any.MISSING
            self.decoder = "JPEG by libjpeg-turbo" if self._libjpeg() else self.decoder
        self._pixels.prepare(self._device)
        self._drawing.is_pinned = self._device.type == "cuda"

    def release(self) -> None:
        self._pixels.release()

    def attach(
        self, source: Source, name_of: Callable[[int], str], num_threads: int | None, device: torch.device
    ) -> None:
        sizes = source.image_sizes_of(self._field.name)
        most = max(int(sizes.heights.max(initial=0)), int(sizes.widths.max(initial=0)))
        if most > MAX_SIDE:
            raise FieldError(
                f"field {self._field.name!r} has an image of {most} pixels per side, more than {MAX_SIDE}: shrink it"
            )
        super().attach(source, name_of, num_threads, device)
        self._image_sizes, self._name_of, self._device = sizes, name_of, device
        self._num_threads = num_threads or min(MAX_THREADS, own_cores())

    def decoding_bytes(self, batch_size: int) -> int:
        """Estimate the memory for images that are decoded at the same time and batches that are ready, in bytes."""
        areas = self._image_sizes.heights.astype(np.float64) * self._image_sizes.widths
        held = self._num_threads if self._device.type == "cpu" else (self.ahead + 1) * batch_size
        pixels = held * float(areas.mean()) + float(areas.max(initial=0))
        return int(pixels) * self._field.channels + self.ahead * batch_size * self.sample_bytes

    def __call__(self, samples: CsrRows, keep: bool, draws: Draws) -> torch.Tensor:
        return self.start(samples, draws).result()

    def start(
        self, samples: CsrRows, draws: Draws, then: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch
    ) -> Pending:
        """Start decoding and augmenting a batch, and return it as pending. ``then`` is applied to the finished batch.

        The memory of ``samples`` must not change until the batch is finished or dropped.
        """
        numbers = draws.numbers
        heights, widths, orientations = (table[numbers] for table in self._image_sizes)
        table = self._drawing.table(heights, widths, draws)
        job = _Job(samples, numbers, orientations, table, self._field.channels)
        pending = self._on_gpu(job) if self._device.type != "cpu" else self._on_host(job)
        pending.then = then
        return pending

    def _on_host(self, job: _Job) -> Pending:
        rule = self._pixels.rule
        out = rule.empty(len(job.table), self._device, self._allocate)
        take = self._take(job, out, self._pixels.native_rule())
        return self._in_threads(job, partial(self._make, job, take, out), lambda: rule.as_batch(out))

    def _libjpeg(self) -> jpeg.Decoder | None:
        from h5chunk.sources.decode_any import LINKED

        return jpeg.load(LINKED) if self._field.form == "encoded" else None

    def _take(self, job: _Job, out: torch.Tensor, rule: ImageRule | None) -> Take:
        """Return a function that makes images in C, and returns the index of one for Python, or None at the end."""
        library = self._libjpeg()
        if not native.available() or (library is None and self._field.form == "encoded"):
            return job.next
        return partial(jpeg.decode, library, job.images, rule, out.data_ptr(), out[:1].nbytes)

    def _in_threads(self, job: _Job, work: Callable[[], None], finish: Callable[[], torch.Tensor]) -> Pending:
        parts = [self._pool().submit(work) for _ in range(min(self._num_threads, len(job.table)))]
        return Pending(parts, finish, job.stop)

    def _make(self, job: _Job, take: Take, out: torch.Tensor) -> None:
        while (number := take()) is not None:
            pixels = job.bytes_of(number)
            if self._field.form != "raw":
                pixels = self._decode(job, number, self._scratch(self._pixel_bytes(job, number)))
            job.table[number, OFFSET] = 0
            self._pixels.compute(torch.from_numpy(pixels), job.table[number : number + 1], out[number : number + 1])

    def _pixel_bytes(self, job: _Job, number: int) -> int:
        return int(job.table[number, HEIGHT] * job.table[number, WIDTH]) * self._field.channels

    def _decode(self, job: _Job, number: int, out: np.ndarray) -> np.ndarray:
        """Decode an image into the beginning of ``out``, a 1-D uint8 array, and return ``out``."""
        from h5chunk.sources.decode_any import decode_any

        row, orientation = job.table[number], int(job.orientations[number])
        size = int(row[HEIGHT]), int(row[WIDTH])
        try:
            found = decode_any(job.bytes_of(number), *size, orientation, self._field.channels, _least_size(row), out)
        except SampleError as error:
            raise FileError(f"{self._name_of(int(job.samples[number]))} {error}") from None
        if found != size:
            _scale(row, found)
        return out

    def _scratch(self, num_bytes: int) -> np.ndarray:
        """Return a buffer of this thread, (num_bytes,) uint8, which later calls reuse."""
        held = getattr(_local, "held", None)
        if held is None or len(held) < num_bytes:
            held = _local.held = np.empty(num_bytes, np.uint8)
        return held[:num_bytes]

    def _on_gpu(self, job: _Job) -> Pending:
        """Decode on the GPU, or in threads into one pinned buffer. The caller's stream computes the result."""
        if self._decode_batch is not None:
            decoded = self._pool().submit(self._by_gpu, job)
            return Pending([decoded], lambda: self._augmented(decoded.result(), job.table))
        if self._field.form == "raw":
            job.table[:, OFFSET] = job.starts
            return Pending([], lambda: self._augmented(job.rows.indices.to(self._device), job.table))
        counts = self._field.channels * job.table[:, HEIGHT] * job.table[:, WIDTH]
        job.table[:, OFFSET] = np.cumsum(counts) - counts
        source = torch.empty(int(counts.sum()), dtype=torch.uint8, pin_memory=True)
        take = self._take(job, source, None)

        def decode() -> None:
            while (number := take()) is not None:
                start = int(job.table[number, OFFSET])
                self._decode(job, number, source.numpy()[start : start + self._pixel_bytes(job, number)])

        return self._in_threads(
            job, decode, lambda: self._augmented(source.to(self._device, non_blocking=True), job.table)
        )

    def _by_gpu(self, job: _Job) -> torch.Tensor:
        """Decode a batch with nvJPEG into one buffer, each image (C, H, W). The CPU decodes what nvJPEG cannot."""
        assert self._decode_batch is not None
        counts = self._field.channels * job.table[:, HEIGHT] * job.table[:, WIDTH]
        job.table[:, OFFSET] = np.cumsum(counts) - counts
        sizes = [(int(row[HEIGHT]), int(row[WIDTH])) for row in job.table]
        data = [job.bytes_of(number) for number in range(len(job.table))]
        by_cpu = partial(self._by_cpu, job)
        return self._decode_batch(data, sizes, job.is_sound(), by_cpu, self._device)

    def _by_cpu(self, job: _Job, number: int) -> torch.Tensor:
        size = int(job.table[number, HEIGHT]), int(job.table[number, WIDTH])
        facts = size, int(job.orientations[number]), self._field.channels
        return decode_whole(job.bytes_of(number), *facts, partial(self._name_of, int(job.samples[number])))

    def _augmented(self, source: torch.Tensor, table: np.ndarray) -> torch.Tensor:
        source.record_stream(torch.cuda.current_stream(self._device))
        out = self._pixels.rule.empty(len(table), self._device, self._allocate)
        self._pixels.compute(source, table, out)
        return self._pixels.rule.as_batch(out)

    def __getstate__(self) -> dict[str, Any]:
        own = "_image_sizes", "_name_of"  # which `attach` sets again in another process
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def _pool(self) -> ThreadPoolExecutor:
        return self._pixels.threads.pool(1 if self._decode_batch is not None else self._num_threads)


def decode_whole(
    data: np.ndarray, size: Size, orientation: int, channels: int, name: Callable[[], str]
) -> torch.Tensor:
    """Decode an image of this size to (H, W, C). Raise FileError, with the image's ``name``, if that fails."""
    from h5chunk.sources.decode_any import check_size, decode_any

    try:
        check_size(*size)
        out = np.empty((*size, channels), np.uint8)
        decode_any(data, *size, orientation, channels, size, out.reshape(-1))
    except SampleError as error:
        raise FileError(f"{name()} {error}") from None
    return torch.from_numpy(out)


def whole_images(
    rows: CsrRows, samples: np.ndarray, sizes: ImageSizes, field: ImagesField, name_of: Callable[[int], str]
) -> list[torch.Tensor]:
    """Decode the images of rows, and return each in its original size: (C, H, W)."""
    data, found = rows.indices.numpy(), []
    for number, sample in enumerate(samples.tolist()):
        one = data[rows.host_starts[number] : rows.host_starts[number + 1]]
        height, width, orientation = (int(table[sample]) for table in sizes)
        if field.form == "raw":
            image = torch.from_numpy(one.reshape(height, width, field.channels))
        else:
            image = decode_whole(one, (height, width), orientation, field.channels, partial(name_of, sample))
        found.append(image.permute(2, 0, 1).contiguous())
    return found


class _Job:
    """The images of a batch and their geometry table, from which threads take one image at a time."""

    def __init__(
        self, rows: CsrRows, samples: np.ndarray, orientations: np.ndarray, table: np.ndarray, channels: int
    ) -> None:
        self.rows, self.samples, self.orientations, self.table = rows, samples, orientations, table
        numbers = rows.host_numbers
        self.starts, self._stops = rows.host_starts[numbers], rows.host_starts[numbers + 1]
        self._data, self._left = rows.indices.numpy(), iter(range(len(table)))
        self.images = jpeg.Images(self._data, self.starts, self._stops, orientations, table, channels)

    def next(self) -> int | None:
        """Return the index of the next image that no thread has taken, or None."""
        return next(self._left, None)

    def stop(self) -> None:
        """Stop threads from taking further images."""
        self._left, self.images.next = iter(range(0)), len(self.table)

    def is_sound(self) -> np.ndarray:
        """Return which images are upright JPEGs whose headers have the recorded sizes: (n,) bool."""
        claimed = jpeg_sizes(self._data, self.starts, self._stops)
        return (claimed == self.table[:, [HEIGHT, WIDTH]]).all(axis=1) & (self.orientations == 1)

    def bytes_of(self, number: int) -> np.ndarray:
        return self._data[self.starts[number] : self._stops[number]]


def _least_size(row: np.ndarray) -> list[int]:
    """Return the smallest height and width at which to decode an image, given its row in the geometry table."""
    sides = ((HEIGHT, BOX_HEIGHT, FULL_HEIGHT), (WIDTH, BOX_WIDTH, FULL_WIDTH))
    return [int(min(row[side], -(-GAP * row[side] * row[full] // row[box]))) for side, box, full in sides]


def _size_after(transforms: Sequence[Any], field: ImagesField) -> Size:
    """Return the size of the results; raise OptionError if it depends on the size of each image."""
    size: Size | None = None
    for each in transforms:
        size = each.size_after(size) if hasattr(each, "size_after") else size
    if size is None:
        raise OptionError(f"the images of field {field.name!r} still differ in size after all transforms: {REMEDY}")
    return size


def _scale(row: np.ndarray, size: tuple[int, int]) -> None:
    """Adapt an image's row in the geometry table to the size at which the image was decoded."""
    for side, first, length, new in ((HEIGHT, TOP, BOX_HEIGHT, size[0]), (WIDTH, LEFT, BOX_WIDTH, size[1])):
        old = int(row[side])
        start = round(int(row[first]) * new / old)
        stop = min(new, max(start + 1, round((int(row[first]) + int(row[length])) * new / old)))
        row[first], row[length], row[side] = min(start, new - 1), stop - min(start, new - 1), new
