"""Weights of a folder into the tensors that a rank has, each rank by itself.

Tensors that are the same in files and in the model are read by slice. Tensors that a rule of
transformers converts, such as experts that files have one by one, are made whole, one at a time,
and cut.

Old files have buffers that models compute by themselves today: masks, positions, frequencies. They
are compared with the model's own. Some files have weights of parts that transformers does not have,
such as modules that predict further tokens: those are not trained, and a warning says so.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_checkpoint import Part
from hp_checkpoint.safetensors import FileTensor
from hp_checkpoint.weight_files import first_of
from hp_trainer.config import ModelConfig
from hp_transformers.families.copies import FREQUENCIES, TIED, are_equal, require_frequencies, whole
from hp_transformers.families.load import FLOATS, opened_files
from hp_transformers.stages.conversion import Group, first_names, groups_of, saved_tensors
from hp_transformers.stages.model import CausalModel, on_meta


def has_weights(model: ModelConfig) -> bool:
    """Tell whether a model has a folder with safetensors files."""
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
        parts: Parts of tensors of this rank, by global name.
        on_progress: Called after every tensor.

    Raises:
        hp_base.errors.ConfigError: Before any part is filled: the files lack a tensor, have a
            tensor that is not of the model, or one that cannot be read.
    """
    with opened_files(Path(model.transformers)) as files:
        made = on_meta(model, torch.float32)
        names = first_names(made)
        groups, _ = _checked(model, made, names, files)
        for each in groups:
            _read(each, names, files, parts)
            on_progress()


def left_out(model: ModelConfig) -> list[str]:
    """Return the names of weights in the files of a model that are of no part of the model.

    Args:
        model: Model configuration with the folder.
    """
    if not has_weights(model):
        return []
    with opened_files(Path(model.transformers)) as files:
        made = on_meta(model, torch.float32)
        return _checked(model, made, first_names(made), files)[1]


def _read(
    group: Group,
    names: Mapping[str, str],
    files: Mapping[str, FileTensor],
    parts: Mapping[str, Part],
) -> None:
    """Fill this rank's parts of the tensors of a group."""
    here = {t: parts[names.get(t, t)] for t in group.targets if names.get(t, t) in parts}
    if not any(part.local.numel() for part in here.values()):
        return
    if group.rule is None:
        (part,) = here.values()
        part.local.copy_(files[group.sources[0]].read(part.box).view(part.local.shape))
        return
    values = group.rule.apply({source: whole(files[source]) for source in group.sources})
    for target, part in here.items():
        value = values[target]
        part.local.copy_(value[part.box.within(Part.of(value).box)])


def _checked(
    config: ModelConfig,
    made: CausalModel,
    names: Mapping[str, str],
    files: Mapping[str, FileTensor],
) -> tuple[list[Group], list[str]]:
    """Return the groups of the model, once all tensors are found, and names of unused weights."""
    wanted = saved_tensors(made)
    chosen: dict[frozenset[str], Group] = {}
    beside: dict[str, tuple[str, FileTensor]] = {}
    for group in groups_of(made, {name: entry.shape for name, entry in files.items()}):
        targets = frozenset(names.get(target, target) for target in group.targets)
        if not targets <= wanted.keys():
            source = group.sources[0]
            beside[group.targets[0]] = (source, files[source])
            continue
        _require_readable(group, names, wanted, files)
        if targets in chosen:
            _require_tied(chosen[targets], group, files)
        else:
            chosen[targets] = group
    found = frozenset().union(*chosen)
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError(f"files of {type(made).__name__} must have {first_of(missing)}")
    return [*chosen.values()], require_alike(config, made, beside)


def _require_tied(one: Group, other: Group, files: Mapping[str, FileTensor]) -> None:
    """Refuse tensors of files that differ but are one parameter of the model."""
    a, b = one.sources[0], other.sources[0]
    if one.rule or other.rule or not are_equal(files[a], files[b]):
        is_tied = one.targets != other.targets
        remedy = TIED if is_tied else f"both are {one.targets[0]}; take one out of the files"
        raise ConfigError(f"tensor {b} must equal {a}: {remedy}")


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
        return
    for target, made in group.shapes.items():
        there = tuple(wanted[names.get(target, target)].shape)
        if made != there:
            raise ConfigError(
                f"tensors {first_of(group.sources)} make a tensor of shape {list(made)}, which "
                f"must be {list(there)}"
            )


_MASK = re.compile(r"(^|\.)attention\.bias$")
_MASKED = re.compile(r"(^|\.)attention\.masked_bias$")
_HIDES = -1e4  # bound of the values that are added to scores to hide a position


def require_alike(
    config: ModelConfig, made: CausalModel, beside: Mapping[str, tuple[str, FileTensor]]
) -> list[str]:
    """Refuse tensors of files that are neither of a model nor equal to its own in their place.

    Args:
        config: Model configuration with the folder.
        made: Model of the folder, on the meta device.
        beside: Name in files and tensor, by the name that the tensor would have in the model.

    Returns:
        Names of weights of parts that transformers does not have.

    Raises:
        hp_base.errors.ConfigError: About the first tensor to refuse.
    """
    if not beside:
        return []
    buffers = dict(on_meta(config, torch.float32, buffers=True).named_buffers())
    frequencies = [tensor for name, tensor in buffers.items() if name.endswith("inv_freq")]
    left_out = []
    for target, (source, file) in beside.items():
        if target.endswith(FREQUENCIES):
            require_frequencies(source, file, frequencies)
        elif target in buffers or _MASK.search(target) or _MASKED.search(target):
            _require_buffer(source, file, buffers.get(target), made)
        elif any(re.search(p, target) for p in made._keys_to_ignore_on_load_unexpected or ()):  # noqa: SLF001
            left_out.append(source)
        else:
            raise ConfigError(
                f"files of {type(made).__name__} must not have {source}, which is no tensor of "
                "the model"
            )
    return left_out


def _require_buffer(
    name: str, file: FileTensor, expected: Tensor | None, made: CausalModel
) -> None:
    values = whole(file).double()
    if expected is not None:
        is_alike = torch.equal(values, expected.to(values.dtype).view_as(expected))
    elif _MASK.search(name):
        is_alike = values.ndim == 4 and torch.equal(values, torch.ones_like(values).tril())
    else:
        is_alike = bool((values <= _HIDES).all())
    if not is_alike:
        raise ConfigError(
            f"tensor {name} must be what {type(made).__name__} makes by itself, and is not: take "
            "it out of the files to train with that"
        )
