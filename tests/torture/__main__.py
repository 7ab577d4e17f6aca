"""Torture h5chunk: killed processes, full disks. (Damaged files: `mutated.py`.) Run it in the folder ``tests``:

    python -m torture --json FILE        # all of it, about 20 minutes; Linux, pip install ".[test]"
    python -m torture --quick            # a few minutes; bash scripts/test.sh --torture does the same
    python -m torture --only kills --seed 7

Prints a line for each section: how many cases there were, what was seen how often, and whatever must not be; exits
with 1 if there is any of that. Everything follows from the seed, but for the moments at which processes are killed.
`scripts/PROMISES.md` says what each section shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from torture.result import Result

SHOWN = 20  # of what must not be, in print; JSON has all


def workers(quick: bool, seed: int, folder: Path) -> Result:
    from torture.workers import run

    return run(20 if quick else 100, seed, folder)


def kills(quick: bool, seed: int, folder: Path) -> Result:
    from torture.conversions import run_kills

    return Result(**run_kills(12 if quick else 200, seed, folder))


def boundaries(quick: bool, seed: int, folder: Path) -> Result:
    from torture.conversions import run_boundaries

    return Result(**run_boundaries(seed, folder, most=4 if quick else 40))


SECTIONS: dict[str, Callable[[bool, int, Path], Result]] = {
    "kills": kills,
    "boundaries": boundaries,
    "workers": workers,
}


def versions() -> dict[str, str]:
    import h5py
    import numpy
    import torch

    import h5chunk

    return {
        "h5chunk": h5chunk.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
    }


def show(name: str, result: Result) -> None:
    counts = "; ".join(
        f"{what}: {count:,}" if isinstance(count, int) else f"{what}: {count}" for what, count in result.counts.items()
    )
    verdict = f"{len(result.bad)} BAD" if result.bad else "none bad"
    line = f"{name:10} {result.cases:,} {result.what}, {verdict}; {counts}; {result.seconds:.0f} s"
    print(textwrap.fill(line, 120, subsequent_indent=" " * 11), flush=True)
    for each in result.notes:
        print(textwrap.fill(each, 120, initial_indent=" " * 11, subsequent_indent=" " * 13), flush=True)
    for each in result.bad[:SHOWN]:
        print(f"    BAD: {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        default=list(SECTIONS),
        metavar="NAME",
        help=f"some of: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all that is found")
    args = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("this forks, limits and counts as only Linux can")
    warnings.simplefilter("ignore")
    found: dict[str, Result] = {}
    print(", ".join(f"{name} {value}" for name, value in versions().items()), f"seed {args.seed}", sep=", ", flush=True)
    for name in args.only:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="h5chunk-torture-") as folder:
            found[name] = SECTIONS[name](args.quick, args.seed, Path(folder))
        found[name].seconds = time.perf_counter() - started
        show(name, found[name])
    if args.json:
        sections = {name: asdict(result) for name, result in found.items()}
        about = {"seed": args.seed, "quick": args.quick, "versions": versions()}
        args.json.write_text(json.dumps({**about, "sections": sections}, indent=2))
    sys.exit(any(result.bad for result in found.values()))


if __name__ == "__main__":
    main()
