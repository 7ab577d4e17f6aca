"""Sources in object stores and on web servers are converted like local ones."""

from __future__ import annotations

import io
import itertools
import shutil
from pathlib import Path
from urllib.parse import quote

import h5py
import numpy as np
import pytest
import scipy.sparse
from support.object_server import bucket_server

import h5chunk
from h5chunk.errors import OptionError, OutputError, SourceError

pytest.importorskip("obstore")
RNG = np.random.default_rng(0)


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bucket_server(monkeypatch) as server:
        yield server


def saved(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


LINES = "".join(f"{n % 70},{n * 7 % 31},{1 + n % 5}\n" for n in range(500)).encode()
ARRAYS = saved(np.savez, images=RNG.integers(0, 256, (50, 3, 8, 8), np.uint8), labels=np.arange(50))
LARGE = saved(np.save, RNG.integers(0, 256, (13 << 10, 1 << 10), np.uint8))  # four requests
FILES = {
    "a.csv": LINES,
    "a.npz": ARRAYS,
    "large.npy": LARGE,
    **{f"m/{n}.npz": saved(scipy.sparse.save_npz, scipy.sparse.csr_array(np.eye(9, 5, n))) for n in range(3)},
    "m/notes.txt": b"text",
}


@pytest.fixture
def files(bucket, tmp_path, class_folder):
    """A folder with the same files as the bucket, which also has objects that stand for folders."""
    class_folder(count=9, name="my photos é")
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for file in tmp_path.rglob("*.*"):
        bucket.objects[f"/bucket/{file.relative_to(tmp_path)}"] = file.read_bytes()
    bucket.objects |= {"/bucket/my photos é/": b"", "/bucket/my photos é/class0/": b""}
    return tmp_path


@pytest.mark.parametrize(
    "name", ["my photos é/", "my photos é", "a.csv", "a.npz", "large.npy", "m/*.npz", ["m/0.npz", "m/2.npz"]]
)
def test_a_source_in_a_store_gives_the_bytes_of_a_local_one(bucket, files, tmp_path, name):
    url, local = f"s3://bucket/{name}", f"{files}/{name}"
    if isinstance(name, list):
        url, local = [f"s3://bucket/{each}" for each in name], [f"{files}/{each}" for each in name]
    notes, stages = [], []
    h5chunk.convert(url, tmp_path / "new.h5", notify=notes.append, progress=lambda *seen: stages.append(seen))
    h5chunk.convert(local, tmp_path / "local.h5")
    assert (tmp_path / "new.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == notes == []
    num_requests = len(bucket.requests)
    assert h5chunk.convert(url, tmp_path / "new.h5").already_complete
    assert len(bucket.requests) > num_requests


class Objects(dict):
    """Objects of a server, of which ``change`` makes an answer from the number of the request and the bytes."""

    def __init__(self, objects, change):
        super().__init__(objects)
        self._numbers, self._change = itertools.count(), change

    def get(self, path):
        return self._change(next(self._numbers), super().get(path))


def test_a_download_that_failed_is_continued(bucket, files, tmp_path):
    notes, whole = [], bucket.objects
    bucket.objects = Objects(bucket.objects, lambda number, data: data if number < 3 else None)
    with pytest.raises(SourceError, match=r"^s3://bucket/large.npy: no such object"):
        h5chunk.convert("s3://bucket/large.npy", tmp_path / "new.h5", notify=notes.append)
    assert "are kept for the next run" in notes[0] and ".new.h5.h5chunk-source" in notes[0]
    bucket.objects, num_requests = whole, len(bucket.requests)
    h5chunk.convert("s3://bucket/large.npy", tmp_path / "new.h5")
    assert len(bucket.requests) == num_requests + 3  # for its version, and two of four parts
    h5chunk.convert(files / "large.npy", tmp_path / "local.h5")
    assert (tmp_path / "new.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()


def test_after_an_error_the_copy_is_used_again(bucket, files, tmp_path):
    with pytest.raises(OptionError, match="there is no option 'shufle'"):
        h5chunk.convert("s3://bucket/a.npz", tmp_path / "new.h5", shufle=False)
    assert h5chunk.convert("s3://bucket/a.npz", tmp_path / "new.h5", dry_run=True).num_samples == 50
    num_requests = len(bucket.requests)
    h5chunk.convert("s3://bucket/a.npz", tmp_path / "new.h5")
    assert len(bucket.requests) == num_requests + 1  # for its version
    assert not (tmp_path / ".new.h5.h5chunk-source").exists()


def test_a_source_that_changed_is_read_again(bucket, files, tmp_path):
    h5chunk.convert("s3://bucket/a.npz", tmp_path / "new.h5", dry_run=True)
    bucket.objects["/bucket/a.npz"] = saved(np.savez, images=np.zeros((50, 3, 8, 8), np.uint8), labels=np.arange(50))
    assert len(bucket.objects["/bucket/a.npz"]) == len(ARRAYS)
    h5chunk.convert("s3://bucket/a.npz", tmp_path / "new.h5")
    with h5py.File(tmp_path / "new.h5") as file:
        assert not file["images"][()].any()
    with pytest.raises(OutputError, match="exists"):
        h5chunk.convert("s3://bucket/a.csv", tmp_path / "new.h5")


def test_an_object_that_changes_while_it_is_downloaded_is_an_error(bucket, files, tmp_path):
    bucket.objects = Objects(bucket.objects, lambda number, data: data if number == 0 else data[::-1])
    with pytest.raises(SourceError, match=r"s3://bucket/large.npy changed while it was downloaded"):
        h5chunk.convert("s3://bucket/large.npy", tmp_path / "new.h5")


def test_workers_of_a_cluster_read_the_download(bucket, files, tmp_path):
    distributed = pytest.importorskip("distributed")
    h5chunk.convert(tmp_path / "my photos é", tmp_path / "local", shards=2, size=(8, 8), fit="crop")
    about = {"processes": True, "n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**about) as cluster, distributed.Client(cluster) as client:
        given = {"shards": 2, "size": (8, 8), "fit": "crop", "client": client}
        h5chunk.convert("s3://bucket/my photos é/", tmp_path / "new", **given)
        h5chunk.convert("s3://bucket/my photos é/", "s3://bucket/new", **given)
    assert not list(tmp_path.glob(".new*"))
    uploaded = {name: data for name, data in bucket.objects.items() if name.startswith("/bucket/new/")}
    assert uploaded == {f"/bucket/new/{file.name}": file.read_bytes() for file in (tmp_path / "new").iterdir()}
    for one, other in zip(sorted((tmp_path / "new").iterdir()), sorted((tmp_path / "local").iterdir()), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_what_cannot_be_downloaded_is_an_error(bucket, files, tmp_path):
    def message(source, **options):
        with pytest.raises((SourceError, OptionError)) as error:
            h5chunk.convert(source, tmp_path / "new.h5", **options)
        assert not list(tmp_path.glob(".new*"))
        return str(error.value)

    assert message("s3://bucket/none") == "s3://bucket/none/: no such object"
    assert "/bucket/none.csv: no such object" in message(f"{bucket.url}/bucket/none.csv?X-Amz-Signature=secret")
    assert message("s3://bucket/m/*.h5ad") == "s3://bucket/m/*.h5ad: no object matches this pattern"
    assert "web servers do not list folders" in message(f"{bucket.url}/bucket/m/")
    assert message(Path("s3://bucket/a.csv")).endswith("Path removes one of its slashes")
    bucket.objects["/bucket/bad/a"] = bucket.objects["/bucket/bad/a/1.png"] = b"1"
    assert message("s3://bucket/bad/") == "s3://bucket/bad/a: this name is not valid for a file: rename the object"
    bucket.listed_bytes = 1 << 60
    assert "downloading needs 3145728.0 TiB, but only" in message("s3://bucket/m/*.npz")


def test_messages_name_the_url(bucket, files, tmp_path):
    bucket.objects["/bucket/a.csv"] = b"1,2,x\n1,y,3\n"
    with pytest.raises(SourceError, match=r"^s3://bucket/a.csv, line 1: "):
        h5chunk.convert("s3://bucket/a.csv", tmp_path / "new.h5", format="csv")


@pytest.mark.parametrize("name", ["my photos é.zip", "a.csv"])
def test_servers_that_send_only_whole_files(bucket, files, tmp_path, name):
    shutil.make_archive(tmp_path / "my photos é", "zip", tmp_path / "my photos é")
    bucket.objects = {"/my photos é.zip": (tmp_path / "my photos é.zip").read_bytes(), "/a.csv": LINES}
    bucket.spoil = lambda status, headers, body: (200, {"Content-Length": str(len(bucket.objects[f"/{name}"]))}, body)
    h5chunk.convert(f"{bucket.url}/{quote(name)}", tmp_path / "new.h5")
    h5chunk.convert(tmp_path / name, tmp_path / "local.h5")
    assert (tmp_path / "new.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()
    bucket.spoil = lambda status, headers, body: (
        200,
        {"Content-Length": str(len(body)), "Connection": "close"},
        body[9:],
    )
    with pytest.raises(SourceError, match=r"its server sent \d+ of \d+ bytes"):
        h5chunk.convert(f"{bucket.url}/{quote(name)}", tmp_path / "other.h5")
