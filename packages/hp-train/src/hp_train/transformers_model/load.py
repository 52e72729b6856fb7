"""Weights of a folder into the tensors that a rank has, each rank by itself.

What is in files as it is in the model is read by slice. What a rule of transformers converts, such
as experts that lie one by one in files, is made whole, one tensor at a time, and cut.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform.store import Box, Part
from hp_platform.store.safetensors import FileTensor
from hp_train.config import ModelConfig
from hp_train.config.schema import shown
from hp_train.errors import ConfigError
from hp_train.hugging_face.all_ranks import on_all_ranks
from hp_train.hugging_face.load import opened_files
from hp_train.transformers_model.conversion import Group, groups_of, one_name, saved_tensors
from hp_train.transformers_model.made import on_meta

_FLOATS = ("BF16", "F16", "F32", "F64")
_SHOWN = 3


def has_weights(model: ModelConfig) -> bool:
    """Whether a model has a folder with safetensors files."""
    return bool(model.transformers) and any(Path(model.transformers).glob("*.safetensors"))


def load_folder(
    model: ModelConfig, tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None
) -> None:
    """Fill tensors in place from the files of the folder of a model.

    Args:
        model: Names the folder.
        tensors: What this rank has, by global name; a DTensor takes its part.
        group: CPU group of the ranks that call together; None: this rank is alone.

    Raises:
        hp_train.errors.ConfigError: On every rank and before any tensor is touched: the files lack
            a tensor, have one that is not of the model, or one that cannot be read.
        hp_platform.PeerError: When another rank failed for another reason.
    """
    with ExitStack() as stack:

        def prepare() -> tuple[list[Group], dict[str, str], Mapping[str, FileTensor]]:
            files = stack.enter_context(opened_files(Path(model.transformers)))
            made = on_meta(model, torch.float32)
            names = one_name(made)
            groups = groups_of(made, {name: entry.shape for name, entry in files.items()})
            return _checked(made, groups, names, files), names, files

        def read() -> None:
            for each in groups:
                _read(each, names, files, tensors)

        found = on_all_ranks(prepare, group=group, where="find the weights to load")
        groups, names, files = found
        with torch.no_grad():
            on_all_ranks(read, group=group, where="load weights")


def _read(
    group: Group,
    names: Mapping[str, str],
    files: Mapping[str, FileTensor],
    tensors: Mapping[str, Tensor],
) -> None:
    """Fill what is here of the tensors of a group."""
    here = {
        t: Part.of(tensors[names.get(t, t)]) for t in group.targets if names.get(t, t) in tensors
    }
    if not any(part.local.numel() for part in here.values()):
        return
    if group.rule is None:
        (part,) = here.values()
        part.local.copy_(files[group.sources[0]].read(part.box).view(part.local.shape))
        return
    values = group.convert({source: _whole(files[source]) for source in group.sources})
    for target, part in here.items():
        offsets, sizes = part.box
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        part.local.copy_(values[target][box])


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
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"files of {type(model).__name__} must have {', '.join(missing[:_SHOWN])}{more}"
        )
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
        if is_float and files[source].dtype not in _FLOATS:
            raise ConfigError(
                f"tensor {source} ({files[source].dtype}) must be one of {', '.join(_FLOATS)}: "
                "quantised weights are not read"
            )
    if group.rule is None:
        (source,), (target,) = group.sources, group.targets
        here, there = files[source].shape, tuple(wanted[names.get(target, target)].shape)
        if here != there:
            raise ConfigError(
                f"tensor {shown(source)} ({list(here)}) must be of shape {list(there)}"
            )
