"""The commands, one module per command: arguments and options for functions of `h5chunk.tools`, imported when used."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
