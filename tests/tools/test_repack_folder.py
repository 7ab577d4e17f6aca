"""Repacking a folder of files: each as if it were repacked alone, all of them there or none, here and on a cluster."""

from __future__ import annotations

import filecmp
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError, OptionError, OutputError
from h5chunk.store.write.part_file import lock
from h5chunk.tools.repack import repack as module
from h5chunk.tools.repack.repack import repack


@pytest.fixture
def shards(class_folder, tmp_path) -> Path:
    h5chunk.convert(class_folder(40), tmp_path / "old", shards=4, chunk_samples=5)
    return tmp_path / "old"


def pixels(folder: Path) -> np.ndarray:
    with h5chunk.ChunkLoader(folder, 40, device="cpu") as loader:
        (batch,) = [images.numpy() for images, _ in loader]
    return batch


def equal_folders(one: Path, other: Path) -> bool:
    files = [sorted(folder.iterdir()) for folder in (one, other)]
    names = [[file.name for file in each] for each in files]
    return names[0] == names[1] and all(filecmp.cmp(*pair, shallow=False) for pair in zip(*files, strict=True))


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if "h5" in entry.name or "new" in entry.name}


def test_each_file_as_if_alone(shards, tmp_path):
    told = []
    report = repack(shards, tmp_path / "new", chunk_samples=2, compression="gzip", progress=lambda *a: told.append(a))
    for file in sorted(shards.iterdir()):
        repack(file, tmp_path / "alone.h5", chunk_samples=2, compression="gzip", overwrite=True)
        assert filecmp.cmp(tmp_path / "alone.h5", tmp_path / "new" / file.name, shallow=False)
    assert h5chunk.ChunkDataset(tmp_path / "new").header.shuffled and h5chunk.verify(tmp_path / "new").ok
    assert sorted(map(bytes, pixels(tmp_path / "new"))) == sorted(map(bytes, pixels(shards)))
    total = sum(file.stat().st_size for file in shards.iterdir())
    assert told[-1] == ("repack", total, total)
    assert len(report.files) == 4 and report.files[1].path == str(tmp_path / "new" / "old-00001-of-00004.h5")
    assert not report.already_complete and "4 files" in str(report)
    assert repack(shards, tmp_path / "new", chunk_samples=2, compression="gzip").already_complete


def test_chunks_of_one_size(tmp_path):
    (tmp_path / "old").mkdir()
    for name, count in (("a", 5000), ("b", 300)):
        with h5py.File(tmp_path / "old" / f"{name}.h5", "w") as file:
            file["images"] = np.zeros((count, 3, 32, 32), np.uint8)
    report = repack(tmp_path / "old", tmp_path / "new")
    assert len({file.chunk_samples for file in report.files}) == 1
    assert repack(tmp_path / "old", tmp_path / "new").already_complete
    with pytest.raises(OutputError, match="with files that are not shards"):
        repack(tmp_path / "old", tmp_path / "new", compression="gzip")


def test_on_a_cluster(shards, tmp_path):
    distributed = pytest.importorskip("distributed")
    about = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    repack(shards, tmp_path / "here", chunk_samples=3)
    with distributed.LocalCluster(**about) as local, distributed.Client(local) as client:
        repack(shards, tmp_path / "new", chunk_samples=3, client=client)
        with pytest.raises(OptionError, match="each worker repacks one file"):
            repack(sorted(shards.iterdir())[0], tmp_path / "one.h5", client=client)
    assert equal_folders(tmp_path / "here", tmp_path / "new")
    assert names_in(tmp_path) == {"new"}


def test_a_stopped_repack_continues(shards, tmp_path, in_process, monkeypatch):
    repack(shards, tmp_path / "right", chunk_samples=3)
    write, sources = module._write, []

    def fail(say, source, plan, new):
        sources.append(source.path.name)
        if len(sources) == 3:
            raise OutputError("the disk is full")
        return write(say, source, plan, new)

    monkeypatch.setattr(module, "_write", fail)
    with pytest.raises(OutputError, match="the disk is full"):
        repack(shards, tmp_path / "new", chunk_samples=3)
    assert not (tmp_path / "new").exists()
    repack(shards, tmp_path / "new", chunk_samples=3)
    assert [name[4:9] for name in sources] == ["00000", "00001", "00002", "00002", "00003"]
    assert equal_folders(tmp_path / "right", tmp_path / "new")
    assert names_in(tmp_path) == {"new"}


def test_a_damaged_file(shards, tmp_path):
    damaged = sorted(shards.iterdir())[2]
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\xff" * 64)
    with pytest.raises(FileError, match=r"00002-of-00004.*nothing was repacked"):
        repack(shards, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_two_at_once(shards, tmp_path):
    part = tmp_path / ".new.h5chunk-part"
    part.mkdir()
    descriptor = os.open(part, os.O_RDONLY)
    lock(descriptor, "new")
    with pytest.raises(OutputError, match="another process is writing it"):
        repack(shards, tmp_path / "new")
    os.close(descriptor)


def test_errors(shards, tmp_path):
    for options, match in (({"shuffle": True}, "only within a file"), ({"compression": "x"}, "compression is 'x'")):
        with pytest.raises(OptionError, match=match):
            repack(shards, tmp_path / "new", **options)
    with pytest.raises(OutputError, match="is also the source"):
        repack(shards, shards, overwrite=True)
    sorted(shards.iterdir())[1].unlink()
    with pytest.raises(FileError, match=r"00001-of-00004.h5 is missing"):
        repack(shards, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="no file in this folder ends in"):
        repack(tmp_path / "empty", tmp_path / "new")
    assert names_in(tmp_path) == set()


def test_the_command(shards, tmp_path):
    arguments = ["repack", str(shards), str(tmp_path / "new"), "--json"]
    plan = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert json.loads(plan.stdout)["files"][3]["path"].endswith("new/old-00003-of-00004.h5")
    assert names_in(tmp_path) == set()
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and len(json.loads(result.stdout)["files"]) == 4
