"""The machine code of compiled kernels, kept on disk, so that later processes need neither import Triton nor compile.

Triton has a cache, too, but importing it takes half a second, in which it holds the GIL. Loading a file takes a
millisecond. The files are in ``$XDG_CACHE_HOME/h5chunk/kernels`` (``~/.cache``) and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from h5chunk.native import cuda

MAX_FILES = 256  # the least recently written ones are deleted
MAX_SHARED_BYTES = 48 << 10  # a kernel with more needs an attribute that a launch does not set
SCRATCH = 2  # parameters that Triton adds at the end: null for a kernel without scratch memory
ALIGNED = 16  # Triton compiles another kernel for addresses that are not multiples of this many bytes


Constant = torch.Tensor | float


class Code(NamedTuple):
    """A kernel for one kind of GPU: its name in ``image``, which CUDA's driver loads, and how to launch it."""

    name: str
    num_threads: int
    shared_bytes: int
    image: bytes

    def launch(self, num_given: int, constants: Sequence[Constant]) -> cuda.Launch | None:
        """Load the kernel into the current context; return None if the driver refuses it.

        The first ``num_given`` parameters of the kernel are passed at each launch, and ``constants`` are the next ones.
        """
        context = cuda.context()
        function = None if context is None else cuda.load(context, self.image, self.name)
        if function is None:
            return None
        launch = cuda.Launch(context, function, num_threads=self.num_threads, shared_bytes=self.shared_bytes)
        num_known = num_given + len(constants)
        launch.arguments[num_given:num_known] = [
            each.data_ptr() if isinstance(each, torch.Tensor) else bits_of(each) for each in constants
        ]
        launch.kept = constants
        # Triton leaves out a number that is 1, unless it must not specialize it
        return launch if launch.num_parameters == num_known + SCRATCH else None


def bits_of(number: float) -> int:
    """Return the bits of a float32, as an argument of a launch."""
    return int.from_bytes(struct.pack("<f", number), "little")


def prepared(
    path: Path | None,
    num_given: int,
    constants: Sequence[Constant],
    by_triton: Callable[[], Any],
    is_right: Callable[[cuda.Launch], bool],
) -> cuda.Launch | None:
    """Return what launches a kernel through CUDA's driver: its code from ``path``, or else compiled by Triton.

    ``by_triton`` launches it by Triton and returns the compiled kernel. Code is kept only if ``is_right`` has found the
    result of a launch to equal that of Triton. Return None if the kernel can only be launched by Triton.
    """
    code = None if path is None else read(path)
    if code is not None and (launch := code.launch(num_given, constants)) is not None:
        return launch
    code = code_of(by_triton())
    launch = None if code is None else code.launch(num_given, constants)
    if code is None or launch is None or not is_right(launch):
        return None
    if path is not None:
        write(path, code)
    return launch


def code_of(compiled: Any) -> Code | None:
    """Return the code of a kernel that Triton has compiled; None if it needs more than its arguments to be launched."""
    with suppress(Exception):  # another version of Triton
        metadata = compiled.metadata
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if not any(scratch) and metadata.shared <= MAX_SHARED_BYTES:
            return Code(metadata.name, 32 * metadata.num_warps, metadata.shared, compiled.asm["cubin"])
    return None


def path_of(module: str, kernel: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Path | None:
    """Return where the code of a kernel for these arguments is kept, or None if that cannot be said.

    Parameters
    ----------
    module, kernel : str
        The module of the kernel, which need not be imported, and the kernel's name in it.
    arguments : sequence
        Those of a launch, of which tensors and numbers stand for all of the same type and alignment, and anything else
        for itself: what the kernel is compiled for.
    options : mapping
        The options of a launch by Triton, such as ``num_warps``, and all other values that the code depends on.
    """
    with suppress(ImportError, OSError, AttributeError, RuntimeError, AssertionError):  # no Triton, GPU, source or home
        source = importlib.util.find_spec(module).origin  # type: ignore[union-attr]
        versions = importlib.metadata.version("triton"), torch.__version__, torch.cuda.get_device_capability()
        kinds = [_kind(each) for each in arguments]
        key = repr((versions, Path(source or "").read_bytes(), kernel, kinds, sorted(options.items())))
        return _folder() / f"{kernel}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    return None


def _kind(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {argument.data_ptr() % ALIGNED == 0}"
    if type(argument) is int:
        return "int64" if argument >> 31 else "int32"
    return type(argument).__name__


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h5chunk" / "kernels"


def read(path: Path) -> Code | None:
    """Read the code that `write` has written, or return None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path.parent.stat().st_uid != os.getuid() or path.stat().st_uid != os.getuid():
            return None  # machine code of somebody else
        head, _, image = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        if facts["sha256"] == hashlib.sha256(image).hexdigest():
            return Code(facts["name"], int(facts["num_threads"]), int(facts["shared_bytes"]), image)
    return None


def write(path: Path, code: Code) -> None:
    """Keep code on disk, if that is possible. Other processes see the whole file or none."""
    facts = {"name": code.name, "num_threads": code.num_threads, "shared_bytes": code.shared_bytes}
    head = json.dumps(facts | {"sha256": hashlib.sha256(code.image).hexdigest()}).encode()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(head + b"\n" + code.image)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink()
