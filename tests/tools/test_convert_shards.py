"""A folder of shards: each a file like any other, all of them one data set, there complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from support.conversions import check_file, expectation, source_index
from support.orders import ordered
from support.pictures import pixels

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OptionError, OutputError, SampleError
from h5chunk.store.format.spec import HEADER_BYTES
from h5chunk.store.read.files import open_reader
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.write import output
from h5chunk.tools.convert.convert import convert

Make = Callable[..., Path]


def names_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        group = file["h5chunk"]
        blob, ends = group["source_names"][()].tobytes(), group["source_name_ends"][()]
    return [blob[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def check_shards(folder: Path, samples: dict[str, np.ndarray], labels: dict[str, int], count: int) -> list[Path]:
    """Every sample in one shard, each of which is a complete file."""
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"{folder.name}-{n:05}-of-{count:05}.h5" for n in range(count)]
    names = [names_of(file) for file in files]
    assert sorted(name for some in names for name in some) == sorted(samples)
    for file, some in zip(files, names, strict=True):
        check_file(file, {name: samples[name] for name in some}, {name: labels[name] for name in some})
    return files


def check_nothing_left(folder: Path) -> None:
    assert [entry.name for entry in folder.parent.iterdir() if "h5chunk-" in entry.name] == []


@pytest.mark.parametrize(
    ("count", "chunk_samples", "shards", "lengths"),
    [
        (100, 4, 3, [36, 32, 32]),
        (99, 4, 3, [36, 32, 31]),
        (20, None, 1, [20]),
        (20, 20, 1, [20]),
        (20, None, 6, [6, 3, 3, 3, 3, 2]),
        (20, None, 20, [1] * 20),
        (9, 4, 3, [4, 4, 1]),
    ],
)
def test_every_sample_in_one_shard(
    class_folder: Make, tmp_path: Path, count: int, chunk_samples: int | None, shards: int, lengths: list[int]
) -> None:
    options = {"chunk_samples": chunk_samples, "shards": shards, "workers": 2 if chunk_samples == 4 else 0}
    report = convert(class_folder(count), tmp_path / "out", **options)
    files = check_shards(tmp_path / "out", *expectation(count), shards)
    orders = [source_index(file) for file in files]
    assert list(map(len, orders)) == lengths
    assert report.num_samples == count and report.path == str(tmp_path / "out")
    assert report.num_bytes == sum(file.stat().st_size for file in files)
    check_nothing_left(tmp_path / "out")
    reader = open_reader(tmp_path / "out")
    if shards > 1:
        assert isinstance(reader, FileSet) and reader.chunk_starts is None
        assert reader.header.shuffled and reader.header.class_names == tuple(report.class_names)


def test_all_shards_are_shuffled_as_one(class_folder: Make, tmp_path: Path) -> None:
    source = class_folder(60)
    convert(source, tmp_path / "one.h5", chunk_samples=4, seed=3, workers=0)
    convert(source, tmp_path / "set", chunk_samples=4, seed=3, shards=4, workers=0)
    orders = [source_index(file) for file in sorted((tmp_path / "set").iterdir())]
    assert list(chain(*orders)) == source_index(tmp_path / "one.h5")
    epochs = []
    for path in (tmp_path / "one.h5", tmp_path / "set"):
        with h5chunk.ChunkLoader(**ordered(path, 8, window_chunks=3)) as loader:
            epochs.append([[image.tolist() for image in images] for images, _ in loader])
    assert epochs[0] == epochs[1]
    convert(source, tmp_path / "plain", shards=4, shuffle=False, workers=0)
    orders = [source_index(file) for file in sorted((tmp_path / "plain").iterdir())]
    assert list(chain(*orders)) == list(range(60))
    assert not h5chunk.ChunkDataset(tmp_path / "plain").header.shuffled


def test_a_mixture_of_shards_is_not_shuffled(class_folder: Make, tmp_path: Path) -> None:
    source = class_folder(24)
    for name, seed in (("a", 1), ("b", 2)):
        convert(source, tmp_path / name, shards=3, seed=seed, workers=0)
    a, b = (sorted((tmp_path / name).iterdir()) for name in "ab")
    assert h5chunk.ChunkDataset(a[1:]).header.shuffled  # one is missing
    assert not h5chunk.ChunkDataset([*a, *b]).header.shuffled
    assert not h5chunk.ChunkDataset([a[0], b[1]]).header.shuffled
    again = shutil.copy(a[0], tmp_path / "again.h5")
    assert not h5chunk.ChunkDataset([*a, again]).header.shuffled


def test_bytes_do_not_depend_on_workers(class_folder: Make, tmp_path: Path) -> None:
    source, data = class_folder(50), []
    for workers in (0, 3):
        convert(source, tmp_path / "out", shards=3, chunk_samples=4, workers=workers, overwrite=True)
        data.append([file.read_bytes() for file in sorted((tmp_path / "out").iterdir())])
    assert data[0] == data[1]


@pytest.mark.parametrize("shard_bytes", [25_000, 30_000, 60_000, 1 << 30])
def test_shards_of_so_many_bytes(class_folder: Make, tmp_path: Path, shard_bytes: int) -> None:
    convert(class_folder(100), tmp_path / "out", shard_bytes=shard_bytes, chunk_samples=4, workers=0)
    sizes = [file.stat().st_size for file in (tmp_path / "out").iterdir()]
    assert max(sizes) <= shard_bytes * 1.1
    assert len(sizes) == 1 or sum(sizes) > shard_bytes * (len(sizes) - 1) * 0.6
    check_shards(tmp_path / "out", *expectation(100), len(sizes))


def test_skipped_images(class_folder: Make, tmp_path: Path) -> None:
    source = class_folder(40)
    broken = ["class0/0003.png", "class1/0010.png", "class1/0037.png"]
    for name in broken:
        (source / name).write_bytes(b"no image")
    with pytest.raises(SampleError, match="to leave such samples out"):
        convert(source, tmp_path / "out", shards=4, chunk_samples=4, workers=0)
    assert not (tmp_path / "out").exists()
    check_nothing_left(tmp_path / "out")
    report = convert(source, tmp_path / "out", shards=4, chunk_samples=4, on_error="skip", workers=0)
    samples, labels = expectation(40)
    check_shards(tmp_path / "out", {name: samples[name] for name in samples if name not in broken}, labels, 4)
    assert sorted(name for name, _ in report.skipped) == broken and report.num_samples == 37
    assert report.skipped_list == str(tmp_path / "out.skipped.csv")
    with h5chunk.ChunkLoader(tmp_path / "out", 8) as loader:
        assert sum(len(images) for images, _ in loader) == 37
    dataset = h5chunk.ChunkDataset(tmp_path / "out")
    starts = open_reader(tmp_path / "out").chunk_starts
    one, two = (set(np.searchsorted(starts, part.samples, "right")) for part in dataset.split((0.5, 0.5)))
    assert len(one & two) <= 1  # parts are of whole chunks, uneven as they are


def test_manifest(class_folder: Make, tmp_path: Path) -> None:
    source = class_folder(20)
    lines = ["path,price", *(f"class{i % 3}/{i:04d}.png,{i}.5" for i in range(20))]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    convert(source, tmp_path / "out", manifest=tmp_path / "m.csv", shards=3, workers=0)
    dataset = h5chunk.ChunkDataset(tmp_path / "out", fields=["images", "price"])
    images, prices = dataset[list(range(20))]
    assert sorted(prices.tolist()) == [i + 0.5 for i in range(20)]
    for image, price in zip(images, prices, strict=True):
        np.testing.assert_array_equal(image.permute(1, 2, 0), pixels(int(price)))


def test_plan(class_folder: Make, tmp_path: Path) -> None:
    plan = convert(class_folder(40), tmp_path / "out.h5", shards=4, chunk_samples=4, dry_run=True)
    assert "4 files of up to 12 samples" in str(plan) and "out-00000-of-00004.h5" in str(plan)
    assert not (tmp_path / "out.h5").exists()
    report = convert(tmp_path / "photos", tmp_path / "out.h5", shards=4, chunk_samples=4, workers=0)
    assert (tmp_path / "out.h5" / "out-00000-of-00004.h5").is_file()
    assert report.num_bytes <= plan.num_bytes <= report.num_bytes + 4 * HEADER_BYTES
    assert plan.num_samples == 40 and plan.layout.chunk_samples == 4


def test_on_the_command_line(class_folder: Make, tmp_path: Path) -> None:
    source, out = str(class_folder(40)), str(tmp_path / "out")
    result = CliRunner().invoke(main, ["convert", source, out, "--shards", "3", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["num_samples"] == 40
    result = CliRunner().invoke(main, ["convert", source, out, "--shard-bytes", "40k", "--seed", "1"])
    assert result.exit_code == 1 and "exists: use --overwrite" in result.stderr
    result = CliRunner().invoke(main, ["convert", source, out, "--shard-bytes", "40K", "--overwrite"])
    assert result.exit_code == 0, result.stderr
    assert len(h5chunk.ChunkDataset(out)) == 40


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shards": 0}, "shards is 0: pass a number from 1 to 99999"),
        ({"shards": 2, "shard_bytes": 9}, "shards is 2 and shard_bytes is 9: use only one of them"),
        ({"shard_bytes": 0}, "shard_bytes is 0: pass at least 1"),
        ({"shard_bytes": 17_000, "chunk_samples": 8}, r"shard_bytes is 17000, but a file with one chunk .*: raise"),
        ({"shards": 21}, "shards is 21, but the data has only 1 chunk of 20 samples: use fewer"),
        ({"shards": 6, "chunk_samples": 4}, "shards is 6, but the data has only 5 chunks of 4 samples: use fewer"),
    ],
)
def test_options(class_folder: Make, tmp_path: Path, options: dict[str, int], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        convert(class_folder(20), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"shard_bytes": 1 << 20}, {"split_files": True}])
def test_matrices_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    (tmp_path / "r.csv").write_text("user,item,rating\n1,2,3\n4,5,6\n")
    with pytest.raises(OptionError, match=r"--s.* applies only to images.*; .*r.csv contains sparse matrices"):
        convert(tmp_path / "r.csv", tmp_path / "out", **options)


def test_a_place_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as below /proc; it is not taken for one that another writer just finished."""

    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OutputError, match="out: cannot be written: No such file or directory"):
        output.NewFolder(tmp_path / "out").__enter__()


def test_where_it_may_not_be(class_folder: Make, tmp_path: Path) -> None:
    source = class_folder(20)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="is a file, but shards need a folder"):
        convert(source, tmp_path / "file", shards=2, overwrite=True, workers=0)
    with pytest.raises(OutputError, match="is also the source"):
        convert(source, source, shards=2, overwrite=True, workers=0)
    with pytest.raises(OutputError, match="does not exist: create it first"):
        convert(source, tmp_path / "no" / "out", shards=2, workers=0)
    convert(source, tmp_path / "out", shards=2, workers=0)
    with pytest.raises(OutputError, match=r"out exists: use --overwrite"):
        convert(source, tmp_path / "out", shards=3, workers=0)
    with pytest.raises(OutputError, match=r"out is a folder: use the name of a file"):
        convert(source, tmp_path / "out", overwrite=True, workers=0)
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match=r"out is a folder with files that are not shards, such as thesis.txt"):
        convert(source, tmp_path / "out", shards=3, overwrite=True, workers=0)
    assert (tmp_path / "out" / "thesis.txt").read_text() and len(list((tmp_path / "out").iterdir())) == 3


# ---- complete or not at all


@pytest.mark.parametrize("before", ["nothing", "empty", "shards", "link"])
def test_it_replaces_what_stood_there(class_folder: Make, tmp_path: Path, before: str) -> None:
    source, out = class_folder(20), tmp_path / "out"
    if before == "empty":
        out.mkdir()
    elif before != "nothing":
        convert(source, tmp_path / ("real" if before == "link" else "out"), shards=5, workers=0)
        if before == "link":
            out.symlink_to("real")
    convert(source, out, shards=2, overwrite=before in ("shards", "link"), workers=0)
    files = sorted(file.name for file in out.iterdir())
    assert [name.partition("-")[2] for name in files] == ["00000-of-00002.h5", "00001-of-00002.h5"]
    assert out.is_symlink() == (before == "link")
    check_nothing_left(out)


def test_an_error_leaves_the_old_folder(class_folder: Make, tmp_path: Path) -> None:
    source, out = class_folder(40), tmp_path / "out"
    convert(source, out, shards=2, workers=0)
    old = {file.name: file.read_bytes() for file in out.iterdir()}
    names = names_of(sorted(out.iterdir())[1])
    (source / names[-1]).write_bytes(b"no image")  # in the last shard
    with pytest.raises(SampleError):
        convert(source, out, shards=3, overwrite=True, workers=0)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == old
    assert sorted(p.name for p in tmp_path.glob(".*")) == [".out.h5chunk-journal", ".out.h5chunk-part"]


def test_a_second_writer_waits_its_turn(class_folder: Make, tmp_path: Path) -> None:
    with output.NewFolder(tmp_path / "out"), pytest.raises(OutputError, match="another process is writing it"):
        convert(class_folder(20), tmp_path / "out", shards=2, workers=0)
    convert(tmp_path / "photos", tmp_path / "out", shards=2, workers=0)


def test_what_appears_meanwhile_is_left(class_folder: Make, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists: use --overwrite"), output.NewFolder(tmp_path / "out") as new:
        convert(class_folder(20), tmp_path / "other", shards=2, workers=0)
        (tmp_path / "other").rename(tmp_path / "out")
        new.commit()
    assert len(list((tmp_path / "out").iterdir())) == 2
    check_nothing_left(tmp_path / "out")


def test_killed_and_run_again(class_folder: Make, tmp_path: Path) -> None:
    source, out = class_folder(20), tmp_path / "out"
    for i in range(200):
        Image.fromarray(pixels(i)).resize((12, 10)).save(source / "class0" / f"more{i}.png")
    code = (
        "import h5chunk, os, signal\ndef stop(stage, done, total):\n"
        "    if stage == 'convert' and done > 100: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"h5chunk.convert({str(source)!r}, {str(out)!r}, shards=4, workers=0, progress=stop)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], timeout=240)
    assert process.returncode == -signal.SIGKILL
    part = tmp_path / ".out.h5chunk-part"
    assert part.is_dir() and list(part.iterdir()) and not out.exists()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            convert(source, out, shards=3, workers=0)
            break
        except OutputError:  # the system takes a moment to free its lock
            time.sleep(0.1)
    assert len(list(out.iterdir())) == 3
    check_nothing_left(out)


def test_no_room(class_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = class_folder(20)
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 30_000, "total": usage.f_blocks})())
    with pytest.raises(OutputError, match=r"out needs .* of disk space, but 29.3 KiB are free"):
        convert(source, tmp_path / "out", shards=4, workers=0)
    check_nothing_left(tmp_path / "out")
