"""Batches in the user's order: any iterable of lists of sample numbers, such as torch's BatchSampler.

Batches are drawn in the thread that iterates the loader, because they may depend on what this thread does, such as on
the losses of earlier batches, or on torch's random generator. They are drawn before they are used, so that they can be
read ahead. When a position is saved, the sampler is therefore ahead of training. For this reason, the saved state has
the sampler as it is then, with all that training has changed in it, and the batches that were drawn and are not used
yet, in their windows. A resumed run thus draws each batch when the whole run does. A sampler without a state draws the
batches that were used again, and a checksum tells whether they are the same.

A window has the samples of several consecutive batches, which are read in the order of the file. A chunk with samples
of several of these batches is thus read once. The batches of two epochs are never in one window, and an epoch's batches
are drawn only after those of the last epoch were used.
"""

from __future__ import annotations

import base64
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler

from h5chunk.errors import OptionError, StateError, check_whole
from h5chunk.feed.collate import check_numbering, sample_numbers
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sampler import Position
from h5chunk.feed.state import OWN
from h5chunk.plan.draws import MOST_REPEATS, REPEAT, epoch_rows
from h5chunk.plan.order import MAX_EPOCH, Window
from h5chunk.plan.permutation import MAX_SEED, Indices
from h5chunk.plan.selection import FixedSelection

LISTS = "lists of sample numbers, as torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False) does"
USUAL_BATCH = 256  # number of samples, until the first batch is drawn
END = object()  # of an iteration
STATE = "state_dict and load_state_dict, with its position and the state of its random generator"


class GivenBatches:
    """The user's batches of a data set, and what is needed to resume them."""

    def __init__(self, batches: Iterable[Sequence[int]], dataset: ChunkDataset) -> None:
        if not isinstance(batches, Iterable):
            raise OptionError(
                f"batch_sampler is a {type(batches).__name__}: pass a ChunkSampler, or an iterable that yields {LISTS}"
            )
        self._batches, self._dataset = batches, dataset
        self._told: int | None = None  # the last epoch that was passed on
        self._loaded: tuple[int, int, Mapping[str, Any]] | None = None  # an epoch, a batch, and their state
        self._drawing: Drawing | None = None  # the last iteration
        self._is_spent = False
        self.usual: int | None = None  # the size of the batch for which windows were planned
        self.position = Position()

    @property
    def name(self) -> str:
        """The class of the user's object, for messages."""
        return type(self._batches).__name__

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a batch, if the sampler tells it."""
        size = getattr(self._batches, "batch_size", None)
        return int(size) if isinstance(size, (int, np.integer)) and size >= 1 else None

    def order(self, seed: int) -> GivenOrder:
        """Return the first epoch. ``seed`` is that of random transforms."""
        rows, num_samples = self._dataset.subset_samples, len(self._dataset)
        selection = None if rows is None else FixedSelection(np.array([0, num_samples]), rows)
        options: dict[str, Any] = {"epoch_samples": self._dataset.epoch_samples, "selection": selection}
        return GivenOrder(self, num_samples, self.batch_size or USUAL_BATCH, seed, **options)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    @property
    def _set_epoch(self) -> Callable[[int], Any] | None:
        """The ``set_epoch`` of the sampler, or of the sampler in a BatchSampler."""
        owners = self._batches, getattr(self._batches, "sampler", None)
        return next(filter(callable, (getattr(each, "set_epoch", None) for each in owners)), None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the next epoch on to the sampler, if that has a ``set_epoch``."""
        self._drawing = None
        if self._loaded is not None and self._loaded[0] != epoch:
            self._loaded = None
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        if self._set_epoch is not None:
            self._set_epoch(epoch)
            self._told = epoch

    def begin(self, order: GivenOrder, start: int) -> Drawing:
        """Begin to draw the batches of an epoch, from batch ``start`` on."""
        if self._is_spent:
            raise OptionError(
                f"batch_sampler is an iterator ({self.name}), which yields its batches only once: pass an object whose "
                "__iter__ begins anew, or create a loader for each epoch"
            )
        state = {} if self._loaded is None or self._loaded[:2] != (order.epoch, start) else self._loaded[2]
        self._drawing = Drawing(self._batches, self._dataset, order, start, state)
        self._is_spent = self._drawing.is_from_iterator
        return self._drawing

    def has_begun(self) -> None:
        """Forget the loaded state, because the epoch was begun with it and can be read."""
        self._loaded = None

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return what the state of a loader needs for the user's batches. Raise OptionError if they lack it."""
        if self._loaded is not None and self._loaded[:2] == (epoch, batch):
            return dict(self._loaded[2])
        state = {} if self._drawing is None else self._drawing.state(epoch, batch)
        if not state and batch == 0 and (owner := _with_state(self._batches)) is not None:
            state = {"sampler": deepcopy(owner.state_dict())}
        if "sampler" not in state and not isinstance(self._batches, Sequence):  # which is the same in each epoch
            self._check_repeats(epoch, batch)
        others = {"told": self._told, "usual": self.usual}
        return state | {name: value for name, value in others.items() if value is not None}

    def _check_repeats(self, epoch: int, batch: int) -> None:
        """Raise OptionError unless the batches of an epoch can be drawn again."""
        what = f"the position of batch_sampler ({self.name}) cannot be saved"
        if self._set_epoch is None:
            raise OptionError(
                f"{what}, because it has neither a state nor epochs: give it {STATE}; or a set_epoch that determines "
                "its batches, so that they can be drawn again"
            )
        if batch and self._told != epoch:
            raise OptionError(
                f"{what} within epoch {epoch}, because it was not told this number: call the loader's set_epoch before "
                f"each epoch, or give the sampler {STATE}"
            )

    def load(self, state: Mapping[str, Any], epoch: int, batch: int) -> None:
        """Resume at a batch of an epoch, with what `state` returned then."""
        self._drawing = None
        self._loaded = epoch, batch, {name: state[name] for name in OWN if name in state}
        if "told" in state:
            self._tell(check_whole("told", state["told"], 0, MAX_EPOCH))
        self.usual = check_whole("usual", state["usual"], 1) if "usual" in state else None


class _Drawn(NamedTuple):
    """A batch: the indices of its samples in the data set, and their keys (`h5chunk.plan.draws`), (n,) int64 each."""

    indices: Indices
    keys: Indices


class Drawing:
    """The batches of one epoch, which are drawn from the user's iterable.

    Those that were drawn wait until they are taken for a window. ``ends`` has the numbers of the batches after which
    windows end, also those that a saved state has.
    """

    def __init__(
        self, batches: Iterable[Sequence[int]], dataset: ChunkDataset, order: GivenOrder, start: int, state: Mapping
    ) -> None:
        self._batches, self._dataset, self._epoch = batches, dataset, order.epoch
        self._rows, self._added = dataset.subset_samples, order.added
        self._uses = np.zeros(len(dataset), np.int32)  # how often the epoch has drawn each sample
        self._waiting: deque[_Drawn] = deque()
        self._indices: dict[int, Indices] = {}  # of each batch that was drawn and is not used yet
        self._sums = {start: 0}  # checksums of the batches that were drawn before each of these batches
        self.ends: set[int] = set()
        self._error: Exception | None = None
        self._num_drawn = start
        ahead = _Ahead.of(state.get("ahead"))
        self._has_ended = ahead.has_ended
        self._restart(state)
        self.is_from_iterator = self._iterator is batches
        # some samplers are still at the end of the last epoch
        self._may_be_over = not start and self._owner is not None
        if "sampler" not in state:
            self._skip(start, state.get("drawn"))
            return
        if self._owner is None:
            raise StateError(
                f"state has the position of batch_sampler, but {type(batches).__name__} has no load_state_dict: pass "
                "a sampler of the same kind"
            )
        self._uses = _decoded("uses", state.get("uses"), np.int32, len(dataset))
        for batch in ahead.batches:
            self._add(self._checked(batch))
        self.ends = {start + end for end in ahead.ends}

    def _restart(self, state: Mapping[str, Any]) -> None:
        """Iterate over the user's batches anew, from a saved state if there is one."""
        owner: Any = _with_state(self._batches)
        if owner is not None and "sampler" in state:
            owner.load_state_dict(deepcopy(state["sampler"]))
        self._iterator: Any = iter(()) if owner is not None and self._has_ended else iter(self._batches)
        if owner is None and _has_state(self._iterator):  # as those of torchdata
            owner = self._iterator
            if "sampler" in state:
                owner.load_state_dict(deepcopy(state["sampler"]))
        self._owner = owner
        # what a sampler tells now, and what its state is: some tell their state only after their next batch
        told = None if owner is None else deepcopy(owner.state_dict())
        self._undrawn: tuple[Any, Any] | None = told, state.get("sampler", told)

    def _skip(self, num_batches: int, checksum: int | None) -> None:
        """Draw the batches that were used again. Raise StateError if they are not those of a saved checksum."""
        self._num_drawn, self._sums = 0, {0: 0}
        if not all(self.has(number) for number in range(num_batches)):
            raise StateError(
                f"state is at batch {num_batches}, but batch_sampler has only {self._num_drawn} batches in epoch "
                f"{self._epoch}: pass the same sampler, with the same arguments"
            )
        if checksum not in (None, self._sums[num_batches]):
            raise StateError(
                f"state is at batch {num_batches} of epoch {self._epoch}, but batch_sampler now draws other batches "
                "before it: pass the same sampler, with the same arguments, such as batch_size and seed"
            )
        self._waiting.clear()
        self._forget(num_batches)

    def has(self, number: int) -> bool:
        """Return whether the epoch has batch ``number``. Raise the error of the user's iterable if it is due."""
        while self._num_drawn <= number and self._draw():
            pass
        if number >= self._num_drawn and self._error is not None:
            raise self._error
        return number < self._num_drawn

    def _draw(self) -> bool:
        """Draw a batch. Return False at the end, or after an error, which is raised once its batch is due."""
        if self._has_ended or self._error is not None:
            return False
        try:
            batch = next(self._iterator, END)
            if batch is END and self._may_be_over:
                self._restart({})
                batch = next(self._iterator, END)
            self._may_be_over = False
            if batch is not END:
                self._add(self._checked(batch))
        except Exception as error:
            self._error = error
            return False
        self._has_ended = batch is END
        if not self._has_ended:
            self._undrawn = None
            if self._owner is self._iterator:  # some iterators do not tell their state at the end
                state = deepcopy(self._owner.state_dict())
                self._undrawn = state, state
        return not self._has_ended

    def _checked(self, batch: Any) -> Indices:
        what = f"batch {self._num_drawn} of batch_sampler"
        if (numbering := getattr(batch, "numbering", None)) is not None:  # of a ChunkSampler in the user's iterable
            check_numbering(numbering, self._dataset.numbering)
        indices = None
        with suppress(IndexError):
            indices = sample_numbers(batch)
        if indices is None or indices.ndim != 1:
            raise OptionError(f"{what} is {batch!r:.80}: yield {LISTS}")
        if not len(indices):
            raise OptionError(f"{what} is empty: yield at least one sample in each batch")
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= len(self._dataset):
            raise OptionError(
                f"{what} has sample {least if least < 0 else most}, but the data set has {len(self._dataset)} samples: "
                f"yield numbers from 0 to {len(self._dataset) - 1}, which are positions in the data set or subset"
            )
        return indices

    def _add(self, indices: Indices) -> None:
        rows = indices if self._rows is None else self._rows[indices]
        turns = np.argsort(indices, kind="stable")
        ordered = indices[turns]
        repeats = np.empty_like(indices)  # how often the epoch has used the sample of each place before
        repeats[turns] = self._uses[ordered] + np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        self._uses[indices] = repeats + 1  # NumPy keeps the last value of a repeated index, which is the largest
        self._waiting.append(_Drawn(indices, rows + self._added + REPEAT * (repeats % MOST_REPEATS)))
        self._indices[self._num_drawn] = indices
        numbered = np.concatenate(([len(indices)], indices)).astype(np.int64)
        self._sums[self._num_drawn + 1] = zlib.crc32(numbered.tobytes(), self._sums[self._num_drawn])
        self._num_drawn += 1

    @property
    def next_size(self) -> int | None:
        """The number of samples in the next batch that was not taken, or None after the last one."""
        if not self._waiting:
            self._draw()
        return len(self._waiting[0].keys) if self._waiting else None

    def take(self) -> Indices:
        """Return the keys of the next batch, which `has` has drawn."""
        return self._waiting.popleft().keys

    def take_at_most(self, num_samples: int) -> Indices | None:
        """Return the keys of the next batch if there is one with at most that many samples."""
        if not self._waiting and num_samples > 0:
            self._draw()
        return self.take() if self._waiting and len(self._waiting[0].keys) <= num_samples else None

    def numbers(self, start: int) -> Iterator[int]:
        """Yield the numbers of the batches, from ``start`` on, while the caller uses them."""
        for number in count(start):
            self._forget(number)
            if not self.has(number):
                return
            yield number

    def _forget(self, number: int) -> None:
        """Forget the batches before batch ``number``, which were used."""
        for kept in (self._sums, self._indices):
            for old in [each for each in kept if each < number]:
                del kept[old]
        self.ends = {end for end in self.ends if end > number}

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return what is needed to resume after ``batch`` batches, or nothing if they are not those used last."""
        is_iterator = self._owner is self._iterator
        if (epoch, batch) == (self._epoch + 1, 0) and self._has_ended and is_iterator:
            return {"sampler": self._state_of_sampler}
        if epoch != self._epoch or batch not in self._sums:
            return {}
        if self._owner is None:
            return {"drawn": self._sums[batch]}
        ahead = [indices for number, indices in self._indices.items() if number >= batch]
        uses = self._uses.copy()
        for indices in ahead:
            np.subtract.at(uses, indices, 1)
        ends = sorted(end - batch for end in self.ends if end > batch)
        left = _Ahead(ahead, ends, self._has_ended and not is_iterator)  # an iterator is asked for its end again
        return {"sampler": self._state_of_sampler, "uses": _encoded(uses), "ahead": left.state}

    @property
    def _state_of_sampler(self) -> Any:
        """The sampler as it is now. Training may have changed it, also since it has drawn the last batch."""
        if self._undrawn is not None and self._owner is self._iterator:
            return self._undrawn[1]
        told = deepcopy(self._owner.state_dict())
        if self._undrawn is not None and _is_same(told, self._undrawn[0]):
            return self._undrawn[1]
        return told


class _Ahead(NamedTuple):
    """The batches that were drawn and are not used yet.

    ``ends`` has the numbers of these batches after which windows end; the last window may not be complete.
    """

    batches: list[Indices]
    ends: list[int]
    has_ended: bool  # whether the epoch has no batches after these

    @property
    def state(self) -> dict[str, Any]:
        samples = np.concatenate([np.empty(0, np.int64), *self.batches])
        sizes = [len(batch) for batch in self.batches]
        return {"samples": _encoded(samples), "sizes": sizes, "ends": self.ends, "has_ended": self.has_ended}

    @classmethod
    def of(cls, state: Any) -> _Ahead:
        if state is None:
            return cls([], [], False)
        with suppress(TypeError, KeyError, ValueError, OverflowError):
            sizes, ends = np.array(state["sizes"], np.int64), [operator.index(end) for end in state["ends"]]
            if sizes.ndim == 1 and (sizes > 0).all():
                samples = _decoded("ahead", state["samples"], np.int64, int(sizes.sum()))
                return cls(np.split(samples, np.cumsum(sizes))[:-1], ends, bool(state["has_ended"]))
        raise StateError(f"state has ahead={state!r:.40}, which is damaged: pass the result of state_dict()")


@dataclass(frozen=True, eq=False)
class GivenOrder:
    """An epoch of the user's batches, which are drawn once it has begun: see `h5chunk.plan.order.Epoch`."""

    given: GivenBatches
    num_samples: int  # number of samples of the data set
    batch_size: int  # of the usual batch
    seed: int = 0  # for random transforms
    epoch: int = 0
    epoch_samples: int = 0  # see `h5chunk.plan.draws.epoch_rows`
    selection: FixedSelection | None = None  # the samples of a subset
    window_samples: int = 1  # batches are read together up to this size
    replan: Callable[[int], Any] | None = None
    drawing: Drawing | None = None

    is_pure: ClassVar[bool] = False
    has_equal_batches: ClassVar[bool] = False
    without_echo: ClassVar[str] = "batches of your own order"
    num_batches: ClassVar[None] = None  # only the end of the epoch tells
    shuffle: ClassVar[bool] = True
    drop_last: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch", check_whole("epoch", self.epoch, 0, MAX_EPOCH))
        object.__setattr__(self, "seed", check_whole("seed", self.seed, 0, MAX_SEED))

    @property
    def batch_text(self) -> str:
        """The batches, for messages."""
        return f"a {self.given.name}"

    @property
    def settings(self) -> dict[str, int]:
        """See `h5chunk.plan.order.Epoch.settings`."""
        kind = zlib.crc32(self.given.name.encode())
        return {"num_samples": self.num_samples, "seed": self.seed, "batch_sampler": kind}

    @property
    def added(self) -> int:
        """The number that is added to all sample numbers if samples are drawn anew in each epoch."""
        return epoch_rows(self.epoch, self.epoch_samples) if self.epoch_samples else 0

    def begun(self, start: int) -> GivenOrder:
        """Return the epoch whose batches are drawn from batch ``start`` on."""
        return replace(self, drawing=self.given.begin(self, start))

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the batches. A batch counts as used when the next number is asked for."""
        assert self.drawing is not None
        return self.drawing.numbers(start)

    def rows_together(self) -> Indices:
        """Return the samples of a window if they are spread over the data set, as those of random batches are."""
        count = min(self.window_samples, self.num_samples)
        rows = np.linspace(0, self.num_samples - 1, count).astype(np.int64)
        return rows if self._rows is None else self._rows[rows]

    @property
    def _rows(self) -> Indices | None:
        return None if self.selection is None else self.selection.samples

    def numbers_of(self, keys: Indices) -> Indices:
        """Convert keys to the indices of the samples."""
        return keys % REPEAT

    def groups_of(self, _numbers: Indices) -> None:
        """Return None, as the groups of the user's batches are not known."""

    def keys(self, start: int = 0) -> Iterator[Indices]:
        """Yield the keys of the samples of each batch."""
        assert self.drawing is not None
        return (self.drawing.take() for _ in self.drawing.numbers(start))

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield windows of consecutive batches, as many as fit in ``window_samples``, and at least one."""
        drawing, first = self.drawing, start
        assert drawing is not None
        while drawing.has(first):
            batches = [drawing.take()]
            left = self.window_samples - len(batches[0])
            while first + len(batches) not in drawing.ends and (batch := drawing.take_at_most(left)) is not None:
                batches.append(batch)
                left -= len(batch)
            drawing.ends.add(first + len(batches))
            keys = np.concatenate(batches)
            sizes = [len(batch) for batch in batches]
            numbers = range(first, first + len(batches))
            are_usual = set(sizes[:-1]) <= {self.batch_size} and sizes[-1] <= self.batch_size
            yield Window.of(keys, numbers, None if are_usual else sizes)
            first += len(batches)


def _has_state(owner: object) -> bool:
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def _with_state(batches: object) -> Any:
    """Return the object with the position of the user's batches, or None. torch's BatchSampler reads nothing ahead."""
    inner = batches.sampler if type(batches) is BatchSampler else None
    return next(filter(_has_state, (batches, inner)), None)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two states of a sampler are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    with suppress(TypeError, ValueError, RuntimeError):
        return bool(np.array_equal(one, other))
    return False


def _encoded(numbers: np.ndarray) -> str:
    """Return an array as text, for a state."""
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def _decoded(name: str, text: object, dtype: type, count: int) -> np.ndarray:
    """Return the array that a state has as text: (count,), zeros if it has none."""
    if text is None:
        return np.zeros(count, dtype)
    with suppress(TypeError, ValueError, zlib.error):
        size = np.dtype(dtype).itemsize * count
        found = zlib.decompressobj().decompress(base64.b64decode(str(text), validate=True), size + 1)
        if len(found) == size:
            return np.frombuffer(found, dtype).copy()
    raise StateError(f"state has {name}={text!r:.40}, which is damaged: pass the result of state_dict()")
