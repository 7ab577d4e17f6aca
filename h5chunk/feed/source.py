"""The source of a loader: the fields of a data set, their readers, and the device to which they go."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import Dataset

from h5chunk.errors import OptionError, printable
from h5chunk.feed.columns import Kinds, Uses, dense_kind, kind_of
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.skipping import Skipping
from h5chunk.machine import available_cores
from h5chunk.native import available
from h5chunk.plan.order import Epoch, Order
from h5chunk.store.read.field_readers import (
    AUTO,
    DIRECT,
    NOTABLE,
    VARIABLE,
    field_readers,
    is_small_field,
    read_amplification,
)
from h5chunk.store.read.files import MAPPING, Paths
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source
from h5chunk.transforms.compile import OWN_TRANSFORMS, Transforms, transforms_by_field

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
