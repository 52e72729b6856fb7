"""First weights of a model of transformers, drawn by the model's own rule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_base.errors import ConfigError
from hp_base.seeds import derive_seed
from hp_checkpoint import Part
from hp_platform.dry_device import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.model import Stage
from hp_trainer.model.parameters import Parameter
from hp_transformers.stages.load import has_weights, load_folder
from hp_transformers.stages.model import CausalModel, on_meta, owners_of
from hp_transformers.stages.outline import outline_of
from hp_transformers.stages.parameters import promoting


@torch.no_grad()
def fill(
    stage: Stage,
    parameters: Sequence[Parameter],
    config: ModelConfig,
    *,
    seed: int,
    on_progress: Callable[[], None],
) -> None:
    """Fill the local part of parameters, and buffers.

    The rules of transformers fill modules, in an order, from torch's generator. A layer, or a part
    outside of layers, is on the meta device, where a rule fills nothing; one run of all rules there
    tells which rules use which parameter. Then each parameter that a rank has a share of gets
    memory, whole, in float32 on the CPU, and its rules run again with a generator seeded by the
    seed of the run and the parameter's name; the rank copies its share and frees the rest. So every
    layout has the same bits, and one whole parameter is in memory at a time. Where a rule reads one
    parameter to fill another, all parameters of the layer are filled at once. The same rules fill
    buffers.

    Args:
        stage: Stage of the model.
        parameters: Parameters of the stage, cut and sharded.
        config: Model configuration with the folder.
        seed: Seed of the run.
        on_progress: Called after every layer.
    """
    wanted = {parameter.name: parameter for parameter in parameters}
    buffers = dict(stage.named_buffers())
    if is_dry():
        for tensor in (*(p.local for p in parameters), *buffers.values()):
            tensor.copy_(torch.zeros((), device="cpu").expand(tensor.shape))
        return
    from_files = has_weights(config)
    names = {*buffers} if from_files else {*wanted, *buffers}

    def take(name: str, value: Tensor) -> None:
        if name in buffers:
            buffers[name].copy_(value)
        elif name in wanted and not from_files:
            local_part = wanted[name].local
            local_part.copy_(value[tuple(slice(*span) for span in wanted[name].span)])
        on_progress()

    with promoting(stage.compute_dtype):
        draw(config, seed, names, dtype=stage.compute_dtype, buffers_alone=from_files, take=take)
    if from_files:
        parts = {p.name: Part(p.local, p.shape, tuple(s for s, _ in p.span)) for p in parameters}
        kept = {name: Part.of(buffer) for name, buffer in stage.kept_buffers.items()}
        load_folder(config, parts | kept, on_progress=on_progress)


def draw(
    config: ModelConfig,
    seed: int,
    names: set[str],
    *,
    dtype: torch.dtype,
    buffers_alone: bool,
    take: Callable[[str, Tensor], None],
) -> None:
    """Draw parameters and buffers of a model, one at a time.

    Args:
        config: Model configuration with the folder.
        seed: Seed of the run.
        names: Global names of the wanted parameters and buffers.
        dtype: Dtype of the computation; some buffers are rounded to it.
        buffers_alone: Whether buffers are filled and no parameter is drawn.
        take: Function of a name and its whole values, which must not keep a reference to them.

    Raises:
        hp_base.errors.ConfigError: When the model has no rule for one of them.
    """
    model = on_meta(config, dtype, buffers=True)
    for part in _parts(model, outline_of(config).layers):
        prefix = f"{part.path}." if part.path else ""
        drawing = _Drawing(part)
        buffers = [prefix + leaf for leaf in drawing.buffers()]
        of = {
            parameter: [prefix + leaf for leaf, _ in places if prefix + leaf in names]
            for parameter, places in drawing.owners.items()
        }
        if not any(of.values()) and not names & {*buffers}:
            continue
        is_apart = drawing.look()
        groups = [[each] for each in drawing.owners] if is_apart else [[*drawing.owners]]
        for group in [] if buffers_alone else groups:
            wanted = [parameter for parameter in group if of[parameter]]
            first = drawing.owners[group[0]][0][0] if is_apart else ""
            if not wanted:
                continue
            with drawing.drawn(group, derive_seed(seed, "init", part.path, first)) as values:
                for parameter in wanted:
                    value = values.pop(parameter)
                    if not value.sum().isfinite():
                        raise ConfigError(
                            f"{type(model).__name__} must have a rule for the first values of "
                            f"{of[parameter][0]}; start from the weights of a folder"
                        )
                    for name in of[parameter]:
                        take(name, value)
                    del value
                values.clear()  # before the next ones are drawn
        for leaf, buffer in drawing.buffers().items():
            take(prefix + leaf, buffer)


_FILLED = "_is_hf_initialized"
"""Attribute by which transformers marks a module that it has filled."""
_Rule: TypeAlias = tuple[nn.Module, CausalModel]
"""A module, and the model that has the rule by which it is filled."""


class _Part(NamedTuple):
    """A part of a model that is filled at once.

    Attributes:
        path: Path of the module.
        module: Module.
        owner: Innermost model of transformers around the module, which has its rule.
        recurse: Whether modules inside the module belong to the part.
    """

    path: str
    module: nn.Module
    owner: CausalModel
    recurse: bool


class _Drawing:
    """Values of a part of a model whose parameters are on the meta device, filled in turn.

    Attributes:
        owners: Parameters, each with its names and the modules it is in.

    Args:
        part: Part of the model.
    """

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._rules = [*_rules(part.module, part.owner, recurse=part.recurse)]
        self._rules_of: dict[nn.Parameter, list[_Rule]] = {}
        self.owners = owners_of(part.module, recurse=part.recurse)

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the part, by their names in it."""
        part = self._part
        return dict(part.module.named_buffers(recurse=part.recurse, remove_duplicate=False))

    def look(self) -> bool:
        """Run all rules on the meta device, which fills buffers and shows what each rule uses.

        Returns:
            Whether each parameter can be drawn by itself: no rule reads values of parameters.
        """
        is_apart = True
        for rule in self._rules:
            looks = _Looks(self.owners.keys())
            try:
                with looks:
                    _fill(rule)
            except NotImplementedError:  # by torch: a rule reads values, and meta has none
                return False
            for parameter in looks.found:
                self._rules_of.setdefault(parameter, []).append(rule)
            is_apart = is_apart and not looks.reads
        return is_apart

    @contextmanager
    def drawn(self, group: list[nn.Parameter], seed: int) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Give parameters values for as long as the context is entered.

        Args:
            group: One parameter, or all of the part.
            seed: Seed of torch's generator for the rules.
        """
        rules = self._rules_of.get(group[0], []) if len(group) == 1 else self._rules
        for parameter in group:
            empty = torch.full_like(parameter, torch.nan, device="cpu", dtype=torch.float32)
            self._put(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            del empty
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for rule in rules:
                    _fill(rule)
            yield {each: self._get(each) for each in group}
        finally:
            for parameter in group:
                self._put(parameter, parameter)

    def _put(self, parameter: nn.Parameter, value: nn.Parameter) -> None:
        for name, module in self.owners[parameter]:
            setattr(module, name.rpartition(".")[2], value)

    def _get(self, parameter: nn.Parameter) -> Tensor:
        name, module = self.owners[parameter][0]
        value: Tensor = getattr(module, name.rpartition(".")[2])
        return value.detach()


class _Looks(TorchDispatchMode):
    """Records which parameters operators use, and whether one reads values of a parameter.

    Args:
        parameters: Parameters to watch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = {id(parameter): parameter for parameter in parameters}  # views are added
        self._alive: list[Tensor] = []  # so that no id is used twice
        self.found: dict[nn.Parameter, None] = {}
        self.reads = False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and look at its arguments."""
        output = func(*args, **(kwargs or {}))
        makes = any(word in str(func) for word in _MAKES)
        for value, argument in zip(args, func._schema.arguments, strict=False):  # noqa: SLF001 - there is no other way
            for tensor in tree_leaves(value):
                parameter = self._of.get(id(tensor))
                if parameter is None or makes:
                    continue
                self.found[parameter] = None
                if argument.alias_info is None:
                    self.reads = True
                elif isinstance(output, Tensor) and output is not tensor:  # a view
                    self._of[id(output)] = parameter
                    self._alive.append(output)
        return output


_MAKES = ("new_", "_like")
"""Names of operators that look at nothing but shapes."""


def _fill(rule: _Rule) -> None:
    """Fill a module by a rule, also if it was filled before."""
    from transformers.initialization import guard_torch_init_functions  # noqa: PLC0415

    module, owner = rule
    setattr(module, _FILLED, False)
    with guard_torch_init_functions():
        owner._initialize_weights(module)  # noqa: SLF001 - what `initialize_weights` calls


def _parts(model: CausalModel, layers: str) -> Iterator[_Part]:
    """Yield the parts of a model: each layer, and each module outside of the list of layers."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    above = {layers.rsplit(".", n)[0] for n in range(layers.count(".") + 1)} | {""}

    def visit(path: str, module: nn.Module, owner: CausalModel) -> Iterator[_Part]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for name, child in module.named_children() if path in above else ():
            yield from visit(f"{path}.{name}".lstrip("."), child, owner)
        yield _Part(path, module, owner, recurse=path not in above)

    yield from visit("", model, model)


def _rules(module: nn.Module, owner: CausalModel, *, recurse: bool) -> Iterator[_Rule]:
    """Yield the rules that fill a module: those of its children first."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    for child in module.children() if recurse else ():
        its_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _rules(child, its_owner, recurse=True)
    yield module, owner
