"""A resolved config as text; what is printed as TOML is itself a config."""

import json
import textwrap
from collections.abc import Mapping

import tomli_w

from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import Resolved
from hp_trainer.config.schema import fields, sections


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """TOML by section, each key under its help, with the value's origin behind it.

    Args:
        config: Configuration to write.
        origins: Origins of the values, by key; None: leave them out.
    """
    tables = to_dict(config)
    lines: list[str] = []
    for section, struct in sections().items():
        lines += ["", *_comment(struct.__doc__ or ""), f"[{section}]"]
        for field in fields().values():
            if field.section == section:
                value = tables[section][field.name]
                lines += [*_comment(field.help), _assignment(field.name, value, origins, field.key)]
    return "\n".join(lines[1:]) + "\n"


def to_lines(resolved: Resolved) -> str:
    """One line per key, ``train.steps = 150  # origin``: to be searched and compared."""
    tables = to_dict(resolved.config)
    return "".join(
        _assignment(key, tables[field.section][field.name], resolved.origins, key) + "\n"
        for key, field in fields().items()
    )


def to_json(resolved: Resolved) -> str:
    """The config and the origins as one JSON object."""
    content = {"config": to_dict(resolved.config), "origins": dict(resolved.origins)}
    return json.dumps(content, indent=2) + "\n"


def _assignment(name: str, value: object, origins: Mapping[str, str] | None, key: str) -> str:
    text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
    if isinstance(value, list):
        text = " ".join(text.split()).replace("[ ", "[").replace(", ]", "]")
    origin = f"  # {_one_line(origins[key])}" if origins else ""
    unset = "# " if key == "run.resume" and not value else ""  # an empty one is refused
    return f"{unset}{name} = {text}{origin}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 96)]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
