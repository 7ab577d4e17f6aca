"""Without the optional packages, what needs one of them is a one-line error that names its extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import h5chunk
from h5chunk.extras import EXTRAS

HIDDEN = [*EXTRAS, "scipy", "pandas", "anndata", "imagecodecs", "simplejpeg", "lightning"]
HIDE = f"""
import importlib.abc, json, sys
sys.path[:0] = [sys.argv[2], *{sys.path!r}]
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hide())
from click.testing import CliRunner
from h5chunk.cli import main
for command in json.loads(sys.argv[1]):
    run = CliRunner().invoke(main, command)
    print(json.dumps([run.exit_code, run.output.strip(), repr(run.exception)]))
"""


def test_commands_without_the_optional_packages(tmp_path: Path) -> None:
    hdf5plugin, pyarrow = pytest.importorskip("hdf5plugin"), pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = {
        "m.mtx": "%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 5\n",
        "m.svm": "1 1:5\n",
        "m.csv": "user,item,rating\n1,2,3\n",
        "t.csv": "a,b\n1.5,2\n2.5,1\n",
        "many/m.csv": "user,item,rating\n1,2,3\n",
    }
    (tmp_path / "many").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    parquet.write_table(pyarrow.table({"x": [1.5]}), tmp_path / "t.parquet")
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((9, 8), "u1"), chunks=(3, 8), **hdf5plugin.Zstd())
    h5chunk.convert({"images": np.zeros((64, 3, 8, 8), "u1")}, tmp_path / "a.h5")
    sources = [*texts, "many", "m*.csv", "t.parquet"]
    needs = [(["convert", str(tmp_path / name), str(tmp_path / "x.h5")], "tables") for name in sources]
    needs += [
        (
            ["convert", str(tmp_path / "a.npy"), str(tmp_path / "x"), "--shards", "2", "--dask", "local:1"],
            "distributed",
        ),
        (["convert", "https://example.com/x.csv", str(tmp_path / "x.h5")], "remote"),
        (["convert", str(tmp_path / "a.npy"), "s3://bucket/x.h5"], "remote"),
        (["info", "s3://bucket/x.h5"], "remote"),
        (["tune", str(tmp_path / "a.h5"), "--plot", "x.png"], "plot"),
        (["repack", str(tmp_path / "a.h5"), str(tmp_path / "x.h5"), "--compression", "zstd"], "codecs"),
        (["repack", str(tmp_path / "z.h5"), str(tmp_path / "x.h5")], "codecs"),
        (["bench", str(tmp_path / "z.h5"), "--fields", "images"], "codecs"),
        (["verify", str(tmp_path / "z.h5")], "codecs"),
    ]
    np.save(tmp_path / "a.npy", np.zeros((9, 4), "u1"))
    commands, hidden = json.dumps([command for command, _ in needs]), tmp_path / "hidden"
    hidden.mkdir()
    for name in HIDDEN:  # from processes that the commands start, which get the same folders of modules
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})")
    run = [sys.executable, "-c", HIDE, commands, str(hidden)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    for (command, extra), line in zip(needs, done.stdout.splitlines(), strict=True):
        code, output, error = json.loads(line)
        assert f'pip install "h5chunk[{extra}]"' in output, (command, output, error)
        if command[0] == "verify":
            assert code == 0 and "DAMAGED" not in output  # it says that the field was not read
        else:
            assert code == 1 and output.count("\n") < 3 and error in ("SystemExit(1)", "None"), (command, output, error)
