"""The command line: help, exit codes, one line for each error, and when a bar is drawn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.commands import check_error, on_terminal, run
from support.faults import failure, watch
from support.foreign import make_file

import h5chunk
from h5chunk.cli import main

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "'' is not the name of a file to write: use a name such as data.h5"),
        (".", "'.' is not the name of a file to write: use a name such as ./data.h5"),
        ("..", "'..' is not the name of a file to write: use a name such as ../data.h5"),
        ("/", "'/' is not the name of a file to write: use a name such as /data.h5"),
        ("new/", "'new/' is not the name of a file to write: use a name such as new/data.h5"),
        ("new/.", "'new/.' is not the name of a file to write"),
        ("old.h5/", "'old.h5/' is not the name of a file to write"),
        ("folder", "folder is a folder: use the name of a file, such as folder/data.h5"),
        ("old.h5/x.h5", "old.h5/x.h5: its folder old.h5 is not a folder"),
        ("loop", "loop cannot be written (Too many levels of symbolic links): use another name"),
        ("x" * 256, "cannot be written (File name too long): use another name"),
    ],
)
@pytest.mark.parametrize("command", ["images", "matrix", "repack", "dry run"])
def test_odd_outputs_are_errors_with_a_remedy(
    class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str, message: str
) -> None:
    root = class_folder(4)
    monkeypatch.chdir(tmp_path)
    run("convert", root, "old.h5")
    Path("ratings.csv").write_text("user,item,rating\n1,2,3\n4,5,6\n")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    arguments = {
        "images": ["convert", root, output, "--overwrite"],
        "matrix": ["convert", "ratings.csv", output, "--overwrite"],
        "repack": ["repack", "old.h5", output, "--overwrite"],
        "dry run": ["convert", root, output, "--dry-run"],
    }[command]
    check_error(run(*arguments), message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("output", ["", ".", "..", "/", "./", "x/.."])
def test_odd_folders_of_shards_are_errors_with_a_remedy(
    class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    root = class_folder(4)
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    check_error(
        run("convert", root, output, "--shards", 2), "is not the name of a folder to write: use a name such as "
    )
    assert not list(Path().iterdir())
    assert run("convert", root, "new/", "--shards", 2).exit_code == 0
    assert sorted(path.name for path in Path("new").iterdir()) == ["new-00000-of-00002.h5", "new-00001-of-00002.h5"]


def test_version() -> None:
    assert h5chunk.__version__ in run("--version").output


def test_convert_prints_a_report(class_folder: Make, tmp_path: Path) -> None:
    result = run("convert", class_folder(), tmp_path / "x.h5", "--workers", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / 'x.h5'}: 20 images of 3 x 10 x 12")
    assert "originals 20 RGB" in result.stdout


def test_options_reach_the_conversion(class_folder: Make, tmp_path: Path) -> None:
    manifest = tmp_path / "list.csv"
    manifest.write_text("path,n\nclass0/0000.png,5\nclass1/0001.png,6\n")
    result = run(
        "convert", class_folder(), tmp_path / "x.h5", "--manifest", manifest, "--size", "4,6", "--fit", "pad",
        "--color", "gray", "--layout", "nhwc", "--chunk-samples", 1, "--seed", 3, "--no-shuffle", "--workers", 0,
        "--on-error", "skip", "--animated", "first", "--max-pixels", 120, "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert (report["num_samples"], report["sample_shape"], report["layout"]["chunk_samples"]) == (2, [4, 6, 1], 1)
    import h5py

    with h5py.File(tmp_path / "x.h5") as file:
        assert file["n"][()].tolist() == [5, 6]
        options = json.loads(file["h5chunk"].attrs["options"])
    assert options == {
        "size": [4, 6], "fit": "pad", "color": "gray", "layout": "nhwc", "animated": "first", "seed": 3,
        "shuffle": False, "split_folders": "auto",
    }  # fmt: skip
    check_error(run("convert", tmp_path / "photos", tmp_path / "y.h5", "--max-pixels", 119), "max_pixels=119")


def test_quiet_prints_nothing(class_folder: Make, tmp_path: Path) -> None:
    result = run("convert", class_folder(), tmp_path / "x.h5", "--quiet", "--workers", 0)
    assert (result.exit_code, result.output) == (0, "") and (tmp_path / "x.h5").exists()


def test_dry_run_writes_nothing(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder()
    before = sorted(tmp_path.rglob("*"))
    result = run("convert", root, tmp_path / "x.h5", "--dry-run")
    assert result.exit_code == 0 and result.stderr == ""
    for word in ("20 images of 3 x 10 x 12, ", " needed, ", " free, about ", "  chunks ", "samples per chunk: "):
        assert word in result.stdout
    plan = json.loads(run("convert", root, tmp_path / "x.h5", "--dry-run", "--json").stdout)
    assert plan["num_samples"] == 20 and plan["layout"]["reasons"]
    assert sorted(tmp_path.rglob("*")) == before


def test_named_errors_are_one_line(class_folder: Make, tmp_path: Path) -> None:
    root, out = class_folder(), tmp_path / "x.h5"
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    check_error(run("convert", tmp_path / "none", out), "no such file or folder")
    check_error(
        run("convert", tmp_path / "empty", out), "contains no images: no file in it or its subfolders ends in .jpg"
    )
    result = run("convert", tmp_path / "text", out)
    assert result.exit_code == 1 and "\n  csv     ratings.csv" in result.stderr  # a list of formats
    check_error(run("convert", root, out, "--manifest", tmp_path / "none.csv"), "none.csv: no such file")
    check_error(run("convert", root, out, "--fit", "crop"), "there is no size")
    check_error(run("convert", root, out, "--chunk-samples", 0), "chunk_samples is 0")
    check_error(run("convert", root, tmp_path), "is a folder")
    check_error(run("convert", root, tmp_path / "no" / "x.h5"), "does not exist: create it first")
    check_error(run("convert", root, out, "--size", "5,5"), "is 10 x 12, but the size is 5 x 5")
    (root / "class0" / "0000.png").write_bytes(b"\n<html>\x1b[31m")
    check_error(run("convert", root, out), "class0/0000.png: is not an image in a known format")
    assert not out.exists()
    out.write_bytes(b"old")
    check_error(run("convert", root, out), "exists: use --overwrite")
    assert out.read_bytes() == b"old"


def test_names_that_terminals_would_obey_are_escaped(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(1)
    name = os.fsdecode(b"a\n\x1b[31m\xff.png")
    (root / "class0" / name).write_bytes(b"broken")
    result = run("convert", root, tmp_path / "x.h5", "--workers", 0)
    check_error(result, r"class0/a\n\x1b[31m\xff.png: is not an image")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fit", "squash"),
        ("--workers", "-1"),
        ("--seed", "-1"),
        ("--seed", str(1 << 64)),
        ("--chunk-samples", "many"),
        ("--max-pixels", "0"),
        ("--nonsense",),
    ],
)
def test_arguments_that_are_refused(class_folder: Make, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run("convert", class_folder(1), tmp_path / "x.h5", *arguments)
    assert result.exit_code in (1, 2) and "Traceback" not in result.output and not (tmp_path / "x.h5").exists()


def test_ctrl_c_in_this_process(class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, "tools.convert.convert.convert", failure(KeyboardInterrupt))
    result = run("convert", class_folder(1), tmp_path / "x.h5")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_bar_is_drawn_on_a_terminal_only(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(100)
    output, drawn = on_terminal("convert", root, tmp_path / "x.h5", "--workers", 0)
    assert "listing: " in drawn and "converting: " in drawn and "/100" in drawn and "samples/s" in drawn
    assert output.startswith(f"{tmp_path / 'x.h5'}: 100 images") and "\r" not in output
    output, drawn = on_terminal("convert", root, tmp_path / "y.h5", "--workers", 0, "--quiet")
    assert (output, drawn) == ("", "")
    command = [sys.executable, "-m", "h5chunk", "convert", str(root), str(tmp_path / "z.h5")]
    piped = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert piped.stderr == b""


def test_output_to_a_path_that_is_not_utf8(class_folder: Make, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.h5"
    command = [sys.executable, "-m", "h5chunk", "convert", str(class_folder(1)), path]
    result = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert rb"\xff.h5: 1 image" in result.stdout and os.path.exists(path)


@pytest.mark.parametrize("arguments", [("info", "ftp://h/a.h5"), ("convert", "ftp://h/a.zip", "x.h5")], ids=str)
def test_urls_of_other_schemes_are_refused_by_name(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_error(run(*arguments), "URLs with ftp:// are not read: use s3,")


@pytest.mark.parametrize("size", ["8", "8,8"])
def test_one_number_is_the_size_of_a_square(tmp_path, size):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (10, 20)).save(tmp_path / "photos" / "a.png")
    result = run("convert", tmp_path / "photos", tmp_path / "a.h5", "--size", size, "--fit", "stretch", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["sample_shape"] == [3, 8, 8]


@pytest.fixture
def foreign(tmp_path):
    labels = np.arange(2000) % 5, {"chunks": (2000,)}
    images = np.zeros((2000, 64, 64, 3), "u1"), {"chunks": (500, 8, 8, 1), "compression": "gzip"}
    return make_file(tmp_path / "f.h5", **{"data/images": images, "data/labels": labels})


@pytest.mark.parametrize(
    "arguments", [["info"], ["bench", "--budget", "200ms", "--fields", "data/images"], ["tune", "--budget", "200ms"]]
)
def test_reports_fit_the_terminal_but_code_and_commands_stay_whole(foreign, arguments, monkeypatch):
    monkeypatch.chdir(foreign.parent)
    command, *options = arguments
    if command == "tune":
        options += ["--fields", "data/images", "--fields", "data/labels"]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run(command, foreign.name, *options).stdout.splitlines()
    is_code = re.compile(r" *((import|data =|loader =|h5chunk repack|h5py\.File).*|\S+)")  # or one word, such as a path
    assert [line for line in narrow if len(line) > 60 and not is_code.fullmatch(line)] == []
    assert all(
        line.count("(") == line.count(")") for line in narrow if line.lstrip().startswith(("data =", "loader ="))
    )
    monkeypatch.delenv("COLUMNS")
    wide = run(command, foreign.name, *options).stdout.splitlines()  # not a terminal: lines are not wrapped
    assert len(wide) < len(narrow) and max(map(len, wide)) > 80


@pytest.mark.parametrize("command", ["", *sorted(main.commands)])
def test_help_fits_the_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*command.split(), "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
