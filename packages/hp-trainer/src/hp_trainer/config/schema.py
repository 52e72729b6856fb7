"""The schema of :mod:`hp_trainer.config` as data: every key, its type, and how a value is checked.

A refused value is answered in one line, ``key (value) must relation``, never with the path or
the type names of the library that found it.
"""

import contextlib
import difflib
import math
import operator
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta, Struct

from hp_base.errors import ConfigError
from hp_base.messages import did_you_mean, shown
from hp_trainer.config import Config
from hp_trainer.config.aliases import absent, aliases

_KINDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
_LISTS = {int: "integers", str: "strings"}
_BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("greater than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}
_SHOWN = 60
_SHORT = 3  # letters
_MOST_LISTED = 16
_LONGEST_KEY = 200  # of what is compared with others


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a config.

    Attributes:
        key: Section and name, ``"train.steps"``.
        annotation: Type with bounds, as msgspec takes it.
        base: Type without bounds.
        metas: Bounds and help.
        default: Value where nothing is given.
    """

    key: str
    annotation: Any
    base: Any
    metas: tuple[Meta, ...]
    default: object

    @property
    def section(self) -> str:
        """Return what the key is listed under."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """Return the key within its section."""
        return self.key.partition(".")[2]

    @property
    def help(self) -> str:
        """Return one line on what it means, with its unit."""
        return next(meta.description for meta in self.metas if meta.description)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only values allowed; empty where there is no such list."""
        return typing.get_args(self.base) if typing.get_origin(self.base) is typing.Literal else ()

    @property
    def is_list(self) -> bool:
        """Tell whether it takes several values."""
        return typing.get_origin(self.base) is tuple

    @property
    def kind(self) -> str:
        """Return what a value has to be, in words: ``"an integer"``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if not self.is_list:
            return _KINDS[self.base]
        annotated = typing.get_args(self.base)[0]
        item, *metas = typing.get_args(annotated) or (annotated,)
        least = [f", each at least {meta.ge}" for meta in metas if meta.ge is not None]
        return "".join([f"a list of {_LISTS[item]}", *least])

    def bounds(self, value: Any = None) -> str:
        """Return what a value of that kind has to fulfil, in words; empty if nothing.

        Args:
            value: Leave out what it does fulfil.
        """
        parts = []
        for meta in self.metas:
            for name, (words, holds) in _BOUNDS.items():
                limit = getattr(meta, name)
                if limit is not None and (value is None or not holds(value, limit)):
                    parts.append(f"{words} {limit:g}" if self.base is float else f"{words} {limit}")
            if meta.pattern:
                parts.append("letters, digits and _ . + - only, 200 at most")
        return " and ".join(parts)


@cache
def fields() -> dict[str, Field]:
    """Return all keys in the order of the schema."""
    found = {}
    for section, struct in sections().items():
        hints = typing.get_type_hints(struct, include_extras=True)
        for info in msgspec.structs.fields(struct):
            annotation = hints[info.name]
            base, *metas = typing.get_args(annotation)
            key = f"{section}.{info.name}"
            found[key] = Field(key, annotation, base, tuple(metas), info.default)
    return found


@cache
def sections() -> dict[str, type[Struct]]:
    """Return the struct of each section, in the order of the schema."""
    return {info.name: info.type for info in msgspec.structs.fields(Config)}


def by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of keys as tables, such as a TOML file has."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return tables


def convert(field: Field, raw: object, *, strict: bool) -> Any:
    """Turn a raw value into the type of a key.

    Args:
        field: The key.
        raw: Value from TOML, or a string from a command line.
        strict: Whether ``raw`` must have the right type already, as in TOML.

    Raises:
        ConfigError: When it is of the wrong type or out of bounds.
    """
    if isinstance(raw, str) and field.base in (int, float) and not strict:
        raw = raw.replace("_", "")
    try:
        value = msgspec.convert(raw, field.annotation, strict=strict)
    except msgspec.ValidationError:
        raise ConfigError(_refusal(field, raw, strict=strict)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field.key} ({value}) must be {field.kind}")
    return value


def _refusal(field: Field, raw: object, *, strict: bool) -> str:
    relation, hint = field.kind, ""
    if field.choices:
        hint = did_you_mean(str(raw), field.choices)
    else:
        with contextlib.suppress(msgspec.ValidationError):
            relation = field.bounds(msgspec.convert(raw, field.base, strict=strict))
    bare = isinstance(raw, str) and not strict and field.base in _KINDS and field.base is not str
    return f"{field.key} ({shown(raw)[1:-1] if bare else shown(raw)}) must be {relation}{hint}"


def keys_called(name: str, section: str = "") -> list[str]:
    """Return keys that a name without a section may mean; of `section`, where that helps.

    What has the name comes first, then what is called so elsewhere, then what is spelt alike.

    >>> keys_called("lr"), keys_called("sede"), keys_called("xyz")
    (['train.learning_rate'], ['run.seed'], [])
    """
    name = name[:_SHOWN].lower()
    known, others = fields(), aliases()
    if namesakes := [field.key for field in known.values() if name and field.name == name]:
        return namesakes
    if name in others:
        return [others[name]]
    siblings = {field.name: key for key, field in known.items() if field.section == section}
    # A word of few letters is close to many others by chance.
    cutoff = 0.6 if len(name) > _SHORT else 0.8
    for names in (siblings, {**others, **{field.name: key for key, field in known.items()}}):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return [names[close[0]]]
        cutoff = 0.75
    return []


def unknown_key(key: str) -> str:
    """Return the message for a key that does not exist, with the nearest that does.

    >>> unknown_key("train.step")
    'unknown key train.step; did you mean train.steps?'
    """
    section, _, name = key[:_LONGEST_KEY].rpartition(".")
    if reason := absent().get(name.lower()):
        return f"unknown key {shown(key)[1:-1]}: {reason}"
    meant = keys_called(name, section) if section else []
    siblings = [field.name for field in fields().values() if field.section == section]
    if meant:
        hint = "; did you mean " + " or ".join(meant) + "?"
    elif section in sections():
        # All of a long section would be more than a line that is read.
        more = len(siblings) - _MOST_LISTED
        hint = f"; [{section}] has " + ", ".join(siblings[:_MOST_LISTED])
        hint += f" and {more} more" if more > 0 else ""
    else:
        hint = did_you_mean(key, [*fields(), *sections()])
    return f"unknown key {shown(key)[1:-1]}{hint}"
