"""Open the frames of all episodes as one reader. An episode is a group, a file, or a range of rows of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from h5chunk.errors import FieldError, printable, shown
from h5chunk.remote.mirror import NO_OPTIONS, RemoteOptions
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.patterns import parse
from h5chunk.store.read.episodes import EpisodeFile, open_episodes
from h5chunk.store.read.fields import FrameDataset, FrameDecoder
from h5chunk.store.read.files import Paths, check_shards, list_local_files, open_reader
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.several import find_offsets
from h5chunk.store.read.source import Source


def open_frames(
    path: Paths,
    fields: Mapping[str, str],
    decoder: FrameDecoder,
    trusted: bool,
    checksums: str,
    remote: RemoteOptions = NO_OPTIONS,
) -> Source:
    """Open the frames of all episodes as the rows of one reader. JPEG and PNG images are decoded by ``decoder``.

    If the paths in ``fields`` have ``*``, each text that they match is an episode. Raises OptionError if a name has
    several ``*``, if some paths have more of them than others, and for URLs.
    """
    patterns = parse("fields", fields)
    files = list_local_files(path, remote, "Windows")
    if all("*" not in dataset for dataset in fields.values()):
        datasets = {name: FrameDataset(dataset, decoder) for name, dataset in fields.items()}
        return open_reader(path, datasets, trusted=trusted, checksums=checksums)
    check_shards(path)

    reached = [files[0]]

    def open_all(say: Callable[[Path], None]) -> list[EpisodeFile]:
        episodes = []
        for file in files:
            say(file)
            with limited_memory(file, trusted):
                episodes.append(open_episodes(file, patterns, decoder, trusted, checksums))
                find_offsets(episodes[-1])
        return episodes

    readers = (
        open_all(reached.append) if trusted else in_child(open_all, lambda: printable(reached[-1]), reached.append)
    )
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return readers[0] if len(readers) == 1 else FileSet(readers, Path(f"{shown(files[0])}{more}"))


def episode_names(frames: Source) -> list[str]:
    """Return the name of each episode: the names in its path that have a ``*``, or else the name of its file."""
    return [
        name for each in frames.readers for name in (each.names if isinstance(each, EpisodeFile) else [each.path.name])
    ]


def borders_of(frames: Source) -> np.ndarray:
    """Return the first row of each episode, and finally the number of rows: (num_episodes + 1,) int64."""
    starts = zip(frames.starts.tolist(), frames.readers, strict=False)
    own = [start + (each.episodes if isinstance(each, EpisodeFile) else each).starts[:-1] for start, each in starts]
    return np.concatenate([*own, frames.starts[-1:]])


def find_borders(frames: Source, kind: str, dataset: str, trusted: bool) -> np.ndarray:
    """Read the borders of episodes, in the form that `borders_of` returns, from a dataset in each file.

    The dataset has the lengths of episodes if ``kind`` is "lengths", and their first rows if it is "offsets".
    """
    found = [np.zeros(1, np.int64)]
    for number, reader in enumerate(frames.readers):
        start, stop = frames.starts[number : number + 2].tolist()
        found.append(start + _ends_of_episodes(reader, stop - start, kind, dataset, trusted))
    return np.concatenate(found)


def _ends_of_episodes(reader: Source, num_rows: int, kind: str, dataset: str, trusted: bool) -> np.ndarray:
    """Return the end of each episode of a file, which is the row after its last row: (num_episodes,) int64."""
    table, where = open_reader(reader.path, {kind: dataset}, trusted=trusted), printable(reader.path)
    field = table.fields[kind]
    if field.dtype.kind not in "iu" or field.sample_shape or table.num_samples > num_rows:
        content, remedy = "length" if kind == "lengths" else "first row", ""
        if field.dtype.kind == "b" and not field.sample_shape:
            remedy = f"; if it marks the last row of each episode, {lengths_remedy([dataset], num_rows)}"
        raise FieldError(
            f"{where}: {dataset!r} must have one axis of at most {num_rows} integers, the {content} of each episode"
            f"{remedy}"
        )
    numbers = np.empty(table.num_samples, field.dtype)
    table.read(kind, np.arange(len(numbers)), numbers)
    if kind == "offsets":
        firsts = [*numbers.tolist(), num_rows]
        if firsts[0] != 0 or any(after < first for first, after in pairwise(firsts)):
            raise FieldError(
                f"{where}: the first rows of episodes in {dataset!r} must start with 0, not decrease, and be at most "
                f"{num_rows}, the number of rows of the fields"
            )
        return np.array(firsts[1:], np.int64)
    if (numbers < 0).any():
        raise FieldError(f"{where}: {dataset!r} has the negative length {numbers.min()}: pass the lengths of episodes")
    if sum(numbers.tolist()) != num_rows:
        raise FieldError(
            f"{where}: the lengths of episodes in {dataset!r} add up to {sum(numbers.tolist())}, but the fields have "
            f"{num_rows} rows"
        )
    return np.cumsum(numbers.astype(np.int64))


def lengths_remedy(datasets: Sequence[str], num_rows: int) -> str:
    """Say how to store the lengths of episodes whose last rows are marked by datasets, each by at least one of them."""
    marks = " | ".join(f"(file[{name!r}][:] != 0)" for name in datasets)
    ends = f"np.union1d(np.flatnonzero({marks}) + 1, [{num_rows}])"
    return f"store their lengths, such as file['lengths'] = np.diff({ends}, prepend=0)"
