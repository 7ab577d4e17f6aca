"""The public surface: names, and arguments with their defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import h5chunk
import h5chunk.errors
import h5chunk.transforms

MISSING = inspect.Parameter.empty


def arguments(function: Any) -> dict[str, Any]:
    """Arguments with their defaults, those by keyword alone marked by a star."""
    parameters = list(inspect.signature(function).parameters.values())
    return {("*" if each.kind is each.KEYWORD_ONLY else "") + each.name: each.default for each in parameters}


def test_a_data_set_owns_the_data():
    assert arguments(h5chunk.ChunkDataset) == {
        "path": MISSING, "*fields": None, "*offsets": None, "*lengths": None, "*key": None, "*missing": "drop",
        "*sample_axis": None, "*decode": None, "*trusted": False, "*checksums": "off", "*transforms": None,
        "*as_dict": False, "*on_error": "raise", "*max_skipped": 0.01,
        "*cache_dir": None, "*cache_bytes": None, "*storage_options": None,
    }  # fmt: skip


def test_a_mix_owns_the_proportions():
    assert arguments(h5chunk.Mix) == {
        "members": MISSING, "*weights": None, "*temperature": None, "*epoch": "longest", "*fields": None,
        "*transforms": None, "*as_dict": False, "*on_error": "raise", "*max_skipped": 0.01,
    }  # fmt: skip


def test_a_sampler_owns_the_order():
    assert arguments(h5chunk.ChunkSampler) == {
        "dataset": MISSING, "batch_size": None, "*batch_elements": None,
        "*bucket_batches": 1, "*shuffle": True, "*seed": 0, "*window_chunks": None,
        "*drop_last": False, "*pad": False, "*lanes": None, "*rank": None, "*world_size": None, "*weights": None,
        "*locality": None, "*num_workers": None,
        "*groups": None, "*groups_per_batch": None, "*proportions": None, "*controls": None,
    }  # fmt: skip


def test_a_loader_owns_where_and_how():
    assert arguments(h5chunk.ChunkLoader) == {
        "data": MISSING, "batch_size": None, "*batch_elements": None, "*batch_sampler": None,
        "*shuffle": True, "*seed": 0, "*drop_last": False,
        "*transforms": None, "*as_dict": None,
        "*device": "cpu", "*memory_bytes": None, "*num_threads": None, "*resident": False,
        "*reuse": False, "*echo": 1, "*timeout": 120.0, "others": MISSING,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bench", "convert", "info", "repack", "tune", "verify"])
def test_commands_are_functions(name):
    assert callable(getattr(h5chunk, name))


def test_errors_are_in_the_package():
    errors = {
        name
        for name, value in vars(h5chunk.errors).items()
        if isinstance(value, type) and issubclass(value, h5chunk.errors.H5ChunkError)
    }
    assert "FileError" in errors
    assert {name for name in errors if getattr(h5chunk, name) is not getattr(h5chunk.errors, name)} == set()


def test_transforms():
    augmenting = {"AlternatingFlip", "CenterCrop", "Cutout", "RandomCrop", "RandomErasing", "RandomHorizontalFlip"}
    augmenting |= {"RandomResizedCrop", "Resize", "per_sample", "ColorJitter", "MixUp", "CutMix", "RandomChoice"}
    names = {"L2", "Binarize", "Csr", "Dense", "HoldOut", "Log1p", "Nested", "Normalize", "Pack", "Pad", "ToDtype"}
    assert set(h5chunk.transforms.__all__) == names | augmenting
