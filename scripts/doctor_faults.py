"""Training loops with planted faults, and healthy ones, for `bench_doctor.py`.

``fault.make(None)`` makes a loop with the fault, and ``fault.make(fix)`` one with this fix applied, or a loop that
never had the fault. A loop is a loader and a function that trains with one batch.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from doctor_samples import (
    Large,
    Made,
    Mapped,
    Stored,
    decoded,
    locked,
    not_decoded,
    not_throttled,
    slept,
    slow_collate,
    stored,
    throttled,
    tiny,
    uneven,
    unlocked,
)
from torch.utils.data import DataLoader, default_collate

import h5chunk

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WORK = 3.0 if CUDA else 5.0  # duration of a step in most loops, in milliseconds
CORES = len(os.sched_getaffinity(0))
Step = Callable[[Any], None]
Loop = tuple[Any, Step]
Make = Callable[[Any], Loop]


@dataclass
class Fault:
    """A training loop with a fault."""

    name: str
    make: Make
    causes: tuple[str, ...]  # correct verdicts; "none" if neither the data nor anything else is the cause
    fix: str = ""  # beginning of the name of the fix to measure; empty for none
    gpu: bool = False


# ---- steps


def network(width: int = 256, depth: int = 2, inputs: int = 256, device: str = DEVICE) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).to(device)


class Work:
    """A few matrix products that take about this time, in milliseconds."""

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
    """Return a training step.

    ``work`` is the time of the matrix products after the model, in milliseconds; -1 means about as long as the Python
    code.
    """
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
    """Return a function that makes a loop, whose loader accepts the arguments of a fix."""

    def loop(fix: Any) -> Loop:
        loader = DataLoader(Made(make), batch, **{**options, **applied(fix)})
        return loader, trainer(network(), work=work)

    return loop


def other(fault: Any, cured: Any, **options: Any) -> Make:
    """Return a function that makes a loop with the fault or, if it is to be fixed, with samples without the fault."""
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


def holding_the_lock(fix: Any) -> Loop:
    loader = DataLoader(Made(tiny), 32, num_workers=1)
    if fix is None:
        threading.Thread(target=spin, args=(weakref.ref(loader),), name="log", daemon=True).start()
    return loader, trainer(network(), work=WORK)


def spin(loader: Callable[[], Any]) -> None:
    while loader() is not None:
        sum(i * i for i in range(2_000))


def chunk_loader(fix: Any) -> Loop:
    path = stored("packed", (8, 128, 128, 3), side=128, compression="gzip")
    options = {"resident": False, **(fix.apply["chunk_loader"] if fix else {})}
    dataset = h5chunk.ChunkDataset(path, fields=["images"])
    return h5chunk.ChunkLoader(dataset, 64, **options), trainer(network(), work=2)


NONE = ("none", "other processes")
TRANSFORM, STEP = ("transform", "reading"), "fewer kernel"
FAULTS = [
    Fault("slow decode", other(decoded, not_decoded), ("decoding",), "without doctor_samples"),
    Fault(
        "slow decode, one worker", other(decoded, not_decoded, num_workers=1), ("decoding",), "without doctor_samples"
    ),
    Fault("one worker", simple(slept(0.0005), num_workers=1), TRANSFORM, "num_workers"),
    Fault("no worker", simple(slept(0.0005)), TRANSFORM, "num_workers"),
    Fault("tiny HDF5 cache", with_cache(rdcc_nbytes=1 << 16), ("reading",), "chunk cache"),
    Fault("one slot in the HDF5 cache", with_cache(rdcc_nslots=1, rdcc_nbytes=1 << 26), ("reading",), "chunk cache"),
    Fault("chunks across samples", across_samples, ("reading",), "repack"),
    Fault("throttled disk", other(throttled, not_throttled, num_workers=1), ("reading",), "without doctor_samples"),
    Fault("memory pressure", short_of_memory, ("memory",)),
    Fault("oversubscription", oversubscribed, ("oversubscription",), "threads"),
    Fault("slow collate", collating, ("collate",), "without slow_collate"),
    Fault("lock in a transform", other(locked, unlocked, num_workers=2), ("lock",), "no lock"),
    Fault("unbalanced workers", simple(uneven, num_workers=2), ("unbalanced",), "in_order"),
    Fault("a thread that holds the GIL", holding_the_lock, ("gil",), "without thread"),
    Fault("ChunkLoader decodes", chunk_loader, ("decoding",), "resident"),
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
