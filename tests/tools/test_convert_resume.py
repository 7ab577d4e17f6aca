"""A conversion that was stopped is continued: what is there is not done again, and the output is the same."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from support.conversions import linux, skipping
from support.faults import failure, small, watch
from support.full_disk import failing
from support.pictures import pixels
from support.stopped import Stop, packed, stop_at

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OutputError, SampleError, SourceError
from h5chunk.tools.convert.convert import convert

Make = Callable[..., Path]
TESTS = Path(__file__).parents[1]
COUNT = 75  # images: 5 tasks of 16


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, task_samples=16)


def contents(path: Path) -> list[tuple[str, bytes]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name if path.is_dir() else "", file.read_bytes()) for file in files]


def beside(path: Path) -> list[str]:
    """What of ours lies beside an output."""
    return sorted(entry.name for entry in path.parent.iterdir() if "h5chunk-" in entry.name)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all images that are decoded in this process."""
    numbers: list[int] = []
    watch(monkeypatch, "read image", lambda _, index, out: numbers.append(index))
    return numbers


def interrupted(path: Path, least: int = 36, **options: Any) -> None:
    """Convert until so many samples are written."""
    with pytest.raises(Stop):
        convert(output=path, workers=0, progress=stop_at("convert", least), **options)
    assert not path.exists() or options.get("overwrite")
    assert beside(path) == [f".{path.name}.h5chunk-journal", f".{path.name}.h5chunk-part"]


def same_report(one: Any, other: Any) -> bool:
    """But for the time and the place."""
    hidden = {"seconds": 0.0, "path": "", "skipped_list": "", "chunk_cache": None}  # its code has the path
    return replace(one, **hidden) == replace(other, **hidden)


# ---- images


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "manifest"])
def test_it_goes_on(
    class_folder: Make, tmp_path: Path, reads: list[int], kind: str, shards: int | None, workers: int
) -> None:
    options = {**packed(kind, class_folder(COUNT)), "shards": shards, "chunk_samples": 5}
    whole = convert(output=tmp_path / "whole.h5", workers=0, **options)
    interrupted(tmp_path / "x.h5", **options)
    reads.clear()
    lines: list[str] = []
    report = convert(output=tmp_path / "x.h5", workers=workers, notify=lines.append, **options)
    expected = [(name.replace("whole", "x"), data) for name, data in contents(tmp_path / "whole.h5")]
    assert contents(tmp_path / "x.h5") == expected
    assert same_report(report, whole) and beside(tmp_path / "x.h5") == []
    there = int(lines[0].split()[1])
    assert lines == [f"continuing: {there} of {COUNT} samples are already written"] and 36 <= there < COUNT
    if not workers:
        assert len(reads) == len(set(reads)) == COUNT - there


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("least", [16, 50, COUNT])
def test_with_images_that_are_left_out(
    class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, shards: int | None
) -> None:
    """Stopped while images are read, or once gaps were closed; images that failed are tried again."""
    root = class_folder(COUNT)
    skipping(root, [0, 3, 19, 40, 74])
    options: dict[str, Any] = {"source": root, "shards": shards, "on_error": "skip", "chunk_samples": 5}
    whole = convert(output=tmp_path / "whole.h5", workers=0, **options)
    if least < COUNT or shards:
        interrupted(tmp_path / "x.h5", least, **options)
    else:  # behind all images
        watch(monkeypatch, "store.write.samples._write_tables", failure(Stop))
        with pytest.raises(Stop):
            convert(output=tmp_path / "x.h5", workers=0, **options)
        monkeypatch.undo()
    report = convert(output=tmp_path / "x.h5", workers=2, **options)
    assert [data for _, data in contents(tmp_path / "x.h5")] == [data for _, data in contents(tmp_path / "whole.h5")]
    assert same_report(report, whole) and beside(tmp_path / "x.h5") == []


def test_only_what_changed_is_done_again(class_folder: Make, tmp_path: Path, reads: list[int]) -> None:
    root = class_folder(COUNT)
    interrupted(tmp_path / "x.h5", 64, source=root, chunk_samples=4)
    done = set(reads)
    index = reads[20]
    path = root / f"class{index // 25}" / f"{index % 25 * 3 + index // 25:04d}.png"
    status = path.stat()
    data = path.read_bytes()
    Image.fromarray(pixels(9999)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(data), b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times: not even size differs
    reads.clear()
    lines: list[str] = []
    convert(root, tmp_path / "x.h5", workers=0, chunk_samples=4, notify=lines.append)
    assert lines[1:] == ["changed samples that were written again: 16"]
    assert index in reads and len(reads) == COUNT - len(done) + 16
    convert(root, tmp_path / "whole.h5", workers=0, chunk_samples=4)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_bad_image_is_mended_or_left_out(class_folder: Make, tmp_path: Path, reads: list[int]) -> None:
    """What was done before it was met need not be done again, either way."""
    root = class_folder(COUNT)
    bad = root / "class2" / "0050.png"
    good = bad.read_bytes()
    bad.write_bytes(b"no image")
    options: dict[str, Any] = {"source": root, "workers": 0, "shuffle": False, "chunk_samples": 4}
    for path in (tmp_path / "mended.h5", tmp_path / "skipped.h5"):
        lines: list[str] = []
        with pytest.raises(SampleError, match=r"class2/0050\.png: is not an image"):
            convert(output=path, notify=lines.append, **options)
        names = [str(tmp_path / name) for name in (f".{path.name}.h5chunk-part", f".{path.name}.h5chunk-journal")]
        assert lines == [
            "the finished work is kept, and the same command continues it; to free its space, delete "
            f"{names[0]} and {names[1]}"
        ]
    reads.clear()
    convert(output=tmp_path / "skipped.h5", on_error="skip", **options)
    assert 0 < len(reads) <= COUNT - 64
    bad.write_bytes(good)
    reads.clear()
    convert(output=tmp_path / "mended.h5", **options)
    assert 0 < len(reads) <= COUNT - 64
    convert(output=tmp_path / "whole.h5", **options)
    assert (tmp_path / "mended.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert len(h5chunk.ChunkDataset(tmp_path / "skipped.h5")) == COUNT - 1


def test_an_image_that_can_be_read_now(class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out for a reason that lay not in its file: the file is as it was, and is tried again."""
    root = class_folder(COUNT)

    def fail(_: object, index: int, out: object) -> None:
        if index == 40:
            raise SampleError("cannot be read: Input/output error")

    options: dict[str, Any] = {"source": root, "on_error": "skip", "shuffle": False}
    with monkeypatch.context() as patch:
        watch(patch, "read image", fail)
        interrupted(tmp_path / "x.h5", 50, **options)
    assert convert(output=tmp_path / "x.h5", **options, workers=0).num_samples == COUNT
    convert(output=tmp_path / "whole.h5", **options, workers=0)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize("what", ["byte of the part", "cut part", "no part", "byte of the journal", "cut journal"])
def test_damage_is_done_again(class_folder: Make, tmp_path: Path, what: str) -> None:
    root, path = class_folder(COUNT), tmp_path / "x.h5"
    interrupted(path, 64, source=root, chunk_samples=5)
    part, journal = tmp_path / ".x.h5.h5chunk-part", tmp_path / ".x.h5.h5chunk-journal"
    file = part if "part" in what else journal
    data = bytearray(file.read_bytes())
    if "byte" in what:
        data[len(data) // 2] ^= 0xFF
    file.write_bytes(data[: len(data) // 2] if "cut" in what else data)
    if what == "no part":
        part.unlink()
    convert(root, path, workers=2, chunk_samples=5)
    convert(root, tmp_path / "whole.h5", workers=0, chunk_samples=5)
    assert path.read_bytes() == (tmp_path / "whole.h5").read_bytes() and beside(path) == []


@pytest.mark.parametrize("change", ["seed", "size", "chunk", "another image", "shards", "matrix"])
def test_what_is_of_other_options_is_not_taken(class_folder: Make, tmp_path: Path, change: str) -> None:
    root = class_folder(COUNT)
    changed: dict[str, Any] = {
        "seed": {"seed": 1},
        "size": {"size": (10, 12), "fit": "stretch"},
        "chunk": {"chunk_samples": 7},
        "shards": {"shards": 2},
    }.get(change, {})
    before = {"shards": 3} if change == "shards" else {}
    changed |= {} if change == "matrix" else {"workers": 0}
    interrupted(tmp_path / "x.h5", source=root, **before)
    if change == "another image":
        Image.fromarray(pixels(0)).save(root / "class1" / "new.png")
    if change == "matrix":
        root = tmp_path / "r.csv"
        root.write_text("user,item,rating\n1,2,3\n4,5,6\n")
    lines: list[str] = []
    convert(root, tmp_path / "x.h5", notify=lines.append, **changed)
    again = "the unfinished conversion had other options or sources: starting over"
    assert lines == ([] if change == "matrix" else [again])
    convert(root, tmp_path / "whole.h5", **changed)
    assert [data for _, data in contents(tmp_path / "x.h5")] == [data for _, data in contents(tmp_path / "whole.h5")]
    assert beside(tmp_path / "x.h5") == []


def test_a_file_where_a_folder_was_begun_and_the_other_way_round(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(COUNT)
    interrupted(tmp_path / "x.h5", source=root, shards=3)
    with pytest.raises(
        OutputError,
        match=r"an unfinished folder of shards has this name: repeat the command that wrote it, or remove",
    ):
        convert(root, tmp_path / "x.h5", workers=0)
    (tmp_path / "more").mkdir()
    interrupted(tmp_path / "more" / "x.h5", source=root)
    with pytest.raises(
        OutputError, match=r"an unfinished file has this name: repeat the command that wrote it, .*part"
    ):
        convert(root, tmp_path / "more" / "x.h5", shards=3, workers=0)


def test_what_is_no_use_is_not_kept(class_folder: Make, tmp_path: Path) -> None:
    """Images that differ need other options, so that all is done anew."""
    root = class_folder(COUNT)
    Image.fromarray(pixels(1, 5, 5)).save(root / "class2" / "0074.png")
    with pytest.raises(SourceError, match="samples differ in 'images'"):
        convert(root, tmp_path / "x.h5", workers=0, shuffle=False)
    assert beside(tmp_path / "x.h5") == []


def test_old_output_stays_until_the_end(class_folder: Make, tmp_path: Path) -> None:
    root, path = class_folder(COUNT), tmp_path / "x.h5"
    path.write_bytes(b"old")
    interrupted(path, source=root, overwrite=True)
    interrupted(path, 64, source=root, overwrite=True)
    assert path.read_bytes() == b"old"
    convert(root, path, overwrite=True, workers=0)
    assert len(h5chunk.ChunkDataset(path)) == COUNT and beside(path) == []


def test_on_the_command_line(class_folder: Make, tmp_path: Path) -> None:
    interrupted(tmp_path / "x.h5", source=class_folder(COUNT), chunk_samples=16)
    arguments = ["convert", str(tmp_path / "photos"), str(tmp_path / "x.h5"), "--chunk-samples", "16", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, "note: continuing: 48 of 75 samples are already written\n")
    assert json.loads(result.stdout)["counts"] == {"RGB": 75}


def test_ctrl_c_says_what_can_be_done(class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "convert" and done > 25:
            raise KeyboardInterrupt

    monkeypatch.setattr("h5chunk.cli.group.progress_bar", lambda *_: nullcontext(interrupt))
    arguments = ["convert", str(class_folder(COUNT)), str(tmp_path / "x.h5"), "--workers", "0"]
    result = CliRunner().invoke(main, arguments)
    first, second = result.stderr.splitlines()
    assert result.exit_code == 130 and second == "interrupted"
    assert first.startswith("note: the finished work is kept, and the same command continues it; to free its space, ")
    assert str(tmp_path / ".x.h5.h5chunk-part") in first


# ---- a conversion that was complete, but could not say so


def killed_when_complete(monkeypatch: pytest.MonkeyPatch, path: Path, **options: Any) -> None:
    """Convert, and stop right behind the moment at which the output has its name."""

    def stop(folder: Path) -> None:
        if folder == path.parent:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        watch(patch, "sync folder", stop)
        convert(output=path, **options)


@linux
@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "manifest"])
@pytest.mark.parametrize("broken", [[], [3, 40]])
def test_the_same_command_finds_its_output_complete(
    class_folder: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shards: int | None,
    broken: list[int],
) -> None:
    root, path = class_folder(COUNT), tmp_path / "x.h5"
    skipping(root, broken)
    options = {**packed(kind, root), "shards": shards, "chunk_samples": 5, "on_error": "skip"}
    whole = convert(output=tmp_path / "whole.h5", **options, workers=0)
    killed_when_complete(monkeypatch, path=path, workers=0, **options)
    data = contents(path)
    assert convert(output=path, **options, dry_run=True).already_complete
    for workers in (0, 2):
        report = convert(output=path, workers=workers, **options)
        assert report.already_complete and report.counts == {}
        assert same_report(replace(report, counts=whole.counts, already_complete=False), whole)
        assert contents(path) == data and beside(path) == []
        lists = [Path(f"{file}.skipped.csv") for file in (path, tmp_path / "whole.h5")]
        assert [file.exists() for file in lists] == [bool(broken)] * 2
        assert not broken or lists[0].read_text() == lists[1].read_text()


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize(
    "change",
    ["seed", "chunk", "size", "skip", "shards", "image", "new image", "source", "manifest", "output", "no attributes"],
)
def test_an_output_of_anything_else_exists(
    class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, shards: int | None
) -> None:
    root, path = class_folder(COUNT), tmp_path / "x.h5"
    options: dict[str, Any] = {**packed("manifest", root), "shards": shards}
    killed_when_complete(monkeypatch, path=path, workers=0, **options)
    changed: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "chunk": {"chunk_samples": 7},
        "size": {"size": (10, 12)},
        "skip": {"on_error": "skip"},
        "shards": {"shards": 2} if shards else {"manifest": None},
        "source": {"source": shutil.copytree(root, tmp_path / "copy")},  # equal, but who could tell without decoding?
    }
    file = root / "class1" / "0001.png"
    if change == "image":
        file.write_bytes(file.read_bytes())
    elif change == "manifest":
        text = root.with_suffix(".csv").read_text()
        root.with_suffix(".csv").write_text(text.replace(",1\n", ",2\n"))
    elif change == "new image":
        shutil.copy(file, root / "class1" / "new.png")
        changed[change] = {"manifest": None}
    elif change == "output":
        os.utime(next(path.iterdir()) if shards else path, ns=(1, 1))
    elif change == "no attributes":
        monkeypatch.setattr(os, "getxattr", failing(errno.ENOTSUP))
    options |= changed.get(change, {})
    data = contents(path)
    for run in (convert, partial(convert, dry_run=True)):
        with pytest.raises(OutputError, match=r"x\.h5 exists: use --overwrite"):
            run(output=path, **options)
    assert contents(path) == data and beside(path) == []
    assert not convert(output=path, overwrite=True, **options, workers=0).already_complete


@linux
@pytest.mark.parametrize("options", [{}, {"dense": True}, {"binarize": 4}])
def test_a_matrix_that_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    source, path = tmp_path / "r.csv", tmp_path / "x.h5"
    source.write_text("user,item,rating\n" + "".join(f"{i % 40},{i * 7 % 31},{i % 5 + 1}\n" for i in range(900)))
    options |= {"source": source, "duplicates": "max"}
    whole = convert(output=tmp_path / "whole.h5", **options)
    killed_when_complete(monkeypatch, path=path, **options)
    data = path.read_bytes()
    assert convert(output=path, **options, dry_run=True).already_complete
    report = convert(output=path, memory_bytes=1 << 21, **options)
    assert report.already_complete and "already complete" in str(report)
    names = ("counts", "num_entries", "path", "seconds", "already_complete", "chunk_cache")  # not known, or others
    assert replace(report, **{name: getattr(whole, name) for name in names}) == whole
    assert report.num_entries in (None, whole.num_entries)
    os.utime(source)
    for changed in ({}, {"seed": 1}, {"min_row_count": 1}):
        for run in (convert, partial(convert, dry_run=True)):
            with pytest.raises(OutputError, match=r"x\.h5 exists: use --overwrite"):
                run(output=path, **{**options, **changed})
    assert path.read_bytes() == data and beside(path) == []


@linux
def test_a_folder_of_10x_is_all_of_its_files(tmp_path: Path) -> None:
    folder, path = tmp_path / "cells", tmp_path / "x.h5"
    folder.mkdir()
    (folder / "matrix.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n2 2 2\n1 1 3\n2 2 4\n")
    (folder / "barcodes.tsv").write_text("A\nB\n")
    (folder / "features.tsv").write_text("g1\tG1\tGene\ng2\tG2\tGene\n")
    convert(folder, path)
    assert convert(folder, path).already_complete
    (folder / "features.tsv").write_text("g3\tG1\tGene\ng2\tG2\tGene\n")
    with pytest.raises(OutputError, match="exists: use --overwrite"):
        convert(folder, path)


@linux
def test_complete_on_the_command_line(class_folder: Make, tmp_path: Path) -> None:
    arguments = ["convert", str(class_folder(COUNT)), str(tmp_path / "x.h5")]
    runner = CliRunner()
    assert runner.invoke(main, arguments).exit_code == 0
    result = runner.invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / 'x.h5'}: 75 images of 3 x 10 x 12, ")
    assert result.stdout.splitlines()[0].endswith(", already complete")
    plan = runner.invoke(main, [*arguments, "--dry-run"])
    assert plan.exit_code == 0 and plan.stdout == result.stdout
    other = runner.invoke(main, [*arguments, "--seed", "1"])
    assert other.exit_code == 1 and "x.h5 exists: use --overwrite" in other.stderr


# ---- two at the same time


@linux
@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("stage", ["list", "convert"])
def test_the_later_of_two_leaves_nothing(class_folder: Make, tmp_path: Path, stage: str, shards: int | None) -> None:
    """It finds the output of the other when it begins, or when it is through."""
    root, path, other = class_folder(COUNT), tmp_path / "x.h5", tmp_path / "other" / "x.h5"
    other.parent.mkdir()

    def meanwhile(same: bool) -> Callable[..., None]:
        def progress(current: str, done: int, total: int | None) -> None:
            if current == stage and done >= 30 and not path.exists():
                if same and stage == "list":
                    convert(root, path, shards=shards, workers=0)
                else:
                    convert(root, other, shards=shards, workers=0, overwrite=True, seed=0 if same else 1)
                    other.rename(path)

        return progress

    report = convert(root, path, shards=shards, workers=0, progress=meanwhile(same=True))
    assert report.already_complete and beside(path) == []
    shutil.rmtree(path) if shards else path.unlink()
    with pytest.raises(OutputError, match=r"exists: use --overwrite"):
        convert(root, path, shards=shards, workers=0, progress=meanwhile(same=False))
    assert beside(path) == []


# ---- a source that changes while it is read


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_changes(class_folder: Make, tmp_path: Path, kind: str) -> None:
    source = packed(kind, class_folder(COUNT))["source"]

    def touch(stage: str, done: int, total: int | None) -> None:
        if stage == "convert" and 0 < done < 50:
            os.utime(source)

    with pytest.raises(SampleError, match=r"^class./....\.png: .*the file that contains it changed meanwhile"):
        convert(source, tmp_path / "x.h5", workers=0, chunk_samples=5, progress=touch)
    convert(source, tmp_path / "x.h5", workers=0, chunk_samples=5)
    convert(source, tmp_path / "whole.h5", workers=0, chunk_samples=5)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_zip_made_again_is_continued_where_members_are_the_same(
    class_folder: Make, tmp_path: Path, reads: list[int]
) -> None:
    root = class_folder(COUNT)
    source = packed("zip", root)["source"]
    interrupted(tmp_path / "x.h5", 64, source=source, chunk_samples=4)
    done = len(reads)
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*.png"), reverse=True):
            archive.write(path, path.relative_to(root))
    reads.clear()
    convert(source, tmp_path / "x.h5", workers=0, chunk_samples=4)
    assert len(reads) == COUNT - done


def test_a_tar_made_again_is_read_again(class_folder: Make, tmp_path: Path, reads: list[int]) -> None:
    root = class_folder(COUNT)
    source = packed("tar", root)["source"]
    interrupted(tmp_path / "x.h5", 64, source=source, chunk_samples=4)
    with tarfile.open(source, "w") as archive:
        archive.add(root, ".")
    reads.clear()
    convert(source, tmp_path / "x.h5", workers=0, chunk_samples=4)
    assert len(reads) == COUNT


def test_a_manifest_that_changes(class_folder: Make, tmp_path: Path) -> None:
    given = packed("manifest", class_folder(20))

    def touch(stage: str, done: int, total: int | None) -> None:
        os.utime(given["manifest"])

    with pytest.raises(SourceError, match=r"photos\.csv: changed while it was read"):
        convert(output=tmp_path / "x.h5", progress=touch, **given, workers=0)


@pytest.mark.parametrize("name", ["m.npy", "m.npz", "m.csv", "m.libsvm"])
def test_a_matrix_that_changes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.random.default_rng(0).integers(1, 9, (400, 300), np.uint8)
    path = tmp_path / name
    if name == "m.npy":
        np.save(path, dense)
    elif name == "m.npz":
        sparse.save_npz(path, sparse.csr_matrix(dense))
    elif name == "m.csv":
        path.write_text("user,item,rating\n" + "".join(f"{i},{j},{dense[i, j]}\n" for i, j in np.ndindex(400, 300)))
    else:
        path.write_text("".join("0 " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(row)) + "\n" for row in dense))

    def grow(stage: str, done: int, total: int | None) -> None:
        if stage == "read":
            with path.open("ab") as file:
                file.write(b"\n")

    small(monkeypatch, min_cells=1000)
    with pytest.raises(SourceError, match=rf"{name}: changed while it was read"):
        kind = "npy" if name == "m.npy" else None
        convert(path, tmp_path / "x.h5", format=kind, memory_bytes=1 << 20, progress=grow)
    assert not (tmp_path / "x.h5").exists() and beside(tmp_path / "x.h5") == []


# ---- at random


@pytest.mark.skipif(sys.platform != "linux", reason="kills process groups as only Linux can")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--kills", "6", "--images", "100", "--only", "folder skip", "zip shards", "csr"),
        ("--boundaries", "--images", "40", "--most", "1", "--only", "folder shards", "dense"),
    ],
)
def test_torture(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "torture.conversions", *arguments, "--seed", "3", "--json"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["bad"] == [] and not done.stderr
    assert result["counts"]["identical"] == result["counts"]["outputs"] > 2
