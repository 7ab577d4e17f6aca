"""Kill conversions, and let their disk fill up, at every point; run them again; look at what there is in the end.

    cd tests
    python -m torture.conversions --kills 200 --seed 0    # about 6 minutes on 2 cores; Linux
    python -m torture.conversions --boundaries            # about 8 minutes
    python -m torture.conversions --kills 12 --only folder zip --json

``--kills``: conversions of images and of matrices are killed at random moments, the whole process group, the main
process or one worker, and run again, until they are complete. ``--boundaries``: the place in the output at which each
chunk and table begins is the limit of what can be written, once from the start and once after the space was taken; then
the same command is run without a limit. Each time the output must be byte for byte that of an uninterrupted run, what
stood there before untouched until then, nothing left beside it, and no message a traceback; the same command must end
well even if it was killed when its output was complete. Exits with 1 if not.
Everything follows from the seed, but for where exactly a kill comes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from PIL import Image

import h5chunk.store.write.new_file as newfile
from h5chunk.cli import main as command_line

LIMIT_S = 60.0  # of a run: a hang
PIXELS = 96
IMAGES_OPTIONS = ("--workers", "2", "--chunk-samples", "16")
NEVER = ("Traceback", "Error:")


class Case(NamedTuple):
    """A conversion: its source, its options, and whether its output is a folder."""

    source: str
    options: tuple[str, ...]
    is_folder: bool = False


CASES = {
    "folder": Case("photos", IMAGES_OPTIONS),
    "folder skip": Case("broken", (*IMAGES_OPTIONS, "--on-error", "skip")),
    "folder shards": Case("photos", (*IMAGES_OPTIONS, "--shards", "3"), True),
    "zip": Case("photos.zip", IMAGES_OPTIONS),
    "zip shards": Case("photos.zip", (*IMAGES_OPTIONS, "--shards", "4"), True),
    "csr": Case("ratings.csv", ("--memory-bytes", "1M")),
    "dense": Case("ratings.csv", ("--memory-bytes", "24M", "--dense", "--chunk-samples", "32")),
}


def make_sources(folder: Path, seed: int, num_images: int) -> None:
    """Images in two folders, one of them with broken ones, the same in a .zip; and ratings."""
    rng = np.random.default_rng(seed)
    for i in range(num_images):
        path = folder / "photos" / f"class{i % 3}" / f"{i:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)
        Image.fromarray(pixels).save(path, compress_level=1)
    shutil.copytree(folder / "photos", folder / "broken")
    for i in range(0, num_images, 97):
        (folder / "broken" / f"class{i % 3}" / f"{i:05}.png").write_bytes(b"no image")
    shutil.make_archive(str(folder / "photos"), "zip", folder, "photos")
    places = rng.permutation(2000 * 1500)[: 250 * num_images]
    lines = (f"{at // 1500},{at % 1500},{value / 2}" for at, value in zip(places, places % 10 + 1, strict=True))
    (folder / "ratings.csv").write_text("userId,movieId,rating\n" + "\n".join(lines) + "\n")


# ---- one run of a command


class Run:
    """The command line in a process group of its own; what it says on standard error."""

    def __init__(self, arguments: Sequence[str], before: Callable[[], None] | None = None) -> None:
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _be_the_command(arguments, theirs, before)
        os.close(theirs)
        self.text = b""

    def wait(self, seconds: float) -> bool:
        """Listen for so long; whether it and its workers have ended by then."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._pipe], [], [], left)[0]:
                more = os.read(self._pipe, 1 << 16)
                if not more:
                    return True
                self.text += more
        return False

    def kill(self, what: str, rng: random.Random) -> None:
        """SIGKILL the group, the main process or a worker; the group if there is no worker."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if what == "worker":
                workers = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
                if workers:
                    os.kill(int(rng.choice(workers)), signal.SIGKILL)
                    return
            if what == "main":
                os.kill(self.pid, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """Exit code, negative of a signal, and what was said; a run that hangs is killed, and has code 124."""
        in_time = self.wait(LIMIT_S)
        if not in_time:
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return (code if in_time else 124), self.text.decode(errors="replace")


def _be_the_command(arguments: Sequence[str], pipe: int, before: Callable[[], None] | None) -> None:
    code = 70
    try:
        os.setsid()
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        if before:
            before()
        command_line([*arguments])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.stderr.write(f"Traceback: {error!r}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


# ---- what must hold


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and files of a folder; "" if there is nothing."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    found = hashlib.sha256()
    for file in files:
        found.update((b"" if file == path else file.name.encode()) + file.read_bytes())
    return found.hexdigest() if files else ""


class Trial:
    """A case with its output, over and over."""

    def __init__(self, name: str, folder: Path, counts: Counter[str], bad: list[str]) -> None:
        case = CASES[name]
        self._name, self._counts, self._bad = name, counts, bad
        self.path = folder / "out" / ("set" if case.is_folder else "x.h5")
        self._old = folder / "old" / self.path.name
        self.arguments = self._command = ["convert", str(folder / case.source), str(self.path), *case.options, "--json"]
        self.path.parent.mkdir(exist_ok=True)
        if self.path.exists():  # of another trial
            self._remove(self.path)
        started = time.monotonic()
        code, text = Run(self.arguments).end()
        self.seconds = time.monotonic() - started
        assert code == 0, f"{name}: {text}"
        self.whole = digest(self.path)
        self.outputs = sorted(self.path.iterdir()) if case.is_folder else [self.path]
        self._make_old(case)

    def _make_old(self, case: Case) -> None:
        """What stands there before: not looked into, but by its name."""
        self._old.parent.mkdir(exist_ok=True)
        if case.is_folder:
            self._old.mkdir(exist_ok=True)
        (self._old / "set-00000-of-00001.h5" if case.is_folder else self._old).write_bytes(b"old")

    def begin(self, over_old: bool) -> None:
        """Nothing there, or an old output."""
        self._remove(self.path)
        if over_old:
            (shutil.copytree if self._old.is_dir() else shutil.copy)(self._old, self.path)
        self._before = digest(self.path)
        self.arguments = [*self._command, *(["--overwrite"] if over_old else [])]

    @staticmethod
    def _remove(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def is_complete(self) -> bool:
        """Whether it is the output already."""
        return digest(self.path) == self.whole

    def look(self, code: int, text: str, *, killed: bool, when: str) -> None:
        """Look at what a run that was stopped left."""
        self._counts["continued"] += "continuing:" in text
        if any(word in text for word in NEVER) or (code not in (0, 1) and not (killed and code == -signal.SIGKILL)):
            self._say(when, f"exit code {code}: {text[-1500:]}")
        if code == 1 and sum(line.startswith("error: ") for line in text.splitlines()) != 1:
            self._say(when, f"no message, or several: {text[-500:]}")
        if digest(self.path) not in (self._before, self.whole):
            self._say(when, "the output is neither the old one nor complete")

    def finish(self, when: str) -> None:
        """Run it to its end, and look at the output."""
        code, text = Run(self.arguments).end()
        self._counts["runs"] += 1
        self._counts["continued"] += "continuing:" in text
        self._counts["complete before"] += '"already_complete": true' in text
        if code or any(word in text for word in NEVER):
            self._say(when, f"cannot be repeated, exit code {code}: {text[-1500:]}")
        elif not self.is_complete():
            self._say(when, "the output is another one")
        else:
            self._counts["identical"] += 1
        left = [path.name for path in self.path.parent.iterdir() if path.name.startswith(".")]
        if left:
            self._say(when, f"left: {left}")
            for name in left:
                self._remove(self.path.parent / name)

    def _say(self, when: str, what: str) -> None:
        self._bad.append(f"{self._name}, {when}: {what}")


# ---- the two ways to stop it


def run_kills(kills: int, seed: int, folder: Path, only: Sequence[str] = (), num_images: int = 1200) -> dict[str, Any]:
    """Kill conversions so many times.

    Returns
    -------
    dict
        ``what``, ``cases`` (kills), ``counts`` (runs, runs that continued, outputs, identical ones, kills of each
        kind), and ``bad``: what must not be.
    """
    rng, counts, bad = random.Random(seed), Counter[str](), list[str]()
    make_sources(folder, seed, num_images)
    trials = [Trial(name, folder, counts, bad) for name in only or CASES]
    for number in range(kills):
        trial = trials[number % len(trials)]
        rounds = rng.randint(1, 3)
        trial.begin(over_old=rng.random() < 0.5)
        for _ in range(rounds):
            what = rng.choice(("group", "group", "main", "worker"))
            after = rng.uniform(0, 1.1 * trial.seconds)
            run = Run(trial.arguments)
            killed = not run.wait(after)
            if killed:
                run.kill(what, rng)
                counts[f"kills of {what}"] += 1
            code, text = run.end()
            counts["runs"] += 1
            trial.look(code, text, killed=killed, when=f"{what} killed after {after:.2f} s")
            if code == 0 or sum(counts[f"kills of {each}"] for each in ("group", "main", "worker")) >= kills:
                break
        trial.finish(f"after round {number}")
        counts["outputs"] += 1
        done = sum(counts[f"kills of {each}"] for each in ("group", "main", "worker"))
        if done >= kills:
            break
    return {"what": "kills", "cases": done, "counts": dict(counts), "bad": bad}


def run_boundaries(
    seed: int, folder: Path, only: Sequence[str] = (), num_images: int = 300, most: int = 40
) -> dict[str, Any]:
    """Let nothing be written behind each place where a chunk or table begins; at most ``most`` places of a case.

    Returns
    -------
    dict
        As `run_kills`; ``cases`` are runs with a limit.
    """
    rng, counts, bad = random.Random(seed), Counter[str](), list[str]()
    make_sources(folder, seed, num_images)
    for name in only or CASES:
        trial = Trial(name, folder, counts, bad)
        places = boundaries(trial.outputs)
        limits = sorted(rng.sample(places, min(most, len(places))))
        for number, limit in enumerate(limits):
            for set_limit in (_limit_from_the_start, _limit_after_room_was_taken):
                trial.begin(over_old=number % 2 == 1)
                code, text = Run(trial.arguments, lambda: set_limit(limit)).end()  # noqa: B023
                counts["runs"] += 1
                counts["cases"] += 1
                counts["stopped" if code else "not stopped"] += 1
                when = f"{limit} bytes {set_limit.__name__.strip('_')}"
                trial.look(code, text, killed=False, when=when)
                trial.finish(when)
                counts["outputs"] += 1
    return {"what": "boundaries", "cases": counts.pop("cases"), "counts": dict(counts), "bad": bad}


def boundaries(paths: Sequence[Path]) -> list[int]:
    """Where the chunks and tables of files begin, the ends of the files, and some places before all of them."""
    places = {0, 100, 4096}
    for path in paths:
        places |= {path.stat().st_size - 1, path.stat().st_size}
        with h5py.File(path) as file:
            file.visititems(lambda _, item: places.update(_beginnings(item)))  # noqa: B023
    return sorted(places)


def _beginnings(item: h5py.Dataset | h5py.Group) -> set[int]:
    found: set[int] = set()
    if isinstance(item, h5py.Dataset):
        if item.chunks is None:
            found.add(item.id.get_offset() or 0)
        else:
            item.id.chunk_iter(lambda chunk: found.add(chunk.byte_offset))
    return found


def _limit_from_the_start(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def _limit_after_room_was_taken(num_bytes: int) -> None:
    for name in ("allocate", "reallocate"):
        setattr(newfile.NewFile, name, _limited(getattr(newfile.NewFile, name), num_bytes))


def _limited(allocate: Callable[..., Any], num_bytes: int) -> Callable[..., Any]:
    def limited(*arguments: Any) -> Any:
        result = allocate(*arguments)
        _limit_from_the_start(num_bytes)
        return result

    return limited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--boundaries", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--images", type=int, metavar="N", help="images in a source, and 250 times as many ratings")
    parser.add_argument(
        "--most", type=int, default=40, metavar="N", help="places of each case at which the disk is full"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size = {"num_images": args.images} if args.images else {}
    results = []
    for wanted, run in (
        (args.kills > 0, lambda folder: run_kills(args.kills, args.seed, folder, args.only, **size)),
        (args.boundaries, lambda folder: run_boundaries(args.seed, folder, args.only, most=args.most, **size)),
    ):
        if wanted:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(Path(folder)))
    for result in results:
        if args.json:
            print(json.dumps(result))
        else:
            counts = ", ".join(f"{number} {what}" for what, number in result["counts"].items())
            print(f"{result['what']}: {result['cases']}; {counts}; {len(result['bad'])} bad")
            print("\n".join(result["bad"][:20]))
    return int(any(result["bad"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
