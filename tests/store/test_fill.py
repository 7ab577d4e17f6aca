"""Workers that write chunks in place: the same bytes with any number of them, and an end to every accident."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.faults import small

from h5chunk.errors import OutputError, SampleError, WorkerError
from h5chunk.sample_source import SampleReader
from h5chunk.store.write.fill import Failure, Filled, FillField, FillJob, TaskResult, fill, parse_record

SHAPE = (2, 3)
OFFSET = 11
FIELDS = {"pixels": (SHAPE, np.dtype("u1")), "weight": ((), np.dtype("<f4")), "when": ((), np.dtype("<M8[s]"))}


def value(index: int | np.ndarray) -> int | np.ndarray:
    return index % 250 + 1


def values(index: int | np.ndarray) -> dict[str, np.ndarray]:
    """What sample ``index`` has in each field, but for the shape; 0 where it is negative."""
    number = np.where(np.asarray(index) < 0, 0, value(index))
    return {"pixels": number, "weight": number * 1.25, "when": number.astype("<M8[s]")}


class Numbers(SampleReader):
    """Sample i holds ``value(i)``; some fail, some do worse."""

    def __init__(self, bad: Sequence[int] = (), **accidents: int) -> None:
        self.bad, self.accidents, self.entered = set(bad), accidents, False
        self.version = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        self.entered = True
        yield

    def stamp(self, index: int) -> tuple[int, ...]:
        return index, self.version

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        assert self.entered
        assert {name: (array.shape, array.dtype) for name, array in out.items()} == FIELDS
        if index == self.accidents.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.accidents.get("bug"):
            raise ZeroDivisionError("a bug")
        if self.accidents.get("slow"):
            time.sleep(0.005)
        for array in out.values():
            array[...] = 99  # what a failed sample may leave behind
        if index in self.bad:
            raise SampleError(f"sample {index} is bad")
        for name, number in values(index).items():
            out[name][...] = number
        return ("even",) if index % 2 == 0 else ("odd", "strange")


def job(tmp_path: Path, num_samples: int = 200, chunk_samples: int = 3, source: Numbers | None = None) -> FillJob:
    part = tmp_path / "part"
    part.write_bytes(b"\xff" * OFFSET)
    order = np.random.default_rng(1).permutation(num_samples)
    fields, offset = [], OFFSET
    for name, (shape, dtype) in FIELDS.items():
        fields.append(FillField(name, offset, shape, dtype))
        offset += -(-num_samples // chunk_samples) * chunk_samples * int(np.prod(shape, dtype=int)) * dtype.itemsize
    return FillJob(part, tuple(fields), chunk_samples, source or Numbers(), order)


def expected(each: FillJob, bad: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """The fields, padding included."""
    numbers = values(np.where(np.isin(each.order, bad), -1, each.order))
    fields = {}
    for name, (shape, dtype) in FIELDS.items():
        fields[name] = np.zeros((each.num_chunks * each.chunk_samples, *shape), dtype)
        fields[name][: len(each.order)] = numbers[name].reshape(-1, *(1,) * len(shape))
    return fields


def check_written(each: FillJob, filled: Filled, bad: Sequence[int] = ()) -> None:
    """All fields are there, with the checksums that were given back."""
    fields = expected(each, bad)
    assert each.part.read_bytes() == b"\xff" * OFFSET + b"".join(data.tobytes() for data in fields.values())
    assert list(filled.checksums) == list(FIELDS)
    for name, data in fields.items():
        chunks = data.view("u1").reshape(each.num_chunks, -1)
        assert filled.checksums[name].tolist() == [zlib.crc32(chunk.tobytes()) for chunk in chunks]
        assert filled.checksums[name].dtype == np.uint32


def run(each: FillJob, num_workers: int, stop: bool = False) -> tuple[Filled, list[int]]:
    counts: list[int] = []
    return fill(each, num_workers, stop, counts.append), counts


OTHERS: list[object] = []  # processes that earlier tests left, such as workers that a DataLoader keeps


@pytest.fixture(autouse=True)
def note_others() -> None:
    OTHERS[:] = multiprocessing.active_children()


def orphans() -> list[object]:
    return [each for each in multiprocessing.active_children() if each not in OTHERS]


def check_no_orphans() -> None:
    deadline = time.monotonic() + 10
    while orphans() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert orphans() == []


@pytest.mark.parametrize("num_workers", [0, 1, 5])
@pytest.mark.parametrize(
    ("num_samples", "chunk_samples"), [(200, 3), (200, 200), (1, 1), (130, 64), (7, 1), (300, 100)]
)
def test_chunks_checksums_and_counts(tmp_path: Path, num_samples: int, chunk_samples: int, num_workers: int) -> None:
    each = job(tmp_path, num_samples, chunk_samples)
    filled, counts = run(each, num_workers)
    check_written(each, filled)
    odd = num_samples // 2
    assert dict(filled.notes) == {k: v for k, v in {"even": num_samples - odd, "odd": odd, "strange": odd}.items() if v}
    assert filled.failures == [] and sum(counts) == num_samples
    check_no_orphans()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_failed_samples_are_zeros_and_listed_in_row_order(tmp_path: Path, num_workers: int) -> None:
    bad = [0, 5, 6, 7, 100, 198, 199]
    each = job(tmp_path, source=Numbers(bad))
    filled, counts = run(each, num_workers)
    check_written(each, filled, bad)
    rows = [int(row) for row in np.flatnonzero(np.isin(each.order, bad))]
    assert filled.failures == [Failure(row, f"sample {each.order[row]} is bad", "SampleError") for row in rows]
    assert sum(counts) == 200 and filled.notes["even"] + filled.notes["odd"] == 193


@pytest.mark.parametrize("num_workers", [0, 2])
def test_first_failure_stops_the_rest(tmp_path: Path, num_workers: int) -> None:
    each = job(tmp_path, 20_000, source=Numbers(range(20_000)))
    filled, counts = run(each, num_workers, stop=True)
    assert filled.failures and sum(counts) < 2000
    check_no_orphans()


def test_workers_stop_in_the_middle_of_a_task(tmp_path: Path) -> None:
    """After an error nobody waits for the 64 samples of each task that was begun."""
    each = job(tmp_path, 1000, 1, Numbers(slow=1))
    done = []

    def interrupt(count: int) -> None:
        done.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(each, 2, False, interrupt)
    written = np.frombuffer(each.part.read_bytes()[OFFSET : OFFSET + 6000], np.uint8).reshape(-1, *SHAPE)
    assert len(done) == 1
    assert (written.any(axis=(1, 2))).sum() < 3 * 64  # five tasks are past cancelling
    check_no_orphans()


def test_worker_that_is_killed_is_an_error_and_no_hang(tmp_path: Path) -> None:
    for victim in (0, 150):
        with pytest.raises(WorkerError, match="a worker process died"):
            run(job(tmp_path, source=Numbers(kill=victim)), 2)
        check_no_orphans()


def test_bug_in_a_worker_is_that_error(tmp_path: Path) -> None:
    for num_workers in (0, 2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            run(job(tmp_path, source=Numbers(bug=77)), num_workers)
        check_no_orphans()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_full_disk_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)  # workers are forked, so they have it too
    with pytest.raises(OutputError, match="part: cannot be written: No space left on device"):
        run(job(tmp_path), num_workers)
    check_no_orphans()


def test_workers_can_be_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where fork is not safe: everything that workers need can be pickled."""
    small(monkeypatch, can_fork=False)
    each = job(tmp_path)
    check_written(each, run(each, 1)[0])


def test_error_of_the_callback_ends_the_workers(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fill(job(tmp_path), 2, False, lambda count: 1 // 0)
    check_no_orphans()


# ---- what was done before


def done_before(each: FillJob, num_workers: int = 0) -> dict[int, TaskResult]:
    """All tasks of a job, done, as a journal would give them back."""
    records: list[object] = []
    fill(each, num_workers, False, lambda count: None, finished=lambda done: records.append(done.record()))
    claims = [parse_record(json.loads(json.dumps(record))) for record in records]
    return {claim.chunks.start: claim for claim in claims if claim is not None}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("broken", ["nothing", "a byte", "a byte at the end", "a sample", "the file", "a failure"])
def test_claims_are_looked_at(tmp_path: Path, num_workers: int, broken: str) -> None:
    source = Numbers([5, 100])
    each = job(tmp_path, source=source)
    claims = done_before(each, num_workers)
    whole, before = run(each, 0)[0], each.part.read_bytes()
    tasks = each.tasks()
    assert sorted(claims) == [chunks.start for chunks in tasks] and len(tasks) == 4
    expected_new = {"nothing": [], "a sample": [0, 1, 2, 3], "the file": [0, 1, 2, 3]}.get(broken)
    if "a byte" in broken:
        data, field = bytearray(before), each.fields[0 if broken == "a byte" else -1]
        data[field.offset + tasks[1].start * 3 * (6 if broken == "a byte" else 8)] ^= 1
        each.part.write_bytes(data)
        expected_new = [1]
    elif broken == "the file":
        each.part.write_bytes(b"\xff" * OFFSET)
    elif broken == "a sample":
        source.version = 1
    elif broken == "a failure":
        source.bad.remove(5)
        row = int(np.flatnonzero(each.order == 5)[0])
        expected_new = [i for i, chunks in enumerate(tasks) if row in each.rows(chunks)]
    new: list[int] = []
    counts: list[int] = []
    filled = fill(each, num_workers, False, counts.append, claims, lambda done: new.append(done.chunks.start))
    assert sorted(new) == [tasks[i].start for i in expected_new or []] and sum(counts) == 200
    check_written(each, filled, sorted(source.bad))
    if broken != "a failure":
        assert (filled.notes, filled.failures) == (whole.notes, whole.failures)


def test_a_failure_that_is_claimed_is_one_where_failures_are_the_end(tmp_path: Path) -> None:
    each = job(tmp_path, source=Numbers([100]))
    claims = done_before(each)
    new: list[TaskResult] = []
    filled = fill(each, 0, True, lambda count: None, claims, new.append)
    assert [failure.reason for failure in filled.failures] == ["sample 100 is bad"] and new == []


@pytest.mark.parametrize(
    "record", [None, [], [0, 1, 2, 3, 4], [0, [1], {}, [], 5], [0, [[1]], {}, [[1]], 5], ["x", [[1]], {}, [], 5]]
)
def test_records_that_are_none(record: object) -> None:
    assert parse_record(record) is None
