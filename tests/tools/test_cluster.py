"""Conversion and checks on a Dask cluster: the same bytes and reports, whatever happens to its workers."""

from __future__ import annotations

import filecmp
import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from support.dask_workers import MortalWorkers, dask_scheduler
from support.pictures import pixels

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import MissingPackageError, OptionError, OutputError, SampleError, WorkerError
from h5chunk.store.write.part_file import lock
from h5chunk.tools import cluster
from h5chunk.tools.cluster import connected
from h5chunk.tools.convert.distribute import write_shard

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def client():
    """A cluster of two threads of this process."""
    about = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**about) as local, distributed.Client(local) as found:
        yield found


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have shards of the same bytes."""
    names = [[file.name.removeprefix(folder.name) for file in sorted(folder.iterdir())] for folder in (one, other)]
    pairs = zip(sorted(one.iterdir()), sorted(other.iterdir()), strict=True)
    return names[0] == names[1] and all(filecmp.cmp(*pair, shallow=False) for pair in pairs)


def nothing_left(folder: Path) -> bool:
    return not [entry for entry in folder.iterdir() if "h5chunk-" in entry.name]


def spoil(root: Path) -> Path:
    """Make an image of a folder unreadable."""
    image = sorted(root.rglob("*.png"))[-1]
    image.write_bytes(b"no image")
    return image


@pytest.mark.parametrize("options", [{}, {"keep_encoded": True}, {"keep_size": True}, {"shuffle": False}])
def test_the_same_bytes(client, class_folder, tmp_path, options):
    root = class_folder(count=30)
    options = {"shards": 5, **options}
    local = h5chunk.convert(root, tmp_path / "local", **options)
    told = []
    report = h5chunk.convert(
        root, tmp_path / "cluster", client=client, progress=lambda *args: told.append(args), **options
    )
    assert same_files(tmp_path / "local", tmp_path / "cluster")
    assert nothing_left(tmp_path)
    kept = ("num_samples", "num_bytes", "counts", "fields", "shapes", "class_names", "layout")
    assert {name: getattr(report, name) for name in kept} == {name: getattr(local, name) for name in kept}
    assert told[-1] == ("convert", 30, 30)
    again = h5chunk.convert(root, tmp_path / "cluster", client=client, **options)
    assert again.already_complete


def test_skipped_samples(client, class_folder, tmp_path):
    root = class_folder(count=30)
    image = spoil(root)
    options = {"shards": 4, "on_error": "skip"}
    local = h5chunk.convert(root, tmp_path / "local", **options)
    report = h5chunk.convert(root, tmp_path / "cluster", client=client, **options)
    assert [Path(name).name for name, _ in report.skipped] == [image.name]
    assert report.skipped == local.skipped
    assert report.num_samples == 29
    folders = [tmp_path / "local", tmp_path / "cluster"]
    assert same_files(*folders)


@pytest.mark.parametrize("first_on_cluster", [True, False])
def test_what_was_interrupted_is_continued_with_a_cluster_or_without(client, class_folder, tmp_path, first_on_cluster):
    root = class_folder(count=40)
    image = spoil(root)
    clients = [client, None] if first_on_cluster else [None, client]
    options = {"shards": 8, "shuffle": False, "workers": 0}
    with pytest.raises(SampleError, match=image.name):
        h5chunk.convert(root, tmp_path / "out", client=clients[0], **options)
    assert not (tmp_path / "out").exists()
    Image.fromarray(pixels(7)).save(image)
    notes = []
    h5chunk.convert(root, tmp_path / "out", client=clients[1], notify=notes.append, **options)
    assert "are already written" in notes[0]
    h5chunk.convert(root, tmp_path / "local", **options)
    assert same_files(tmp_path / "local", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_second_conversion_to_the_same_folder_is_an_error(client, class_folder, tmp_path):
    root = class_folder(count=10)
    part = tmp_path / ".out.h5chunk-part"
    part.mkdir()
    descriptor = os.open(part, os.O_RDONLY)
    lock(descriptor, "out")
    with pytest.raises(OutputError, match="another process is writing it"):
        h5chunk.convert(root, tmp_path / "out", shards=2, client=client)
    os.close(descriptor)
    h5chunk.convert(root, tmp_path / "out", shards=2, client=client)


def write_twice(task, say):
    """Write a shard in two threads at once."""
    both, results = threading.Barrier(2), []

    def run():
        both.wait()
        results.append(write_shard(task, say))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = results
    assert one.attempt != other.attempt
    assert filecmp.cmp(task.folder.path / one.attempt, task.folder.path / other.attempt, shallow=False)
    return one


def test_a_shard_that_is_written_twice_at_once(client, class_folder, tmp_path, monkeypatch):
    root = class_folder(count=20)
    h5chunk.convert(root, tmp_path / "local", shards=3)
    monkeypatch.setattr("h5chunk.tools.convert.distribute.write_shard", write_twice)
    h5chunk.convert(root, tmp_path / "out", shards=3, client=client)
    assert same_files(tmp_path / "local", tmp_path / "out")
    assert nothing_left(tmp_path)


def count_runs(task, say):
    """Fail as often as the task says, and count the runs in a file."""
    path, failures, error = task
    with path.open("a") as file:
        file.write("x")
    if path.stat().st_size <= failures:
        raise error
    return path.stat().st_size


def test_a_task_that_cannot_write_is_tried_again(client, tmp_path):
    full = OutputError("the disk is full")
    with connected(client) as found:
        tasks = {number: (tmp_path / str(number), number, full) for number in range(3)}
        assert dict(found.run(count_runs, tasks, lambda *args: None)) == {0: 1, 1: 2, 2: 3}
        with pytest.raises(OutputError, match="the disk is full"):
            list(found.run(count_runs, {0: (tmp_path / "a", 3, full)}, lambda *args: None))
        with pytest.raises(SampleError, match="bad"):
            list(found.run(count_runs, {0: (tmp_path / "b", 1, SampleError("bad"))}, lambda *args: None))
        assert (tmp_path / "b").stat().st_size == 1


def fail_at(task, say):
    """Fail at one worker, and note in a file where a task ran."""
    address, (bad, path) = distributed.get_worker().address, task
    with path.open("a") as file:
        file.write(f"{address}\n")
    if address == bad:
        raise OutputError("the disk is full")
    return address


def test_a_worker_whose_disk_is_full(client, tmp_path):
    """What fails there runs at another worker the next time."""
    bad, good = client.scheduler_info()["workers"]
    with connected(client) as found:
        tasks = {number: (bad, tmp_path / str(number)) for number in range(8)}
        done = dict(found.run(fail_at, tasks, lambda *args: None))
    assert set(done.values()) == {good}
    assert max(len(path.read_text().split()) for path in tmp_path.iterdir()) == 2


def test_a_folder_is_checked_on_a_cluster(client, class_folder, tmp_path):
    h5chunk.convert(class_folder(count=20), tmp_path / "out", shards=4)
    damaged = sorted((tmp_path / "out").iterdir())[2]
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\xff" * 64)
    (tmp_path / "out" / "no.h5").write_bytes(b"no HDF5")
    here, there = (h5chunk.verify(tmp_path / "out", client=found) for found in (None, client))
    assert not here.ok
    facts = [[(file.path, file.ok, file.bad, file.problems) for file in report.files] for report in (here, there)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"client": "local:2"}, OptionError, "add shards"),
        ({"client": "local:x", "shards": 2}, OptionError, "number of worker processes"),
        ({"client": "tcp://127.0.0.1:1", "shards": 2}, OptionError, "cannot be reached"),
        ({"client": "no.json", "shards": 2}, OptionError, "cannot be reached"),
    ],
)
def test_clusters_that_cannot_be_used(class_folder, tmp_path, monkeypatch, options, error, message):
    monkeypatch.setattr(cluster, "CONNECT_S", 0.2)
    with pytest.raises(error, match=message):
        h5chunk.convert(class_folder(count=10), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("version", "found"), [(None, "no h5chunk"), ("0.0.9", "h5chunk 0.0.9")])
def test_a_worker_with_another_version(client, class_folder, tmp_path, monkeypatch, version, found):
    def answer(name):
        if version is None:
            raise ModuleNotFoundError("No module named 'h5chunk'")
        return version

    monkeypatch.setattr("pkgutil.resolve_name", answer)
    with pytest.raises(WorkerError, match=f"the Dask worker .* has {found}, but"):
        h5chunk.convert(class_folder(count=10), tmp_path / "out", shards=2, client=client)
    assert not (tmp_path / "out").exists()


def test_without_dask(class_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingPackageError, match=r"h5chunk\[distributed\]"):
        h5chunk.convert(class_folder(count=10), tmp_path / "out", shards=2, client="local:1")


def test_a_scheduler_without_workers(class_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 2.0)
    with dask_scheduler(tmp_path) as (_, file), pytest.raises(WorkerError, match="has no workers"):
        h5chunk.convert(class_folder(count=10), tmp_path / "out", shards=2, client=str(file))


def test_the_command(class_folder, tmp_path):
    root = class_folder(count=20)
    arguments = ["convert", str(root), str(tmp_path / "out"), "--shards", "3", "--dask", "local:2", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_samples"] == 20
    h5chunk.convert(root, tmp_path / "local", shards=3)
    assert same_files(tmp_path / "local", tmp_path / "out")


def kill_workers(tmp_path, num_kills, life_s):
    """Convert until so many workers were killed; each time all is there."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(400):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(root / f"{number:03}.png")
    h5chunk.convert(root, tmp_path / "local", shards=12)
    with dask_scheduler(tmp_path) as (_, file), MortalWorkers(file, 2, num_kills, life_s=life_s) as workers:
        while workers.killed < num_kills:
            h5chunk.convert(root, tmp_path / "out", shards=12, client=str(file), overwrite=True)
            assert same_files(tmp_path / "local", tmp_path / "out")
            assert nothing_left(tmp_path)


def test_killed_workers(tmp_path):
    kill_workers(tmp_path, 1, 1.0)


@pytest.mark.torture
def test_fifty_killed_workers(tmp_path):
    kill_workers(tmp_path, 50, 3.0)


def test_a_scheduler_that_ends(tmp_path):
    """The conversion ends with an error, and is continued with another scheduler."""
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(300):
        Image.fromarray(pixels(number)).save(root / f"{number:03}.png")
    with dask_scheduler(tmp_path) as (scheduler, file), MortalWorkers(file, 1, 0):

        def stop(stage, done, total):
            if done and stage == "convert":
                scheduler.send_signal(signal.SIGKILL)

        with pytest.raises(WorkerError, match="repeat the command"):
            h5chunk.convert(root, tmp_path / "out", shards=20, client=str(file), progress=stop)
    file.unlink()
    notes = []
    h5chunk.convert(root, tmp_path / "out", shards=20, notify=notes.append)
    assert "are already written" in notes[0]
    h5chunk.convert(root, tmp_path / "local", shards=20)
    assert same_files(tmp_path / "local", tmp_path / "out")
