"""A file appears complete or not at all, and what stood there stays."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from support.faults import failure, small, watch
from support.full_disk import failing

import h5chunk.store.write.new_file as newfile_module
from h5chunk.errors import OutputError
from h5chunk.store.format.spec import ArraySpec, FileSpec, field_spec
from h5chunk.store.write.new_file import NewFile, check_output, write_at
from h5chunk.store.write.output import NewFolder


def spec(num_samples: int = 10, height: int = 5, chunk: int = 4) -> FileSpec:
    return FileSpec(
        {
            "images": field_spec(num_samples, chunk, (1, height, 8), np.dtype(np.uint8)),
            "n": field_spec(num_samples, chunk, (), np.dtype(np.int64)),
            "h5chunk/source_index": ArraySpec((num_samples,), np.dtype(np.int64)),
        },
        {"h5chunk": {"format_version": np.int64(1)}},
    )


def write_values(new: NewFile, num_samples: int, height: int) -> dict[str, np.ndarray]:
    values = {
        "images": np.random.default_rng(1).integers(0, 256, (num_samples, 1, height, 8), np.uint8),
        "n": np.arange(num_samples),
        "h5chunk/source_index": np.arange(num_samples) * 7,
    }
    for name, array in values.items():
        new.write(name, array)
    return values


def check_values(path: Path, values: dict[str, np.ndarray]) -> None:
    with h5py.File(path) as file:
        for name, array in values.items():
            np.testing.assert_array_equal(file[name][()], array)


def check_untouched(path: Path, old: bytes | None) -> None:
    """The output is as it was, and nothing of ours lies beside it."""
    assert (path.read_bytes() if path.exists() else None) == old
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


@pytest.fixture(params=["new", "over an old one"])
def out(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "out.h5"
    if request.param != "new":
        path.write_bytes(b"old")
    return path


def old_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_file_appears_complete_at_commit(out: Path) -> None:
    old = old_bytes(out)
    with NewFile(out, overwrite=True) as new:
        new.allocate(spec())
        values = write_values(new, 10, 5)
        assert old_bytes(out) == old
        new.commit()
    check_values(out, values)
    assert [p.name for p in out.parent.iterdir()] == ["out.h5"]


def test_padding_of_the_last_chunk_is_zeros(tmp_path: Path) -> None:
    with NewFile(tmp_path / "x.h5") as new:
        region = new.allocate(spec())["n"]
        new.write_bytes("n", 0, b"\xff" * region.num_bytes)
        new.write("n", np.arange(10))
        assert new.read("n", 0, region.num_bytes) == np.arange(10).tobytes() + bytes(16)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_leaves_the_old_file(out: Path, error: type[BaseException]) -> None:
    old = old_bytes(out)
    with pytest.raises(error), NewFile(out, overwrite=True) as new:
        new.allocate(spec())
        write_values(new, 10, 5)
        raise error
    check_untouched(out, old)


def test_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match=r"x\.h5 exists: use --overwrite"), NewFile(path):
        pass
    check_untouched(path, b"old")


def test_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with pytest.raises(OutputError, match=r"x\.h5 exists: use --overwrite"), NewFile(path) as new:
        new.allocate(spec())
        path.write_bytes(b"theirs")
        new.commit()
    check_untouched(path, b"theirs")


def test_places_where_no_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match=" is a folder: use the name of a file"):
        check_output(tmp_path, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):  # or a device, which only root could lose
        with pytest.raises(OutputError, match="is not a regular file, so it is not replaced"):
            check_output(tmp_path / name, overwrite=True)
    with pytest.raises(OutputError, match=r"its folder .*none does not exist: create it first"):
        check_output(tmp_path / "none" / "x.h5", overwrite=True)
    with pytest.raises(OutputError, match=r"cannot be written \(File name too long"), NewFile(tmp_path / ("x" * 250)):
        pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match=rf"its folder {tmp_path} is not writable"):
        check_output(tmp_path / "x.h5", overwrite=True)


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "x.h5"
    link.symlink_to("disk/real.h5")
    for _ in range(2):  # leads nowhere, then to a file
        with NewFile(link, overwrite=True) as new:
            new.allocate(spec())
            values = write_values(new, 10, 5)
            new.commit()
        assert link.is_symlink()
        check_values(tmp_path / "disk" / "real.h5", values)


def test_second_writer_gets_a_message(out: Path) -> None:
    old = old_bytes(out)
    with NewFile(out, overwrite=True) as new:
        new.allocate(spec())
        values = write_values(new, 10, 5)
        with pytest.raises(OutputError, match=r"out\.h5: another process is writing it"):
            NewFile(out, overwrite=True).__enter__()
        assert new.part.exists() and old_bytes(out) == old
        new.commit()
    check_values(out, values)


def test_disk_without_locks_is_another_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(OutputError, match=r"cannot be locked \(No locks available"), NewFile(tmp_path / "x.h5"):
        pass


def test_leftover_of_a_killed_writer_is_taken_over(tmp_path: Path) -> None:
    part = tmp_path / ".x.h5.h5chunk-part"
    part.write_bytes(b"garbage" * 100_000)
    (tmp_path / ".x.h5.h5chunk-part-header").write_bytes(b"garbage")
    with NewFile(tmp_path / "x.h5") as new:
        new.allocate(spec())
        values = write_values(new, 10, 5)
        new.commit()
    check_values(tmp_path / "x.h5", values)
    assert (tmp_path / "x.h5").stat().st_size < 100_000
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]


def test_part_file_that_is_a_pipe_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".a.h5.h5chunk-part")
    with pytest.raises(OutputError, match="h5chunk-part is not a regular file: remove it"), NewFile(tmp_path / "a.h5"):
        raise AssertionError
    assert os.listdir(tmp_path) == [".a.h5.h5chunk-part"]


@pytest.mark.parametrize("length", [235, 240, 256])
@pytest.mark.parametrize("new", [NewFile, NewFolder])
def test_a_name_that_is_too_long(tmp_path: Path, new: type[NewFile] | type[NewFolder], length: int) -> None:
    """With 234 there is room for what stands beside it."""
    with pytest.raises(OutputError, match=r"cannot be written \(File name too long"), new(tmp_path / ("x" * length)):
        raise AssertionError
    assert os.listdir(tmp_path) == []


def test_part_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".x.h5.h5chunk-part").symlink_to("victim")
    with pytest.raises(OutputError, match=r"x\.h5\.h5chunk-part is a symbolic link"), NewFile(tmp_path / "x.h5"):
        pass
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_writer_waits_for_the_lock_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part file that was opened becomes another writer's output before it is locked: open the new one."""
    flock = fcntl.flock
    calls = []

    def late(descriptor: int, operation: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / ".x.h5.h5chunk-part").rename(tmp_path / "x.h5")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with NewFile(tmp_path / "x.h5", overwrite=True) as new:
        assert new.part.exists() and len(calls) == 2
        assert os.path.samestat(os.fstat(new.descriptor), new.part.stat())


def test_full_disk_is_known_before_anything_is_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = old_bytes(out)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    watch(monkeypatch, "store.write.new_file.create_file", failure(AssertionError("written")))
    with (
        pytest.raises(OutputError, match=r"out\.h5 needs 1\d\.\d KiB of disk space, but 4\.9 KiB are free: free space"),
        NewFile(out, overwrite=True) as new,
    ):
        new.allocate(spec())
    check_untouched(out, old)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_that_fills_up_while_space_is_taken(out: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    old = old_bytes(out)
    monkeypatch.setattr(os, "posix_fallocate", failing(error))
    with (
        pytest.raises(OutputError, match=rf"out\.h5 needs .* of disk space, but {os.strerror(error)}"),
        NewFile(out, overwrite=True) as new,
    ):
        new.allocate(spec())
    check_untouched(out, old)


def test_disk_that_cannot_take_space_ahead_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    with NewFile(tmp_path / "x.h5") as new:
        new.allocate(spec())
        values = write_values(new, 10, 5)
        new.commit()
    check_values(tmp_path / "x.h5", values)


def test_space_is_really_taken(tmp_path: Path) -> None:
    with NewFile(tmp_path / "x.h5") as new:
        new.allocate(spec(1000, 1000))
        assert new.part.stat().st_blocks * 512 >= 8_000_000


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_that_fails_at_the_end(out: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    old = old_bytes(out)
    target = os if call == "fsync" else Path
    reason = r"out\.h5: cannot be written to disk: Input/output error"
    with pytest.raises(OutputError, match=reason), NewFile(out, overwrite=True) as new:
        new.allocate(spec())
        monkeypatch.setattr(target, call, failing(errno.EIO))
        new.commit()
    check_untouched(out, old)


def test_error_that_the_flusher_meets_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports a failed write to one fsync only."""
    called = newfile_module.threading.Event()

    def fail(descriptor: int) -> None:
        called.set()
        raise OSError(errno.EIO, "Input/output error")

    small(monkeypatch, flush_interval_s=0.001)
    monkeypatch.setattr(os, "fdatasync", fail)
    with NewFile(tmp_path / "x.h5") as new:
        with pytest.raises(OutputError, match=r"x\.h5: cannot be written to disk: Input/output error"), new.flusher():
            assert called.wait(10)
        called.clear()
        with pytest.raises(ValueError, match="first"), new.flusher():
            assert called.wait(10)
            raise ValueError("first")


def test_flusher_flushes_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = newfile_module.threading.Event()
    small(monkeypatch, flush_interval_s=0.001)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: called.set())
    before = newfile_module.threading.active_count()
    with NewFile(tmp_path / "x.h5") as new, new.flusher():
        assert called.wait(10)
        assert newfile_module.threading.active_count() == before + 1
    assert newfile_module.threading.active_count() == before


@pytest.mark.parametrize("height", [1, 5, 3000])  # a first field that is not aligned, or is
@pytest.mark.parametrize("num_samples", [13, 12, 5, 1])
def test_header_of_fewer_samples(tmp_path: Path, num_samples: int, height: int) -> None:
    """The same bytes as a file that had the fewer samples from the start."""
    chunk = 4 if num_samples >= 4 else num_samples
    fewer = spec(num_samples, height, chunk)
    with NewFile(tmp_path / "direct.h5") as new:
        new.allocate(fewer)
        values = write_values(new, num_samples, height)
        new.commit()
    with NewFile(tmp_path / "x.h5") as new:
        new.allocate(spec(40, height))
        write_values(new, 40, height)
        images = values["images"].tobytes()
        new.write_bytes("images", 0, images)
        new.reallocate(fewer, ["images"])
        new.write_bytes("images", len(images), bytes(-len(images) % (chunk * 8 * height)))
        for name in ("n", "h5chunk/source_index"):
            new.write(name, values[name])
        new.commit()
    check_values(tmp_path / "x.h5", values)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "direct.h5").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct.h5", "x.h5"]


def test_write_at_writes_all_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    with (tmp_path / "x").open("w+b") as file:
        write_at(file.fileno(), b"0123456789", 2)
    assert (tmp_path / "x").read_bytes() == b"\0\0" + b"0123456789"


def test_killed_writer_leaves_the_old_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"old")
    code = (
        "import sys, time; from h5chunk.store.write.new_file import NewFile\n"
        "with NewFile(sys.argv[1], overwrite=True):\n    print('ready', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    with pytest.raises(OutputError, match="another process is writing it"):
        NewFile(path, overwrite=True).__enter__()
    writer.kill()
    writer.communicate()
    assert path.read_bytes() == b"old"
    with NewFile(path, overwrite=True) as new:
        new.allocate(spec())
        values = write_values(new, 10, 5)
        new.commit()
    check_values(path, values)
