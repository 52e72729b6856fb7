"""Rules for the files, folders and checkpoints of a run, and for the extras that it needs."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hp_base.errors import ConfigError
from hp_base.messages import did_you_mean, shown, shown_path
from hp_trainer.config import Config
from hp_trainer.config.rules.hints import near_multiples

TOKENIZER = "tokenizer.json"
"""What the tokenizer of a folder is called."""
_OTHER_WEIGHTS = (
    "*.safetensors.index.json",
    "pytorch_model*.bin*",
    "consolidated*.pth",
    "tf_model*.h5",
    "flax_model*.msgpack",
    "*.gguf",
)
"""What weights are in besides safetensors files, and the index of files that are not there."""


def file_rules(config: Config) -> Iterator[str]:
    """Yield what is read must be there, and what is written must have a place."""
    run, data = config.run, config.data
    yield from () if has_tokens(run.resume) else _no_data(data.paths)
    yield from _model_files(config)
    if data.tokenizer and not _is(data.tokenizer, Path.is_file):
        yield (
            f"data.tokenizer ({shown_path(data.tokenizer)}) must be a file, or a folder with a "
            f"{TOKENIZER}{_neighbour(data.tokenizer)}"
        )
    if data.separator and not data.tokenizer:
        yield f"data.separator ({shown(data.separator)}) needs data.tokenizer: bytes have no names"
    if data.plan_costs and not _is(data.plan_costs, Path.is_file):
        yield (
            f"data.plan_costs ({shown_path(data.plan_costs)}) must be a file"
            f"{_neighbour(data.plan_costs)}"
        )
    if run.init_from and not _is(f"{run.init_from}/config.json", Path.is_file):
        yield (
            f"run.init_from ({shown_path(run.init_from)}) must be a folder with a config.json"
            f"{_neighbour(run.init_from)}"
        )
    if run.resume:
        require_run_directory(run.resume)
    key, target = ("run.resume", run.resume) if run.resume else ("run.output_dir", run.output_dir)
    if problem := _not_writable(target):
        yield f"{key} ({shown_path(target)}) must be a writable folder: {problem}"


def _no_data(paths: Iterable[str]) -> Iterator[str]:
    """Yield what is to be read must be there; `look_at` sees it of patterns and addresses."""
    for path in paths:
        if "://" in path or any(character in path for character in "*?["):
            continue
        if not _is(path, Path.exists):
            yield f"data.paths ({shown_path(path)}) must exist{_neighbour(path)}"
        elif not (_is(path, Path.is_file) or _is(path, Path.is_dir)):
            yield f"data.paths ({shown_path(path)}) must be a regular file or a folder"


def _model_files(config: Config) -> Iterator[str]:
    """Yield what a model is made of must be there."""
    code, _, function = config.model.factory.rpartition(":")
    if config.model.factory and not (code and function):
        yield (
            f"model.factory ({shown_path(config.model.factory)}) must be package.module:function "
            "or file.py:function"
        )
    elif code.endswith(".py") and not _is(code, Path.is_file):
        yield f"model.factory ({shown_path(code)}) must be a file{_neighbour(code)}"
    folder = config.model.transformers
    if folder and not _is(f"{folder}/config.json", Path.is_file):
        yield (
            f"model.transformers ({shown_path(folder)}) must be a folder with a config.json"
            f"{_neighbour(folder)}"
        )
    elif folder and not config.run.resume and (other := _unread_weights(Path(folder))):
        yield (
            f"model.transformers ({shown_path(folder)}) must have its weights in safetensors "
            f"files: {shown(other)} would not be read, and they would be drawn"
        )


def _unread_weights(folder: Path) -> str:
    """Return a file of weights in a folder without safetensors files; empty: there is none."""
    if any(folder.glob("*.safetensors")):
        return ""
    return next((path.name for each in _OTHER_WEIGHTS for path in folder.glob(each)), "")


def require_run_directory(path: str) -> None:
    """Refuse to go on with something that is no run directory.

    Raises:
        ConfigError: When it has no ``config.toml``.
    """
    if not _is(f"{path}/config.toml", Path.is_file):
        raise ConfigError(
            f"run.resume ({shown_path(path)}) must be a run directory, with a config.toml"
            f"{_neighbour(path)}"
        )


def require_model_folder(path: str) -> None:
    """Refuse to read a model from something that is no folder of one.

    Raises:
        ConfigError: When it has no ``config.json``.
    """
    if not _is(f"{path}/config.json", Path.is_file):
        raise ConfigError(
            f"{shown_path(path)} must be a folder with a config.json{_neighbour(path)}"
        )


def has_tokens(run: str) -> bool:
    """Say if a run directory has the tokens that it goes on with, wherever the text is now."""
    return bool(run) and _is(f"{run}/data/index.json", Path.is_file)


def saving_rules(config: Config) -> Iterator[str]:
    """Yield why checkpoints to be kept for good would never be saved."""
    often, kept = config.train.save_every, config.train.keep_every
    if kept and (often == 0 or kept % often):
        hint = near_multiples(kept, often) if often else ""
        yield f"train.keep_every ({kept}) must be a multiple of train.save_every ({often}){hint}"


def extra_rules(config: Config) -> Iterator[str]:
    """Yield what needs an optional package must find it."""
    for extra, key, is_wanted in (
        ("tensorboard", "run.tensorboard", config.run.tensorboard),
        ("tokenizers", "data.tokenizer", config.data.tokenizer),
        ("transformers", "model.transformers", config.model.transformers),
    ):
        if is_wanted and importlib.util.find_spec(extra) is None:
            yield f"{key} needs the extra {extra}: pip install 'hp-train[{extra}]'"


def _not_writable(path: str) -> str:
    """Say why nothing can be made in a folder, or in the nearest one above it that exists."""
    if not path or "\0" in path:
        return "no such name"
    folder = Path(path).absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    except OSError as error:
        return error.strerror or "not accessible"
    if not folder.is_dir():
        return f"{shown_path(folder)} is a file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{shown_path(folder)} is not writable"
    return ""


def _is(path: str, is_so: Callable[[Path], bool]) -> bool:
    """Say if something is so of a path; not of one that cannot be looked at, or is no name."""
    try:
        return is_so(Path(path))
    except (OSError, ValueError):
        return False


def _neighbour(path: str) -> str:
    """Return a file of a similar name in the same folder, as a hint."""
    try:
        folder, name = os.path.split(path.rstrip("/"))
        siblings = [entry.name for entry in Path(folder or ".").iterdir()]
        return "" if name in siblings else did_you_mean(name, siblings)
    except (OSError, ValueError):
        return ""
