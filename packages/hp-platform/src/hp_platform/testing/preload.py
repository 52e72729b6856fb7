"""Imports for the server that forks ranks: the modules that the caller has imported."""

import contextlib
import importlib
import os

MODULES_VARIABLE = "HP_PLATFORM_PRELOAD"
"""Variable with the names of the modules, separated by commas, while the server starts."""

for _name in filter(None, os.environ.pop(MODULES_VARIABLE, "").split(",")):
    with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong
        importlib.import_module(_name)
