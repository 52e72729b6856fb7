"""JSON files of strangers: their size, kind and form are checked before their content."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import why_not
from hp_base.messages import shown, shown_path
from hp_checkpoint.safetensors import open_regular


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
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(most_bytes + 1)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if len(data) > most_bytes:
        raise ConfigError(f"{shown_path(path)} must be at most {most_bytes} bytes long")
    try:
        values = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_not_finite
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown_path(path)} must be readable JSON: {why_not(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{shown_path(path)} must be a JSON object")
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
