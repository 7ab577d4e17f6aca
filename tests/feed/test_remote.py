"""Files in object stores give the batches of local files, whatever the network does."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time

import h5py
import numpy as np
import pytest
import torch
from support.full_disk import largest_file
from support.loaders import loader_by
from support.object_server import bucket_server, disconnect, object_server
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import ChangedError, FileError, MissingPackageError, OptionError, OutputError
from h5chunk.remote import client
from h5chunk.remote.pages import PAGE, Pages

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A converted file of 600 images in 75 chunks of 3.8 KB."""
    path = tmp_path_factory.mktemp("photos") / "photos.h5"
    values = np.random.default_rng(0).integers(0, 256, (600, 3, 40, 40), np.uint8)
    h5chunk.convert({"images": values, "labels": np.arange(600)}, path, chunk_samples=8)
    return path


def served(*paths, **options):
    return object_server({f"/{path.name}": path.read_bytes() for path in paths}, **options)


def batches(data, **options):
    with loader_by(data, 64, resident=False, **options) as loader:
        return [[field.clone() for field in batch] for _ in range(2) for batch in loader]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("native", ["1", "0"])
def test_batches_are_those_of_the_local_file(photos, native, monkeypatch):
    monkeypatch.setenv("H5CHUNK_NATIVE", native)
    with served(photos) as server:
        assert_equal(batches(f"{server.url}/photos.h5"), batches(photos))


def test_urls_with_quoted_names(photos):
    with object_server({"/my photos é/a b+c.h5": photos.read_bytes()}) as server:
        for url in (f"{server.url}/my%20photos%20%C3%A9/a%20b+c.h5", f"{server.url}/my photos é/a b+c.h5"):
            assert len(h5chunk.ChunkDataset(url)) == 600


def test_opening_takes_two_requests_then_one(photos):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5")
        assert len(dataset) == 600
        assert len(server.requests) == 2
        h5chunk.ChunkDataset(f"{server.url}/photos.h5").values("labels")
        assert len(server.requests) == 3


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """A file of 150 groups, each with a dataset in chunks and an attribute, in a random order of their names."""
    path = tmp_path_factory.mktemp("traces") / "traces.h5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in random.permutation(150).tolist():
            group = file.create_group(f"traces/{number:03}")
            group.create_dataset("data", data=np.full((400, 60), number, np.float32), chunks=(100, 60))
            group.attrs["label"] = number
    return path


def changed(path):
    """Return the bytes of a file after an unused byte of its header was changed."""
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    return bytes(data)


OPENED = {
    "keyed": lambda path, **how: h5chunk.Keyed(path, "traces/*/data", attributes=["label"], **how),
    "windows": lambda path, **how: h5chunk.Windows(path, {"data": "traces/*/data"}, 16, **how),
    "patches": lambda path, **how: h5chunk.Patches(path, {"data": "traces/*/data"}, (8, 8), **how),
}


@pytest.mark.parametrize("kind", ["keyed", "windows"])
def test_files_of_many_objects_are_opened_by_few_requests(traces, kind):
    with served(traces) as server:
        remote = OPENED[kind](f"{server.url}/traces.h5")
        assert len(server.requests) < 40
        assert_equal(batches(remote), batches(OPENED[kind](traces)))
        before = len(server.requests)
        OPENED[kind](f"{server.url}/traces.h5")
        assert len(server.requests) - before < 10


def test_the_index_of_an_object_is_in_the_cache_and_its_metadata_is_not(traces, tmp_path):
    with served(traces) as server:
        url, where = f"{server.url}/traces.h5", tmp_path / "own"
        OPENED["keyed"](url, cache_dir=where)
        before = len(server.requests)
        OPENED["keyed"](url, cache_dir=where)
        assert len(server.requests) == before + 1
        OPENED["keyed"](url)
        (copy,) = (tmp_path / "cache").glob("h5chunk/*/object.h5")
        assert copy.stat().st_blocks * 512 < traces.stat().st_size / 4
        server.objects["/traces.h5"] = changed(traces)
        with pytest.warns(UserWarning, match=r"http://.*/traces.h5: the index is rebuilt"):
            OPENED["keyed"](url, cache_dir=where)


@pytest.mark.parametrize("kind", OPENED)
def test_other_kinds_of_samples_notice_that_an_object_changes(traces, kind):
    with served(traces) as server:
        data = OPENED[kind](f"{server.url}/traces.h5")
        server.objects["/traces.h5"] = changed(traces)
        with pytest.raises(FileError, match=r"http://.*/traces.h5.*was replaced or changed"):
            batches(data)


@pytest.mark.parametrize("kind", OPENED)
def test_other_kinds_of_samples_keep_to_the_limit_of_the_cache(traces, tmp_path, kind):
    with served(traces) as server:
        limit = traces.stat().st_size // 2
        data = OPENED[kind](f"{server.url}/traces.h5", cache_dir=tmp_path / "own", cache_bytes=limit)
        for number in range(0, len(data), max(1, len(data) // 40)):
            data[number]
            assert cached_bytes(tmp_path / "own") <= limit


def test_presigned_urls(photos, tmp_path):
    with served(photos) as server:
        server.query = "X-Amz-Expires=60&X-Amz-Signature=a%2Fb/c"
        url = f"{server.url}/photos.h5"
        assert_equal(batches(h5chunk.ChunkDataset(f"{url}?{server.query}", cache_dir=tmp_path)), batches(photos))
        server.query, num_requests = "X-Amz-Expires=60&X-Amz-Signature=other", len(server.requests)
        with pytest.raises(FileError, match=r"photos.h5: cannot be read: .*403") as error:
            h5chunk.ChunkDataset(f"{url}?X-Amz-Signature=a")
        assert "X-Amz" not in str(error.value)
        dataset = h5chunk.ChunkDataset(f"{url}?{server.query}", cache_dir=tmp_path)
        assert_equal(batches(dataset), batches(photos))
        assert len(server.requests) <= num_requests + 2  # the copy of the other signature is used
        later = h5chunk.ChunkDataset(f"{url}?{server.query}")
        server.query = "X-Amz-Signature=later"
        h5chunk.ChunkDataset(f"{url}?{server.query}")
        assert torch.equal(later[500][0], h5chunk.ChunkDataset(photos)[500][0])  # asks with the new signature


def test_faults_lose_nothing(photos):
    with served(photos, faults=0.5) as server:
        assert_equal(batches(f"{server.url}/photos.h5"), batches(photos))
        assert server.num_faults > 3


def test_an_object_that_changes_in_the_middle_is_an_error(photos):
    with served(photos) as server, h5chunk.ChunkLoader(f"{server.url}/photos.h5", 8, resident=False) as loader:
        changed = bytearray(server.objects["/photos.h5"])
        changed[100] ^= 1
        server.objects["/photos.h5"] = bytes(changed)
        with pytest.raises(FileError, match=r"http.*photos.h5: the object was replaced or changed since it was"):
            list(loader)


def test_a_change_without_etags_is_an_error(photos):
    with served(photos, has_etags=False) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5")
        server.objects["/photos.h5"] += b"more"
        with pytest.raises(FileError, match="replaced or changed"):
            dataset[np.arange(300, 400)]


def test_requests_that_always_fail_are_an_error(photos):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", storage_options={"deadline": 0.3})
        server.faults, server.kinds = 1.0, ("503", "short")
        with pytest.raises(FileError, match=r"requests failed for 0.3 s"):
            dataset[np.arange(200, 300)]
        server.faults = 0.0
        assert torch.equal(dataset[200][0], h5chunk.ChunkDataset(photos)[200][0])


def with_headers(**new):
    names = {name.replace("_", "-"): value for name, value in new.items()}
    return lambda status, headers, body: (status, headers | names, body)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_headers(Content_Range="bytes 8-65543/2885632"), "Requested 0..65536, got 8..65544"),
        (with_headers(Content_Range="bytes 0-65535/*"), "Failed to parse"),
        (with_headers(Content_Encoding="gzip", Content_Length="90"), "compresses what it sends, as gzip"),
        (with_headers(ETag="caf\xe9"), "non-ASCII"),
        (with_headers(Content_Range=f"bytes 0-65535/{1 << 62}"), "File too large"),
        (lambda status, headers, body: (200, headers, body), "its server sends only whole files: copy the file"),
        (lambda status, headers, body: (302, {"Location": "file:///etc/passwd"}, b""), "302 Found"),
        (lambda status, headers, body: (302, {"Location": "/photos.h5"}, b""), "error following redirect"),
        (lambda status, headers, body: (410, {}, b""), "410 Gone"),
        (lambda status, headers, body: (416, {}, b""), "is empty, or was cut short"),
    ],
)
def test_an_invalid_answer_is_an_error_at_once(photos, spoil, message):
    with served(photos) as server:
        server.spoil = spoil
        with pytest.raises(FileError, match=message):
            h5chunk.ChunkDataset(f"{server.url}/photos.h5")
        assert len(server.requests) < 12  # redirects are followed ten times


def test_an_object_whose_size_changes_is_an_error(photos):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5")

        def larger(status, headers, body):
            span, _, size = headers["Content-Range"].partition("/")
            return status, headers | {"Content-Range": f"{span}/{int(size) + 1}"}, body

        server.spoil = larger
        with pytest.raises(FileError, match="replaced or changed"):
            dataset[np.arange(300, 400)]


def test_requests_become_smaller_if_the_connection_is_slow(photos):
    def slow(status, headers, body):
        time.sleep(0.5 * (len(body) > 1 << 20))
        return status, headers, body

    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", storage_options={"timeout": 0.25})
        server.spoil, rows = slow, np.arange(600)
        assert_equal([dataset[rows]], [h5chunk.ChunkDataset(photos)[rows]])


def test_a_deleted_cache_is_made_again(photos, tmp_path):
    with served(photos) as server:
        for _ in range(2):
            dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path / "cached")
            assert torch.equal(dataset[500][0], h5chunk.ChunkDataset(photos)[500][0])
            shutil.rmtree(tmp_path / "cached")


def test_what_is_missing_or_not_hdf5_is_an_error():
    with object_server({"/text.h5": b"text" * 100}) as server:
        with pytest.raises(FileError, match=r"gone.h5: no such object"):
            h5chunk.ChunkDataset(f"{server.url}/gone.h5")
        with pytest.raises(FileError, match=r"^http.*text.h5: not an HDF5 file"):
            h5chunk.ChunkDataset(f"{server.url}/text.h5")


def test_several_objects_are_one_data_set(photos, tmp_path):
    h5chunk.convert(h5chunk.ChunkDataset(photos), tmp_path / "shards", shards=3)
    shards = sorted((tmp_path / "shards").iterdir())
    with served(*shards) as server:
        urls = [f"{server.url}/{shard.name}" for shard in shards]
        assert_equal(batches(urls), batches(tmp_path / "shards"))
        with pytest.raises(OptionError, match="web servers do not list folders"):
            h5chunk.ChunkDataset(f"{server.url}/shards/")


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "lzf", "chunks": (5, 2, 40, 40)}])
def test_files_of_others(photos, tmp_path, options):
    with h5py.File(photos) as old, h5py.File(tmp_path / "other.h5", "w") as new:
        new.create_dataset("images", data=old["images"][:200], **{"chunks": (5, 3, 40, 40), **options})
        new.create_dataset("labels", data=old["labels"][:200], chunks=(7,))
    with served(tmp_path / "other.h5") as server:
        url = f"{server.url}/other.h5"
        for reader in ("direct", "h5py"):
            assert_equal(batches(url, reader=reader), batches(tmp_path / "other.h5", reader=reader))
        rows = [3, 199, 50]
        assert_equal([h5chunk.ChunkDataset(url)[rows]], [h5chunk.ChunkDataset(tmp_path / "other.h5")[rows]])


def test_a_sparse_matrix(tmp_path):
    (tmp_path / "ratings.csv").write_text(
        "".join(f"{row},{column},1\n" for row in range(300) for column in range(row % 7))
    )
    h5chunk.convert(tmp_path / "ratings.csv", tmp_path / "ratings.h5")
    with served(tmp_path / "ratings.h5") as server:
        url = f"{server.url}/ratings.h5"
        assert_equal(batches(url), batches(tmp_path / "ratings.h5"))
        local = h5chunk.ChunkDataset(tmp_path / "ratings.h5")
        assert list(h5chunk.ChunkDataset(url).row_ids) == list(local.row_ids)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_a_data_loader(photos, context):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5")
        assert len(dataset[0]) == 2
        sampler = h5chunk.ChunkSampler(dataset, batch_size=64)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context=context)
        local = h5chunk.ChunkDataset(photos)
        assert_equal(list(loader), list(DataLoader(local, batch_sampler=h5chunk.ChunkSampler(local, 64))))


def test_commands(photos):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        assert h5chunk.verify(url).ok
        assert "600 samples" in str(h5chunk.info(url))
        damaged = bytearray(server.objects["/photos.h5"])
        damaged[200_000] ^= 1
        server.objects["/damaged.h5"] = bytes(damaged)
        assert [damage.field for damage in h5chunk.verify(f"{server.url}/damaged.h5").bad] == ["images"]


def test_tune_learns_the_store(photos):
    with served(photos, latency_s=0.005) as server:
        found = h5chunk.tune(f"{server.url}/photos.h5", batch_size=64, budget_s=1)
        assert found.latency_s > 0.005
        assert 16 in {trial.requests for trial in found.trials}
        assert found.rate > 0 and found.today_requests == 64
        assert f"use {found.requests} requests" in str(found) or found.requests == 64
        with pytest.raises(OptionError, match="apply is True, but it applies only to local files"):
            h5chunk.tune(f"{server.url}/photos.h5", apply=True)


def test_bench_compares_loaders_with_bare_requests(photos):
    with served(photos, latency_s=0.005) as server:
        found = h5chunk.bench(f"{server.url}/photos.h5", batch_size=64, budget_s=1, workers=[0])
    assert [figure.limit for figure in found.figures] == [None, "requests to the store", "requests to the store"]
    assert all(figure.samples_per_s > 0 for figure in found.figures)
    assert "Slowest stage" in str(found)


def test_the_number_of_requests_at_a_time(photos):
    with served(photos, latency_s=0.01) as server:
        h5chunk.ChunkDataset(f"{server.url}/photos.h5", storage_options={"requests": 2})[np.arange(600)]
        assert server.most_at_a_time <= 2
        with pytest.raises(FileError, match="requests=0: pass a number from 1 to 1024"):
            h5chunk.ChunkDataset(f"{server.url}/photos.h5", storage_options={"requests": 0})


def test_without_obstore(monkeypatch):
    monkeypatch.setattr("h5chunk.extras.find_spec", lambda name: None)
    monkeypatch.setattr(client, "_current", [])
    monkeypatch.setattr(client, "_paths", [])
    with pytest.raises(MissingPackageError, match=r"h5chunk\[remote\]"):
        h5chunk.ChunkDataset("s3://bucket/photos.h5")


def test_without_a_cache_only_metadata_stays_on_disk(photos, tmp_path):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5")
        assert len(dataset[np.arange(600)][0]) == 600
    (copy,) = (tmp_path / "cache").rglob("object.h5")
    assert copy.stat().st_blocks * 512 < photos.stat().st_size / 4


def cached_bytes(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("object.h5"))


def test_a_cache_serves_later_epochs_and_processes(photos, tmp_path):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        first = batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path / "cached"))
        num_requests = len(server.requests)
        assert_equal(batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path / "cached")), first)
        assert_equal(first, batches(photos))
        assert len(server.requests) == num_requests + 1  # to open the object


def test_a_subset_in_the_cache_is_read_like_a_local_file(photos, tmp_path):
    with served(photos) as server:
        cached = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path).subset(np.arange(50, 350))
        with h5chunk.ChunkLoader(cached, 64, resident=False) as loader:
            first = [[field.clone() for field in batch] for _ in range(3) for batch in loader]
            small = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path, cache_bytes=1_500_000)
            for rows in np.array_split(np.arange(600), 60):  # frees other pages than those that the loader holds
                small[rows]
            num_requests = len(server.requests)
            again = [[field.clone() for field in batch] for _ in range(3) for batch in loader]
        assert len(server.requests) == num_requests
    local = h5chunk.ChunkDataset(photos).subset(np.arange(50, 350))
    with h5chunk.ChunkLoader(local, 64, resident=False) as loader:
        expected = [batch for _ in range(6) for batch in loader]
    assert_equal(first + again, expected)


def test_a_cache_keeps_to_its_limit(photos, tmp_path):
    limit = photos.stat().st_size * 3 // 4
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path, cache_bytes=limit)
        sampler = h5chunk.ChunkSampler(dataset, 8, window_chunks=1)
        how = {"resident": False, "reuse": True, "num_threads": 1, "memory_bytes": 2_500_000}
        with h5chunk.ChunkLoader(dataset, batch_sampler=sampler, **how) as loader:
            for _ in range(3):
                assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(600))
                assert cached_bytes(tmp_path) <= limit
    fetched = sum(int(stop) - int(start) for _, each in server.requests for start, stop in [each[6:].split("-")])
    assert fetched < 2.2 * photos.stat().st_size  # of three epochs; each reads a quarter, and the pages of borders


def test_a_cache_smaller_than_its_windows_is_refused(photos, tmp_path):
    with served(photos) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path, cache_bytes=100_000)
        with h5chunk.ChunkLoader(dataset, 64, resident=False) as loader, pytest.raises(OptionError, match="at least"):
            next(iter(loader))
        with pytest.raises(OptionError, match="cache_bytes requires cache_dir"):
            h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_bytes=100_000)


def test_bytes_that_rot_in_the_cache_are_found(photos, tmp_path):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path))
        (copy,) = tmp_path.rglob("object.h5")
        with copy.open("r+b") as file:
            file.seek(200_000)
            file.write(bytes(100))
        with pytest.raises(FileError, match="does not match its checksum"):
            batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path))


def test_pages_that_a_power_failure_lost_are_fetched_again(photos, tmp_path):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path))
        disconnect()
        (copy,) = tmp_path.rglob("object.h5")
        with copy.open("r+b") as file:
            file.seek(200_000)
            file.write(bytes(100_000))  # what never reached the disk
        (copy.parent / "boot").write_text("before the machine was started again")
        num_requests = len(server.requests)
        assert_equal(batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path)), batches(photos))
        assert 1 < len(server.requests) - num_requests < 5


def test_a_cache_is_never_stale(photos, tmp_path):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        batches(h5chunk.ChunkDataset(url, cache_dir=tmp_path))
        h5chunk.convert({"images": np.zeros((600, 3, 40, 40), np.uint8), "labels": np.arange(600)}, tmp_path / "new.h5")
        server.objects["/photos.h5"] = (tmp_path / "new.h5").read_bytes()
        assert not h5chunk.ChunkDataset(url, cache_dir=tmp_path)[np.arange(600)][0].any()


def test_processes_that_share_a_cache_fetch_only_once(photos, tmp_path):
    with served(photos, latency_s=0.002) as server:
        dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path)
        sampler = h5chunk.ChunkSampler(dataset, 20)
        for _ in range(2):
            list(DataLoader(dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context="fork"))
    spans = [range(*map(int, each[6:].split("-"))) for _, each in server.requests]
    assert sum(map(len, spans)) < 1.1 * photos.stat().st_size


def test_killed_processes_leave_a_cache_that_is_right(photos, tmp_path):
    with served(photos, latency_s=0.002) as server:
        url = f"{server.url}/photos.h5"
        limit = photos.stat().st_size // 2
        for _ in range(3):
            dataset = h5chunk.ChunkDataset(url, cache_dir=tmp_path, cache_bytes=limit)
            num_requests = len(server.requests)
            if not (child := os.fork()):
                try:
                    for _ in range(1000):
                        dataset[random.sample(range(600), 8)]
                finally:
                    os._exit(1)
            while len(server.requests) < num_requests + 20 and not os.waitpid(child, os.WNOHANG)[0]:
                time.sleep(0.001)
            assert len(server.requests) >= num_requests + 20
            os.kill(child, signal.SIGKILL)
            client._servers[-1].kill()  # the process that writes to the cache, too
            client._servers.pop().wait()
            os.waitpid(child, 0)
        dataset = h5chunk.ChunkDataset(url, cache_dir=tmp_path, cache_bytes=limit)
        rows = np.arange(600)
        for some in np.array_split(rows, 60):
            assert_equal([dataset[some]], [h5chunk.ChunkDataset(photos)[some]])


def test_outputs_are_uploaded(photos, tmp_path):
    samples = h5chunk.ChunkDataset(photos).subset(np.arange(100))
    with object_server() as server:
        url = f"{server.url}/new.h5"
        report = h5chunk.convert(samples, url)
        assert report.path == url
        assert len(h5chunk.ChunkDataset(url)) == 100
        with pytest.raises(OutputError, match="already exists"):
            h5chunk.convert(samples, url)
        h5chunk.repack(photos, url, overwrite=True, compression="gzip")
        assert len(h5chunk.ChunkDataset(url)) == 600
        h5chunk.convert(samples, f"{server.url}/shards", shards=2)
        assert sorted(server.objects) == ["/new.h5", *(f"/shards/shards-0000{n}-of-00002.h5" for n in range(2))]
        server.refuses_uploads = True
        with pytest.raises(OutputError, match="repeat the call to write and upload them again, because changes in"):
            h5chunk.convert(samples, f"{server.url}/other.h5")
        server.refuses_uploads = False
        h5chunk.convert(samples, f"{server.url}/other.h5")
        assert "/other.h5" in server.objects
    assert not list((tmp_path / "cache" / "h5chunk" / "uploads").iterdir())


@pytest.mark.parametrize("command", [h5chunk.convert, h5chunk.repack])
def test_what_failed_to_be_uploaded_is_uploaded_without_writing_it_again(bucket, class_folder, tmp_path, command):
    source, options = class_folder(), {"shards": 3}
    if command is h5chunk.repack:
        h5chunk.convert(source, source := tmp_path / "new", shards=3)
        options = {}
    bucket.refused = "new-00000"
    with pytest.raises(OutputError, match="repeat the call to upload the rest"):
        command(source, "s3://bucket/new", **options)
    assert sorted(bucket.objects) == [f"/bucket/new/new-0000{n}-of-00003.h5" for n in (1, 2)]
    bucket.refused, bucket.puts = "nothing", []
    report = command(source, "s3://bucket/new", **options)
    assert report.already_complete and report.path == "s3://bucket/new"
    assert bucket.puts == ["/bucket/new/new-00000-of-00003.h5"]
    assert len(h5chunk.ChunkDataset("s3://bucket/new")) == 20
    assert not list((tmp_path / "cache" / "h5chunk" / "uploads").iterdir())


@pytest.fixture
def bucket(monkeypatch):
    with bucket_server(monkeypatch) as server:
        yield server


def test_shards_are_uploaded_when_they_are_finished(bucket):
    seen, end = [], time.monotonic() + 10

    class Samples:
        def __len__(self):
            return 200

        def __getitem__(self, number):
            while len(seen) == 199 and not bucket.puts and time.monotonic() < end:
                time.sleep(0.01)
            seen.append(len(bucket.puts))
            return {"image": np.full((3, 40, 40), number, np.uint8), "label": number}

    report = h5chunk.convert(Samples(), "s3://bucket/new", shards=5, workers=0)
    assert report.path == "s3://bucket/new"
    assert seen[-1] > 0  # an upload was complete before the last sample was read
    names = [f"/bucket/new/new-0000{n}-of-00005.h5" for n in range(5)]
    assert sorted(bucket.objects) == names
    assert bucket.puts[-1] == names[0]
    assert len(h5chunk.ChunkDataset("s3://bucket/new")) == 200
    h5chunk.convert(Samples(), "s3://bucket/new", shards=2, workers=0, overwrite=True)
    assert sorted(bucket.objects) == [f"/bucket/new/new-0000{n}-of-00002.h5" for n in range(2)]
    assert len(h5chunk.ChunkDataset("s3://bucket/new")) == 200


def objects_in(bucket, folder):
    """The names and bytes of the objects in a folder; nothing else may be in the bucket."""
    prefix = f"/bucket/{folder}/"
    assert all(path.startswith(prefix) for path in bucket.objects)
    return {path.removeprefix(prefix): data for path, data in bucket.objects.items()}


def files_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("command", "stage"), [(h5chunk.convert, "write"), (h5chunk.repack, "repack")])
def test_shards_of_matrices_and_folders_are_uploaded_when_they_are_finished(bucket, tmp_path, command, stage):
    source, end = tmp_path / "a.csv", time.monotonic() + 10
    source.write_text("".join(f"{n % 70},{n * 7 % 31},{1 + n % 5}\n" for n in range(1500)))
    options = {} if command is h5chunk.repack else {"shards": 4}
    if command is h5chunk.repack:
        h5chunk.convert(source, tmp_path / "new", shards=4)
        source = tmp_path / "new"

    def wait_for_upload(name, done, total):
        while name == stage and done == total and not bucket.puts and time.monotonic() < end:
            time.sleep(0.01)

    command(source, "s3://bucket/new", progress=wait_for_upload, **options)
    assert time.monotonic() < end
    assert len(bucket.objects) == 4


@pytest.mark.parametrize("kind", ["samples", "matrix", "repack"])
def test_workers_of_a_cluster_upload(bucket, tmp_path, monkeypatch, kind):
    distributed = pytest.importorskip("distributed")
    about = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    source, options, command = tmp_path / "a.npz", {"shards": 4}, h5chunk.convert
    np.savez(source, images=np.random.default_rng(0).integers(0, 256, (90, 3, 8, 8), np.uint8), labels=np.arange(90))
    if kind == "matrix":
        source = tmp_path / "a.csv"
        source.write_text("".join(f"{n % 70},{n * 7 % 31},{1 + n % 5}\n" for n in range(1500)))
    command(source, tmp_path / "new", **options)
    expected = files_in(tmp_path / "new")
    if kind == "repack":
        source, options, command = tmp_path / "new", {"chunk_samples": 7}, h5chunk.repack
        command(source, tmp_path / "again", **options)
        expected = files_in(tmp_path / "again")
    with distributed.LocalCluster(**about) as cluster, distributed.Client(cluster) as client:
        report = command(source, "s3://bucket/new", client=client, **options)
        assert report.path == "s3://bucket/new"
        num_bytes = sum(file.num_bytes for file in report.files) if kind == "repack" else report.num_bytes
        assert kind != "repack" or report.files[1].path == "s3://bucket/new/new-00001-of-00004.h5"
        assert num_bytes == sum(map(len, expected.values()))
        assert objects_in(bucket, "new") == expected
        assert bucket.puts[-1].startswith("/bucket/new/new-00000-of-0000")
        assert h5chunk.verify("s3://bucket/new", client=client).ok
        with pytest.raises(OutputError, match="already exists"):
            command(source, "s3://bucket/new", client=client, **options)
        del bucket.objects["/bucket/new/new-00001-of-00004.h5"]
        bucket.objects["/bucket/new/new-00000-of-00009.h5"] = b"old"
        assert h5chunk.verify("s3://bucket/new", client=client).missing
        command(source, "s3://bucket/new", client=client, overwrite=True, **options)
        assert objects_in(bucket, "new") == expected
        bucket.objects.clear()
        monkeypatch.setattr("h5chunk.tools.cluster.TRIES", 1)
        bucket.refused = "new-00000-of-00004.h5"
        with pytest.raises(OutputError, match="cannot be written"):
            command(source, "s3://bucket/new", client=client, **options)
        bucket.refused, notes, num_puts = "nothing", [], len(bucket.puts)
        more = {} if kind == "repack" else {"notify": notes.append}
        command(source, "s3://bucket/new", client=client, **more, **options)
    assert objects_in(bucket, "new") == expected
    assert kind == "repack" or "continuing" in notes[0]
    again = [path for path in bucket.puts[num_puts:] if "-of-00004" in path]
    assert kind == "samples" or again == ["/bucket/new/new-00000-of-00004.h5"]
    assert not list((tmp_path / "cache" / "h5chunk" / "uploads").iterdir())


def test_objects_are_repacked_and_checked_on_a_cluster(bucket, photos, tmp_path):
    distributed = pytest.importorskip("distributed")
    about = {"processes": False, "n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    h5chunk.repack([photos], tmp_path / "local", chunk_samples=5)
    bucket.objects["/bucket/old/photos.h5"] = photos.read_bytes()
    with distributed.LocalCluster(**about) as cluster, distributed.Client(cluster) as client:
        h5chunk.repack("s3://bucket/old/", tmp_path / "new", chunk_samples=5, client=client)
        assert files_in(tmp_path / "new") == files_in(tmp_path / "local")
        damaged = bytearray(photos.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        bucket.objects["/bucket/old/photos.h5"] = bytes(damaged)
        report = h5chunk.verify("s3://bucket/old/", client=client)
    assert not report.ok
    assert report.files[0].path == "s3://bucket/old/photos.h5"


def test_a_failed_upload_in_parts_is_aborted(bucket):
    values = {"images": np.zeros((600, 3, 100, 100), np.uint8), "labels": np.arange(600)}
    bucket.refuses_parts = True
    with pytest.raises(OutputError, match="repeat the call to write and upload them again"):
        h5chunk.convert(values, "s3://bucket/large.h5")
    assert (bucket.objects, bucket.parts) == ({}, {})
    bucket.refuses_parts = False
    h5chunk.convert(values, "s3://bucket/large.h5")
    assert bucket.parts == {}
    assert len(h5chunk.ChunkDataset("s3://bucket/large.h5")) == 600


def test_an_object_is_repacked(photos, tmp_path):
    with served(photos) as server:
        h5chunk.repack(f"{server.url}/photos.h5", tmp_path / "new.h5", chunk_samples=5)
    h5chunk.repack(photos, tmp_path / "local.h5", chunk_samples=5)
    assert (tmp_path / "new.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()


@pytest.mark.parametrize("name", ["pages", "object.h5", "about.json", "sums"])
def test_a_cut_copy_in_the_cache_is_an_error(photos, tmp_path, name):
    with served(photos) as server:
        url = f"{server.url}/photos.h5"
        h5chunk.ChunkDataset(url, cache_dir=tmp_path)
        disconnect()  # so that another process opens the copy
        (file,) = tmp_path.rglob(name)
        with file.open("r+b") as opened:
            opened.truncate(3)
        with pytest.raises(FileError, match=r"photos.h5-\w+: this local copy .* is damaged: delete it"):
            h5chunk.ChunkDataset(url, cache_dir=tmp_path)


def test_a_table_of_pages_that_cannot_be_written_is_an_error(photos, tmp_path):
    with served(photos) as server:
        h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path)
        (table,) = tmp_path.rglob("pages")
        pages = Pages(table.parent)
        absent = pages.present().rindex(0)
        with largest_file(absent), pytest.raises(OSError, match="File too large"):
            pages.put(absent, absent + 1, b"")
        assert not pages.present()[absent]


def test_pages_that_are_kept_stay_kept_when_they_are_fetched_again(photos, tmp_path):
    """With the pages around them, by another process that found those absent."""
    with served(photos) as server:
        h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path)
    (table,) = tmp_path.rglob("pages")
    pages = Pages(table.parent)
    kept = pages.present().index(2)
    absent = pages.present().index(0, kept)
    pages.put(kept, absent + 1, photos.read_bytes()[kept * PAGE : (absent + 1) * PAGE])
    assert pages.present()[kept] == 2 and pages.present()[absent] == 1
    pages.free([(kept, absent + 1)])
    assert pages.present()[kept] == 2 and pages.present()[absent] == 0


def test_pages_are_not_freed_while_they_are_fetched(photos, tmp_path):
    """By the same process, for another reader: they would be marked as present, but be empty."""
    with served(photos) as server:
        h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=tmp_path)
    (table,) = tmp_path.rglob("pages")
    pages = Pages(table.parent)
    first = pages.present().index(b"\0\0")
    data = photos.read_bytes()[first * PAGE : (first + 1) * PAGE]
    with pages.fetching(first, first + 1):
        pages.put(first, first + 1, data)
        pages.free([(first, first + 2)])
        assert pages.present()[first] == 1
    with (table.parent / "object.h5").open("rb") as copy:
        copy.seek(first * PAGE)
        assert copy.read(PAGE) == data
    pages.free([(first, first + 1)])
    assert pages.present()[first] == 0


def test_a_node_fetches_only_its_own_chunks(photos, tmp_path, monkeypatch):
    """With locality, in three epochs of two ranks on each of two nodes; without, both fetch nearly everything."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    fetched = {}
    for locality in (None, "node"):
        with served(photos) as server:
            for rank in range(4):
                cache = tmp_path / f"{locality}, node {rank // 2}"
                dataset = h5chunk.ChunkDataset(f"{server.url}/photos.h5", cache_dir=cache)
                ranks = {"rank": rank, "world_size": 4, "locality": locality}
                with h5chunk.ChunkLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 16, **ranks)) as loader:
                    samples = [numbers.tolist() for _ in range(3) for _, numbers in loader]
                assert sum(map(len, samples)) == 450
            ranges = [each.removeprefix("bytes=").split("-") for _, each in server.requests if each]
            fetched[locality] = sum(int(last) + 1 - int(first) for first, last in ranges) / photos.stat().st_size
    assert fetched["node"] < 1.6 < 1.8 < fetched[None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stops", [False, True])
def test_device_buffers_are_given_back_once_all_is_cached(photos, tmp_path, stops):
    """Also while windows are copied to them, after which other tensors get their memory."""
    images = h5chunk.ChunkDataset(photos)[range(600)][0]
    with served(photos) as server:
        data = h5chunk.ChunkDataset(f"{server.url}/photos.h5", fields=["images", "sample_number"], cache_dir=tmp_path)
        if stops:
            data[range(600)]
        sampler = h5chunk.ChunkSampler(data, 16, window_chunks=2, num_workers=1)
        with h5chunk.ChunkLoader(data, batch_sampler=sampler, device="cuda") as loader:
            for _ in range(6):
                others = []
                for number, (some, samples) in enumerate(loader):
                    others.append(torch.full((1 << 16,), 7, dtype=torch.uint8, device="cuda"))
                    assert torch.equal(some.cpu(), images[samples.cpu()])
                    if stops and number == 2:
                        break
                others += [torch.full((1 << 16,), 7, dtype=torch.uint8, device="cuda") for _ in range(100)]
                torch.cuda.synchronize()
                assert all(bool((other == 7).all()) for other in others)


@pytest.mark.filterwarnings("ignore:sample .* cannot be read, so that another sample:UserWarning")
def test_an_object_that_cannot_be_read_is_skipped(tmp_path):
    """Its samples are replaced by those of other objects. An object that changes is an error."""
    images = np.random.default_rng(0).integers(0, 256, (300, 3, 40, 40), np.uint8)
    for part in range(3):
        of_part = slice(100 * part, 100 * part + 100)
        h5chunk.convert(
            {"images": images[of_part], "labels": np.arange(300)[of_part]}, tmp_path / f"{part}.h5", shuffle=False
        )
    names = [f"{part}.h5" for part in range(3)]
    with served(*(tmp_path / name for name in names)) as server:
        options = {"fields": ["images", "labels", "sample_number"], "on_error": "skip", "max_skipped": 0.4}
        dataset = h5chunk.ChunkDataset([f"{server.url}/{name}" for name in names], **options)
        data = server.objects.pop("/1.h5")
        with h5chunk.ChunkLoader(dataset, 64) as loader:
            found = [batch for _ in range(2) for batch in loader]
            bad = {sample.number for sample in loader.report.bad_samples}
            assert 50 < loader.report.skipped == len(bad) and bad <= {*range(100, 200)}  # but those that are cached
        sampler = h5chunk.ChunkSampler(dataset, 64)
        assert_equal(found, [batch for _ in range(2) for batch in DataLoader(dataset, batch_sampler=sampler)])
        for some, labels, numbers in found:
            np.testing.assert_array_equal(some, images[labels])
            assert (labels == numbers).all() and not bad & {*labels.tolist()}
        assert all("/1.h5" in sample.reason for sample in dataset.skipped)
        server.objects["/1.h5"] = changed(tmp_path / "1.h5")
        assert data != server.objects["/1.h5"]
        with h5chunk.ChunkLoader(dataset, 64) as loader, pytest.raises(ChangedError, match="changed"):
            list(loader)
