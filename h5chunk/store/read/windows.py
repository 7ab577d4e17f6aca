"""Read windows of frames as samples. A sample consists of several rows of each field of another reader, the frames.

The reader of the frames lists chunks, verifies checksums and decodes. `WindowReader.rows_of` converts samples to rows.
`h5chunk.store.read.samples.WindowRows` requests these rows in ascending order, so that a chunk is decoded once for all
windows that are read together. To support another kind of sample that consists of rows, override ``rows_of``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.draws import Draws
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.plan.selection import starts_of_runs
from h5chunk.store.read.fields import WINDOW, Field
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.samples import FieldReader, WindowRows
from h5chunk.store.read.source import Computed, Groups, Source, SourceFile

GOAL_STREAM = 128  # stream of the random numbers that choose goals
TINY_BYTES = 32  # a window of tiny frames may keep this many bytes per frame that it uses
SHARED = 4  # minimum length of a chunk of windows, as a multiple of a window's length


class Episodes(NamedTuple):
    """The frames and constants of all episodes.

    ``sources`` are the sources of the fields that have one frame per time step, and of those that have one more frame
    at the end of each episode, such as a last observation, if there are any. Their rows are the frames of one episode
    after another. ``borders``, (num_episodes + 1,) int64, has the first time step of each episode, and finally the
    number of time steps; ``names`` has the name of each episode. ``constants`` has the fields with one value per
    episode, (num_episodes, ...) each.
    """

    sources: Sequence[Source]
    borders: np.ndarray
    names: Sequence[str]
    constants: Mapping[str, np.ndarray]

    @property
    def extra(self) -> dict[str, int]:
        """The number of frames that each field has at the end of an episode, after its last time step."""
        return {name: extra for extra, source in enumerate(self.sources) for name in source.fields}


class WindowReader(Source):
    """A source whose samples are windows of the frames of ``episodes``.

    ``anchors``, (n,) int64 and ascending, has each window's current time step. ``steps`` maps each field to the offsets
    of its frames from the anchor. Offsets that lead out of the episode repeat its first or last frame. Fields in
    ``futures`` have one random later frame of the episode instead, which depends on ``seed``. If there are any, the
    index of a sample includes an offset for its epoch: see `h5chunk.plan.draws.epoch_rows`. ``masks`` has the field
    whose padding a computed field marks, by its name.
    """

    def __init__(
        self,
        episodes: Episodes,
        anchors: np.ndarray,
        steps: Mapping[str, np.ndarray],
        *,
        futures: Collection[str] = (),
        masks: Mapping[str, str] = MappingProxyType({}),
        seed: int = 0,
    ) -> None:
        self.anchors, self.steps = anchors, dict(steps)
        self.futures, self._masks, self._seed = frozenset(futures), dict(masks), seed
        self.sources, self.extra, borders = tuple(episodes.sources), episodes.extra, episodes.borders
        self.episodes, self.episode_names = np.searchsorted(borders, anchors, "right") - 1, list(episodes.names)
        self._constants, self._borders = dict(episodes.constants), borders
        self._first, self._last = borders[self.episodes], borders[self.episodes + 1] - 1
        # the order of windows is that of the chunks of the largest field
        self.frames = frames = max(self.sources, key=lambda source: source.main.grid.sample_bytes)
        rows = anchors + self.extra[frames.main.name] * self.episodes
        chunks = rows // frames.chunk_samples
        if frames.chunk_starts is not None:
            chunks = np.searchsorted(frames.chunk_starts, rows, "right") - 1
        self._joined = self._chunks_together()
        chunk_starts = starts_of_runs(chunks // self._joined)
        super().__init__(
            frames.path,
            {name: self._describe(name) for name in self.steps},
            len(anchors),
            stamp=frames.stamp,
            trusted=frames.trusted,
            checksums=frames.checksums,
            starts=np.searchsorted(rows, frames.starts),
            chunk_samples=max(1, round(len(anchors) / max(1, len(chunk_starts) - 1))),
            chunk_starts=chunk_starts,
        )

    @property
    def joined_as(self) -> str:  # type: ignore[override]
        can_be = all(source.joined_as == H5Reader.joined_as for source in self.sources)
        return "windows" if can_be else ""

    @classmethod
    def of_several(cls, parts: Sequence[WindowReader], name: Path) -> WindowReader:
        """Return a source of the windows of several sources, one after the other.

        Raises FieldError if they differ in their frames.
        """
        first = parts[0]
        for part in parts[1:]:
            for what, own, other in zip(
                ("time steps of the frames", "goals", "masks of padding", "last frames of episodes", "constants"),
                *([each._numbers, each.futures, each._masks, each.extra, [*each._constants]] for each in (part, first)),
                strict=True,
            ):
                if own != other:
                    raise FieldError(
                        f"{printable(part.path)}: the {what} are {own!s:.100}, but in {printable(first.path)} they are "
                        f"{other!s:.100}: open both in the same way"
                    )
        starts = np.cumsum([0, *(part._borders[-1] for part in parts)])
        sources = [FileSet.of_several(each, name) for each in zip(*(part.sources for part in parts), strict=True)]
        episodes = Episodes(
            sources,
            np.concatenate([[0], *(part._borders[1:] + start for part, start in zip(parts, starts, strict=False))]),
            [name for part in parts for name in part.episode_names],
            {of: np.concatenate([part._constants[of] for part in parts]) for of in first._constants},
        )
        anchors = np.concatenate([part.anchors + start for part, start in zip(parts, starts, strict=False)])
        how: dict[str, Any] = {"futures": first.futures, "masks": first._masks, "seed": first._seed}
        return cls(episodes, anchors, first.steps, **how)

    @property
    def _numbers(self) -> dict[str, list[int]]:
        """The offsets of each field's frames from the anchor."""
        return {name: steps.tolist() for name, steps in self.steps.items()}

    @property
    def readers(self) -> tuple[Source, ...]:
        return self.frames.readers if self.frames.is_set else (self,)

    @property
    def file_list(self) -> list[SourceFile]:
        return self.frames.file_list

    @property
    def epoch_samples(self) -> int:  # type: ignore[override]
        """The offset of each epoch. It is 0 unless there are random goals."""
        return self.num_samples if self.futures else 0

    @property
    def computed(self) -> dict[str, Computed]:
        """The constants of episodes, and the masks of frames that are padding."""
        constants = {
            name: Computed.described(
                name, (self.num_samples, *values.shape[1:]), values.dtype, partial(self._of_episode, name)
            )
            for name, values in self._constants.items()
        }
        shapes = {mask: self.fields[name].grid.shape[:2] for mask, name in self._masks.items()}
        masks = {
            mask: Computed.described(mask, shapes[mask], bool, partial(self.is_padding, name))
            for mask, name in self._masks.items()
        }
        return constants | masks

    def _of_episode(self, name: str, samples: np.ndarray) -> np.ndarray:
        """Return a constant of the episode of each window."""
        found: np.ndarray = self._constants[name][self.episodes[samples % self.num_samples]]
        return found

    def source_of(self, name: str) -> Source:
        return self.sources[self.extra[name]]

    @property
    def groups(self) -> Groups:
        """The episodes."""
        return Groups("episode", self.episode_names, self.episodes)

    def rows_of_samples(self, name: str, samples: np.ndarray) -> tuple[Source, np.ndarray]:
        """Return the rows of the current time steps of windows."""
        extra = self.extra.get(name, 0)
        return self.sources[extra], self.anchors[samples] + extra * self.episodes[samples]

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        return self.sources[self.extra.get(field, 0)].datasets_of(field)

    def _chunks_together(self) -> int:
        """Return how many chunks of frames to join into one chunk, so that most windows of the chunk share frames."""
        frames = self.frames
        wanted = good_chunk_samples(frames.num_samples, frames.main.grid.sample_bytes)
        dense = [self.steps[name] for name in self.steps if self.is_dense(name)]
        wanted = max(wanted, *(SHARED * int(steps[-1] - steps[0]) for steps in dense), 1)
        return max(1, round(wanted / frames.chunk_samples))

    def _describe(self, name: str) -> Field:
        field = self.source_of(name).fields[name]
        shape = len(self.anchors), len(self.steps[name]), *field.sample_shape
        grid = ChunkGrid(shape, None, field.dtype.itemsize, False)
        return Field(name, field.dataset, grid, field.dtype, f"{WINDOW}{field.axes[1:]}")

    def rows_of(self, name: str, samples: np.ndarray) -> np.ndarray:
        """Return the rows of the frames in these samples of a field: (n, num_frames) int64."""
        if self.futures:
            epochs, samples = np.divmod(samples, self.num_samples)
            if name in self.futures:
                return self._future_rows(name, epochs, samples)
        anchors, first, last = self._limits(name, samples)
        return np.clip(anchors[:, None] + self.steps[name], first[:, None], last[:, None])

    def _limits(self, name: str, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a field at the current time steps, and its first and last rows in their episodes."""
        # a field with an extra frame per episode has one more row in front for each episode before this one
        shift = self.extra[name] * self.episodes[samples]
        return (
            self.anchors[samples] + shift,
            self._first[samples] + shift,
            self._last[samples] + shift + self.extra[name],
        )

    def samples_with(self, name: str, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples that may use some of the rows from ``starts`` to ``stops``: the first, and the end."""
        steps, source = self.steps[name], self.source_of(name)
        if name in self.futures or steps[-1] >= source.num_samples:  # a later frame of the episode
            return np.zeros_like(starts), np.full_like(stops, self.num_samples)
        rows = self.anchors + self.extra[name] * self.episodes
        low = np.searchsorted(rows, starts - int(steps[-1]))
        return low, np.maximum(np.searchsorted(rows, stops - int(steps[0])), low)

    def _future_rows(self, name: str, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the row of a random later frame of each sample's episode, or of its last frame: (n, 1) int64."""
        last = self._last[samples] + min(self.extra[each] for each in self.futures)  # at one time step for all fields
        chances = np.empty(len(samples))
        for epoch in np.unique(epochs).tolist():
            own = epochs == epoch
            chances[own] = Draws(self._seed, epoch, samples[own]).uniform(GOAL_STREAM, 1)[0]
        first = np.minimum(self.anchors[samples] + 1, last)
        steps = first + (chances * (last - first + 1)).astype(np.int64)
        return (steps + self.extra[name] * self.episodes[samples])[:, None]

    def distinct_rows(self, name: str, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct rows of all frames of these samples, (m,) int64 and ascending, and a table, int64.

        If a field is dense (`is_dense`), the rows include all rows between the first and the last frame of each window.
        The table is (n, 3). Among the distinct rows, the frames of a window are at the positions ``table[:, 0] +
        steps``, limited to at least ``table[:, 1]`` and at most ``table[:, 2]``. Otherwise, the table is
        (n, num_frames), and has the position of each frame.
        """
        if not self.is_dense(name):
            distinct, positions = np.unique(rows := self.rows_of(name, samples), return_inverse=True)
            return distinct, positions.reshape(rows.shape)
        if not len(samples):
            return np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
        samples = samples % self.num_samples  # without the offsets for epochs
        first, last = self._ends_of(name, samples)
        order = np.argsort(first, kind="stable")
        lows, highs = first[order], np.maximum.accumulate(last[order])
        apart = np.append(True, lows[1:] > highs[:-1] + 1)  # runs of rows that overlapping windows share
        firsts, lasts = lows[apart], highs[np.append(apart[1:], True)]
        ends = np.cumsum(lasts - firsts + 1)
        shifts = firsts - np.append(0, ends[:-1])
        shift = np.empty(len(first), np.int64)
        shift[order] = shifts[np.cumsum(apart) - 1]
        table = np.stack(self._limits(name, samples), axis=1) - shift[:, None]
        return np.arange(ends[-1]) + np.repeat(shifts, lasts - firsts + 1), table

    def is_dense(self, name: str) -> bool:
        """Whether to keep all frames between a window's first and last one.

        This takes less memory if the window uses at least half of them, or if frames are smaller than their positions.
        """
        steps, frame_bytes = self.steps[name], self.source_of(name).fields[name].grid.sample_bytes
        span = max(2, TINY_BYTES // max(1, frame_bytes)) * len(steps)
        return name not in self.futures and bool(steps[-1] - steps[0] + 1 <= span)

    def _ends_of(self, name: str, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the first and the last frame of these samples: (n,) int64 each."""
        steps, (anchors, *limits) = self.steps[name], self._limits(name, samples)
        return np.clip(anchors + steps[0], *limits), np.clip(anchors + steps[-1], *limits)

    def frames_of_chunks(self, name: str, samples: np.ndarray, lanes: int, *, once: bool) -> Callable[[int], int]:
        """Return a function that computes the maximum number of frames of n windows that a loader reads together.

        ``samples``, (m,) int64 and ascending, are the samples that an order uses. If ``once``, an epoch uses each of
        them only once. They are used chunk by chunk, like the rows of a matrix in `h5chunk.plan.csr.entries_of_chunks`,
        which also describes ``lanes``.
        """
        if name in self.futures:
            return int  # one frame per window
        assert self.chunk_starts is not None
        starts = starts_of_runs(np.searchsorted(self.chunk_starts, samples, "right"))
        sizes, (lows, highs) = np.diff(starts), self._ends_of(name, samples)
        spans = highs[starts[1:] - 1] - lows[starts[:-1]] + 1
        extra = np.cumsum(np.append(0, np.sort(np.maximum(0, spans - sizes))[::-1]))
        whole, smallest = np.cumsum(np.append(0, np.sort(spans)[::-1])), np.cumsum(np.sort(sizes))
        steps = self.steps[name]
        width = steps[-1] - steps[0] + 1 if self.is_dense(name) else len(steps)

        def max_frames(num_samples: int) -> int:
            most = min(num_samples * int(width), int(whole[-1]))
            if not once:
                return most
            num_whole = min(int(np.searchsorted(smallest, num_samples, "right")), len(sizes))
            pieces = int(whole[min(4 * lanes + 1, len(sizes))])
            return min(most, num_samples + int(extra[num_whole]) + pieces)

        return max_frames

    def frames_of_pieces(self, name: str, rows: np.ndarray | None) -> Callable[[int], int]:
        """Return a function that computes the maximum number of frames of n consecutive ones of these windows."""
        if name in self.futures:
            return int
        lows, highs = self._ends_of(name, np.arange(self.num_samples) if rows is None else rows)
        steps = self.steps[name]
        width = int(steps[-1] - steps[0]) + 1 if self.is_dense(name) else len(steps)

        def max_frames(num_samples: int) -> int:
            count = max(1, min(num_samples, len(lows)))
            span = int((highs[count - 1 :] - lows[: len(lows) - count + 1]).max(initial=0)) + 1
            return min(span, count * width)

        return max_frames

    def is_padding(self, name: str, samples: np.ndarray) -> np.ndarray:
        """Return which frames of a field are padding, because they are beyond the episode: (n, num_frames) bool."""
        anchors, _, _ = self._limits(name, samples % self.num_samples)
        return self.rows_of(name, samples) != anchors[:, None] + self.steps[name]

    def field_readers(self, opening: Any, names: Collection[str]) -> dict[str, FieldReader]:
        found: dict[str, FieldReader] = {}
        for source in self.sources:
            own = [name for name in names if name in source.fields]
            frames = source.field_readers(opening, own)
            found |= {name: WindowRows(name, self, field) for name, field in frames.items()}
        return found

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprint of the frames, and of the rows of all windows."""
        fingerprint = zlib.crc32(repr((self._numbers, sorted(self.futures), self._seed)).encode())
        for table in (self.anchors, self._first, self._last, *self._constants.values()):
            fingerprint = zlib.crc32(table.tobytes(), fingerprint)
        for source in self.sources:
            fingerprint = zlib.crc32(str(source.fingerprint).encode(), fingerprint)
        return fingerprint

    @property
    def chunk_bytes(self) -> int:
        """Size in bytes of the distinct frames in a chunk of windows."""
        return self.frames.chunk_bytes * self._joined

    def check_unchanged(self, descriptor: Any = None) -> None:
        for source in self.sources:
            source.check_unchanged(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        sources = tuple(copy(source) for source in self.sources)
        return {**super().__getstate__(), "sources": sources, "frames": sources[self.sources.index(self.frames)]}
