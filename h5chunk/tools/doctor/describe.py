"""Describe loaders, batches and the machine, as facts for a diagnosis."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from h5chunk.machine import available_cores

CHUNK_LOADER = {"kind": "ChunkLoader", "num_workers": 0, "made_at": ""}


def describe(loader: Any) -> dict[str, Any]:
    """Describe a DataLoader by its settings and the line that made it."""
    if not isinstance(loader, DataLoader):
        return CHUNK_LOADER
    names = "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size"
    facts = {name: getattr(loader, name, None) for name in names}
    facts["in_order"] = getattr(loader, "in_order", True)
    facts["dataset"], facts["length"] = type(loader.dataset).__qualname__, _length(loader.dataset)
    facts["batched"] = hasattr(loader.dataset, "__getitems__")
    collate = loader.collate_fn
    facts["collate"] = "" if collate.__module__.startswith("torch.") else getattr(collate, "__qualname__", "")
    made_at = loader.__dict__.get("_made_at", "")
    return {"kind": "DataLoader", "made_at": made_at, **facts}


def _length(data: Any) -> int:
    try:
        return len(data)
    except Exception:
        return 0


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors in a batch of tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [tensor for item in batch for tensor in tensors_of(item)]
    return []


def batch_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.ndim else 1


def describe_batch(batch: Any) -> dict[str, Any]:
    """Describe the memory of a batch."""
    tensors = tensors_of(batch)
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    return {
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": len(tensors),
        "pinned": bool(tensors) and all(tensor.is_pinned() for tensor in tensors if not tensor.is_cuda),
        "device": "" if largest is None else largest.device.type,
        "dtype": "" if largest is None else str(largest.dtype).removeprefix("torch."),
    }


def machine() -> dict[str, Any]:
    """Describe cores, threads and the GPU."""
    facts: dict[str, Any] = {"cores": available_cores(), "threads": torch.get_num_threads(), "gpu": ""}
    if torch.cuda.is_initialized():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_free"] = torch.cuda.mem_get_info()[0]
    return facts
