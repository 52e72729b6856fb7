"""Weights of a folder into the tensors that a rank has, each rank by itself.

What is in files as it is in the model is read by slice. What a rule of transformers converts, such
as experts that lie one by one in files, is made whole, one tensor at a time, and cut.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_platform.store import Box, Part
from hp_platform.store.safetensors import FileTensor
from hp_train.config import ModelConfig
from hp_train.config.schema import shown
from hp_train.errors import ConfigError
from hp_train.hugging_face.load import FLOATS, first_of, opened_files
from hp_train.transformers_model.conversion import Group, groups_of, one_name, saved_tensors
from hp_train.transformers_model.made import on_meta


def has_weights(model: ModelConfig) -> bool:
    """Whether a model has a folder with safetensors files."""
    return bool(model.transformers) and any(Path(model.transformers).glob("*.safetensors"))


def load_folder(
    model: ModelConfig,
    parts: Mapping[str, Part],
    *,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill parts of tensors in place from the files of the folder of a model.

    Args:
        model: Model configuration with the folder.
        parts: What this rank has, by global name.
        on_progress: Called after every tensor.

    Raises:
        hp_train.errors.ConfigError: Before anything is touched: the files lack a tensor, have one
            that is not of the model, or one that cannot be read.
    """
    with opened_files(Path(model.transformers)) as files:
        made = on_meta(model, torch.float32)
        names = one_name(made)
        groups = groups_of(made, {name: entry.shape for name, entry in files.items()})
        for each in _checked(made, groups, names, files):
            _read(each, names, files, parts)
            on_progress()


def _read(
    group: Group,
    names: Mapping[str, str],
    files: Mapping[str, FileTensor],
    parts: Mapping[str, Part],
) -> None:
    """Fill what is here of the tensors of a group."""
    here = {t: parts[names.get(t, t)] for t in group.targets if names.get(t, t) in parts}
    if not any(part.local.numel() for part in here.values()):
        return
    if group.rule is None:
        (part,) = here.values()
        part.local.copy_(files[group.sources[0]].read(part.box).view(part.local.shape))
        return
    values = group.rule.apply({source: _whole(files[source]) for source in group.sources})
    for target, part in here.items():
        value = values[target]
        part.local.copy_(value[part.box.within(Part.of(value).box)])


def _whole(file: FileTensor) -> Tensor:
    return file.read(Box((0,) * len(file.shape), file.shape))


def _checked(
    model: Any,
    groups: list[Group],
    names: Mapping[str, str],
    files: Mapping[str, FileTensor],
) -> list[Group]:
    """Groups of tensors of the model, when all of them are there and nothing else is."""
    wanted = saved_tensors(model)
    kept, found = [], set()
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]  # noqa: SLF001
    for group in groups:
        targets = {names.get(target, target) for target in group.targets}
        if targets <= wanted.keys():
            kept.append(group)
            found |= targets
        elif not any(re.search(p, t) for p in ignored for t in (*group.targets, *group.sources)):
            raise ConfigError(
                f"files of {type(model).__name__} must not have {group.sources[0]}, which is no "
                "tensor of the model"
            )
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError(f"files of {type(model).__name__} must have {first_of(missing)}")
    for group in kept:
        _require_readable(group, names, wanted, files)
    return kept


def _require_readable(
    group: Group,
    names: Mapping[str, str],
    wanted: Mapping[str, Tensor],
    files: Mapping[str, FileTensor],
) -> None:
    for source in group.sources:
        is_float = wanted[names.get(group.targets[0], group.targets[0])].is_floating_point()
        if is_float and files[source].dtype not in FLOATS:
            raise ConfigError(
                f"tensor {source} ({files[source].dtype}) must be one of {', '.join(FLOATS)}: "
                "quantised weights are not read"
            )
    if group.rule is None:
        (source,), (target,) = group.sources, group.targets
        here, there = files[source].shape, tuple(wanted[names.get(target, target)].shape)
        if here != there:
            raise ConfigError(
                f"tensor {shown(source)} ({list(here)}) must be of shape {list(there)}"
            )
