"""Files with the weights of a model in a folder, which must have one set of them.

transformers takes `model.safetensors` if it exists, and else the files of the index. A folder with
both, or with other files besides, is refused: one of the sets is out of date, and which is unknown.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hp_base.errors import ConfigError
from hp_base.messages import shown, shown_path
from hp_checkpoint.json_file import read_json
from hp_checkpoint.safetensors import INDEX, MAX_HEADER_BYTES

_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_KEY = "transformers_weights"
"""Key of config.json by which transformers takes another file."""
_MOST_BYTES = 4 << 20  # largest config.json
_OTHER_FORMS = ("consolidated*.safetensors", "consolidated*.pth", "pytorch_model*.bin")
"""Files with the same weights for other programs, which transformers does not read then."""
_SHOWN = 3


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a folder.

    Raises:
        ConfigError: If the folder has none, or more than one set of them.
    """
    has_index = os.path.lexists(folder / INDEX)
    names = _listed(folder) if has_index else [_SINGLE]
    if (folder / _ADAPTER).exists():
        raise ConfigError(
            f"{shown_path(folder / _ADAPTER)} must be absent: adapters are not read; merge it into "
            "the weights first, or move it elsewhere"
        )
    if (folder / "config.json").is_file():
        named = read_json(folder / "config.json", most_bytes=_MOST_BYTES).get(_KEY)
        if named not in (None, INDEX if has_index else _SINGLE):
            raise ConfigError(
                f"config.json: {_KEY} ({shown(named)}) must be absent: weights are those of "
                f"{INDEX if has_index else _SINGLE}"
            )
    foreign = {path.name for form in _OTHER_FORMS for path in folder.glob(form)}
    others = {path.name for path in folder.glob("*.safetensors")} - foreign - {*names}
    if others:
        raise ConfigError(_two_sets(folder, names, sorted(others), has_index=has_index))
    return [folder / name for name in names]


def other_forms(folder: Path) -> list[str]:
    """Return the names of files with the weights of a folder in formats that are not read."""
    read = {path.name for path in weight_files(folder)}
    found = {path.name for form in _OTHER_FORMS for path in folder.glob(form)}
    return sorted(found - read)


def first_of(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and the number of others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _listed(folder: Path) -> list[str]:
    """Return the names of the files in the index."""
    listed = read_json(folder / INDEX, most_bytes=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(listed, dict):
        raise ConfigError(f"{INDEX}: weight_map ({shown(listed)}) must be an object")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{INDEX}: file ({shown(name)}) must be a name in the folder")
    return sorted(set(listed.values()))


def _two_sets(folder: Path, names: list[str], others: list[str], *, has_index: bool) -> str:
    if has_index:
        return (
            f"{shown_path(folder)} must have one set of weights: {INDEX} names {first_of(names)}, "
            f"and {first_of(others)} is there too; move the set that is out of date elsewhere"
        )
    if (folder / _SINGLE).exists():
        return (
            f"{shown_path(folder)} must have one set of weights: {_SINGLE} and {first_of(others)} "
            "are there, without an index; move what is out of date elsewhere"
        )
    return (
        f"{shown_path(folder)} must have {_SINGLE} or {INDEX}, which names the files: it has "
        f"{first_of(others)} alone"
    )
