"""Samples behind those of a file: all there, the old file untouched until then, every way to fail."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from support.conversions import check_file, linux
from support.csr_files import write_csr
from support.faults import failure, small, watch
from support.flipped_bits import flip, places
from support.full_disk import largest_file
from support.orders import ordered
from support.pictures import pixels

import h5chunk
import h5chunk.store.write.new_file as newfile_module
import h5chunk.store.write.old_file
from h5chunk.cli import main
from h5chunk.errors import FileError, H5ChunkError, OptionError, OutputError, SampleError, SourceError
from h5chunk.tools.convert.append import append
from h5chunk.tools.convert.append_fit import SET_BY_FILE
from h5chunk.tools.convert.options import append_options

Make = Callable[..., Path]


def make_source(root: Path, numbers: range, classes: int = 3, **size: int) -> Path:
    """A folder of images; image i has the pixels ``pixels(i)``, class ``i % classes``."""
    for i in numbers:
        path = root / f"class{i % classes}" / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i, **size)).save(path)
    return root


def expected(numbers: range, classes: int = 3, names: list[str] | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """Pixels and labels by name."""
    names_of = {i: f"class{i % classes}/{i:04d}.png" for i in numbers}
    number = {name: label for label, name in enumerate(names or [f"class{c}" for c in range(classes)])}
    return {n: pixels(i) for i, n in names_of.items()}, {n: number[n.split("/")[0]] for n in names_of.values()}


def make_file(tmp_path: Path, count: int, chunk_samples: int | None = 4, **options: Any) -> Path:
    source = make_source(tmp_path / "old", range(count))
    h5chunk.convert(source, tmp_path / "x.h5", chunk_samples=chunk_samples, workers=0, **options)
    return tmp_path / "x.h5"


def check_left(path: Path, old: bytes, *, kept: bool = False) -> None:
    """The file is as it was; beside it is nothing, or, after some work, what it is continued from."""
    assert path.read_bytes() == old
    beside = sorted(each.name for each in path.parent.iterdir() if "h5chunk-" in each.name)
    assert beside == ([".x.h5.h5chunk-journal", ".x.h5.h5chunk-part"] if kept else [])


# ---- what is in the file


@pytest.mark.parametrize(
    ("count", "more", "chunk_samples"), [(20, 20, 4), (22, 27, 4), (3, 40, None), (23, 1, 5), (40, 100, 64), (1, 1, 1)]
)
def test_old_and_new_samples_are_all_there(tmp_path: Path, count: int, more: int, chunk_samples: int | None) -> None:
    path = make_file(tmp_path, count, chunk_samples)
    with h5py.File(path) as file:
        before = {name: file[name][()] for name in ("images", "labels", "h5chunk/source_index")}
        size = file["images"].chunks[0]
    new = range(count, count + more)
    report = append(path, make_source(tmp_path / "new", new), workers=2, new_classes=True)
    check_file(path, *expected(range(count + more)))
    with h5py.File(path) as file:
        for name, values in before.items():
            np.testing.assert_array_equal(file[name][:count], values)
        assert file["images"].chunks[0] == size
        added = file["h5chunk/source_index"][count:]
        assert sorted(added) == list(range(count, count + more))
        header = dict(file["h5chunk"].attrs)
    options = json.loads(header["options"])
    record = {"samples": more, "first_index": count, "seed": 0, "shuffle": True, "fit": "error"}
    assert options["appended"] == [record] and options["seed"] == 0
    assert header["num_samples"] == count + more and header["shuffled"] == 0
    assert (report.num_added, report.num_samples, report.num_bytes) == (more, count + more, path.stat().st_size)
    assert report.counts == {"RGB": more} and not report.skipped
    assert h5chunk.verify(path).ok
    assert "with appended samples that are not shuffled among the others" in str(h5chunk.info(path))


def test_new_samples_are_permuted_among_themselves(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 20), make_source(tmp_path / "new", range(20, 60))
    kept, orders = path.read_bytes(), {}
    for name, options in {"0": {}, "1": {"seed": 1}, "plain": {"shuffle": False}}.items():
        path.write_bytes(kept)
        append(path, source, workers=0, **options)
        with h5py.File(path) as file:
            orders[name] = file["h5chunk/source_index"][20:].tolist()
            record = json.loads(file["h5chunk"].attrs["options"])["appended"][0]
        assert (record["seed"], record["shuffle"]) == (options.get("seed", 0), options.get("shuffle", True))
    assert orders["plain"] == list(range(20, 60)) and len(set(map(tuple, orders.values()))) == 3


def test_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 322))
    kept, found = path.read_bytes(), []
    for workers in (0, 1, 3):
        path.write_bytes(kept)
        append(path, source, workers=workers)
        found.append(path.read_bytes())
    assert found[0] == found[1] == found[2]


def test_again_and_again(tmp_path: Path) -> None:
    """Nine times, in chunks of four: every length of the last one comes."""
    path, done = make_file(tmp_path, 5), 5
    for number in range(9):
        more = number % 4 + 1
        report = append(
            path, make_source(tmp_path / f"new{number}", range(done, done + more)), workers=0, new_classes=True
        )
        done += more
        check_file(path, *expected(range(done)))
    assert "4 samples per chunk, as in the old file" in str(report)
    with h5py.File(path) as file:
        records = json.loads(file["h5chunk"].attrs["options"])["appended"]
        assert sorted(file["h5chunk/source_index"][()]) == list(range(done))
    assert [each["first_index"] for each in records] == np.cumsum([5, *(n % 4 + 1 for n in range(8))]).tolist()


@linux
@pytest.mark.parametrize("broken", [[], [23, 27]])
def test_killed_when_it_was_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: list[int]) -> None:
    """The same command does not append twice, and reports what was appended."""
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    for i in broken:
        (source / f"class{i % 3}" / f"{i:04d}.png").write_bytes(b"broken")
    options: dict[str, Any] = {"on_error": "skip", "workers": 0}
    shutil.copy(path, tmp_path / "whole.h5")
    whole = append(tmp_path / "whole.h5", source, **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch(patch, "sync folder", failure(KeyboardInterrupt))
        append(path, source, **options)
    data, number = path.read_bytes(), path.stat().st_ino
    assert append(path, source, **options, dry_run=True).notes[0].startswith("nothing was appended, because")
    for _ in range(2):
        report = append(path, source, **options)
        assert report.already_complete and report.notes[0].startswith("nothing was appended, because")
        assert "already complete" in str(report) and report.counts == {}
        for name in ("num_added", "num_samples", "num_bytes", "class_names", "skipped"):
            assert getattr(report, name) == getattr(whole, name), name
        assert path.read_bytes() == data == (tmp_path / "whole.h5").read_bytes() and path.stat().st_ino == number
        check_left(path, data)
    for file in tmp_path.glob("*.csv"):
        rows = csv.reader(file.read_text().splitlines())
        assert [row[0] for row in rows] == ["path", *(name for name, _ in whole.skipped)]
    assert append(path, source, **options, seed=1).num_samples == whole.num_samples + whole.num_added


def test_what_is_not_what_was_appended_last(tmp_path: Path) -> None:
    """Other samples since, a changed image, other options, or a file that somebody wrote to: appended then."""
    path, source = make_file(tmp_path, 9), make_source(tmp_path / "new", range(9, 12))
    other = make_source(tmp_path / "other", range(12, 15))
    reports = [append(path, each, workers=0) for each in (source, other, source)]
    Image.fromarray(pixels(77)).save(source / "class0" / "0009.png")
    reports += [append(path, source, workers=0), append(path, source, workers=0, shuffle=False)]
    with h5py.File(path, "r+") as file:
        file["labels"][0] = file["labels"][0]
    os.utime(path)
    reports += [append(path, source, workers=0, shuffle=False)]
    assert not any(report.already_complete for report in reports)
    assert [report.num_samples for report in reports] == [12, 15, 18, 21, 24, 27]


def test_what_was_appended_before_is_said(tmp_path: Path) -> None:
    """As who runs a command again, not knowing that it was through, would have samples twice."""
    path, more = make_file(tmp_path, 6), make_source(tmp_path / "new", range(5, 9))
    for seed, number, name in ((0, 1, "class2/0005.png"), (1, 4, "class0/0006.png")):
        note = f"{number} of 4 new names, such as {name}, are already in the file: if they are the same samples, the"
        assert append(path, more, seed=seed, dry_run=True).notes[0].startswith(note)
        assert append(path, more, workers=0, seed=seed).notes[0].startswith(note)
    later = append(path, make_source(tmp_path / "later", range(9, 12)), workers=0)
    assert not any("new names" in line for line in later.notes)


@pytest.mark.parametrize(("layout", "color"), [("nhwc", "rgb"), ("nchw", "gray"), ("nhwc", "keep")])
def test_images_are_decoded_as_those_of_the_file(tmp_path: Path, layout: str, color: str) -> None:
    path = make_file(tmp_path, 6, layout=layout, color=color)
    append(path, make_source(tmp_path / "new", range(6, 15)), workers=0)
    samples, labels = expected(range(15))
    if color == "gray":
        samples = {name: np.asarray(Image.fromarray(each).convert("L"))[..., None] for name, each in samples.items()}
    check_file(path, samples, labels, layout)


def test_size_and_fit_are_those_of_the_file(tmp_path: Path) -> None:
    path = make_file(tmp_path, 6, size=(6, 8), fit="stretch")
    append(path, make_source(tmp_path / "new", range(6, 9), height=30, width=20), workers=0)
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][6:].tolist()
        image = Image.fromarray(pixels(7, 30, 20)).resize((8, 6), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(file["images"][6 + index.index(7)], np.asarray(image).transpose(2, 0, 1))


def test_other_sizes_need_a_fit(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 6), make_source(tmp_path / "new", range(6, 12), height=30, width=20)
    old = path.read_bytes()
    with pytest.raises(SampleError, match="is 30 x 20, but the size is 10 x 12: use fit stretch, crop or pad"):
        append(path, source, workers=0)
    check_left(path, old)
    assert append(path, source, fit="crop", workers=0).counts["resized"] == 6
    with h5py.File(path) as file:
        assert file["images"].shape == (12, 3, 10, 12)
        assert json.loads(file["h5chunk"].attrs["options"])["appended"][0]["fit"] == "crop"


def test_progress_and_small_chunks(tmp_path: Path) -> None:
    path, told = make_file(tmp_path, 22, 1), []
    report = append(path, make_source(tmp_path / "new", range(22, 82)), workers=2, progress=lambda *it: told.append(it))
    assert [stage for stage, done, total in told if done == total] == ["copy", "convert"]
    assert ("list", 60, None) in told and told[-1] == ("convert", 60, 60)
    assert len(report.notes) == 2 and "chunks still hold 1 sample, " in report.notes[1]
    assert len(append(path, make_source(tmp_path / "more", range(82, 85)), workers=0, new_classes=True).notes) == 2


def test_an_archive_and_a_manifest(tmp_path: Path) -> None:
    source = make_source(tmp_path / "old", range(30))
    names = [f"class{i % 3}/{i:04d}.png" for i in range(30)]
    for name, part, score in (("a.csv", range(12), "{}.5"), ("b.csv", range(12, 30), "{}")):
        lines = [f"{names[i]},{score.format(i)},{i % 2},w{i}" for i in part]
        (tmp_path / name).write_text("\n".join(["path,score,flag,word", *lines]))
    h5chunk.convert(source, tmp_path / "x.h5", manifest=tmp_path / "a.csv", chunk_samples=5, workers=0)
    archive = shutil.make_archive(str(tmp_path / "old"), "zip", source)
    append(tmp_path / "x.h5", archive, manifest=tmp_path / "b.csv", workers=0)  # whole numbers fit in float64
    check_file(tmp_path / "x.h5", expected(range(30))[0], None)
    with h5py.File(tmp_path / "x.h5") as file:
        ends = file["h5chunk/source_name_ends"][()]
        blob = file["h5chunk/source_names"][()].tobytes()
        found = [int(blob[end - 8 : end - 4]) for end in ends]
        assert file["score"][()].tolist() == [i + 0.5 if i < 12 else i for i in found]
        assert file["flag"].dtype == np.uint8 and file["flag"][()].tolist() == [i % 2 for i in found]
        assert [word.decode() for word in file["word"]] == [f"w{i}" for i in found]


def test_what_users_and_tuners_put_into_the_header_stays(tmp_path: Path) -> None:
    path = make_file(tmp_path, 20)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        tuned = {"window_chunks": 2, "rdcc_nslots": 7, "rdcc_nbytes": 12345, "rdcc_w0": 0.5}
        for name, value in tuned.items():
            file["h5chunk"].attrs.modify(name, value)
        file.attrs["about"] = np.bytes_(b"cats")
        file["images"].attrs["mean"] = np.array([1.5, 2.5, 3.5])
    path.chmod(0o640)
    append(path, make_source(tmp_path / "new", range(20, 31)), workers=0)
    with h5py.File(path) as file:
        assert file.attrs["about"] == b"cats" and file["images"].attrs["mean"].tolist() == [1.5, 2.5, 3.5]
        header = dict(file["h5chunk"].attrs)
    assert {name: header[name] for name in tuned} == tuned
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_was_repacked(tmp_path: Path) -> None:
    """Its chunks have an index, and lie as they were written."""
    path = make_file(tmp_path, 22)
    from h5chunk.tools.repack.repack import repack

    repack(path, tmp_path / "y.h5", shuffle=True, seed=3)
    append(tmp_path / "y.h5", make_source(tmp_path / "new", range(22, 30)), workers=0)
    check_file(tmp_path / "y.h5", *expected(range(30)))
    repack(tmp_path / "y.h5", tmp_path / "z.h5", shuffle=True)
    assert h5chunk.ChunkDataset(tmp_path / "z.h5").header.shuffled
    repack(path, tmp_path / "gz.h5", compression="gzip")
    with pytest.raises(
        FileError, match=r"are not stored in uncompressed chunks of 22 complete samples.*--compression none"
    ):
        append(tmp_path / "gz.h5", tmp_path / "new")


def test_training_on_it(tmp_path: Path) -> None:
    path = make_file(tmp_path, 22)
    append(path, make_source(tmp_path / "new", range(22, 50)), workers=0)
    for reader in ("direct", "h5py"):
        with h5chunk.ChunkLoader(path, 8, reader=reader) as loader:
            images = torch.cat([batch.clone() for batch, _ in loader])
        sums = sorted(images.long().sum((1, 2, 3)).tolist())
        assert sums == sorted(int(pixels(i).sum()) for i in range(50))


def test_readers_of_the_old_file(tmp_path: Path) -> None:
    path = make_file(tmp_path, 22)
    with h5py.File(path) as file:
        dataset = h5chunk.ChunkDataset(path)
        dataset[0]
        append(path, make_source(tmp_path / "new", range(22, 30)), workers=0)
        assert file["images"].shape[0] == 22 and file["images"][21].any()
    dataset.close()
    with pytest.raises(FileError, match="replaced or changed since it was first opened"):
        dataset[0]
    with h5chunk.ChunkLoader(path, 8) as loader:
        assert sum(len(images) for images, _ in loader) == 30


@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_a_loop_that_still_reads_when_the_file_is_replaced(tmp_path: Path, reader: str) -> None:
    path, source = make_file(tmp_path, 400), make_source(tmp_path / "new", range(400, 401))
    with (
        h5chunk.ChunkLoader(**ordered(path, 8, window_chunks=2), reader=reader) as loader,
        pytest.raises(FileError, match="replaced or changed since it was first opened: open it again"),
    ):
        for number, _ in enumerate(loader):
            if number == 1:
                append(path, source, workers=0)


def test_repair_from_the_source_of_each_part(tmp_path: Path) -> None:
    """Those of the old source, and of new ones of another size; not a chunk with samples of both."""
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(30), height=20, width=30)
    append(path, source, fit="crop", workers=0)
    whole, bad = path.read_bytes(), [each for each in places(path) if each[0] == "images"]
    for _, _, offset, _ in bad:
        flip(path, offset + 1)
    report = h5chunk.verify(path, repair=tmp_path / "old")
    assert [each.chunk for each in report.repaired] == [0, 1, 2, 3, 4]
    report = h5chunk.verify(path, repair=source)
    assert [each.chunk for each in report.repaired] == list(range(6, 13)) and [each.chunk for each in report.bad] == [5]
    flip(path, bad[5][2] + 1)
    assert path.read_bytes() == whole


# ---- classes and fields


def test_classes_are_found_by_name(tmp_path: Path) -> None:
    path = make_file(tmp_path, 12)
    source = make_source(tmp_path / "new", range(12, 24))
    shutil.rmtree(source / "class0")
    (source / "class1").rename(source / "aardvark")
    old = path.read_bytes()
    with pytest.raises(
        SourceError, match=r"lacks 1 of the 2 classes of the source, such as 'aardvark': use --new-clas"
    ):
        append(path, source, workers=0)
    check_left(path, old)
    report = append(path, source, new_classes=True, workers=0)
    assert report.new_classes == ["aardvark"]
    names = ["class0", "class1", "class2", "aardvark"]
    samples, labels = expected(range(12))
    for i in range(12, 24):
        if i % 3:
            name = f"aardvark/{i:04d}.png" if i % 3 == 1 else f"class2/{i:04d}.png"
            samples[name], labels[name] = pixels(i), 3 if i % 3 == 1 else 2
    check_file(path, samples, labels)
    assert h5chunk.ChunkDataset(path).classes == tuple(names) and report.class_names == names


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("path,n\n{},1\n", "path,m\n{},1\n", "lacks the field 'n', which"),
        ("path,n\n{},1\n", "path,n,m\n{},1,2\n", "has the field 'm', which"),
        ("path,n\n{},1\n", "path,n\n{},300\n", "has the value 300 .sample 0., which cannot be stored exactly as uint8"),
        ("path,n\n{},7\n", "path,n\n{},0.5\n", "has the value 0.5 .sample 0., which cannot be stored exactly as int64"),
        ("path,n\n{},0.5\n", f"path,n\n{{}},{(1 << 53) + 1}\n", "has the value 9007199254740993"),
        ("path,n\n{},1\n", "path,n\n{},-1\n", "has the value -1"),
        ("path,n\n{},ab\n", "path,n\n{},abc\n", "has a string of 3 bytes, but .* stores at most 2"),
        ("path,n\n{},ab\n", "path,n\n{},7\n", "has type int64, but type strings of 2 bytes in"),
        ("path,label\n{},cat\n", "path,label\n{},7\n", "the values of field 'labels' are names in .* but numbers in"),
        ("path,n\n{},1\n", None, "lacks the field 'n', which"),
    ],
)
def test_fields_that_differ(tmp_path: Path, old: str, new: str | None, message: str) -> None:
    source = make_source(tmp_path / "old", range(3))
    (tmp_path / "old.csv").write_text(old.format("class0/0000.png"))
    h5chunk.convert(source, tmp_path / "x.h5", manifest=tmp_path / "old.csv", workers=0)
    kept, manifest = (tmp_path / "x.h5").read_bytes(), None
    if new is not None:
        manifest = tmp_path / "new.csv"
        manifest.write_text(new.format("class1/0001.png"))
    with pytest.raises(SourceError, match=message):
        append(tmp_path / "x.h5", source, manifest=manifest, workers=0)
    check_left(tmp_path / "x.h5", kept)


# ---- files and options that cannot be


def test_files_that_cannot_be_appended_to(tmp_path: Path) -> None:
    source = make_source(tmp_path / "new", range(3))
    path = make_file(tmp_path, 8)
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["images"] = np.zeros((4, 3, 10, 12), "u1")
    shutil.copy(path, tmp_path / "newer.h5")
    shutil.copy(path, tmp_path / "more.h5")
    with h5py.File(tmp_path / "newer.h5", "r+") as file:
        file["h5chunk"].attrs["format_version"] = 99
    with h5py.File(tmp_path / "more.h5", "r+") as file:
        file["embeddings"] = np.zeros((8, 3))
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "folder").mkdir()
    write_csr(tmp_path / "matrix.h5", np.array([0, 1]), np.array([2]), np.array([1], "u1"), 5)
    for name, message in {
        "theirs.h5": "not written by h5chunk",
        "newer.h5": "format version 99",
        "more.h5": "'embeddings' was not written by h5chunk convert, and would be lost",
        "text.h5": "not an HDF5 file",
        "folder": "is a folder: append to one of its files",
        "matrix.h5": "has a matrix, to which append cannot add rows: .* another file",
        "none.h5": "no such file: create it with h5chunk convert",
    }.items():
        for run in (append, partial(append, dry_run=True)):
            with pytest.raises(FileError, match=message):
                run(tmp_path / name, source)
    assert [each.name for each in tmp_path.iterdir() if "h5chunk-" in each.name] == []
    for options, message in (
        ({"seed": -1}, "seed is -1"),
        ({"fit": "squash"}, "fit is 'squash'"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
    ):
        with pytest.raises(OptionError, match=message):
            append(path, source, **options)
    with pytest.raises(SourceError, match="no such file or folder"):
        append(path, tmp_path / "none")
    with pytest.raises(H5ChunkError, match="is also the source"):
        append(path, path)


def test_damage_is_not_carried_along(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    kept = path.read_bytes()
    for name, chunk, offset, _ in places(path):
        flip(path, offset + 3)
        damaged = path.read_bytes()
        what = (
            "sample .* has the label" if name == "labels" else f"chunk {chunk} of '{name}' does not match its checksum"
        )
        with pytest.raises(FileError, match=f"{what}.*[:.,] (so )?[nN]othing was appended"):
            append(path, source, workers=0)
        check_left(path, damaged)
        path.write_bytes(kept)


def test_damage_of_a_field_is_not_carried_along(tmp_path: Path) -> None:
    source = make_source(tmp_path / "old", range(9))
    (tmp_path / "list.csv").write_text("path,n\n" + "".join(f"class{i % 3}/{i:04d}.png,{i}\n" for i in range(9)))
    h5chunk.convert(source, tmp_path / "x.h5", manifest=tmp_path / "list.csv", chunk_samples=4, workers=0)
    with h5py.File(tmp_path / "x.h5") as file:
        offset = file["n"].id.get_chunk_info(1).byte_offset
    flip(tmp_path / "x.h5", offset)
    with pytest.raises(FileError, match=r"chunk 1 of 'n' does not match its checksum, so nothing was appended"):
        append(tmp_path / "x.h5", source, manifest=tmp_path / "list.csv", workers=0)


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("h5chunk/source_name_ends", 5, 0, "source_name_ends does not divide the names"),
        ("h5chunk/source_index", 5, -3, "contains the negative index -3"),
        ("labels", 5, 9, "sample 5 has the label 9, but there are 3 classes"),
    ],
)
def test_tables_that_disagree(tmp_path: Path, name: str, row: int, value: int, message: str) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    with h5py.File(path, "r+") as file:
        file[name][row] = value
    old = path.read_bytes()
    for run in (append, partial(append, dry_run=True)):
        with pytest.raises(FileError, match=f"{message}.*[:.,] (so )?[nN]othing was appended"):
            run(path, source)
    check_left(path, old)


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))

    def change(stage: str, done: int, total: int | None) -> None:
        if stage == "convert" and done:
            os.utime(path, (1, 1))

    old = path.read_bytes()
    with pytest.raises(FileError, match="changed while it was read, so nothing was appended"):
        append(path, source, workers=0, progress=change)
    check_left(path, old, kept=True)
    append(path, source, workers=0)
    check_file(path, *expected(range(30)))


# ---- images that cannot be used


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [[22], [40], [22, 23, 24, 38, 39, 40], list(range(23, 41)), list(range(22, 40))])
def test_skipped_images(tmp_path: Path, bad: list[int], workers: int) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 41))
    for i in bad:
        (source / f"class{i % 3}" / f"{i:04d}.png").write_bytes(b"broken")
    old = path.read_bytes()
    with pytest.raises(SampleError, match="is not an image in a known format"):
        append(path, source, workers=workers, shuffle=False)
    check_left(path, old)
    (tmp_path / "x.h5.skipped.csv").write_text("path,reason\nbefore.png,broken\n")
    report = append(path, source, on_error="skip", workers=workers)
    samples, labels = expected(range(41))
    gone = {f"class{i % 3}/{i:04d}.png" for i in bad}
    check_file(path, {name: each for name, each in samples.items() if name not in gone}, labels)
    assert {name for name, _ in report.skipped} == gone and report.num_added == 19 - len(bad)
    rows = list(csv.reader(Path(report.skipped_list).read_text().splitlines()))
    assert rows[:2] == [["path", "reason"], ["before.png", "broken"]] and {row[0] for row in rows[2:]} == gone
    with h5py.File(path) as file:
        assert json.loads(file["h5chunk"].attrs["options"])["appended"][0]["samples"] == 19 - len(bad)
    assert h5chunk.verify(path).ok


def test_all_images_broken(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    for file in source.rglob("*.png"):
        file.write_bytes(b"broken")
    old = path.read_bytes()
    with pytest.raises(SourceError, match="none of the 8 samples can be used"):
        append(path, source, on_error="skip", workers=0)
    check_left(path, old)


# ---- disks, processes, other writers


def test_without_copies_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    kept = path.read_bytes()
    append(path, source, workers=0)
    found, calls = path.read_bytes(), []
    for number in (errno.EXDEV, errno.ENOSYS, None):

        def no_copy(*args: int, number: int | None = number) -> int:
            calls.append(number)
            if number is None:
                return 0
            raise OSError(number, os.strerror(number))

        small(monkeypatch, copy_bytes=1000)
        monkeypatch.setattr(os, "copy_file_range", no_copy, raising=False)
        path.write_bytes(kept)
        append(path, source, workers=0)
        assert path.read_bytes() == found
    assert set(calls) == {errno.EXDEV, errno.ENOSYS, None}


@pytest.mark.parametrize("where", ["copy_file_range", "pwrite", "posix_fallocate"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    old = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full, raising=False)
    with pytest.raises(OutputError, match="No space left on device"):
        append(path, source, workers=0)
    monkeypatch.undo()
    check_left(path, old)


def test_a_limit_of_the_file_size(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 200), make_source(tmp_path / "new", range(200, 300))
    old = path.read_bytes()
    with largest_file(len(old) + 1000), pytest.raises(OutputError):
        append(path, source, workers=0)
    check_left(path, old)


def test_two_at_once(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    with (
        newfile_module.NewFile(path, overwrite=True),
        pytest.raises(OutputError, match=r"x\.h5: another process is writing it"),
    ):
        append(path, source, workers=0)
    append(path, source, workers=0)


def test_another_appended_while_the_source_was_listed(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30))
    other = make_source(tmp_path / "other", range(30, 35))

    old = path.read_bytes()

    def interfere(stage: str, done: int, total: int | None) -> None:
        if stage == "list" and path.read_bytes() == old:
            append(path, other, workers=0)

    with pytest.raises(FileError, match="changed while it was read, so nothing was appended: run the command again"):
        append(path, source, workers=0, progress=interfere)
    samples, labels = expected(range(35))
    names = {name for i, name in enumerate(samples) if not 22 <= i < 30}
    check_file(path, {name: samples[name] for name in names}, labels)


SLOW = """
import sys, time
import h5chunk.sources.images as images
read = images.ImageSource.read_into
def slow(self, index, out):
    time.sleep(0.004)
    return read(self, index, out)
images.ImageSource.read_into = slow
import h5chunk
h5chunk.append(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]))
"""


@linux
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_in_the_middle(tmp_path: Path, workers: int) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 322))
    old, journal = path.read_bytes(), tmp_path / ".x.h5.h5chunk-journal"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(path), str(source), str(workers)])
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert path.read_bytes() == old
    shutil.copy(path, tmp_path / "whole.h5")
    told: list[str] = []
    append(path, source, workers=2, notify=told.append)
    check_file(path, *expected(range(322)))
    assert told and re.fullmatch(r"continuing: \d+ of 300 samples are already written", told[0])
    append(tmp_path / "whole.h5", source, workers=0)
    assert path.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new", "old", "whole.h5", "x.h5"]


def test_what_was_done_before_an_error_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 322))
    kept, old = tmp_path / "kept.h5", path.read_bytes()
    shutil.copy(path, kept)
    broken = source / "class1" / "0319.png"
    image = broken.read_bytes()
    broken.write_bytes(b"broken")
    with pytest.raises(SampleError, match=r"class1/0319\.png: is not an image .*--on-error skip"):
        append(path, source, shuffle=False, workers=0)
    check_left(path, old, kept=True)
    broken.write_bytes(image)
    decoded = watch(monkeypatch, "read image")
    append(path, source, shuffle=False, workers=0)
    assert 0 < len(decoded) < 300
    append(kept, source, shuffle=False, workers=0)
    assert path.read_bytes() == kept.read_bytes()
    told: list[str] = []
    with pytest.raises(SourceError):
        append(path, make_source(tmp_path / "other", range(9), width=9), workers=0, notify=told.append)
    assert not told


def test_what_was_done_for_another_old_file_is_not_used(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 322))
    broken = source / "class1" / "0319.png"
    image = broken.read_bytes()
    broken.write_bytes(b"broken")
    with pytest.raises(SampleError):
        append(path, source, shuffle=False, workers=0)
    broken.write_bytes(image)
    other = make_source(tmp_path / "other", range(400, 422))
    h5chunk.convert(other, tmp_path / "y.h5", chunk_samples=4, workers=0)
    shutil.copy(tmp_path / "y.h5", path)
    told: list[str] = []
    append(path, source, shuffle=False, workers=0, notify=told.append)
    append(tmp_path / "y.h5", source, shuffle=False, workers=0)
    assert path.read_bytes() == (tmp_path / "y.h5").read_bytes()
    assert len(told) == 1 and "starting over" in told[0]


# ---- the plan


def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 40), classes=4)
    old = path.read_bytes()
    plan = append(path, source, new_classes=True, dry_run=True)
    assert (plan.num_samples, plan.num_added, plan.new_classes) == (40, 18, ["class3"])
    check_left(path, old)
    report = append(path, source, new_classes=True, workers=0)
    assert report.num_bytes <= plan.num_bytes < report.num_bytes + 20_000
    assert "18 images to add, 40 in total" in str(plan) and "new class class3" in str(plan)
    assert json.loads(plan.to_json())["num_added"] == 18
    assert json.loads(report.to_json())["num_samples"] == 40
    assert "18 images added, 40 in total" in str(report) and "repack" in str(report)
    watch(monkeypatch, "read image", failure(AssertionError("decoded")))
    with pytest.raises(SourceError, match="of the 5 classes of the source"):
        append(path, make_source(tmp_path / "other", range(5), classes=5), dry_run=True)


# ---- the command


def test_options_of_the_command_are_those_of_the_function() -> None:
    names = {parameter.name for parameter in main.commands["append"].params}
    known = {name for options in append_options() for name in options.names()} - {*SET_BY_FILE, "shuffle", "quotes"}
    assert names == known | {"file", "source", "format", "no_shuffle", "no_quotes", "dry_run", "quiet", "as_json"}


def test_options_that_the_file_settles(tmp_path: Path) -> None:
    path, source = make_file(tmp_path, 8), make_source(tmp_path / "new", range(8, 12))
    with pytest.raises(
        OptionError, match=r"--color cannot be set, because images are decoded with the options recorded in .*x\.h5"
    ):
        append(path, source, color="gray")
    with pytest.raises(OptionError, match="there is no option 'nothing'"):
        append(path, source, nothing=1)


def test_on_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["append", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result

    path, source = make_file(tmp_path, 22), make_source(tmp_path / "new", range(22, 30), classes=4)
    (source / "class3" / "0031.png").write_bytes(b"broken")
    old = path.read_bytes()
    assert "images to add" not in run(path, source, "--dry-run", code=1).stdout
    assert "9 images to add" in run(path, source, "--dry-run", "--new-classes", "--on-error", "skip").stdout
    error = run(path, source, code=1).stderr
    assert error.startswith("error: ") and error.count("\n") == 1 and "--new-classes" in error
    check_left(path, old)
    report = json.loads(run(path, source, "--new-classes", "--on-error", "skip", "--workers", 0, "--json").stdout)
    assert (report["num_added"], report["num_samples"], report["new_classes"]) == (8, 30, ["class3"])
    assert [name for name, _ in report["skipped"]] == ["class3/0031.png"]
    assert run(path, source, "--new-classes", "--on-error", "skip", "--quiet", "--no-shuffle").output == ""
    assert h5chunk.verify(path).ok
