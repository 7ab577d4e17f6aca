"""The oldest versions that are tried are those that setup.cfg allows."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from oldest import oldest_versions


def test_each_requirement_has_one_bound() -> None:
    found = oldest_versions()
    assert {"h5py", "numpy", "pillow", "click", "tqdm", "scipy", "pyarrow"} <= found.keys() and "torch" not in found


@pytest.mark.parametrize(
    ("extra", "message"),
    [("numpy>=2", "requires numpy from 1.24 and from 2 on"), ("numpy", "'numpy'"), ("scipy==1.12", "'scipy==1.12'")],
)
def test_other_bounds_are_refused(tmp_path: Path, extra: str, message: str) -> None:
    text = f"[options]\ninstall_requires =\n    numpy>=1.24\n[options.extras_require]\nmore =\n    {extra}\n"
    (tmp_path / "setup.cfg").write_text(text)
    with pytest.raises(SystemExit, match=message):
        oldest_versions(tmp_path / "setup.cfg")


@pytest.mark.skipif(os.environ.get("H5CHUNK_OLDEST") != "1", reason="this environment has current versions")
def test_this_environment_has_the_oldest_versions() -> None:
    for name, version in oldest_versions().items():
        assert Version(metadata.version(name)) == Version(version), name
