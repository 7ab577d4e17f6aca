"""Which images a source has: the order and labels of torchvision's ImageFolder, over folders and archives."""

from __future__ import annotations

import io
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.listings import list_images

from h5chunk.errors import SourceError
from h5chunk.sample_source import Names
from h5chunk.sources.listing import Listing

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def image_folder(root: str) -> tuple[list[str], list[tuple[str, int]]]:
    """What torchvision.datasets.ImageFolder(root) has as ``classes`` and ``samples``, paths below the root."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(IMG_EXTENSIONS):
                    samples.append((os.path.relpath(os.path.join(folder, file), root), label))
    return classes, samples


def make(root: Path, *names: str) -> Path:
    """Files that hold their own name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def samples(listing: Listing) -> list[tuple[str, int]]:
    return [(os.fsdecode(n), int(label)) for n, label in zip(listing.names, listing.columns["labels"], strict=True)]


def contents(listing: Listing) -> list[bytes]:
    return [listing.container.read(i, name) for i, name in enumerate(listing.names)]


# "a-b" and "a.b" sort before "a/", so that sorting whole paths would mix classes
TREE = (
    "a/z.png", "a/10.JPG", "a/9.jpeg", "a/sub/1.png", "a/sub-1/1.png", "a/sub/deep/x.Tiff", "a-b/1.webp", "a.b/2.BMP",
    "B/1.pgm", "é/ü.png", "a/notes.txt", "10/1.ppm", "9/1.tif",
)  # fmt: skip


def test_order_and_labels_are_those_of_image_folder(tmp_path: Path) -> None:
    make(tmp_path, *TREE)
    listing = list_images(tmp_path)
    classes, expected = image_folder(str(tmp_path))
    assert samples(listing) == expected
    assert listing.class_names == classes == ["10", "9", "B", "a", "a-b", "a.b", "é"]
    assert listing.columns["labels"].dtype == np.int64
    assert listing.ignored == ["files without the suffix of an image (1 .txt), such as notes.txt"]


def test_more_suffixes_than_are_named_are_hinted_at(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", *(f"a/{suffix}.{suffix}" for suffix in ("csv", "md", "npy", "py", "txt", "xml")))
    assert list_images(tmp_path).ignored[0].endswith(", ...), such as csv.csv")


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "b/2.png", "b/3.avif", "b/4.AVIF", "b/README", ".c/5.png", "b/._2.png", ".DS_Store")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in sorted(tmp_path.rglob("*")):
            if path.is_file() and path.suffix != ".zip":
                archive.write(path, path.relative_to(tmp_path))
    expected = ["files without the suffix of an image (2 .avif, 1 without a suffix), such as 3.avif"]
    expected += ["hidden files and folders, such as .c"]
    assert list_images(tmp_path / "x.zip").ignored == expected
    (tmp_path / "x.zip").unlink()
    assert list_images(tmp_path).ignored == expected


def test_order_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    shuffled = list(TREE)
    random.Random(1).shuffle(shuffled)
    first, second = make(tmp_path / "1", *TREE), make(tmp_path / "2", *shuffled)
    assert samples(list_images(first)) == samples(list_images(second)) == image_folder(str(first))[1]


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    listing = list_images(make(tmp_path, "2.png", "10.png", "1.JPEG", "readme.md"))
    assert list(listing.names) == [b"1.JPEG", b"10.png", b"2.png"]
    assert listing.columns == {} and listing.class_names == []


def test_loose_images_beside_classes_are_reported(tmp_path: Path) -> None:
    listing = list_images(make(tmp_path, "a/1.png", "b/1.png", "y.png", "x.png"))
    assert samples(listing) == [("a/1.png", 0), ("b/1.png", 1)]
    assert listing.ignored == ["2 images without a class, outside of the class folders, such as x.png"]


def test_hidden_files_and_mac_leftovers_are_ignored(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "a/._1.png", "a/.cache/2.png", "__MACOSX/a/1.png", ".thumbs/1.png", "a/__MACOSX/1.png")
    assert samples(list_images(tmp_path)) == [("a/1.png", 0)]


def test_leftovers_of_systems_are_no_images_and_not_reported(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "a/Thumbs.db", "Desktop.ini", "a/@eaDir/1.png/S_M.jpg", "__MACOSX/a/._1.png")
    listing = list_images(tmp_path)
    assert samples(listing) == [("a/1.png", 0)] and listing.ignored == []


@pytest.mark.parametrize("system", [0, 3])
def test_backslashes_in_archives_of_windows_are_slashes(tmp_path: Path, system: int) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("train\\cat\\1.png", "train\\dog\\2.png", "test\\cat\\3.png"):
            info = zipfile.ZipInfo(name)
            info.create_system = system
            archive.writestr(info, name)
    listing = list_images(tmp_path / "x.zip")
    assert samples(listing) == [("test/cat/3.png", 0), ("train/cat/1.png", 0), ("train/dog/2.png", 1)]
    assert contents(listing) == [b"test\\cat\\3.png", b"train\\cat\\1.png", b"train\\dog\\2.png"]


def test_files_beside_images_are_told_with_ways(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "a/1.txt", "a/2.jpg", "a/2.txt", "a/3.avif")
    avif, beside = list_images(tmp_path).notes[:2]
    assert avif.startswith("images such as 3.avif are left out: in Python, h5chunk.convert(dataset, path), where")
    assert beside.startswith("files such as 1.txt have the names of images, but what they contain is not stored")
    line = '{{"file_name": "{}.jpg", "text": "a dog"}}\n'
    (tmp_path / "a" / "metadata.jsonl").write_text(line.format(1) + line.format(2))
    assert list_images(tmp_path).columns["text"].tolist() == [b"a dog"] * 2
    make(tmp_path / "b", "1.jpg", "readme.txt", "list.csv")
    assert list_images(tmp_path / "b").notes == [
        "if list.csv lists the images with their labels, pass it as --manifest"
    ]


def test_jpegs_and_others_by_less_usual_suffixes(tmp_path: Path) -> None:
    names = ["1.jfif", "2.JPE", "3.pjpeg", "4.apng", "5.pnm"]
    assert list(list_images(make(tmp_path, *names)).names) == [os.fsencode(name) for name in names]


def test_empty_class_folder_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "c/readme.txt")
    (tmp_path / "b" / "deep").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"2 of 3 class folders have no images, such as 'b': remove"):
        list_images(tmp_path)


@pytest.mark.parametrize("names", [(), ("a/readme.txt",), (".hidden.png",)])
def test_source_without_images_says_what_was_looked_for(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(SourceError, match=r"contains no images: .* ends in \.jpg, .*\.gif and 7 more \(in any case\)"):
        list_images(make(tmp_path, *names))


def test_missing_source(tmp_path: Path) -> None:
    for path in (tmp_path / "none", make(tmp_path, "file.png") / "file.png" / "below"):
        with pytest.raises(SourceError, match="no such file or folder"):
            list_images(path)


def test_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="cannot be read: File name too long"):
        list_images(tmp_path / ("x" * 300))

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    make(tmp_path, "a/1.png")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=f"{tmp_path}: cannot be listed: Permission denied"):
        list_images(tmp_path)


def test_link_loops_end_and_links_elsewhere_are_followed(tmp_path: Path) -> None:
    root = make(tmp_path / "root", "a/1.png", "b/1.png")
    make(tmp_path / "elsewhere", "2.png")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    (root / "b" / "more").symlink_to(tmp_path / "elsewhere")
    assert samples(list_images(root)) == [("a/1.png", 0), ("b/1.png", 1), ("b/more/2.png", 1)]


def test_two_classes_may_be_one_folder(tmp_path: Path) -> None:
    make(tmp_path, "b/1.png")
    for name in "ca":
        (tmp_path / name).symlink_to(tmp_path / "b")
    listing = list_images(tmp_path)
    assert samples(listing) == image_folder(str(tmp_path))[1] == [("a/1.png", 0), ("b/1.png", 1), ("c/1.png", 2)]


def test_broken_links_and_pipes_are_samples_that_fail_and_not_missing(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png")
    (tmp_path / "a" / "2.png").symlink_to("nowhere")
    (tmp_path / "a" / "3.png").symlink_to("3.png")
    os.mkfifo(tmp_path / "a" / "4.png")
    (tmp_path / "a" / "5.png").mkdir()
    assert [name for name, _ in samples(list_images(tmp_path))] == ["a/1.png", "a/2.png", "a/3.png", "a/4.png"]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    os.mkdir(os.path.join(root, b"caf\xe9"))
    for name in (b"caf\xe9/\xff.png", b"caf\xe9/1.png"):
        Path(os.fsdecode(os.path.join(root, name))).write_bytes(name)
    listing = list_images(tmp_path)
    assert list(listing.names) == contents(listing) == [b"caf\xe9/1.png", b"caf\xe9/\xff.png"]
    assert listing.class_names == ["caf\\xe9"]


def test_count_is_told_from_the_start(tmp_path: Path) -> None:
    counts: list[int] = []
    list_images(make(tmp_path, *TREE), counts.append)
    assert counts[0] == 0 and counts[-1] == 12 and counts == sorted(counts)


def test_names_take_little_memory_and_give_all_back() -> None:
    names = Names(f"{i}.png".encode() for i in range(1000))
    assert len(names) == 1000 and names[999] == b"999.png"
    assert list(names) == [f"{i}.png".encode() for i in range(1000)]


# ---- archives

Pack = Callable[[Path, str, tuple[str, ...]], Path]


def pack_zip(method: int) -> Pack:
    def pack(folder: Path, prefix: str, names: tuple[str, ...]) -> Path:
        with zipfile.ZipFile(folder.with_suffix(".zip"), "w", method) as archive:
            for name in names:
                archive.writestr(prefix + name, b"" if name.endswith("/") else name.encode() * 9)
        return folder.with_suffix(".zip")

    return pack


def pack_tar(kind: int) -> Pack:
    def pack(folder: Path, prefix: str, names: tuple[str, ...]) -> Path:
        with tarfile.open(folder.with_suffix(".tar"), "w", format=kind) as archive:
            for name in names:
                member = tarfile.TarInfo(prefix + name.rstrip("/"))
                data = name.encode() * 9
                if name.endswith("/"):
                    member.type, data = tarfile.DIRTYPE, b""
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return folder.with_suffix(".tar")

    return pack


PACKS = [
    pytest.param(pack_zip(zipfile.ZIP_STORED), id="zip-stored"),
    pytest.param(pack_zip(zipfile.ZIP_DEFLATED), id="zip-deflated"),
    pytest.param(pack_tar(tarfile.PAX_FORMAT), id="tar-pax"),
    pytest.param(pack_tar(tarfile.GNU_FORMAT), id="tar-gnu"),
]


@pytest.mark.parametrize("prefix", ["", "photos/", "./", "./photos/", "two/"])
@pytest.mark.parametrize("pack", PACKS)
def test_archive_equals_the_folder(tmp_path: Path, pack: Pack, prefix: str) -> None:
    names = TREE if prefix != "two/" else tuple("deep/" + name for name in TREE)  # only one folder is taken off
    options = {"split_folders": "no"} if prefix == "two/" else {}
    listing = list_images(pack(tmp_path / "x", prefix, names), **options)
    expected = list_images(make(tmp_path / "folder", *names), **options)
    assert samples(listing) == samples(expected)
    assert listing.class_names == expected.class_names
    assert contents(listing) == [data * 9 for data in contents(expected)]


@pytest.mark.parametrize("prefix", ["", "photos/"])
@pytest.mark.parametrize("pack", PACKS)
def test_flat_archive_has_no_labels(tmp_path: Path, pack: Pack, prefix: str) -> None:
    listing = list_images(pack(tmp_path / "x", prefix, ("2.png", "1.png", "readme.txt")))
    assert list(listing.names) == [b"1.png", b"2.png"] and listing.columns == {}
    assert contents(listing) == [b"1.png" * 9, b"2.png" * 9]


@pytest.mark.parametrize("pack", PACKS)
def test_archive_with_loose_images_within_its_wrapping_folder(tmp_path: Path, pack: Pack) -> None:
    listing = list_images(pack(tmp_path / "x", "photos/", ("a/1.png", "b/1.png", "x.png")))
    assert samples(listing) == [("a/1.png", 0), ("b/1.png", 1)]
    assert listing.ignored == ["1 image without a class, outside of the class folders, such as x.png"]


@pytest.mark.parametrize("names", [("a/1.png", "b/"), ("a/1.png", "b/readme.txt")])
@pytest.mark.parametrize("pack", PACKS)
def test_empty_class_in_an_archive(tmp_path: Path, pack: Pack, names: tuple[str, ...]) -> None:
    for prefix in ("", "photos/"):
        path = pack(tmp_path / "x", prefix, (*names, "c/1.png"))
        with pytest.raises(SourceError, match=r"1 of 3 class folders have no images, such as 'b'"):
            list_images(path)


@pytest.mark.parametrize("pack", PACKS)
def test_hidden_members_are_ignored(tmp_path: Path, pack: Pack) -> None:
    names = ("photos/a/1.png", "__MACOSX/photos/a/._1.png", "photos/.x/1.png", "photos/a/._1.png")
    assert samples(list_images(pack(tmp_path / "x", "", names))) == [("a/1.png", 0)]


@pytest.mark.parametrize("pack", PACKS)
def test_archive_without_images(tmp_path: Path, pack: Pack) -> None:
    with pytest.raises(SourceError, match=r"x\.\w+: contains no images"):
        list_images(pack(tmp_path / "x", "", ("readme.txt",)))


def test_a_data_set_that_hugging_face_saved_is_no_folder_of_images(tmp_path: Path) -> None:
    make(tmp_path, "data-00000-of-00001.arrow", "dataset_info.json", "state.json")
    with pytest.raises(SourceError, match=r"contains no images: .* \(2 \.json, 1 \.arrow\).*datasets\.load_from_disk"):
        list_images(tmp_path)


@pytest.mark.parametrize("labels", ["labels/1.txt", "annotations/instances.json"])
def test_labels_of_detection_say_how_to_convert_the_images(tmp_path: Path, labels: str) -> None:
    make(tmp_path / "yolo", "images/1.jpg", labels)
    with pytest.raises(SourceError, match=r"are not read: convert the images alone \(h5chunk convert .*/images OUTPUT"):
        list_images(tmp_path / "yolo")
    assert len(list_images(tmp_path / "yolo" / "images").names) == 1
