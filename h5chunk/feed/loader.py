"""ChunkLoader: yield shuffled batches on the target device, as fast as the machine can move bytes."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate, signature
from typing import Any, NoReturn

import torch
from torch.utils.data import SequentialSampler, get_worker_info

from h5chunk.attributes import cached_property
from h5chunk.errors import H5ChunkError, OptionError, check_flag, check_whole, printable
from h5chunk.feed.batches import BatchMaker, EpochReport, FieldPipeline
from h5chunk.feed.budget import MemoryBudget
from h5chunk.feed.collate import collate
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.given import GivenBatches, GivenOrder
from h5chunk.feed.memory import BatchMemory, SingleBuffer
from h5chunk.feed.read_pool import TIMEOUT_S
from h5chunk.feed.resident import Resident
from h5chunk.feed.sampler import ChunkSampler, Resumable, State
from h5chunk.feed.source import find_data, find_device, make_source
from h5chunk.feed.stored_tables import name_of_sample
from h5chunk.feed.stream import WindowStream
from h5chunk.plan.lengths import LengthOrder
from h5chunk.plan.order import Order
from h5chunk.plan.slots import check_echo, num_echoed
from h5chunk.store.read.field_readers import chosen_way
from h5chunk.store.read.files import Paths
from h5chunk.transforms.compile import Transforms, transforms_by_field
from h5chunk.transforms.mixing import Mixer, split_mixing
from h5chunk.transforms.normalize import ToDtype
from h5chunk.transforms.pairs import Items, num_tensors
from h5chunk.transforms.ragged import Pack, packs

# arguments of a DataLoader that a ChunkLoader does not have
OF_DATA_LOADER = {
    "num_workers": "it reads in threads, whose number is num_threads",
    "prefetch_factor": "it reads ahead by itself, as far as memory_bytes allows",
    "persistent_workers": "its threads stay until close()",
    "worker_init_fn": "it reads in threads, without worker processes",
    "multiprocessing_context": "it reads in threads, without worker processes",
    "pin_memory": "with device='cuda', it reads into pinned memory by itself",
    "sampler": "pass batch_sampler=BatchSampler(sampler, batch_size, drop_last)",
    "collate_fn": "pass transforms, which are called with the batch of a field, or change the batch in your loop",
    "generator": "pass seed",
    "transform": "pass transforms",
}
# arguments of a ChunkSampler that a ChunkLoader does not have
OF_SAMPLER = {*signature(ChunkSampler).parameters} - {"dataset", "batch_size"}
CLOSED = "this loader was closed while it was iterated: end the iteration before you close it"
TWO_THREADS = "another thread is waiting for a batch of this loader: create a separate loader for each thread"


class _OneThread(Iterator[Any]):
    """An iterator over a generator that raises OptionError if two threads iterate at the same time."""

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except ValueError:
            if getgeneratorstate(self._batches) == GEN_RUNNING:
                raise OptionError(TWO_THREADS) from None
            raise

    def close(self) -> None:
        self._batches.close()


class ChunkLoader(Resumable):
    """Shuffled batches of a file, read ahead by threads, on the target device.

    ::

        for images, labels in h5chunk.ChunkLoader("photos.h5", 256, device="cuda"):
            ...

    Each iteration is an epoch, and the first windows of the next epoch are read while this one ends. You may leave an
    epoch early: threads and memory are kept until `close`. Use the loader in only one thread. The order is that of a
    `ChunkSampler` with the same arguments and ``num_workers=0``, unless ``memory_bytes`` makes windows smaller.

    A batch is a tuple with an item for each field, or a dict (``as_dict``): a tensor or, for samples that differ in
    length, values with lengths or offsets (`h5chunk.transforms.Pad`, `Pack`, `Nested`). Strings raise FieldError: for
    these, use a DataLoader. To learn which samples a batch contains, add the field ``sample_number``::

        dataset = h5chunk.ChunkDataset("photos.h5", fields=["images", "labels", "sample_number"])
        for images, labels, numbers in h5chunk.ChunkLoader(dataset, 256):
            names = dataset.source_names[numbers]

    Images of any size (``convert --keep-encoded`` or ``--keep-size``) need a transform that gives them one size, such
    as ``RandomResizedCrop``. Threads decode them a few batches ahead. For a GPU with fewer than 8 ``num_threads``,
    nvJPEG decodes them if torchvision is installed, with slightly different pixels: see ``print(loader)``.

    On a GPU, use the batches of an epoch on one stream. A batch that is kept may keep memory around it: on the CPU, up
    to its entire window; on a GPU, up to 64 MiB of batches, or 256 MiB if the data is resident or rows of a matrix are
    made dense. Use ``clone()`` to keep only the batch.

    Parameters
    ----------
    data : path, sequence of paths, or ChunkDataset
        One or several files, as for `ChunkDataset`; or a data set, which chooses fields and a subset. Its transforms
        are used if all are objects of `h5chunk.transforms`; any other transform raises OptionError.
    batch_size : int, optional
        Required unless ``batch_elements`` or ``batch_sampler`` is given.
    batch_elements : int, optional
        For samples that differ in length: the maximum number of elements in a batch, as for `ChunkSampler`; with
        `h5chunk.transforms.Pack`, elements are not padded.
    batch_sampler : ChunkSampler or iterable of lists of int, optional
        The order of the samples of ``data``. A ChunkSampler has settings that the next three arguments do not cover:
        window size, ranks, weights, groups, padding. The loader starts at the position of the sampler: at its epoch
        and, if a state was loaded, at its batch. Its windows then follow one another, also if you iterate the sampler:
        they alternate only for the workers of a DataLoader. Any other iterable yields the sample numbers of each batch:
        see "Your own order".
    shuffle : bool
        False: keep the order of the file.
    seed : int
        Seed of the order, and of random transforms. With your own order, of the latter only.
    drop_last : bool
        Leave out the last batch if it is not full. If this is the only one, OptionError is raised.
    transforms : callable, list of callables, or dict of these, optional
        Transforms of the first field, or of several fields by name: objects of `h5chunk.transforms`, such as
        ``Normalize(mean, std)``, or functions of a batch. Default: images as they are stored, and rows of a matrix as
        dense float32.
    as_dict : bool, optional
        Whether batches are dicts by field: see `ChunkDataset`. Default: as the data set says, which is False for a
        path.
    device : str or torch.device
        ``"cpu"`` or a CUDA device.
    memory_bytes : int, optional
        Upper limit on host (for a GPU, pinned) plus device memory, in bytes: the windows, or the resident data; chunk
        caches; memory for decoding. Batches that were returned do not count. Unless ``batch_sampler`` was given
        ``window_chunks``, windows are made smaller than the file recommends if necessary.
    num_threads : int, optional
        Number of reader threads, and maximum number of threads that decode or augment. Default: one per core, but at
        most 12 that read, and fewer if decoding compressed chunks, three per thread, would need more than 1 GiB. To
        augment, processes that torchrun starts on one host share its cores.
    resident : bool
        Read all samples of the data set, or of the subset, once, and keep them on the device (a sparse matrix stays
        sparse). The order is the same. Raises OptionError if they do not fit in ``memory_bytes``, or in the free memory
        of the GPU. Leave enough for the model, which usually takes its memory later.
    reuse : bool
        On the CPU, return batches that are valid only until the next batch, always in the same memory. Dense
        batches of sparse rows may only be changed by operations of torch, not through NumPy, DLPack or ``.data``: torch
        does not count these changes, and unless it counts any, only what was set in the last batch is cleared.
    echo : float
        Data-echoing factor: the number of times that each sample is used. Once a window has been used, its samples are
        shuffled again and cut into other batches; 1.5 does so for every second batch. Use it if training is faster than
        reading. Windows then hold at least two batches, unless ``batch_sampler`` was given ``window_chunks``. `report`
        counts fresh and echoed samples separately. An echoing loader has no state to save.
    timeout : float
        Raise `WorkerError` if no read completes for this many seconds; 0: wait forever.

    Your own order
    --------------
    ``batch_sampler`` may be torch's ``BatchSampler`` around any sampler, or an object of your own whose ``__iter__``
    yields lists of sample numbers (positions in ``data``). Batches may differ in size, and samples may be repeated;
    random transforms then differ each time. For example, easy samples first (``difficulty`` has a number for each)::

        class Curriculum:
            epoch = 0

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                easiest = np.argsort(difficulty)[: 10_000 * (self.epoch + 1)]
                return iter(np.random.default_rng(self.epoch).permutation(easiest)[: 256 * 39].reshape(39, 256))

    Hard examples: ``BatchSampler(WeightedRandomSampler(losses, len(losses)), 256, False)``. The images notebook has
    these, and batches of P classes with K samples each.

    - Batches are drawn in the thread that iterates the loader, up to `read_ahead_samples` samples before their use, and
      never before the epoch begins. What a sampler learns from training takes effect that much later; with a smaller
      ``memory_bytes``, it does so earlier.
    - Several batches are read together, in the order of the file. This order is slower than a ChunkSampler's if samples
      are much smaller than 100 KB, or if whole chunks must be read for a few of their samples (`read_amplification`).
    - Each iteration of the loader iterates the sampler anew. `set_epoch` is passed on to it, or to the sampler in a
      ``BatchSampler``; call it before each epoch, as with a DataLoader.
    - The position can be saved if the sampler, its iterator (torchdata's), or the sampler in torch's ``BatchSampler``
      has ``state_dict`` and ``load_state_dict``: the state has the sampler as it is then, with what it has learnt from
      training, and the batches that it has drawn ahead. With the same ``memory_bytes``, ``num_threads`` and device, a
      resumed sampler that learns draws the batches of a run that was not stopped. Or if it has ``set_epoch`` and you
      call the loader's: the batches of the epoch are then drawn again, and those that were used are skipped; if they
      are other batches, iterating raises StateError. A list of batches needs neither. Otherwise, `state_dict` raises
      OptionError.

    Attributes
    ----------
    report : EpochReport
        Rates of the current or last epoch: samples/s, fresh samples, and the time spent waiting for batches; and the
        samples that were skipped, if the data set has ``on_error="skip"``.
    is_resident : bool
        Whether all data is kept on the device.
    batch_sampler : ChunkSampler or iterable
        The one that was given, or a ChunkSampler that the loader created. Lightning's Trainer calls the ``set_epoch``
        of `sampler`, which in your own order is the loader's.

    Raises
    ------
    FileError, FieldError
        As for `ChunkDataset`; while iterating, an error of a reader thread, which names the file and chunk.
    WorkerError
        While iterating: no read completed for ``timeout`` seconds.
    OptionError
        An argument is invalid.
    """

    batch_sampler: Any

    # as in a DataLoader without workers, for code that makes a DataLoader of this loader's attributes
    pin_memory = persistent_workers = False
    prefetch_factor = None

    def __init__(
        self,
        data: Paths | ChunkDataset,
        batch_size: int | None = None,
        *,
        batch_elements: int | None = None,
        batch_sampler: ChunkSampler | Iterable[Sequence[int]] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        transforms: Transforms | None = None,
        as_dict: bool | None = None,
        device: str | torch.device = "cpu",
        memory_bytes: int | None = None,
        num_threads: int | None = None,
        resident: bool = False,
        reuse: bool = False,
        echo: float = 1,
        timeout: float = TIMEOUT_S,
        **others: NoReturn,
    ) -> None:
        _check_none_left(others)
        _check_arguments(resident, num_threads, memory_bytes, timeout)
        check_echo(echo)
        target = find_device(device)
        dataset, transforms = find_data(data, transforms)
        if as_dict is not None:
            dataset = copy(dataset)
            dataset.as_dict = check_flag("as_dict", as_dict)
        if dataset.epoch_samples and resident:
            raise OptionError("resident is True, but each epoch has different samples: leave resident out")
        reuse = reuse and target.type == "cpu"
        fields = {name: dataset.field(name) for name in dataset.fields}
        by_field, mixing = split_mixing(transforms_by_field(transforms, fields))
        given = {"batch_size": batch_size, "batch_elements": batch_elements, "shuffle": not shuffle or None}
        given |= {"drop_last": drop_last or None}
        if batch_sampler is None:
            if batch_size is None and batch_elements is None:
                raise OptionError("batch_size is missing: pass batch_size, batch_elements or batch_sampler")
            own = copy(dataset)  # so that the cache settings of the user's data set do not change
            if packs(by_field.get(name := dataset.lengths_field or "", ())):
                own = dataset.with_transforms({name: Pack()})
            order_options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
            order_options["num_workers"] = 0
            batch_sampler = ChunkSampler(own, batch_size, batch_elements=batch_elements, **order_options)
        else:
            _check_not_given(given | {"seed": seed or None} if isinstance(batch_sampler, ChunkSampler) else given)
        self.batch_sampler = batch_sampler
        self._given: GivenBatches | None = None
        order: Order | GivenOrder
        if isinstance(batch_sampler, ChunkSampler):
            batch_sampler.check_data(dataset)
            batch_sampler.read_in_turn()
            self._position, self._given_rank = batch_sampler._position, batch_sampler._given_rank
            self._planned_for = batch_sampler._template
            order, min_chunks = _order_in_file(batch_sampler, dataset, echo)
        else:
            self._given, self._given_rank = GivenBatches(batch_sampler, dataset), 0  # each rank has its own batches
            self._position, order, min_chunks = self._given.position, self._given.order(seed), None
        if echo != 1 and order.without_echo:
            raise OptionError(f"echo is {echo}, but {order.without_echo} are not repeated: leave echo out")
        self._data, self._transforms = dataset, by_field
        self._device, self._reuse, self._echo = target, reuse, float(echo)
        self._reading: dict[str, Any] = {
            "way": chosen_way(),
            "device": target,
            "num_threads": num_threads,
            "timeout_s": timeout or None,
        }
        self._source = make_source(dataset, order, **self._reading)
        self._pipelines = [
            FieldPipeline(by_field[name], dataset.field(name), kind, reuse=reuse)
            for name, kind in self._source.kinds.items()
        ]
        converters = [pipeline.converter for pipeline in self._pipelines]
        name_of = partial(name_of_sample, self._source.reader)
        for converter in converters:
            converter.attach(self._source.reader, name_of, num_threads, target)
            converter.prepare(self._source.device)
        self._budget = MemoryBudget(self._source, converters, memory_bytes, reuse=reuse)
        self._plan = self._budget.plan(resident, order, min_chunks=min_chunks, join=echo == 1)
        self.is_resident = self._plan is None
        self._template = order if self._plan is None else self._plan.order
        # echoed batches must not change if the caller changes a batch in place
        keep = self.is_resident or (self._source.device.type == "cpu" and echo == 1 and not self._source.has_frames)
        kinds = {name: own.converter.pair for name, own in zip(dataset.fields, self._pipelines, strict=True)}
        self._items = Items(kinds, dataset.as_dict)
        moved_to = None if target == self._source.device else target
        counts = [num_tensors(converter.pair) for converter in converters]
        memory = SingleBuffer() if reuse else BatchMemory()
        self._mixer = None if mixing is None else Mixer(mixing, fields, counts, memory.empty)
        self._maker = BatchMaker(self._pipelines, keep=keep, device=moved_to, items=self._items, mixer=self._mixer)
        self.report = EpochReport()
        self._feed: WindowStream | Resident | None = None
        self._iterated: WindowStream | Resident | None = None

    @property
    def _template(self) -> Any:
        """An `Order` or a `GivenOrder`. If the proportions of the sampler were changed, it is planned again."""
        if self._given is None and self._planned_for is not self.batch_sampler._template:
            order, min_chunks = _order_in_file(self.batch_sampler, self._data, self._echo)
            if not self.is_resident:  # samples may be repeated more often, so that windows need other memory
                self.close()
                self._source = make_source(self._data, order, **self._reading)
                self._budget = self._budget.of_source(self._source)
                self._plan = self._budget.plan(False, order, min_chunks=min_chunks, join=self._echo == 1)
                assert self._plan is not None
            self._order = order if self._plan is None else self._plan.order
            self._planned_for = self.batch_sampler._template
        return self._order

    @_template.setter
    def _template(self, order: Any) -> None:
        self._order = order

    @property
    def _identity(self) -> int:
        return self._data.fingerprint if self._given is not None else self.batch_sampler._identity

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raise TypeError if ``batch_sampler`` has no length."""
        if self._given is not None:
            return len(self._given)
        fresh = self._num_batches
        return fresh + num_echoed(self._echo, fresh)

    @cached_property
    def dataset(self) -> ChunkDataset:
        """The data set, with the loader's transforms except functions of a batch, which `collate_fn` applies.

        Other code can thus read the rest of an epoch through a DataLoader: Accelerate's ``skip_first_batches`` does so.
        """
        own = zip(self._transforms.items(), self._pipelines, strict=True)
        leading = {name: each[: len(each) - len(pipeline.others)] for (name, each), pipeline in own}
        of_samples = {
            name: [replace(one, channels_last=False) if isinstance(one, ToDtype) else one for one in each]
            for name, each in leading.items()
        }
        if self._mixer is not None and not self._maker.finishes:
            of_samples[self._mixer.names[0]].append(self._mixer.transform)
        return self._data.with_transforms(of_samples) if any(of_samples.values()) else self._data

    def collate_fn(self, samples: Any) -> Any:
        """Make a batch of this loader from samples of its `dataset`, on its device."""
        batch = collate(samples)
        return self._maker.finish_collated(tuple(each.to(self._device) for each in self._items.tensors(batch)))

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch; None if batches are limited by ``batch_elements`` only."""
        order = self._template
        if self._given is not None:
            return self._given.batch_size
        return order.max_samples if isinstance(order, LengthOrder) else order.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self._template.drop_last

    @property
    def num_workers(self) -> int:
        """0, because threads of this process read."""
        return 0

    @property
    def sampler(self) -> Any:
        """The `batch_sampler` or, if samples are not shuffled, a sampler that also PyTorch takes for sequential."""
        if self._given is not None:  # Lightning calls its set_epoch
            return self
        return self.batch_sampler if self._template.shuffle else _InFileOrder(self)

    @property
    def read_ahead_samples(self) -> int:
        """Maximum number of samples that are read ahead. It is 0 if all data is kept on the device.

        With your own ``batch_sampler``, an epoch begins with so many samples; larger batches may make it larger.
        """
        return 0 if self._plan is None else self._plan.num_slots * self._plan.window_samples

    @property
    def read_amplification(self) -> float:
        """The bytes that all ranks read from the file in the next epoch, divided by the bytes of its samples.

        The ratio is above 1 if chunks that must be read completely, because they are compressed or small, contain
        samples that a subset or weights do not select. It is below 1 if samples are repeated. Fields that are kept in
        memory, and repeated reads for ``checksums``, are not counted. Nor are chunks that batches by group need in
        several windows: see ``chunk_reads`` of `ChunkSampler.report`.
        """
        return self._source.read_amplification(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0. If a state of this epoch was loaded, keep its batch.

        The epoch is passed on to the ``set_epoch`` of your own ``batch_sampler``, or of the sampler in a BatchSampler.
        """
        super().set_epoch(epoch)
        if self._given is not None:
            self._given.set_epoch(self._position.epoch)

    def state_dict(self) -> State:
        """Return the position in the epoch as integers, for `load_state_dict` of a loader or sampler of the same file.

        With your own ``batch_sampler``, the state also has that of the sampler as it is now, the batches that it has
        drawn and the loader has not returned yet, and how often the epoch used each sample. If the sampler has no
        state, there is a checksum of the batches instead, which are drawn again.

        Raises
        ------
        OptionError
            The loader repeats samples (data echoing): its position within a window cannot be saved. Or your
            ``batch_sampler`` cannot be resumed; the message says what it lacks.
        """
        self._check_state()
        epoch, batch = self._position.reached
        own = {} if self._given is None else self._given.state(epoch, batch)
        return self._state(epoch, batch) | own

    def _proportions_of(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        if self._given is not None:
            return super()._proportions_of(state)
        return self.batch_sampler._proportions_of(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._given is not None:
            self._given.load(state, self._position.epoch, self._position.batch)

    load_state_dict.__doc__ = Resumable.load_state_dict.__doc__

    def _check_state(self) -> None:
        if self._echo != 1:
            raise OptionError(
                f"echo is {self._echo:g}, but a loader that echoes has no state to save or load: use echo=1"
            )

    def __iter__(self) -> Iterator[Any]:
        return _OneThread(self._batches())

    def _batches(self) -> Generator[Any]:
        if get_worker_info() is not None:
            raise OptionError(
                "a ChunkLoader is iterated in a worker of a DataLoader, where each worker would return all samples: "
                "iterate the ChunkLoader directly, without a DataLoader"
            )
        if self._iterated is not None:
            raise OptionError("this loader is already being iterated: end that iteration, or create a second loader")
        self._check_ranks()
        report = EpochReport(started=time.perf_counter())
        start = self._position.batch
        order = self._begun(start)
        feed = self._iterated = self._open(order, start)
        try:
            self._position.begin()
            if self._given is not None:
                self._given.has_begun()
            self.report = report
            for number, batch in enumerate(feed.batches(order, self._maker, report, start), start + 1):
                self._position.running = order.epoch, number
                yield batch
                if self._iterated is not feed:
                    raise OptionError(CLOSED)
            self._position.running = order.epoch, None
        except GeneratorExit:  # threads and memory stay for the next iteration
            raise
        except BaseException as error:
            is_closed = self._iterated is not feed or self._feed is not feed
            if is_closed and not isinstance(error, H5ChunkError):  # because another thread has closed the loader
                raise OptionError(CLOSED) from error
            if not self.is_resident:
                self.close()
            raise
        finally:
            if self._iterated is feed:
                self._iterated = None

    def _begun(self, start: int) -> Order | GivenOrder:
        """Return the order of the epoch. The size of the user's first batch determines the windows."""
        order = self.order
        if not isinstance(order, GivenOrder):
            return order
        assert self._given is not None
        order = order.begun(start)
        size = self._given.usual or order.drawing.next_size
        self._given.usual = size
        if self._plan is not None and self._feed is None and size not in (None, order.batch_size):
            self._plan = self._budget.plan_given(order, size)
            order = self._plan.order
            self._template = replace(order, drawing=None)
        return replace(order, replan=partial(self._budget.plan_larger, order))

    def _open(self, order: Order | GivenOrder, start: int) -> WindowStream | Resident:
        """Return the source of batches. It is created on the first call and kept for later epochs, with its threads."""
        if self._feed is not None and not self._feed.is_usable:
            self.close()
        if self._feed is None:
            source = self._source
            feed: WindowStream | Resident
            if self._plan is None:
                feed = Resident(source, self._budget.loading_samples(order), self._echo)
            else:
                lends_slot = self._reuse and source.device.type == "cpu"
                plan = replace(self._plan, order=order)
                feed = WindowStream(source, plan, lends_slot=lends_slot, echo=self._echo, start=start)
            self._finalizer = weakref.finalize(self, feed.close)  # first, as a signal may interrupt this anywhere
            self._feed = feed
        return self._feed

    def close(self) -> None:
        """Stop the threads, free the memory and close the file. The next iteration starts them again."""
        self._iterated = None
        if self._feed is not None:
            self._finalizer()
            self._feed = None
            self._maker.release()

    def __getitem__(self, _: object) -> Any:
        raise OptionError("a ChunkLoader cannot be indexed: iterate it directly, without a DataLoader")

    def __reduce__(self) -> Any:
        raise OptionError("a ChunkLoader cannot be sent to another process: create it in that process")

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        order, source = self.order, self._source
        echo = "" if self._echo == 1 else f"; echo {self._echo:g}"
        converters = (pipeline.converter for pipeline in self._pipelines)
        decoders = "".join(f"; {item.decoder}" for item in converters if item.decoder)
        number = "batches" if self._given is not None else f"{len(self)} batches"
        return printable(
            f"ChunkLoader({str(source.reader.path)!r} to {self._device}: {number} of {order.batch_text}; "
            f"{self._budget.describe(order, self._plan)}{echo}; {source.describe(order)}{decoders})"
        )


class _InFileOrder(SequentialSampler):
    """The sampler of a loader that does not shuffle. Lightning's ``overfit_batches`` needs this class."""

    def __init__(self, loader: ChunkLoader) -> None:
        super().__init__(loader.dataset)
        self.set_epoch = loader.set_epoch


def _check_none_left(others: Mapping[str, Any]) -> None:
    """Raise OptionError for an argument of a DataLoader or ChunkSampler, and TypeError for any other name."""
    for name in others:
        if name in OF_DATA_LOADER:
            raise OptionError(f"ChunkLoader has no {name}: {OF_DATA_LOADER[name]}")
        if name in OF_SAMPLER:
            raise OptionError(
                f"ChunkLoader has no {name}: pass it to a ChunkSampler, as in "
                f"ChunkLoader(dataset, batch_sampler=ChunkSampler(dataset, 256, {name}=...))"
            )
        raise TypeError(f"ChunkLoader.__init__() got an unexpected keyword argument {name!r}")


def _check_arguments(resident: bool, num_threads: int | None, memory_bytes: int | None, timeout: float) -> None:
    """Raise OptionError for loader arguments that are invalid for any file."""
    check_flag("resident", resident)
    for name, number, minimum in (("num_threads", num_threads, 1), ("memory_bytes", memory_bytes, 0)):
        if number is not None:
            check_whole(name, number, minimum)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise OptionError(f"timeout is {timeout!r}: pass a number of seconds, or 0 to wait forever")


def _check_not_given(options: Mapping[str, Any]) -> None:
    """Raise OptionError unless all values are None, because they are settings of ``batch_sampler``."""
    for name in (name for name, value in options.items() if value is not None):
        raise OptionError(f"{name} is given together with batch_sampler: pass {name} to the sampler instead")


def _order_in_file(sampler: ChunkSampler, dataset: ChunkDataset, echo: float) -> tuple[Order, int | None]:
    """Return the order of samples in the file, and the minimum number of chunks per window.

    The minimum is None if the sampler fixes the size of the windows.
    """
    order = replace(sampler._template, epoch_samples=dataset.epoch_samples)
    if dataset.subset_samples is not None:  # convert positions in the subset to sample numbers in the file
        order = replace(order, selection=replace(order.selection, samples=dataset.subset_samples))  # type: ignore[type-var]
    if not sampler.chooses_window:
        return order, None
    # windows of one batch would repeat the same batch
    min_chunks = 1 if echo == 1 else math.ceil(2 * order.batch_size / order.chunk_samples)
    return replace(order, window_chunks=max(order.window_chunks, min_chunks)), min_chunks
