"""Compare h5chunk's batches of a sparse matrix on the CPU with the machine's limits and with other loaders.

    python scripts/bench_sparse.py FOLDER [--rounds 5] [--peers annbatch-csr ...] [--json FILE]
    python scripts/bench_sparse.py FOLDER --python annbatch=ENV/bin/python --python scdataset=ENV/bin/python
    python scripts/bench_sparse.py FOLDER --tune annbatch-csr     # every setting that its module lists

The data is a matrix of 200,000 x 20,000 uint8 counts with 150 entries per row (on average, with ``--lengths
lognormal``) and columns from a power law. It is generated once in FOLDER, and packed there once for each contender, in
the contender's format. Batches are 500 rows of float32 values; the page cache is warm. Peers may deliver CSR batches as
SciPy matrices; h5chunk delivers torch.sparse_csr tensors. Each contender runs in a separate process, with the
interpreter set by ``--python MODULE=PATH`` (default: the interpreter of this script) and the best settings found with
``--tune`` (`peers/sparse`). If its library cannot be imported, the table says "not installed".

In each round, all contenders take turns, in reverse order every other round. A turn is two consecutive epochs, of which
the second is timed. Before the first round and after the last, an untimed epoch compares the checksum of every row with
the packed rows: dropped and repeated rows are counted, and printed at the end of the line. In timed epochs, the last
row of each batch is compared after the clock has stopped.

Prints a table for CSR batches and a table for dense batches: rows/s (median and range of the rounds); the median ratio
to the limit, which is the fastest method in `peers/sparse/limits.py` to gather shuffled rows from memory (for dense
batches, into reused memory if the contender reuses memory, otherwise into fresh memory); rows per second of processor
time of all threads, without DataLoader workers; and the speedup of ChunkLoader, without and with ``reuse=True``. Each
table starts with the load average before and after: if it is far above one per core, other processes ran, and small
differences are not significant. ``--json FILE`` writes all rounds with settings, versions, machine and seed.

The peers need ``pip install "annbatch[zarrs,numba]"`` (Python 3.12) and ``pip install scDataset anndata``. The files
take 0.5 GB (1.5 GB with ``--tune``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import bench_loader
from peers import REUSED
from peers.sparse import CONTENDERS, CSR, DENSE, Entry
from peers.sparse.limits import NO_LIMIT, WAYS
from peers.sparse.matrix import Source, make_source

HERE = Path(__file__).parent
OURS = {CSR: ("ours-csr",), DENSE: ("ours-dense", "ours-dense-reuse")}
LIBRARIES = ("torch", "numpy", "scipy", "anndata", "zarr", "zarrs", "h5py")
SEED = 0


class Row(NamedTuple):
    """One row of a table."""

    module: str
    form: str
    label: str
    settings: dict[str, Any]


class Contender(bench_loader.Contender):
    """A process that runs one row of the table, and its results."""

    def __init__(self, name: str, row: Row, python: str, source: Source, batch_size: int) -> None:
        self.name, self.python = name, python
        self.module, self.form, self.label, self.settings = row
        self.is_limit = self.module == "limits"
        self.reused = self.settings.get("memory") == REUSED
        self.rounds: list[dict[str, Any]] = []
        self.trouble = ""
        self.first: dict[str, Any] = {}
        self.log = Path(source.folder) / "bench_sparse.log"
        request = {"module": self.module, "form": self.form, "settings": self.settings}
        request |= {"source": source.fields(), "batch_size": batch_size}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [python, "-m", "peers.sparse.serve", json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(HERE.resolve())},
            )

    def close(self) -> None:
        super().close()
        assert self.process.stdout
        self.process.stdout.close()

    @property
    def rates(self) -> list[float]:
        return [each["rows"] / each["seconds"] for each in self.rounds]

    @property
    def per_cpu(self) -> float:
        """Return rows per second of processor time (median of the rounds)."""
        return statistics.median(each["rows"] / max(each["cpu_seconds"], 1e-9) for each in self.rounds)

    @property
    def note(self) -> str:
        """Return how many rows are missing or repeated in the contender's epochs; empty if none are."""
        return ", ".join(f"{name} {self.first[name]} rows" for name in ("dropped", "repeated") if self.first.get(name))

    def check(self, number: int) -> None:
        """Run another compared epoch, and add its missing and repeated rows to those found before."""
        for name, count in self.ask(f"check {number}").items():
            self.first[name] = self.first.get(name, 0) + count if isinstance(count, int) else count


def run_rounds(contenders: list[Contender], rounds: int) -> None:
    for contender in contenders:
        contender.start()
        print(f"  {contender.name}: {contender.trouble or contender.note or 'ready'}", file=sys.stderr, flush=True)
    for number in range(1, rounds + 1):
        for contender in contenders if number % 2 else contenders[::-1]:
            contender.turn(number)
        print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
    for contender in contenders:
        contender.check(2 * rounds + 1)
        contender.close()


def limits_of(contenders: list[Contender], form: str) -> dict[bool, Contender]:
    """Return the fastest limits with reused and with fresh memory, which are the same for CSR batches."""
    found: dict[bool, Contender] = {}
    for each in contenders:
        if each.is_limit and each.median and each.settings["kind"] not in NO_LIMIT:
            for reused in (False, True) if form == CSR else (each.reused,):
                found[reused] = max(found.get(reused, each), each, key=lambda limit: limit.median)
    return found


def print_table(contenders: list[Contender], form: str) -> None:
    limits = limits_of(contenders, form)
    ours = {each.name: each for each in contenders if each.name in OURS[form] and each.median}
    heads = ["ours /", "reuse /"][: len(OURS[form])]
    print(f"{form:38s} {'rows/s':>10s}  {'min .. max':>23s}  memory  of limit  rows/CPU s  {'  '.join(heads)}")
    for each in contenders:
        if not each.median:
            print(f"{each.label:38s} {each.trouble[:90]}")
            continue
        cells = [f"{each.label:38s} {each.median:>10,.0f}  {min(each.rates):>10,.0f} .. {max(each.rates):<9,.0f}"]
        cells.append("reused" if each.reused else "fresh ")
        cells.append(f"{bench_loader.ratio(each, limits[each.reused]):8.2f}" if each.reused in limits else " " * 8)
        cells.append(f"{each.per_cpu:>10,.0f}" if not each.settings.get("workers") else " " * 10)
        for head, name in zip(heads, OURS[form], strict=True):
            shown = name in ours and each.module not in ("ours", "ours_workers")
            cells.append(f"{bench_loader.ratio(ours[name], each):{len(head)}.2f}" if shown else " " * len(head))
        print("  ".join([*cells, each.note]))


def report(contenders: list[Contender]) -> dict[str, Any]:
    return {
        each.name: {
            "label": each.label,
            "form": each.form,
            "settings": each.settings,
            "trouble": each.trouble,
            "rows_per_s": each.median,
            "rates": each.rates,
            "rounds": each.rounds,
            "dropped": each.first.get("dropped", 0),
            "repeated": each.first.get("repeated", 0),
        }
        for each in contenders
    }


def chosen(args: argparse.Namespace, form: str) -> dict[str, Row]:
    """Return the contenders to run, by name."""
    rows: dict[str, Row] = {}
    for way in [] if args.no_limits else WAYS[form]:
        words = [str(value) for value in way.values()]
        label = f"limit: {way['kind']}, {way['threads']} thr" + (", torch" if "by" in way else "")
        rows[f"limit-{form}-{'-'.join(words)}"] = Row("limits", form, label, way)
    for name in args.tune:
        entry = CONTENDERS[name]
        settings = tried(args.python.get(entry.module, sys.executable), entry) if entry.form == form else ()
        for index, each in enumerate(settings):
            rows[f"{name} {index}"] = Row(entry.module, form, json.dumps(each), each)
    ours = [name for name in CONTENDERS if name.startswith("ours")]
    peers = args.peers if args.peers is not None else [name for name in CONTENDERS if name not in ours]
    for name in [] if args.tune else [*ours, *peers]:
        entry = CONTENDERS[name]
        if entry.form == form:
            rows[name] = Row(entry.module, form, entry.label, entry.settings)
    return rows


def run_form(form: str, source: Source, args: argparse.Namespace) -> dict[str, Any]:
    """Run and print one table, and return its results."""
    pythons = {row.module: args.python.get(row.module, sys.executable) for row in chosen(args, form).values()}
    contenders = [
        Contender(name, row, pythons[row.module], source, args.batch_size) for name, row in chosen(args, form).items()
    ]
    loads = [os.getloadavg()[0]]
    try:
        run_rounds(contenders, args.rounds)
    finally:
        for contender in contenders:
            contender.close()
    loads.append(os.getloadavg()[0])
    print(f"\nload average {loads[0]:.1f} before, {loads[1]:.1f} after, of {os.cpu_count()} cores")
    print_table(contenders, form)
    return report(contenders) | {"load_average": loads}


def ask(python: str, code: str) -> Any:
    """Run a line of Python in another interpreter and return the JSON that it prints."""
    environment = os.environ | {"PYTHONPATH": str(HERE.resolve())}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def tried(python: str, entry: Entry) -> list[dict]:
    """Return the settings that a module lists, from the interpreter that can import it."""
    code = f"import json; from peers.sparse.{entry.module} import TRIED"
    return ask(python, f"{code}; print(json.dumps(TRIED[{entry.form!r}]))")


def versions(python: str, names: list[str]) -> dict[str, str]:
    """Return the versions of Python and of those distributions that are installed."""
    found = "{each.name: each.version for each in m.distributions()}"
    there = ask(python, f"import importlib.metadata as m, json; print(json.dumps({found}))")
    return {name: there[name] for name in names if name in there} | {"python": bench_loader.python_version(python)}


def interpreter(text: str) -> tuple[str, str]:
    """Parse MODULE=PATH, a module of `peers/sparse` and the interpreter that runs it."""
    module, _, path = text.partition("=")
    known = {entry.module for entry in CONTENDERS.values()}
    if module not in known or not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{text!r}: give MODULE=PATH, MODULE one of {', '.join(sorted(known))}")
    return module, path


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=20_000)
    parser.add_argument("--entries-per-row", type=int, default=150)
    parser.add_argument("--lengths", choices=("equal", "lognormal"), default="equal")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=(CSR, DENSE), default=[CSR, DENSE])
    parser.add_argument("--peers", nargs="*", choices=[name for name in CONTENDERS if not name.startswith("ours")])
    parser.add_argument("--python", type=interpreter, action="append", default=[], metavar="MODULE=PATH")
    parser.add_argument("--tune", nargs="+", choices=CONTENDERS, default=[], help="time all settings of these peers")
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    args.python = dict(args.python)
    return args


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    source = Source(
        str(args.folder.resolve()), args.rows, args.columns, args.entries_per_row, lengths=args.lengths, seed=SEED
    )
    make_source(source)
    results = {form: run_form(form, source, args) for form in args.forms}
    if args.json:
        modules = {entry.module: entry.distribution for entry in CONTENDERS.values()}
        pythons = {module: args.python.get(module, sys.executable) for module in modules}
        found = {module: versions(pythons[module], [name, *LIBRARIES]) for module, name in modules.items()}
        machine = f"{os.cpu_count()} cores, {bench_loader.cpu_name()}, {platform.platform()}"
        content = {"results": results, "versions": found, "machine": machine, "seed": SEED}
        content |= {"matrix": source.name, "batch_size": args.batch_size, "rounds": args.rounds}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
