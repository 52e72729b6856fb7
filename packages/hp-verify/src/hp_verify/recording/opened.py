"""Files that a program of a job opens, noted down: a kept recording depends on their content.

Python tells an audit hook of each file that it opens: programs, modules, configs, data. Files that
a library opens by itself, in C++ or Rust, are not told of.
"""

import os
import re
import sys
from contextlib import suppress
from importlib.util import source_from_cache

OPENED, VARIABLE = "opened", "HP_VERIFY_OPENED"
"""How files of notes begin, and the variable with the folder for them. Notes end with a zero byte,
and begin with ``r``, or ``w`` for files that were first opened to be written."""
_LIBRARIES = re.compile(r"(.*?/(?:site|dist)-packages)/.*", re.DOTALL)
_LEFT_OUT = re.compile(
    rf"/(?:proc|dev|sys)/|{re.escape(os.__file__.removesuffix('os.py'))}(?!\w+-packages$)"
)


def watch(folder: str) -> None:
    """Note down the interpreter, and from now on each file that this process opens.

    Of a library the folder alone is noted down in which it is installed.
    """
    seen: set[str] = set()

    def note(event: str, arguments: tuple[str, object, int]) -> None:
        if event == "open":
            with suppress(Exception):  # which would end what the program does
                place = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100
                if place.endswith(".pyc") and ("/__pycache__/" in place or sys.pycache_prefix):
                    place = source_from_cache(place)
                place = _LIBRARIES.sub(r"\1", place)
                if not (place in seen or _LEFT_OUT.match(place) or place.startswith(f"{folder}/")):
                    seen.add(place)
                    kind = "w" if arguments[2] & (os.O_WRONLY | os.O_RDWR) else "r"
                    with open(f"{folder}/{OPENED}-{os.getpid()}", "ab") as file:  # noqa: PTH123
                        file.write(os.fsencode(f"{kind}{place}\0"))

    sys.addaudithook(note)
    note("open", (sys.executable, "r", 0))
