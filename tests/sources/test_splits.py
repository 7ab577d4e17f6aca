"""Folders of splits are no classes: train/cat/1.png is a cat of the training set, in every kind of source."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from support.conversions import check_file
from support.listings import list_images
from support.pictures import pixels
from support.stopped import Stop, packed, stop_at

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OptionError, OutputError, SampleError, SourceError
from h5chunk.tools.convert.convert import convert

SPLITS = ("Train", "val")
CLASSES = ("cat", "dog", "emu")


def name_of(i: int) -> str:
    """The path of image i, of which every third is of the last split."""
    return f"{SPLITS[i % 3 == 0]}/{CLASSES[i % 2 + (i % 5 == 0)]}/{i:04d}.png"


def make_tree(root: Path, count: int = 24, first: int = 0) -> Path:
    """Image i has the pixels ``pixels(i)``."""
    for i in range(first, first + count):
        path = root / name_of(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i)).save(path)
    return root


def expected(count: int = 24) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    names = {name_of(i): i for i in range(count)}
    return {name: pixels(i) for name, i in names.items()}, {name: CLASSES.index(name.split("/")[1]) for name in names}


def make(root: Path, *names: str) -> Path:
    """Empty files."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def check_splits(path: Path, count: int) -> None:
    """The split of each sample is the first folder of its name; classes are the same for all splits."""
    dataset = h5chunk.ChunkDataset(path)
    assert dataset.classes == CLASSES and dataset.fields == ("images", "labels")  # as ever
    splits = dataset.values("split")
    assert sorted(splits.tolist()) == sorted(name_of(i).split("/")[0] for i in range(count))
    val = dataset.subset(splits == "val")
    first_pixels = sorted(int(pixels(i)[0, 0, 0]) for i in range(0, count, 3))
    assert sorted(int(val[i][0][0, 0, 0]) for i in range(len(val))) == first_pixels
    val.close()
    dataset.close()


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_splits_become_a_field(tmp_path: Path, kind: str, shards: int | None) -> None:
    source, path = packed(kind, make_tree(tmp_path / "data"))["source"], tmp_path / "x.h5"
    plan = convert(source, path, shards=shards, chunk_samples=3, dry_run=True)
    report = convert(source, path, shards=shards, chunk_samples=3, workers=0)
    assert plan.fields == {"images": "uint8", "labels": "int64", "split": "|S5"}
    assert plan.class_names == report.class_names == [*CLASSES]
    note = (
        "the top folders are splits: Train (16), val (8): the field 'split' has the split of each sample "
        "(to treat them as classes, pass --split-folders no)"
    )
    assert plan.notes == report.notes == [note]
    assert f"note: {note}" in str(plan) and f"note: {note}" in str(report)
    assert "classes 3: cat, dog, emu" in str(plan) and "classes 3: cat, dog, emu" in str(report)
    assert "  classes 3: cat, dog, emu" in str(h5chunk.info(path)).splitlines()
    check_splits(path, 24)
    if not shards:
        check_file(path, *expected())


def test_order_is_split_by_split(tmp_path: Path) -> None:
    make(tmp_path, "val/b/1.png", "val/a.b/1.png", "val/a/z/1.png", "test/b/2.png", "test/a/1.png")
    listing = list_images(tmp_path)
    assert list(listing.names) == [b"test/a/1.png", b"test/b/2.png", b"val/a/z/1.png", b"val/a.b/1.png", b"val/b/1.png"]
    assert listing.class_names == ["a", "a.b", "b"]
    assert listing.columns["labels"].tolist() == [0, 2, 0, 1, 2]
    assert listing.columns["split"].tolist() == [b"test", b"test", b"val", b"val", b"val"]
    assert listing.notes[1:] == ["1 of 3 classes have no images in split 'test', such as a.b"]


@pytest.mark.parametrize(
    "names",
    [
        ("train", "val"), ("TRAIN", "Test"), ("training", "validation", "testing"), ("dev", "valid", "eval"),
        ("training_set", "test_set"), ("seg_train", "seg_test"), ("train2017", "val2017"), ("01_train", "02_test"),
        ("Training images", "Testing images"), ("trainset", "testSet"), ("TrainImages", "VALData"),
        ("train_224x224", "test_224x224"),
    ],
)  # fmt: skip
def test_names_of_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    listing = list_images(make(tmp_path, *(f"{name}/{label}/1.png" for name in names for label in "ab")))
    assert listing.class_names == ["a", "b"] and set(listing.columns["split"].tolist()) == {n.encode() for n in names}


@pytest.mark.parametrize("wrapper", ["{}", "images", "train"])
def test_splits_that_wrap_their_classes(tmp_path: Path, wrapper: str) -> None:
    """As archives that were unpacked into folders of their own names."""
    tops = ("seg_train", "seg_test")
    make(tmp_path, *(f"{top}/{wrapper.format(top)}/{label}/1.png" for top in tops for label in "ab"))
    listing = list_images(tmp_path)
    assert listing.class_names == ["a", "b"] and listing.columns["labels"].tolist() == [0, 1, 0, 1]
    assert listing.columns["split"].tolist() == [b"seg_test"] * 2 + [b"seg_train"] * 2 and len(listing.notes) == 1
    make(tmp_path, "train/1.png")
    with pytest.raises(SourceError, match="'seg_test' has class folders but 'train' has none"):
        list_images(tmp_path)
    make(tmp_path, "train/a/1.png", "train/b/1.png").joinpath("train/1.png").unlink()
    with pytest.raises(SourceError, match="have their class folders at different depths: convert each"):
        list_images(tmp_path)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("fold1/a/1.png", "fold1/b/1.png", "fold2/b/2.png", "fold2/a/2.png"), "contain the same folders 'a', 'b'"),
        (("photo/a/1.png", "photo/b/1.png", "photo/c/1.png", "art/b/2.png", "art/a/2.png"), "folders 'a', 'b'"),
        (("trainA/1.png", "trainB/1.png", "testA/3.png", "testB/4.png"), "whose names contain those of splits"),
        (("A/train/1.png", "A/test/1.png", "B/train/1.png"), "contain the same folders 'train'"),
        (("Test 1/1.png", "Test 2/1.png"), "which have names of one split"),
        (("train_cats/1.png", "test_cats/1.png"), "whose names contain those of splits"),
        (("train/1.png", "train_masks/1_mask.png"), "whose names contain those of splits"),
        (("trainA/1.png", "trainB/1.png"), "whose names contain those of splits"),
        (("web/images/a/1.png", "web/images/b/1.png", "cam/images/a/2.png", "cam/images/b/2.png"), "folders 'a', 'b'"),
        (("photos/1.jpg", "gtFine/1.png"), "'gtFine' have the names of other images"),
        (("train/ct/1.png", "train/gt/1.png", "val/ct/2.png", "val/gt/2.png"), "'gt' have the names of other images"),
        (("train/1.png", "train_labels/1.png", "val/1.png", "val_labels/1.png"), "'train' has the name of a split"),
        (("low/x.png", "low/y.png", "low/z1.png", "high/x.png", "high/y.png", "high/z1.png"), "the same names"),
        (("A/17.png", "A/40.png", "A/99.png", "B/17.jpg", "B/40.jpg", "B/99.jpg"), "such as 17"),
        (("left/train/x_0_left.png", "left/val/y_1_left.png", "gt/train/x_0_gt_id.png", "gt/val/y_1_gt_id.png"),
         "contain the same folders 'train', 'val'"),
    ],
)  # fmt: skip
def test_structure_that_shows_no_classes_is_asked_for(tmp_path: Path, names: tuple[str, ...], reason: str) -> None:
    make(tmp_path, *names)
    ways = r".*: pass --split-folders yes .*, or no .*, list the pairs in a manifest \(--manifest\)"
    with pytest.raises(SourceError, match=reason + ways):
        list_images(tmp_path)
    assert list_images(tmp_path, split_folders="no").class_names == sorted({name.split("/")[0] for name in names})


def test_a_named_folder_of_masks_ends_the_doubt(tmp_path: Path) -> None:
    make(tmp_path, "train/1.png", "train/2.png", "train_masks/1_mask.gif", "train_masks/2_mask.gif")
    with pytest.raises(SourceError, match=r"or, for masks, name their folder \(--mask-column train_masks\)$"):
        list_images(tmp_path)
    assert [*list_images(tmp_path, mask_column=("train_masks",)).others] == ["train_masks"]


@pytest.mark.parametrize(
    "names",
    [
        ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png"),
        ("with_mask/1.png", "without_mask/1.png"),
        ("n1/images/1.png", "n2/images/1.png"),
        ("steam train/1.png", "model train/2.png", "car/3.png"),
        ("contest/1.png", "latest/1.png"),
    ],
)
def test_structure_that_shows_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    listing = list_images(make(tmp_path, *names))
    assert listing.class_names == sorted({name.split("/")[0] for name in names}) and [*listing.columns] == ["labels"]


def test_files_that_are_just_counted_show_no_pairs(tmp_path: Path) -> None:
    names = [f"{label}/{i}.jpg" for label in ("cat", "dog") for i in range(1100)]
    listing = list_images(make(tmp_path, *names))
    assert listing.class_names == ["cat", "dog"]
    assert [note[:61] for note in listing.notes] == ["the class folders contain files of the same names, such as 0:"]
    make(tmp_path, "dog/1100.jpg")
    assert list_images(tmp_path).notes == []


def test_a_folder_around_the_classes_is_no_class(tmp_path: Path) -> None:
    make(tmp_path, "PetImages/Cat/1.png", "PetImages/Dog/1.png")
    inner = re.escape(str(tmp_path / "PetImages"))
    with pytest.raises(SourceError, match=f"folders 'Cat', 'Dog': if .* pass {inner}; or pass --split-folders no"):
        list_images(tmp_path)
    assert list_images(tmp_path / "PetImages").class_names == ["Cat", "Dog"]
    assert list_images(tmp_path, split_folders="no").class_names == ["PetImages"]


def test_flat_splits_have_no_labels(tmp_path: Path) -> None:
    listing = list_images(make(tmp_path, "train/2.png", "train/1.png", "test/1.png", "loose.png", "docs/readme.txt"))
    assert list(listing.names) == [b"test/1.png", b"train/1.png", b"train/2.png"]
    assert list(listing.columns) == ["split"] and listing.class_names == []
    assert listing.ignored[1:] == [
        "folders without images, which are not treated as splits: docs",
        "1 image without a split, outside of the split folders, such as loose.png",
    ]


def test_loose_images_and_empty_classes_in_splits(tmp_path: Path) -> None:
    make(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/2.png", "val/3.png", "notes/a/x.txt")
    (tmp_path / "val" / "b").mkdir()
    listing = list_images(tmp_path)
    assert listing.columns["labels"].tolist() == [0, 1, 0]
    assert "2 images without a class, outside of the class folders, such as val/2.png" in listing.ignored
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(SourceError, match=r"1 of 3 class folders have no images, such as 'c'"):
        list_images(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train/a/1.png", "extra/a/1.png"), r"the folders 'extra', 'train', of which 'train' has the name of a split"),
        (("train/1.png", "val/1.png", "cat/1.png"), r"'cat', 'train', 'val', of which 'train' has the name of a split"),
    ],
)
def test_doubt_is_an_error_that_names_the_ways_out(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    make(tmp_path, *names)
    ways = r".*--split-folders yes if all are splits, .*, or no if they are classes; or convert one of them alone"
    with pytest.raises(SourceError, match=message + ways):
        list_images(tmp_path)
    tops = sorted({name.split("/")[0] for name in names})
    assert list_images(tmp_path, split_folders="no").class_names == tops
    listing = list_images(tmp_path, split_folders="yes")
    assert set(listing.columns["split"].tolist()) == {top.encode() for top in tops}


@pytest.mark.parametrize(("names", "classes"), [(("train/a/1.png", "train/b/1.png"), ["a", "b"]), (("val/1.png",), [])])
def test_a_lone_split_is_no_class(tmp_path: Path, names: tuple[str, ...], classes: list[str]) -> None:
    listing = list_images(make(tmp_path, *names))
    assert listing.class_names == classes and {*listing.columns["split"].tolist()} == {names[0].split("/")[0].encode()}
    assert list_images(tmp_path, split_folders="no").class_names == [names[0].split("/")[0]]


def test_some_splits_with_classes_and_some_without(tmp_path: Path) -> None:
    make(tmp_path, "train/a/1.png", "train/b/1.png", "test/1.png")
    for choice in ("auto", "yes"):
        with pytest.raises(SourceError, match="'train' has class folders but 'test' has none: convert each"):
            list_images(tmp_path, split_folders=choice)
    assert list_images(tmp_path, split_folders="no").class_names == ["test", "train"]


def test_a_class_that_is_called_like_a_split(tmp_path: Path) -> None:
    listing = list_images(make(tmp_path, "bus/1.png", "car/1.png", "train/1.png"))
    assert listing.class_names == ["bus", "car", "train"] and list(listing.columns) == ["labels"]


def test_a_folder_that_wraps_splits_is_named(tmp_path: Path) -> None:
    make(tmp_path, "images/train/1.png", "images/val/1.png")
    archive = shutil.make_archive(str(tmp_path.parent / "x"), "zip", tmp_path.parent, tmp_path.name)
    assert set(list_images(Path(archive)).columns) == {"split"}
    with pytest.raises(SourceError, match=r"only in the folder 'images', in splits \('train', 'val'\): pass /"):
        list_images(tmp_path)
    assert set(list_images(tmp_path / "images").columns) == {"split"}
    listing = list_images(tmp_path, split_folders="no")
    assert listing.class_names == ["images"]
    assert listing.notes == ["all images are of one class, 'images': check that there is a folder per class"]


def test_folders_of_any_names_are_splits_if_asked_for(tmp_path: Path) -> None:
    make(tmp_path, "fold1/a/1.png", "fold2/a/1.png")
    assert list_images(tmp_path).class_names == ["fold1", "fold2"]
    listing = list_images(tmp_path, split_folders="yes")
    assert listing.class_names == ["a"] and listing.columns["split"].tolist() == [b"fold1", b"fold2"]
    assert [note.split(":")[0] for note in listing.notes] == [
        "all images are of one class, 'a'",
        "the top folders are splits",
    ]


def test_choices_that_cannot_be(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", 3)
    with pytest.raises(OptionError, match="split_folders is 'maybe': pass auto, yes or no"):
        convert(root, tmp_path / "x.h5", split_folders="maybe")
    (tmp_path / "m.csv").write_text("path\n" + name_of(0) + "\n")
    with pytest.raises(OptionError, match="split_folders is 'yes', but a manifest has the splits"):
        convert(root, tmp_path / "x.h5", manifest=tmp_path / "m.csv", split_folders="yes")
    with pytest.raises(SourceError, match="has no folders that could be splits"):
        convert(root / name_of(1).rpartition("/")[0], tmp_path / "x.h5", split_folders="yes")


def test_continued_with_splits(tmp_path: Path) -> None:
    root, path = make_tree(tmp_path / "data", 200), tmp_path / "x.h5"
    with pytest.raises(Stop):
        convert(root, path, workers=0, chunk_samples=4, progress=stop_at("convert", 70))
    told: list[str] = []
    convert(root, path, workers=0, chunk_samples=4, notify=told.append)
    convert(root, tmp_path / "whole.h5", workers=0, chunk_samples=4, split_folders="yes")
    assert told[0].startswith("continuing:") and path.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    check_splits(path, 200)


def test_splits_are_repaired(tmp_path: Path) -> None:
    root, path = make_tree(tmp_path / "data"), tmp_path / "x.h5"
    convert(root, path, workers=0, chunk_samples=4)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[data.index(b"TrainTrain")] ^= 1
    path.write_bytes(data)
    assert not h5chunk.verify(path).ok
    h5chunk.verify(path, repair=root)
    assert path.read_bytes() == whole


def test_on_the_command_line(tmp_path: Path) -> None:
    root, path = make_tree(tmp_path / "data"), tmp_path / "x.h5"
    (root / "Train" / "cat").rename(root / "cat")

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    result = run("convert", root, path)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "--split-folders yes" in result.stderr
    result = run("convert", root, path, "--split-folders", "no", "--json")
    assert json.loads(result.stdout)["class_names"] == ["Train", "cat", "val"]


def test_a_file_for_each_split(tmp_path: Path) -> None:
    source, out = make_tree(tmp_path / "data"), tmp_path / "out"
    plan = convert(source, out, split_files=True, chunk_samples=3, workers=0, dry_run=True)
    report = convert(source, out, split_files=True, chunk_samples=3, workers=0)
    assert plan.num_samples == report.num_samples == 24 and "2 files of up to 16 samples" in str(plan)
    assert sorted(path.name for path in out.iterdir()) == ["Train.h5", "val.h5"]
    samples, labels = expected()
    for split, count in (("Train", 16), ("val", 8)):
        names = [name for name in samples if name.startswith(split)]
        check_file(out / f"{split}.h5", {n: samples[n] for n in names}, {n: labels[n] for n in names})
        dataset = h5chunk.ChunkDataset(out / f"{split}.h5")
        assert dataset.classes == CLASSES and len(dataset) == count and {*dataset.values("split")} == {split}
        dataset.close()
    assert len(h5chunk.ChunkDataset(out)) == 24
    assert convert(source, out, split_files=True, chunk_samples=3, workers=0).already_complete
    with pytest.raises(OutputError, match="exists: use --overwrite"):
        convert(source, out, split_files=True, chunk_samples=4, workers=0)
    convert(source, out, split_files=True, chunk_samples=4, workers=0, overwrite=True)
    assert h5chunk.ChunkDataset(out / "val.h5").chunk_samples == 4


def test_files_of_splits_continue(tmp_path: Path) -> None:
    source, out = make_tree(tmp_path / "data"), tmp_path / "out"
    broken = sorted((source / "val").rglob("*.png"))[-1]
    image = broken.read_bytes()
    broken.write_bytes(b"broken")
    with pytest.raises(SampleError):
        convert(source, out, split_files=True, chunk_samples=3, workers=0)
    broken.write_bytes(image)
    told: list[str] = []
    convert(source, out, split_files=True, chunk_samples=3, workers=0, notify=told.append)
    assert told[0].startswith("continuing: ")
    convert(source, tmp_path / "again", split_files=True, chunk_samples=3, workers=0)
    for name in ("Train.h5", "val.h5"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("splits", "reason"),
    [
        (None, "'split', which the source lacks: put samples into folders such as train/ and val/"),
        (np.array([b"a", b"../b"] * 60), r"the field has a value that cannot name a file, such as \.\./b"),
        (np.arange(120), "the field has more than 100 values, such as 100"),
    ],
)
def test_what_cannot_be_a_file_for_each_split(tmp_path: Path, splits: Any, reason: str) -> None:
    data = {"data": np.zeros((120, 5), np.uint8)} | ({} if splits is None else {"split": splits})
    with pytest.raises(OptionError, match=reason):
        convert(data, tmp_path / "out", split_files=True)
    with pytest.raises(OptionError, match="shards is 2 and split_files is True: use only one of them"):
        convert(data, tmp_path / "out", split_files=True, shards=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("form", ["data/{}-00000-of-00002", "{}/0", "my_{}_2"])
def test_splits_of_tables_are_in_the_names_of_files_or_folders(tmp_path: Path, suffix: str, form: str) -> None:
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "source"
    for split, rows in (("train", 6), ("test", 3)):
        path = source / f"{form.format(split)}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow_table(x=np.arange(rows) + 0.5, y=[split] * rows, z=np.arange(rows))
        (csv.write_csv if suffix == "csv" else parquet.write_table)(table, path)
    (source / "README.md").write_text("A card.")
    report = h5chunk.convert(source, tmp_path / "x.h5")
    assert "splits: test (3), train (6): the field 'split'" in str(report) and h5chunk.verify(tmp_path / "x.h5").ok
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert "split" not in dataset.fields
    names = np.array(dataset.categories("y"))[dataset.values("y")]
    assert dataset.values("split").tolist() == names.tolist()
    h5chunk.convert(source, tmp_path / "files", split_files=True)
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["test.h5", "train.h5"]
    assert len(h5chunk.ChunkDataset(tmp_path / "files" / "test.h5")) == 3


def test_tables_of_which_only_some_are_splits(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "source"
    for name in ("en/train", "en/other", "fr/train"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow_table(x=[0.5, 1.5]), source / f"{name}.parquet")
    with pytest.raises(SourceError, match=r"tables in several folders \(en/, fr/\), .*: convert each of these folders"):
        h5chunk.convert(source, tmp_path / "x.h5")
    with pytest.raises(
        SourceError, match=r"train\.parquet has the name of a split, but other\.parquet has not: rename"
    ):
        h5chunk.convert(source / "en", tmp_path / "x.h5")
    (source / "en" / "other.parquet").rename(source / "en" / "train_2.parquet")
    h5chunk.convert(source / "en", tmp_path / "x.h5")
    assert set(h5chunk.ChunkDataset(tmp_path / "x.h5").values("split")) == {"train"}


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_splits_of_ratings_are_not_merged(tmp_path: Path, suffix: str) -> None:
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "r").mkdir()
    for split in ("train", "test"):
        table = pyarrow_table(user=[1, 2], item=[3, 4], rating=[1.5, 2.5])
        (csv.write_csv if suffix == "csv" else parquet.write_table)(table, tmp_path / "r" / f"{split}.{suffix}")
    with pytest.raises(SourceError, match=r"are the splits test, train, .* convert each of them alone"):
        h5chunk.convert(tmp_path / "r", tmp_path / "x.h5")
    h5chunk.convert(tmp_path / "r" / f"train.{suffix}", tmp_path / "train.h5")
    options = {"ids_from": tmp_path / "train.h5", "keep_rows": True}
    h5chunk.convert(tmp_path / "r" / f"test.{suffix}", tmp_path / "test.h5", **options)


def pyarrow_table(**columns: Any) -> Any:
    return pytest.importorskip("pyarrow").table(columns)
