"""Training loops with planted faults, and healthy ones, for `bench_doctor.py`.

``fault.make(None)`` makes a loop with its fault, and ``fault.make(fix)`` one with that fix applied, either as
it says or by a loop that never had the fault. A loop is a loader and a function that trains with one batch.
"""

from __future__ import annotations

import atexit
import lzma
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

import h5chunk

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WORK = 3.0 if CUDA else 5.0  # milliseconds of a step, in most loops
CORES = len(os.sched_getaffinity(0))
FOLDER = Path(tempfile.mkdtemp(prefix="h5chunk-faults-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
PIXELS = np.random.default_rng(0).integers(0, 4, 48_000).astype(np.uint8).tobytes()
PACKED = lzma.compress(PIXELS)
LOCK = multiprocessing.get_context("fork").Lock()
PAGE_OUT = 21  # MADV_PAGEOUT: evict pages as the kernel does when memory is short
Step = Callable[[Any], None]
Loop = tuple[Any, Step]
Make = Callable[[Any], Loop]


@dataclass
class Fault:
    """A loop with a fault."""

    name: str
    make: Make
    causes: tuple[str, ...]  # that are right; "none": not the data, and nothing else
    fix: str = ""  # beginning of the name of the fix that is measured; empty: none
    gpu: bool = False


class Made(Dataset):
    """Samples that a function of their number makes."""

    def __init__(self, make: Callable[[int], Any], length: int = 100_000) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Stored(Dataset):
    """Samples of an HDF5 file, opened in each worker."""

    def __init__(self, path: Path, **cache: Any) -> None:
        self.path, self.cache, self.images = path, cache, None
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self) -> int:
        return 100 * self.length  # long epochs

    def __getitem__(self, i: int) -> Any:
        if self.images is None:
            self.images = h5py.File(self.path, **self.cache)["images"]
        return torch.from_numpy(self.images[i % self.length]), i % 10


def stored(name: str, chunks: tuple[int, ...], **filters: Any) -> Path:
    path = FOLDER / f"{name}.h5"
    if not path.exists():
        images = np.random.default_rng(0).integers(0, 40, (2_000, 32, 32, 3)).astype(np.uint8)
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=images, chunks=chunks, **filters)
    return path


# ---- samples


def tiny(i: int) -> Any:
    return torch.zeros(256), i % 10


def decoded(i: int) -> Any:
    pixels = lzma.decompress(PACKED)
    return torch.frombuffer(bytearray(pixels[:256]), dtype=torch.uint8).float(), i % 10


def not_decoded(i: int) -> Any:
    pixels = PIXELS
    return torch.frombuffer(bytearray(pixels[:256]), dtype=torch.uint8).float(), i % 10


def slept(seconds: float) -> Callable[[int], Any]:
    def make(i: int) -> Any:
        time.sleep(seconds)  # waits as for a server
        return tiny(i)

    return make


def throttled(i: int) -> Any:
    with ThrottledFile() as file:
        file.read(4096)
    return tiny(i)


def not_throttled(i: int) -> Any:
    return tiny(i)


class ThrottledFile:
    """A file on a disk where each read takes 0.6 ms."""

    def __enter__(self) -> ThrottledFile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, size: int) -> bytes:
        time.sleep(0.0006)
        return bytes(size)


def locked(i: int) -> Any:
    with LOCK:
        time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def unlocked(i: int) -> Any:
    time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def uneven(i: int) -> Any:
    worker = get_worker_info()
    time.sleep(0.002 if worker is not None and worker.id == 0 else 0.0003)
    return tiny(i)


class Mapped(Dataset):
    """Samples in a mapped file, whose pages are evicted now and then, or never."""

    def __init__(self, evicts: bool) -> None:
        self.evicts, self.memory = evicts, None
        self.path = FOLDER / "mapped"
        with self.path.open("wb") as file:
            file.write(bytes(8 << 20))
            os.fsync(file.fileno())  # only clean pages are evicted

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> Any:
        if self.memory is None:
            with self.path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.evicts and i % 32 == 0:
            self.memory.madvise(PAGE_OUT)
        if i % 32 == 0:
            np.frombuffer(self.memory, np.uint8)[:: mmap.PAGESIZE].sum()
        return tiny(i)


def slow_collate(samples: list[Any]) -> Any:
    rows = [torch.tensor([float(value) for value in sample.tolist() * 16])[:256] for sample, _ in samples]
    return torch.stack(rows), torch.tensor([label for _, label in samples])


# ---- steps


def network(width: int = 256, depth: int = 2, inputs: int = 256, device: str = DEVICE) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).to(device)


class Work:
    """Matrix products that take about this many milliseconds, in few calls."""

    def __init__(self, milliseconds: float) -> None:
        size = 4096 if CUDA else 384
        self.matrix = torch.full((size, size), 1e-4, device=DEVICE, dtype=torch.bfloat16 if CUDA else torch.float32)
        self.count, times = 8, []
        for _ in range(5):
            started = time.perf_counter()
            self()
            if CUDA:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / self.count)
        self.count = max(1, round(milliseconds / 1e3 / min(times)))

    def __call__(self) -> None:
        for _ in range(self.count):
            self.matrix @ self.matrix


def trainer(
    model: torch.nn.Module,
    *,
    blocking: bool = False,
    work: float = 0.0,
    after: Callable[[Any], None] | None = None,
    **adam: Any,
) -> Step:
    """Return a step; ``work`` is milliseconds of matrix products after the model, or -1 for about those of Python."""
    optimizer = torch.optim.Adam(model.parameters(), **adam)
    device, more = next(model.parameters()).device, Work(work) if work > 0 else None

    def step(batch: Any) -> None:
        images = batch[0].to(device, non_blocking=not blocking)
        optimizer.zero_grad()
        loss = model(images.flatten(1)[:, : model[0].in_features].float()).square().mean()
        loss.backward()
        optimizer.step()
        if more is not None:
            more()
        if after is not None:
            after(loss)

    if work < 0:
        for _ in range(6):
            started = time.perf_counter()
            step([torch.zeros(64, model[0].in_features)])
            seconds = time.perf_counter() - started
        more = Work(1.2e3 * seconds)
    return step


def python_work(_: Any) -> None:
    sum(i * i for i in range(200_000))


# ---- loops


def applied(fix: Any) -> dict[str, Any]:
    return {} if fix is None else dict(fix.apply.get("loader", {}))


def simple(make: Callable[[int], Any], batch: int = 32, *, work: float = WORK, **options: Any) -> Make:
    """A loop whose loader takes the arguments of a fix."""

    def loop(fix: Any) -> Loop:
        loader = DataLoader(Made(make), batch, **{**options, **applied(fix)})
        return loader, trainer(network(), work=work)

    return loop


def other(fault: Any, cured: Any, **options: Any) -> Make:
    """A loop whose samples are made without the fault if it is fixed."""
    return lambda fix: (DataLoader(Made(cured if fix else fault), 32, **options), trainer(network(), work=WORK))


def with_cache(**cache: Any) -> Make:
    def make(fix: Any) -> Loop:
        path = stored("tiny", (100, 32, 32, 3), compression="lzf")
        better = dict(zip(("rdcc_nslots", "rdcc_nbytes"), fix.apply["cache"], strict=True)) if fix else cache
        return DataLoader(Stored(path, **better), 32, shuffle=True, num_workers=1), trainer(network(), work=WORK)

    return make


def across_samples(fix: Any) -> Loop:
    path = stored("whole", (1, 32, 32, 3)) if fix else stored("across", (500, 8, 8, 3), compression="lzf")
    return DataLoader(Stored(path, rdcc_nbytes=0), 32, shuffle=True, num_workers=1), trainer(network(), work=WORK)


def collating(fix: Any) -> Loop:
    collate = default_collate if fix else slow_collate
    return DataLoader(Made(tiny), 32, num_workers=1, collate_fn=collate), trainer(network(), work=WORK)


def oversubscribed(fix: Any) -> Loop:
    torch.set_num_threads(fix.apply["threads"] if fix else 4 * CORES)
    return DataLoader(Made(tiny), 256, num_workers=1), trainer(network(768, device="cpu"))


def short_of_memory(fix: Any) -> Loop:
    return DataLoader(Mapped(fix is None), 32, num_workers=1), trainer(network())


def validating(fix: Any) -> Loop:
    model = network(512)
    step, tests, count = trainer(model), DataLoader(Made(decoded), 32), [0]

    def train(batch: Any) -> None:
        step(batch)
        count[0] += 1
        if count[0] % 10 == 0 and fix is None:
            with torch.no_grad():
                for number, (images, _) in enumerate(tests):
                    model(images.to(DEVICE))
                    if number == 4:
                        break

    return DataLoader(Made(tiny), 64), train


def small_batches(fix: Any) -> Loop:
    return DataLoader(Made(tiny), 8 if fix else 1, num_workers=1), trainer(network(16, 0), lr=1e-3)


def with_python(fix: Any) -> Loop:
    after = None if fix else python_work
    return DataLoader(Made(tiny), 64, num_workers=1), trainer(network(), work=2, after=after)


def item(fix: Any) -> Loop:
    after = None if fix else lambda loss: loss.item()
    step = trainer(network(256, 20), work=-1, after=after)
    return DataLoader(Made(tiny), 64, num_workers=2, pin_memory=CUDA), step


class Large(Dataset):
    """Batches of 38 MB in shared memory, which a worker has at once."""

    def __init__(self) -> None:
        self.images = torch.zeros(128, 3, 160, 160).share_memory_()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> Any:
        return self.images, i


def copying(fix: Any) -> Loop:
    loader = DataLoader(Large(), batch_size=None, num_workers=4, **applied(fix))
    return loader, trainer(network(), work=8)


def synchronous(fix: Any) -> Loop:
    loader = DataLoader(Made(tiny), 64, num_workers=2, pin_memory=True)
    return loader, trainer(network(256, 20), blocking=fix is None, work=-1)


def launching(fix: Any) -> Loop:
    loader, model = DataLoader(Made(tiny), 64, num_workers=2, pin_memory=True), network(64, 120)
    step = trainer(model, capturable=True)
    if not fix:
        return loader, step
    still, graph = torch.zeros(64, 256, device="cuda"), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step([still])
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step([still])

    def replay(batch: Any) -> None:
        still.copy_(batch[0].to("cuda", non_blocking=True), non_blocking=True)
        graph.replay()

    return loader, replay


def optimizing(fix: Any) -> Loop:
    adam = {"fused": True} if fix else {"foreach": False}
    return DataLoader(Made(tiny), 64, num_workers=2, pin_memory=True), trainer(network(64, 120), **adam)


def optimizing_on_cpu(fix: Any) -> Loop:
    model = network(1024, 8)
    if fix:
        return DataLoader(Made(tiny), 64, num_workers=2, pin_memory=True), trainer(model, fused=True)
    masters = [parameter.detach().cpu().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(masters, foreach=False)

    def step(batch: Any) -> None:
        model.zero_grad()
        model(batch[0].to(DEVICE, non_blocking=True)).square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return DataLoader(Made(tiny), 64, num_workers=2, pin_memory=True), step


NONE = ("none", "other processes")
TRANSFORM, STEP = ("transform", "reading"), "fewer kernel"
FAULTS = [
    Fault("slow decode", other(decoded, not_decoded), ("decoding",), "without doctor_faults"),
    Fault(
        "slow decode, one worker", other(decoded, not_decoded, num_workers=1), ("decoding",), "without doctor_faults"
    ),
    Fault("one worker", simple(slept(0.0005), num_workers=1), TRANSFORM, "num_workers"),
    Fault("no worker", simple(slept(0.0005)), TRANSFORM, "num_workers"),
    Fault("tiny HDF5 cache", with_cache(rdcc_nbytes=1 << 16), ("reading",), "chunk cache"),
    Fault("one slot in the HDF5 cache", with_cache(rdcc_nslots=1, rdcc_nbytes=1 << 26), ("reading",), "chunk cache"),
    Fault("chunks across samples", across_samples, ("reading",), "repack"),
    Fault("throttled disk", other(throttled, not_throttled, num_workers=1), ("reading",), "without doctor_faults"),
    Fault("memory pressure", short_of_memory, ("memory",)),
    Fault("oversubscription", oversubscribed, ("oversubscription",), "threads"),
    Fault("slow collate", collating, ("collate",), "without slow_collate"),
    Fault("lock in a transform", other(locked, unlocked, num_workers=2), ("lock",), "no lock"),
    Fault("unbalanced workers", simple(uneven, num_workers=2), ("unbalanced",), "in_order"),
    Fault("validation in between", validating, ("validation",)),
    Fault("small batches", small_batches, ("small batches",), "" if CUDA else "larger batches"),
    Fault("Python in the step", with_python, ("python",) if CUDA else NONE, "less Python" if CUDA else ""),
    Fault(".item() in each step", item, ("synchronisation",) if CUDA else NONE, "no sync" if CUDA else ""),
    Fault("pageable copy", copying, ("copy",), "pin_memory", gpu=True),
    Fault("synchronous copy", synchronous, ("copy", "synchronisation"), "no", gpu=True),
    Fault("launch-bound model", launching, ("launches",), STEP, gpu=True),
    Fault("optimizer of many kernels", optimizing, ("optimizer",), "fused", gpu=True),
    Fault("optimizer on the CPU", optimizing_on_cpu, ("optimizer", "synchronisation"), gpu=True),
]


def healthy() -> Iterator[tuple[str, Make]]:
    work = 12 if CUDA else 25
    yield "in memory", simple(tiny, 32, work=work)
    yield "one worker", simple(tiny, 32, work=work, num_workers=1)
    yield "two workers, pinned", simple(tiny, 32, work=work, num_workers=2, pin_memory=CUDA)
    path = stored("whole", (1, 32, 32, 3))
    yield (
        "HDF5 in good chunks",
        lambda fix: (DataLoader(Stored(path), 32, num_workers=1), trainer(network(), work=work)),
    )
    yield (
        "ChunkLoader",
        lambda fix: (
            h5chunk.ChunkLoader(h5chunk.ChunkDataset(path, fields=["images"]), 64),
            trainer(network(), work=work),
        ),
    )
