"""Damaged copies of good files, each opened by info, verify and both readers in a child with limits.

What must not be: a crash, a hang, memory out of proportion, an error that is not one of ours, and wrong values that
were read although the file has checksums and they were asked for. In a part of the files HDF5's own checksums of its
metadata are made anew, as who means harm would do: else most of newer files is never looked at. Nobody can say then
that values are wrong, but the rest holds.
"""

from __future__ import annotations

import mmap
import re
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torture_files import PLUGINS, Good, make_good
from torture_result import Outcome, Result, in_children
from torture_seal import reseal

import h5chunk
from h5chunk.errors import H5ChunkError

PEAK_BYTES = 400 << 20
MAX_SAMPLES = 128  # that are read, should a damaged file claim more than it had
NEAR = 8  # metadata this close to a byte that is not zero counts
DATA_SHARE = 0.2  # of the mutations are of values
SEALED_SHARE = 0.3  # of the files have new checksums
BATCH = 7
NOT_OURS = "not our errors"
NO_MEMORY = re.compile("nable to allocate|memory allocation failed|can't allocate|MemoryError|more memory than")
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)

STEP = mmap.mmap(-1, 64)  # what a child is at, for its parent
Mutate = Callable[[bytearray, int, np.random.Generator, list[Good]], None]


def run(count: int, seed: int, folder: Path, first: int = 0) -> Result:
    """So many mutated files, in turn of each good one; number i is the same whatever the count."""
    torch.set_num_threads(1)
    goods = make_good(folder)
    places = [metadata_of(good) for good in goods]
    result = Result("mutated files")
    path = folder / "mutated.h5"

    def work(number: int) -> dict[str, str]:
        good = goods[number % len(goods)]
        path.write_bytes(mutated(number, seed, goods, places).data)
        return look(path, good)

    plugins = {number for number, good in enumerate(goods) if good.name in PLUGINS}
    for number, outcome in in_children(work, range(first, first + count)):
        good = goods[number % len(goods)]
        made = mutated(number, seed, goods, places)
        what = f"mutation {number} of {good.name!r} ({made.what})"
        step = STEP[:].rstrip(b"\0").decode()
        if number % len(goods) in plugins and outcome.ended and step.startswith("h5py"):
            result.add("crashes in filters of hdf5plugin, which h5py's reader leaves to HDF5")
            result.notes.append(f"{what}: {outcome.ended} in {step}")
            result.cases += 1
            continue
        judge(result, f"{what} ({step})" if outcome.ended else what, made.has_checksums, outcome)
    if result.seconds:
        result.counts["files/s"] = round(count / result.seconds)
    return result


def metadata_of(good: Good) -> np.ndarray:
    """Places of the bytes of a file that are metadata, and not in the midst of zeros: (n,) int64."""
    data = np.frombuffer(good.data, np.uint8)
    near = np.convolve(data != 0, np.ones(2 * NEAR + 1), "same") > 0
    return np.flatnonzero(near & ~good.is_data)


class Mutated(NamedTuple):
    """A damaged copy, what was done to it, and whether checksums tell what its values were."""

    data: bytes
    what: str
    has_checksums: bool


def mutated(number: int, seed: int, goods: list[Good], places: list[np.ndarray]) -> Mutated:
    """The damaged copy of a number."""
    rng = np.random.default_rng([seed, number])
    which = number % len(goods)
    good, metadata = goods[which], places[which]
    data = bytearray(good.data)
    names = []
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        name = str(rng.choice(list(MUTATIONS), p=WEIGHTS))
        anywhere = rng.random() < DATA_SHARE
        at = int(rng.integers(len(good.data)) if anywhere else rng.choice(metadata))
        MUTATIONS[name](data, min(at, max(0, len(data) - 1)), rng, goods)
        names.append(f"{name} at {at}")
    sealed = rng.random() < SEALED_SHARE and reseal(data) > 0
    names += ["new checksums"] * sealed
    return Mutated(bytes(data), ", ".join(names), good.has_checksums and not sealed)


def flip(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    if data:
        data[at] ^= 1 << int(rng.integers(8))


def byte(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    if data:
        data[at] = int(rng.integers(256))


def number(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    """An odd number of 1 to 8 bytes, at a place where numbers are."""
    size = int(rng.choice([1, 2, 4, 8]))
    at -= at % size if rng.random() < 0.5 else 0
    value = int(rng.choice(np.array(NUMBERS, object)))
    if rng.random() < 0.3:
        value = len(data) + int(rng.integers(-16, 16))
    put = struct.pack("<Q", value % (1 << 64))[:size]
    data[at : at + len(put)] = put[: max(0, len(data) - at)]


def zeros(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    stop = min(len(data), at + int(rng.integers(1, 64)))
    data[at:stop] = bytes(stop - at)


def splice(data: bytearray, at: int, rng: np.random.Generator, goods: list[Good]) -> None:
    """Bytes of this or another file in the place of some."""
    other = goods[int(rng.integers(len(goods)))].data if rng.random() < 0.5 else bytes(data)
    size = min(int(rng.choice([8, 16, 64, 512])), len(data) - at)
    start = int(rng.integers(max(1, len(other) - size)))
    data[at : at + size] = other[start : start + size]


def cut(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    del data[int(rng.integers(len(data) + 1)) :]


def shift(data: bytearray, at: int, rng: np.random.Generator, _: list[Good]) -> None:
    """Some bytes are lost, or come twice."""
    size = int(rng.integers(1, 32))
    data[at : at + size] = b"" if rng.random() < 0.5 else data[at : at + size] * 2


MUTATIONS: dict[str, Mutate] = {
    "flip": flip,
    "byte": byte,
    "number": number,
    "zeros": zeros,
    "splice": splice,
    "cut": cut,
    "shift": shift,
}
WEIGHTS = (0.3, 0.15, 0.25, 0.1, 0.1, 0.05, 0.05)


def look(path: Path, good: Good) -> dict[str, str]:
    """What each part of h5chunk says of a file: "same", "other", "whole", "damaged", or "error: message"."""
    steps: dict[str, Callable[[], str]] = {
        "info": lambda: str(h5chunk.info(path)) and "read",
        "verify": lambda: "whole" if h5chunk.verify(path).ok else "damaged",
        **{name: partial(_read, read, path, good) for name, read in READERS.items()},
    }
    said = {}
    for name, step in steps.items():
        STEP[:] = name.encode().ljust(len(STEP), b"\0")
        said[name] = _said(step)
    return said


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except H5ChunkError as error:
        return f"error: {error}"
    except Exception:
        return NOT_OURS + ": " + " < ".join(line.strip() for line in traceback.format_exc().splitlines()[:-9:-1])


def through_hdf5(path: Path, **options: Any) -> list[np.ndarray]:
    """All samples by a ChunkDataset."""
    dataset = h5chunk.ChunkDataset(path, **options)
    return [np.asarray(field) for field in dataset[list(range(min(len(dataset), MAX_SAMPLES)))]]


def by_ranges(path: Path, **options: Any) -> list[np.ndarray]:
    """All samples by a ChunkLoader."""
    with h5chunk.ChunkLoader(path, BATCH, shuffle=False, num_threads=2, reader="direct", **options) as loader:
        batches = [batch for batch, _ in zip(loader, range(MAX_SAMPLES // BATCH), strict=False)]
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


READERS: dict[str, Callable[[Path], list[np.ndarray]]] = {
    "h5py": through_hdf5,
    "direct": by_ranges,
    "h5py, checked": partial(through_hdf5, checksums="always"),
    "direct, checked": partial(by_ranges, checksums="always"),
}


def _read(read: Callable[[Path], list[np.ndarray]], path: Path, good: Good) -> str:
    found = read(path)
    same = len(found) == len(good.expected) and all(
        one.dtype == two.dtype and np.array_equal(one, two) for one, two in zip(found, good.expected, strict=True)
    )
    return "same" if same else "other"


def judge(result: Result, what: str, ours: bool, outcome: Outcome) -> None:
    """Count what was seen, and note what must not be."""
    result.cases += 1
    for name in ("crashes", "hangs", NOT_OURS, "over 400 MiB", "wrong though checked"):
        result.add(name, 0)
    if outcome.ended == "raised":
        _bad(result, NOT_OURS, f"{what}: {outcome.value}")
        return
    if outcome.ended:
        kind = "hangs" if outcome.ended in ("timeout", "SIGXCPU") else "crashes"
        _bad(result, kind, f"{what}: {outcome.ended}")
        return
    said: dict[str, str] = outcome.value
    for name, text in said.items():
        if text.startswith(NOT_OURS):
            _bad(result, NOT_OURS, f"{what}: {name}: {text}")
    texts = " ".join(said.values())
    if NO_MEMORY.search(texts):
        result.add("asked for more than 2 GiB, in vain")
    if outcome.peak_bytes > PEAK_BYTES:
        _bad(result, "over 400 MiB", f"{what}: {outcome.peak_bytes >> 20} MiB: {said}")
    others = [name for name, word in said.items() if word == "other"]
    checked = [name for name in others if name.endswith("checked")]
    if checked and ours:
        _bad(result, "wrong though checked", f"{what}: {said}")
    if others:
        verdict = said["verify"].split(":")[0]
        result.add(f"wrong values, {'with' if ours else 'without'} checksums, verify says {verdict}")
        if ours and said["verify"] == "whole":
            _bad(result, "wrong and verify says whole", f"{what}: {said}")
    kinds = Counter(word.split(":")[0] for word in said.values())
    result.add("refused by all" if kinds["error"] == len(said) else "read as if whole" if not others else "read wrong")


def _bad(result: Result, kind: str, what: str) -> None:
    result.add(kind)
    result.bad.append(f"{kind}: {what}")
