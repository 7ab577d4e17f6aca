"""Write and read a data set with MosaicML Streaming or LitData, for `bench_remote.py`.

    PYTHON remote_peers.py streaming write images.h5 FOLDER --part-mib 16
    PYTHON remote_peers.py streaming read http://127.0.0.1:8123 FOLDER CACHE --workers 4

PYTHON is the interpreter of an environment with the package. ``read`` prints a line of JSON: seconds to the first
batch, and images/s of each epoch. Both packages read through the S3 protocol; `range_server.py` implements the
parts that they need.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BATCH = 256


def images_of(path: str) -> tuple[Any, Any]:
    import h5py

    with h5py.File(path) as file:
        return file["images"][:], file["labels"][:]


def write_streaming(source: str, folder: Path, part_bytes: int) -> None:
    streaming = import_streaming()
    images, labels = images_of(source)
    columns = {"image": f"ndarray:uint8:{','.join(map(str, images.shape[1:]))}", "label": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=part_bytes) as out:
        for image, label in zip(images, labels, strict=True):
            out.write({"image": image, "label": int(label)})


def import_streaming() -> Any:
    """Import streaming, which needs torchvision only for data sets that are not used here."""
    import torch

    for name in ("nms", "qnms"):  # missing if torchvision is for CUDA, and torch is not
        with suppress(RuntimeError):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import streaming

    return streaming


def streaming_loader(url: str, folder: str, cache: str, workers: int) -> Any:
    from torch.utils.data import DataLoader

    streaming = import_streaming()
    streaming.base.util.clean_stale_shared_memory()  # left by a run that was killed
    os.environ["S3_ENDPOINT_URL"] = url
    data = streaming.StreamingDataset(
        remote=f"s3://{folder}", local=cache, shuffle=True, batch_size=BATCH, num_canonical_nodes=1, predownload=8192
    )
    for stream in data.streams:  # otherwise forked workers share a connection, and receive each other's bytes
        stream._downloader.clean_up()
    return DataLoader(data, BATCH, num_workers=workers, persistent_workers=True, prefetch_factor=4)


def make_sample(number: int) -> dict[str, Any]:
    return {"image": _images[number], "label": int(_labels[number])}


_images: Any = None
_labels: Any = None


def write_litdata(source: str, folder: Path, part_bytes: int) -> None:
    import litdata

    global _images, _labels
    _images, _labels = images_of(source)
    options = {"chunk_bytes": part_bytes, "num_workers": 1, "start_method": "fork"}
    litdata.optimize(fn=make_sample, inputs=list(range(len(_images))), output_dir=str(folder), **options)


def litdata_loader(url: str, folder: str, cache: str, workers: int) -> Any:
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    data = litdata.StreamingDataset(
        Dir(path=cache, url=f"s3://{folder}"),
        shuffle=True,
        drop_last=False,
        max_pre_download=16,
        max_cache_size="100GB",
        storage_options={"endpoint_url": url},
    )
    return litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, persistent_workers=True, prefetch_factor=4
    )


def read(kind: str, url: str, folder: str, cache: str, workers: int, epochs: int) -> dict[str, Any]:
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    os.environ.update(AWS_DEFAULT_REGION="us-east-1")
    started, first, rates = time.perf_counter(), 0.0, []
    loader = {"streaming": streaming_loader, "litdata": litdata_loader}[kind](url, folder, cache, workers)
    for _ in range(epochs):
        begun, count = time.perf_counter(), 0
        for batch in loader:
            first = first or time.perf_counter() - started
            count += len(batch["image"])
        rates.append(count / (time.perf_counter() - begun))
    return {"first_s": first, "rates": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("streaming", "litdata"))
    actions = parser.add_subparsers(dest="action", required=True)
    write = actions.add_parser("write")
    write.add_argument("source")
    write.add_argument("folder", type=Path)
    write.add_argument("--part-mib", type=int, default=16)
    reading = actions.add_parser("read")
    for name in ("url", "folder", "cache"):
        reading.add_argument(name)
    reading.add_argument("--workers", type=int, default=2)
    reading.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.action == "write":
        writer = {"streaming": write_streaming, "litdata": write_litdata}[args.kind]
        writer(args.source, args.folder, args.part_mib << 20)
    else:
        print(json.dumps(read(args.kind, args.url, args.folder, args.cache, args.workers, args.epochs)), flush=True)


if __name__ == "__main__":
    main()
