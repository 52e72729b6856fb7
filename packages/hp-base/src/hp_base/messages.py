"""Values, paths, sizes and hints for messages of one line."""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from types import NoneType

_SHOWN = 60


def shown(value: object, *, limit: int = _SHOWN) -> str:
    """Return a value for a one-line message: as TOML writes it, cut to a number of characters."""
    if isinstance(value, dict):
        return "a table"
    plain = isinstance(value, str | int | float | list | tuple | NoneType)
    try:
        text = json.dumps(value, default=str) if plain else str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a list in a list in a list ..."
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown_path(path: str | Path) -> str:
    """Return a path for a one-line message, cut only if it is very long."""
    return shown(str(path), limit=250)


def size(number: float) -> str:
    """Return bytes in binary units, as all packages tell memory.

    >>> size(2.5 * 2**30), size(700), size(0)
    ('2.50 GiB', '700 B', '0')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{number / 2**power:.2f} {unit}"
    return f"{number:.0f} B" if number else "0"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint to append to a message; empty where nothing is close.

    >>> did_you_mean("steeps", ["steps", "seed"])
    '; did you mean steps?'
    """
    close = difflib.get_close_matches(word[:_SHOWN], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
