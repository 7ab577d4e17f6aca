"""Import optional packages; one that is missing is an error that names the extra of h5chunk that installs it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from h5chunk.errors import MissingPackageError

EXTRAS = {
    "distributed": "distributed",
    "hdf5plugin": "codecs",
    "matplotlib": "plot",
    "obstore": "remote",
    "pyarrow": "tables",
}


def load(module: str, purpose: str) -> Any:
    """Import and return a module of an optional package. Raises MissingPackageError if it is not installed.

    ``purpose`` begins the message, such as "reading text".
    """
    try:
        import_module(module.partition(".")[0])
        return import_module(module)
    except ImportError as error:
        raise _missing(module, purpose) from error


def require(package: str, purpose: str) -> None:
    """Raise MissingPackageError if an optional package is not installed. Does not import it."""
    try:
        is_installed = find_spec(package) is not None
    except ImportError:
        is_installed = False
    if not is_installed:
        raise _missing(package, purpose)


def _missing(module: str, purpose: str) -> MissingPackageError:
    package = module.partition(".")[0]
    return MissingPackageError(f'{purpose} needs {package}: pip install "h5chunk[{EXTRAS[package]}]"')
