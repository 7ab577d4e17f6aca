"""One bit flipped in every chunk of a file: `verify` must name each, with its samples, and no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from torture_files import make_matrix, make_photos
from torture_result import Result

import h5chunk
from h5chunk.tools.repack.repack import repack

FIELDS = ("images", "labels", "X", "X/indptr", "X/indices", "X/data")


class Place(NamedTuple):
    """A stored chunk, and its first and last sample; None: what it holds says which."""

    field: str
    chunk: int
    offset: int
    size: int
    samples: tuple[int, int] | None


def run(num_chunks: int, seed: int, folder: Path) -> Result:
    """Files of about so many chunks in all."""
    result = Result("chunks with a flipped bit")
    rng = np.random.default_rng(seed)
    for kind, path in make_files(folder, max(4, num_chunks // 5)):
        chunks = places(path)
        for place in chunks:
            with flipped(path, [place], rng):
                _judge(result, f"{kind}, {place.field}, chunk {place.chunk}", h5chunk.verify(path), [place])
        with flipped(path, chunks, rng):
            whole = [each if "/" not in each.field else each._replace(samples=None) for each in chunks]  # indptr too
            _judge(result, f"{kind}, all chunks", h5chunk.verify(path), whole)
        if not h5chunk.verify(path).ok:
            result.bad.append(f"{kind}: damaged after all bits were flipped back")
        result.cases += len(chunks)
        result.counts[kind] = len(chunks)
    return result


def make_files(folder: Path, chunks: int) -> Iterator[tuple[str, Path]]:
    """A file of each kind with checksums; of those of images, and of dense rows, so many chunks of each dataset."""
    photos = make_photos(folder / "photos", 3 * chunks, side=4)
    h5chunk.convert(photos, folder / "images.h5", chunk_samples=3)
    yield "images", folder / "images.h5"
    repack(folder / "images.h5", folder / "gzip.h5", chunk_samples=3, compression="gzip")
    yield "images, gzip", folder / "gzip.h5"
    matrix = make_matrix(folder / "m.npz", 40 * chunks)
    h5chunk.convert(matrix, folder / "dense.h5", dense=True, chunk_samples=40)
    yield "dense rows, gzip", folder / "dense.h5"
    h5chunk.convert(matrix, folder / "sparse.h5")
    repack(folder / "sparse.h5", folder / "sparse-gzip.h5", compression="gzip")
    h5chunk.convert(make_matrix(folder / "p.npz", pattern=True), folder / "pattern.h5")
    for name in ("sparse", "sparse-gzip", "pattern"):
        yield name, folder / f"{name}.h5"


def places(path: Path) -> list[Place]:
    """All chunks that have checksums."""
    found: list[Place] = []
    with h5py.File(path) as file:
        indptr = file["X/indptr"][()] if "X/indptr" in file else None
        for name in FIELDS:
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset) or not dataset.id.get_storage_size():
                continue
            if dataset.chunks is None:
                found.append(Place(name, 0, dataset.id.get_offset(), dataset.nbytes, None))
                continue
            for number in range(dataset.id.get_num_chunks()):
                info = dataset.id.get_chunk_info(number)
                first, last = info.chunk_offset[0], min(info.chunk_offset[0] + dataset.chunks[0], len(dataset)) - 1
                if indptr is not None and "/" in name:  # entries of rows
                    first, last = (int(np.searchsorted(indptr, entry, "right")) - 1 for entry in (first, last))
                found.append(Place(name, number, info.byte_offset, info.size, (first, last)))
    return found


class flipped:
    """A random bit of each of these chunks is the other one meanwhile."""

    def __init__(self, path: Path, chunks: list[Place], rng: np.random.Generator) -> None:
        self._path = path
        self._bits = [(each.offset + int(rng.integers(each.size)), 1 << int(rng.integers(8))) for each in chunks]

    def __enter__(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR)
        for offset, bit in self._bits:
            [byte] = os.pread(descriptor, 1, offset)
            os.pwrite(descriptor, bytes([byte ^ bit]), offset)
        os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.__enter__()


def _judge(result: Result, what: str, report: h5chunk.VerifyReport, chunks: list[Place]) -> None:
    """All of these chunks are named, and no other ones."""
    named = {(each.field, each.chunk): (each.first_sample, each.last_sample) for each in report.bad}
    expected = {(each.field, each.chunk): each.samples for each in chunks}
    if set(named) != set(expected):
        missed, others = sorted(set(expected) - set(named)), sorted(set(named) - set(expected))
        result.bad.append(f"{what}: not named: {missed[:3]}; named without reason: {others[:3]}")
    wrong = [key for key, samples in expected.items() if samples is not None and named.get(key, samples) != samples]
    if wrong:
        result.bad.append(f"{what}: {wrong[0]} is named with samples {named[wrong[0]]}, not {expected[wrong[0]]}")
    if report.ok:
        result.bad.append(f"{what}: reported as whole")
