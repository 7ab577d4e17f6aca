"""The kinds of samples that a data set may have: how each is written, opened, and read with plain h5py."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import numpy as np
import pytest
import scipy.sparse
from PIL import Image
from support.encoded import encoded

import h5chunk
from h5chunk.errors import H5ChunkError
from h5chunk.transforms import CenterCrop

N = 23
LENGTHS = np.array([3, 0, 5, 1, 2, 2, 7, 1, 4, 0, 6, 1, 1, 3, 2, 5, 1, 2, 4, 1, 3, 2, 6])
EPISODES = (9, 5, 7, 12)
Sample = tuple[Any, ...]


class Empty(NamedTuple):
    """A cell of the table without a feature: why, and what the error says, with its remedy.

    ``kind`` is the class of the error; pytest.fail.Exception, if there is none although there should be one.
    """

    reason: str
    error: str
    kind: type[BaseException] = H5ChunkError


class Kind:
    """A kind of sample. Subclasses say how files are written and opened, and what their samples are.

    ``sizes`` are the names of the fields that differ in length: each has two tensors in a batch. ``single`` is a field
    with one value per sample, and ``numbers`` one that has statistics. ``empty`` has the features that are missing.
    """

    sizes: Sequence[str] = ()
    single, numbers = "labels", "images"
    fields: Any = ("images", "labels")
    options: Mapping[str, Any] = {}
    transforms: Sequence[Any] = ()
    is_coded = False  # whether parts of a chunk cannot be read alone
    empty: Mapping[str, Empty] = {}

    def __init__(self, name: str, **changes: Any) -> None:
        self.name = name
        vars(self).update(changes)

    def __repr__(self) -> str:
        return self.name

    def write(self, folder: Path, seed: int) -> list[Path]:
        """Write one data set, and return its files."""
        with h5py.File(folder / "a.h5", "w") as file:
            self.fill(file, np.random.default_rng(seed))
        return [folder / "a.h5"]

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        raise NotImplementedError

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        """Open files or URLs; ``numbered`` adds the field ``sample_number``."""
        fields = (*self.fields, "sample_number") if numbered else self.fields
        given = {"transforms": [*self.transforms]} if self.transforms else {}
        return h5chunk.ChunkDataset(paths, fields=fields, **{**self.options, **given, **options})

    def samples(self, paths: Sequence[Path]) -> list[Sample]:
        """Read all samples by plain h5py, in the order of the files."""
        found = []
        for path in paths:
            with h5py.File(path) as file:
                found += self.read(file)
        return found

    def read(self, file: h5py.File) -> list[Sample]:
        """Read the samples of a file by plain h5py."""
        return [tuple(file[name][i] for name in self.fields) for i in range(N)]

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        """All numbers of the field ``numbers``."""
        at = [*self.fields].index(self.numbers)
        return np.concatenate([np.ravel(sample[at]) for sample in self.samples(paths)])

    def expected(self, samples: list[Sample], dataset: Any, number: int, epoch: int | None, found: Sample) -> Sample:
        """Return sample ``number`` of an epoch; without an epoch, one that may be drawn."""
        return samples[number]


NO_CHECKSUMS = Empty("files of others have no checksums", "no checksums.*h5chunk repack|leave .*checksums")
FOREIGN = {"checksums": NO_CHECKSUMS}
BY_HDF5 = {**FOREIGN, "direct": Empty("HDF5 reads it", "cannot be read directly.*Unset H5CHUNK_READER")}


class Rows(Kind):
    """Row i of each dataset."""

    empty: Mapping[str, Empty] = FOREIGN
    dtype: Any = np.int16
    layout: Mapping[str, Any] = {}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        self.put(file, random.integers(0, 250, (N, 5, 7)).astype(self.dtype))
        file["labels"] = random.permutation(N)

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        file.create_dataset("images", data=data, **self.layout)


class Unwritten(Rows):
    """Some chunks were never written, and have the fill value."""

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        file.create_dataset("images", data.shape, data.dtype, fillvalue=7, **self.layout)[4:12] = data[4:12]


class Compact(Rows):
    """The rows are in the dataset's header."""

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(data.shape)
        h5py.Dataset(h5py.h5d.create(file.id, b"images", h5py.h5t.STD_I16LE, space, compact))[...] = data


class Enum(Rows):
    """Numbers that have names."""

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        file.create_dataset("images", data=data % 3, dtype=h5py.enum_dtype({"CAT": 0, "DOG": 1, "EEL": 2}, "u1"))


NOT_NOTICED = Empty("small files of several stay in memory, as they were", "DID NOT RAISE", pytest.fail.Exception)
ONE_VALUE = Empty("there is no field of one value per sample", "name a field with one value per sample")
OF_BATCHES = Empty("samples that differ in length are padded before", "pass them as collate_fn")
NO_STATISTICS = {
    "statistics": Empty("they are of dense fields", "leave out --stats|info --stats --fields|from some samples")
}
OWN_BATCHES = ("own_batches", "own_batches_of_a_subset", "own_batches_of_a_url")
OF_LOADERS = ("loader", "direct", "resume_loader", "resident", "memory_bytes", "one_order", "changed_loader")
NO_LOADER = dict.fromkeys(
    [*OF_LOADERS, *OWN_BATCHES, "batch_transform", "skip_loader"],
    Empty("torch has no tensors of strings", "leave it out.* or use a DataLoader"),
)


class Member(Rows):
    """A column of a table."""

    fields = ("table.images", "labels")
    numbers = "table.images"
    empty: Mapping[str, Empty] = {**FOREIGN, **NO_STATISTICS}

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        rows = np.zeros(N, [("weight", "f8"), ("images", data.dtype, data.shape[1:])])
        rows["images"] = data
        file.create_dataset("table", data=rows, **self.layout)

    def read(self, file: h5py.File) -> list[Sample]:
        return [*zip(file["table"]["images"], file["labels"][()], strict=True)]


class LastAxis(Rows):
    """The samples are along the last axis of a dataset."""

    options: Mapping[str, Any] = {"sample_axis": {"images": -1}}
    empty: Mapping[str, Empty] = {**FOREIGN, "statistics": Empty("channels are unknown", "compute their mean .* NumPy")}

    def put(self, file: h5py.File, data: np.ndarray) -> None:
        file.create_dataset("images", data=np.moveaxis(data, 0, -1), **self.layout)

    def read(self, file: h5py.File) -> list[Sample]:
        return [(file["images"][..., i], file["labels"][i]) for i in range(N)]


class Strings(Rows):
    """A string of fixed length beside the numbers."""

    fields = ("images", "names")
    single = "names"
    empty: Mapping[str, Empty] = {**FOREIGN, **NO_LOADER}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        super().fill(file, random)
        file["names"] = np.array([f"sample {number}" for number in random.permutation(N)], "S12")

    def read(self, file: h5py.File) -> list[Sample]:
        return [(file["images"][i], file["names"][i].decode()) for i in range(N)]


class Converted(Kind):
    """What ``h5chunk convert`` writes of arrays."""

    convert: Mapping[str, Any] = {}

    def write(self, folder: Path, seed: int) -> list[Path]:
        random = np.random.default_rng(seed)
        arrays = {"images": random.integers(0, 250, (N, 5, 7), np.uint8), "labels": random.permutation(N)}
        h5chunk.convert(arrays, folder / "a.h5", chunk_samples=4, **self.convert)
        return sorted((folder / "a.h5").glob("*.h5")) or [folder / "a.h5"]

    def read(self, file: h5py.File) -> list[Sample]:
        return [*zip(file["images"][()], file["labels"][()], strict=True)]


class InTwoFiles(Kind):
    """Images in one file, and other fields in another."""

    fields = ("images", "vectors", "labels")
    empty: Mapping[str, Empty] = FOREIGN
    by_key = False  # whether the other file has another order, and lacks a sample
    layout: Mapping[str, Any] = {}

    def write(self, folder: Path, seed: int) -> list[Path]:
        random = np.random.default_rng(seed)
        images, ids = random.integers(0, 250, (N, 40, 30), np.uint8), random.permutation(N) + N * seed
        others = random.permutation(N)[: N - 2] if self.by_key else np.arange(N)
        vectors = random.normal(size=(N, 4)).astype(np.float32)
        with h5py.File(folder / f"x{seed}.h5", "w") as first, h5py.File(folder / f"y{seed}.h5", "w") as second:
            first["images"], first["id"] = images, ids
            second["labels"], second["id"] = random.permutation(N)[others], ids[others]
            second.create_dataset("vectors", data=vectors[others], **self.layout)
        return [folder / f"x{seed}.h5", folder / f"y{seed}.h5"]

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        x, y = ([path for path in paths if name in str(path).rpartition("/")[2]] for name in "xy")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* are in all files: .* lacks 2 samples of")
            warnings.filterwarnings("ignore", ".* are in all files: .* lacks 4 samples of")
            joined = {"images": x, "vectors": y, "labels": y}
            return super().open(joined, numbered=numbered, **options)  # type: ignore[arg-type]

    def samples(self, paths: Sequence[Path]) -> list[Sample]:
        found = []
        for x, y in zip(paths[::2], paths[1::2], strict=True):
            with h5py.File(x) as first, h5py.File(y) as second:
                rows = {key: row for row, key in enumerate(second["id"])}
                for image, key in zip(first["images"][()], first["id"][()], strict=True):
                    if (row := rows.get(key)) is not None:
                        found.append((image, second["vectors"][row], second["labels"][row]))
        return found

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        with h5py.File(paths[0]) as file:
            return np.asarray(file["images"][()])


class ConvertedApart(InTwoFiles):
    """Two files that ``h5chunk convert`` writes of the same samples, each in its own order."""

    empty: Mapping[str, Empty] = {}

    def write(self, folder: Path, seed: int) -> list[Path]:
        random, paths = np.random.default_rng(seed), [folder / f"{name}{seed}.h5" for name in "xy"]
        images, vectors = random.integers(0, 250, (N, 40, 30), np.uint8), random.normal(size=(N, 4))
        ids, labels = np.array([f"{seed}-{i}" for i in range(N)], "S9"), random.permutation(N)
        h5chunk.convert({"images": images, "id": ids}, paths[0], chunk_samples=4)
        h5chunk.convert({"vectors": vectors, "labels": labels, "id": ids}, paths[1], chunk_samples=4, seed=3)
        return paths


class AnySize(Kind):
    """Images that differ in size, of which the batches have the middle."""

    form: Mapping[str, Any] = {}
    transforms = (CenterCrop(6),)
    empty: Mapping[str, Empty] = NO_STATISTICS

    def write(self, folder: Path, seed: int) -> list[Path]:
        random = np.random.default_rng(seed)
        for number in range(N):
            image = random.integers(0, 255, (8 + 2 * (number % 4), 10 + 2 * (number % 3), 3), np.uint8)
            path = folder / f"photos/{number % 3}/{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        h5chunk.convert(folder / "photos", folder / "a.h5", chunk_samples=4, **self.form)
        return [folder / "a.h5"]

    def read(self, file: h5py.File) -> list[Sample]:
        found = []
        group = file["images"]
        for i, (start, stop) in enumerate(zip(group["offsets"][:-1], group["offsets"][1:], strict=True)):
            height, width = group["heights"][i], group["widths"][i]
            stored = group["data"][start:stop]
            image = (
                np.asarray(Image.open(io.BytesIO(stored.tobytes())))
                if "keep_encoded" in self.form
                else stored.reshape(height, width, 3)
            )
            top, left = (height - 6) // 2, (width - 6) // 2
            found.append((image[top : top + 6, left : left + 6].transpose(2, 0, 1), file["labels"][i]))
        return found


class Matrix(Kind):
    """Rows of a sparse matrix, which batches have as dense float32."""

    fields = ("X",)
    single, numbers = "X", "X"
    empty: Mapping[str, Empty] = {**NO_STATISTICS, "values": ONE_VALUE}

    def make(self, seed: int) -> scipy.sparse.csr_matrix:
        random = np.random.default_rng(seed)
        matrix = random.integers(1, 250, (N, 11)) * (random.random((N, 11)) < 0.3)
        matrix[np.arange(N), random.integers(0, 11, N)] = np.arange(N) + 1
        return scipy.sparse.csr_matrix(matrix.astype(np.float32))


class ConvertedMatrix(Matrix):
    """What ``h5chunk convert`` writes of a matrix."""

    def write(self, folder: Path, seed: int) -> list[Path]:
        scipy.sparse.save_npz(folder / "m.npz", self.make(seed))
        h5chunk.convert(folder / "m.npz", folder / "a.h5", chunk_samples=4)
        return [folder / "a.h5"]

    def samples(self, paths: Sequence[Path]) -> list[Sample]:
        found = []
        for path in paths:
            matrix = scipy.sparse.load_npz(path.with_name("m.npz")).toarray()
            with h5py.File(path) as file:
                found += [(row,) for row in matrix[file["h5chunk/source_index"][()]]]
        return found


class AnnData(Matrix):
    """A matrix as AnnData writes it."""

    empty: Mapping[str, Empty] = {**Matrix.empty, **FOREIGN}
    layout: Mapping[str, Any] = {}
    group = "X"

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        matrix, group = self.make(int(random.integers(1 << 30))), file.create_group(self.group)
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": matrix.shape})
        for name in ("data", "indices", "indptr"):
            group.create_dataset(name, data=getattr(matrix, name), **self.layout)

    def read(self, file: h5py.File) -> list[Sample]:
        parts = tuple(file[f"{self.group}/{name}"][()] for name in ("data", "indices", "indptr"))
        return [(row,) for row in scipy.sparse.csr_matrix(parts, file[self.group].attrs["shape"]).toarray()]


class Ragged(Kind):
    """Runs of rows of one dataset, divided by offsets or by lengths."""

    fields = ("tokens", "labels")
    sizes = ("tokens",)
    numbers = "tokens"
    layout: Mapping[str, Any] = {}
    empty: Mapping[str, Empty] = {**FOREIGN, "transform": OF_BATCHES}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        rows = random.integers(0, 1 << 40, (LENGTHS.sum(), 2))
        file.create_dataset("tokens", data=rows, **self.layout)
        file["starts"], file["lengths"] = np.r_[0, np.cumsum(LENGTHS)], LENGTHS
        file["labels"] = random.permutation(N)

    def read(self, file: h5py.File) -> list[Sample]:
        starts, rows = file["starts"][()], file["tokens"][()]
        return [(rows[starts[i] : starts[i + 1]], file["labels"][i]) for i in range(N)]


class TwoRagged(Ragged):
    """Two datasets of runs of rows, which have the same offsets, or offsets and lengths of their own."""

    fields = ("tags", "labels", "tokens")
    sizes = ("tags", "tokens")
    options: Mapping[str, Any] = {"offsets": {"tokens": "starts", "tags": "starts"}}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        super().fill(file, random)
        lengths = LENGTHS if "lengths" not in self.options else LENGTHS[::-1] + 1
        file.create_dataset("tags", data=random.normal(size=lengths.sum()).astype(">f4"), **self.layout)
        file["tag_lengths"] = lengths

    def read(self, file: h5py.File) -> list[Sample]:
        ends = np.cumsum(file["tag_lengths"])
        tags = np.split(file["tags"][()], ends[:-1])
        return [(own, label, tokens) for own, (tokens, label) in zip(tags, super().read(file), strict=True)]


class Multimodal(Matrix):
    """Two sparse matrices beside a field that differs in length, and a label that comes first."""

    fields = ("labels", "X", "tokens", "layers/counts")
    sizes = ("tokens",)
    single = "labels"
    options: Mapping[str, Any] = {"lengths": {"tokens": "lengths"}}
    empty: Mapping[str, Empty] = {**FOREIGN, **NO_STATISTICS}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        for name in ("X", "layers/counts"):
            AnnData("", group=name).fill(file, random)
        file["tokens"], file["lengths"] = random.integers(0, 99, LENGTHS.sum()), LENGTHS
        file["labels"] = random.permutation(N)

    def read(self, file: h5py.File) -> list[Sample]:
        tokens = np.split(file["tokens"][()], np.cumsum(LENGTHS)[:-1])
        rows, counts = (AnnData("", group=name).read(file) for name in ("X", "layers/counts"))
        return [(file["labels"][i], *rows[i], tokens[i], *counts[i]) for i in range(N)]


class VariableLength(Kind):
    """Elements of variable length."""

    fields = ("tokens", "labels")
    sizes = ("tokens",)
    numbers = "tokens"
    dtype: Any = np.float32
    layout: Mapping[str, Any] = {}
    empty: Mapping[str, Empty] = {**FOREIGN, "transform": OF_BATCHES, **NO_STATISTICS}

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        rows = file.create_dataset("tokens", (N,), h5py.vlen_dtype(self.dtype), **self.layout)
        values = random.normal(size=LENGTHS.sum()).astype(np.float32)
        for number, own in enumerate(np.split(values, np.cumsum(LENGTHS)[:-1])):
            rows[number] = own
        file["values"], file["labels"] = values, random.permutation(N)

    def read(self, file: h5py.File) -> list[Sample]:
        # h5py 3.16 does not swap the bytes of big-endian elements that it reads
        return [*zip(np.split(file["values"][()], np.cumsum(LENGTHS)[:-1]), file["labels"][()], strict=True)]


class EachDataset(Kind):
    """A dataset per sample, with an attribute."""

    fields: Mapping[str, str] | Sequence[str] = {"images": "traces/*/data"}
    single = "label"
    layout: Mapping[str, Any] = {}
    has_unwritten = False
    empty: Mapping[str, Empty] = {
        "checksums": Empty(
            "samples that are datasets have none", "leave checksums out, or copy them .* h5chunk convert --samples"
        ),
        **NO_STATISTICS,
    }

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        for number, length in enumerate(LENGTHS):
            group = file.create_group(f"traces/{number:03}")
            rows = random.normal(size=(length + 1 if self.sizes else 6, 3)).astype(np.float32)
            own = {"fillvalue": 2} if self.has_unwritten and number % 3 == 1 else {"data": rows, **self.layout}
            group.create_dataset("data", rows.shape, rows.dtype, **own)
            if "marks" in self.fields:
                group["marks"] = random.integers(0, 99, LENGTHS[-1 - number])
            group.attrs["label"] = int(random.integers(1 << 20))

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        fields = {**self.fields, "sample_number": "sample_number"} if numbered else self.fields
        return h5chunk.Keyed(paths, fields, attributes=["label"], **options)

    def read(self, file: h5py.File) -> list[Sample]:
        names = [path.removeprefix("traces/*/") for path in dict(self.fields).values()]
        groups = [group for _, group in sorted(file["traces"].items())]
        return [(*(group[name][()] for name in names), group.attrs["label"]) for group in groups]


class Episodes(Kind):
    """Windows of 4 frames of episodes: groups of a file, runs of rows, or files."""

    fields: Mapping[str, str] | Sequence[str] = {"images": "images", "actions": "actions"}
    single = "images"
    where = "rows"
    layout: Mapping[str, Any] = {}
    is_png = False
    empty: Mapping[str, Empty] = {
        **FOREIGN,
        "values": Empty("a window has several values", "name a field with one value per sample"),
    }

    def write(self, folder: Path, seed: int) -> list[Path]:
        random, paths = np.random.default_rng(seed), []
        frames = [random.integers(0, 250, (length, 8, 6, 3), np.uint8) for length in EPISODES]
        actions = [random.normal(size=(length, 2)).astype(np.float32) for length in EPISODES]
        if self.where == "rows":
            frames, actions = [np.concatenate(frames)], [np.concatenate(actions)]
        for number, (images, own) in enumerate(zip(frames, actions, strict=True)):
            paths.append(folder / (f"episode_{number}.h5" if self.where == "files" else "a.h5"))
            with h5py.File(paths[-1], "a") as file:
                group = file.create_group(f"data/demo_{number}") if self.where == "groups" else file
                self.put(group, images)
                group.create_dataset("actions", data=own)
                if self.where == "rows":
                    file["lengths"] = EPISODES
        return sorted(set(paths))

    def put(self, group: Any, images: np.ndarray) -> None:
        if not self.is_png:
            group.create_dataset("images", data=images, **self.layout)
            return
        rows = group.create_dataset("images", (len(images),), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            rows[number] = encoded(image, "PNG")

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        fields = {name: f"data/*/{name}" for name in self.fields} if self.where == "groups" else dict(self.fields)
        if numbered:
            fields["sample_number"] = "sample_number"
        if self.where == "rows":
            options["episode_lengths"] = "lengths"
        return h5chunk.Windows(paths, fields, 4, **options)

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        found = []
        for path in paths:
            with h5py.File(path) as file:
                groups = file["data"].values() if self.where == "groups" else [file]
                found += [np.ravel(group["images"][()]) for group in groups]
        return np.concatenate(found)

    def read(self, file: h5py.File) -> list[Sample]:
        found, start = [], 0
        groups = [file[f"data/{name}"] for name in sorted(file["data"])] if self.where == "groups" else [file]
        for group in groups:
            images, actions = group["images"][()], group["actions"][()]
            if self.is_png:
                images = np.stack([np.asarray(Image.open(io.BytesIO(row.tobytes()))) for row in images])
            for length in EPISODES if self.where == "rows" else [len(images)]:
                found += [(images[i : i + 4], actions[i : i + 4]) for i in range(start, start + length - 3)]
                start = start + length if self.where == "rows" else 0
        return found


class EpisodesInTwoFiles(Episodes):
    """Windows of frames in one file, and of actions in another."""

    def write(self, folder: Path, seed: int) -> list[Path]:
        [path] = super().write(folder, seed)
        x, y = folder / f"x{seed}.h5", folder / f"y{seed}.h5"
        with h5py.File(path) as file, h5py.File(x, "w") as first, h5py.File(y, "w") as second:
            file.copy("images", first)
            file.copy("actions", second)
            file.copy("lengths", second)
        return [x, y]

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        x, y = ([path for path in paths if name in str(path).rpartition("/")[2]] for name in "xy")
        return super().open({"images": x, "actions": y}, numbered=numbered, **options)  # type: ignore[arg-type]

    def samples(self, paths: Sequence[Path]) -> list[Sample]:
        found = []
        for x, y in zip(paths[::2], paths[1::2], strict=True):
            with h5py.File(x) as first, h5py.File(y) as second:
                found += self.read({**first, **second})  # type: ignore[arg-type]
        return found

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        with h5py.File(paths[0]) as file:
            return np.asarray(file["images"][()])


class Volumes(Kind):
    """Patches of volumes, at positions that are drawn in each epoch; or tiles."""

    fields: Mapping[str, str] | Sequence[str] = {"images": "*/raw", "mask": "*/mask"}
    single = "images"
    layout: Mapping[str, Any] = {}
    is_tiled = False
    empty: Mapping[str, Empty] = {
        **FOREIGN,
        **NO_STATISTICS,
        "values": Empty("a patch has many values", "pass weights= to Patches"),
    }

    def fill(self, file: h5py.File, random: np.random.Generator) -> None:
        for name, shape in {"a": (9, 8, 11), "b": (8, 13, 9)}.items():
            file.create_dataset(f"{name}/raw", data=random.integers(0, 250, shape, np.uint8), **self.layout)
            file.create_dataset(f"{name}/mask", data=random.integers(0, 1 << 15, shape, np.uint16))

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        fields = {**self.fields, "sample_number": "sample_number"} if numbered else self.fields
        patches = h5chunk.Patches(paths, fields, (4, 5, 6), positions=not self.is_tiled, **options)
        return patches.tiles() if self.is_tiled else patches

    def read(self, file: h5py.File) -> list[Sample]:
        return [(file[f"{name}/raw"][()], file[f"{name}/mask"][()]) for name in "ab"]

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        return np.concatenate([np.ravel(volume) for volume, _ in self.samples(paths)])

    def expected(self, samples: list[Sample], dataset: Any, number: int, epoch: int | None, found: Sample) -> Sample:
        volume, *start = position = found[2]
        if epoch is not None or self.is_tiled:
            np.testing.assert_array_equal(position, dataset.positions(epoch or 0)[dataset.samples == number][0])
        box = tuple(slice(at, at + size) for at, size in zip(start, (4, 5, 6), strict=True))
        return samples[volume][0][box], samples[volume][1][box], position


class Mixed(Kind):
    """A mixture, whose members have ``num_files`` files of another kind."""

    num_files = 1

    def __init__(self, of: Kind, **changes: Any) -> None:
        self.of = of
        names = ("sizes", "single", "numbers", "fields", "is_coded", "empty")
        super().__init__(f"mixed {of}", **{**{name: getattr(of, name) for name in names}, **changes})

    def write(self, folder: Path, seed: int) -> list[Path]:
        found = []
        for number in range(2):
            (folder / str(number)).mkdir()
            for path in self.of.write(folder / str(number), 10 * seed + number):
                found.append(path.rename(folder / f"{number}{path.name}"))
        return found

    def open(self, paths: Sequence[Any], *, numbered: bool = False, **options: Any) -> Any:
        of_mix = ("transforms", "as_dict", "on_error", "max_skipped")
        own = {name: options.pop(name) for name in of_mix if name in options}
        parts = self.parts(paths)
        members = {f"member {number}": self.of.open(own, **options) for number, own in enumerate(parts)}
        fields = [*members["member 0"].fields, "sample_number"] if numbered else None
        return h5chunk.Mix(members, fields=fields, **own)

    def parts(self, paths: Sequence[Any]) -> list[Sequence[Any]]:
        """The files of each member."""
        return [paths[first : first + self.num_files] for first in range(0, len(paths), self.num_files)]

    def samples(self, paths: Sequence[Path]) -> list[Sample]:
        return [sample for own in self.parts(paths) for sample in self.of.samples(own)]

    def stored(self, paths: Sequence[Path]) -> np.ndarray:
        return np.concatenate([self.of.stored(own) for own in self.parts(paths)])


WHOLE, PIECES = (4, 5, 7), (8, 3, 3)
GZIP = {"chunks": WHOLE, "compression": "gzip"}
FILTERS: dict[str, Mapping[str, Any]] = {
    "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "LZF": {"compression": "lzf"},
    "LZ4": hdf5plugin.LZ4(),
    "Zstandard": hdf5plugin.Zstd(),
    "Blosc": hdf5plugin.Blosc(),
    "Bitshuffle": hdf5plugin.Bitshuffle(),
}
BY_LENGTHS = {"lengths": {"tokens": "lengths"}}
GROUPS = {"where": "groups"}

KINDS: list[Kind] = [
    Rows("contiguous"),
    Rows("chunked", layout={"chunks": WHOLE}),
    Rows("pieces", layout={"chunks": PIECES}),
    Rows("pieces, gzip", layout={"chunks": PIECES, "compression": "gzip"}, is_coded=True),
    *(Rows(name, layout={"chunks": WHOLE, **layout}, is_coded=True) for name, layout in FILTERS.items()),
    Rows("szip", layout={"chunks": WHOLE, "compression": "szip"}, is_coded=True, empty=BY_HDF5),
    Unwritten("unwritten chunks", layout={"chunks": WHOLE}),
    Unwritten("unwritten chunks, gzip", layout=GZIP, is_coded=True),
    Rows("big-endian", dtype=">i2"),
    Rows("big-endian, gzip", dtype=">f4", layout=GZIP, is_coded=True),
    Compact("compact"),
    Rows("bool", dtype=bool),
    Rows("float16", dtype=np.float16),
    Rows("complex", dtype=np.complex64, empty={**FOREIGN, **NO_STATISTICS}),
    Enum("enum"),
    Member("member"),
    Member("member, gzip", layout={"chunks": (4,), "compression": "gzip"}, is_coded=True),
    Strings("strings"),
    Converted("converted"),
    Converted("shards", convert={"shards": 3}, empty=dict.fromkeys(("changed", "changed_loader"), NOT_NOTICED)),
    LastAxis("samples along the last axis"),
    LastAxis("samples along the last axis, gzip", layout={"chunks": (3, 7, 4), "compression": "gzip"}, is_coded=True),
    InTwoFiles("joined files"),
    InTwoFiles(
        "joined by key",
        by_key=True,
        options={"key": "id"},
        layout={"chunks": (4, 4), "compression": "gzip"},
        is_coded=True,
    ),
    ConvertedApart("joined by key, converted", options={"key": "id"}),
    AnySize("any size", form={"keep_size": True}),
    AnySize("encoded", form={"keep_encoded": True}),
    ConvertedMatrix("matrix"),
    AnnData("AnnData"),
    AnnData("AnnData, gzip", layout={"chunks": (20,), "compression": "gzip"}, is_coded=True),
    Ragged("ragged by offsets", options={"offsets": {"tokens": "starts"}}),
    Ragged("ragged by lengths", options=BY_LENGTHS),
    Ragged("ragged, pieces", options=BY_LENGTHS, layout={"chunks": (1, 1)}),
    Ragged("ragged, gzip", options=BY_LENGTHS, layout={"chunks": (5, 2), "compression": "gzip"}, is_coded=True),
    TwoRagged("ragged, two fields"),
    TwoRagged(
        "ragged, two fields, own lengths",
        options={"offsets": {"tokens": "starts"}, "lengths": {"tags": "tag_lengths"}},
        layout={"chunks": True, "compression": "gzip"},
        is_coded=True,
    ),
    Multimodal("matrices and ragged"),
    VariableLength("variable length"),
    VariableLength("variable length, big-endian", dtype=">f4"),
    VariableLength("variable length, chunked", layout={"chunks": (4,)}),
    EachDataset("dataset per sample"),
    EachDataset("dataset per sample, gzip", layout={"chunks": (4, 2), "compression": "gzip"}),
    EachDataset("dataset per sample, some unwritten", layout={"chunks": (4, 2)}, has_unwritten=True),
    EachDataset("dataset per sample, ragged", sizes=("images",), empty={**EachDataset.empty, "transform": OF_BATCHES}),
    EachDataset(
        "dataset per sample, two ragged",
        fields={"marks": "traces/*/marks", "images": "traces/*/data"},
        sizes=("images", "marks"),
        empty={**EachDataset.empty, "transform": OF_BATCHES},
    ),
    Episodes("episodes by lengths"),
    EpisodesInTwoFiles("episodes in two files"),
    Episodes("episodes as files", where="files"),
    Episodes("episodes as groups", **GROUPS),
    Episodes("episodes as groups, gzip", layout={"chunks": (4, 8, 6, 3), "compression": "gzip"}, **GROUPS),
    Episodes("episodes of PNG", is_png=True, **GROUPS, empty={**Episodes.empty, **NO_STATISTICS}),
    Volumes("patches", empty={**Volumes.empty, "resident": Empty("each epoch has others", "leave resident out")}),
    Volumes("patches, gzip", layout={"chunks": (4, 4, 4), "compression": "gzip"}, is_coded=True, is_tiled=True),
    Volumes("tiles", is_tiled=True),
    Mixed(Rows("chunked", layout={"chunks": WHOLE})),
    Mixed(Converted("converted"), empty=dict.fromkeys(("changed", "changed_loader"), NOT_NOTICED)),
    Mixed(AnnData("AnnData")),
    Mixed(InTwoFiles("joined files"), num_files=2),
    Mixed(Ragged("ragged, gzip", options=BY_LENGTHS, layout={"chunks": (5, 2), "compression": "gzip"}, is_coded=True)),
    Mixed(EachDataset("dataset per sample, gzip", layout={"chunks": (4, 2), "compression": "gzip"})),
    Mixed(Episodes("episodes by lengths")),
    Mixed(Episodes("episodes as groups", where="groups")),
]
