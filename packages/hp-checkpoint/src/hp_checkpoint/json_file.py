"""JSON of callers, saved beside the tensors, and JSON files of strangers, checked before use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_base.messages import shown, shown_path

MAX_EXTRA_BYTES = 1 << 20


def encode_extra(extra: Mapping[str, object]) -> bytes:
    """Encode `extra` as JSON. Tuples are decoded as lists; all else must be decoded as it was.

    Raises:
        ValueError: If decoding would give something else, as for NaN, keys that are not strings, or
            other types than JSON's; or if the text is longer than a megabyte.
    """
    try:
        text = json.dumps(extra, allow_nan=False, separators=(",", ":")).encode()
        restored = decode_extra(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"extra must be JSON: {error}") from None
    if not _same(extra, restored):
        raise ValueError("extra must be JSON: string keys, finite numbers, no other types")
    return text


def decode_extra(text: bytes) -> dict[str, Any]:
    """Decode the text of :func:`encode_extra`.

    Raises:
        ValueError: If the text is not an object, too long, too deep, or has a key twice or NaN.
    """
    if len(text) > MAX_EXTRA_BYTES:
        raise ValueError(f"extra ({len(text)} bytes) must not exceed {MAX_EXTRA_BYTES} bytes")
    try:
        extra = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("extra must not be nested so deeply") from None
    if not isinstance(extra, dict):
        raise ValueError("extra must be an object")  # noqa: TRY004  # of the file, not of a call
    return extra


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object for `json.loads`; raise ValueError if a key occurs twice."""
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {shown(key)} is given twice")
        values[key] = value
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"extra must not contain {constant}")


def _same(value: object, restored: object) -> bool:
    if isinstance(value, Mapping) and isinstance(restored, dict):
        keys = list(restored)
        return value.keys() == restored.keys() and all(
            map(_same, map(value.__getitem__, keys), map(restored.__getitem__, keys))
        )
    if isinstance(value, list | tuple) and isinstance(restored, list):
        return len(value) == len(restored) and all(map(_same, value, restored))
    return type(value) is type(restored) and value == restored


def read_json(path: Path, *, most_bytes: int) -> dict[str, Any]:
    """Parse a file that contains one JSON object.

    Args:
        path: Path of the file.
        most_bytes: Largest size of the file; a larger one is not read.

    Raises:
        ConfigError: If the file cannot be read, or is not JSON with unique keys and finite numbers.
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
