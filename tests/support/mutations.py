"""Damage copies of good files, as a rotten disk or somebody who means harm would."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from support.good_files import GoodFile
from support.hdf5_blocks import blocks, seal

NEAR = 8  # metadata this close to a byte that is not zero counts
DATA_SHARE = 0.1  # of the mutations are of values
BLOCK_SHARE = 0.4  # are in the first bytes of a checksummed block
BLOCK_BYTES = 64
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)

Mutate = Callable[[bytearray, int, np.random.Generator, list[GoodFile]], None]


class Targets(NamedTuple):
    """Where the metadata of a file are, and the blocks of it that have checksums: (n,) int64 each."""

    metadata: np.ndarray
    blocks: np.ndarray


class Mutated(NamedTuple):
    """A damaged copy, how it was damaged, and whether HDF5's own checksums were made to fit again."""

    data: bytes
    what: str
    sealed: bool


def targets_of(good: GoodFile) -> Targets:
    """Find the metadata of a file, without what lies in the midst of zeros."""
    data = np.frombuffer(good.data, np.uint8)
    near = np.convolve(data != 0, np.ones(2 * NEAR + 1), "same") > 0
    return Targets(np.flatnonzero(near & ~good.is_data), np.array([each.start for each in blocks(good.data)], np.int64))


def mutated(number: int, seed: int, goods: list[GoodFile], targets: list[Targets], sealed: float) -> Mutated:
    """Make the damaged copy of a number; a share of ``sealed`` of the copies gets fitting checksums."""
    rng = np.random.default_rng([seed, number])
    which = number % len(goods)
    data = bytearray(goods[which].data)
    names = []
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        name = str(rng.choice(list(MUTATIONS), p=WEIGHTS))
        at = min(_place(len(goods[which].data), targets[which], rng), max(0, len(data) - 1))
        MUTATIONS[name](data, at, rng, goods)
        names.append(f"{name} at {at}")
    is_sealed = rng.random() < sealed and seal(data) > 0
    names += ["new checksums"] * is_sealed
    return Mutated(bytes(data), ", ".join(names), is_sealed)


def _place(num_bytes: int, targets: Targets, rng: np.random.Generator) -> int:
    kind = rng.random()
    if kind < DATA_SHARE:
        return int(rng.integers(num_bytes))
    if kind < DATA_SHARE + BLOCK_SHARE and len(targets.blocks):
        return int(rng.choice(targets.blocks) + rng.integers(BLOCK_BYTES))
    return int(rng.choice(targets.metadata))


def flip(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
    if data:
        data[at] ^= 1 << int(rng.integers(8))


def byte(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
    if data:
        data[at] = int(rng.integers(256))


def number(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
    """An odd number of 1 to 8 bytes, at a place where numbers are."""
    size = int(rng.choice([1, 2, 4, 8]))
    at -= at % size if rng.random() < 0.5 else 0
    value = int(rng.choice(np.array(NUMBERS, object)))
    if rng.random() < 0.3:
        value = len(data) + int(rng.integers(-16, 16))
    put = struct.pack("<Q", value % (1 << 64))[:size]
    data[at : at + len(put)] = put[: max(0, len(data) - at)]


def zeros(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
    stop = min(len(data), at + int(rng.integers(1, 64)))
    data[at:stop] = bytes(stop - at)


def splice(data: bytearray, at: int, rng: np.random.Generator, goods: list[GoodFile]) -> None:
    """Bytes of this or another file in the place of some."""
    other = goods[int(rng.integers(len(goods)))].data if rng.random() < 0.5 else bytes(data)
    size = min(int(rng.choice([8, 16, 64, 512])), len(data) - at)
    start = int(rng.integers(max(1, len(other) - size)))
    data[at : at + size] = other[start : start + size]


def cut(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
    del data[int(rng.integers(len(data) + 1)) :]


def shift(data: bytearray, at: int, rng: np.random.Generator, _: list[GoodFile]) -> None:
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
WEIGHTS = (0.3, 0.15, 0.3, 0.1, 0.12, 0.01, 0.02)  # a file that was cut, or is shifted, is refused at the first look
