"""Stories of a file: made, killed, continued, repacked, tuned, replaced, read; against a model in NumPy.

`STORIES=300 python -m pytest tests/test_story.py` tells more.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from PIL import Image
from support.loaders import loader_by
from support.orders import ordered

import h5chunk
from h5chunk.errors import FileError, StateError
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.write.new_file import write_recommendation
from h5chunk.tools.repack.repack import repack

MOST = ALL = 24  # samples of a source
CLASSES = 3  # sample i is of class i % 3
PIXELS = np.random.default_rng(0).integers(0, 256, (ALL, 5, 4, 3), np.uint8)
CHANNELS_FIRST = PIXELS.transpose(0, 3, 1, 2)
BATCH, WINDOW = 5, 2

SEEDS = st.integers(0, 3)
COUNTS = st.integers(CLASSES, MOST)
READERS = st.sampled_from(["h5py", "direct"])
OPTIONS = st.fixed_dictionaries(
    {"seed": SEEDS, "chunk_samples": st.integers(1, 9), "shuffle": st.booleans(), "workers": st.just(0)}
)


class Opened(NamedTuple):
    """A data set, what it must give, and which version of the file it is of."""

    dataset: h5chunk.ChunkDataset
    order: np.ndarray
    version: int


class Saved(NamedTuple):
    """The state of an epoch, the batches that are left of it, its seed, and the file's version."""

    state: dict[str, Any]
    rest: list[list[int]]
    seed: int
    version: int


STEPS: Counter[str] = Counter()  # that were taken, by name


def step(**drawn: Any) -> Callable[[Any], Any]:
    """A rule that is counted."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def counted(self: Any, **values: Any) -> None:
            STEPS[function.__name__] += 1
            function(self, **values)

        return rule(**drawn)(counted)

    return decorate


class Story(RuleBasedStateMachine):
    """One file, and what must be in it.

    Attributes
    ----------
    order : (N,) int64
        Which of all samples each sample of the file is; together they are the first N.
    version : int
        Grows whenever the file changes.
    made : dict, optional
        The options with which it was converted, while it is as that left it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="h5chunk-story-"))
        self.path = self.folder / "data.h5"
        self.order, self.version = np.empty(0, np.int64), 0
        self.made: dict[str, Any] | None = None
        self.opened: list[Opened] = []
        self.saved: list[Saved] = []

    def teardown(self) -> None:
        self.opened.clear()
        shutil.rmtree(self.folder)

    # ---- what changes the file

    def source(self, count: int, first: int = 0) -> Path:
        """A folder of some images."""
        folder = self.folder / f"photos{first}-{count}"
        if not folder.exists():
            for number in range(first, first + count):
                place = folder / f"class{number % CLASSES}"
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(PIXELS[number]).save(place / f"{number:03}.png")
        return folder

    def converted(self, count: int, options: dict[str, Any]) -> None:
        """The file is now of this source, each sample once, and says which is which."""
        self.version += 1
        self.made, self.order = {"count": count, **options}, self.found_order()
        listed = np.array(sorted(range(count), key=lambda number: (number % CLASSES, number)))
        with h5py.File(self.path) as file:
            index = file["h5chunk/source_index"][()]
        np.testing.assert_array_equal(listed[index], self.order)
        assert sorted(self.order) == list(range(count)) and (options["shuffle"] or (self.order == listed).all())

    def convert(self, path: Path, count: int, **options: Any) -> None:
        h5chunk.convert(self.source(count), path, **options)

    @initialize(count=COUNTS, options=OPTIONS)
    def begin(self, count: int, options: dict[str, Any]) -> None:
        self.convert(self.path, count, **options)
        self.converted(count, options)

    @step(count=COUNTS, options=OPTIONS)
    def replace(self, count: int, options: dict[str, Any]) -> None:
        self.convert(self.path, count, overwrite=True, **options)
        self.converted(count, options)

    @precondition(lambda self: self.made)
    @step()
    def convert_again(self) -> None:
        """Equal source and options give equal bytes."""
        again = self.folder / "again.h5"
        self.convert(again, **self.made)
        assert again.read_bytes() == self.path.read_bytes()
        again.unlink()

    def killed(self, work: Callable[[], object], expected: bytes, after_s: float) -> None:
        """Killed, the old file or the new one is there, whole; and doing it again gives what it gives undisturbed."""
        before, child = self.path.read_bytes(), fork(work)
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = self.path.read_bytes()
        assert found in (before, expected)
        if found == before:
            work()
        assert self.path.read_bytes() == expected

    @step(count=COUNTS, options=OPTIONS, after_s=st.floats(0, 0.05))
    def kill_convert(self, count: int, options: dict[str, Any], after_s: float) -> None:
        reference = self.folder / "reference.h5"
        self.convert(reference, count, **options)
        work = functools.partial(self.convert, self.path, count, overwrite=True, **options)
        self.killed(work, reference.read_bytes(), after_s)
        reference.unlink()
        self.converted(count, options)

    @step(shuffle=st.booleans(), seed=SEEDS, chunk=st.integers(1, 9), compression=st.sampled_from(["none", "gzip"]))
    def repack(self, shuffle: bool, seed: int, chunk: int, compression: str) -> None:
        new = self.folder / "new.h5"
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "chunk_samples": chunk, "compression": compression}
        if shuffle and len(self.order) == 3:  # as many as an image has channels
            with pytest.raises(h5chunk.OptionError, match="has the samples along two axes"):
                repack(self.path, new, **options)
            options["fields"] = ["images"]  # which is the remedy
        repack(self.path, new, **options)
        new.replace(self.path)
        before, self.order = self.order, self.found_order()
        assert sorted(self.order) == sorted(before) and (shuffle or (self.order == before).all())
        self.made, self.version = None, self.version + 1

    @step(window=st.integers(1, 9), nbytes=st.integers(0, 1 << 20))
    def tune_apply(self, window: int, nbytes: int) -> None:
        """What `tune --apply` does once it has chosen: the file itself stays as it is."""
        size = h5chunk.ChunkDataset(self.path).chunk_samples
        about = {"dataset": "images", "num_samples": len(self.order), "chunk_samples": size}
        write_recommendation(self.path, window, CacheSettings(521, nbytes), **about)
        dataset = h5chunk.ChunkDataset(self.path)
        assert dataset.window_chunks == window and dataset.cache.nbytes == nbytes

    # ---- what looks at it

    def found_order(self) -> np.ndarray:
        """Which samples there are, by their pixels."""
        with h5py.File(self.path) as file:
            return numbers_of(file["images"][()], file["labels"][()])

    @invariant()
    def plain_h5py_reads_the_model(self) -> None:
        if not self.version:
            return
        with h5py.File(self.path) as file:
            np.testing.assert_array_equal(file["images"][()], CHANNELS_FIRST[self.order])
            np.testing.assert_array_equal(file["labels"][()], self.order % CLASSES)
            assert len(np.unique(file["h5chunk/source_index"][()])) == len(self.order)
        left = [each.name for each in self.folder.iterdir() if each.name.startswith(".")]
        assert not left, left

    @step()
    def verify(self) -> None:
        report = h5chunk.verify(self.path)
        assert report.ok and report.by_h5chunk and not report.notes

    @step(data=st.data())
    def flip_a_bit(self, data: st.DataObject) -> None:
        with h5py.File(self.path) as file:
            number = data.draw(st.integers(0, file["images"].id.get_num_chunks() - 1))
            chunk = file["images"].id.get_chunk_info(number)
        damaged = bytearray(self.path.read_bytes())
        damaged[chunk.byte_offset + data.draw(st.integers(0, chunk.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        copy = self.folder / "damaged.h5"
        copy.write_bytes(damaged)
        assert [(each.field, each.chunk) for each in h5chunk.verify(copy).bad] == [("images", number)]
        copy.unlink()

    @step()
    def open(self) -> None:
        self.opened.append(Opened(h5chunk.ChunkDataset(self.path), self.order, self.version))

    @precondition(lambda self: self.opened)
    @step(data=st.data(), rows=st.lists(st.integers(0, MOST - 1), max_size=12))
    def read(self, data: st.DataObject, rows: list[int]) -> None:
        """The file that was opened, or an error once it was replaced or changed; never a mixture."""
        number = data.draw(st.integers(0, len(self.opened) - 1))
        dataset, order, version = self.opened[number]
        rows = [row % len(order) for row in rows]
        try:
            images, _ = dataset[rows]
        except FileError as error:
            assert "replaced or changed" in str(error) and version != self.version
            del self.opened[number]
        else:
            np.testing.assert_array_equal(images.numpy(), CHANNELS_FIRST[order[rows]])

    def loader(self, reader: str, seed: int, **order: Any) -> h5chunk.ChunkLoader:
        order = ordered(self.path, BATCH, seed=seed, window_chunks=WINDOW, **order)
        return loader_by(**order, reader=reader, num_threads=2)

    @step(reader=READERS, seed=SEEDS, drop_last=st.booleans())
    def epoch(self, reader: str, seed: int, drop_last: bool) -> None:
        if drop_last and 0 < len(self.order) < BATCH:
            with pytest.raises(h5chunk.OptionError, match="drop_last leaves out all"):
                self.loader(reader, seed, drop_last=True)
            return
        with self.loader(reader, seed, drop_last=drop_last) as loader:
            seen = sorted(number for batch in loader for number in numbers(batch))
        if drop_last:
            assert len(seen) == len(set(seen)) == len(self.order) // BATCH * BATCH
        else:
            assert seen == sorted(self.order)

    @step(reader=READERS, seed=SEEDS, batches=st.integers(0, 6))
    def save(self, reader: str, seed: int, batches: int) -> None:
        with self.loader(reader, seed) as loader:
            iterator = iter(loader)
            for _ in range(min(batches, len(loader) - 1)):
                next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
            self.saved.append(Saved(state, [numbers(batch) for batch in iterator], seed, self.version))

    @precondition(lambda self: self.saved)
    @step(data=st.data(), reader=READERS)
    def load(self, data: st.DataObject, reader: str) -> None:
        """The rest of the epoch; or an error if the file is another one by now."""
        number = data.draw(st.integers(0, len(self.saved) - 1))
        state, rest, seed, version = self.saved[number]
        with self.loader(reader, seed) as loader:
            try:
                loader.load_state_dict(state)
            except StateError:
                assert version != self.version
                del self.saved[number]
            else:
                assert [numbers(batch) for batch in loader] == rest


def numbers_of(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which samples these are, by their pixels; their labels are theirs."""
    same = (images[:, None] == CHANNELS_FIRST).all(axis=(2, 3, 4))
    assert (same.sum(axis=1) == 1).all()
    found = same.argmax(axis=1)
    np.testing.assert_array_equal(labels, found % CLASSES)
    return found


def numbers(batch: Any) -> list[int]:
    return numbers_of(*(field.numpy() for field in batch)).tolist()


def fork(work: Callable[[], object]) -> int:
    """A child that does this and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork in a process with threads
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


Story.TestCase.settings = settings(
    max_examples=int(os.environ.get("STORIES", "8")),
    stateful_step_count=12,
    deadline=None,
    phases=[Phase.generate],  # a story that fails is told at its full length: to shorten one takes minutes
    suppress_health_check=list(HealthCheck),
)
TestStory = Story.TestCase
