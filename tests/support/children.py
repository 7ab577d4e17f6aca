"""Run work on bad files in child processes that may crash, hang or take too much memory. Linux only."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1  # of prctl
CHILD_ITEMS = 50  # that a child works on before the next one is forked


class Outcome(NamedTuple):
    """The result of a piece of work, or how its process ended.

    ``ended`` is "" if the work returned a value, otherwise the name of a signal, "timeout", or "raised". ``peak_bytes``
    is how much resident memory grew meanwhile at most, in the process or in one of those that it started.
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
    """Run ``work(item)`` in a forked child; yield each item and its outcome.

    Parameters
    ----------
    work : callable
        Its values must pickle. If it raises, the value of the outcome is the traceback as text.
    items : sequence
    timeout_s, cpu_s
        Limits for one item; a child that takes longer is killed.
    memory_bytes : int
        Address space that a child may take beyond what this process has.
    together : int
        Number of items for one child, unless it dies.
    """
    gc.collect()
    gc.freeze()  # children do not touch, and so do not copy, what exists already
    done = 0
    while done < len(items):
        part = items[done : done + together]
        for outcome in _outcomes(work, part, timeout_s, cpu_s, memory_bytes):
            yield items[done], outcome
            done += 1


def _outcomes(work: Callable[[Any], Any], items: Sequence[Any], timeout_s: float, *limits: int) -> Iterator[Outcome]:
    """Yield the outcomes of one child's items, up to the one that ends it."""
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
    """The memory and the processor time that a child has taken so far."""
    try:
        ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return Outcome("", None, _status_bytes("VmHWM", child) - _status_bytes("VmRSS"), seconds)
    except (OSError, KeyError):  # it has just ended
        return Outcome("")


def _run(
    work: Callable[[Any], Any], items: Sequence[Any], pipe: Connection, parent: int, cpu_s: int, memory_bytes: int
) -> NoReturn:
    """Do all that the child does."""
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
    before, inherited, largest = _status_bytes("VmRSS"), _status_bytes("RssAnon"), _largest_child()
    started = time.perf_counter()
    try:
        ended, value = "", work(item)
    except BaseException:
        ended, value = "raised", traceback.format_exc()
    peak, of_children = _status_bytes("VmHWM") - before, _largest_child()
    if of_children > largest:
        peak = max(peak, of_children - inherited)
    return Outcome(ended, value, peak, time.perf_counter() - started)


def _largest_child() -> int:
    """The most resident memory that any process took that this one has waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def _status_bytes(name: str, process: int | str = "self") -> int:
    """A size of a process, of /proc/PID/status."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
