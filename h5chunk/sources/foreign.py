"""Say what a source is that cannot be read directly, and how it is converted in Python.

Whatever a program can read becomes an array, a dict of arrays, or a data set: an object with ``len()`` and samples by
index, such as a list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from h5chunk.errors import as_text, printable
from h5chunk.sources.recognise import EXTENSIONS

ANY_WAY = (
    "anything that Python can read is converted as a data set, an object with len(dataset) and dataset[i]: "
    "h5chunk.convert(dataset, path)"
)
AS_PICTURES = (
    "h5chunk.convert(dataset, path), where dataset[i] is an image that Pillow opened; or convert them to PNG or JPEG"
)
OTHER_IMAGES = (
    b".avif", b".avifs", b".heic", b".heif", b".jp2", b".j2k", b".jxl", b".tga", b".ico", b".psd", b".dds", b".exr",
    b".hdr", b".svg", b".eps", b".pcx", b".xcf", b".cr2", b".nef", b".dng", b".arw",
)  # fmt: skip


class Format(NamedTuple):
    """A format that is recognised by names of files."""

    pattern: str  # matches the end of the name of a file, in lower case
    what: str
    way: str


FORMATS = (
    Format(r"-idx\d-ubyte(\.gz)?", "MNIST's idx format", "h5chunk.convert(torchvision.datasets.MNIST(root), path)"),
    Format(
        r"(data|test)_batch(_\d)?(\.bin)?|batches\.meta(\.txt)?",
        "batches of CIFAR",
        "h5chunk.convert(torchvision.datasets.CIFAR10(root), path)",
    ),
    Format(
        r"\.(pt|pth|ckpt|torch)",
        "a file of PyTorch",
        "h5chunk.convert(torch.load(file), path), if it contains a dict of tensors, or a list of samples",
    ),
    Format(
        r"\.(pkl|pickle|p|joblib)(\.gz)?",
        "a pickle of Python, which may run any code",
        "h5chunk.convert(pickle.load(file), path), if you trust it, and it has a dict of arrays or a list of samples",
    ),
    Format(r"\.mat", "a MATLAB file", "h5chunk.convert({'x': scipy.io.loadmat(file)['x']}, path)"),
    Format(
        r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?",
        "records of TensorFlow",
        "h5chunk.convert(list(tfrecord.tfrecord_loader(file, None)), path), with the package tfrecord",
    ),
    Format(r"\.(mdb|lmdb)", "an LMDB database", "h5chunk.convert(dataset, path), if dataset[i] decodes a record"),
    Format(
        r"\.mds(\.zstd)?",
        "shards of MosaicML Streaming",
        "h5chunk.convert(dataset, path), where dataset is a data set of the package streaming",
    ),
    Format(r"\.beton", "a file of FFCV", "h5chunk.convert(dataset, path), with the data set from which it was written"),
    Format(
        r"\.arrow|dataset_info\.json",
        "a data set that Hugging Face saved",
        "h5chunk.convert(datasets.load_from_disk(folder), path)",
    ),
    Format(
        r"\.(jsonl?|ndjson)(\.(gz|bz2))?",
        "JSON",
        'if each line is an object, convert the .parquet that this command writes: python -c "from pyarrow import '
        "json, parquet; parquet.write_table(json.read_json('FILE'), 'NEW.parquet')\"; if it lists images, pass it as "
        "the manifest of their folder (--manifest)",
    ),
    Format(
        r"\.(dcm|dicom)",
        "DICOM",
        "h5chunk.convert([pydicom.dcmread(file).pixel_array for file in files], path), which keeps all bits",
    ),
    Format(
        r"\.(nii|nii\.gz|img\.gz|mgz)",
        "NIfTI volumes",
        "h5chunk.convert([nibabel.load(file).get_fdata(dtype='float32') for file in files], path)",
    ),
    Format(r"\.(nrrd|mha|mhd)", "medical volumes", "h5chunk.convert(dataset, path), if dataset[i] reads an array"),
    Format(
        r"\.np[yz]", "a file of NumPy for each sample", "h5chunk.convert([numpy.load(file) for file in files], path)"
    ),
    Format(
        r"\.(7z|rar|zst|lz4|cab)", "a packed archive", "unpack it first, and convert the folder; in Python, " + ANY_WAY
    ),
    Format(
        r"\.(tar\.(gz|bz2|xz|zst)|tgz|zip|7z|rar|cab)",
        "an archive that is packed",
        "unpack it first, and convert the folder",
    ),
    Format(
        r"\.tar",
        "shards of a WebDataset",
        "h5chunk.convert(list(webdataset.WebDataset(files).decode('pil').to_tuple('jpg', 'cls')), path), or convert "
        "each .tar alone, or unpack them into one folder",
    ),
    Format(
        "|".join(re.escape(suffix.decode()) for suffix in OTHER_IMAGES),
        "images in a format that is not read",
        AS_PICTURES,
    ),
    Format(
        r"\.(xls[xmb]?|ods)",
        "an Excel table",
        'write it as .csv, with the packages pandas and openpyxl: python -c "import pandas; '
        "pandas.read_excel('FILE').to_csv('NEW.csv', index=False)\"",
    ),
    Format(
        r"\.(mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg|safetensors|feather|msgpack|bin|dat)",
        "a file of another format",
        "h5chunk.convert(dataset, path), if dataset[i] returns its arrays",
    ),
)


MAGICS = (  # (position, bytes, a name of such a file)
    (128, b"DICM", "1.dcm"),
    (344, b"n+1\0", "1.nii"),
    (0, b"\0\0\x08\x01", "x-idx1-ubyte"),
    (0, b"\0\0\x08\x03", "x-idx3-ubyte"),
    (4, b"ftypavif", "1.avif"),
    (4, b"ftypheic", "1.heic"),
    (0, b"\0\0\0\x0cjP  ", "1.jp2"),
)


def format_of(name: bytes | str) -> Format | None:
    """Return the format that the name of a file has; None if it is unknown."""
    text = as_text(name).lower()
    return next((format for format in FORMATS if re.search(rf"({format.pattern})$", text)), None)


def way_for(names: Iterable[bytes | str]) -> str:
    """Say what files with these names are, and how they are converted. Returns a general way if they are unknown.

    The result follows a colon.
    """
    found = next((found for found in map(format_of, names) if found is not None), None)
    return ANY_WAY if found is None else f"for {found.what}, {_in_python(found)}"


def describe(source: Any, head: bytes) -> str:
    """Say what a file is, and how it is converted in Python. Returns "" if its name and first bytes do not tell."""
    name = os.path.basename(os.fspath(source))
    if os.fsencode(name).lower().endswith(EXTENSIONS):
        return (
            "is a single image: pass the folder that contains it; in Python, a list of images is a data set: "
            "h5chunk.convert([PIL.Image.open(file)], path)"
        )
    known = next((format_of(like) for at, magic, like in MAGICS if head[at:].startswith(magic)), None)
    found = format_of(name) or known
    return "" if found is None else f"is {found.what}, which is not read directly: {_in_python(found, source)}"


def _in_python(found: Format, source: Any = "FILE") -> str:
    way = found.way.replace("'FILE'", repr(printable(source)))
    return f"in Python, {way}" if way.startswith("h5chunk") else way
