"""Files that a program of a job opens, noted down: a kept recording depends on their content.

Python tells an audit hook of each file that it opens: programs, modules, configs, data. Files that
a library opens by itself, in C++ or Rust, are not told of.
"""

import os
import re
import sys
from contextlib import suppress
from importlib.util import source_from_cache

OPENED = "opened"
"""How files of notes begin: notes end with a zero byte, and begin with ``r``, or ``w`` for files
that were first opened to be written."""
VARIABLE = "HP_VERIFY_OPENED"
"""Variable with the folder for notes."""
_LIBRARY = re.compile(r"(.*?/(?:site|dist)-packages/[^/]+).*", re.DOTALL)
_OWN = re.escape(os.path.dirname(os.__file__))  # noqa: PTH120 - nothing is imported in vain
_LEFT_OUT = re.compile(rf"/(?:proc|dev|sys)/|{_OWN}/(?!\w+-packages/)")


def watch(folder: str) -> None:
    """Note down the interpreter, and from now on each file that this process opens.

    Of a library its top module alone is noted down.
    """
    seen: set[str] = set()

    def note(event: str, arguments: tuple[str, object, int]) -> None:
        if event == "open":
            with suppress(Exception):  # which would end what the program does
                place = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100
                is_made = "/__pycache__/" in place or sys.pycache_prefix
                place = source_from_cache(place) if is_made and place.endswith(".pyc") else place
                kind = "w" if arguments[2] & (os.O_WRONLY | os.O_RDWR) else "r"
                place = _LIBRARY.sub(r"\1", place)
                is_other = _LEFT_OUT.match(place) or place.startswith(f"{folder}/")
                if place not in seen and not is_other:
                    seen.add(place)
                    with open(f"{folder}/{OPENED}-{os.getpid()}", "ab") as file:  # noqa: PTH123
                        file.write(os.fsencode(f"{kind}{place}\0"))

    sys.addaudithook(note)
    note("open", (sys.executable, "r", 0))
