"""A LightningDataModule with training, validation and test loaders (``pip install "h5chunk[lightning]"``).

A Trainer can also use a `h5chunk.ChunkLoader` directly: the loader keeps track of the epoch and, when a checkpoint is
loaded, continues with the next batch. Create the loader in ``train_dataloader()``, where the number of processes is
known, as `ChunkDataModule` does. ``overfit_batches`` needs ``shuffle=False``, because a shuffled loader has other
batches in each epoch; the Trainer cannot turn shuffling off in a ChunkLoader, nor in the ChunkSampler of a DataLoader.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, OptionError
from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler


def _find_base() -> Any:
    """Import LightningDataModule from ``lightning`` or ``pytorch_lightning``; raise ImportError if both are missing."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name).LightningDataModule
        except ImportError:
            continue
    raise ImportError('h5chunk.lightning needs Lightning: pip install "h5chunk[lightning]"')


LightningDataModule: Any = _find_base()

__all__ = ["ChunkDataModule"]

Data = str | os.PathLike[str] | ChunkDataset
Parts = tuple[ChunkDataset, ChunkDataset | None, ChunkDataset | None]  # for training, validation and test
SPLIT = (0.8, 0.1, 0.1)
SPLIT_FIELD = "split"
NAMES = (("train", "training"), ("val", "valid", "validation", "dev"), ("test", "testing", "eval", "evaluation"))
TRAINER_KNOWS = ("rank", "world_size", "shuffle")


class ChunkDataModule(LightningDataModule):
    """Training, validation and test loaders, from one file or from separate files.

    ::

        data = ChunkDataModule("photos.h5", 256, transforms=[Normalize(mean, std), ToDtype(torch.bfloat16)])
        Trainer(max_epochs=90).fit(model, data)

    The loaders return batches that are already on the Trainer's GPU. Training samples are shuffled differently in each
    epoch; validation and test samples keep the order of the file. Each epoch uses each sample once, so its last batch
    may be smaller than the others. The size of the last batch may differ between processes, and be 0 in some of them:
    set ``pad`` or ``drop_last`` in ``train_order`` to avoid this in training. A checkpoint from the middle of an epoch
    resumes with the next batch, with any number of processes that divides ``lanes``, if ``batch_size`` times that
    number stays the same.

    Parameters
    ----------
    path : path or ChunkDataset
        The data: a file, folder or pattern, as for `ChunkDataset`, or a data set that is already open.
    batch_size : int
        Number of samples per batch in each process.
    split : sequence of float, or str, optional
        Fractions for training, validation and test, as for `ChunkDataset.split`; with two fractions, there is no test
        set. Or the name of a field that assigns each sample to a part: its values are ``train``, ``val`` and ``test``,
        or common synonyms such as ``dev``. Default: the field ``split``, if the file has it (`h5chunk.convert` writes
        it if the source has folders with these names), else 0.8, 0.1 and 0.1. If ``val`` or ``test`` is given, all of
        ``path`` is used for training.
    stratify : str, optional
        Field whose classes occur in the same proportions in all parts.
    split_seed : int
        Seed of a split by fractions. If you change it or the fractions between runs, you will validate on samples that
        were used for training.
    val, test : path or ChunkDataset, optional
        Separate files or data sets for validation and test, instead of a split.
    fields : sequence or mapping of str, optional
        Fields to read from each file, as for `ChunkDataset`.
    eval_batch_size : int, optional
        Batch size of validation and test. Default: ``batch_size``.
    device : str or torch.device, optional
        Device of the batches. Default: the Trainer's device if it is a CUDA GPU, else the CPU.
    train_order : dict, optional
        Arguments for the `ChunkSampler` of training: ``drop_last`` (default False), ``pad`` (default False), ``seed``,
        ``lanes``, ``locality``, ``weights``, ``window_chunks``.
    train_options : dict, optional
        Arguments for the `ChunkLoader` of training only, such as augmenting ``transforms``, or ``echo``. A loader with
        ``echo`` cannot save its state, so turn checkpoints off.
    **options
        Arguments for all three `ChunkLoader` objects, such as ``transforms`` and ``memory_bytes``.

    Raises
    ------
    OptionError
        An argument is invalid.
    """

    def __init__(
        self,
        path: Data,
        batch_size: int,
        *,
        split: Sequence[float] | str | None = None,
        stratify: str | None = None,
        split_seed: int = 0,
        val: Data | None = None,
        test: Data | None = None,
        fields: Fields | None = None,
        eval_batch_size: int | None = None,
        device: Any = None,
        train_order: dict[str, Any] | None = None,
        train_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given = val is not None or test is not None
        if given and (split is not None or stratify is not None):
            raise OptionError(
                "split or stratify divides one file, but val or test is given: leave out either split and stratify, or "
                "val and test"
            )
        if split is not None and not isinstance(split, str) and len(split) not in (2, 3):
            raise OptionError(f"split is {split!r}: pass the fractions of training, validation and optionally test")
        for name in {*options, *(train_order or {}), *(train_options or {})} & set(TRAINER_KNOWS):
            raise OptionError(f"{name} is given, but the Trainer sets it: leave it out")
        self._path, self._val, self._test, self._fields = path, val, test, fields
        self._split, self._is_whole = split, given
        self._stratify, self._split_seed = stratify, split_seed
        self._batch_size, self._eval_batch_size = batch_size, eval_batch_size or batch_size
        self._device, self._options = device, options
        self._train_order, self._train_options = train_order or {}, train_options or {}
        self._loaders: dict[str, ChunkLoader] = {}

    @cached_property
    def datasets(self) -> Parts:
        """Data sets for training, validation and test; None for a part that does not exist."""
        whole = self._dataset(self._path)
        assert whole is not None
        if self._is_whole:
            return whole, self._dataset(self._val), self._dataset(self._test)
        if isinstance(self._split, str):
            return _split_by_field(whole, self._split)
        if self._split is None and self._stratify is None:
            with suppress(FieldError):
                return _split_by_field(whole, SPLIT_FIELD)
        shares = SPLIT if self._split is None else tuple(self._split)
        train, val, *rest = whole.split(shares, seed=self._split_seed, stratify=self._stratify)
        return train, val, rest[0] if rest else None

    def _dataset(self, data: Data | None) -> ChunkDataset | None:
        if isinstance(data, ChunkDataset) and self._fields is not None:
            raise OptionError("fields is given together with a ChunkDataset: pass fields to the ChunkDataset instead")
        if data is None or isinstance(data, ChunkDataset):
            return data
        return ChunkDataset(data, fields=self._fields)

    def train_dataloader(self) -> ChunkLoader:
        """Return the shuffled training loader, which follows the Trainer's epoch."""
        options, order = {**self._options, **self._train_options}, self._train_order
        if self.trainer is not None and self.trainer.overfit_batches:
            warnings.warn("the Trainer has overfit_batches: training samples are not shuffled", stacklevel=2)
            order = {**order, "shuffle": False}
        return self._loader("train", self.datasets[0], self._batch_size, order, options)

    def val_dataloader(self) -> ChunkLoader | list[Any]:
        """Return the validation loader, in the order of the file; an empty list if there are no such samples."""
        return self._evaluation("val", self.datasets[1])

    def test_dataloader(self) -> ChunkLoader | list[Any]:
        """Return the test loader, in the order of the file; an empty list if there are no such samples."""
        return self._evaluation("test", self.datasets[2])

    def _evaluation(self, part: str, dataset: ChunkDataset | None) -> ChunkLoader | list[Any]:
        if dataset is None:
            return []
        return self._loader(part, dataset, self._eval_batch_size, {"shuffle": False}, self._options)

    def _loader(
        self, part: str, dataset: ChunkDataset, batch_size: int, order: dict[str, Any], options: dict[str, Any]
    ) -> ChunkLoader:
        """Make a loader. The previous one of this part is closed: ``reload_dataloaders_every_n_epochs`` needs many."""
        if part in self._loaders:
            self._loaders.pop(part).close()
        device = self._device
        if self.trainer is not None:
            root = self.trainer.strategy.root_device
            device = device or (root if root.type == "cuda" else None)
            order = {**order, "rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        sampler = ChunkSampler(dataset, batch_size, **order)
        loader = ChunkLoader(dataset, batch_sampler=sampler, device=device or "cpu", **options)
        self._loaders[part] = loader
        return loader

    def teardown(self, stage: str) -> None:
        """Stop the threads of all loaders, and free their memory."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()


def _split_by_field(whole: ChunkDataset, field: str) -> Parts:
    """Split a data set by a field that contains names of parts; return None for a part without samples.

    Raises FieldError if the field does not exist, and OptionError if it contains any other value, or if it assigns no
    sample to training.
    """
    names, numbers = np.unique(whole.values(field), return_inverse=True)
    parts = {alias: part for part, aliases in enumerate(NAMES) for alias in aliases}
    unknown = [str(name) for name in names if str(name).lower() not in parts]
    if unknown:
        raise OptionError(
            f"field {field!r} contains {unknown[0]!r}, which is not a part such as train, val or test: "
            "pass split as fractions"
        )
    part_of = np.array([parts[str(name).lower()] for name in names], np.int64)[numbers]
    train, val, test = (whole.subset(part_of == part) if (part_of == part).any() else None for part in range(3))
    if train is None:
        raise OptionError(f"field {field!r} assigns no samples to training: pass split as fractions")
    return train, val, test
