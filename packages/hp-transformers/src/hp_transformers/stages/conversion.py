"""Names and forms of weights in files, and those in a model: transformers' own rules, by tensor.

A rule of transformers renames a tensor, or makes tensors out of several, such as stacks of experts
out of single ones. Here each is a `Group`, so that weights are read one group at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hp_base.errors import ConfigError, told
from hp_transformers.stages.model import CausalConfig, CausalModel

_Converted: TypeAlias = Mapping[str, Tensor | list[Tensor]]


class _Converter(Protocol):
    """The parts of a `WeightConverter` of transformers that are used here."""

    def add_tensor(self, name: str, source: str, pattern: str, values: Tensor, /) -> None:
        """Collect a tensor of files."""

    def convert(self, name: str, *, model: CausalModel, config: CausalConfig) -> _Converted:
        """Return the tensors of the model that the collected ones make."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of files that together make one or more tensors of a model.

    Attributes:
        sources: Names in files, in the order in which the rule wants them.
        targets: Names in the model.
        rule: Conversion; None: source and target have the same values.
        shapes: Shapes of the targets that the rule makes, by name.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rule: "_Rule | None" = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A converter of transformers, for some tensors.

    Attributes:
        converter: Converter that has collected no tensors yet.
        name: Name of a tensor of the model, under which the converter collects.
        patterns: Pattern of the converter that each source has matched.
        model: Model that has the tensors.
    """

    converter: _Converter
    name: str
    patterns: Mapping[str, str]
    model: CausalModel

    def apply(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole tensors of files to whole tensors of the model."""
        converter = deepcopy(self.converter)
        for source, pattern in self.patterns.items():
            converter.add_tensor(self.name, source, pattern, values[source])
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}


def groups_of(model: CausalModel, shapes: Mapping[str, Sequence[int]]) -> list[Group]:
    """Group tensors of files by the tensors of a model that they make, known to the model or not.

    Args:
        model: Model on the meta device.
        shapes: Shape of each tensor of the files.
    """
    from transformers import core_model_loading as loading  # noqa: PLC0415
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415

    rules = get_model_conversion_mapping(model)
    renamings = [r for r in rules if isinstance(r, loading.WeightRenaming)]
    converters = [r for r in rules if isinstance(r, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    made: list[Group] = []
    collected: dict[str, dict[str, str]] = {}
    for source in sorted(shapes, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(source, renamings, converters, prefix, known)
        if target not in known and source in known:  # it has the model's own name already
            target, pattern = loading.rename_source_key(source, [], [], prefix, known)
        if pattern is None:
            made.append(Group((source,), (target,)))
        else:
            collected.setdefault(target, {})[source] = pattern
    for name, patterns in collected.items():
        rule = _Rule(by_pattern[next(iter(patterns.values()))], name, patterns, model)
        made.append(_converted(rule, shapes))
    return made


def _converted(rule: _Rule, shapes: Mapping[str, Sequence[int]]) -> Group:
    """Return the group of a rule, whose shapes one run on the meta device tells.

    Raises:
        hp_base.errors.ConfigError: When the rule fails on tensors of these shapes.
    """
    sources = tuple(rule.patterns)
    empty = {source: torch.empty(tuple(shapes[source]), device="meta") for source in sources}
    try:
        given = {name: tuple(tensor.shape) for name, tensor in rule.apply(empty).items()}
    except Exception as error:
        raise ConfigError(
            f"tensors {sources[0]} and others must be what transformers makes {rule.name} of: "
            f"{told(error, 200)}"
        ) from error
    return Group(sources, tuple(given), rule, given)


def reverted(model: CausalModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert whole tensors of a layer, or of another part of a model, to tensors of files.

    Args:
        model: Model that has the tensors.
        tensors: Tensors by their names in the model.
    """
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    made: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return made


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that files of a model have; a parameter under its first name alone."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the first name of that parameter."""
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names: Iterable[tuple[str, Tensor]] = model.named_parameters(remove_duplicate=False)
    return {name: firsts[id(parameter)] for name, parameter in all_names}
