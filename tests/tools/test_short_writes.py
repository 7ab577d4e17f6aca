"""File systems that write half of what they are asked to: every writer writes the rest, or says that it cannot."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HALF = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Half of a write to a regular file of more than 7 bytes; pipes and sockets stay as they are. */
static size_t half(int file, size_t count) {
    struct stat about;
    return count > 7 && !fstat(file, &about) && S_ISREG(about.st_mode) ? count / 2 : count;
}
#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
ssize_t write(int file, const void *data, size_t count) { REAL(write); return real(file, data, half(file, count)); }
ssize_t pwrite(int file, const void *data, size_t count, off_t at) {
    REAL(pwrite); return real(file, data, half(file, count), at);
}
ssize_t pwrite64(int file, const void *data, size_t count, off64_t at) {
    REAL(pwrite64); return real(file, data, half(file, count), at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    return write(file, parts[0].iov_base, parts[0].iov_len);
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t count, unsigned flags) {
    REAL(copy_file_range); return real(in, from, out, to, half(out, count), flags);
}
"""

WRITERS = """
import io, sys
from pathlib import Path
import h5py, numpy as np, h5chunk
from PIL import Image
import pyarrow as pa, pyarrow.parquet as pq

folder = Path(sys.argv[1])
folder.mkdir()
rng = np.random.default_rng(0)

def encoded(size):
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (size, 30, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()

for i in range(24):
    path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(20))
more = folder / "more" / "a" / "24.png"
more.parent.mkdir(parents=True)
more.write_bytes(encoded(20))
entries = rng.choice(3000 * 400, 150000, replace=False).tolist()
lines = "".join(f"{e // 400},{e % 400},{e % 5 + 1}\\n" for e in entries)
(folder / "r.csv").write_text("userId,movieId,rating\\n" + lines)
images = pa.array([{"bytes": encoded(20), "path": str(i)} for i in range(12)])
table = pa.table({"image": images, "vector": rng.random((12, 600)).tolist(), "n": range(12)})
pq.write_table(table, folder / "t.parquet")
with h5py.File(folder / "other.h5", "w") as file:
    file["x"], file["y"] = rng.integers(0, 9, (500, 300)), np.arange(500)
    file.create_dataset("z", data=rng.integers(0, 9, (500, 700)), chunks=(90, 130), compression="gzip")

def convert(source, name, **options):
    h5chunk.convert(folder / source, folder / name, **options)

convert("photos", "images.h5")
convert("photos", "one-process.h5", workers=0)
convert("photos", "shards", shards=2)
convert("photos", "kept.h5", keep_encoded=True)
convert("t.parquet", "table.h5")
convert("r.csv", "ratings.h5")
convert("r.csv", "spilled.h5", memory_bytes=1 << 20)
convert("r.csv", "matrix-shards", shards=2)
convert("more", "more.h5", like=folder / "images.h5")
h5chunk.repack(folder / "other.h5", folder / "repacked.h5")
h5chunk.repack(folder / "other.h5", folder / "shuffled.h5", shuffle=True, compression="gzip")
with h5py.File(folder / "large.h5", "w") as file:
    file["x"] = rng.integers(0, 255, (400, 50_000), np.uint8)
h5chunk.repack(folder / "large.h5", folder / "in-parts.h5", shuffle=True, memory_bytes=8 << 20)
convert("photos", "repaired.h5")
with h5py.File(folder / "repaired.h5") as file:
    offset = file["images"].id.get_chunk_info(0).byte_offset
with (folder / "repaired.h5").open("r+b") as file:
    file.seek(offset)
    file.write(b"damage")
h5chunk.verify(folder / "repaired.h5", repair=folder / "photos")
"""


def outputs(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix == ".h5":
            yield str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_every_writer_writes_the_other_half(tmp_path: Path) -> None:
    (tmp_path / "half.c").write_text(HALF)
    library = tmp_path / "half.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "half.c", "-ldl"], check=True)
    written = []
    for name, changes in (("whole", {}), ("half", {"LD_PRELOAD": str(library)})):
        command = [sys.executable, "-c", WRITERS, tmp_path / "data"]
        done = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        (tmp_path / "data").rename(tmp_path / name)
        written.append(dict(outputs(tmp_path / name)))
    whole, half = written
    assert len(whole) > 15
    assert half == whole
