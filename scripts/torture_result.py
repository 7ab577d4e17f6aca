"""What a section of `torture.py` found, and work on bad files in child processes that may crash or hang."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1  # of prctl
CHILD_ITEMS = 50  # that a child works on before the next one is forked


@dataclass
class Result:
    """What came of a section.

    Attributes
    ----------
    what : str
        What a case is.
    cases : int
    counts : dict of str to int
        What was seen, and how often.
    bad : list of str
        What must not be; the section failed if there is any.
    notes : list of str
        What readers of the table should know.
    seconds : float
    """

    what: str
    cases: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        self.counts[name] = self.counts.get(name, 0) + number


class Outcome(NamedTuple):
    """What came of a piece of work: its value, or how the child ended.

    ``ended`` is "" where it gave a value, else the name of a signal or "timeout"; ``peak_bytes`` how much resident
    memory grew meanwhile, at most.
    """

    ended: str
    value: Any = None
    peak_bytes: int = 0
    seconds: float = 0.0


def in_children(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    timeout_s: float = 20.0,
    cpu_s: int = 10,
    memory_bytes: int = 2 << 30,
    together: int = CHILD_ITEMS,
) -> Iterator[tuple[Any, Outcome]]:
    """Each item, and what ``work(item)`` gave in a forked child.

    Parameters
    ----------
    work : callable
        Its values must pickle. What it raises is the value of the outcome, as text, with ``ended="raised"``.
    items : sequence
    timeout_s, cpu_s
        Of one item; a child that takes longer is killed.
    memory_bytes : int
        Of address space that a child may take beyond what this process has.
    together : int
        Items that one child works on while it lives.
    """
    gc.collect()
    gc.freeze()  # children do not touch, and so do not copy, what is there already
    done = 0
    while done < len(items):
        part = items[done : done + together]
        for outcome in _outcomes(work, part, timeout_s, cpu_s, memory_bytes):
            yield items[done], outcome
            done += 1


def _outcomes(work: Callable[[Any], Any], items: Sequence[Any], timeout_s: float, *limits: int) -> Iterator[Outcome]:
    """Of items in one child, up to the one that ends it."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    child = os.fork()
    if not child:
        ours.close()
        _run(work, items, theirs, parent, *limits)
    theirs.close()
    ended, reached = "", Outcome("")
    try:
        for _ in items:
            if not ours.poll(timeout_s):
                ended = "timeout"
                reached = _reached(child)
                break
            try:
                outcome = ours.recv()
            except EOFError:
                ended = "died"
                break
            yield outcome
    finally:
        if ended != "died":
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        ours.close()
    if ended == "died":
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    if ended:
        yield reached._replace(ended=ended)


def _reached(child: int) -> Outcome:
    """What a child that takes too long has taken so far; seconds of processor time."""
    try:
        ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return Outcome("", None, _status_bytes("VmHWM", child) - _status_bytes("VmRSS"), seconds)
    except (OSError, KeyError):  # it has just ended
        return Outcome("")


def _run(
    work: Callable[[Any], Any], items: Sequence[Any], pipe: Connection, parent: int, cpu_s: int, memory_bytes: int
) -> NoReturn:
    """All that a child does."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        faulthandler.disable()  # the parent says how it ended
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        bound = _status_bytes("VmSize") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        for item in items:
            used = int(time.process_time()) + 1 + cpu_s
            resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))
            pipe.send(_outcome(work, item))
    finally:
        os._exit(0)


def _outcome(work: Callable[[Any], Any], item: Any) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = _status_bytes("VmRSS"), time.perf_counter()
    try:
        ended, value = "", work(item)
    except BaseException:
        ended, value = "raised", traceback.format_exc()
    return Outcome(ended, value, _status_bytes("VmHWM") - before, time.perf_counter() - started)


def _status_bytes(name: str, process: int | str = "self") -> int:
    """A size of a process, of /proc/PID/status."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
