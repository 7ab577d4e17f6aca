"""Print the oldest versions that setup.cfg allows, as constraints for pip, so that the tests can be run with them.

    python scripts/oldest.py > oldest.txt
    pip install -c oldest.txt -e ".[test]"

torch is omitted, because its wheels are large and env.sh installs the only version that the tests have been run with.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.cfg"
NOT_TRIED = {"torch"}


def oldest_versions(path: Path = SETUP) -> Mapping[str, str]:
    """Return the lower bounds of all requirements, including those of extras.

    Raises
    ------
    SystemExit
        A requirement has no lower bound, or two different ones.
    """
    config = configparser.ConfigParser()
    config.read(path)
    lists = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    found: dict[str, str] = {}
    for line in "\n".join(lists).split():
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)", line)
        if match is None:
            raise SystemExit(f"{path.name} requires {line!r}: give a lower bound alone, as in 'numpy>=1.24'")
        name, version = match.groups()
        if found.setdefault(name, version) != version:
            raise SystemExit(f"{path.name} requires {name} from {found[name]} and from {version} on: give one bound")
    return {name: version for name, version in sorted(found.items()) if name not in NOT_TRIED}


if __name__ == "__main__":
    for name, version in oldest_versions().items():
        print(f"{name}=={version}")
