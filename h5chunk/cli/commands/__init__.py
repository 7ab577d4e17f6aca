"""The commands, a module each: arguments and options of the functions of `h5chunk.tools`, which are imported on use."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
