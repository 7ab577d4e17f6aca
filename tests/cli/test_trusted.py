"""Commands follow what a file refers to where ``--trusted`` says so, and never without."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from support.foreign import make_file, values

from h5chunk.cli import main
from h5chunk.errors import TrustError
from h5chunk.tools.tune.tune import tune

N = 64
COMMANDS = {
    "info": [],
    "verify": [],
    "bench": ["--budget", "0.1s", "--no-cold", "--workers", "0", "--batch-size", "8"],
    "tune": ["--budget", "0.5s", "--workers", "0", "--batch-size", "8"],
}


@pytest.fixture(params=["link", "view", "storage"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file whose images lie in a folder beside it."""
    (tmp_path / "there").mkdir()
    images = values((N, 100), np.uint8)
    make_file(tmp_path / "there" / "b.h5", images=(images, {"chunks": (8, 100)}))
    images.tofile(tmp_path / "there" / "b.bin")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["labels"] = np.arange(N) % 4
        if request.param == "link":
            file["images"] = h5py.ExternalLink(str(tmp_path / "there" / "b.h5"), "images")
        elif request.param == "view":
            layout = h5py.VirtualLayout(images.shape, np.uint8)
            layout[:] = h5py.VirtualSource(str(tmp_path / "there" / "b.h5"), "images", images.shape)
            file.create_virtual_dataset("images", layout)
        else:
            where = [(str(tmp_path / "there" / "b.bin"), 0, images.nbytes)]
            file.create_dataset("images", images.shape, np.uint8, external=where)
    return tmp_path / "a.h5"


@pytest.mark.filterwarnings("ignore")  # that HDF5 reads
@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_file_refers_to_is_followed(path: Path, command: str) -> None:
    options = COMMANDS[command]
    plain = CliRunner().invoke(main, [command, str(path), *options])
    assert "'images'" in plain.output and "(--trusted)" in plain.output
    assert plain.exit_code == (1 if command in ("bench", "tune") else 0)
    followed = CliRunner().invoke(main, [command, str(path), *options, "--trusted"])
    assert followed.exit_code == 0, followed.output
    assert "--trusted" not in followed.output and "bad:" not in followed.output
    (path.parent / "below").mkdir()
    path = path.rename(path.parent / "below" / "a.h5")
    outside = CliRunner().invoke(main, [command, str(path), *options, "--trusted"])
    assert outside.exit_code == 0, outside.output


def test_groups_are_not_followed_either(tmp_path: Path) -> None:
    make_file(tmp_path / "b.h5", labels=(np.arange(N) % 4, {}))
    make_file(tmp_path / "a.h5", images=(values((N, 100), np.uint8), {"chunks": (8, 100)}))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["labels"] = h5py.ExternalLink("b.h5", "labels")
    options = {"fields": ["images"], "budget_s": 0.3, "workers": [0], "batch_size": 8}
    assert any("'labels' is an external link" in note for note in tune(tmp_path / "a.h5", **options).notes)
    assert not any("labels" in note for note in tune(tmp_path / "a.h5", **options, trusted=True).notes)
    with pytest.raises(TrustError, match="'labels' is an external link"):
        tune(tmp_path / "a.h5", batch_size=8)
