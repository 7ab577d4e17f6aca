"""Processes that die, stop, or lose their parent while they train: an error within five seconds, and no orphans.

What is killed: workers of a DataLoader over a ChunkDataset; training itself, which leaves workers behind; conversion
and repacking, which have processes of their own. Threads that read cannot be killed: files are cut short under them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader
from torture_files import make_photos
from torture_result import Result

import h5chunk
from h5chunk.errors import FileError
from h5chunk.tools.repack import repack

LIMIT_S = 5.0
ORPHAN_S = 10.0  # workers of torch look every 5 s whether their parent lives
STOPPED_S = 2.0  # the timeout of a DataLoader whose worker is stopped
ALL_S = 60.0
NUM_SAMPLES, CHUNK, BATCH = 4096, 16, 32


def run(kills: int, seed: int, folder: Path) -> Result:
    """So many killed workers, and a tenth as many of the rest."""
    torch.set_num_threads(1)
    result, rng = Result("processes killed, stopped or left alone, and files cut short"), random.Random(seed)
    path = make_file(folder / "a.h5")
    few = max(2, kills // 10)
    for _ in range(kills):
        _stopped(result, rng, path, "worker killed", signal.SIGKILL)
    for _ in range(few):
        _stopped(result, rng, path, "worker stopped", signal.SIGSTOP)
    for how in (signal.SIGKILL, signal.SIGINT):
        for _ in range(few):
            _left_alone(result, rng, f"training, {how.name}", lambda: train(path), how)
    photos = make_photos(folder / "photos", 600, side=64)
    big = folder / "big.h5"
    for _ in range(few):
        _left_alone(result, rng, "convert, SIGKILL", lambda: _convert_for_ever(photos, big), signal.SIGKILL)
        _left_alone(result, rng, "repack, SIGKILL", lambda: _repack_for_ever(path, big), signal.SIGKILL)
    for name, make in (("ChunkLoader", _chunk_loader), ("DataLoader", _data_loader)):
        for _ in range(few):
            _cut_short(result, rng, path, name, make)
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


def _data_loader(path: Path, timeout: float = 0) -> DataLoader[Any]:
    dataset = h5chunk.ChunkDataset(path)
    sampler = h5chunk.ChunkSampler(dataset, BATCH)
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True, timeout=timeout,
        multiprocessing_context="fork",
    )  # fmt: skip


def train(path: Path) -> None:
    """Until somebody ends it."""
    loader = _data_loader(path)
    while True:
        check_epoch(loader)


def check_epoch(loader: Any) -> Iterator[None]:
    """Look at each batch: what is delivered is right, whatever happens."""
    for images, labels in loader:
        wanted = np.asarray(labels).astype("<u2").view("u1").reshape(-1, 2)
        found = np.asarray(images)
        if not (found.reshape(len(found), 2, 512) == wanted[:, :, None]).all():
            raise AssertionError("a batch has other images than its labels say")
        yield


def _stopped(result: Result, rng: random.Random, path: Path, what: str, how: signal.Signals) -> None:
    """A worker gets a signal after some batches, and some more time."""
    loader = _data_loader(path, STOPPED_S if how == signal.SIGSTOP else 0)
    batches = (batch for _ in iter(int, 1) for batch in check_epoch(loader))
    for _ in range(rng.randrange(1, 60)):
        next(batches)
    workers = list(loader._iterator._workers)  # type: ignore[union-attr]
    time.sleep(rng.random() * 0.01)
    victim = rng.choice(workers).pid
    os.kill(victim, how)
    seconds, error = _until_error(batches)
    if how == signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)
    _judge(result, what, seconds, error, RuntimeError)
    batches.close()
    del batches, loader
    for worker in workers:
        worker.join(ORPHAN_S)
        if worker.is_alive():
            result.bad.append(f"{what}: a worker of the loader lives on")
            worker.kill()


def _until_error(batches: Iterator[Any]) -> tuple[float, BaseException | None]:
    """Seconds until an iteration fails, and with what."""
    started = time.perf_counter()
    try:
        while time.perf_counter() - started < ALL_S:
            next(batches)
    except Exception as error:
        return time.perf_counter() - started, error
    return time.perf_counter() - started, None


def _judge(result: Result, what: str, seconds: float, error: BaseException | None, kind: type[BaseException]) -> None:
    result.cases += 1
    result.add(what)
    slowest = f"{what}: slowest, s"
    result.counts[slowest] = max(result.counts.get(slowest, 0.0), round(seconds, 2))
    if not isinstance(error, kind) or not str(error):
        result.bad.append(f"{what}: no error after {seconds:.1f} s" if error is None else f"{what}: {error!r}")
    elif seconds > LIMIT_S:
        result.bad.append(f"{what}: an error only after {seconds:.1f} s")


def _left_alone(result: Result, rng: random.Random, what: str, work: Callable[[], None], how: signal.Signals) -> None:
    """A process that has others is ended at a random moment: it ends, and so do the others."""
    child = os.fork()
    if not child:
        try:
            os.setsid()
            silence()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
        finally:
            os._exit(1)
    wait_for(lambda: bool(children_of(child)), ALL_S)
    time.sleep(rng.random() * 0.2)
    others = children_of(child)
    started = time.perf_counter()
    if how == signal.SIGINT:  # as Ctrl-C does it
        os.killpg(child, how)
    else:
        os.kill(child, how)
    ended = wait_for(lambda: os.waitpid(child, os.WNOHANG)[0] == child, ALL_S)
    _judge(
        result, f"{what}: ends", time.perf_counter() - started, RuntimeError("it ended") if ended else None, Exception
    )
    others |= group_of(child)
    gone = wait_for(lambda: not any(map(is_alive, others)), ALL_S)
    seconds = time.perf_counter() - started
    slowest = f"{what}: slowest to be gone, s"
    result.counts[slowest] = max(result.counts.get(slowest, 0.0), round(seconds, 2))
    result.add("other processes", len(others))
    if not gone or seconds > ORPHAN_S or not others:
        result.bad.append(f"{what}: {len(others)} other processes, left after {seconds:.1f} s: {not gone}")
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


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
    batches = (batch for _ in iter(int, 1) for batch in check_epoch(loader))
    for _ in range(rng.randrange(1, 60)):
        next(batches)
    os.truncate(copy, rng.randrange(1, path.stat().st_size // 2))
    seconds, error = _until_error(batches)
    _judge(result, f"file cut short under a {name}", seconds, error, FileError)
    batches.close()
    del batches, loader
    copy.unlink()


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
