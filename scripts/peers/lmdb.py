"""LMDB: one raw record per sample (label, then pixels), copied from the memory map into the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from peers import Source
from peers.reading import WAYS, Allocate, Indexed

LABEL = 8


def key(index: int) -> bytes:
    return int(index).to_bytes(8, "big")


class Records:
    def __init__(self, path: Path, source: Source, many: bool) -> None:
        self.source, self.many = source, many
        self.environment = lmdb.open(str(path), readonly=True, lock=False, readahead=True, subdir=False)
        self.transaction = self.environment.begin(buffers=True)

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]:
        images = allocate(len(indices))
        flat = images.reshape(len(indices), -1)
        labels = np.empty(len(indices), np.int64)
        keys = [key(index) for index in indices]
        if self.many:
            with self.transaction.cursor() as cursor:
                values = [value for _, value in cursor.getmulti(keys)]
        else:
            values = [self.transaction.get(each) for each in keys]
        for place, value in enumerate(values):
            record = np.frombuffer(value, np.uint8)
            flat[place] = record[LABEL:]
            labels[place] = record[:LABEL].view(np.int64)[0]
        return images, labels


class Contender(Indexed):
    FILE_SETTINGS = ()
    # Fastest: one thread and reused memory. getmulti is no faster than get, and threads wait for the GIL.
    TRIED = (*WAYS, {"many": True}, {"many": True, "workers": 2})

    @staticmethod
    def make(source: Source, path: Path) -> None:
        size = source.count * (source.sample_bytes + 8192) * 2
        options = {"map_size": size, "subdir": False, "lock": False}
        with lmdb.open(str(path), **options) as environment, environment.begin(write=True) as put:
            for index, image in enumerate(source.images):
                put.put(key(index), np.int64(index).tobytes() + image.tobytes(), append=True)

    def __init__(self, source: Source, path: Path, batch_size: int, many: bool = False, **way: Any) -> None:
        super().__init__(lambda: Records(path, source, many), source, batch_size, **way)
