"""JSON files of strangers: their size, kind and form are checked before their content."""

import json
from pathlib import Path
from typing import Any, NoReturn

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_base.messages import shown_path
from hp_checkpoint.extra import unique_keys


def read_json(path: Path, *, most_bytes: int) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Args:
        path: Path of the file.
        most_bytes: Larger ones are refused, unread.

    Raises:
        ConfigError: When it cannot be read, or is not JSON: keys are given once, and numbers are
            finite.
    """
    try:
        data = read_named(path, limit=most_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown_path(path)} must be readable: {why_not(error)}") from None
    try:
        values = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_not_finite
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown_path(path)} must be readable JSON: {why_not(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{shown_path(path)} must be a JSON object")
    return values


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
