"""Describe loaders, batches and the machine, and time steps on a batch that is ready, for a diagnosis."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from h5chunk.machine import available_cores

CHUNK_LOADER = {"kind": "ChunkLoader", "num_workers": 0, "made_at": ""}
SETTINGS = "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size"
HOST_STEPS = 10  # steps on a cached batch that measure only Python's time
CACHED_STEPS, CACHED_S = 100, 0.5  # maximum number and seconds of complete steps on a cached batch
MAX_DEPTH = 16  # of lists and dicts in a batch
clock = time.perf_counter


def describe(loader: Any) -> dict[str, Any]:
    """Describe a DataLoader by its settings and the line that created it."""
    collate = loader.collate_fn
    return {
        "kind": "DataLoader",
        "made_at": loader.__dict__.get("_made_at", ""),
        **{name: getattr(loader, name, None) for name in SETTINGS},
        "in_order": getattr(loader, "in_order", True),
        "sequential": type(loader.sampler) is SequentialSampler,
        "collate": "" if collate.__module__.startswith("torch.") else getattr(collate, "__qualname__", ""),
    }


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors in a batch of tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def batch_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    for _ in range(MAX_DEPTH):
        if isinstance(batch, (list, tuple, dict)) and batch:
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.ndim else 1


def describe_batch(batch: Any) -> dict[str, Any]:
    """Describe the memory of a batch."""
    tensors = tensors_of(batch)
    return {"bytes": sum(tensor.nbytes for tensor in tensors), "tensors": len(tensors)}


def machine() -> dict[str, Any]:
    """Describe cores and threads."""
    return {"cores": available_cores(), "threads": torch.get_num_threads()}


def time_step(step: Callable[[Any], object], batch: Any) -> tuple[float, float]:
    """Return the seconds that Python takes for a step, and those that a complete step takes.

    All steps use the same batch.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    times = []
    with torch.random.fork_rng(devices):
        for _ in range(HOST_STEPS):
            wait()  # so that Python does not wait for earlier work
            started = clock()
            step(batch)
            times.append(clock() - started)
        wait()
        started, done = clock(), 0
        while done < CACHED_STEPS and clock() < started + CACHED_S:
            step(batch)
            done += 1
        wait()
    return statistics.median(times), (clock() - started) / done
