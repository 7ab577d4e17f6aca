"""A folder of files is whole if each file is, none is missing, and its shards are those of one conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import pytest
from click.testing import CliRunner, Result
from support.flipped_bits import flip, places
from support.foreign import make_file, values

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError


@pytest.fixture
def shards(class_folder, tmp_path: Path) -> list[Path]:
    h5chunk.convert(class_folder(40), tmp_path / "set", chunk_samples=3, shards=4, workers=0)
    return sorted((tmp_path / "set").iterdir())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_a_whole_folder(shards: list[Path]) -> None:
    folder = shards[0].parent
    told: list[tuple[int, int | None]] = []
    report = h5chunk.verify(folder, progress=lambda _, done, total: told.append((done, total)))
    assert report.ok and [each.path for each in report.files] == list(map(str, shards))
    assert not report.missing and not report.problems
    assert told == sorted(told) and told[-1][1] == sum(file.stat().st_size for file in shards)
    assert str(report).startswith(f"{folder}: 4 files, ") and ", whole\n" in str(report)
    assert str(report).count("KiB, whole") == 5
    assert h5chunk.verify(f"{folder}/*.h5").ok and h5chunk.verify(shards[1:3]).missing == (
        "set-00000-of-00004.h5",
        "set-00003-of-00004.h5",
    )
    assert len(h5chunk.verify(folder, quick=True).files[0].fields) == 2


def test_each_bad_file_is_named(shards: list[Path]) -> None:
    folder = shards[0].parent
    flip(shards[1], places(shards[1])[2][2])
    shards[3].write_bytes(shards[3].read_bytes()[:-7])
    report = h5chunk.verify(folder)
    assert [each.ok for each in report.files] == [True, False, True, False]
    assert [(each.field, each.chunk) for each in report.files[1].bad] == [("images", 2)]
    assert "cut short" in report.files[3].problems[0] and str(shards[3]) not in report.files[3].problems[0]
    assert "DAMAGED: 2 bad files" in str(report) and "bad: images, chunk 2" in str(report)
    result = run(folder)
    assert result.exit_code == 1 and result.stderr == ""
    found = json.loads(run(folder, "--json").stdout)
    assert not found["ok"] and [each["ok"] for each in found["files"]] == [True, False, True, False]
    assert found["files"][1]["bad"][0]["chunk"] == 2


def test_missing_shards_are_named(shards: list[Path]) -> None:
    folder = shards[0].parent
    for number in (0, 2):
        shards[number].unlink()
    result = run(folder)
    assert result.exit_code == 1 and "2 files" in result.stdout and "DAMAGED: 2 missing files" in result.stdout
    assert [line.strip() for line in result.stdout.splitlines() if "missing: " in line] == [
        "missing: set-00000-of-00004.h5",
        "missing: set-00002-of-00004.h5",
    ]
    found = json.loads(run(folder, "--json").stdout)
    assert found["missing"] == ["set-00000-of-00004.h5", "set-00002-of-00004.h5"] and not found["ok"]


def test_shards_that_are_not_of_one_set(shards: list[Path], class_folder, tmp_path: Path) -> None:
    folder = shards[0].parent
    kept = shutil.copy(shards[2], tmp_path / "kept")
    shutil.copy(shards[1], shards[2])
    assert h5chunk.verify(folder).problems == (
        "set-00002-of-00004.h5 was written as shard 1 of 4, so the file was renamed",
    )
    shutil.copy(kept, shards[2])
    assert h5chunk.verify(folder).ok
    shutil.copy(shards[2], folder / "set-00000-of-00001.h5")
    problems = h5chunk.verify(folder).problems
    assert "there are sets of 1 and 4 shards named 'set': keep one set" in problems
    (folder / "set-00000-of-00001.h5").unlink()
    shutil.copy(shards[2], folder / "set-00004-of-00004.h5")
    assert "set-00004-of-00004.h5 has an invalid number for a set of 4: rename it" in h5chunk.verify(folder).problems
    (folder / "set-00004-of-00004.h5").unlink()
    h5chunk.convert(class_folder(40, name="wide", width=9), tmp_path / "w", shards=4, workers=0)
    shutil.copy(sorted((tmp_path / "w").iterdir())[2], shards[2])
    [problem] = h5chunk.verify(folder).problems
    assert problem.startswith("its shards do not form one data set: ") and "has the sample shape [3, 10, 9]" in problem


def test_repair_reaches_every_file(shards: list[Path], tmp_path: Path) -> None:
    before = [file.read_bytes() for file in shards]
    for file in shards[1:3]:
        flip(file, places(file)[0][2])
    report = h5chunk.verify(shards[0].parent, repair=tmp_path / "photos")
    assert report.ok and [len(each.repaired) for each in report.files] == [0, 1, 1, 0]
    assert [file.read_bytes() for file in shards] == before


def test_files_of_others_beside_ours(shards: list[Path]) -> None:
    folder = shards[0].parent
    theirs = make_file(folder / "theirs.h5", x=(values((30, 5), "u2"), {"chunks": (7, 5), "fletcher32": True}))
    (folder / "notes.txt").write_text("hello")
    report = h5chunk.verify(folder)
    assert report.ok and len(report.files) == 5
    with h5py.File(theirs) as file:
        offset = file["x"].id.get_chunk_info(1).byte_offset
    flip(theirs, offset)
    assert [each.ok for each in h5chunk.verify(folder).files] == [True] * 4 + [False]


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no file in this folder ends in"):
        h5chunk.verify(tmp_path)
    assert run(tmp_path).exit_code == 1 and run(tmp_path / "none").exit_code == 1
