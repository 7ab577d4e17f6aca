"""Windows of consecutive frames of episodes as the samples of a data set, as for robot demonstrations and weather."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, OptionError, as_text, check_whole, count_text, names_text, printable
from h5chunk.feed.dataset import ChunkDataset, without_numbers
from h5chunk.feed.skipping import MAX_SKIPPED, RAISE
from h5chunk.plan.episodes import anchors_inside, needed_steps
from h5chunk.plan.permutation import MAX_SEED
from h5chunk.remote.mirror import remote_options
from h5chunk.sources.frame_decoder import FRAME_DECODER, import_decoders
from h5chunk.store.hdf5.packing import check_decode
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.encoded import EncodedField
from h5chunk.store.read.episodes import ENDS, Table, open_frames
from h5chunk.store.read.fields import Field, Fields, attribute_defaults, named_paths
from h5chunk.store.read.files import Paths
from h5chunk.store.read.source import Groups
from h5chunk.store.read.windows import Episodes, WindowReader
from h5chunk.transforms.compile import Transforms

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
    path : path, sequence of paths, or mapping of str to these
        As for `ChunkDataset`. An episode never continues in another file. A mapping, such as ``{"obs": "obs.h5",
        "actions": "actions.h5"}``, is for fields without ``*``, and excludes ``constants`` and ``attributes``.
    fields : sequence or mapping of str
        Datasets with one row per time step; a mapping gives them names. If each episode is a group, ``*`` takes the
        place of its name, as in ``{"actions": "data/*/actions"}``. Other names of a path may have a ``*``, too, also
        for a part of the name: ``*/demo_*/actions``. Episodes are sorted by these names, with numbers by value.
        ``sample_number`` is the number of each window, as for `ChunkDataset`. Some fields may have one frame more than
        the others at the end of every episode, such as a last observation: windows end with the other fields, and
        ``shift`` and ``goal`` use the last frame. Rows that are JPEG or PNG images, stored as arrays of bytes of
        variable length or padded with zeros to one length, are decoded to (H, W, C) uint8, once for all windows that
        are read together. The images of a field must have one size, and be grey (C = 1) or in colour (C = 3). Channels
        are in the order RGB, as Pillow decodes them, although OpenCV decodes them as BGR.
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
    shift : mapping of str to int, optional
        Number of time steps by which a field's frames are later than those of other fields, by field name. For
        transitions (s, a, r, s'), read the observations twice, and shift the second ones: ``{"obs": "*/observations",
        "action": "*/actions", "reward": "*/rewards", "next": "*/observations"}`` with ``length=1, shift={"next": 1}``.
    goal : {"last", "future"}, or mapping of str to these, optional
        Add the field ``NAME_goal``, (1, ...), for each field NAME, or for those in the mapping. "last": the last frame
        of the episode. "future": a frame drawn uniformly from those after the current time step, or the last frame if
        none follows. It is drawn anew in each epoch, at the same time step for all fields, and depends only on
        (seed, epoch, i) for window i. Without a sampler, torch's random generator draws an epoch for each window that
        is read, so that ``dataset[i]`` has another goal each time.
    episode_lengths, episode_offsets, episode_ends : str or array, optional
        Where episodes are in the rows of a file: a dataset with the number of time steps of each episode, such as
        ``ep_len``; with the first row of each episode, such as ``ep_offset``; or with the row after its last one.
        ``episode_offsets`` and ``episode_ends`` may also have a boolean (or 0 and 1) for each row, which is true in the
        first or last row of an episode, such as ``terminals``. ``episode_ends`` may be a list of several such
        datasets, each of which ends an episode: ``["terminals", "timeouts"]``; the rows after the last end are an
        episode. An array has the values of all files together. Default: each file, or each match of ``*``, is an
        episode.
    constants : sequence of str, optional
        Names of fields that have one value per episode, which is repeated for each of its windows without an axis of
        frames: with ``*``, or a file per episode, the whole dataset, such as a language embedding; otherwise row i of
        the dataset is the value of episode i. If the path has fewer ``*`` than those of other fields, episodes whose
        first names are equal share a value. Datasets without axes, such as a task's number or instruction, are always
        constants. They are kept in memory. Strings are returned as ``str``.
    attributes : sequence of str, or mapping of str, optional
        HDF5 attributes of each episode's group (or file, if each is an episode), which become fields like constants. A
        mapping such as ``{"total_steps": None, "seed": -1}`` has the default for episodes that lack the attribute; None
        means that no episode may lack it.
    seed : int
        Random seed for ``goal="future"``.
    transforms, as_dict, on_error, max_skipped, trusted, checksums, decode, cache_dir, cache_bytes, storage_options
        As for `ChunkDataset`.

    Raises
    ------
    FieldError
        A field is missing in an episode, or the fields of an episode differ in length by more than a last frame.
    OptionError
        An argument is invalid, or no episode is long enough for a window.
    """

    def __init__(
        self,
        path: Paths | Mapping[str, Paths],
        fields: Fields,
        length: int,
        *,
        history: int = 0,
        stride: int | Mapping[str, int] = 1,
        padding: str = "none",
        shift: Mapping[str, int] = MappingProxyType({}),
        goal: str | Mapping[str, str] | None = None,
        episode_lengths: Table | None = None,
        episode_offsets: Table | None = None,
        episode_ends: Table | Sequence[Table] | None = None,
        constants: Sequence[str] = (),
        attributes: Sequence[str] | Mapping[str, Any] = (),
        seed: int = 0,
        transforms: Transforms | None = None,
        as_dict: bool = False,
        on_error: str = RAISE,
        max_skipped: float = MAX_SKIPPED,
        trusted: bool = False,
        checksums: str = OFF,
        decode: str | None = None,
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
        tables = _tables(fields, lengths=episode_lengths, offsets=episode_offsets, ends=episode_ends)
        defaults = attribute_defaults(attributes)
        if defaults and tables:
            raise OptionError(
                f"attributes is {attributes!r}, but episodes are ranges of rows, which have none: store the values in "
                "a dataset with one row per episode, and name it in fields and constants"
            )
        if isinstance(constants, str) or any(name not in fields for name in constants):
            raise OptionError(f"constants is {constants!r}: pass a list of names of fields, of {names_text(fields)}")
        timed = {name: path for name, path in fields.items() if name not in constants}
        if not timed:
            raise OptionError("constants has all fields: leave out those with a row per time step")
        steps = _steps(timed, length, history, stride, shift)
        episodes = open_frames(
            path,
            {**fields, **{name: fields[of] for name, of in goals.items() if of in timed}},
            FRAME_DECODER,
            trusted,
            checksums,
            remote_options(cache_dir, cache_bytes, storage_options),
            tables=tables,
            constants=constants,
            attributes=defaults,
            decode=check_decode(decode),
        )
        goals = {name: of for name, of in goals.items() if of not in episodes.constants}
        episodes = episodes._replace(
            constants={of: episodes.constants[of] for of in (*fields, *defaults) if of in episodes.constants}
        )
        steps = {name: each for name, each in steps.items() if name not in episodes.constants}
        masks = {f"{name}{IS_PAD}": name for name in steps if padding == "edge"}
        if taken := [name for name in (*named, *defaults) if name in masks or name in goals]:
            raise OptionError(f"fields has {taken[0]!r}, which is also the name of a padding mask or goal: rename it")
        if taken := [name for name in defaults if name in named]:
            raise OptionError(f"attributes has {taken[0]!r}, which is also the name of a field: rename the field")
        for source in episodes.sources:
            for name, field in source.fields.items():
                if not isinstance(field, Field):
                    raise FieldError(
                        f"{printable(source.path)}: the rows of {name!r} differ in shape and are not JPEG or PNG "
                        "images: leave it out, because frames need one shape"
                    )
                if isinstance(field, EncodedField):
                    import_decoders()
        anchors = _anchors(episodes, steps, padding)
        steps |= dict.fromkeys(goals, LAST)
        futures = [name for name in goals if kinds[goals[name]] == "future"]
        source = WindowReader(episodes, anchors, steps, futures=futures, masks=masks, seed=seed)
        how: dict[str, Any] = {"decode": decode, "on_error": on_error, "max_skipped": max_skipped}
        super().__init__(source, fields=named, transforms=transforms, as_dict=as_dict, **how)

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
    fields: Mapping[str, str], length: int, history: int, stride: int | Mapping[str, int], shift: Mapping[str, int]
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
    if not isinstance(shift, Mapping) or any(name not in fields for name in shift):
        raise OptionError(f"shift is {shift!r}: pass a mapping from fields to time steps, of {names_text(fields)}")
    shifts = {name: check_whole(f"shift of {name!r}", by, -(1 << 30), 1 << 30) for name, by in shift.items()}
    return {
        name: np.arange(-history * largest, length * largest, step) + shifts.get(name, 0)
        for name, step in strides.items()
    }


def _tables(fields: Mapping[str, str], **given: Any) -> dict[str, Sequence[Table]]:
    """Return the tables of episodes by their kind. At most one kind may be given."""
    found: dict[str, Sequence[Table]] = {}
    for kind, tables in given.items():
        if tables is None:
            continue
        is_list = isinstance(tables, list | tuple) and any(isinstance(each, str | np.ndarray) for each in tables)
        listed = list(tables) if is_list and kind == ENDS else [tables]
        found[kind] = [each if isinstance(each, str) else np.asarray(each) for each in listed]
        if not listed or any(not isinstance(each, str) and each.dtype.kind not in "biuf" for each in found[kind]):
            raise OptionError(f"episode_{kind} is {tables!r}: pass a dataset, or an array of numbers or booleans")
        if kind == "lengths" and isinstance(tables, np.ndarray) and tables.dtype.kind == "b":
            found = {ENDS: found[kind]}
    if len(found) > 1:
        names = " and ".join(f"episode_{kind}" for kind in found)
        raise OptionError(f"{names} exclude each other: pass one of them")
    if found and any("*" in dataset for dataset in fields.values()):
        raise OptionError(f"episode_{min(found)} is given, but * makes each group an episode: use one of the two")
    return found


def _anchors(episodes: Episodes, steps: Mapping[str, np.ndarray], padding: str) -> np.ndarray:
    """Return the current time step of each window: (n,) int64, ascending."""
    before, after = (0, 0) if padding == "edge" else needed_steps(steps, episodes.extra)
    anchors, lengths = anchors_inside(episodes.borders, before, after), np.diff(episodes.borders)
    needed, where = before + after + 1, printable(episodes.sources[0].path)
    if not len(anchors):
        raise OptionError(
            f"{where}: a window needs {needed} time steps, but the longest episode has "
            f"{int(lengths.max(initial=0))}: reduce length, history or stride, or use padding='edge'"
        )
    if padding == "none" and (num_short := int((lengths < needed).sum())):
        warnings.warn(
            f"{where}: {num_short} of {count_text(len(lengths), 'episode')} skipped, because a window needs {needed} "
            "time steps: pass padding='edge' to use short episodes",
            stacklevel=3,
        )
    return anchors
