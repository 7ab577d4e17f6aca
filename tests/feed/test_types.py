"""Types of HDF5 in data sets and loaders: all layouts have the values that h5py reads."""

import h5py
import numpy as np
import pytest
import torch
from h5py import h5t
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FieldError, OptionError
from h5chunk.transforms import ToDtype

pytestmark = pytest.mark.filterwarnings("ignore:.*is read through h5py")

N = 40
EVENTS = np.zeros(N, [("pt", ">f4"), ("label", "<i8"), ("p4", "<f4", (4,)), ("z", [("k", "<i2"), ("c", "<c8")])])
EVENTS["pt"], EVENTS["label"], EVENTS["p4"] = np.arange(N) / 4, np.arange(N) % 3, np.arange(N * 4).reshape(N, 4)
EVENTS["z"]["k"], EVENTS["z"]["c"] = -np.arange(N), np.arange(N) * (1 - 2j)
ARRAY = np.arange(N * 6).reshape(N, 3, 2)
VALUES = {
    "complex": (ARRAY * (1 + 0.5j)).astype("c8"),
    "big": (ARRAY * 1j).astype(">c16"),
    "matlab": (ARRAY * (2 - 1j)).astype("c16").view([("real", "f8"), ("imag", "f8")]),
    "half": ARRAY.astype("f2"),
    "bool": ARRAY % 3 == 0,
    "numbers": ARRAY.astype(">i4"),
    "events": EVENTS,
}
LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "gzip": {"chunks": True, "compression": "gzip", "shuffle": True},
    "compact": {},
    "unwritten": {"chunks": True},
}


def make(path, name, values, layout):
    """Write one dataset, of which the last quarter of the rows is not written if ``layout`` is unwritten."""
    values = values[:10] if layout == "compact" else values
    options = LAYOUTS[layout]
    if options:
        options = {**options, "chunks": (max(1, len(values) // 4), *values.shape[1:])}
    with h5py.File(path, "w") as file:
        if layout == "compact":
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple(values.shape)
            kind = h5t.py_create(values.dtype, logical=True)
            h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, properties))[...] = values
        else:
            dataset = file.create_dataset(name, values.shape, values.dtype, **options)
            count = len(values) * 3 // 4 if layout == "unwritten" else len(values)
            dataset[:count] = values[:count]
        return file[name][()]


def native(values):
    """Return the values in the dtype of batches."""
    if values.dtype.names and "real" in values.dtype.names:
        return values.view("c16")
    return values.astype(values.dtype.newbyteorder("="))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VALUES)
def test_every_type_in_every_layout(tmp_path, name, layout):
    stored = make(tmp_path / "a.h5", name, VALUES[name], layout)
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=[name])
    if name == "events":
        columns = {"pt": stored["pt"], "label": stored["label"], "p4": stored["p4"]}
        columns |= {"z/k": stored["z"]["k"], "z/c": stored["z"]["c"]}
        expected = {f"events/{column}": native(values) for column, values in columns.items()}
    else:
        expected = {name: native(stored)}
    assert dataset.fields == tuple(expected)
    count = len(stored)
    singly = [dataset[number] for number in range(count)]
    batches = {
        "list": dataset[list(range(count))],
        "sample": [torch.stack(list(column)) for column in zip(*singly, strict=True)],
        "loader": next(iter(h5chunk.ChunkLoader(dataset, count, shuffle=False))),
        "torch": next(iter(DataLoader(dataset, count))),
    }
    for way, batch in batches.items():
        for (field, values), tensor in zip(expected.items(), batch, strict=True):
            assert tensor.numpy().dtype == values.dtype, (way, field)
            np.testing.assert_array_equal(tensor.numpy(), values, err_msg=f"{way} {field}")
    for field, values in expected.items():
        if values.ndim == 1:
            np.testing.assert_array_equal(dataset.values(field), values)
    windows = h5chunk.Windows(tmp_path / "a.h5", {field: field for field in expected}, 2)
    for tensor, values in zip(windows[3], expected.values(), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), values[3:5])


def test_members_have_several_names(tmp_path):
    path = tmp_path / "a.h5"
    make(path, "group/events", EVENTS, "gzip")
    for name in ("group/events/z/k", "group/events/z.k", "group/events.z.k"):
        dataset = h5chunk.ChunkDataset(path, fields={"k": name, "p4": "group/events/p4"})
        k, p4 = dataset[[5, 3]]
        assert (k.tolist(), p4.tolist()) == ([-5, -3], EVENTS["p4"][[5, 3]].tolist())
        assert dataset.values(name).tolist() == EVENTS["z"]["k"].tolist()
    with pytest.raises(FieldError, match="has no dataset 'group/events/y'"):
        h5chunk.ChunkDataset(path, fields=["group/events/y"])
    with pytest.raises(OptionError, match="fields has 'e' and its column 'e/pt'"):
        h5chunk.ChunkDataset(path, fields={"e": "group/events", "e/pt": "group/events/label"})


def test_columns_beside_others_that_cannot_be_read(tmp_path):
    kind = np.dtype([("name", h5py.string_dtype()), ("x", "f4"), ("link", h5py.ref_dtype)])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        table = np.zeros(N, kind)
        table["name"], table["x"] = "text", np.arange(N)
        table["link"] = [file.ref] * N
        file["t"] = table
    assert h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["t/x"]).values("t/x").tolist() == list(range(N))
    with pytest.raises(FieldError, match="'t/name' has strings of variable length in a table"):
        h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["t"])


@pytest.mark.parametrize("options", [{}, {"chunks": (5,), "compression": "gzip"}])
def test_columns_beside_arrays_of_strings_of_variable_length(tmp_path, options):
    kind = np.dtype([("number", "<i4"), ("names", h5py.string_dtype(), (3,)), ("x", "<f8")])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        table = np.zeros(N, kind)
        table["number"], table["x"], table["names"] = np.arange(N), np.arange(N) / 2, "text"
        file.create_dataset("t", data=table, **options)
        file.create_dataset("samples/0/t", data=table, **options)
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["t/number", "t/x"])
    numbers, x = dataset[list(range(N))]
    assert numbers.tolist() == list(range(N)) and x.tolist() == [number / 2 for number in range(N)]
    assert h5chunk.Keyed(tmp_path / "a.h5", "samples/*/t/x")[[0]][0].tolist() == [x.tolist()]


def test_enumerations_have_names(tmp_path):
    for number, names in enumerate(({"CAT": 0, "DOG": 2}, {"CAT": 0, "COW": 2}, {"CAT": -1, "DOG": 2})):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("species", data=np.arange(N) % 3, dtype=h5py.enum_dtype(names, "i1"))
    dataset = h5chunk.ChunkDataset(tmp_path / "0.h5", fields=["species"])
    assert dataset.categories("species").tolist() == ["CAT", "", "DOG"]
    assert dataset.classes == ("CAT", "", "DOG")
    assert dataset[5][0] == 2
    with pytest.raises(FieldError, match=r"the enumeration 'species' has the names CAT, COW, but in .* CAT, DOG"):
        h5chunk.ChunkDataset([tmp_path / "0.h5", tmp_path / "1.h5"], fields=["species"])
    with pytest.raises(FieldError, match=r"names for values from -1 to 2.*check_enum_dtype"):
        h5chunk.ChunkDataset(tmp_path / "2.h5", fields=["species"]).categories("species")


NARROW = {  # the fields of HDF5's floats: sign, exponent, mantissa; and size and exponent bias
    torch.bfloat16: ((15, 7, 8, 0, 7), 2, 127),
    torch.float8_e4m3fn: ((7, 3, 4, 0, 3), 1, 7),
    torch.float8_e5m2: ((7, 2, 5, 0, 2), 1, 15),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats(tmp_path, dtype):
    fields, size, bias = NARROW[dtype]
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(*fields)
    kind.set_precision(8 * size)
    kind.set_size(size)
    kind.set_ebias(bias)
    values = (np.arange(N * 2, dtype="f4").reshape(N, 2) % 8) / 4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(values.shape)))
        dataset[...] = values
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x"])
    for batch in (dataset[list(range(N))], next(iter(h5chunk.ChunkLoader(dataset, N, shuffle=False)))):
        assert batch[0].dtype == dtype
        assert batch[0].float().tolist() == values.tolist()
    assert next(iter(DataLoader(dataset, 8)))[0].dtype == dtype


def test_windows_name_columns(tmp_path):
    make(tmp_path / "a.h5", "events", EVENTS, "contiguous")
    with pytest.raises(
        FieldError, match="'events' is a table with the columns pt, label, p4, z/k, z/c: name the columns"
    ):
        h5chunk.Windows(tmp_path / "a.h5", {"e": "events"}, 2)


TEXTS = [f"caption {number} é" * (number % 5) for number in range(N)]


@pytest.mark.parametrize("options", [{}, {"chunks": (7,)}, {"chunks": (7,), "compression": "gzip"}], ids=str)
def test_strings_of_variable_length(tmp_path, options):
    for name, texts in (("a", TEXTS), ("b", ["short"] * 9)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(len(texts))
            file.create_dataset("caption", data=texts, dtype=h5py.string_dtype(), **options)
            file.create_dataset("pairs", data=[[text, "x"] for text in texts], dtype=h5py.string_dtype())
            file.create_dataset("unwritten", shape=(len(texts),), dtype=h5py.string_dtype(), chunks=(7,))
            file["unwritten"][:2] = "y"
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x", "caption", "unwritten", "pairs"])
    assert dataset[9][1:] == (TEXTS[9], "", [TEXTS[9], "x"])
    assert [*dataset[[3, 1, 3]][1]] == [TEXTS[3], TEXTS[1], TEXTS[3]]
    assert dataset.values("caption").tolist() == TEXTS
    some = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x", "caption"])
    numbers, texts = next(iter(DataLoader(some, 8, shuffle=True)))
    assert [*texts] == [TEXTS[number] for number in numbers.tolist()]
    both = h5chunk.ChunkDataset([tmp_path / "b.h5", tmp_path / "a.h5"], fields=["caption"])
    assert both.values("caption").tolist() == ["short"] * 9 + TEXTS
    with pytest.raises(FieldError, match="'caption' has strings, which cannot be on a device"):
        h5chunk.ChunkLoader(some, 8)
    assert next(iter(DataLoader(some, 8, num_workers=2)))[1][3] == TEXTS[3]


def test_strings_that_are_too_long(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = ["x" * 70000, "y"]
    with pytest.raises(FieldError, match=r"has a string of 70000 bytes, but strings may have at most 65536.*'U1000'"):
        h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["text"])


def test_convert_of_python_strings_and_info_of_types(tmp_path):
    words = np.array([*TEXTS[:-1], b"bytes"], object)
    h5chunk.convert({"x": np.arange(N * 2.0).reshape(N, 2), "caption": words}, tmp_path / "new.h5", shuffle=False)
    assert h5chunk.ChunkDataset(tmp_path / "new.h5", fields=["caption"]).values("caption").tolist() == [
        *TEXTS[:-1],
        "bytes",
    ]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["events"], file["kspace"], file["caption"] = EVENTS, native(VALUES["complex"]), TEXTS
    text = str(h5chunk.info(tmp_path / "a.h5", show_all=True))
    assert "is a table of pt float32, label int64, p4 (float32 x 4), z (table of k int16, c complex64)" in text
    assert "ChunkDataset(path, fields=['events/pt']) reads a column" in text
    assert "usable if named (is a table of" in str(h5chunk.info(tmp_path / "a.h5"))
    assert "kspace  complex64 40 x 3 x 2" in text
    assert "caption" in text and "name it in fields to read them as str" in text


def test_transforms_refuse_types_that_they_cannot_use(tmp_path):
    values = np.arange(4 * 512.0).reshape(4, 8, 8, 8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values * 1j
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x"])
    with pytest.raises(OptionError, match=r"'x', which is complex: put a function.*torch.abs"):
        dataset.with_transforms([ToDtype(torch.float32)])
    assert dataset.with_transforms([torch.abs])[1][0].tolist() == values[1].tolist()


def volumes(rng):
    """Volumes of all types, as they are stored, and as they should be read."""
    numbers = rng.integers(-9, 9, (9, 10, 11)).astype("f4")
    table = np.zeros(numbers.shape, [("a", ">i2"), ("b", "<f4", (2,)), ("c", [("d", "<c8")])])
    table["a"], table["b"], table["c"]["d"] = numbers, numbers[..., None] + [0, 1], numbers * 1j
    return {
        "big": (numbers.astype(">f4"), numbers),
        "matlab": ((numbers * 1j).astype("c16").view([("real", "f8"), ("imag", "f8")]), (numbers * 1j).astype("c16")),
        "flags": (numbers > 0, numbers > 0),
        "table.a": (table, numbers.astype("i2")),
        "table/b": (table, table["b"]),
        "table/c.d": (table, numbers * np.complex64(1j)),
    }


@pytest.mark.parametrize("layout", ["contiguous", "chunked", "gzip", "unwritten"])
def test_patches_of_all_types(tmp_path, layout):
    options = {**LAYOUTS[layout], "chunks": (4, 10, 3)} if LAYOUTS[layout] else {}
    expected = {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for volume in range(2):
            for name, (stored, read) in volumes(np.random.default_rng(volume)).items():
                path = f"{volume}/{name.partition('.')[0].partition('/')[0]}"
                if path not in file:
                    dataset = file.create_dataset(path, stored.shape, stored.dtype, **options)
                    dataset[: 4 if layout == "unwritten" else None] = stored[: 4 if layout == "unwritten" else None]
                expected[name, volume] = read.copy()
                if layout == "unwritten":
                    expected[name, volume][4:] = 0
    names = sorted({name for name, _ in expected})
    fields, channels = {name: f"*/{name}" for name in names}, dict.fromkeys(names, "last")
    patches = h5chunk.Patches(
        tmp_path / "a.h5", fields, (3, 4, 5), channels=channels, padding="edge", halo=1, positions=True, seed=1
    )
    with h5chunk.ChunkLoader(patches, 8) as loader:
        batches = [*loader, [torch.stack([*own]) for own in zip(*(patches[i] for i in range(9)), strict=True)]]
    for *batch, positions in batches:
        for name, tensor in zip(names, batch, strict=True):
            for patch, (volume, *start) in zip(tensor.numpy(), positions.tolist(), strict=True):
                whole = expected[name, volume]
                axes = [np.clip(np.arange(at - 1, at + size + 1), 0, side - 1)
                        for at, size, side in zip(start, (3, 4, 5), whole.shape, strict=False)]  # fmt: skip
                assert patch.dtype == whole.dtype
                np.testing.assert_array_equal(patch, whole[np.ix_(*axes)], err_msg=name)
    weighted = h5chunk.Patches(tmp_path / "a.h5", fields, (1, 1, 1), channels=channels, weights="*/flags")
    with h5chunk.ChunkLoader(weighted, 64) as loader:
        flags = torch.cat([batch[names.index("flags")] for batch in loader])
    assert flags.all()
    with pytest.raises(FieldError, match=r"no dataset matches '\*/table\.x'"):
        h5chunk.Patches(tmp_path / "a.h5", {"x": "*/table.x"}, (3, 4, 5))


def bfloat16():
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_precision(16)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def test_patches_of_bfloat16(tmp_path):
    values = np.arange(12 * 13, dtype="f4").reshape(12, 13) % 8 / 4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", bfloat16(), h5py.h5s.create_simple(values.shape)))
        dataset[...] = values
    patches = h5chunk.Patches(tmp_path / "a.h5", ["x"], (4, 4), halo=2, padding=1.5, weights="x", positions=True)
    padded = np.pad(values, 2, constant_values=1.5)
    with h5chunk.ChunkLoader(patches, 4) as loader:
        for batch, positions in loader:
            assert batch.dtype == torch.bfloat16
            for patch, (_, y, x) in zip(batch.float().tolist(), positions.tolist(), strict=True):
                assert patch == padded[y : y + 8, x : x + 8].tolist()


def test_complex_samples_of_groups(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(9):
            file[f"s{number}/plain"] = np.full((4, 2), number * (1 + 1j), "c8")
            file.create_dataset(
                f"s{number}/coded", data=np.full((4, 2), number * 1j), chunks=(4, 2), compression="gzip"
            )
            file[f"s{number}/ragged"] = np.full(number + 1, number * 1j, ">c8")
    keyed = h5chunk.Keyed(tmp_path / "a.h5", {name: f"*/{name}" for name in ("plain", "coded", "ragged")})
    plain, coded, (ragged, _) = keyed[3]
    assert plain.dtype == torch.complex64 and bool((plain == 3 + 3j).all())
    assert bool((coded == 3j).all()) and ragged.tolist() == [3j] * 4


KEYED = {
    "table.pt": EVENTS[:5],
    "table/p4": EVENTS[:5],
    "table/z.c": EVENTS[:5],
    "matlab": VALUES["matlab"][:3],
    "big": VALUES["numbers"][:3],
    "flags": VALUES["bool"][:3],
}


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_of_groups_of_all_types(tmp_path, layout, is_ragged):
    stored = {name.partition(".")[0].partition("/")[0]: values for name, values in KEYED.items()}
    kind = h5py.enum_dtype({"CAT": 0, "DOG": 2}, "i2")
    for number in range(12):
        for name, values in stored.items():
            own = np.roll(values[: 1 + number % 3] if is_ragged else values, number)
            make(tmp_path / "part.h5", name, own, layout)
            with h5py.File(tmp_path / "a.h5", "a") as file, h5py.File(tmp_path / "part.h5") as part:
                part.copy(name, file, f"s{number:02}/{name}")
        with h5py.File(tmp_path / "a.h5", "a") as file:
            group = file[f"s{number:02}"]
            group.create_dataset("animal", data=number % 2 * 2, dtype=kind)
            group["scalar"] = np.array(number / 4, ">f8")
            group["code"], group["title"] = np.bytes_(f"n{number}"), f"title é {number}" * (number % 4)
            h5py.Dataset(h5py.h5d.create(group.id, b"brain", bfloat16(), h5py.h5s.create_simple((2,))))[:] = number / 2
    names = ["table/p4"] if is_ragged else list(KEYED)
    fields = {name: f"*/{name}" for name in (*names, "animal", "scalar", "code", "title", "brain")}
    for _ in range(2):  # the index is made, and then read
        keyed = h5chunk.Keyed(tmp_path / "a.h5", fields)
        found = {}
        for number in (7, 2, 11):
            values = list(keyed[number])
            if is_ragged:
                values[0], length = values[0]
                assert length == 1 + number % 3
            found[number] = dict(zip(fields, values, strict=True))
        with h5py.File(tmp_path / "a.h5") as file:
            for number, sample in found.items():
                for name in names:
                    base, *members = name.replace(".", "/").split("/")
                    expected = file[f"s{number:02}/{base}"][()]
                    for member in members:
                        expected = expected[member]
                    expected = native(np.asarray(expected))
                    assert sample[name].numpy().dtype == expected.dtype, name
                    np.testing.assert_array_equal(sample[name].numpy(), expected, err_msg=name)
                own = number % 2 * 2, number / 4, f"n{number}"
                assert (sample["animal"], sample["scalar"], sample["code"]) == own
                assert sample["title"] == f"title é {number}" * (number % 4)
                assert sample["brain"].dtype == torch.bfloat16 and sample["brain"].tolist() == [number / 2] * 2
    assert keyed.categories("animal").tolist() == ["CAT", "", "DOG"]
    assert keyed.values("title")[3] == "title é 3" * 3
    numbers = {name: path for name, path in fields.items() if name not in ("code", "title")}
    with h5chunk.ChunkLoader(h5chunk.Keyed(tmp_path / "a.h5", numbers), 5, shuffle=False) as loader:
        for batch, start in zip(loader, (0, 5, 10), strict=True):
            assert batch[-1].float().tolist() == [[number / 2] * 2 for number in range(start, min(start + 5, 12))]


def test_keyed_strings_and_tables_that_cannot_be_fields(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(3):
            file[f"s{number}/table"], file[f"s{number}/x"] = EVENTS[:4], number
            file[f"s{number}/texts"], file[f"s{number}/text"] = ["a", "b"], "x" * 70000 if number == 2 else "x"
            file[f"s{number}/codes"] = np.array([b"ab"] * (number + 2))
    for name, problem in {
        "table": "is a table with the columns pt, label, p4, z.*name them, such as",
        "texts": "'texts' has strings of variable length.*or leave the field out",
        "text": "string 2 has 70000 bytes, but the limit is 65536; or leave the field out",
        "codes": "has strings, whose number differs between samples",
    }.items():
        with pytest.raises(FieldError, match=problem):
            h5chunk.Keyed(tmp_path / "a.h5", ["*/x", f"*/{name}"])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["s1/text"] = "x"
    with pytest.raises(FieldError, match="has only strings: name at least one dataset of numbers, too"):
        h5chunk.Keyed(tmp_path / "b.h5", "*/text")
