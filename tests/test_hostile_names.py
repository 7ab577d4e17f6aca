"""No name or value in a file can steer the terminal, or forge a line of what a command prints."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from support.loaders import loader_by
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError, H5ChunkError, as_text, printable

TEXT = "x\nFAKE: whole\r\x1b[31m\x07\x85FAKE\u2028FAKE\u202e\u200b\x1b]0;t\x07"  # what UTF-8 has
NAME = f"{TEXT}\udcff"  # and a byte that is none
RAW = os.fsencode(NAME)


def check(*arguments: object, code: int | None = 0) -> Result:
    """Run a command that ends with this code, or 0 or 1: no control character but line breaks, no forged line."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], color=True)
    assert result.exit_code in ((0, 1) if code is None else (code,)), result.output
    assert isinstance(result.exception, SystemExit | None), result.exception
    for line in (result.stdout + result.stderr).split("\n"):
        assert line.isprintable() and not line.lstrip().startswith("FAKE"), ascii(line)
    assert "--dry-run" in arguments or "FAKE" in result.stdout + result.stderr
    if "--json" in arguments and code != 2:
        json.dumps(json.loads(result.stdout), ensure_ascii=False, allow_nan=False).encode()
    return result


def foreign_file(path: Path, *, links: bool = True) -> Path:
    """An HDF5 file in which everything that can have a name has a hostile one."""
    text = h5py.string_dtype()
    with h5py.File(path, "w", userblock_size=512, libver="latest") as file:
        for number, chunks in enumerate([(5, 4, 4), (60, 8, 8)]):
            values = np.random.default_rng(number).integers(0, 255, (60, 8, 8), np.uint8)
            file.create_dataset(
                f"images{number}{TEXT}", data=values, chunks=chunks, compression="gzip" if number else None
            )
        file[f"labels{TEXT}"] = np.arange(60) % 3
        file[f"text{TEXT}"] = np.array([RAW] * 60)
        group = file.create_group(f"group{TEXT}")
        group.attrs[f"name{TEXT}"], group.attrs["bytes"] = TEXT, np.bytes_(RAW)
        group[f"compound{TEXT}"] = np.zeros(60, [(f"a{TEXT}", "u1"), ("b", "f4")])
        group.create_dataset(f"enum{TEXT}", (60,), h5py.enum_dtype({f"red{TEXT}": 0, "blue": 1}, "u1"))
        group.create_dataset(f"strings{TEXT}", data=[TEXT] * 60, dtype=text)
        group[f"type{TEXT}"] = np.dtype("f4")
        opaque = h5py.h5t.create(h5py.h5t.OPAQUE, 5)
        opaque.set_tag(RAW)
        h5py.h5d.create(group.id, b"opaque" + RAW, opaque, h5py.h5s.create_simple((60,)))
        matrix = file.create_group(f"matrix{TEXT}")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = np.bytes_(b"csr_matrix"), np.array([60, 4])
        matrix["indptr"], matrix["indices"], matrix["data"] = np.arange(61), np.zeros(60, "i4"), np.ones(60, "f4")
        if links:
            file[f"soft{TEXT}"], file[f"external{TEXT}"] = (
                h5py.SoftLink(f"/{TEXT}"),
                h5py.ExternalLink(TEXT, f"/{TEXT}"),
            )
            layout = h5py.VirtualLayout((4,), "f8")
            layout[:] = h5py.VirtualSource(f"view{TEXT}", f"/d{TEXT}", (4,))
            file.create_virtual_dataset(f"view{TEXT}", layout)
            file.create_dataset(f"stored{TEXT}", (5,), "f8", external=[(f"raw{TEXT}", 0, 40)])
    with path.open("r+b") as raw:
        raw.write(RAW)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("h") / f"folder{NAME}"
    found.mkdir()
    return found


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Path:
    return foreign_file(folder / f"foreign{NAME}.h5")


def image_folder(root: Path, count: int = 6) -> Path:
    """Images whose names, and those of their classes, are hostile; the last one is broken."""
    for number in range(count):
        path = root / f"class{number % 2}{NAME}" / f"{number}{NAME}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 9, 3), number, np.uint8)).save(path)
    path.write_bytes(b"\n\x1b[31m")
    return root


@pytest.fixture(scope="module")
def images(folder: Path) -> Path:
    return image_folder(folder / f"images{NAME}")


@pytest.fixture(scope="module")
def converted(folder: Path, images: Path) -> Path:
    path = folder / "made" / f"converted{NAME}.h5"
    path.parent.mkdir()
    result = check("convert", images, path, "--on-error", "skip", "--workers", 0)
    assert "such as class1x\\nFAKE" in result.stdout
    return path


def test_escaping() -> None:
    assert (
        printable(NAME)
        == r"x\nFAKE: whole\r\x1b[31m\x07\x85FAKE\u2028FAKE\u202e\u200b\x1b]0;t\x07\xff"
        == printable(RAW)
    )
    assert as_text(NAME) == as_text(RAW) == TEXT + r"\xff"
    assert printable("\ud800é\\n") == r"\ud800é\n"
    assert str(H5ChunkError(NAME)) == printable(NAME)
    assert printable(printable(NAME)) == printable(NAME)


@pytest.mark.parametrize("json_too", [(), ("--json",)])
def test_info_and_verify(folder: Path, foreign: Path, converted: Path, json_too: tuple[str, ...]) -> None:
    check("info", foreign, *json_too)
    check("info", foreign, "--trusted", *json_too)
    check("info", folder, *json_too)
    check("info", converted, *json_too)
    check("info", folder / "made", *json_too)
    check("info", folder / "none", code=1)
    for path in (foreign, folder):
        check("verify", path, *json_too, code=None)
    check("verify", foreign, *json_too)  # odd names are no damage
    check("verify", converted, *json_too)
    found = json.loads(check("info", foreign, "--json").stdout)
    assert found["path"] == as_text(foreign) and f"labels{TEXT}" in [each["name"] for each in found["datasets"]]
    assert json.loads(check("info", converted, "--json").stdout)["header"]["class_names"][0] == f"class0{TEXT}\\xff"


def test_damage(folder: Path, converted: Path, images: Path) -> None:
    path = folder / f"damaged{NAME}.h5"
    data = bytearray(converted.read_bytes())
    with h5py.File(converted) as file:
        offset = file["images"].id.get_chunk_info(0).byte_offset
        table = h5py.h5d.open(file.id, b"h5chunk/source_names").get_offset()
    data[offset] ^= 1
    path.write_bytes(data)
    check("verify", path, code=1)
    (images / f"class0{NAME}" / f"0{NAME}.png").rename(images / "gone")
    check("verify", path, "--repair", images, code=1)
    (images / "gone").rename(images / f"class0{NAME}" / f"0{NAME}.png")
    data[table] ^= 64
    path.write_bytes(data)
    check("verify", path, "--repair", images, code=1)
    path.write_bytes(data[: len(data) // 2])
    check("verify", path, code=1)
    check("info", path, code=1)
    path.unlink()


def test_bench(foreign: Path, converted: Path) -> None:
    quick = ("--budget", 0.3, "--no-cold", "--workers", 0)
    check("bench", foreign, *quick)
    check("bench", foreign, "--fields", f"images0{TEXT}", "--fields", f"text{TEXT}", *quick)
    check("bench", foreign, "--fields", f"images1{TEXT}", *quick, "--json")
    check("bench", foreign, "--fields", f"group{TEXT}/compound{TEXT}", *quick)
    check("bench", converted, *quick)


def test_tune(folder: Path, foreign: Path, converted: Path) -> None:
    fields = ("--fields", f"images0{TEXT}", "--budget", "1s")
    check("tune", foreign, *fields, "--group-by", f"labels{TEXT}", "--apply")
    check("tune", foreign, *fields, "--group-by", f"soft{TEXT}", code=1)
    check("tune", foreign, *fields, "--plot", folder / "none" / "a.png", code=1)
    found = check("tune", foreign, *fields, "--json")
    path = folder / f"tuned{NAME}.json"
    path.write_text(found.stdout)
    check("repack", foreign, folder / f"out{NAME}.h5", "--tuned", path, code=1)
    check("convert", folder / "none", folder / "x.h5", "--tuned", path, code=1)
    path.write_text(json.dumps({"chunk_samples": TEXT}))
    check("repack", foreign, folder / f"out{NAME}.h5", "--tuned", path, code=1)
    (foreign.parent / f"{foreign.name}.h5chunk.json").write_text(json.dumps({"window_chunks": TEXT}))
    check("bench", foreign, "--fields", f"images0{TEXT}", "--budget", 0.1, "--no-cold", "--workers", 0, code=1)
    (foreign.parent / f"{foreign.name}.h5chunk.json").unlink()


def test_repack(folder: Path, foreign: Path, converted: Path) -> None:
    source, out = foreign_file(folder / f"source{NAME}.h5", links=False), folder / f"out{NAME}.h5"
    main_field = ("--fields", f"images0{TEXT}", "--overwrite")
    check("repack", foreign, out, code=1)
    for options in ((), ("--shuffle",), ("--keep", f"labels{TEXT}"), ("--json",), ("--compression", TEXT)):
        check("repack", source, out, *main_field, *options, code=None)
    check("repack", source, out, "--fields", NAME, code=1)
    check("repack", source, folder / NAME / "out.h5", code=1)
    check("repack", converted, out, "--overwrite")
    check("verify", out)
    out.unlink()
    source.unlink()


def archives(folder: Path, images: Path) -> Iterator[Path]:
    """Archives with names that no folder could have."""
    picture = next(images.rglob("0*.png")).read_bytes()
    with zipfile.ZipFile(folder / f"a{NAME}.zip", "w") as archive:
        for name in (f"a{TEXT}/0.png", f"b{TEXT}/1{TEXT}.png"):
            archive.writestr(name, picture)
        archive.writestr(f"b{TEXT}/2{TEXT}.png", TEXT)
    with tarfile.open(folder / f"a{NAME}.tar", "w") as tar:
        for name in (f"a{NAME}/0.png", f"b{NAME}/1{NAME}.png"):
            about = tarfile.TarInfo(name)
            about.size = len(picture)
            tar.addfile(about, io.BytesIO(picture))
        link = tarfile.TarInfo(f"b{NAME}/2{NAME}.png")
        link.type, link.linkname = tarfile.SYMTYPE, f"/{NAME}"
        tar.addfile(link)
    return iter((folder / f"a{NAME}.zip", folder / f"a{NAME}.tar"))


def test_convert_images(folder: Path, images: Path, converted: Path) -> None:
    out = folder / f"x{NAME}.h5"
    check("convert", images, out, "--workers", 0, code=1)
    check("convert", images, out, "--dry-run", "--on-error", "skip", code=0)
    for options in ((), ("--json",), ("--shards", 2), ("--size", "5,5")):
        arguments = (images, folder / f"y{NAME}{options[:1]}", "--workers", 0, "--on-error", "skip", *options)
        check("convert", *arguments, code=int("--size" in options))
    check("convert", images, converted, code=1)
    check("convert", images, folder / "again.h5", "--like", converted, "--on-error", "skip", "--workers", 0)
    more = image_folder(folder / "more" / NAME, 2)
    (more / f"class0{NAME}").rename(more / f"new{NAME}")
    check("convert", more, folder / "more.h5", "--like", converted, code=1)
    check("convert", more, folder / "more.h5", "--like", converted, "--new-classes", "--on-error", "skip")
    for archive in archives(folder, images):
        check("convert", archive, out, "--workers", 0, code=1)
        check("convert", archive, out, "--workers", 0, "--on-error", "skip", "--overwrite")


def test_convert_by_manifest(folder: Path, images: Path) -> None:
    path, out = folder / f"list{NAME}.csv", folder / f"listed{NAME}.h5"
    names = sorted(os.fspath(each.relative_to(images)) for each in images.rglob("*.png"))[:4]
    rows = [f'"{name}","{TEXT}","{number}{TEXT}"\n' for number, name in enumerate(names)]

    def write(head: str, *lines: str) -> None:
        path.write_text(head + "".join(lines), errors="surrogateescape", newline="")

    write("path,label,caption\n", *rows)
    check("convert", images, out, "--manifest", path, "--workers", 0, "--dry-run")
    check("convert", images, out, "--manifest", path, "--workers", 0)
    with h5py.File(out) as file:
        assert file["caption"][:].tolist() != [] and TEXT in file["caption"].asstr()[0]
        assert file["h5chunk/class_names"].asstr()[0] == TEXT
    check("info", out)
    check("verify", out)
    for head, *lines in (
        (f'path,"{TEXT}"\n', *(row.replace(f',"{TEXT}"', "", 1) for row in rows)),
        ("path,label,caption\n", f'"{names[0]}","{NAME}",2\n'),
        ("path,label,caption\n", f'"none{NAME}",1,2\n'),
        ("path,label,caption\n", f'"{names[0]}",1,2,3,"{TEXT}"\n'),
    ):
        write(head, *lines)
        check("convert", images, out, "--manifest", path, "--overwrite", code=1)


MATRICES = {
    "text.csv": f'user,item,rating\n"{TEXT}",1,5\n"b{TEXT}",2,3.7\n'.encode(),
    "columns.csv": f'"user{TEXT}","item{TEXT}",rating\n1,1,5\n'.encode(),
    "value.csv": f'user,item,rating\n1,1,5\n2,2,"{TEXT}"\n'.encode(),
    "a.mtx": f"%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n2 2 {TEXT}\n".encode(),
    "head.mtx": f"%%MatrixMarket matrix {TEXT}\n".encode(),
    "a.libsvm": f"1 1:1\n2 {TEXT}:3\n".encode(),
    "a.npz": RAW,
}


@pytest.mark.parametrize("name", MATRICES)
def test_convert_matrices(folder: Path, name: str) -> None:
    path = folder / f"{NAME}{name}"
    path.write_bytes(MATRICES[name])
    out = folder / f"{NAME}{name}.h5"
    check("convert", path, out, code=None)
    check("convert", path, out, "--columns", f"{TEXT},b,c", "--overwrite", code=1)


def test_convert_h5ad(folder: Path) -> None:
    path, out = folder / f"a{NAME}.h5ad", folder / f"cells{NAME}.h5"
    with h5py.File(path, "w") as file:
        matrix, obs = file.create_group("X"), file.create_group("obs")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = np.bytes_(b"csr_matrix"), np.array([3, 4])
        matrix["indptr"], matrix["indices"], matrix["data"] = np.arange(4), np.arange(3), np.ones(3, "f4")
        obs.attrs["_index"] = f"name{TEXT}"
        text = h5py.string_dtype()
        obs.create_dataset(f"name{TEXT}", data=[f"{i}{TEXT}" for i in range(3)], dtype=text)
        obs[f"score{TEXT}"] = np.arange(3)
        kind = obs.create_group(f"kind{TEXT}")
        kind["codes"] = np.array([0, 1, 0], "i1")
        kind.create_dataset("categories", data=[TEXT, f"b{TEXT}"], dtype=text)
    check("convert", path, out)
    check("convert", path, folder / f"other{NAME}.h5", "--layer", TEXT, code=1)
    check("info", out)
    check("verify", out)


def test_doctor() -> None:
    check("doctor", "--", f"./{NAME}", code=1)


def test_arguments_that_a_shell_finds(foreign: Path) -> None:
    check("bench", foreign, NAME, code=2)
    check(NAME, code=2)
    check("tune", foreign, "--batch-size", NAME, code=2)
    check("convert", foreign, foreign, "--memory-bytes", NAME, code=2)


def test_the_traceback_of_a_worker_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / f"a{NAME}.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((64, 8), np.uint8)
    loader = DataLoader(h5chunk.ChunkDataset(path), 8, num_workers=1)
    path.unlink()
    with pytest.raises(FileError) as caught:
        list(loader)
    lines = str(pickle.loads(pickle.dumps(caught.value))).split("\n")
    assert lines == str(caught.value).split("\n") and len(lines) > 5 and "FAKE" in lines[-2]
    assert all(line.isprintable() and not line.lstrip().startswith("FAKE") for line in lines)


def test_what_python_shows(foreign: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Reports, errors, warnings and reprs are as safe without the command line."""
    name = f"images1{TEXT}"
    dataset = h5chunk.ChunkDataset(foreign, fields={TEXT: name})
    loader = loader_by(h5chunk.ChunkDataset(foreign, fields={TEXT: name}), 8, reader="h5py")
    shown = [repr(dataset), repr(loader), str(loader.report), str(h5chunk.info(foreign)), str(h5chunk.verify(foreign))]
    for call in (lambda: dataset[99], lambda: dataset.values(TEXT), lambda: h5chunk.ChunkDataset(foreign)):
        with pytest.raises((IndexError, H5ChunkError)) as caught:
            call()
        shown.append(str(caught.value))
    for text in [*shown, *(str(each.message) for each in recwarn)]:
        assert all(line.isprintable() and not line.lstrip().startswith("FAKE") for line in text.split("\n")), ascii(
            text
        )


def test_no_command_is_left_out() -> None:
    """A new command has to be tried above as well."""
    source = Path(__file__).read_text()
    assert [name for name in main.commands if f'check("{name}", ' not in source] == []
