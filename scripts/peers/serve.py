"""Run one contender in its own process, with commands on standard input: see `bench_loader.py`.

    python -m peers.serve JSON      # {"module", "settings", "source", "folder", "batch_size"}

Each line of input is a command, and is answered by a line of JSON. ``first`` builds the contender (and its file, if it
is missing), and runs an epoch that compares every image by its CRC-32. ``epoch N`` runs timed epochs. ``check N``
compares again. Libraries write to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers import Source

TURN_S = 1.0  # shortest duration of a turn
MOST_EPOCHS = 1000  # in a turn
PROBE = -8  # start of the bytes of a batch's last image that are compared after the clock has stopped


class Wrong(Exception):
    """Raised if an epoch is incomplete, or an image differs from the packed one."""


def file_path(folder: Path, module: str, kind: type, source: Source, settings: dict) -> Path:
    """Return the path of the contender's file for these settings."""
    marks = [f"{name}={settings[name]}" for name in kind.FILE_SETTINGS if name in settings]
    return folder / "-".join([module, str(source.count), str(source.sample_shape[-1]), *marks])


def make(kind: type, source: Source, path: Path, settings: dict) -> None:
    """Make the file, which gets its name once it is complete."""
    if not hasattr(kind, "make") or path.exists():
        return
    part = path.with_name(f"{path.name}.part")
    if part.exists():
        raise Wrong(f"{part} was left by a run that ended early: remove it")
    kind.make(source, part, **{name: settings[name] for name in kind.FILE_SETTINGS if name in settings})
    part.rename(path)


def checked(batches: Iterator, source: Source, crcs: np.ndarray, batch_size: int, is_part: bool) -> Iterator[None]:
    """Run an epoch, and compare every image with the packed one."""
    seen = []
    for images, labels in batches:
        if images.dtype != torch.uint8 or images.shape[1:] != source.sample_shape or len(images) > batch_size:
            raise Wrong(f"a batch is {images.dtype} {tuple(images.shape)}")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise Wrong(f"labels are {labels.dtype} {tuple(labels.shape)}")
        yield
        numbers = labels.numpy().copy()
        for number, image in zip(numbers, images.contiguous().numpy(), strict=True):
            if zlib.crc32(image) != crcs[number]:
                raise Wrong(f"image {number} is not the one that was packed")
        seen.append(numbers)
    complete(np.concatenate(seen), source, is_part)


def complete(numbers: np.ndarray, source: Source, is_part: bool) -> None:
    """Raise Wrong unless an epoch has each sample once, in random order. A part has each sample at most once."""
    if is_part and len(np.unique(numbers)) == len(numbers) > source.count // 3 and np.any(np.diff(numbers) < 0):
        return
    if not np.array_equal(np.sort(numbers), np.arange(source.count)):
        raise Wrong(f"{len(numbers)} samples, {len(np.unique(numbers))} of them different: {source.count} were packed")
    if np.array_equal(numbers, np.arange(source.count)):
        raise Wrong("the epoch was not shuffled")


def timed(epochs: Iterator[Iterator], source: Source, is_part: bool) -> dict[str, Any]:
    """Time epochs for at least `TURN_S`. Raises Wrong if one was incomplete or the last image of a batch is wrong."""
    started, cpu = time.perf_counter(), cpu_seconds()
    seen, probes = [], []
    for batches in epochs:
        seen.append([])
        for images, labels in batches:
            seen[-1].append(labels.numpy().copy())
            probes.append(images.numpy()[-1, -1, -1, PROBE:].tobytes())
            del images, labels
        seconds = time.perf_counter() - started
        if seconds >= TURN_S:
            break
    result = {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu, "epochs": len(seen)}
    for numbers in seen:
        complete(np.concatenate(numbers), source, is_part)
    images = source.images
    every = [numbers for epoch in seen for numbers in epoch]
    for numbers, probe in zip(every, probes, strict=True):
        if images[numbers[-1], -1, -1, PROBE:].tobytes() != probe:
            raise Wrong(f"image {numbers[-1]} is not the one that was packed")
    return result | {"images": sum(map(len, every)), "batches": len(every)}


def cpu_seconds() -> float:
    """Return the processor time of this process and of its finished workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Server:
    def __init__(self, request: dict) -> None:
        fields = request["source"]
        self.source = Source(Path(fields["path"]), fields["offset"], tuple(fields["shape"]), fields["seed"])
        self.crcs = np.load(request["crcs"])
        self.settings, self.batch_size = request["settings"], request["batch_size"]
        self.kind = import_module(f"peers.{request['module']}").Contender
        self.path = file_path(Path(request["folder"]), request["module"], self.kind, self.source, self.settings)

    def first(self) -> dict[str, Any]:
        make(self.kind, self.source, self.path, self.settings)
        warm(self.path if self.path.exists() else self.source.path)
        started = time.perf_counter()
        self.contender = self.kind(self.source, self.path, self.batch_size, **self.settings)
        self.is_part = getattr(self.contender, "is_part", False)
        if hasattr(self.contender, "run"):
            self.contender.run(0)
            return {}
        epoch = checked(self.contender.epoch(0), self.source, self.crcs, self.batch_size, self.is_part)
        next(epoch)
        result = {"first_batch_s": time.perf_counter() - started}
        for _ in epoch:
            pass
        return result

    def epoch(self, number: int) -> dict[str, Any]:
        """Time epochs in a row, after one that is not timed, because it starts with data that was read ahead."""
        numbers = range(number * MOST_EPOCHS, (number + 1) * MOST_EPOCHS)
        epochs = map(self.contender.epoch if not hasattr(self.contender, "run") else self.contender.run, numbers)
        if not hasattr(self.contender, "run"):
            for _ in next(epochs):
                pass
            return timed(epochs, self.source, self.is_part)
        next(epochs)
        started, images, seconds = time.perf_counter(), 0, 0.0
        while seconds < TURN_S:
            moved = next(epochs)
            seconds = time.perf_counter() - started
            if moved != self.source.count:
                raise Wrong(f"{moved} images were moved of {self.source.count}")
            images += moved
        return {"images": images, "seconds": seconds}

    def check(self, number: int) -> dict[str, Any]:
        if not hasattr(self.contender, "run"):
            for _ in checked(self.contender.epoch(number), self.source, self.crcs, self.batch_size, self.is_part):
                pass
        return {}


def warm(path: Path) -> None:
    """Read a file, or all files of a folder, into the page cache."""
    buffer = bytearray(8 << 20)
    for file in sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server: Server | None = None
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            server = server or Server(json.loads(sys.argv[1]))
            answer = getattr(server, command)(*map(int, arguments))
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
