"""WebDataset: tar files of raw bytes; shards are permuted, samples shuffled in a buffer of 1,000."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import webdataset

from peers import Source
from peers.reading import Batch, Collate

BUFFER = 1000


class Contender:
    FILE_SETTINGS = ("shard",)
    # Fastest: two processes; the size of shards is within noise.
    TRIED = tuple({"workers": workers, "shard": shard} for shard in (200, 1000) for workers in (0, 1, 2))

    @staticmethod
    def make(source: Source, path: Path, shard: int = 1000) -> None:
        path.mkdir()
        with webdataset.ShardWriter(f"{path}/%06d.tar", maxcount=shard, maxsize=1 << 40, verbose=0) as writer:
            for index, image in enumerate(source.images):
                writer.write({"__key__": f"{index:08d}", "bin": image.tobytes(), "cls": str(index).encode()})

    def __init__(self, source: Source, path: Path, batch_size: int, shard: int = 1000, workers: int = 0) -> None:
        del shard
        files = sorted(str(file) for file in path.glob("*.tar"))
        dataset = webdataset.WebDataset(files, shardshuffle=len(files), seed=source.seed).shuffle(BUFFER)
        dataset = dataset.to_tuple("bin", "cls").batched(batch_size, collation_fn=Collate(source.sample_shape))
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        self.loader = webdataset.WebLoader(dataset, batch_size=None, **options)

    def epoch(self, number: int) -> Iterator[Batch]:
        del number
        return iter(self.loader)
