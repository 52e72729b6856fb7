"""Checks that a resumed run has enough in common with the run that it continues.

The position in the data counts sequences of one length in an order fixed by the seed, and weights
mean something only in the model that they were trained in. Layout, batch size and the settings of
the training itself may change.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hp_base.errors import CheckpointError, ConfigError
from hp_base.messages import shown
from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import Resolved, for_saving, saved_values
from hp_trainer.config.schema import fields

_POSITION = "the position in its data would mean other tokens"
_TOKENS = "its tokens were made so"
_MODEL = "its weights were trained so"
_REASONS = {
    "run.seed": _POSITION,
    "run.init_from": "its weights come from its checkpoints",
    "data.paths": "it goes on with the tokens of that text",
    "data.field": _TOKENS,
    "data.tokenizer": _TOKENS,
    "data.seq_len": _POSITION,
    "data.packing": _POSITION,
    "data.eval_fraction": _TOKENS,
}
_FREE = (
    "model.max_positions",
    "model.balance_coefficient",
    "model.correction_rate",
    "model.mtp_weight",
    "model.dropout",
    "model.init_std",
    "model.transformers",
    "model.trust_remote_code",
)
"""Keys of the model that are settings of the training, or say where its config lies now."""
_FILES = ("run.init_from", "data.paths", "data.field", "data.tokenizer", "data.eval_fraction")
"""What a checkpoint does not need to be asked about: its data have a digest."""


def require_same_run(resolved: Resolved) -> None:
    """Refuse a command line that would make another run of the one that is resumed.

    Raises:
        ConfigError: Names the key and both values.
        DataError: When text that was given cannot be read.
    """
    config = for_saving(resolved)
    given = [key for key in _kept() if resolved.origins[key] == "command line"]
    if not given:
        return
    run = Path(resolved.config.run.resume)
    saved = saved_values(run)
    if "data.paths" in given and _holds_same_text(run, config, saved):
        given.remove("data.paths")
    _require_equal(to_dict(config), saved, given, f"of {run}")


def require_same_position(extra: Mapping[str, Any], config: Config, path: Path) -> None:
    """Refuse to go on from a checkpoint of another seed, sequence length or model.

    Args:
        extra: JSON saved with the checkpoint; that of one that was imported may lack its config.
        config: Configuration of the run.
        path: Path of the checkpoint.

    Raises:
        ConfigError: Names the key and both values.
        CheckpointError: When `extra` is not what a run saves.
    """
    tables = extra.get("config")
    if tables is None:
        return
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise CheckpointError(f"{path}: config must be tables of keys")
    saved = {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    _require_equal(
        to_dict(config), saved, [key for key in _kept() if key not in _FILES], f"of {path}"
    )


def _kept() -> list[str]:
    """Return the keys that may not change."""
    model = [key for key, field in fields().items() if field.section == "model"]
    return [*_REASONS, *(key for key in model if key not in _FREE)]


def _require_equal(
    tables: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Any], keys: Iterable[str], of: str
) -> None:
    for key in keys:
        section, _, name = key.partition(".")
        value = tables[section][name]
        before = saved.get(key, value)
        before = list(before) if isinstance(before, tuple) else before
        if value != before:
            reason = _REASONS.get(key, _MODEL)
            raise ConfigError(
                f"{key} ({shown(value)}) must equal {key} ({shown(before)}) {of}: {reason}"
            )


def _holds_same_text(run: Path, config: Config, saved: Mapping[str, Any]) -> bool:
    """Tell whether the text that was given is what the run began with, wherever it is now."""
    if config.data.paths == saved.get("data.paths"):
        return True
    from hp_data.preparation import digest_of_text, is_prepared  # noqa: PLC0415 - imports torch
    from hp_data.tokens import Index, read_index  # noqa: PLC0415 - imports torch

    if not is_prepared(run / "data"):
        return True  # it is prepared anew, and compared with the checkpoint
    index = read_index(run / "data")
    return isinstance(index, Index) and index.source == digest_of_text(
        config.data.paths, config.data.field
    )
