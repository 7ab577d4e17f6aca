"""Windows of consecutive frames of episodes as the samples of a data set, as for robot demonstrations and weather."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, OptionError, as_text, check_whole, count_text, names_text, printable
from h5chunk.feed.dataset import ChunkDataset, without_numbers
from h5chunk.plan.permutation import MAX_SEED
from h5chunk.remote.mirror import remote_options
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.encoded import EncodedField
from h5chunk.store.read.fields import Field, Fields, named_paths
from h5chunk.store.read.files import Paths
from h5chunk.store.read.frames import borders_of, episode_names, find_borders, open_frames
from h5chunk.store.read.source import Groups, Source
from h5chunk.store.read.windows import WindowReader
from h5chunk.transforms.frames import FRAME_DECODER, import_decoders

IS_PAD = "_is_pad"
PADDINGS = ("none", "edge")
GOALS = ("last", "future")
MAX_FRAMES = 1 << 26  # limit on the frames of a window
LAST = np.array([1 << 60])  # an offset beyond the end of any episode, which becomes its last frame


class Windows(ChunkDataset):
    """Windows of consecutive frames of an episode as the samples of a `ChunkDataset`.

    ::

        dataset = h5chunk.Windows("demos.h5", {"obs": "data/*/obs", "actions": "data/*/actions"}, length=16)
        for obs, actions in h5chunk.ChunkLoader(dataset, 256):
            ...

    Each window has a current time step: it consists of ``length`` frames from this time step on, and of ``history``
    frames before it, all from one episode. ``dataset[i]`` is a tuple with the frames of window i for each field,
    (frames, ...). `ChunkLoader`, `ChunkSampler` and a DataLoader accept it like any `ChunkDataset`, with the same
    guarantees. A chunk is read and decoded once for all windows that are shuffled together.

    Parameters
    ----------
    path : path or sequence of paths
        As for `ChunkDataset`, but no URLs. An episode never continues in another file.
    fields : sequence or mapping of str
        Datasets with one row per time step; a mapping gives them names. If each episode is a group, ``*`` takes the
        place of its name, as in ``{"actions": "data/*/actions"}``, at the same place for all fields. Episodes are
        sorted by name, with numbers by value. ``sample_number`` is the number of each window, as for `ChunkDataset`.
        Rows that are JPEG or PNG images, stored as arrays of bytes of variable length or padded
        with zeros to one length, are decoded to (H, W, C) uint8, once for all windows that are read together. The
        images of a field must have one size, and be grey (C = 1) or in colour (C = 3). Channels are in the order RGB,
        as Pillow decodes them, although OpenCV decodes them as BGR.
    length : int
        Number of frames from the current time step on, for a field with the largest stride.
    history : int
        Number of frames before the current time step, for a field with the largest stride.
    stride : int, or mapping of str to int
        Number of time steps from one frame to the next, for all fields or by field name. The largest stride must be a
        multiple of the others. A field that is not in the mapping has stride 1.
        With ``{"obs": 5, "actions": 1}`` and a length of 4, a window has 4 observations and all 20 actions.
    padding : {"none", "edge"}
        "none": all frames of a window are inside its episode. "edge": every time step is the current one of a window,
        and frames outside of the episode repeat its first or last frame. For each field NAME, "edge" adds the field
        ``NAME_is_pad``, (frames,) bool, which marks the repeated frames.
    goal : {"last", "future"}, or mapping of str to these, optional
        Add the field ``NAME_goal``, (1, ...), for each field NAME, or for those in the mapping. "last": the last frame
        of the episode. "future": a frame drawn uniformly from those after the current time step, or the last frame if
        none follows. It is drawn anew in each epoch, at the same time step for all fields, and depends only on
        (seed, epoch, i) for window i. Without a sampler, torch's random generator draws an epoch for each window that
        is read, so that ``dataset[i]`` has another goal each time.
    episode_lengths, episode_offsets : str, optional
        A dataset with the number of time steps of each episode, such as ``ep_len``, or with the first row of each
        episode, such as ``ep_offset``. Default: each file, or each group that matches ``*``, is an episode.
    seed : int
        Random seed for ``goal="future"``.
    transform, trusted, checksums, cache_dir, cache_bytes, storage_options
        As for `ChunkDataset`.

    Raises
    ------
    FieldError
        A field is missing in an episode, or the fields of an episode differ in length.
    OptionError
        An argument is invalid, or no episode is long enough for a window.
    """

    def __init__(
        self,
        path: Paths,
        fields: Fields,
        length: int,
        *,
        history: int = 0,
        stride: int | Mapping[str, int] = 1,
        padding: str = "none",
        goal: str | Mapping[str, str] | None = None,
        episode_lengths: str | None = None,
        episode_offsets: str | None = None,
        seed: int = 0,
        transform: Any = None,
        trusted: bool = False,
        checksums: str = OFF,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        named = named_paths(fields)
        fields = without_numbers(named)[0]
        if padding not in PADDINGS:
            raise OptionError(f"padding is {padding!r}: pass 'none' or 'edge'")
        seed = check_whole("seed", seed, 0, MAX_SEED)
        goals, kinds = _goals(fields, goal)
        futures = [name for name in goals if kinds[goals[name]] == "future"]
        masks = {f"{name}{IS_PAD}": name for name in fields if padding == "edge"}
        if taken := [name for name in named if name in masks or name in goals]:
            raise OptionError(f"fields has {taken[0]!r}, which is also the name of a padding mask or goal: rename it")
        tables = {"lengths": episode_lengths, "offsets": episode_offsets}
        given = {kind: dataset for kind, dataset in tables.items() if dataset is not None}
        if len(given) > 1:
            raise OptionError("episode_lengths and episode_offsets exclude each other: pass one of them")
        if given and any("*" in dataset for dataset in fields.values()):
            raise OptionError(f"episode_{min(given)} is given, but * makes each group an episode: use one of the two")
        steps = _steps(fields, length, history, stride)
        datasets = {**fields, **{name: fields[of] for name, of in goals.items()}}
        remote = remote_options(cache_dir, cache_bytes, storage_options)
        frames = open_frames(path, datasets, FRAME_DECODER, trusted, checksums, remote)
        for name, field in frames.fields.items():
            if not isinstance(field, Field):
                raise FieldError(
                    f"{printable(frames.path)}: the rows of {name!r} differ in shape and are not JPEG or PNG images: "
                    "leave it out, because frames need one shape"
                )
            if isinstance(field, EncodedField):
                import_decoders()
        borders = borders_of(frames)
        for kind, dataset in given.items():
            borders = find_borders(frames, kind, dataset, trusted)
        names = [*map(str, range(len(borders) - 1))] if given else episode_names(frames)
        anchors = _anchors(frames, borders, steps, padding)
        steps |= dict.fromkeys(goals, LAST)
        source = WindowReader(frames, anchors, borders, names, steps, futures=futures, masks=masks, seed=seed)
        super().__init__(source, fields=named, transform=transform)

    @property
    def episodes(self) -> np.ndarray:
        """The number of the episode of each window: (n,) int64, ascending."""
        return self._groups.numbers[self.samples]

    @property
    def _groups(self) -> Groups:
        assert self._reader.groups is not None
        return self._reader.groups

    @property
    def episode_names(self) -> np.ndarray:
        """The name of the episode of each window, (n,) of str: the name of its group or file, or else its number."""
        return self.source_names

    def of_episodes(self, names: Sequence[str | bytes]) -> ChunkDataset:
        """Return the windows of the episodes with these names, such as those in ``mask/train`` of robomimic.

        Parameters
        ----------
        names : sequence or array of str or bytes
            See `episode_names`. Files may have episodes of equal names, all of which are selected.

        Raises
        ------
        OptionError
            No episode has one of the names, or none of the named episodes has windows.
        """
        if isinstance(names, str | bytes) or not isinstance(names, Iterable):
            raise OptionError(f"names is {names!r}: pass a list of names")
        wanted = {as_text(name) if isinstance(name, bytes) else str(name) for name in names}
        if unknown := sorted(wanted - {*self._groups.names}):
            first = ", ".join(self._groups.names[:8])
            raise OptionError(f"names has {unknown[0]!r}, which is no episode: the first episodes are named {first}")
        numbers = [number for number, name in enumerate(self._groups.names) if name in wanted]
        if not (chosen := np.isin(self.episodes, numbers)).any():
            raise OptionError("none of the episodes has windows: select longer ones, or pass padding='edge' to Windows")
        return self.subset(chosen)


def _goals(
    fields: Mapping[str, str], goal: str | Mapping[str, str] | None
) -> tuple[dict[str, str], Mapping[str, str | None]]:
    """Return the field from which each goal field is read, by name, and the kind of goal of each field that has one."""
    kinds = goal if isinstance(goal, Mapping) else dict.fromkeys(fields if goal is not None else (), goal)
    for name, kind in kinds.items():
        if name not in fields:
            raise OptionError(f"goal has {name!r}, which is not among the fields: {names_text(fields)}")
        if kind not in GOALS:
            raise OptionError(f"goal is {kind!r}: pass 'last' or 'future', or leave it out")
    return {f"{name}_goal": name for name in kinds}, kinds


def _steps(
    fields: Mapping[str, str], length: int, history: int, stride: int | Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Return the offsets of each field's frames from the current time step of a window: (num_frames,) int64."""
    length, history = check_whole("length", length, 1, 1 << 30), check_whole("history", history, 0, 1 << 30)
    strides = {name: stride[name] if isinstance(stride, Mapping) and name in stride else 1 for name in fields}
    if not isinstance(stride, Mapping):
        strides = dict.fromkeys(fields, stride)
    elif unknown := [name for name in stride if name not in fields]:
        raise OptionError(f"stride has {unknown[0]!r}, which is not among the fields: {names_text(fields)}")
    for name, step in strides.items():
        check_whole(f"stride of {name!r}", step, 1, 1 << 30)
    largest = max(strides.values())
    for name, step in strides.items():
        if largest % step:
            raise OptionError(f"stride of {name!r} is {step}: pass a divisor of the largest stride, {largest}")
    num_frames = (history + length) * (largest // min(strides.values()))
    if num_frames > MAX_FRAMES:
        raise OptionError(
            f"a window would have {num_frames} frames, but the limit is {MAX_FRAMES}: reduce length or history"
        )
    return {name: np.arange(-history * largest, length * largest, step) for name, step in strides.items()}


def _anchors(frames: Source, borders: np.ndarray, steps: Mapping[str, np.ndarray], padding: str) -> np.ndarray:
    """Return the row of the current time step of each window: (n,) int64, ascending."""
    first, last = min(each[0] for each in steps.values()), max(each[-1] for each in steps.values())
    rows = np.arange(frames.num_samples)
    if padding == "none":
        episode = np.searchsorted(borders, rows, "right") - 1
        rows = rows[(rows + first >= borders[episode]) & (rows + last < borders[episode + 1])]
        num_short = int((np.diff(borders) < last - first + 1).sum())
        if len(rows) and num_short:
            warnings.warn(
                f"{printable(frames.path)}: {num_short} of {count_text(len(borders) - 1, 'episode')} skipped, because "
                f"a window needs {last - first + 1} time steps: pass padding='edge' to use short episodes",
                stacklevel=3,
            )
    if not len(rows):
        longest = int(np.diff(borders).max(initial=0))
        raise OptionError(
            f"{printable(frames.path)}: a window needs {last - first + 1} time steps, but the longest episode has "
            f"{longest}: reduce length, history or stride, or use padding='edge'"
        )
    return rows
