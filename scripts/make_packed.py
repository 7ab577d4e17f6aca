"""Make a packed file of random images without decoding any, for benchmarks that need many gigabytes.

    python scripts/make_packed.py data.h5 --count 200000 --size 224 224      # 30 GB

The layout is that of `h5chunk convert`; pixels are random, labels count up. Prints the file and its size.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from h5chunk.errors import human_bytes
from h5chunk.plan.layout import plan_layout
from h5chunk.store.format.spec import FORMAT_VERSION, GROUP, FileSpec, field_spec
from h5chunk.store.write.new_file import NewFile

BLOCK = 32 << 20


def spec_of(count: int, shape: tuple[int, ...], num_classes: int) -> FileSpec:
    layout = plan_layout(count, math.prod(shape))
    cache = layout.cache
    numbers = {"num_samples": count, "chunk_samples": layout.chunk_samples, "window_chunks": layout.window_chunks}
    numbers |= {"format_version": FORMAT_VERSION, "rdcc_nslots": cache.nslots, "rdcc_nbytes": cache.nbytes}
    attributes = {name: np.int64(value) for name, value in numbers.items()}
    attributes |= {"rdcc_w0": cache.w0, "seed": np.uint64(0), "shuffled": np.uint8(0), "options": "{}"}
    attributes["h5chunk_version"] = "make_packed"
    images = field_spec(count, layout.chunk_samples, shape, np.dtype(np.uint8))
    labels = field_spec(count, layout.chunk_samples, (), np.dtype(np.int64))
    return FileSpec({"images": images, "labels": labels}, {"images": {"axes": "NCHW"}, GROUP: attributes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("H", "W"))
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args()
    spec = spec_of(args.count, (3, *args.size), args.classes)
    noise = np.random.default_rng(0).integers(0, 256, 2 * BLOCK, dtype=np.uint8).tobytes()
    with NewFile(args.path, overwrite=True) as new:
        num_bytes = new.allocate(spec)["images"].num_bytes

        def write(start: int) -> None:
            shift = start // BLOCK * 4099 % BLOCK
            new.write_bytes("images", start, noise[shift : shift + min(BLOCK, num_bytes - start)])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(0, num_bytes, BLOCK)))
        new.write("labels", np.arange(args.count, dtype=np.int64) % args.classes)
        new.commit()
    print(f"{args.path}: {args.count} images, {human_bytes(args.path.stat().st_size)}")


if __name__ == "__main__":
    main()
