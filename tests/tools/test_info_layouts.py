"""Info prints code that loads what the owner of a file wants, for files as others write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.commands import run
from support.encoded import encoded, put
from support.foreign import make_file, values
from support.info_code import printed_code, run_code
from support.matrices import random_matrix, write
from support.matrix_files import write_h5ad
from support.object_server import object_server

import h5chunk

Contents = dict[str, Any]
TEXT = np.array([b"a", b"bc"])[np.arange(30) % 2]
RNG = np.random.default_rng(0)


def fields(**datasets: Any) -> Callable[[Path], Path]:
    """Return a function that writes these datasets, with / for __ in their names; a dict adds attributes."""

    def write_file(path: Path) -> Path:
        with h5py.File(path, "w") as file:
            for name, data in datasets.items():
                put_dataset(file, name.replace("__", "/"), data)
        return path

    return write_file


def put_dataset(file: h5py.File, name: str, data: Any) -> None:
    attributes = {}
    if isinstance(data, dict):
        attributes = {key: value for key, value in data.items() if key != "data"}
        data = data["data"]
    file[name] = data
    file[name].attrs.update(attributes)


def samples(count: int, make: Callable[[int], Contents], first: str = "") -> Callable[[Path], Path]:
    """Return a function that writes a group of datasets per sample."""
    return fields(
        **{f"{first}{number:05}__{name}": data for number in range(count) for name, data in make(number).items()}
    )


def images_in_rows(path: Path, sizes: int = 1, form: str = "vlen") -> Path:
    pictures = [encoded(values((24 + i % sizes, 20, 3), "u1")) for i in range(30)]
    with h5py.File(path, "w") as file:
        put(file, "jpg", pictures, form)
        file["labels"] = np.arange(30) % 5
    return path


def matlab(**datasets: np.ndarray) -> Callable[[Path], Path]:
    """Return a function that writes arrays as MATLAB does: with reversed axes."""
    double = {"MATLAB_class": np.bytes_("double")}
    contents: Contents = {name: {"data": data.T, **double} for name, data in datasets.items()}
    contents["none"] = {"data": np.zeros(2, "u8"), "MATLAB_empty": np.uint8(1), **double}
    contents["title"] = {"data": np.zeros((6, 1), "u2"), "MATLAB_class": np.bytes_("char")}
    contents["#refs#__a"] = np.zeros((30, 1))
    return fields(**contents)


def netcdf(path: Path) -> Path:
    fields(t2m={"data": np.zeros((30, 5, 4), "i2"), "scale_factor": 0.5})(path)
    with h5py.File(path, "a") as file:
        scale = file.create_dataset("station", (30,), ">f4")
        scale.make_scale("This is a netCDF dimension but not a netCDF variable.        30")
        file["time"] = np.arange(30.0)
        file["time"].make_scale("time")
    return path


def pandas_fixed(path: Path) -> Path:
    fields(df__axis0=np.array([b"a", b"b"]), df__axis1=np.arange(30), df__block0_values=np.zeros((30, 2)))(path)
    with h5py.File(path, "a") as file:
        file["df"].attrs["pandas_type"] = "frame"
    return path


def matrix_file(path: Path) -> Path:
    return write(path, random_matrix(30, 20, 3))


def one_vlen(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("tokens", (30,), h5py.vlen_dtype(np.int32))
        for number in range(30):
            rows[number] = np.arange(number % 4 + 1)
        file["label"] = np.arange(30)
    return path


def kept_images(path: Path) -> Path:
    data = [{"images": encoded(values((24 + i % 4, 20, 3), "u1")).tobytes(), "labels": i} for i in range(30)]
    h5chunk.convert(data, path, keep_encoded=True, workers=0)
    return path


def video(number: int) -> Contents:
    return {"frames": np.zeros((4 + number % 3, 6, 6), "u1"), "label": number % 7}


IMAGES = values((30, 3, 8, 8), "u1")
# how to write a file; the names of the fields, in their order; the shape of the first field of a sample, or None for
# fields of several lengths
LAYOUTS: dict[str, tuple[Callable[[Path], Path], str, tuple[int, ...] | None]] = {
    "images": (fields(images=IMAGES, labels=np.arange(30)), "images labels", (3, 8, 8)),
    "a label": (fields(images=IMAGES, label=np.arange(30), names=TEXT), "images label", (3, 8, 8)),
    "masks, and labels of another length": (
        fields(images=IMAGES, mask=np.zeros((30, 8, 8), bool), labels=np.arange(9)),
        "images mask",
        (3, 8, 8),
    ),
    "labels of text": (fields(images=values((30, 8), "u1"), labels=TEXT), "images", (8,)),
    "labels of another length": (fields(images=values((30, 8), "u1"), labels=np.arange(9)), "images", (8,)),
    "columns": (fields(b=np.arange(30.0), a=np.arange(30), c=TEXT), "a b", ()),
    "groups": (fields(train__x=values((30, 5), "f4"), test__x=values((80, 5), "f4")), "train/x", (5,)),
    "a longer test set": (
        fields(
            x_train=values((30, 5), "f4"), y_train=np.arange(30), x_test=values((80, 5), "f4"), y_test=np.arange(80)
        ),
        "x_train y_train",
        (5,),
    ),
    "large numbers": (fields(z=values((40, 5), "f16"), x=values((30, 5), ">f4")), "x", (5,)),
    "complex": (fields(z=np.zeros((40, 5), complex), x=np.arange(30)), "z", (5,)),
    'a quote"': (fields(**{"x\"'y": np.arange(30)}), "x\"'y", ()),
    "anndata": (lambda path: write_h5ad(path, random_matrix(30, 20, 3).astype(np.float32)), "X", (20,)),
    "10x": (
        fields(
            matrix__barcodes=np.array([b"a", b"b", b"c"]),
            matrix__data=np.ones(3, "i4"),
            matrix__indices=np.arange(3),
            matrix__indptr=np.arange(4),
            matrix__shape=np.array([5, 3]),
        ),
        "X",
        (5,),
    ),
    "h5chunk matrix": (matrix_file, "X", (20,)),
    "h5chunk images of any size": (kept_images, "images labels", (3, 224, 224)),
    "masks with more bytes": (
        fields(image=values((30, 8, 8, 3), "u1"), segmentation=np.zeros((30, 8, 8), "i8")),
        "image segmentation",
        (8, 8, 3),
    ),
    "normals and points": (
        fields(normal=np.zeros((30, 9, 3)), data=np.zeros((30, 9, 3), "f4"), label=np.zeros((30, 1), "u1")),
        "data normal label",
        (9, 3),
    ),
    "labels in large chunks": (
        lambda path: make_file(
            path,
            frames=(np.zeros((30, 8, 8), "u1"), {"chunks": (5, 8, 8), "compression": "gzip"}),
            labels=(np.arange(30), {"chunks": (8192,), "maxshape": (None,)}),
        ),
        "frames labels",
        (8, 8),
    ),
    "an ordinary name": (fields(rgb=values((30, 8, 8, 3), "u1"), targets=np.zeros((30, 28))), "rgb targets", (8, 8, 3)),
    "tables of strings": (fields(x=values((30, 5), "f4"), names=TEXT), "x", (5,)),
    "a compound table": (
        fields(x=values((30, 5), "f4"), events=np.zeros(30, [("pt", "f4"), ("label", "i4")])),
        "x",
        (5,),
    ),
    "strings of variable length": (fields(x=values((30, 5), "f4"), caption=["a"] * 30), "x", (5,)),
    "arrays of variable length": (one_vlen, "tokens label", None),
    "a group per sample": (
        samples(120, lambda n: {"image": np.zeros((8, 8, 3), "u1"), "label": n % 7}),
        "image label",
        (8, 8, 3),
    ),
    "two fields of several lengths": (
        samples(120, lambda n: {"features": np.zeros((9 + n % 4, 6), "f4"), "boxes": np.zeros((9 + n % 4, 4), "f4")}),
        "features boxes",
        None,
    ),
    "videos and labels": (samples(120, video, "videos__"), "frames label", None),
    "datasets per sample": (samples(120, lambda n: {"": np.zeros((6, 3), "f4")}, "traces__"), "traces", (6, 3)),
    "some samples lack a field": (
        samples(120, lambda n: {"x": np.zeros(9)} | ({"extra": np.zeros(9)} if n % 2 else {})),
        "x",
        (9,),
    ),
    "robomimic": (
        samples(12, lambda n: {"actions": np.zeros((20, 7)), "obs__cam": np.zeros((20, 8, 8, 3), "u1")}, "data__demo_"),
        "cam actions",
        (10, 8, 8, 3),
    ),
    "minari": (
        lambda path: fields(
            **{
                f"episode_{n}__{name}": np.zeros((20 + (name == "observations"), 3))
                for n in range(12)
                for name in ("observations", "actions", "rewards")
            }
        )(path),
        "actions observations rewards",
        (10, 3),
    ),
    "aloha": (
        fields(action=np.zeros((40, 14)), observations__qpos=np.zeros((40, 14)), observations__qvel=np.zeros((40, 14))),
        "action qpos qvel action_is_pad qpos_is_pad qvel_is_pad",
        (100, 14),
    ),
    "flat episodes": (
        fields(pixels=np.zeros((30, 8, 8, 3), "u1"), action=np.zeros((30, 2)), ep_len=np.array([10, 20])),
        "pixels action",
        (4, 8, 8, 3),
    ),
    "makani": (fields(fields=np.zeros((30, 3, 4, 8), "f4")), "fields", (2, 3, 4, 8)),
    "volumes": (
        fields(**{f"v{n}__{name}": np.zeros((40, 48, 50), "u1") for n in range(3) for name in ("label", "raw")}),
        "raw label",
        (40, 40, 40),
    ),
    "matlab rows": (matlab(X=RNG.normal(size=(30, 5)), y=np.zeros((30, 1))), "X y", (5,)),
    "matlab images": (matlab(images=RNG.normal(size=(8, 7, 3, 30)), y=np.zeros((1, 30))), "images y", (3, 7, 8)),
    "matlab images and rows": (matlab(X=RNG.normal(size=(8, 7, 30)), y=np.zeros((30, 1))), "X y", (7, 8)),
    "netcdf": (netcdf, "t2m time", (5, 4)),
    "pandas": (pandas_fixed, "df/block0_values", (2,)),
    "pytables": (
        fields(x=np.zeros((30, 4)), _i_table__c__sorted=np.zeros((30, 99))),
        "x",
        (4,),
    ),
    "a palette": (
        fields(images=IMAGES, palette={"data": np.zeros((256, 3), "u1"), "CLASS": np.bytes_("PALETTE")}),
        "images",
        (3, 8, 8),
    ),
    "JPEG of one size": (images_in_rows, "images labels", (3, 224, 224)),
    "JPEG of several sizes": (lambda path: images_in_rows(path, 7), "images labels", (3, 224, 224)),
    "padded JPEG": (lambda path: images_in_rows(path, 1, "padded"), "images labels", (3, 224, 224)),
    "JPEG as text": (lambda path: images_in_rows(path, 1, "text"), "images labels", (3, 224, 224)),
}


@pytest.mark.filterwarnings("ignore:field 'x' is read through h5py")  # in another byte order
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_printed_code_loads_all_samples(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, names, shape = LAYOUTS[layout]
    path = make(tmp_path / f"{layout}.h5")
    monkeypatch.chdir(tmp_path)
    check_code(path, names, shape)


def check_code(path: Path, names: str, shape: tuple[int, ...] | None, *options: str) -> None:
    """Run the printed code, and check the names of the fields, and the shape of the first field of a sample."""
    scope = run_code(path, *options)
    code = printed_code(path, *options)
    opened = re.search(r"ChunkLoader\((.*?), \d+", code)
    assert opened is not None
    dataset = scope["data"] if "data" in scope else h5chunk.ChunkDataset(eval(opened[1]))
    assert " ".join(dataset.fields) == names, code
    items = [batch[0] for batch in scope["loader"]]
    batches = [item.values if isinstance(item, tuple) else item for item in items]
    assert sum(map(len, batches)) == len(dataset)
    if shape is not None:
        assert tuple(batches[0].shape[1:]) == shape


def rows(count: int = 30) -> Callable[[Path], Path]:
    return fields(rgb=values((count, 8, 8, 3), "u1"), targets=np.zeros((count, 28)))


FOLDERS: dict[str, tuple[list[Callable[[Path], Path]], str, tuple[int, ...] | None]] = {
    "fields of ordinary names": ([rows(), rows(40)], "rgb targets", (8, 8, 3)),
    "images": ([fields(images=IMAGES, labels=np.arange(30))] * 2, "images labels", (3, 8, 8)),
    "a field that some files lack": ([rows(), fields(rgb=values((20, 8, 8, 3), "u1"))], "rgb", (8, 8, 3)),
    "episodes": ([LAYOUTS["aloha"][0]] * 3, LAYOUTS["aloha"][1], (100, 14)),
    "a group per sample": ([LAYOUTS["a group per sample"][0]] * 2, "image label", (8, 8, 3)),
    "volumes": ([LAYOUTS["volumes"][0]] * 2, "raw label", (40, 40, 40)),
    "a file per sample": (
        [fields(image=np.zeros((24, 24, 4)), mask=np.zeros((24, 24, 3), "u1"))] * 8,
        "image mask",
        (24, 24, 4),
    ),
    "fields in separate files": (
        [fields(x=values((30, 8, 8, 3), "u1")), fields(y=np.zeros((30, 1, 1, 1), "u1"))],
        "x y",
        (8, 8, 3),
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("is_pattern", [False, True])
def test_the_printed_code_loads_a_folder_or_pattern(
    kind: str, is_pattern: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers, names, shape = FOLDERS[kind]
    (tmp_path / "set").mkdir()
    for number, make in enumerate(makers):
        make(tmp_path / "set" / f"part_{number}.h5")
    monkeypatch.chdir(tmp_path)
    check_code(Path("set/part_*.h5" if is_pattern else "set"), names, shape)


@pytest.mark.filterwarnings("ignore:field '(view|y)' is read through h5py")
def test_the_code_for_views_and_links_trusts_their_files(tmp_path: Path) -> None:
    rows()(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        view = h5py.VirtualLayout((30, 8, 8, 3), "u1")
        view[:] = h5py.VirtualSource("a.h5", "rgb", (30, 8, 8, 3))
        file.create_virtual_dataset("view", view)
        file["y"] = h5py.ExternalLink("a.h5", "targets")
    assert "import" not in printed_code(tmp_path / "b.h5")
    assert "trusted=True (--trusted)" in str(h5chunk.info(tmp_path / "b.h5"))
    check_code(tmp_path / "b.h5", "view y", (8, 8, 3), "--trusted")


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    weights = fields(model_weights__dense__kernel=np.zeros((30, 5)))(tmp_path / "keras.h5")
    with h5py.File(weights, "a") as file:
        file.attrs["keras_version"] = "2.9.0"
    text = str(h5chunk.info(weights))
    assert "weights of a Keras model, which are not samples" in text and "import" not in text
    text = str(h5chunk.info(LAYOUTS["matlab rows"][0](tmp_path / "a.mat")))
    assert "written by MATLAB" in text and "X is 30 x 5 in MATLAB" in text
    assert "not for training (characters of MATLAB): title" in text


def test_remedies_for_types_that_no_field_has_work(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dates"] = np.arange(6).astype("M8[s]").astype(h5py.opaque_dtype("M8[s]"))
        file["bytes"] = np.ones(6, "S3").view("V3")
        for name, field in {"dates": "dates", "bytes": "bytes"}.items():
            with pytest.raises(h5chunk.FieldError) as error:
                with h5py.File(tmp_path / "b.h5", "w") as copy:
                    file.copy(file[field.partition("/")[0]], copy, field.partition("/")[0])
                h5chunk.ChunkDataset(tmp_path / "b.h5", fields=[field])
            remedy = re.search(r"such as file\['NEW'\] = (.*?)(?:, which| \(h5chunk|$)", str(error.value))
            assert remedy is not None, error.value
            file[f"new_{name}"] = eval(remedy[1], {"np": np, "file": file, "x": file[field.partition("/")[0]]})
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["new_dates", "new_bytes"])
    assert (dataset[1][0], dataset[1][1].tolist()) == (1, [49, 0, 0])


def remedied(path: Path, read: Callable[[], Any]) -> str:
    """Carry out the remedy of the error that ``read`` raises: make the dataset NEW."""
    with pytest.raises(h5chunk.FieldError) as error:
        read()
    message = str(error.value)
    found = re.search(r"(file\['(?:NEW|lengths)'\]) = (.*?\))(?:$| for | \(|;)", message)
    found = found or re.search(r"(file\['NEW'\]) = (file\['.*)$", message)
    assert found is not None, message
    with h5py.File(path, "a") as file:
        exec(f"{found[1]} = {found[2]}", {"np": np, "file": file})
    return message


def test_remedies_for_fields_that_do_not_fit_together_work(tmp_path: Path) -> None:
    path = tmp_path / "jets.h5"
    lengths = np.arange(1, 9)
    fields(pt=np.arange(36.0), eta=-np.arange(36.0), lengths=lengths, label=np.arange(8))(path)
    note, scope = str(h5chunk.info(path)), dict[str, Any](h5chunk=h5chunk)
    exec(note[note.rindex("data = h5chunk.ChunkDataset") :].splitlines()[0], scope)
    assert scope["data"].fields == ("eta", "pt") and scope["data"].sample_lengths.tolist() == lengths.tolist()

    path = tmp_path / "d4rl.h5"
    ends = np.zeros(30, bool)
    ends[[9, 24]] = True
    fields(terminals=ends, observations=np.zeros((30, 3)))(path)
    note = str(h5chunk.info(path))
    assert "note: 'terminals' seems to mark the last rows of episodes" in note
    exec(note[note.index("data = h5chunk.Windows") :].splitlines()[0].replace("16", "4"), scope)
    assert len(scope["data"]) == 7 + 12 + 2
    assert len(h5chunk.Windows(path, {"o": "observations"}, 4, episode_lengths="terminals")) == 7 + 12 + 2

    path = tmp_path / "episode.h5"
    fields(observations=np.arange(6.0), actions=np.arange(5.0), task=3)(path)
    assert len(h5chunk.Windows(path, {"o": "observations", "a": "actions", "t": "task"}, 2)) == 4
    remedied(path, lambda: h5chunk.ChunkDataset(path, fields=["task"]))
    assert h5chunk.ChunkDataset(path, fields=["NEW"])[99][0] == 3

    traces = samples(120, lambda n: {"x": np.zeros(3)}, "data__")(tmp_path / "stead.h5")
    with h5py.File(traces, "a") as file:
        for number in range(120):
            file[f"data/{number:05}"].attrs["p"] = 7.5 if number else ""
    with pytest.raises(h5chunk.FieldError, match=r"an empty string: attributes=\{'p': -1\.0\}"):
        h5chunk.Keyed(traces, "data/*/x", attributes=["p"])
    assert h5chunk.Keyed(traces, "data/*/x", attributes={"p": -1.0}).values("p").tolist()[:2] == [-1.0, 7.5]


def test_fields_in_separate_files_are_named_with_a_way(tmp_path: Path) -> None:
    x, y = (fields(**{name: np.zeros((30, 3))})(tmp_path / f"{name}.h5") for name in "xy")
    for read in (
        lambda: h5chunk.ChunkDataset([x, y], fields=["x", "y"]),
        lambda: h5chunk.ChunkLoader(torch.utils.data.StackDataset([1], [2]), 8),
    ):
        with pytest.raises(
            h5chunk.H5ChunkError, match=r"h5chunk\.ChunkDataset\(\{'x': 'FILE\.h5', 'y': 'OTHER\.h5'\}\)"
        ):
            read()
    assert f'loader = h5chunk.ChunkLoader({{"x": "{x}", "y": "{y}"}}, 256)' in h5chunk.info([x, y]).code


@pytest.mark.parametrize("missing", [[-99], [-99, 40]])
def test_statistics_leave_out_missing_values_and_say_what_is_stored(tmp_path: Path, missing: list[int]) -> None:
    stored = RNG.integers(-99, 50, (30, 5, 4)).astype("i2")
    attributes = {"scale_factor": 0.5, "add_offset": 280.0, "_FillValue": np.array([-99], "i2")}
    attributes |= {"missing_value": np.array(missing[1:], "i2")} if missing[1:] else {}
    path = fields(t2m={"data": stored, **attributes})(tmp_path / "era.nc")
    report = h5chunk.info(path, stats=True)
    found, valid = report.statistics["t2m"], stored[~np.isin(stored, missing)]
    assert found.mean[0] == pytest.approx(valid.mean()) and found.std[0] == pytest.approx(valid.std())
    assert found.num_missing == stored.size - valid.size and found.maximum[0] < 50
    text = str(report)
    assert "value = stored * 0.5 (scale_factor) + 280 (add_offset)" in text and "of stored values" in text
    assert f"unpacked: mean=({valid.mean() * 0.5 + 280:.6g}), std=({valid.std() * 0.5:.6g})" in text
    assert f"{' and '.join(map(str, missing))} means missing" in text
    path = fields(rad={"data": stored.astype("i1"), "_Unsigned": "true"})(tmp_path / "goes.nc")
    assert "stored integers are unsigned (_Unsigned), but read as signed" in str(h5chunk.info(path))


@pytest.mark.parametrize("layout", ["images", "10x", "h5chunk matrix"])
def test_fields_that_readers_select_by_default_are_not_named(layout: str, tmp_path: Path) -> None:
    assert "fields=" not in printed_code(LAYOUTS[layout][0](tmp_path / "a.h5"))


def test_few_similar_datasets_are_samples_but_columns_are_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples(20, lambda n: {"": np.full((36, 4), n)}, "img_")(tmp_path / "a.h5")
    samples(20, lambda n: {"": np.full(36, n)}, "column_")(tmp_path / "b.h5")
    assert [sample[0].unique().tolist() for sample in run_code(Path("a.h5"))["data"]] == [[i] for i in range(20)]
    assert "ChunkDataset" in printed_code("b.h5") and not h5chunk.info("b.h5").notes
    with h5py.File("a.h5", "a") as file:
        file["meta/info"] = np.zeros((3, 4))  # a * of Keyed would match the group, too
    data = run_code(Path("a.h5"))["data"]
    assert [sample[0].unique().tolist() for sample in data] == [[i] for i in range(20)]


@pytest.mark.parametrize(("name", "numbers"), [("offsets", [0, 2, 9, 12]), ("tok_len", [2, 7, 3])])
def test_the_note_on_runs_of_rows_reads_each_as_a_sample(
    name: str, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fields(**{"tokens": np.arange(12), name: np.array(numbers)})(tmp_path / "a.h5")
    (note,) = h5chunk.info("a.h5").notes
    scope: dict[str, Any] = {"h5chunk": h5chunk}
    exec(note.partition("rows: ")[2], scope)
    assert len(scope["data"]) == 3
    assert scope["data"][1][0].values.tolist() == list(range(2, 9))


def test_genes_of_loom_files_are_not_taken_for_samples(tmp_path: Path) -> None:
    fields(matrix=np.zeros((5, 30)), row_attrs__Gene=np.arange(5), col_attrs__n=np.arange(30))(tmp_path / "a.loom")
    assert "genes are rows and cells are columns" in str(h5chunk.info(tmp_path / "a.loom"))


@pytest.mark.filterwarnings("ignore:.*skipped, because")
def test_the_printed_code_ends_episodes_at_every_mark(tmp_path: Path) -> None:
    ends, timeouts = np.zeros(30), np.zeros(30, bool)
    ends[[9, 19]], timeouts[14] = 1, True
    marks = {"observations": np.zeros((30, 3)), "terminals": ends, "timeouts": timeouts}
    (note,) = h5chunk.info(fields(**marks)(tmp_path / "a.h5")).notes
    scope: dict[str, Any] = {"h5chunk": h5chunk}
    exec(note[note.index("data = ") :].replace("16", "2"), scope)
    assert np.bincount(scope["data"].episodes).tolist() == [9, 4, 4, 9]
    found = h5chunk.info(fields(actions=np.zeros((30, 2)), **marks)(tmp_path / "d4rl.h5"))
    assert "D4RL" in found.layout
    exec("\n".join(found.code), scope)
    assert scope["data"].fields == ("actions", "observations") and len(scope["data"]) == 1 + 1
    for batch in scope["loader"]:
        assert batch[1].shape[1:] == (10, 3)


@pytest.mark.parametrize(
    ("pattern", "count", "order"),
    [
        ("traces/{}/data", 50, ["Windows", "Keyed"]),
        ("data/demo_{}", 6, ["Keyed"]),
        ("vol{}/raw", 3, ["Windows", "Keyed"]),
        ("g{}/points", 12, ["Keyed", "Windows"]),
        ("traj_{}/obs/state", 120, ["Windows", "Keyed"]),
    ],
)
def test_the_code_for_similar_datasets_and_its_notes_read_all_of_them(
    tmp_path: Path, pattern: str, count: int, order: list[str]
) -> None:
    path = tmp_path / "few.h5"
    with h5py.File(path, "w") as file:
        for i in range(count):
            file[pattern.format(i)] = np.zeros((40 + i, 3, 4), "f4")
    notes = [note[note.index("data = ") :] for note in h5chunk.info(path).notes if "data = " in note]
    lengths = {"Keyed": count, "Windows": sum(40 + i - 15 for i in range(count))}
    read = []
    for line in [printed_code(path), *notes]:
        found: dict[str, Any] = {"h5chunk": h5chunk}
        exec(line, found)
        read.append(type(found["data"]).__name__)
        assert len(found["data"]) == lengths[read[-1]]
    assert read == order


VOLUMES: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {  # shapes of datasets; in the code; in the note
    "in groups": ({"a/raw": (24, 32, 32), "b/raw": (30, 36, 32)}, '{"raw": "*/raw"}, (24, 24, 24)', ""),
    "small ones": ({"a/raw": (10, 12, 12), "b/raw": (10, 14, 12)}, "ChunkDataset", '{"raw": "*/raw"}, (10, 10, 10)'),
    "beside others": ({"ct_1": (40, 48, 50), "ct_2": (44, 48, 50), "x": (5,)}, '"ct_*"}, (40, 40, 40)', ""),
    "one": ({"raw": (80, 90, 90), "label": (80, 90, 90)}, "ChunkDataset", '{"raw": "raw", "label": "label"}, (64, '),
    "with channels": ({"p1/v": (4, 40, 40, 40), "p2/v": (4, 40, 48, 40)}, 'channels="first"', ""),
    "episodes": ({"ep1/frames": (40, 64, 64), "ep2/frames": (50, 64, 64)}, "Windows", ""),
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_volumes_get_code_or_a_note_that_reads_patches(kind: str, tmp_path: Path) -> None:
    shapes, in_code, in_note = VOLUMES[kind]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, shape in shapes.items():
            file.create_dataset(name, shape, "u1")
    found = h5chunk.info(tmp_path / "a.h5")
    assert in_code in found.code[1]
    assert (
        any(in_note in note for note in found.notes) if in_note else not any("Patches" in each for each in found.notes)
    )
    for line in [found.code[1], *(note[note.index("data = ") :] for note in found.notes if "data = " in note)]:
        scope: dict[str, Any] = {"h5chunk": h5chunk}
        exec(line, scope)
        assert len(scope["data"]) > 0


def test_tables_packed_numbers_and_attributes_of_samples_are_in_the_code(tmp_path: Path) -> None:
    table = np.zeros(30, [("pt", "f4"), ("n", "i4")])
    fields(events=table)(tmp_path / "table.h5")
    assert run_code(tmp_path / "table.h5")["data"].fields == ("events/pt", "events/n")
    fields(events=np.zeros(30, [("pt", "f4"), ("name", "S4")]))(tmp_path / "text.h5")
    assert run_code(tmp_path / "text.h5")["data"].fields == ("events/pt",)
    packed = {"data": np.full((30, 5), 7, "i2"), "scale_factor": 0.5, "add_offset": 1.0}
    fields(t2m=packed)(tmp_path / "cf.h5")
    ((batch,),) = run_code(tmp_path / "cf.h5")["loader"]
    assert batch.unique().tolist() == [4.5]
    fields(t2m=packed, u={"data": np.zeros((30, 5), "i2"), "scale_factor": "x"})(tmp_path / "odd.h5")
    assert len(run_code(tmp_path / "odd.h5")["data"]) == 30  # without decode, which refuses u
    fields(**{f"s__{n:03}": {"data": np.zeros((4, 5)), "label": n, "who": "p"} for n in range(120)})(tmp_path / "a.h5")
    labels = [int(label) for batch in run_code(tmp_path / "a.h5")["loader"] for label in batch[1]]
    assert sorted(labels) == [*range(120)]


def test_the_code_for_a_url_uses_no_h5py(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    make_file(tmp_path / "a.h5", images=(IMAGES, {"chunks": (4, 3, 8, 8)}))
    images_in_rows(tmp_path / "jpg.h5")
    contents = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with object_server(contents) as server:
        report = str(h5chunk.info(f"{server.url}/a.h5"))
        assert "ChunkLoader(" in report and "h5py.File" not in report
        report = str(h5chunk.info(f"{server.url}/jpg.h5"))
        assert "download the file" in report and "h5py.File" not in report
    assert "h5py.File" in str(h5chunk.info(tmp_path / "a.h5"))


def test_several_files_are_described_as_one_data_set_or_with_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, make in (("f1", fields(x=np.zeros((30, 5)))), ("f2", fields(x=np.zeros((9, 5)), z=np.zeros((9, 2))))):
        make(Path(f"{name}.h5"))
    scope: dict[str, Any] = {}
    exec(printed_code("f1.h5", "f2.h5"), scope)
    assert len(scope["data"]) == 39
    fields(y=np.zeros((20, 5)))(Path("f3.h5"))
    for arguments in (["f?.h5"], ["f1.h5", "f2.h5", "f3.h5"]):
        report = run("info", *arguments).stdout
        assert "no field is in all files (f1.h5 has x; f3.h5 has y)" in report and "--fields" not in report
        assert "(h5chunk info f1.h5)" in report


def test_groups_of_classes_get_code_with_labels(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in (f"{group}/img_{number}" for group in ("cat", "dog", "owl") for number in range(12)):
            file[name] = np.full((4, 5, 3), len(file), "u1")
    assert "a group for each class" in str(h5chunk.info(tmp_path / "a.h5"))
    labels = [int(label) for batch in run_code(tmp_path / "a.h5")["loader"] for label in batch[1]]
    assert sorted(labels) == [0] * 12 + [1] * 12 + [2] * 12
