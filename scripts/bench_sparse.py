"""Shuffled batches of a sparse matrix on the CPU: h5chunk against the machine's limits and the loaders of others.

    python scripts/bench_sparse.py FOLDER [--rounds 5] [--peers annbatch-csr ...] [--json FILE]
    python scripts/bench_sparse.py FOLDER --python annbatch=ENV/bin/python --python scdataset=ENV/bin/python
    python scripts/bench_sparse.py FOLDER --tune annbatch-csr     # every setting that its module lists

A matrix of 200,000 x 20,000 with 150 entries a row (on average, with ``--lengths lognormal``), columns by a power law,
counts as uint8, is drawn once in FOLDER and packed once there for each contender, in its own format; batches of 500
with float32 values, page cache warm. Peers may give CSR batches as SciPy matrices; ours are torch.sparse_csr. Each
contender is a process of its own, with the interpreter that ``--python MODULE=PATH`` gives (else this one) and the best
settings found with ``--tune`` (`peers/sparse`); one whose library cannot be imported is shown as not installed.

In each round all take turns, in the opposite order every other round; a turn is two epochs in a row, of which the
second is timed. Before the first round and after the last an epoch runs that does not count, in which every row is
compared by its checksum with those packed: rows dropped or repeated are counted, and printed at the end of the line. In
timed ones the last row of each batch is compared, when the clock stands.

Prints a table for CSR and one for dense batches: rows/s (median of the rounds, and the range); the ratio to the limit
(median of the rounds' own ratios), which is the fastest way of `peers/sparse/limits.py` that takes shuffled rows from
memory: for dense batches into memory used again for what does so, else into fresh memory; rows per second of processor
time, all threads together, without DataLoader workers; and how much faster ChunkLoader is, without and with
``reuse=True``. Above each table, the load average before and after: where it is much more than one a core, others took
part in it, and only what is far apart differs. ``--json FILE`` writes all rounds with settings, versions, machine and
seed.

The peers: ``pip install "annbatch[zarrs,numba]"`` (Python 3.12) and ``pip install scDataset anndata``. The files take
0.5 GB (1.5 GB with ``--tune``).
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
    """A row of a table."""

    module: str
    form: str
    label: str
    settings: dict[str, Any]


class Contender(bench_loader.Contender):
    """A process that runs one row of the table, and what it said."""

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
        """Rows per second of processor time, median of the rounds."""
        return statistics.median(each["rows"] / max(each["cpu_seconds"], 1e-9) for each in self.rounds)

    @property
    def note(self) -> str:
        """Rows that its epochs lack or have twice."""
        return ", ".join(f"{name} {self.first[name]} rows" for name in ("dropped", "repeated") if self.first.get(name))

    def check(self, number: int) -> None:
        """An epoch that is compared once more; what it lacks is added to what the first one lacked."""
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
    """The fastest limit into memory used again, and into fresh memory; of CSR batches one for both."""
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
    """What runs, by name."""
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
    """One table, and what is written of it."""
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
    """What a line of Python prints as JSON, in another interpreter."""
    environment = os.environ | {"PYTHONPATH": str(HERE.resolve())}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def tried(python: str, entry: Entry) -> list[dict]:
    """The settings that a module lists, asked of the interpreter that can import it."""
    code = f"import json; from peers.sparse.{entry.module} import TRIED"
    return ask(python, f"{code}; print(json.dumps(TRIED[{entry.form!r}]))")


def versions(python: str, names: list[str]) -> dict[str, str]:
    """Of Python and of those of these distributions that are installed."""
    found = "{each.name: each.version for each in m.distributions()}"
    there = ask(python, f"import importlib.metadata as m, json; print(json.dumps({found}))")
    return {name: there[name] for name in names if name in there} | {"python": bench_loader.python_version(python)}


def interpreter(text: str) -> tuple[str, str]:
    """A module of `peers/sparse` and the interpreter that runs it."""
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
    parser.add_argument("--tune", nargs="+", choices=CONTENDERS, default=[], help="time all settings tried of these")
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
