"""Zoos: each kind of image and of sparse matrix converted alone, then exact values by plain h5py, or the exact message.

Broken matrices and the makers of odd images are those of the tests.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import numpy as np
import scipy.sparse
from PIL import Image, ImageCms
from torture_result import Result, share_tests

import h5chunk
from h5chunk.errors import SourceError

share_tests()

import test_decode as odd  # noqa: E402
import test_sparse_formats as formats  # noqa: E402
import test_sparse_zoo as broken  # noqa: E402
from conftest import pixels  # noqa: E402
from sparse_files import write_10x, write_h5ad  # noqa: E402

RGB = Image.fromarray(pixels(1))
GREY = Image.fromarray(pixels(1, channels=1))
LARGE = Image.fromarray(pixels(1, 64, 64))
FRAMES = [Image.new("RGB", (6, 5), color) for color in ("red", "lime", "blue")]
DEEP = r"has more than 8 bits a channel \(.*\): scale it to 8 bits first"
CUT = "cannot be decoded|no image of a known format"


class Kind(NamedTuple):
    """An image file: its name, bytes, and the image that must come of it or the message; options of convert."""

    name: str
    data: bytes
    expected: Image.Image | str
    options: Mapping[str, Any] = MappingProxyType({})


def by_pillow(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def images() -> dict[str, Kind]:
    """All kinds of images."""
    return {**good_images(), **turned_images(), **deep_images(), **bad_images()}


def good_images() -> dict[str, Kind]:
    put = odd.encoded
    found = {
        f"RGB {kind}": Kind(f"a.{ending}", put(RGB, kind, **options), RGB)
        for kind, ending, options in (
            ("PNG", "png", {}),
            ("BMP", "bmp", {}),
            ("PPM", "ppm", {}),
            ("TIFF", "tif", {}),
            ("WEBP", "webp", {"lossless": True}),
        )
    }
    jpegs = {
        "JPEG": put(RGB, "JPEG"),
        "JPEG, progressive": put(RGB, "JPEG", progressive=True),
        "JPEG, 4:4:4": put(RGB, "JPEG", subsampling=0),
        "JPEG, grey": put(GREY, "JPEG"),
        "JPEG, CMYK": put(Image.merge("CMYK", [Image.fromarray(pixels(i, channels=1)) for i in range(4)]), "JPEG"),
        "MPO": put(LARGE, "MPO", save_all=True, append_images=[LARGE.rotate(90)]),
    }
    found |= {name: Kind("a.JPG", data, by_pillow(data)) for name, data in jpegs.items()}
    alpha = odd.alpha_images()
    bits = GREY.point(lambda v: 255 * (v > 99), "1")
    found |= {
        "grey PNG": Kind("a.png", put(GREY), GREY.convert("RGB")),
        "grey PNG, kept grey": Kind("a.png", put(GREY), GREY, {"color": "gray"}),
        "RGB to grey": Kind("a.png", put(RGB), RGB.convert("L"), {"color": "gray"}),
        "1-bit PNG": Kind("a.png", put(bits), bits.convert("RGB")),
        "1-bit TIFF": Kind("a.tiff", put(bits, "TIFF"), bits.convert("RGB")),
        "2-bit PGM": Kind("a.pgm", b"P5 2 1 3\n\0\3", Image.fromarray(np.array([[0, 255]], np.uint8)).convert("RGB")),
        "RGBA PNG": Kind("a.png", put(alpha["RGBA"]), Image.fromarray(np.asarray(alpha["RGBA"])[..., :3])),
        "RGBA PNG, kept": Kind("a.png", put(alpha["RGBA"]), alpha["RGBA"], {"color": "keep"}),
        "LA PNG": Kind("a.png", put(alpha["LA"]), alpha["LA"].getchannel(0).convert("RGB")),
        "palette PNG": Kind("a.png", put(odd.palette_image()), odd.palette_image().convert("RGB")),
        "palette PNG, transparent": Kind(
            "a.png", put(odd.palette_image(), transparency=3), odd.palette_image().convert("RGB")
        ),
        "palette PNG, to be kept": Kind("a.png", put(odd.palette_image()), "is of mode P, which cannot be kept",
                                        {"color": "keep"}),
        "RGB PNG, a colour transparent": Kind("a.png", put(RGB, transparency=(1, 2, 3)), RGB),
        "GIF": Kind("a.png", put(odd.palette_image(), "GIF"), odd.palette_image().convert("RGB")),
        "GIF, first frame": Kind("a.png", animated("GIF"), FRAMES[0], {"animated": "first"}),
        "a PNG that is called .jpg": Kind("a.jpg", put(RGB), RGB),
        "a name that is no UTF-8": Kind("\udce9.png", put(RGB), RGB),
    }  # fmt: skip
    return found


def turned_images() -> dict[str, Kind]:
    """What EXIF says of the orientation is applied."""
    order = (None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
             Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE,
             Image.Transpose.ROTATE_90)  # fmt: skip
    plain = by_pillow(odd.encoded(RGB, "JPEG"))
    found = {
        f"JPEG, orientation {number}": Kind(
            "a.jpeg", odd.encoded(RGB, "JPEG", exif=odd.exif(number)), plain.transpose(turn)
        )
        for number, turn in enumerate(order[1:], 2)
    }
    rows = b"".join(b"\0" + row.tobytes() for row in pixels(1))
    late = odd.png((12, 10, 8, 2), rows, late=odd.exif(6).tobytes()[6:])
    found["PNG, orientation behind the pixels"] = Kind("a.png", late, RGB.transpose(Image.Transpose.ROTATE_270))
    found["PNG, orientation 77"] = Kind("a.png", odd.encoded(RGB, exif=odd.exif(77)), RGB)
    return found


def deep_images() -> dict[str, Kind]:
    endings = {"PNG": "png", "TIFF": "tif", "PGM": "pgm", "PPM": "ppm"}
    return {
        f"16 bits or more: {name}": Kind(f"a.{endings[name.split()[-1]]}", data, DEEP)
        for name, data in odd.deep_images().items()
    }


def bad_images() -> dict[str, Kind]:
    put = odd.encoded
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(RGB, *profiles, outputMode="LAB")
    hurt = bytearray(put(LARGE))
    hurt[len(hurt) // 2 : len(hurt) // 2 + 64] = bytes(64)
    found = {
        f"{kind} cut short": Kind(f"a.{ending}", put(LARGE, kind)[:-200], CUT)
        for kind, ending in (
            ("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("PPM", "ppm"), ("TIFF", "tif"),
        )
    }  # fmt: skip
    found |= {
        f"{kind} of three frames": Kind(f"a.{ending}", animated(kind), "has 3 frames: use animated='first'")
        for kind, ending in (("GIF", "png"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif"))
    }
    nothing = "no image of a known format"
    return found | {
        "LAB TIFF": Kind("a.tif", put(lab, "TIFF"), "is of mode LAB, for which there is no policy"),
        "PNG, bytes overwritten": Kind("a.png", bytes(hurt), "cannot be decoded"),
        "empty": Kind("a.jpg", b"", r"is empty \(0 bytes\)"),
        "HTML": Kind("a.jpg", b"<html><body>404</body></html>", nothing + r" \(JPEG, PNG.*\); starts with b'<html>"),
        "PostScript": Kind("a.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", nothing),
        "ICO": Kind("a.png", put(RGB, "ICO"), nothing),
        "bomb": Kind("a.png", put(RGB), "more pixels than the limit max_pixels=119", {"max_pixels": 119}),
        "another size": Kind("a.png", put(RGB), r"is 12 x 10|10 x 12|use fit", {"size": (5, 6)}),
    }


def animated(kind: str) -> bytes:
    options = {"lossless": True} if kind == "WEBP" else {}
    return odd.encoded(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:], **options)


def run_images(folder: Path) -> Result:
    """Each image in a folder of its own."""
    result = Result("kinds of images")
    for number, (name, kind) in enumerate(images().items()):
        place = folder / str(number)
        place.mkdir()
        (place / kind.name).write_bytes(kind.data)
        path = folder / f"{number}.h5"
        is_bad = isinstance(kind.expected, str)
        found = _converted(place, path, lambda file: file["images"][0].transpose(1, 2, 0), workers=0, **kind.options)
        expected = kind.expected if is_bad else np.atleast_3d(np.asarray(kind.expected))
        _judge(result, name, found, expected)
    return result


def run_sparse(folder: Path) -> Result:
    """Each matrix in a file of its own."""
    result = Result("kinds of sparse matrices")
    for number, (name, make, expected) in enumerate(good_matrices()):
        place = folder / f"good{number}"
        place.mkdir()
        _judge(result, name, _converted(make(place), folder / f"good{number}.h5", read_matrix, shuffle=False), expected)
    for number, (name, (file_name, data, message)) in enumerate(broken.CASES.items()):
        place = folder / f"bad{number}"
        place.mkdir()
        (place / file_name).write_bytes(data)
        chosen = {"npz": "npz"}.get(file_name[-3:])
        found = _converted(place / file_name, folder / f"bad{number}.h5", read_matrix, format=chosen)
        _judge(result, name, found, message)
    for number, (name, (change, message)) in enumerate(broken.H5AD.items()):
        path = broken.make_h5ad(folder / f"h5ad{number}.h5ad")
        with h5py.File(path, "a") as file:
            change(file)
        _judge(result, f"AnnData: {name}", _converted(path, folder / f"h5ad{number}.h5", read_matrix), message)
    return result


def good_matrices() -> list[tuple[str, Callable[[Path], Path], np.ndarray]]:
    """Name, what writes it into a folder, and the matrix."""
    rng = np.random.default_rng(0)
    where = rng.integers(0, 12, 40), rng.integers(0, 9, 40)
    matrix = scipy.sparse.coo_matrix((rng.integers(1, 20, 40).astype("u1"), where), (12, 9))  # with duplicates
    halves = scipy.sparse.coo_matrix((rng.integers(1, 10, 40) / 2, where), (12, 9))
    found = [
        (f"{name}, {what}", lambda place, write=write, each=each: write(place, each), formats.total(each))
        for name, write in formats.FORMATS.items()
        for what, each in (("counts", matrix), ("halves", halves))
    ]
    single = scipy.sparse.csr_matrix(formats.total(matrix))
    dense = single.toarray()
    found += [
        (
            f"AnnData, {name}",
            lambda place, each=each, packed=packed: write_h5ad(place / "m.h5ad", each, compression=packed),
            dense,
        )
        for name, each, packed in (
            ("CSR", single, None),
            ("CSR, gzip", single, "gzip"),
            ("CSC", single.tocsc(), None),
            ("dense", dense, None),
        )
    ]
    for version in (2, 3):
        found.append(
            (
                f"10x, version {version}",
                lambda place, version=version: write_10x(place / "m.h5", single, version=version),
                dense,
            )
        )
    return found


def read_matrix(file: h5py.File) -> np.ndarray:
    """The matrix by the numbers that rows and columns had in the source, by plain h5py."""
    group = file["X"]
    indices, indptr, data = (group[name][()] for name in ("indices", "indptr", "data"))
    rows, columns = group.attrs["shape"]
    found = scipy.sparse.csr_matrix((data / group.attrs["scale"], indices, indptr), (rows, columns)).toarray()
    ids = [file[f"h5chunk/{name}"][()] if f"h5chunk/{name}" in file else None for name in ("row_ids", "column_ids")]
    for axis, numbers in enumerate(ids):
        if numbers is not None and numbers.dtype.kind in "iu":
            shape = list(found.shape)
            shape[axis] = (12, 9)[axis]
            whole = np.zeros(shape)
            whole[(slice(None),) * axis + (numbers,)] = found
            found = whole
    return found


def _converted(source: Path, path: Path, read: Callable[[h5py.File], np.ndarray], **options: Any) -> Any:
    """What is read of the converted file, or the message of the error."""
    try:
        h5chunk.convert(source, path, **options)
    except SourceError as error:
        return "nothing may be left" if path.exists() else str(error)
    with h5py.File(path) as file:
        return read(file)


def _judge(result: Result, name: str, found: Any, expected: Any) -> None:
    result.cases += 1
    if isinstance(expected, str):
        result.add("refused by their message")
        if not isinstance(found, str) or not re.search(expected, found, re.DOTALL):
            result.bad.append(f"{name}: must be refused with {expected!r}: {found!r:.300}")
    else:
        result.add("exact")
        if isinstance(found, str) or not np.array_equal(found, expected):
            result.bad.append(f"{name}: other values, or refused: {found!r:.300}")
