"""Images of any size in one file: converting, describing, verifying."""

from __future__ import annotations

import io
import json
import re

import h5py
import numpy as np
import pytest
from PIL import Image

import h5chunk
from h5chunk.errors import FileError, OptionError, SampleError, SourceError
from h5chunk.plan.permutation import permutation
from h5chunk.sources.kinds import ImageSourceOptions
from h5chunk.tools.convert.forms import FormCost, recommend
from h5chunk.tools.measure.stages import DATALOADER, DECODING, LIMITS, LOADER, READERS, RESIDENT
from h5chunk.transforms import Resize


def picture(height, width, seed=0, mode="RGB"):
    """A smooth image, which JPEG keeps well."""
    values = np.random.default_rng(seed).integers(0, 256, (2, 3, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Two classes of images, all of other sizes and many kinds."""
    turned = Image.Exif()
    turned[0x0112] = 6
    files = {
        "a/0.jpg": encoded(picture(40, 60)),
        "a/1.jpg": encoded(picture(30, 50, 1), exif=turned),
        "a/2.png": encoded(picture(33, 21, 2, "RGBA"), "PNG"),
        "b/3.jpg": encoded(picture(64, 48, 3), progressive=True),
        "b/4.jpg": encoded(picture(20, 90, 4, "L")),
        "b/5.jpg": encoded(picture(25, 35, 5, "CMYK")),
        "b/6.webp": encoded(picture(44, 55, 6), "WEBP", lossless=True),
    }
    for name, data in files.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "photos"


def stored(path):
    """The kept bytes of each image by its name, with its height, width and orientation."""
    found = {}
    with h5py.File(path) as file:
        group, names = file["images"], file["h5chunk/source_names"][()].tobytes()
        ends, offsets = [0, *file["h5chunk/source_name_ends"]], group["offsets"][()]
        data = group["data"][()].tobytes()
        for row in range(len(offsets) - 1):
            facts = tuple(int(group[table][row]) for table in ("heights", "widths", "orientations"))
            found[names[ends[row] : ends[row + 1]].decode()] = (data[offsets[row] : offsets[row + 1]], facts)
    return found


def test_bytes_of_the_files_are_kept(photos, tmp_path):
    report = h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    found = stored(tmp_path / "p.h5")
    assert {name: data for name, (data, _) in found.items()} == {name: (photos / name).read_bytes() for name in found}
    assert found["a/0.jpg"][1] == (40, 60, 1)
    assert found["a/1.jpg"][1] == (50, 30, 6)  # upright
    assert report.form == "encoded" and report.num_samples == 7
    assert "chunks each of about 7 images, with one checksum; they are shuffled in 1 part of 7 images (of" in str(
        report
    )
    with h5py.File(tmp_path / "p.h5") as file:
        labels = dict(zip(stored(tmp_path / "p.h5"), file["labels"][()].tolist(), strict=True))
    assert all(label == (name[0] == "b") for name, label in labels.items())


def test_pixels_are_kept(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_size=True)
    found = stored(tmp_path / "p.h5")
    pixels, (height, width, orientation) = found["a/1.jpg"]
    upright = np.rot90(np.asarray(Image.open(photos / "a/1.jpg")), 3)
    assert orientation == 1
    np.testing.assert_array_equal(np.frombuffer(pixels, np.uint8).reshape(height, width, 3), upright)


def test_larger_images_are_shrunk(photos, tmp_path):
    report = h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True, max_side=50, quality=80)
    found = stored(tmp_path / "p.h5")
    assert report.counts["resized"] == 4
    assert all(max(facts[:2]) <= 50 for _, facts in found.values())
    assert found["a/1.jpg"][0] == (photos / "a/1.jpg").read_bytes()
    assert Image.open(io.BytesIO(found["a/0.jpg"][0])).size == (50, 33)


def test_bytes_do_not_depend_on_workers_and_a_run_continues(photos, tmp_path, monkeypatch):
    h5chunk.convert(photos, tmp_path / "one.h5", keep_encoded=True, workers=0, chunk_samples=1, shuffle=False)
    monkeypatch.setattr("h5chunk.store.write.any_size.TASK_BYTES", 1)
    h5chunk.convert(photos, tmp_path / "two.h5", keep_encoded=True, workers=2, chunk_samples=1, shuffle=False)
    broken = photos / "b/4.jpg"
    good = broken.read_bytes()
    broken.write_bytes(good[:100])
    with pytest.raises(SampleError, match=r"4.jpg: cannot be decoded.*--on-error skip"):
        h5chunk.convert(photos, tmp_path / "three.h5", keep_encoded=True, workers=0, chunk_samples=1, shuffle=False)
    broken.write_bytes(good)
    said = []
    h5chunk.convert(
        photos, tmp_path / "three.h5", keep_encoded=True, workers=2, chunk_samples=1, shuffle=False, notify=said.append
    )
    assert any("are already written" in line for line in said)
    whole = (tmp_path / "one.h5").read_bytes()
    assert (tmp_path / "two.h5").read_bytes() == whole == (tmp_path / "three.h5").read_bytes()
    assert h5chunk.convert(
        photos, tmp_path / "three.h5", keep_encoded=True, chunk_samples=1, shuffle=False
    ).already_complete


def test_a_changed_image_moves_those_after_it(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("h5chunk.store.write.any_size.TASK_BYTES", 1)
    how = {"keep_encoded": True, "workers": 0, "chunk_samples": 1, "shuffle": False}
    good = (photos / "b/6.webp").read_bytes()
    (photos / "b/6.webp").write_bytes(b"broken")
    with pytest.raises(SampleError):
        h5chunk.convert(photos, tmp_path / "p.h5", **how)
    (photos / "b/6.webp").write_bytes(good)
    (photos / "a/1.jpg").write_bytes(encoded(picture(100, 100, 9)))
    said = []
    h5chunk.convert(photos, tmp_path / "p.h5", **how, notify=said.append)
    assert {name: data for name, (data, _) in stored(tmp_path / "p.h5").items()} == {
        path.relative_to(photos).as_posix(): path.read_bytes() for path in photos.glob("*/*")
    }
    assert h5chunk.verify(tmp_path / "p.h5").ok


def test_broken_images_are_left_out(photos, tmp_path):
    (photos / "a/0.jpg").write_bytes((photos / "a/0.jpg").read_bytes()[:200])
    report = h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True, on_error="skip")
    assert [name for name, _ in report.skipped] == ["a/0.jpg"]
    assert len(stored(tmp_path / "p.h5")) == 6 and h5chunk.verify(tmp_path / "p.h5").ok


def test_images_that_no_loader_takes_are_refused(tmp_path):
    (tmp_path / "long").mkdir()
    Image.new("RGB", (1 << 14 | 1, 2)).save(tmp_path / "long" / "1.png")
    with pytest.raises(SampleError, match=r"1.png: is 2 x 16385, but .* at most 16384 pixels per side: .*--max-side"):
        h5chunk.convert(tmp_path / "long", tmp_path / "long.h5", keep_encoded=True)
    h5chunk.convert(tmp_path / "long", tmp_path / "long.h5", keep_encoded=True, max_side=1 << 14)
    assert h5chunk.ChunkLoader(tmp_path / "long.h5", 1, transforms=[Resize((2, 9))]).is_resident is False


def test_several_chunks_of_bytes(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("h5chunk.store.write.any_size.CHUNK_BYTES", 4096)
    h5chunk.convert(photos, tmp_path / "p.h5", keep_size=True)
    with h5py.File(tmp_path / "p.h5") as file:
        assert file["images/data"].chunks == (4096,) and file["h5chunk/checksums/images/data"].size > 8
    assert h5chunk.verify(tmp_path / "p.h5").ok


def test_verify_names_damaged_images(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        file["images/data"][10] ^= 1
    report = h5chunk.verify(tmp_path / "p.h5")
    assert [(bad.field, bad.first_sample, bad.last_sample) for bad in report.bad] == [("images/data", 0, 6)]


@pytest.mark.parametrize(
    ("table", "row", "value", "said"),
    [
        ("offsets", 3, 1 << 40, "offsets decreases after row 3"),
        ("offsets", 7, 5, "instead of from 0 to"),
        ("heights", 2, 0, "image 2 cannot have size 0 x"),
        ("orientations", 1, 9, "orientation 9"),
    ],
)
def test_tables_that_lie_are_errors(photos, tmp_path, table, row, value, said):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        file[f"images/{table}"][row] = value
        if row == 3:
            file["images/offsets"][4] = 7
    assert any(said in problem for problem in h5chunk.verify(tmp_path / "p.h5").problems)
    with pytest.raises(FileError, match=said):
        h5chunk.info(tmp_path / "p.h5")


def test_verify_sees_attributes_that_contradict_the_options(photos, tmp_path):
    """They decide what the bytes mean, and have no checksum."""
    h5chunk.convert(photos, tmp_path / "kept.h5", keep_encoded=True)
    h5chunk.convert(photos, tmp_path / "square.h5", size=(9, 9), fit="crop")
    for name, attribute, value in (("kept", "channels", np.uint8(1)), ("square", "axes", np.bytes_("NHWC"))):
        assert h5chunk.verify(tmp_path / f"{name}.h5").ok
        with h5py.File(tmp_path / f"{name}.h5", "r+") as file:
            file["images"].attrs.modify(attribute, value)
        (problem,) = h5chunk.verify(tmp_path / f"{name}.h5").problems
        assert f"{attribute}=" in problem and "was written with" in problem


def test_a_dry_run_says_what_images_cost(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("h5chunk.tools.convert.forms.MEASURE_S", 0.01)
    report = h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True, dry_run=True)
    files = sum(path.stat().st_size for path in photos.glob("*/*"))
    pixels = 3 * sum(h * w for h, w in ((40, 60), (30, 50), (33, 21), (64, 48), (20, 90), (25, 35), (44, 55)))
    for how, size in {"as files": files, "kept": files, "as pixels": pixels}.items():
        assert abs(report.size_bytes[how] - size) < size / 2
    assert "as pixels" in str(report) and not (tmp_path / "p.h5").exists()
    assert [(cost.form, cost.option) for cost in report.forms] == [
        ("encoded", "--keep-encoded"),
        ("raw", "--keep-size"),
    ]
    for cost, size in zip(report.forms, (files, pixels), strict=True):
        assert cost.fits_disk and cost.fits_memory and cost.images_per_s > 0 and abs(cost.num_bytes - size) < 7
    facts = json.loads(report.to_json())
    assert facts["forms"][0]["form"] == "encoded" and facts["recommendation"] in str(report)


@pytest.mark.parametrize(
    ("encoded", "raw", "fits", "said"),
    [
        (9000, 20000, True, "keep them encoded, because this machine decodes them faster than the 6,900"),
        (1000, 5000, True, r"store raw pixels \(--keep-size\), which load 5.0 times as fast"),
        (1000, 5000, False, "keep them encoded, because raw pixels do not fit in memory"),
        (1000, 1100, True, "would not load much faster"),
    ],
)
def test_a_dry_run_recommends_a_form(encoded, raw, fits, said):
    costs = [
        FormCost("encoded", "--keep-encoded", 10, True, True, encoded),
        FormCost("raw", "--keep-size", 99, True, fits, raw),
    ]
    assert re.search(said, recommend(costs))
    assert recommend(costs[1:]) == ""


def test_info(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    report = h5chunk.info(tmp_path / "p.h5")
    assert "7 encoded images of any size, 20 x 21 to 64 x 90" in str(report)
    assert json.loads(report.to_json())["images"][0]["num_images"] == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_encoded": True, "keep_size": True}, "pass one of them"),
        ({"max_side": 100}, "needs keep_encoded or keep_size"),
        ({"keep_encoded": True, "size": (8, 8)}, "leave size out"),
        ({"keep_size": True, "color": "keep"}, "pass color rgb or gray"),
        ({"keep_size": True, "layout": "nhwc"}, "always"),
    ],
)
def test_options_that_do_not_fit(photos, tmp_path, options, said):
    with pytest.raises(OptionError, match=said):
        h5chunk.convert(photos, tmp_path / "p.h5", **options)


@pytest.mark.parametrize("sample", [(picture(8, 8), picture(9, 9)), (picture(8, 8), np.zeros(3))])
def test_only_one_image_a_sample(tmp_path, sample):
    with pytest.raises(SourceError, match="require one image per sample, and otherwise only numbers"):
        h5chunk.convert([sample], tmp_path / "p.h5", keep_encoded=True)


# ---- data sets in Python


class Pictures:
    """A data set of torchvision's kind: picture i has i pixels in its first row, and the class i % 3."""

    def __init__(self, classes):
        self.classes = classes

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return picture(5, 10 + index, index), index % 3


@pytest.mark.parametrize("how", ["keep_encoded", "keep_size"])
def test_a_data_set_in_python(tmp_path, how):
    path, data = tmp_path / "p.h5", Pictures(["a", "b", "c"])
    report = h5chunk.convert(data, path, **{how: True}, workers=2)
    assert report.fields == {"images": "uint8", "labels": "int64"} and report.class_names == ["a", "b", "c"]
    assert report.counts.get("encoded as PNG", 0) == (10 if how == "keep_encoded" else 0)
    h5chunk.convert(Pictures(["b", "c", "a"]), tmp_path / "q.h5", like=path, workers=0)
    kept = h5chunk.ChunkDataset([path, tmp_path / "q.h5"])
    numbers = []
    for each in (path, tmp_path / "q.h5"):
        with h5py.File(each) as file:
            numbers += file["h5chunk/source_index"][()].tolist()
    for row, number in enumerate(numbers):
        image, label = kept[row]
        np.testing.assert_array_equal(image.permute(1, 2, 0), np.asarray(data[number][0]))
        assert label == (number + (row >= 10)) % 3
    assert h5chunk.verify(path).ok


def test_numbers_and_strings_beside_an_image(tmp_path):
    samples = [{"caption": "x" * i, "photo": picture(5, 6 + i), "n": i / 2} for i in range(9)]
    samples[4]["photo"] = None
    h5chunk.convert(samples, tmp_path / "p.h5", keep_size=True, on_error="skip", shuffle=False, workers=0)
    kept = h5chunk.ChunkDataset(tmp_path / "p.h5")
    assert kept.fields == ("photo", "caption", "n")
    assert [(len(caption), float(n)) for _, caption, n in (kept[row] for row in range(8))] == [
        (i, i / 2) for i in range(9) if i != 4
    ]
    samples = [{**sample, "split": "ab"[i % 2]} for i, sample in enumerate(samples) if i != 4]
    h5chunk.convert(samples, tmp_path / "parts", keep_size=True, split_files=True)
    assert set(h5chunk.ChunkDataset(tmp_path / "parts" / "b.h5").values("split")) == {"b"}


# ---- measuring


def test_bench_measures_decoding_and_loaders(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    report = h5chunk.bench(tmp_path / "p.h5", budget_s=0.2, batch_size=4, workers=[0], cold=False)
    rates = {(each.group, each.name): each.samples_per_s for each in report.figures}
    for name in (
        (LIMITS, DECODING),
        (READERS, "direct"),
        (READERS, "h5py"),
        (DATALOADER, "0 workers"),
        (LOADER, "reuse=False"),
    ):
        assert rates[name] > 0
    assert "cropped for each batch" in report.figure(LOADER, RESIDENT).note
    assert "RandomResizedCrop(224)" in str(report) and report.stored_bytes >= report.num_samples * 100


@pytest.mark.parametrize("how", ["keep_encoded", "keep_size"])
def test_tune_measures_loaders_and_advises(photos, tmp_path, monkeypatch, how):
    monkeypatch.setattr("h5chunk.tools.tune.study.SMALL_BYTES", 0)
    monkeypatch.setattr("h5chunk.tools.tune.advice.DECODES_SHARE", 0)
    monkeypatch.setattr("h5chunk.tools.tune.advice.available_bytes", lambda: 1000)
    h5chunk.convert(photos, tmp_path / "p.h5", **{how: True})
    report = h5chunk.tune(tmp_path / "p.h5", budget_s=0.2, batch_size=4, workers=[0])
    assert all(row.rate > 0 for row in report.rows) and not report.setting.repack
    advice = {each.code: each for each in report.advice}
    if how == "keep_size":
        assert "--keep-encoded" in advice["exceeds_memory"].remedy
    else:
        assert "--max-side 448" in advice["slow_decoding"].remedy and "do not fit" in advice["slow_decoding"].message
    scope = {}
    exec("\n".join(report.code), scope)
    assert sum(len(images) for images, _ in scope["loader"]) == 7


# ---- repacking


@pytest.mark.parametrize("how", ["keep_encoded", "keep_size"])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_samples": 2},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "compression": "gzip"},
        {"shuffle": True, "memory_bytes": 8 << 20},
    ],
)
def test_repacked_images_are_the_same(photos, tmp_path, monkeypatch, how, options):
    monkeypatch.setattr("h5chunk.tools.repack.fields.CHUNK_BYTES", 4096)
    monkeypatch.setattr("h5chunk.plan.repack.STEP_BYTES", 5000)  # more than one bucket
    path, out = tmp_path / "p.h5", tmp_path / "out.h5"
    h5chunk.convert(photos, path, **{how: True}, shuffle=False)
    report = h5chunk.repack(path, out, **options)
    before, after = stored(path), stored(out)
    order = permutation(7, options.get("seed", 0)) if "shuffle" in options else np.arange(7)
    assert list(after) == [list(before)[row] for row in order] and after == before
    assert h5chunk.verify(out).ok and report.main == "images"
    with h5py.File(path) as old, h5py.File(out) as new:
        assert new["labels"][()].tolist() == old["labels"][()][order].tolist()
        assert new["images/data"].compression == options.get("compression")
        assert new["h5chunk"].attrs["chunk_samples"] == options.get("chunk_samples", 7)
        assert {name: len(sums) for name, sums in new["h5chunk/checksums/images"].items()}.keys() == {*old["images"]}
    with h5chunk.ChunkLoader(out, 7, transforms=[Resize((8, 8))], shuffle=False) as loader:
        assert next(iter(loader))[0].shape == (7, 3, 8, 8)


def test_damaged_images_are_not_repacked(photos, tmp_path):
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True)
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        file["images/data"][100] ^= 1
    with pytest.raises(FileError, match="'images/data' does not match its checksum, so nothing was repacked"):
        h5chunk.repack(tmp_path / "p.h5", tmp_path / "q.h5", shuffle=True)
    h5chunk.convert(photos, tmp_path / "p.h5", keep_encoded=True, overwrite=True)
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        file["h5chunk"].attrs["num_samples"] = 6
    with pytest.raises(FileError, match="7 images for 6 samples"):
        h5chunk.repack(tmp_path / "p.h5", tmp_path / "q.h5")


def test_very_large_images_are_shrunk_as_the_error_says(tmp_path):
    (tmp_path / "s").mkdir()
    Image.new("L", (12000, 8000)).save(tmp_path / "s" / "big.png")
    message = r"limit max_pixels=89478485: .*--max-pixels 96000000\)"
    with pytest.raises(SampleError, match=message + r", and shrink large images \(--max-side N, at most 9459\)"):
        h5chunk.convert(tmp_path / "s", tmp_path / "a.h5", keep_encoded=True, workers=0)
    with pytest.raises(SampleError, match=message + "$"):
        h5chunk.convert(tmp_path / "s", tmp_path / "a.h5", keep_encoded=True, max_side=9459, workers=0)
    for max_side in (None, 9460):
        with pytest.raises(OptionError, match=r"shrink large images with max_side \(--max-side\), at most 9459"):
            ImageSourceOptions(keep_encoded=True, max_side=max_side, max_pixels=96000000)
    h5chunk.convert(tmp_path / "s", tmp_path / "a.h5", keep_encoded=True, max_side=60, max_pixels=96000000, workers=0)
    assert h5chunk.ChunkDataset(tmp_path / "a.h5")[0][0].shape == (3, 40, 60)


@pytest.mark.parametrize("form", ["keep_encoded", "keep_size"])
def test_masks_are_told_to_need_one_size(tmp_path, form):
    for i in range(2):
        for part, mode in (("images", "RGB"), ("masks", "L")):
            (tmp_path / "s" / part).mkdir(parents=True, exist_ok=True)
            picture(20 + i, 30, i, mode).save(tmp_path / "s" / part / f"{i}.png")
    with pytest.raises(SourceError, match=r"resize all images and their masks to one size, .*--size H,W --fit crop"):
        h5chunk.convert(tmp_path / "s", tmp_path / "x.h5", **{form: True})
    report = h5chunk.convert(tmp_path / "s", tmp_path / "x.h5", size=(18, 24), fit="crop", workers=0)
    assert report.shapes == {"images": (3, 18, 24), "masks": (18, 24)}
