"""Arrows between rooms go one way, and importing the package costs nothing."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import h5chunk

PACKAGE = Path(h5chunk.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))

STORE = {"store.hdf5", "store.format", "store.read", "store.write", "store.rewrite"}
GROUND = {"attributes", "errors", "extras", "paths", "machine", "stamp", "urls", "remote"}
MAY_IMPORT = {
    **{room: set() for room in GROUND},
    "extras": {"errors"},
    "paths": {"errors"},
    "remote": {"attributes", "errors", "extras", "paths", "stamp", "urls"},
    "native": set(),
    "sample_source": {"errors"},
    "plan": {"errors"},
    "sources": {"native", "sample_source", "store.hdf5", "store.read", *GROUND},
    "store": set(),
    "store.hdf5": {"native", "plan", *GROUND},
    "store.format": {"__init__", "store.hdf5", "plan", *GROUND},
    "store.read": {"native", "store.hdf5", "store.format", "plan", *GROUND},
    "store.write": {"store.hdf5", "store.format", "store.read", "sample_source", "plan", *GROUND},
    "store.rewrite": {*STORE, "plan", *GROUND},
    "transforms": {"native", "sources", "plan", "store.hdf5", "store.format", "store.read", *GROUND},
    "feed": {"native", "sources", "transforms", *STORE, "plan", *GROUND},
    "tools.progress": set(),
    "tools.model": {"plan", "errors"},
    "tools.measure": {"tools.model", "tools.progress", "sources", "plan", *STORE, "transforms", "feed", "__init__"}
    | GROUND,
    "tools.doctor": {"tools", "tools.model", "tools.measure", "machine", "paths", "errors"},
    "tools": {"native", "sample_source", "sources", "plan", *STORE, "feed", *GROUND, "__init__"},  # and its inner rooms
    "lightning": {"feed", "errors"},
    "cli": {"tools", "errors", "__init__"},
    "__main__": {"cli"},
    "__init__": {"errors"},
}
PURE = ("plan", "tools.model")  # of other packages, these import numpy alone
ONLY_IN = {
    "torch": {"feed", "transforms", "tools.measure", "tools.doctor"},
    "lightning": {"lightning"},
    "pytorch_lightning": {"lightning"},
    "click": {"cli"},
    "tqdm": {"cli"},
    "h5py": {"sources", *STORE, "tools.measure", "tools.doctor", "tools"},
    "PIL": {"sources"},
    "pyarrow": {"sources"},
}
NEVER_AT_IMPORT = {"torch", "h5py", "matplotlib", "numpy", "PIL"}


def imports_of(source: str) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(dotted: str) -> str:
    """The room of a name in the package, or the room within it."""
    parts = dotted.split(".")[1:]
    found = (".".join(parts[:length]) for length in (2, 1))
    return next((name for name in found if name in MAY_IMPORT), "__init__")


def wrong_imports(room: str, source: str) -> list[str]:
    """Imports that a module of this room may not make."""
    wrong = []
    for name in sorted(imports_of(source)):
        top = name.split(".")[0]
        if top == "h5chunk":
            there = room_of(name)
            if there != room and there not in MAY_IMPORT[room] and not there.startswith(f"{room}."):
                wrong.append(name)
        elif room not in ONLY_IN.get(top, {room}) or (
            room in (*PURE, "errors", "__init__")
            and top not in sys.stdlib_module_names
            and not (room in PURE and top == "numpy")
        ):
            wrong.append(name)
    return wrong


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def test_there_are_modules_to_look_at():
    assert {room_of(dotted(path)) for path in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_arrows_go_one_way(path):
    assert wrong_imports(room_of(dotted(path)), (PACKAGE.parent / path).read_text()) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("plan", "from h5chunk.store.format.spec import Header"),
        ("plan", "import h5py"),
        ("sources", "from h5chunk.plan.order import Order"),
        ("store.read", "def f():\n    from h5chunk.feed import dataset"),
        ("store.read", "import torch.nn"),
        ("store.hdf5", "from h5chunk.store.format.spec import GROUP"),
        ("store.read", "from h5chunk.store.write.new_file import NewFile"),
        ("sources", "from h5chunk.store.write.new_file import NewFile"),
        ("feed", "from h5chunk.tools.convert.convert import convert"),
        ("tools", "from tqdm import tqdm"),
        ("tools", "import torch"),
        ("tools.model", "import h5py"),
        ("tools.model", "from h5chunk.tools.measure.disk import locate"),
        ("tools.measure", "from h5chunk.tools.tune.study import Study"),
        ("cli", "from h5chunk.plan.layout import plan_layout"),
        ("feed", "from lightning.pytorch import Trainer"),
        ("errors", "import numpy"),
        ("__init__", "import numpy"),
        ("feed", "import h5chunk"),
    ],
)
def test_an_arrow_back_is_noticed(room, source):
    assert wrong_imports(room, source)


def imported_by(code: str) -> set[str]:
    """Packages in memory after running some code in a fresh process."""
    code += "\nimport sys; print(' '.join(name.split('.')[0] for name in sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240
        ).stdout.split()
    )


def test_importing_the_package_imports_nothing_heavy():
    assert not imported_by("import h5chunk; h5chunk.__version__; dir(h5chunk)") & NEVER_AT_IMPORT


@pytest.mark.parametrize("command", ["", "'convert', "])
def test_help_imports_nothing_heavy(command):
    code = f"from h5chunk.cli import main; main([{command}'--help'], standalone_mode=False)"
    assert not imported_by(code) & NEVER_AT_IMPORT


def test_converting_does_not_import_torch():
    assert not imported_by("import h5chunk; h5chunk.convert") & {"torch", "matplotlib"}


@pytest.mark.parametrize("name", h5chunk.__all__)
def test_public_names_resolve(name):
    assert getattr(h5chunk, name) is not None
    assert name in dir(h5chunk)


def test_unknown_names_do_not():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        h5chunk.nothing  # noqa: B018


@pytest.mark.parametrize(
    "path",
    [each for each in MODULES if ">>>" in (PACKAGE.parent / each).read_text()],
    ids=str,
)
def test_doctests(path):
    module = importlib.import_module(dotted(path))
    assert doctest.testmod(module).failed == 0


def test_the_planners_carry_doctests():
    names = [f"plan.{name}" for name in ("order", "layout", "cache", "slots")]
    names += [f"tools.model.{name}" for name in ("ratio", "mixing", "settings")]
    assert all(doctest.testmod(importlib.import_module(f"h5chunk.{name}")).attempted for name in names)
