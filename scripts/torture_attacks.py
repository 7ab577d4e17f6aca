"""Files made to do harm: what h5chunk says of each, and beside it what plain h5py does with it.

Both open the file in children with limits of memory and time. `tests/attack_files.py` makes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
from torture_result import Outcome, Result, in_children, share_tests

import h5chunk
from h5chunk.errors import FileError, H5ChunkError

share_tests()

from attack_files import ATTACKS, SAME, make_good, read_all  # noqa: E402

PEAK_BYTES = 400 << 20  # that ours may take
WAIT_S = 5.0  # for h5py; it has what it needs, or waits for ever


def run(folder: Path, names: Iterable[str] = tuple(ATTACKS), wait_s: float = WAIT_S) -> Result:
    """Each attack by ours and by h5py."""
    result = Result("attack files")
    said: dict[str, str] = {}
    for number, name in enumerate(names):
        path = folder / str(number) / "a.h5"
        path.parent.mkdir()
        ATTACKS[name].make(make_good(path))
        theirs = _alone(read_plainly, path, 4 << 30, wait_s)
        error = _judge(result, name, path)
        said[name] = error
        result.notes.append(f"{name}: h5chunk: {error.replace(str(path.parent), '')} | h5py: {_told(theirs, wait_s)}")
        result.cases += 1
        result.add("refused", bool(error))
        result.add(f"h5py: {_kind(theirs)}")
    shared = sum(re.search("|".join(SAME), error) is not None for error in said.values())
    result.counts["messages of their own"] = len(set(said.values())) - max(0, shared - 1)
    return result


def _judge(result: Result, name: str, path: Path) -> str:
    """The error of reading; what must not be goes to the result."""
    error = ""
    for what, look in LOOKS.items():
        outcome = _alone(look, path, 1 << 30)
        if outcome.ended or outcome.peak_bytes > PEAK_BYTES:
            result.bad.append(f"{name}: {what}: {outcome.ended}, {outcome.peak_bytes >> 20} MiB: {outcome.value}")
        elif what == "read":
            error = outcome.value
            if not re.search(ATTACKS[name].message, error, re.DOTALL):
                result.bad.append(f"{name}: is not refused as it should be: {error or 'it is read'}")
    return error


def read_ours(path: Path) -> str:
    """The message, "" where there is none."""
    try:
        read_all(path)
    except FileError as error:
        return str(error)
    return ""


def survive(look: Any, path: Path) -> str:
    """What a tool says, or the error that it raises on purpose."""
    try:
        return str(look(path))
    except H5ChunkError as error:
        return str(error)


LOOKS = {"read": read_ours, "info": partial(survive, h5chunk.info), "verify": partial(survive, h5chunk.verify)}


def read_plainly(path: Path) -> str:
    """All that h5py gives of images and of a header, as a user would read them."""
    with h5py.File(path) as file:
        found = _read(file["images"])
        if "h5chunk" in file:
            dict(file["h5chunk"].attrs)
            found += ", " + ", ".join(f"{name} {_read(item)}" for name, item in file["h5chunk"].items())
        return found


def _read(item: Any) -> str:
    dict(item.attrs)
    if isinstance(item, h5py.Group):
        return ", ".join(f"{name} {_read(part)}" for name, part in item.items())
    values = item[()]
    return f"{values.dtype} {values.shape}"


def _alone(work: Any, path: Path, memory_bytes: int, wait_s: float = 60.0) -> Outcome:
    [(_, outcome)] = in_children(work, [path], timeout_s=wait_s, memory_bytes=memory_bytes)
    return outcome


def _kind(outcome: Outcome) -> str:
    if outcome.ended == "raised":
        return "raises"
    return {"": "reads", "timeout": "waits"}.get(outcome.ended, "crashes")


def _told(outcome: Outcome, wait_s: float) -> str:
    if outcome.ended == "raised":
        return outcome.value.strip().splitlines()[-1][:100]
    grown = f", {outcome.peak_bytes >> 20} MiB" if outcome.peak_bytes > 16 << 20 else ""
    if outcome.ended == "timeout":
        idle = outcome.seconds < wait_s / 5
        return "waits for ever" if idle else f"is not done after {wait_s:.0f} s{grown}"
    if outcome.ended:
        return f"crashes ({outcome.ended})"
    return f"reads {outcome.value}{grown}"
