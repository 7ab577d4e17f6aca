"""Convert the samples of a window with the user's transforms, split them into batches, and count these."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, repeat
from typing import Any

import torch

from h5chunk.feed.columns import Column, Columns, Kind, torch_dtype
from h5chunk.feed.memory import KEPT, BatchMemory, SingleBuffer
from h5chunk.feed.skipping import BadSample
from h5chunk.plan.draws import Draws
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ragged import RaggedField
from h5chunk.transforms.any_size import Pending
from h5chunk.transforms.compile import Transform, compile_transforms
from h5chunk.transforms.csr import CsrRows, SampleNumbers
from h5chunk.transforms.images import ImagesByNumber
from h5chunk.transforms.mixing import Mixer, seeds_of_batches
from h5chunk.transforms.pairs import Items, is_packed, num_changed, num_tensors
from h5chunk.transforms.per_sample import PerSample, split_per_sample

MORE_BYTES = 256 << 20  # of batches of data on a GPU that are made by one call; see scripts/LOG.md
MAX_NAMED = 100  # bad samples that a report names
ALL = 1 << 30  # more batches than any window has
Part = Any  # one field of a batch: a tensor, a tuple of tensors, or a pending result of decoding
Tensors = tuple[torch.Tensor, ...]  # one per field, or two: see `h5chunk.transforms.pairs`


class FieldPipeline:
    """Converts the columns of one field, of a ``kind``, to batches.

    The ``converter`` computes the leading transforms in one step. Transforms made by `per_sample` are applied next, and
    the remaining transforms, ``others``, just before a batch is returned. With ``reuse``, batches on the CPU share one
    buffer, so that each batch is valid only until the next one.
    """

    def __init__(self, transforms: Sequence[Transform], field: Field | RaggedField, kind: Kind, *, reuse: bool) -> None:
        self.kind, self.reuses = kind, reuse
        self._memory: BatchMemory | SingleBuffer | None = None
        self._gathered = BatchMemory()  # for windows whose frames are converted
        stored = torch_dtype(field.dtype, field.name)
        self.converter, others = compile_transforms(transforms, field, stored, self._empty)
        self._each: tuple[PerSample, ...] = ()
        self.others: tuple[Transform, ...] = ()
        if others:
            self._each, self.others = split_per_sample(others)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            self._memory = SingleBuffer() if self.reuses else BatchMemory(KEPT + self.ahead)
        return self._memory.empty(shape, dtype)

    @property
    def ahead(self) -> int:
        """Number of batches to start before the caller requests them."""
        return self.converter.ahead

    @property
    def changes_nothing(self) -> bool:
        """Whether batches contain the samples exactly as stored, without conversion."""
        return self.converter.changes_nothing and not self._each

    def take(self, column: Column, numbers: SampleNumbers, memory: BatchMemory | None) -> Any:
        """Return the samples with these numbers, for `batches`. On a GPU (no ``memory``), a kernel may gather them."""
        if memory is None and self.converter.takes_numbers and self.kind.is_fixed:
            return ImagesByNumber(column, numbers)
        return self.kind.take(column, numbers, None if memory is None else memory.empty)

    def num_together(self, batch_size: int, *, keep: bool, group: int = 0) -> int:
        """Return how many batches to convert with one call, at least one.

        It is one batch if batches cannot be split or share one buffer. With ``keep``, it is also one, or all batches if
        nothing is converted. Otherwise, it is as many as fit in ``group`` bytes, or what the converter needs.
        """
        if self.converter.is_uncut or self._each:
            return 1
        if keep:
            return ALL if self.converter.changes_nothing else 1
        if self.reuses:  # batches of other windows are made in between, and would overwrite these
            return 1
        group = max(group, self.converter.together_bytes)
        return max(1, group // max(1, batch_size * self.converter.sample_bytes))

    def batches(self, column: Column, draws: Draws, batch_size: int, *, keep: bool) -> Sequence[torch.Tensor | Tensors]:
        """Convert a column and split it into batches. With ``keep``, the batches may share memory with the column.

        A batch is a tensor, or a tuple of inputs and targets if entries are held out. Batches share no autograd
        history, because autograd would otherwise mistake an in-place change of one batch for a change of another.
        """
        memory = self._empty if self.converter.changes_nothing else self._gathered.empty
        samples = self.kind.samples(column, memory)
        converted = self.converter(samples, keep or self.kind.is_gathered, draws)
        if isinstance(converted, tuple):
            return (tuple(part.data for part in converted),)
        converted = self._changed(converted, draws)
        if converted.shape[0] <= batch_size:
            is_new = converted is not samples and converted._base is None and not converted.requires_grad
            return (converted if is_new else converted.data,)
        return converted.data.unsafe_split(batch_size)

    def start(self, images: CsrRows, draws: Draws) -> Pending:
        """Start decoding and converting a batch of encoded images."""
        pending: Pending = self.converter.start(images, draws, lambda batch: self._changed(batch, draws).data)
        return pending

    def _changed(self, batch: torch.Tensor, draws: Draws) -> torch.Tensor:
        for number, transform in enumerate(self._each):
            batch = transform.with_draws(batch, draws, number)
        return batch

    def release(self) -> None:
        """Stop the threads, and free the memory that is kept for later batches."""
        self.converter.release()
        self._memory, self._gathered = None, BatchMemory()


@dataclass
class EpochReport:
    """Counts and times of the current epoch.

    Attributes
    ----------
    batches, samples : int
        Number of batches and samples returned, including echoes.
    skipped : int
        Number of samples that could not be read, and were replaced (``on_error="skip"`` of a data set). A sample counts
        each time.
    bad_samples : list of BadSample
        The number, the name and the reason of the first hundred of these.
    fresh_samples : int
        Number of samples returned that are not echoes.
    seconds : float
        Time from the first request for a batch to the last, including opening the file and the work of the caller.
    waited_s : float
        Time in which the caller waited for data, in seconds. Waiting for a copy to the GPU is not counted.
    """

    batches: int = 0
    samples: int = 0
    fresh_samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    skipped: int = 0
    bad_samples: list[BadSample] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter, repr=False, compare=False)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def fresh_samples_per_s(self) -> float:
        return self.fresh_samples / self.seconds if self.seconds else 0.0

    def add(self, num_samples: int, *, fresh: bool) -> None:
        """Count a batch that is about to be returned."""
        self.batches += 1
        self.samples += num_samples
        self.fresh_samples += num_samples if fresh else 0
        self.seconds = time.perf_counter() - self.started

    def add_skipped(self, bad: Sequence[BadSample]) -> None:
        """Count samples that were replaced."""
        self.skipped += len(bad)
        self.bad_samples += bad[: max(0, MAX_NAMED - len(self.bad_samples))]


class BatchMaker:
    """Makes the batches that the user gets, from the samples of a window.

    With ``keep``, samples that need no conversion may be returned without a copy. Otherwise they are copied, because
    the next window overwrites their memory. ``items`` makes batches of their tensors. With a ``mixer``, the tensors of
    a batch are followed by its seeds until `finish` mixes it.
    """

    def __init__(
        self,
        pipelines: Sequence[FieldPipeline],
        *,
        keep: bool,
        device: torch.device | None = None,
        items: Items | None = None,
        mixer: Mixer | None = None,
    ) -> None:
        self._pipelines, self._keep, self._device, self._mixer = pipelines, keep, device, mixer
        self._items = None if items is None or items.are_tensors else items
        self.ahead = max(pipeline.ahead for pipeline in pipelines)
        for pipeline in pipelines if self.ahead else ():
            pipeline.reuses = False  # several batches exist at the same time
        self._others = [
            pipeline.others if output < num_changed(pipeline.converter.pair) else ()
            for pipeline in pipelines
            for output in range(num_tensors(pipeline.converter.pair))
        ]
        self.finishes = any(self._others)  # whether functions of a batch come after the conversion
        unchanged = (own.changes_nothing and not own.kind.is_gathered for own in pipelines)
        self.passes_columns = mixer is None and all(unchanged)  # whether gathered samples are batches as they are
        self.passes_windows = keep and self.passes_columns  # whether a batch may be the window itself
        self._packs = is_packed(pipelines[0].converter.pair)
        holds_out = any(pipeline.converter.pair is not None for pipeline in pipelines)
        self._joined: Callable[[Iterable[Part]], Tensors] = _flat if holds_out else tuple

    def whole(self, window: Columns, draws: Draws, batch_size: int) -> Tensors:
        """Return the only batch of a window."""
        fields = zip(self._pipelines, window, strict=True)
        parts = [own.batches(part, draws, batch_size, keep=self._keep)[0] for own, part in fields]
        return self._joined(parts if self._mixer is None else [*parts, *seeds_of_batches(draws, [batch_size])])

    def num_samples(self, batch: Tensors) -> int:
        """Return the number of samples in a batch."""
        return batch[1].size(0) - 1 if self._packs else batch[0].size(0)

    def open(self, window: Columns, draws: Draws, batch_size: int | Sequence[int]) -> Iterator[Tensors]:
        """Return an iterator over the batches of a window, and then empty batches without end.

        The empty batches are for steps in which only other ranks have samples. ``batch_size`` may be a list with the
        size of each batch. The iterator keeps no reference to a batch that it has returned (`zip` would), so that the
        memory can be reused.
        """
        fields = zip(self._pipelines, window, strict=True)
        parts: list[Iterator[Any]] = [self._split(own, part, draws, batch_size) for own, part in fields]
        if self._mixer is not None:
            sizes = repeat(batch_size) if isinstance(batch_size, int) else batch_size
            parts.append(seeds_of_batches(draws, sizes))
        return map(self._join, *parts)

    def _join(self, *parts: Part) -> Tensors:
        return self._joined(parts)

    def _split(
        self, pipeline: FieldPipeline, samples: Any, draws: Draws, batch_size: int | Sequence[int]
    ) -> Iterator[Part]:
        if not isinstance(batch_size, int):
            for first, size in zip(accumulate(batch_size, initial=0), batch_size, strict=False):
                some, drawn = samples[first : first + size], draws.part(first, first + size)
                if pipeline.ahead:
                    yield pipeline.start(some, drawn)
                    continue
                yield pipeline.batches(some, drawn, max(1, size), keep=self._keep)[0]
            return
        kind, step = pipeline.kind, batch_size
        if not (kind.is_gathered and kind.arrays(samples)[0].device.type == "cpu"):  # else memory is the limit
            step *= pipeline.num_together(batch_size, keep=self._keep)
        for first in count(0, step):
            some, drawn = samples, draws
            if first or step < len(samples):
                some, drawn = samples[first : first + step], draws.part(first, first + step)
            if pipeline.ahead:
                yield pipeline.start(some, drawn)
                continue
            made = deque(pipeline.batches(some, drawn, batch_size, keep=self._keep))
            while made:
                yield made.popleft()

    def take(self, columns: Columns, numbers: SampleNumbers, memory: BatchMemory | None) -> tuple[Any, ...]:
        """Take samples of all fields by their numbers, for `make`. On the CPU, they are in ``memory``."""
        return tuple(own.take(column, numbers, memory) for own, column in zip(self._pipelines, columns, strict=True))

    def make(self, samples: Columns, draws: Draws, batch_size: int) -> list[Tensors]:
        """Make batches from gathered samples that nothing else refers to."""
        if self.passes_columns and len(samples[0]) <= batch_size:
            return [samples]
        fields = zip(self._pipelines, samples, strict=True)
        batches = zip(*(pipeline.batches(own, draws, batch_size, keep=True) for pipeline, own in fields), strict=True)
        if self._mixer is not None:
            seeds = seeds_of_batches(draws, repeat(batch_size))
            batches = ((*parts, own) for parts, own in zip(batches, seeds, strict=False))  # type: ignore[assignment]
        return list(map(_flat, batches))

    def num_gathered(self, batch_size: int) -> int:
        """Return the number of batches to gather and convert in one call, so that a call has enough work."""
        return min(own.num_together(batch_size, keep=False, group=MORE_BYTES) for own in self._pipelines)

    def finish(self, batch: Tensors) -> Any:
        """Move a batch to its device, apply the transforms that are not part of the conversion, and make its items."""
        seeds: Any = None
        if self._mixer is not None:
            *tensors, seeds = batch
            batch = tuple(tensors)
        if self._device is not None:
            batch = tuple(each.to(self._device, non_blocking=True) for each in batch)
        if self.finishes:
            batch = self._transformed(batch)
        if self._mixer is not None:
            batch = self._mixer(batch, seeds)
        return batch if self._items is None else self._items(batch)

    def finish_collated(self, batch: Tensors) -> Any:
        """Do the same to a batch that a data set has converted on its device and, without functions, also mixed."""
        if self.finishes:
            batch = self._transformed(batch)
            batch = batch if self._mixer is None else self._mixer(batch)
        return batch if self._items is None else self._items(batch)

    def release(self) -> None:
        """Stop the threads, and free the memory that is kept for later batches."""
        for pipeline in self._pipelines:
            pipeline.release()
        if self._mixer is not None:
            self._mixer.release()

    def _transformed(self, batch: Tensors) -> tuple[Any, ...]:
        finished: list[Any] = []
        for others, part in zip(self._others, batch, strict=True):
            for transform in others:
                part = transform(part)
            finished.append(part)
        return tuple(finished)


def with_images(batch: Tensors) -> Tensors:
    """Wait for the pending images of a batch, and return the batch with them."""
    return tuple(each.result() if isinstance(each, Pending) else each for each in batch)


def drop(batch: Tensors) -> None:
    """Discard a batch: cancel its pending images, and wait until no thread uses its memory."""
    for each in batch:
        if isinstance(each, Pending):
            each.drop()


def _flat(batch: Iterable[Part]) -> Tensors:
    return tuple(part for field in batch for part in (field if isinstance(field, tuple) else (field,)))
