"""Decide whether a loader streams its data or keeps it on the device, within a memory budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import Dataset

from h5chunk.errors import OptionError, check_flag, check_whole, count_text, human_bytes, printable
from h5chunk.feed.columns import Kinds, Uses, dense_kind, kind_of, slot_bytes
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.given import GivenOrder
from h5chunk.feed.skipping import Skipping
from h5chunk.feed.slots import KEPT
from h5chunk.machine import available_cores
from h5chunk.native import available
from h5chunk.plan.order import Epoch, Order
from h5chunk.plan.slots import ROUND_BYTES, TOGETHER_BYTES, SlotPlan, largest_window, plan_slots, with_windows_together
from h5chunk.store.read.checksums import OFF, PIECE_BYTES
from h5chunk.store.read.field_readers import (
    AUTO,
    DIRECT,
    NOTABLE,
    VARIABLE,
    field_readers,
    is_small_field,
    read_amplification,
    scratch_bytes,
)
from h5chunk.store.read.files import MAPPING, Paths
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source
from h5chunk.transforms.compile import OWN_TRANSFORMS, Transforms, transforms_by_field
from h5chunk.transforms.converter import Converter

LOADING_BYTES = 8 << 20  # size of the pieces in which resident data is read
LOADING_SLOTS = 4  # number of pieces that are read concurrently
REMOTE_AHEAD_BYTES = 256 << 20  # read ahead from object stores, so that many requests are in flight
GPU_ROUND_BYTES = 512 << 20  # the same limit as ROUND_BYTES for a GPU, where host and device buffers both count
GROUP_BYTES = 16 << 20  # windows of the user's batches
WHOLE_CHUNKS_BYTES = 128 << 20  # the same if reading a few samples of a chunk takes as long as reading all
ENDLESS = 64  # windows of an epoch whose length is not known
SHARES = 8  # a window of the user's batches has at most this part of the samples
MAX_THREADS = 12  # more threads block each other, and delay the training loop: see scripts/LOG.md
DECODING_BYTES = 1 << 30  # limit on memory for decoding, which bounds the default number of threads


@dataclass(frozen=True)
class DataSource:
    """The fields of a data set, how to read them, and the target device."""

    reader: Source
    fields: dict[str, FieldReader]
    why: dict[str, str]  # why a field is read through HDF5, by field name
    numbered: dict[str, Callable[[np.ndarray], np.ndarray]]  # fields computed from sample numbers: see ReadPool
    kinds: Kinds
    device: torch.device
    num_threads: int
    timeout_s: float | None
    subset: np.ndarray | None = None  # numbers of the samples in the file, ascending; None for all samples
    skipping: Skipping | None = None  # how bad samples are replaced; None if they raise an error
    memory: Mapping[str, np.ndarray] | None = None  # all samples by field, if they are in the host's memory

    @property
    def num_samples(self) -> int:
        """Number of samples of the data set."""
        return self.reader.num_samples if self.subset is None else len(self.subset)

    @property
    def has_frames(self) -> bool:
        """Whether batches are gathered from frames, so that they are never views of a slot."""
        return any(kind.is_gathered for kind in self.kinds.values())

    @property
    def pieces(self) -> Kinds:
        """The kinds for slots with consecutive samples, for reading all samples once."""
        return {name: kind.of_pieces(self.subset) for name, kind in self.kinds.items()}

    def read_amplification(self, order: Epoch) -> float:
        """Return the bytes that all ranks read in an epoch, divided by the bytes of the samples.

        Fields that are kept in memory are not counted.
        """
        kept = [name for name, field in self.fields.items() if is_small_field(field)]
        return read_amplification(self.reader, order.rows_together(), self.fields, kept)

    def describe(self, order: Epoch) -> str:
        """Describe how the fields are read, for the repr of a loader."""
        times = self.read_amplification(order)
        excess = "" if times < NOTABLE else f"reads {times:.2f} x the bytes of its samples; "
        ways = ((name, "h5py" if name in self.why else "direct") for name in self.reader.fields)
        threads = "native threads" if available() else "threads"
        return f"{excess}{self.num_threads} {threads}; " + ", ".join(f"{name}: {way}" for name, way in ways)


def make_source(
    dataset: ChunkDataset,
    order: Epoch,
    *,
    way: str,
    device: torch.device,
    num_threads: int | None,
    timeout_s: float | None,
) -> DataSource:
    """Make the data source from the arguments of a loader; ``order`` refers to the samples of the file.

    Raise `FieldError` if a field has strings or a dtype that torch does not support, and `OptionError` if
    ``way`` is `DIRECT`, which is not possible.
    """
    h5reader, numbered = dataset.new_reader(), dataset.numbered_fields
    uses = _uses(dataset, h5reader.num_samples, order)
    kinds = {
        name: dense_kind(dataset.field(name)) if name in numbered else kind_of(h5reader, name, uses)
        for name in dataset.fields
    }
    if any(kind.is_encoded for kind in kinds.values()):
        device = torch.device("cpu")  # images are decoded from windows on the host
    fields, why = _field_readers(h5reader, way)
    if num_threads is None:
        thread_bytes = max((field.thread_bytes for field in fields.values()), default=0)
        num_threads = max(1, min(MAX_THREADS, available_cores(), DECODING_BYTES // max(1, thread_bytes)))
    subset = dataset.subset_samples
    skipping = None if dataset.skipping is None else replace(dataset.skipping, source=h5reader)
    return DataSource(h5reader, fields, why, numbered, kinds, device, num_threads, timeout_s, subset, skipping)


def _uses(dataset: ChunkDataset, num_samples: int, order: Epoch) -> Uses:
    if not isinstance(order, Order):
        return Uses(by_chunk=False)
    lanes = order.lanes // order.world_size
    if order.selection is None and not order.pad:
        return Uses(lanes=lanes)
    max_uses = 1 if order.selection is None else order.selection.max_draws
    counts = np.zeros(num_samples, np.int64)
    counts[slice(None) if dataset.subset_samples is None else dataset.subset_samples] = max_uses
    if order.pad:  # a short lane repeats its samples, maybe several times
        counts *= 1 + math.ceil(order.lane_batch / max(1, order.num_samples // order.lanes))
    return Uses(counts, lanes, order.by_chunk)


def _field_readers(source: Source, way: str) -> tuple[dict[str, FieldReader], dict[str, str]]:
    """Return the readers of fields, and the reason why a field is read through HDF5, by field name."""
    fields, why = field_readers(source, way)
    if why and way == DIRECT:
        name, reason = next(iter(why.items()))
        raise OptionError(f"field {name!r} cannot be read directly: {reason}. Unset {VARIABLE}")
    for name, reason in why.items() if way == AUTO else ():
        warnings.warn(printable(f"field {name!r} is read through h5py, in one thread: {reason}"), stacklevel=4)
    return fields, why


def find_data(data: Paths | ChunkDataset, transforms: Transforms | None) -> tuple[ChunkDataset, Transforms | None]:
    """Return the data set and the transforms of its batches.

    Raise OptionError if the loader would ignore transforms or an overridden method of the data set.
    """
    if not isinstance(data, ChunkDataset):
        if isinstance(data, Dataset):
            raise OptionError(
                f"data is a {type(data).__name__}: pass a ChunkDataset, whose subset() and split() select samples (for "
                f"fields in separate files, {MAPPING})"
            )
        return _without_strings(data, ChunkDataset(data)), transforms
    changed = [name for name in ("__getitem__", "__getitems__") if _differs(type(data), name)]
    if changed:
        raise OptionError(
            f"{type(data).__name__} overrides {changed[0]}, which a ChunkLoader does not call: pass transforms= instead"
        )
    own = transforms_by_field(data.transforms, {name: data.field(name) for name in data.fields})
    if not any(own.values()):
        return data, transforms
    if transforms is not None or not all(isinstance(item, OWN_TRANSFORMS) for part in own.values() for item in part):
        raise OptionError(
            "a ChunkLoader cannot apply the data set's transforms, because they are for single samples, or the loader "
            "has transforms too: pass them to the loader as transforms=, and remove them with "
            "dataset.with_transforms(None)"
        )
    return data, data.transforms


def _without_strings(path: Paths, dataset: ChunkDataset) -> ChunkDataset:
    """Leave out the default fields that contain strings, with a warning."""
    numbers = [name for name in dataset.fields if dataset.field(name).dtype.kind != "S"]
    if not numbers or len(numbers) == len(dataset.fields):
        return dataset
    strings = ", ".join(repr(name) for name in dataset.fields if name not in numbers)
    warnings.warn(
        f"{printable(dataset.path)}: batches leave out {strings}, because tensors cannot hold strings", stacklevel=4
    )
    return ChunkDataset(path, fields=numbers)


def _differs(kind: type[ChunkDataset], name: str) -> bool:
    return getattr(kind, name) is not getattr(ChunkDataset, name)


class MemoryBudget:
    """Plans the windows that fit in a loader's memory limit, for host and device together."""

    def __init__(
        self, source: DataSource, converters: Sequence[Converter], memory_bytes: int | None, *, reuse: bool
    ) -> None:
        self._source, self._memory_bytes, self._reuse = source, memory_bytes, reuse
        self._converters = converters
        self._on_cpu = source.device.type == "cpu"
        self._converted_bytes = sum(converter.sample_bytes for converter in converters if not converter.changes_nothing)
        gathered = (source.reader.fields[name] for name, kind in source.kinds.items() if kind.is_gathered)
        self._converted_bytes += sum(field.grid.sample_bytes for field in gathered)

    def of_source(self, source: DataSource) -> MemoryBudget:
        """Return the budget of another source of the same fields."""
        return MemoryBudget(source, self._converters, self._memory_bytes, reuse=self._reuse)

    def plan_given(self, order: GivenOrder, batch_samples: int) -> SlotPlan:
        """Plan windows of the user's batches, of ``batch_samples`` each.

        Windows are small, so that batches are not drawn long before their use, unless a batch reads much more than its
        samples.
        """
        times = self._source.read_amplification(replace(order, window_samples=batch_samples))
        num_bytes = GROUP_BYTES if times < NOTABLE else WHOLE_CHUNKS_BYTES
        if not self._has_fixed_slots:  # memory for the samples of each window
            batch_bytes = batch_samples * sum(kind.sample_bytes for kind in self._source.kinds.values())
        else:
            batch_bytes = self._window_bytes(batch_samples)
        together = min(num_bytes // max(1, batch_bytes), order.num_samples // (SHARES * batch_samples))
        size = max(1, together) * batch_samples
        endless = Order(ENDLESS * size, 1, batch_samples, window_chunks=size, interleave=1)
        plan = self._plan_slots(endless, min_chunks=batch_samples)
        return replace(plan, order=replace(order, batch_size=batch_samples, window_samples=plan.window_samples))

    def plan_larger(self, order: GivenOrder, batch_samples: int) -> SlotPlan:
        """Plan windows for a batch that is larger than planned, with some room for others, if the memory suffices."""
        try:
            return self.plan_given(order, batch_samples + batch_samples // 4)
        except OptionError:
            return self.plan_given(order, batch_samples)

    @property
    def _has_fixed_slots(self) -> bool:
        return not self._on_cpu or self._reuse or self._source.has_frames

    def plan(self, resident: bool, order: Order | GivenOrder, *, min_chunks: int | None) -> SlotPlan | None:
        """Plan the number and size of windows. Return None if all data is kept on the device instead.

        Raise `OptionError` if resident data was requested but does not fit.
        """
        if self._fits_device(resident, order):
            return None
        if isinstance(order, GivenOrder):
            return self.plan_given(order, order.batch_size)
        plan = self._plan_slots(order, min_chunks=min_chunks)
        if self._on_cpu:
            return with_windows_together(plan, TOGETHER_BYTES, 0 if self._reuse else KEPT)
        return with_windows_together(plan, 2 * TOGETHER_BYTES)

    def _plan_slots(self, order: Order, *, min_chunks: int | None) -> SlotPlan:
        return plan_slots(
            order,
            self._window_bytes,
            self._beside_windows,
            memory_bytes=self._memory_bytes,
            min_chunks=min_chunks,
            ahead_bytes=self._ahead_bytes,
            round_bytes=ROUND_BYTES if self._on_cpu else GPU_ROUND_BYTES,
        )

    @property
    def _ahead_bytes(self) -> int:
        """The number of bytes of remote objects to read ahead, which is at most half of the limit on their cache."""
        mirrors = [mirror for mirror in self._source.reader.mirrors if mirror is not None]
        limits = [mirror.cache_bytes // 2 for mirror in mirrors if mirror.cache_bytes is not None]
        return min([REMOTE_AHEAD_BYTES, *limits]) if mirrors else 0

    def _window_bytes(self, num_samples: int) -> int:
        """Return the size of a window in bytes. For a GPU, this counts the host and the device buffer."""
        return (1 if self._on_cpu else 2) * slot_bytes(self._source.kinds, num_samples)

    def _beside_windows(self, order: Order) -> int:
        """Return the bytes that streaming in this order needs in addition to the windows."""
        total = self._reading_bytes()
        total += sum(converter.decoding_bytes(order.batch_size) for converter in self._converters)
        if self._on_cpu and not self._reuse and not self._source.has_frames:  # released windows that wait for reuse
            total += KEPT * self._window_bytes(largest_window(order))
        if self._source.skipping is not None:  # a window is read again, in parts, to find its bad samples
            total += self._window_bytes(largest_window(order))
        if self._on_cpu:
            total += (KEPT + 1) * order.batch_size * self._converted_bytes
        return total

    def _reading_bytes(self) -> int:
        source = self._source
        total = sum(field.num_bytes for field in source.fields.values() if is_small_field(field))
        total += scratch_bytes(source.fields.values(), source.num_threads)
        copies = 2 if len(source.reader.readers) > 1 else 1  # also the cache of each file
        total += source.reader.indptr_bytes * copies
        if source.reader.checksums != OFF:
            total += source.num_threads * PIECE_BYTES
        return total

    def _fits_device(self, resident: bool, order: Order | GivenOrder) -> bool:
        """Return whether to keep all data on the device. Raise OptionError if it does not fit."""
        if not resident or not order.num_samples:
            return False
        held, pieces = self._resident_bytes, self._source.pieces
        loading = 0 if self._on_cpu else LOADING_SLOTS * 2 * slot_bytes(pieces, self.loading_samples(order))
        needed = held + loading + self._reading_bytes()
        limit = math.inf if self._memory_bytes is None else self._memory_bytes
        if not self._on_cpu:
            limit = min(limit, free_bytes(self._source.device))
        if needed > limit:
            what, remedy = "the GPU's free memory is", "leave"
            if limit == self._memory_bytes:
                what, remedy = "memory_bytes is", "raise it, or leave"
            raise OptionError(
                f"resident=True needs {needed} bytes, {held} of them for the data, but {what} {limit}: {remedy} "
                "resident out"
            )
        return True

    @property
    def _resident_bytes(self) -> int:
        return slot_bytes(self._source.pieces, self._source.num_samples)

    def loading_samples(self, order: Order | GivenOrder) -> int:
        """Return how many samples are read at a time when resident data is loaded."""
        sample_bytes = sum(kind.sample_bytes for kind in self._source.kinds.values())
        return max(1, min(LOADING_BYTES // max(1, sample_bytes), order.num_samples // LOADING_SLOTS))

    def describe(self, order: Epoch, plan: SlotPlan | None) -> str:
        """Describe the use of memory for the repr of a loader. Without a plan, all data is on the device."""
        if plan is None:
            return f"all {self._source.num_samples} samples resident ({human_bytes(self._resident_bytes)})"
        windows = count_text(plan.num_slots * plan.together, "window")
        num_batches = -(-plan.window_samples // (plan.together * order.batch_size))
        return f"{windows} of {count_text(num_batches, 'batch')} ({human_bytes(plan.num_bytes)})"


def find_device(device: str | torch.device) -> torch.device:
    """Parse the ``device`` argument. Raise OptionError unless it is the CPU or an existing GPU."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device is {device!r} ({str(error).splitlines()[0]}): pass 'cpu' or 'cuda'") from None
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"device is {device!r}: pass 'cpu' or 'cuda'")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise OptionError(f"device is {device!r}, but torch finds no CUDA device: pass 'cpu'")
    if (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device is {device!r}, but torch finds only {torch.cuda.device_count()} GPUs: pass a smaller index"
        )
    # the current device may change before the loader is iterated, and differs between threads
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, in bytes."""
    return int(torch.cuda.mem_get_info(device)[0])


def check_arguments(resident: bool, num_threads: int | None, memory_bytes: int | None, timeout: float) -> None:
    """Raise OptionError for loader arguments that are invalid for any file."""
    check_flag("resident", resident)
    for name, number, minimum in (("num_threads", num_threads, 1), ("memory_bytes", memory_bytes, 0)):
        if number is not None:
            check_whole(name, number, minimum)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise OptionError(f"timeout is {timeout!r}: pass a number of seconds, or 0 to wait forever")
