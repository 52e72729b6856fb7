"""JSON that the caller saves beside the tensors, and that comes back as it went in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from hp_base.messages import shown

MAX_EXTRA_BYTES = 1 << 20


def encode_extra(extra: Mapping[str, Any]) -> bytes:
    """Write `extra` as JSON. Tuples come back as lists, which is let pass.

    Raises:
        ValueError: If JSON would not give back what it is given: NaN, keys that are no strings,
            types it does not know; or if it is longer than a megabyte.
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
    """Read what :func:`encode_extra` wrote.

    Raises:
        ValueError: If it is anything else: no object, too long, too deep, a key twice, NaN.
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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object for `json.loads`, and refuse one that has a key twice."""
    values: dict[str, Any] = {}
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
