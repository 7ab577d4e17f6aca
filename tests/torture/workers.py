"""Processes that die, stop, or lose their parent while they train: an error within five seconds, and no orphans.

What is killed: workers of a DataLoader over a ChunkDataset; training itself, which leaves workers behind; conversion
and repacking, which have processes of their own. Threads that read cannot be killed: files are cut short under them.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image
from support.leftovers import end_workers, workers_of
from torch.utils.data import DataLoader
from torture.result import Result

import h5chunk
from h5chunk.errors import FileError
from h5chunk.tools.repack.repack import repack

LIMIT_S = 5.0
ORPHAN_S = 15.0  # workers of torch look every 5 s whether their parent lives
TIMEOUT_S = 2.0  # of a DataLoader whose worker is stuck or stopped
WATCH_S = 8.0  # after which torch is said to wait for ever
ALL_S = 60.0
READY = mmap.mmap(-1, 1)  # set by a process that trains once it has a batch
ERRORS = (RuntimeError, ConnectionError, EOFError)  # the latter where torch was just asking the worker for a batch
NUM_SAMPLES, CHUNK, BATCH = 4096, 16, 32


def run(kills: int, seed: int, folder: Path) -> Result:
    """So many killed workers, and a tenth as many of the rest."""
    result = run_killed(kills, seed, folder)
    with quiet():
        _run_others(result, max(2, kills // 10), random.Random(seed), folder)
    return result


def _make_photos(folder: Path) -> Path:
    for number in range(600):
        place = folder / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number:05}.png", compress_level=1)
    return folder


def _run_others(result: Result, few: int, rng: random.Random, folder: Path) -> None:
    path = folder / "a.h5"
    for _ in range(few):
        _stuck(result, rng, path)
        _stopped(result, rng, path, "file_system")
    _stopped(result, rng, path, "file_descriptor")
    for how in (signal.SIGKILL, signal.SIGINT):
        for _ in range(few):
            left_alone(result, rng, f"training, {how.name}", lambda: train(path), how, trains=True)
    photos = _make_photos(folder / "photos")
    big = folder / "big.h5"
    for _ in range(few):
        left_alone(result, rng, "convert, SIGKILL", lambda: _convert_for_ever(photos, big), signal.SIGKILL)
        left_alone(result, rng, "repack, SIGKILL", lambda: _repack_for_ever(path, big), signal.SIGKILL)
    for name, make in (("ChunkLoader", _chunk_loader), ("DataLoader", _data_loader)):
        for _ in range(few):
            _cut_short(result, rng, path, name, make)


def run_killed(kills: int, seed: int, folder: Path) -> Result:
    """Killed workers alone."""
    torch.set_num_threads(1)
    result, rng = Result("processes killed, stuck, stopped or left alone, and files cut short"), random.Random(seed)
    path = make_file(folder / "a.h5")
    with quiet():
        for _ in range(kills):
            _killed(result, rng, path)
    return result


def make_file(path: Path) -> Path:
    """Images whose every pixel says which one it is."""
    numbers = np.arange(NUM_SAMPLES)
    with h5py.File(path, "w") as file:
        images = np.repeat(numbers.astype("<u2").view("u1").reshape(-1, 2), 512, axis=1)
        file.create_dataset("images", data=images, chunks=(CHUNK, 1024))
        file["labels"] = numbers
    return path


def _chunk_loader(path: Path) -> Any:
    return h5chunk.ChunkLoader(path, BATCH, num_threads=2)


def _data_loader(path: Path, timeout: float = 0, transform: Any = None) -> DataLoader[Any]:
    dataset = h5chunk.ChunkDataset(path, transforms=transform)
    sampler = h5chunk.ChunkSampler(dataset, BATCH, num_workers=2)
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True, timeout=timeout,
        multiprocessing_context="fork",
    )  # fmt: skip


def train(path: Path) -> None:
    """Until somebody ends it."""
    for _ in epochs(_data_loader(path)):
        READY[0] = 1


def epochs(loader: Any) -> Iterator[None]:
    """One epoch after another; each batch is looked at: what is delivered is right, whatever happens."""
    while True:
        for images, labels in loader:
            wanted = np.asarray(labels).astype("<u2").view("u1").reshape(-1, 2)
            found = np.asarray(images)
            if not (found.reshape(len(found), 2, 512) == wanted[:, :, None]).all():
                raise AssertionError("a batch has other images than its labels say")
            yield


def _killed(result: Result, rng: random.Random, path: Path) -> None:
    """A worker is killed after some batches, and some more time."""
    loader = _data_loader(path)
    batches, workers = _some(loader, rng)
    kill = partial(os.kill, rng.choice(workers), signal.SIGKILL)  # torch may raise in the midst of it
    _judge(result, "worker killed", *_until_error(batches, kill), ERRORS)
    _shut(result, loader, workers)


def _stuck(result: Result, rng: random.Random, path: Path) -> None:
    """A worker waits for something that does not come."""
    loader = _data_loader(path, TIMEOUT_S, Stuck(rng.randrange(BATCH, 60 * BATCH)))
    _judge(result, "worker stuck", *_until_error(epochs(loader)), RuntimeError)
    _shut(result, loader, workers_of(_iteration(loader)))


class Stuck:
    """A transform that does not come back from one of its calls."""

    def __init__(self, left: int) -> None:
        self._left = left

    def __call__(self, image: Any) -> Any:
        self._left -= 1
        if not self._left:
            time.sleep(3600)
        return image


class Waits(Exception):
    """Nothing happened."""


def _stopped(result: Result, rng: random.Random, path: Path, strategy: str) -> None:
    """A worker is stopped. Where batches travel as file descriptors, torch asks it for each one, without a timeout."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    signal.signal(signal.SIGALRM, _wake)
    try:
        loader = _data_loader(path, ALL_S)  # workers may take long to start on a busy machine
        batches, workers = _some(loader, rng)
        _iteration(loader)._timeout = TIMEOUT_S
        victim = rng.choice(workers)
        os.kill(victim, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, WATCH_S)
        seconds, error = _until_error(batches)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.kill(victim, signal.SIGKILL)
        if isinstance(error, Waits) and strategy == "file_descriptor":
            result.add(f"worker stopped, {strategy}: torch waits for it for ever")
        else:
            _judge(result, f"worker stopped, {strategy}", seconds, error, RuntimeError)
        _shut(result, loader, workers)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _wake(*_: object) -> None:
    raise Waits


def _some(loader: DataLoader[Any], rng: random.Random) -> tuple[Iterator[None], list[int]]:
    """Take some batches; the rest of them, and the workers."""
    batches = epochs(loader)
    for _ in range(rng.randrange(1, 60)):
        next(batches)
    time.sleep(rng.random() * 0.01)
    return batches, workers_of(_iteration(loader))


def _iteration(loader: DataLoader[Any]) -> Any:
    return loader._iterator


def _shut(result: Result, loader: DataLoader[Any], workers: list[int]) -> None:
    """No worker is left when nothing refers to a loader any more; one that is stuck is ended by torch."""
    for _ in range(2):
        with suppress(RuntimeError):  # that the worker died, told again
            end_workers(_iteration(loader))
    if not wait_for(lambda: not any(map(is_alive, workers)), ORPHAN_S):
        result.bad.append("a worker lives on after its loader")
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)


def _until_error(
    batches: Iterator[Any], first: Callable[[], object] = lambda: None
) -> tuple[float, BaseException | None]:
    """Seconds from something on until an iteration fails, and with what."""
    started = time.perf_counter()
    try:
        first()
        while time.perf_counter() - started < ALL_S:
            next(batches)
    except Exception as error:
        return time.perf_counter() - started, error
    return time.perf_counter() - started, None


def _judge(result: Result, what: str, seconds: float, error: BaseException | None, kind: Any) -> None:
    result.cases += 1
    result.add(what)
    _slowest(result, f"{what}: slowest error, s", seconds)
    if not isinstance(error, kind):
        result.bad.append(f"{what}: no error after {seconds:.1f} s" if error is None else f"{what}: {error!r}")
    elif seconds > LIMIT_S:
        result.bad.append(f"{what}: an error only after {seconds:.1f} s")


def _slowest(result: Result, name: str, seconds: float) -> None:
    result.counts[name] = max(result.counts.get(name, 0.0), round(seconds, 2))


def left_alone(
    result: Result,
    rng: random.Random,
    what: str,
    work: Callable[[], object],
    how: signal.Signals,
    limit_s: float = ORPHAN_S,
    trains: bool = False,
) -> None:
    """A process that has others is ended at a random moment: it ends, and so do the others.

    One that trains has a batch by then: torch's workers remember their parent when they have started, and never end if
    it was killed while they did.
    """
    READY[0] = 0
    child = os.fork()
    if not child:
        try:
            os.setsid()
            silence()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
        finally:
            os._exit(1)
    wait_for(lambda: READY[0] == 1 if trains else bool(children_of(child)), ALL_S)
    time.sleep(rng.random() * 0.2)
    others = some_children(child)
    started = time.perf_counter()
    if how == signal.SIGINT:  # as Ctrl-C does it
        os.killpg(child, how)
    else:
        os.kill(child, how)
    ended = wait_for(lambda: os.waitpid(child, os.WNOHANG)[0] == child, limit_s)
    others |= group_of(child) - {child}
    gone = wait_for(lambda: not any(map(is_alive, others)), limit_s)
    seconds = time.perf_counter() - started
    result.cases += 1
    result.add(what)
    result.add("processes that these had", len(others))
    _slowest(result, f"{what}: slowest until all are gone, s", seconds)
    if not ended or not gone or not others:
        what_is = "has no other processes" if not others else "leaves others" if ended else "does not end"
        result.bad.append(f"{what}: {what_is} after {seconds:.1f} s")
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)


def _convert_for_ever(photos: Path, path: Path) -> None:
    while True:
        h5chunk.convert(photos, path, workers=2, overwrite=True)


def _repack_for_ever(source: Path, path: Path) -> None:
    while True:
        repack(source, path, compression="gzip:9", overwrite=True)


def _cut_short(result: Result, rng: random.Random, path: Path, name: str, make: Callable[[Path], Any]) -> None:
    """A file is cut short in the middle of an epoch: an error, and never a wrong batch."""
    copy = path.with_name("cut.h5")
    shutil.copy(path, copy)
    loader = make(copy)
    batches = epochs(loader)
    for _ in range(rng.randrange(1, 60)):
        next(batches)
    os.truncate(copy, rng.randrange(1, path.stat().st_size // 2))
    seconds, error = _until_error(batches)
    _judge(result, f"file cut short under a {name}", seconds, error, FileError)
    if isinstance(loader, DataLoader):
        with suppress(RuntimeError):
            end_workers(_iteration(loader))
    else:
        loader.close()
    copy.unlink()


@contextmanager
def quiet() -> Iterator[None]:
    """What threads of workers say of the death of others is not shown."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def stat_of(pid: int) -> list[str]:
    """State, parent, group, ... of a process; empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def all_processes() -> dict[int, list[str]]:
    found = {int(entry.name): stat_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid: stat for pid, stat in found.items() if stat and stat[0] not in "ZX"}


def children_of(pid: int) -> set[int]:
    """All that descend from a process."""
    found, processes = {pid}, all_processes()
    while True:
        more = {each for each, stat in processes.items() if int(stat[1]) in found} - found
        if not more:
            return found - {pid}
        found |= more


def some_children(pid: int) -> set[int]:
    """The same, as soon as there are any."""
    found: set[int] = set()
    until = time.perf_counter() + ALL_S
    while not found and time.perf_counter() < until:
        found = children_of(pid)
    return found


def group_of(group: int) -> set[int]:
    return {pid for pid, stat in all_processes().items() if int(stat[2]) == group}


def is_alive(pid: int) -> bool:
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in "ZX"


def wait_for(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in that time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if true():
            return True
        time.sleep(0.01)
    return False
