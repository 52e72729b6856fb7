"""Imported by the server that ranks are forked from: imports what its caller has imported."""

import contextlib
import importlib
import os

MODULES_VARIABLE = "HP_PLATFORM_PRELOAD"
"""Names the modules, with commas between them, while the server starts."""

for _name in filter(None, os.environ.pop(MODULES_VARIABLE, "").split(",")):
    with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong
        importlib.import_module(_name)
