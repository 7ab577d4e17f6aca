"""From a source to a file: everything that is in it, the same bytes however it is made, and every way to fail."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from support.conversions import check_file, expectation, linux, skipping, source_index
from support.faults import failure, watch
from support.pictures import pixels

import h5chunk
import h5chunk.store.write.new_file as newfile_module
from h5chunk.errors import OptionError, OutputError, SampleError, SourceError, WorkerError
from h5chunk.sample_source import SampleField
from h5chunk.sources.images import ImageSource
from h5chunk.tools.convert.convert import convert

Make = Callable[..., Path]


SLOW = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
import h5chunk.sources.images as images
read = images.ImageSource.read_into
def slow(self, index, out):
    time.sleep(0.02)
    return read(self, index, out)
images.ImageSource.read_into = slow
from h5chunk.cli import main
main()
"""


def start(root: Path, path: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A conversion in a process group of its own that takes some seconds."""
    command = [sys.executable, "-c", SLOW, "convert", str(root), str(path), "--workers", "2", "--overwrite"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, **options)


def check_untouched(path: Path, old: bytes | None, *, kept: bool = False) -> None:
    """What stood there still does; beside it is nothing, or, after some work, what it is continued from."""
    assert (path.read_bytes() if path.exists() else None) == old
    beside = sorted(p.name for p in path.parent.iterdir() if "h5chunk-" in p.name or "skipped" in p.name)
    assert beside == ([f".{path.name}.h5chunk-journal", f".{path.name}.h5chunk-part"] if kept else [])


@pytest.fixture(params=["new", "over an old one"])
def out(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, bytes | None]:
    """A place for the output, and what is there."""
    if request.param == "new":
        return tmp_path / "out.h5", None
    (tmp_path / "out.h5").write_bytes(b"old")
    return tmp_path / "out.h5", b"old"


# ---- what is in the file


@pytest.mark.parametrize(
    ("count", "chunk_samples"), [(20, None), (20, 1), (20, 7), (20, 20), (20, 999), (1, None), (300, 64)]
)
def test_everything_reads_back(class_folder: Make, tmp_path: Path, count: int, chunk_samples: int | None) -> None:
    report = convert(class_folder(count), tmp_path / "x.h5", chunk_samples=chunk_samples, workers=2)
    check_file(tmp_path / "x.h5", *expectation(count))
    assert report.num_samples == count and report.sample_shape == (3, 10, 12)
    assert report.num_bytes == (tmp_path / "x.h5").stat().st_size
    assert report.counts == {"RGB": count} and report.skipped == []
    assert report.class_names == [f"class{i}" for i in range(min(count, 3))]
    with h5py.File(tmp_path / "x.h5") as file:
        assert [name.decode() for name in file["h5chunk/class_names"]] == report.class_names
        chunk = report.layout.chunk_samples
        assert file["images"].chunks[0] == chunk == min(chunk_samples or chunk, count)


def test_attributes(class_folder: Make, tmp_path: Path) -> None:
    convert(class_folder(), tmp_path / "x.h5", seed=5, chunk_samples=4, size=(10, 12), workers=0)
    with h5py.File(tmp_path / "x.h5") as file:
        attrs = dict(file["h5chunk"].attrs)
        options = json.loads(attrs.pop("options"))
    assert options == {
        "size": [10, 12], "fit": "error", "color": "rgb", "layout": "nchw", "animated": "error", "seed": 5,
        "shuffle": True, "split_folders": "auto",
    }  # fmt: skip
    assert attrs["h5chunk_version"] == h5chunk.__version__.encode()
    assert (attrs["format_version"], attrs["num_samples"], attrs["chunk_samples"], attrs["seed"]) == (2, 20, 4, 5)
    assert attrs["shuffled"] == 1 and attrs["window_chunks"] >= 1
    assert attrs["rdcc_nbytes"] >= 4 * 360 and attrs["rdcc_nslots"] >= 1 and 0 <= attrs["rdcc_w0"] < 1


def test_order_is_a_seeded_permutation_or_that_of_the_source(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder()
    orders = {}
    for name, options in {"0": {}, "1": {"seed": 1}, "none": {"shuffle": False}}.items():
        convert(root, tmp_path / name, workers=0, **options)
        check_file(tmp_path / name, *expectation())
        orders[name] = source_index(tmp_path / name)
    assert orders["none"] == list(range(20))
    assert sorted(orders["0"]) == sorted(orders["1"]) == orders["none"]
    assert orders["0"] != orders["1"] and orders["none"] not in (orders["0"], orders["1"])


def test_bytes_do_not_depend_on_workers_or_time(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(300)
    data = []
    for i, workers in enumerate((0, 1, 3, None, 0)):
        if i == 4:
            time.sleep(1.1)  # a time stamp would show
        convert(root, tmp_path / "x.h5", workers=workers, chunk_samples=7, overwrite=True)
        data.append((tmp_path / "x.h5").read_bytes())
    assert all(each == data[0] for each in data)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("color", ["rgb", "gray", "keep"])
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_layout_and_color_from_folder_and_archive(
    class_folder: Make, tmp_path: Path, layout: str, color: str, kind: str
) -> None:
    source = class_folder(12)
    if kind == "zip":
        source = Path(shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path, "photos"))
    convert(source, tmp_path / "x.h5", layout=layout, color=color, workers=2)
    samples, labels = expectation(12)
    if color == "gray":
        samples = {name: np.asarray(Image.fromarray(rgb).convert("L"))[..., None] for name, rgb in samples.items()}
    check_file(tmp_path / "x.h5", samples, labels, layout)


def test_flat_folder_of_mixed_sizes_and_modes(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    root.mkdir()
    pictures = {
        "a.png": Image.fromarray(pixels(1, 30, 20)), "b.png": Image.fromarray(pixels(2, 8, 8, 1)),
        "c.png": Image.fromarray(pixels(3, 10, 12)), "d.png": Image.fromarray(pixels(4, 50, 9)).quantize(8),
    }  # fmt: skip
    for name, picture in pictures.items():
        picture.save(root / name)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(5, 12, 10)).save(root / "e.png", exif=exif)
    report = convert(root, tmp_path / "x.h5", size=(10, 12), fit="stretch", workers=2)
    samples = {
        name: np.asarray(p.convert("RGB").resize((12, 10), Image.Resampling.BICUBIC)) for name, p in pictures.items()
    }
    samples["c.png"] = pixels(3, 10, 12)
    samples["e.png"] = np.rot90(pixels(5, 12, 10), -1)
    check_file(tmp_path / "x.h5", samples, None)
    assert report.counts == {"RGB": 3, "L": 1, "P": 1, "rotated": 1, "resized": 3}
    assert "originals 3 RGB, 1 " in str(report) and ", 3 resized, 1 rotated" in str(report)


def test_manifest_columns_become_fields(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(20)
    samples, labels = expectation(20)
    names = sorted(samples, reverse=True)
    rows = [
        (name, i * 1.5, f"w{i}", -1 if i % 2 else 1, ("cat", "dog")[labels[name] % 2]) for i, name in enumerate(names)
    ]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "score", "word", "flag", "label"), *rows])
    convert(root, tmp_path / "x.h5", manifest=tmp_path / "list.csv", workers=2, chunk_samples=3)
    check_file(tmp_path / "x.h5", samples, {name: labels[name] % 2 for name in names})
    with h5py.File(tmp_path / "x.h5") as file:
        order = file["h5chunk/source_index"][()]
        assert file["score"][()].tolist() == [i * 1.5 for i in order]
        assert file["word"].asstr()[()].tolist() == [f"w{i}" for i in order]
        assert file["flag"].dtype == np.int8 and file["flag"][()].tolist() == [-1 if i % 2 else 1 for i in order]
        assert file["h5chunk/class_names"][()].tolist() == [b"cat", b"dog"]


def test_progress_is_told_from_listing_to_the_end(class_folder: Make, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    convert(class_folder(300), tmp_path / "x.h5", workers=2, progress=lambda *call: calls.append(call))
    assert calls[0] == ("list", 0, None) and ("list", 300, None) in calls
    done = [count for stage, count, total in calls if stage == "convert" and total == 300]
    assert done[0] == 0 and done[-1] == 300 and done == sorted(done) and len(done) > 3


# ---- images that cannot be used


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_mixed_sizes_name_the_first_two(
    class_folder: Make, tmp_path: Path, workers: int, seed: int, on_error: str
) -> None:
    root = class_folder(200, 1)
    for i in (50, 120, 199):
        Image.fromarray(pixels(i, 11, 12)).save(root / "class0" / f"{i:04d}.png")
    with pytest.raises(SourceError) as caught:
        convert(root, tmp_path / "out.h5", workers=workers, seed=seed, on_error=on_error)
    assert str(caught.value) == (
        "samples differ in 'images': class0/0000.png is 3 x 10 x 12, class0/0050.png is 3 x 11 x 12: "
        "pass a size and how to fit it (--size H,W --fit stretch|crop|pad), or keep their sizes (--keep-encoded)"
    )
    check_untouched(tmp_path / "out.h5", None)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_is_named_and_nothing_is_changed(
    class_folder: Make, out: tuple[Path, bytes | None], workers: int
) -> None:
    root = class_folder(100)
    (root / "class1" / "0052.png").write_bytes(b"<html>")  # a row of its own: class 1 has 1, 4, 7, ...
    with pytest.raises(SampleError) as caught:
        convert(root, out[0], workers=workers, overwrite=True)
    assert str(caught.value).startswith("class1/0052.png: is not an image in a known format")
    assert str(caught.value).endswith("(to leave such samples out, use --on-error skip or on_error='skip')")
    check_untouched(*out)


@pytest.mark.parametrize(
    ("count", "chunk_samples", "bad"),
    [
        (20, None, [7]),
        (20, 4, [0]),
        (20, 4, [19]),
        (20, 4, [0, 1, 2, 3, 17, 18, 19]),
        (20, 20, list(range(3, 20))),
        (20, 3, [i for i in range(20) if i != 13]),
        (300, 7, list(range(0, 300, 3))),
        (300, 7, list(range(150, 300))),
    ],
)
def test_skip_leaves_out_what_cannot_be_used(
    class_folder: Make, tmp_path: Path, count: int, chunk_samples: int | None, bad: list[int]
) -> None:
    root = class_folder(count)
    (root / "class0" / "0000-first.png").write_bytes(b"")  # the first image of all is broken in any case
    skipping(root, bad)
    results = []
    for workers in (0, 3):
        report = convert(
            root, tmp_path / "x.h5", chunk_samples=chunk_samples, workers=workers, on_error="skip", overwrite=True
        )
        results.append((tmp_path / "x.h5").read_bytes())
    assert results[0] == results[1]
    samples, labels = expectation(count)
    gone = {f"class{i % 3}/{i:04d}.png" for i in bad}
    check_file(tmp_path / "x.h5", {n: p for n, p in samples.items() if n not in gone}, labels)
    assert report.num_samples == count - len(bad) and report.counts == {"RGB": count - len(bad)}
    assert {name for name, _ in report.skipped} == gone | {"class0/0000-first.png"}
    assert report.skipped_list == str(tmp_path / "x.h5.skipped.csv")
    with open(report.skipped_list, newline="") as file:  # noqa: PTH123
        rows = list(csv.reader(file))
    assert rows[0] == ["path", "reason"] and [tuple(row) for row in rows[1:]] == report.skipped
    reasons = dict(report.skipped)
    assert reasons.pop("class0/0000-first.png") == "is empty (0 bytes)"
    assert all(reason.startswith("is not an image in a known format") for reason in reasons.values())
    assert f"skipped {len(bad) + 1} (all in {report.skipped_list}), such as" in str(report)


def test_skipped_file_equals_one_without_the_bad_images(class_folder: Make, tmp_path: Path) -> None:
    """Byte for byte, but for the numbers of the source and the seed's order."""
    clean, spoilt = class_folder(24, 2), class_folder(30, 2, name="spoilt")
    skipping(spoilt, list(range(24, 30)), classes=2)  # the last of each class
    for root, name in ((clean, "clean.h5"), (spoilt, "spoilt.h5")):
        convert(root, tmp_path / name, chunk_samples=4, workers=0, shuffle=False, on_error="skip")
    order = source_index(tmp_path / "spoilt.h5")
    assert sorted(order) == [*range(12), *range(15, 27)]
    with h5py.File(tmp_path / "clean.h5") as one, h5py.File(tmp_path / "spoilt.h5") as two:
        assert dict(one["h5chunk"].attrs) == dict(two["h5chunk"].attrs)
        rows = [index if index < 12 else index - 3 for index in order]
        for name in ("images", "labels"):
            np.testing.assert_array_equal(two[name][()], one[name][()][rows])
        places = [[], []]
        for each, file in zip(places, (one, two), strict=True):
            file.visititems(
                lambda name, item, each=each: (
                    each.append((name, item.id.get_offset()))
                    if isinstance(item, h5py.Dataset) and item.chunks is None
                    else None
                )
            )
        assert places[0] == places[1]
    assert (tmp_path / "clean.h5").stat().st_size == (tmp_path / "spoilt.h5").stat().st_size


def test_stale_list_of_skipped_goes_with_the_file_it_belonged_to(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder()
    stale = tmp_path / "x.h5.skipped.csv"
    stale.write_text("old")
    assert convert(root, tmp_path / "x.h5", workers=0).skipped_list is None
    assert stale.exists()
    convert(root, tmp_path / "x.h5", workers=0, overwrite=True)
    assert not stale.exists()


def test_list_of_skipped_that_cannot_be_written(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder()
    skipping(root, [3])
    (tmp_path / "x.h5.skipped.csv").mkdir()
    with pytest.raises(OutputError, match=r"skipped\.csv: the list of 1 skipped sample cannot be written \(Is a dir"):
        convert(root, tmp_path / "x.h5", workers=0, on_error="skip")


@pytest.mark.parametrize("workers", [0, 2])
def test_all_broken_is_an_error(
    class_folder: Make, out: tuple[Path, bytes | None], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = class_folder(10)
    skipping(root, list(range(10)))
    with pytest.raises(SourceError, match=r"none of the 10 .* the error of the last is: class2/0008\.png: is no"):
        convert(root, out[0], workers=workers, on_error="skip", overwrite=True)
    fields = {"images": SampleField((3, 10, 12), np.dtype(np.uint8), "NCHW")}
    monkeypatch.setattr(ImageSource, "find_fields", lambda self, skip_bad: setattr(self, "fields", fields))
    with pytest.raises(
        SourceError,
        match=r"none of the 10 samples can be used; the error of the first is: class\d/\d+\.png: is not",
    ):
        convert(root, out[0], workers=workers, on_error="skip", overwrite=True)
    check_untouched(*out)


# ---- options and outputs that cannot be


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore': pass fail or skip"),
        ({"workers": -1}, "workers is -1: pass at least 0"),
        ({"seed": -1}, "seed is -1: pass a number from 0"),
        ({"seed": 1 << 64, "shuffle": False}, "seed is 18446744073709551616: pass a number"),
        ({"chunk_samples": 0}, "chunk_samples is 0: pass at least 1"),
        ({"fit": "crop"}, "fit is 'crop', but there is no size"),
    ],
)
def test_options_that_cannot_be(class_folder: Make, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    root = class_folder(3)
    for run in (convert, partial(convert, dry_run=True)):
        with pytest.raises(OptionError, match=reason):
            run(root, tmp_path / "out.h5", **options)
    check_untouched(tmp_path / "out.h5", None)


def test_output_that_is_the_source(class_folder: Make, tmp_path: Path) -> None:
    class_folder(3)
    archive = Path(shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path, "photos"))
    before = archive.read_bytes()
    with pytest.raises(OutputError, match=r"x\.zip is also the source"):
        convert(archive, tmp_path / "photos" / ".." / "x.zip", overwrite=True)
    assert archive.read_bytes() == before
    manifest = tmp_path / "list.csv"
    manifest.write_text("path\n1.png\n")
    with pytest.raises(OutputError, match=r"list\.csv is also the source"):
        convert(tmp_path / "photos", manifest, manifest=manifest, overwrite=True)
    assert manifest.read_text() == "path\n1.png\n"


def test_output_is_checked_before_the_source_is_listed(tmp_path: Path) -> None:
    (tmp_path / "out.h5").write_bytes(b"old")
    for path, reason in (
        (tmp_path / "out.h5", "exists: use --overwrite"),
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "x.h5", "does not exist: create it first"),
    ):
        with pytest.raises(OutputError, match=reason):
            convert(tmp_path / "missing", path)


def test_source_may_hold_the_output(class_folder: Make) -> None:
    root = class_folder()
    for _ in range(2):
        convert(root, root / "x.h5", workers=0, overwrite=True)
        check_file(root / "x.h5", *expectation())


@pytest.mark.parametrize("when", ["look", "take", "write"])
def test_full_disk(
    class_folder: Make, out: tuple[Path, bytes | None], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    root = class_folder(300)
    if when == "look":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    elif when == "take":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: full() if at > 50_000 else pwrite(fd, data, at))
    decoded = [] if when == "write" else watch(monkeypatch, "read image", failure(AssertionError("decoded")))
    for workers in (0, 2):
        with pytest.raises(OutputError, match=r"of disk space, but|cannot be written: No space left on device"):
            convert(root, out[0], workers=workers, overwrite=True)
        check_untouched(*out, kept=when == "write")
    assert decoded == []
    if when == "look":
        with pytest.raises(OutputError, match=r"needs .* of disk space, but 1000 bytes are free"):
            convert(root, out[0], overwrite=True, dry_run=True)


def test_another_convert_of_the_same_output(class_folder: Make, out: tuple[Path, bytes | None]) -> None:
    root = class_folder()
    with newfile_module.NewFile(out[0], overwrite=True):
        with pytest.raises(OutputError, match=r"out\.h5: another process is writing it"):
            convert(root, out[0], workers=0, overwrite=True)
        assert (out[0].read_bytes() if out[0].exists() else None) == out[1]
    convert(root, out[0], workers=0, overwrite=True)
    check_file(out[0], *expectation())


def test_file_that_changes_between_listing_and_reading(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder()

    def remove(stage: str, done: int, total: int | None) -> None:
        if stage == "convert":
            (root / "class1" / "0004.png").unlink(missing_ok=True)

    with pytest.raises(SampleError, match=r"class1/0004\.png: cannot be opened: No such file"):
        convert(root, tmp_path / "out.h5", workers=0, progress=remove)
    check_untouched(tmp_path / "out.h5", None)


# ---- processes that end early


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The two workers, once both have begun to write."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if len(children) == 2:
            time.sleep(0.2)
            return [int(child) for child in children]
        time.sleep(0.01)
    raise AssertionError("no workers")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def check_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.01)


@linux
def test_killed_worker(class_folder: Make, out: tuple[Path, bytes | None]) -> None:
    process = start(class_folder(600), out[0])
    workers = workers_of(process)
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.decode().startswith("error: a worker process died") and errors.count(b"\n") == 1
    check_ended(workers)
    check_untouched(*out)


@linux
def test_killed_worker_is_an_error_of_the_function(class_folder: Make, tmp_path: Path, monkeypatch: Any) -> None:
    main = os.getpid()

    def die(_: object, index: int, out: object) -> None:
        if index == 100 and os.getpid() != main:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(monkeypatch, "read image", die)
    with pytest.raises(WorkerError, match="a worker process died"):
        convert(class_folder(300), tmp_path / "out.h5", workers=2)
    assert not (tmp_path / "out.h5").exists()


@linux
def test_killed_main_process_leaves_no_workers_and_can_be_repeated(
    class_folder: Make, out: tuple[Path, bytes | None]
) -> None:
    path, old = out
    root = class_folder(600)
    process = start(root, path)
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=30)
    check_ended(workers)
    assert (path.read_bytes() if path.exists() else None) == old
    assert (path.parent / ".out.h5.h5chunk-part").exists()
    convert(root, path, workers=2, overwrite=True)
    check_file(path, *expectation(600))
    assert sorted(p.name for p in path.parent.iterdir()) == ["out.h5", "photos"]


@linux
def test_ctrl_c(class_folder: Make, out: tuple[Path, bytes | None]) -> None:
    process = start(class_folder(600), out[0])
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"interrupted\n")
    check_ended(workers)
    check_untouched(*out)


# ---- the plan


def test_plan_says_what_convert_does(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(300)
    plan = convert(root, tmp_path / "x.h5", workers=2, dry_run=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos"]
    report = convert(root, tmp_path / "x.h5", workers=2)
    assert (plan.num_samples, plan.sample_shape) == (300, (3, 10, 12)) == (report.num_samples, report.sample_shape)
    assert plan.layout.chunk_samples == report.layout.chunk_samples and plan.class_names == report.class_names
    assert report.num_bytes <= plan.num_bytes < report.num_bytes + 20_000
    assert plan.fields == {"images": "uint8", "labels": "int64"} and plan.num_workers == 2
    assert 0 < plan.seconds < 60 and plan.free_bytes > plan.num_bytes
    text = str(plan)
    assert "300 images of 3 x 10 x 12, " in text and "  classes 3: class0, class1, class2" in text
    assert "  fields images (3 x 10 x 12 uint8), labels (int64)\n" in text
    assert "with 2 workers" in text
    assert plan.layout.reasons and all(reason in text for reason in plan.layout.reasons)
    assert json.loads(plan.to_json())["layout"]["reasons"] == list(plan.layout.reasons)


def test_plan_of_images_that_cannot_be_used(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(20)
    skipping(root, [3])
    with pytest.raises(SampleError, match=r"class0/0003\.png: is not an image"):
        convert(root, tmp_path / "x.h5", dry_run=True)
    assert convert(root, tmp_path / "x.h5", on_error="skip", dry_run=True).num_samples == 20
    Image.fromarray(pixels(3, 5, 5)).save(root / "class0" / "0003.png")
    with pytest.raises(SourceError, match=r"class0/0000\.png is 3 x 10 x 12, class0/0003\.png is 3 x 5 x 5"):
        convert(root, tmp_path / "x.h5", dry_run=True)


def test_report_as_json(class_folder: Make, tmp_path: Path) -> None:
    root = class_folder(5)
    (root / "loose.png").write_bytes(b"x")
    report = json.loads(convert(root, tmp_path / "x.h5", workers=0).to_json())
    assert report["num_samples"] == 5 and report["counts"] == {"RGB": 5} and report["skipped"] == []
    assert report["ignored"] == ["1 image without a class, outside of the class folders, such as loose.png"]
    assert report["path"] == str(tmp_path / "x.h5") and report["seconds"] > 0


def test_zip_member_that_is_damaged(class_folder: Make, tmp_path: Path) -> None:
    class_folder(20)
    archive = Path(shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path, "photos"))
    with zipfile.ZipFile(archive) as file:
        info = file.getinfo("photos/class1/0004.png")
    data = bytearray(archive.read_bytes())
    data[info.header_offset + 100] ^= 0xFF
    archive.write_bytes(data)
    with pytest.raises(SampleError, match=r"^class1/0004\.png: (cannot be decompressed|.*the archive is damaged)"):
        convert(archive, tmp_path / "x.h5", workers=2)
    report = convert(archive, tmp_path / "x.h5", workers=2, on_error="skip")
    assert [name for name, _ in report.skipped] == ["class1/0004.png"]
