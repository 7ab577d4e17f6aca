"""The machine code of kernels on disk: what is kept is what is loaded, and only that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import h5chunk
from h5chunk.transforms import kernel_cache
from h5chunk.transforms.kernel_cache import Code, bits_of, code_of, path_of, read, write

CODE = Code("kernel", 128, 16, b"machine\ncode\0")


def compiled(**changes: Any) -> Any:
    facts = {"name": "kernel", "num_warps": 4, "shared": 16, "global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(metadata=SimpleNamespace(**facts | changes), asm={"cubin": CODE.image})


def test_code_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "h5chunk" / "kernels" / "one"
    assert read(path) is None
    write(path, CODE)
    assert read(path) == CODE == code_of(compiled())
    assert [each.name for each in path.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "text", "owner"])
def test_damaged_or_foreign_code_is_not_loaded(tmp_path: Path, monkeypatch: Any, damage: str) -> None:
    path = tmp_path / "kernels" / "one"
    write(path, CODE)
    stored = path.read_bytes()
    changed = {"bit": stored[:-1] + b"\1", "cut": stored[:-1], "empty": b"", "text": b"{}\n", "owner": stored}
    path.write_bytes(changed[damage])
    if damage == "owner":
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert read(path) is None


def test_code_that_needs_more_than_arguments_is_not_kept() -> None:
    for change in ({"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"shared": 1 << 20}):
        assert code_of(compiled(**change)) is None
    assert code_of(SimpleNamespace()) is None


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 2)
    for number in range(4):
        write(tmp_path / str(number), CODE)
        os.utime(tmp_path / str(number), (number, number))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2", "3"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file" / "one", CODE)


def test_code_depends_on_all_that_triton_compiles_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "3.6.0")
    (tmp_path / "kernels_of_a_test.py").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))

    def path(*arguments: Any, **options: Any) -> Path | None:
        return path_of("kernels_of_a_test", "kernel", arguments, options)

    numbers = torch.zeros(64)
    first = path(numbers, 1, 0.5, warps=4)
    assert first is not None and first.parent == tmp_path / "h5chunk" / "kernels"
    assert first == path(torch.ones(3), 2, 1.5, warps=4)
    others = [
        path(numbers[1:], 1, 0.5, warps=4),
        path(numbers.double(), 1, 0.5, warps=4),
        path(numbers, 1, 0.5, warps=2),
    ]
    others += [path(numbers, 1 << 31, 0.5, warps=4)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    others.append(path(numbers, 1, 0.5, warps=4))
    (tmp_path / "kernels_of_a_test.py").write_text("two")
    others.append(path(numbers, 1, 0.5, warps=4))
    assert len({first, *others}) == 7
    assert path_of("no_such_module", "kernel", (), {}) is None


def test_a_float_is_passed_by_its_bits() -> None:
    assert np.uint32(bits_of(-1.5)).view(np.float32) == -1.5


FIRST = """
import sys, torch, h5chunk
from h5chunk.transforms import Normalize, RandomResizedCrop
steps = [Normalize(0.5, 0.25)] if sys.argv[2] == "scaled" else [RandomResizedCrop(64), Normalize(0.5, 0.25)]
loader = h5chunk.ChunkLoader(sys.argv[1], 512, transforms=steps, device="cuda")
for images, *_ in loader:
    pass
loader.close()
print("triton" in sys.modules, torch.stack([images.double().sum(), images.double().std()]).tolist())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("steps", ["scaled", "cropped"])
def test_the_second_process_does_not_import_triton(tmp_path: Path, steps: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2048, 96, 96, 3), np.uint8)
    h5chunk.convert({"images": images}, tmp_path / "images.h5", progress=False)
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", FIRST, str(tmp_path / "images.h5"), steps]
    runs = [subprocess.run(command, env=variables, capture_output=True, text=True) for _ in range(2)]
    assert not any(run.returncode for run in runs), runs
    (first, *sums), (second, *again) = (run.stdout.split(maxsplit=1) for run in runs)
    assert (first, second) == ("True", "False") and sums == again
