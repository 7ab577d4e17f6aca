"""Workers that run code of the user: they never hang as a fork of a process with threads would, whatever it holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.faults import small

import h5chunk
from h5chunk.errors import WorkerError

COUNT = 40

SCRIPT = """
import os, sys, threading, torch, h5chunk

class Scaled:
    "A data set of a script that has no __main__ guard, with a lambda and a tensor."
    def __init__(self):
        self.scale, self.offset = (lambda x: x * 2), torch.ones(())
    def __len__(self):
        return 40
    def __getitem__(self, i):
        print("reading", i, flush=True) if i == 7 else None
        return self.scale(torch.full((64, 64, 64), float(i))).sub(self.offset)[0, 0, :3], i % 3, os.getpid()

(torch.rand(64, 3, 224, 224) + 1).sum()  # starts torch's threads
h5chunk.convert(Scaled(), sys.argv[1], workers=2)
print("done")
"""


class Source:
    """A data set whose sample ``i`` is ``get(i)``, from ``held`` if that is given."""

    def __init__(self, get: Callable[..., Any], held: Any = None) -> None:
        self.get, self.held = get, held

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.get(index) if self.held is None else self.get(self.held, index)


class Threaded(Source):
    """A data set that has a running thread wherever it is."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def read(path: Path, *names: str) -> list[np.ndarray]:
    """Return fields of a file in the order of the source."""
    with h5py.File(path) as file:
        order = np.argsort(file["h5chunk/source_index"][:])
        return [file[name][:][order] for name in names]


def test_a_script_that_has_used_torch(tmp_path: Path) -> None:
    """Without a __main__ guard, and although forks of it hang in torch. Its output stays where it was."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "o.h5")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["reading 7", "done"]
    values, processes = read(tmp_path / "o.h5", "field0", "field2")
    np.testing.assert_array_equal(values, np.arange(COUNT)[:, None] * np.float32(2) - np.ones(3, np.float32))
    assert len(set(processes[1:].tolist())) >= 1 and os.getpid() not in processes


def process_and_value(index: int) -> dict[str, Any]:
    return {"value": index, "process": os.getpid(), "threads": len(os.listdir("/proc/self/task"))}


@pytest.mark.parametrize("kind", [Source, Threaded])
def test_workers_receive_the_data_set(tmp_path: Path, kind: type[Source]) -> None:
    """Also where it has threads by then: such workers are not forked."""
    h5chunk.convert(kind(process_and_value), tmp_path / "o.h5", workers=2)
    values, processes = read(tmp_path / "o.h5", "value", "process")
    np.testing.assert_array_equal(values, np.arange(COUNT))
    assert os.getpid() not in processes


def row_of(held: Any, index: int) -> dict[str, Any]:
    return {"value": np.asarray(held[index]), "process": os.getpid()}


@pytest.mark.parametrize("kind", ["file", "lock", "large", "part of a map"])
def test_what_cannot_be_sent_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    values = np.arange(COUNT * 64).reshape(COUNT, 64)
    np.save(tmp_path / "values.npy", values)
    mapped = np.load(tmp_path / "values.npy", mmap_mode="r")
    small(monkeypatch, sent_bytes=10000)
    sources: dict[str, Any] = {"large": Source(row_of, values), "part of a map": Source(row_of, mapped[:])}
    sources |= {"lock": Source(lambda held, i: row_of(values, i), threading.Lock())}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["values"] = values
        sources["file"] = Source(row_of, file["values"])
        with pytest.warns(RuntimeWarning, match="samples are read in this process, without workers, because"):
            h5chunk.convert(sources[kind], tmp_path / "o.h5", workers=2)
    written, processes = read(tmp_path / "o.h5", "value", "process")
    np.testing.assert_array_equal(written, values)
    assert set(processes) == {os.getpid()}


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_memory_map_is_sent_as_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    values = np.asarray(np.arange(COUNT * 64).reshape(COUNT, 64), order=order)
    np.save(tmp_path / "values.npy", values)
    small(monkeypatch, sent_bytes=10000)
    h5chunk.convert(Source(row_of, np.load(tmp_path / "values.npy", mmap_mode="r")), tmp_path / "o.h5", workers=2)
    written, processes = read(tmp_path / "o.h5", "value", "process")
    np.testing.assert_array_equal(written, values)
    assert os.getpid() not in processes


def waiting(index: int) -> int:
    if index == 23:
        threading.Event().wait()
    return index


def test_a_worker_that_stands_still_names_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, stall_s=1.0)
    with pytest.raises(WorkerError, match="sample 23: a worker process has waited for 1 s while it read this sample"):
        h5chunk.convert(Source(waiting), tmp_path / "o.h5", workers=2)
    assert not (tmp_path / "o.h5").exists()


def slow(index: int) -> int:
    time.sleep(0.02)
    return index


def test_slow_samples_do_not_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, stall_s=0.1)
    h5chunk.convert(Source(slow), tmp_path / "o.h5", workers=1)
    np.testing.assert_array_equal(*read(tmp_path / "o.h5", "data"), np.arange(COUNT))


def descendants(process: int) -> Iterator[int]:
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_caller(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import os, sys, time, h5chunk\n"
        "class Slow:\n"
        "    def __len__(self): return 10000\n"
        "    def __getitem__(self, i): time.sleep(0.1); print(os.getpid(), flush=True); return i\n"
        "h5chunk.convert(Slow(), sys.argv[1], workers=2)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "o.h5")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        while caller.stdout.readline() == f"{caller.pid}\n":  # the caller reads some samples itself
            pass
        left = list(descendants(caller.pid))
        assert len(left) >= 3, left
        caller.send_signal(number)
        caller.wait(20)
    due = time.monotonic() + 20
    while any(Path(f"/proc/{process}/cmdline").exists() for process in left):
        assert time.monotonic() < due, left
        time.sleep(0.05)
