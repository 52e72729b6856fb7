"""JSON files of strangers: their size, kind and form are checked before their content."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from hp_train.errors import ConfigError
from hp_train.schema import shown


def open_regular(path: Path) -> int:
    """Open a file to be read; what is no plain file, such as a pipe, is not waited for.

    Links are followed: the cache of Hugging Face's hub is made of them.

    Raises:
        ConfigError: When it cannot be opened, or is of another kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{_name(path)} must be readable: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{_name(path)} must be a plain file")
    return descriptor


def read_json(path: Path, *, most_bytes: int) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Args:
        path: Of the file.
        most_bytes: Larger ones are refused, unread.

    Raises:
        ConfigError: When it cannot be read, or is not JSON: keys are given once, and numbers are
            finite.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ConfigError(f"{_name(path)} must be at most {most_bytes} bytes long")
    try:
        values = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_not_finite
        )
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{_name(path)} must be readable JSON: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{_name(path)} must be a JSON object")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {shown(key)} is given twice")
        found[key] = value
    return found


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _name(path: Path) -> str:
    return shown(str(path), limit=250)
