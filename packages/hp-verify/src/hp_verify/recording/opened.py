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
_LIBRARY = re.compile(r".*?/(?:site|dist)-packages/[^/]+", re.DOTALL)
_LEFT_OUT = ("/proc/", "/dev/", "/sys/", f"{os.path.dirname(os.__file__)}/")  # noqa: PTH120 - nothing is imported in vain


def watch(folder: str) -> None:
    """Note down the interpreter, and from now on each file that this process opens."""
    seen: set[str] = set()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            with suppress(Exception):  # which would end what the program does
                _note(folder, seen, *arguments)

    sys.addaudithook(note)
    note("open", (sys.executable, "r", 0))


def _note(folder: str, seen: set[str], path: object, _mode: object, flags: object) -> None:
    """Note a file down, of a library its top module alone."""
    if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int):
        return
    place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
    is_kept = "/__pycache__/" in place or sys.pycache_prefix
    place = source_from_cache(place) if is_kept and place.endswith(".pyc") else place
    library = _LIBRARY.match(place)
    place = library[0] if library else place
    if (
        place in seen
        or place.startswith(f"{folder}/")
        or (place.startswith(_LEFT_OUT) and not library)
    ):
        return
    seen.add(place)
    kind = "w" if flags & (os.O_WRONLY | os.O_RDWR) and not library else "r"
    with open(f"{folder}/{OPENED}-{os.getpid()}", "ab") as file:  # noqa: PTH123
        file.write(os.fsencode(f"{kind}{place}\0"))
