"""Types of datasets: elements are decoded from their stored bytes to the values that h5py reads."""

import h5py
import numpy as np
import pytest
from h5py import h5t

from h5chunk.errors import FieldError, UnsupportedError
from h5chunk.store.hdf5.types import element_of, find_member, members_of, type_text

TABLE = np.dtype(
    [("pt", ">f4"), ("name", "S5"), ("p4", "<f8", (2, 3)), ("z", [("k", "<u2"), ("c", "<c8")]), ("ok", "?")]
)
VALUES = np.frombuffer(np.random.default_rng(0).bytes(24 * 2000), np.uint8)


def numbers(dtype):
    dtype = np.dtype(dtype)
    return VALUES[: dtype.itemsize * 24].view(dtype)


def raw_bytes(dataset):
    """Return the bytes of a dataset, as they are stored."""
    kind = dataset.id.get_type()
    raw = np.zeros(dataset.shape, f"V{kind.get_size()}")
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, kind)
    return raw.reshape(-1).view(np.uint8)


def low_level(file, name, kind, values):
    dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((len(values),))))
    dataset[:] = values
    return dataset


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "types.h5", "w") as file:
        yield file


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<u2", ">i4", "<i8", ">u8", "<f2", ">f2", ">f4", "<f8", ">f8", "<c8", ">c16", "S3", "<f16"]
)
def test_numbers(file, dtype):
    values = numbers(dtype) if dtype != "?" else numbers("u1") > 99
    file["x"] = values
    element = element_of(file["x"], "x")
    got = element.convert(raw_bytes(file["x"]))
    assert got.dtype == values.dtype.newbyteorder("=") == element.dtype and element.shape == ()
    assert got.astype(values.dtype).tobytes() == values.tobytes()
    assert element.is_plain is not dtype.startswith(">")


def test_members(file):
    table = np.zeros(24, TABLE)
    for name in ("pt", "name", "p4"):
        table[name] = numbers(TABLE[name].base).reshape(24, *[1] * len(TABLE[name].shape))
    table["z"]["k"], table["z"]["c"], table["ok"] = numbers("<u2"), numbers("<c8"), numbers("u1") > 99
    file["x"] = table
    kind, raw = file["x"].id.get_type(), raw_bytes(file["x"])
    assert members_of(kind) == [("pt",), ("name",), ("p4",), ("z", "k"), ("z", "c"), ("ok",)]
    for member in members_of(kind):
        expected = table
        for name in member:
            expected = expected[name]
        element = element_of(kind, "x", member)
        assert (element.dtype, element.shape, element.is_plain) == (element.dtype, expected.shape[1:], False)
        np.testing.assert_array_equal(element.convert(raw), expected)
    assert find_member(kind, "z.c") == find_member(kind, "z/c") == ("z", "c")
    assert find_member(kind, "z.d") is None
    with pytest.raises(UnsupportedError, match=r"table with the columns pt, name, p4, z, ok.*'NAME/pt'"):
        element_of(kind, "x")
    with pytest.raises(FieldError, match="no member 'y'; its members are k, c"):
        element_of(kind, "x", ("z", "y"))


def test_tables_in_array_types(file):
    table = np.zeros(24, [("p4", [("x", "<f4"), ("y", ">i2")], (3,))])
    table["p4"]["y"] = np.arange(72).reshape(24, 3)
    file["x"] = table
    element = element_of(file["x"], "x", ("p4", "y"))
    np.testing.assert_array_equal(element.convert(raw_bytes(file["x"])), table["p4"]["y"])
    file["y"] = np.zeros(0)
    low = low_level(file, "z", h5t.array_create(h5t.IEEE_F32BE, (2, 2)), np.zeros((5, 2, 2)))
    assert (element_of(low, "z").shape, element_of(low, "z").convert(raw_bytes(low)).shape) == ((2, 2), (5, 2, 2))


@pytest.mark.parametrize("names", [("real", "imag"), ("r", "i"), ("Re", "Im")])
@pytest.mark.parametrize("part", ["<f2", ">f2", "<f4", ">f8"])
def test_complex_names(file, names, part):
    values = np.zeros(24, [(name, part) for name in names])
    for name in names:
        values[name] = np.nan_to_num(numbers(part))
    file["x"] = values
    element = element_of(file["x"], "x")
    got = element.convert(raw_bytes(file["x"]))
    assert got.dtype == ("c16" if part == ">f8" else "c8")
    np.testing.assert_array_equal(got.real, values[names[0]])
    np.testing.assert_array_equal(got.imag, values[names[1]])
    real = element_of(file["x"], "x", names[:1])  # the parts are still members
    np.testing.assert_array_equal(real.convert(raw_bytes(file["x"])), values[names[0]])


@pytest.mark.parametrize(("padding", "count"), [(h5t.STR_NULLTERM, 3), (h5t.STR_SPACEPAD, 4), (h5t.STR_NULLPAD, 4)])
def test_padded_strings(file, padding, count):
    kind = h5t.C_S1.copy()
    kind.set_size(4)
    kind.set_strpad(padding)
    stored = np.array([b"ab\0c", b"ab  ", b" ab ", b"    ", b"abcd", b"\0bcd", b"a\0  "], "S4")
    dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((7,))))
    dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, stored, kind)
    got = element_of(dataset, "x").convert(raw_bytes(dataset))
    assert got.tobytes() == dataset[()].tobytes()


def test_unusual_numbers_are_converted_by_hdf5(file):
    kind = h5t.STD_U16LE.copy()
    kind.set_precision(12)
    kind.set_offset(3)
    values = np.arange(24) * 170
    dataset = low_level(file, "x", kind, values)
    element = element_of(dataset, "x")
    assert element.dtype == np.uint16
    np.testing.assert_array_equal(element.convert(raw_bytes(dataset)), values)
    wide = h5t.IEEE_F32LE.copy()
    wide.set_fields(23, 16, 7, 0, 16)  # 7 bits of exponent
    wide.set_precision(24)
    wide.set_ebias(63)
    dataset = low_level(file, "y", wide, np.arange(24) / 8)
    np.testing.assert_array_equal(element_of(dataset, "y").convert(raw_bytes(dataset)), np.arange(24) / 8)


@pytest.mark.parametrize("order", [h5t.ORDER_LE, h5t.ORDER_BE])
def test_narrow_floats(file, order):
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_precision(16)
    kind.set_size(2)
    kind.set_ebias(127)
    kind.set_order(order)
    values = np.arange(-12, 12, dtype=np.float32) / 4
    dataset = low_level(file, "x", kind, values)
    element = element_of(dataset, "x")
    bits = element.convert(raw_bytes(dataset))["bfloat16"]
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), values)
    assert element.is_plain is (order == h5t.ORDER_LE)


def test_enumerations(file):
    kind = h5py.enum_dtype({"CAT": 0, "DOG": 7}, "i2")
    file.create_dataset("x", data=[0, 7, 3], dtype=kind)
    element = element_of(file["x"], "x")
    assert (element.names, element.dtype, element.is_plain) == ({0: "CAT", 7: "DOG"}, np.int16, True)
    assert element.dtype.metadata is None
    assert element.convert(raw_bytes(file["x"])).tolist() == [0, 7, 3]
    assert type_text(file["x"].id.get_type()) == "int16 with the names CAT, DOG"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(3, "V5"), r"opaque bytes .*view\('u1'\)"),
        (np.zeros(3, h5py.ref_dtype), "references to other objects"),
        (np.zeros(3, "M8[s]").astype(h5py.opaque_dtype("M8[s]")), r"astype\('i8'\)"),
        (np.zeros(3, np.clongdouble), r"astype\('c16'\)"),
    ],
)
def test_types_that_are_refused(file, values, message):
    file.create_dataset("x", values.shape, values.dtype)
    with pytest.raises(UnsupportedError, match=message):
        element_of(file["x"], "x")


def test_deeply_nested_types_are_refused(file):
    dtype = np.dtype("<f4")
    for _ in range(20):
        dtype = np.dtype([("x", dtype)])
    file["x"] = np.zeros(3, dtype)
    kind = file["x"].id.get_type()
    assert type_text(kind).endswith("..." + ")" * 7)
    with pytest.raises(UnsupportedError, match="nested in more than 8 levels"):
        element_of(kind, "x", ("x",) * 20)
    with pytest.raises(UnsupportedError, match="nested in more than 8 levels"):
        element_of(kind, "x", members_of(kind)[0])
