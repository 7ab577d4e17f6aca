"""Work for children that `in_child` starts, which find it by its name; this module imports little."""

from __future__ import annotations

import faulthandler
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from h5chunk.errors import FileError, SourceError
from h5chunk.store.hdf5 import child
from h5chunk.store.hdf5.child import limited_memory


def crash(*_: object, **__: object) -> None:
    faulthandler.disable()  # pytest's
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_at(name: str, path: Any, *_: object, **__: object) -> None:
    if Path(getattr(path, "path", path)).name == name:
        crash()


def loop() -> NoReturn:
    while True:
        pass


def sleep(seconds: float, *_: object) -> str:
    time.sleep(seconds)
    return "done"


def wait_forever(*_: object) -> None:
    threading.Event().wait()


def read_much(seconds: float) -> str:
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(Path("/proc/self/stat").read_bytes() * 50)
    return "done"


def talk(say: Callable[[Any], None]) -> str:
    say(1)
    say(2)
    return "done"


def say_number_and_sleep(say: Callable[[Any], None]) -> None:
    say((os.getpid(), os.getppid()))
    time.sleep(60)


def fail(*_: object) -> NoReturn:
    raise SourceError("it is so")


def break_down(*_: object) -> NoReturn:
    raise ZeroDivisionError("by nothing")


class OddError(Exception):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {code}")


def fail_oddly() -> NoReturn:
    pytest.importorskip("tblib.pickling_support").install()
    try:
        raise OddError("decode", 1)
    except OddError as error:
        raise FileError("a.h5: is damaged") from error


def crash_with_heir() -> None:
    if not os.fork():
        time.sleep(5)
        os._exit(0)
    crash()


def facts() -> dict[str, Any]:
    """What differs between processes."""
    return {"number": os.getpid(), "folder": os.getcwd(), "variable": os.environ.get("H5CHUNK_TEST")}


def take(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def take_little(path: Path, num_bytes: int) -> int:
    with pytest.raises(FileError, match=r"more memory than the \d+,\d+,\d+ bytes \(25"), limited_memory(path):
        take(num_bytes)
    return take(num_bytes)


def in_children_too(monkeypatch: pytest.MonkeyPatch, where: str, value: Any, *, before: bool = False) -> None:
    """Replace a name of h5chunk in children. With ``before``, ``value`` is called first in place of replacing it."""
    pickled = child.pickled

    def send(work: Callable[..., Any], arguments: Sequence[Any], has_say: bool) -> tuple[bytes, list[str]]:
        return pickled(partial(_patched, f"h5chunk.{where}", value, before, work), arguments, has_say)

    monkeypatch.setattr(child, "pickled", send)


def _patched(where: str, value: Any, before: bool, work: Callable[..., Any], *arguments: Any) -> Any:
    path, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(path)
    function = getattr(owner, name)

    def watched(*given: Any, **options: Any) -> Any:
        value(*given, **options)
        return function(*given, **options)

    setattr(owner, name, watched if before else value)
    return work(*arguments)
