"""First weights of a model of transformers, drawn by the model's own rule.

Note [Drawn one by one]. The rules of transformers fill modules, in an order, from torch's
generator. A layer, or a part outside of layers, is on the meta device, where they fill nothing. One
run of them tells which rules look at which parameter. Then each parameter that a rank has a share
of gets memory by itself, in float32 on the CPU, and those rules run again with a generator that the
seed and its name decide; of that a rank keeps what it has. Every layout has the same bits. One
parameter at a time is in memory, whole. Where a rule reads one parameter to fill another, all of
the layer are filled at once. Buffers, which are no weights, come out of the same rules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_base.errors import ConfigError
from hp_base.seeds import derive_seed
from hp_checkpoint import Part
from hp_platform.host_reads import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.model.parameters import Parameter
from hp_transformers.stages.load import has_weights, load_folder
from hp_transformers.stages.made import on_meta, places_of
from hp_transformers.stages.outline import outline_of

if TYPE_CHECKING:
    from hp_transformers.stages.stage import TransformersStage


@torch.no_grad()
def fill(
    stage: "TransformersStage",
    parameters: Sequence[Parameter],
    config: ModelConfig,
    *,
    seed: int,
    on_progress: Callable[[], None],
) -> None:
    """Fill the local part of parameters, and buffers; see Note [Drawn one by one].

    Args:
        stage: Has the buffers.
        parameters: Its parameters.
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
            keep(wanted[name], value)
        on_progress()

    with stage.lifted():
        draw(config, seed, names, dtype=stage.compute_dtype, buffers_alone=from_files, take=take)
    if from_files:
        parts = {p.name: Part(p.local, p.shape, tuple(s for s, _ in p.span)) for p in parameters}
        kept = {name: Part.of(buffer) for name, buffer in stage.kept_buffers.items()}
        load_folder(config, parts | kept, on_progress=on_progress)


def keep(parameter: Parameter, whole: Tensor) -> None:
    """Copy what is here of a parameter from the whole of it."""
    parameter.local.copy_(whole[tuple(slice(*span) for span in parameter.span)])


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
        names: Global names that are wanted.
        dtype: Dtype of the computation; some buffers are rounded to it.
        buffers_alone: Whether parameters are not drawn.
        take: Gets each under its name, and is not to hold it.

    Raises:
        hp_base.errors.ConfigError: When the model has no rule for one of them.
    """
    model = on_meta(config, dtype, buffers=True)
    for path, part, owner, recurse in _parts(model, outline_of(config).layers):
        prefix = f"{path}." if path else ""
        drawing = _Drawing(part, owner, recurse=recurse)
        buffers = [prefix + leaf for leaf in drawing.buffers()]
        of = {
            parameter: [prefix + leaf for leaf, _ in places if prefix + leaf in names]
            for parameter, places in drawing.places.items()
        }
        if not any(of.values()) and not names & {*buffers}:
            continue
        is_apart = drawing.look()
        for group in [] if buffers_alone else drawing.groups(is_apart=is_apart):
            wanted = [parameter for parameter in group if of[parameter]]
            first = drawing.places[group[0]][0][0] if is_apart else ""
            if not wanted:
                continue
            with drawing.drawn(group, derive_seed(seed, "init", path, first)) as values:
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
"""Mark of transformers, of a module that it has filled."""
_Rule = tuple[nn.Module, Any]
"""A module, and the model that knows how it is filled."""


class _Drawing:
    """A part of a model, whose parameters are on the meta device, and get values in turn.

    Attributes:
        places: Parameters, each with names and modules that have it.

    Args:
        part: The part.
        owner: The model that it is in.
        recurse: Whether modules in it belong to it.
    """

    def __init__(self, part: nn.Module, owner: Any, *, recurse: bool) -> None:
        self._part, self._recurse = part, recurse
        self._rules = [*_rules(part, owner, recurse=recurse)]
        self._looked_at: dict[nn.Parameter, list[_Rule]] = {}
        self.places = places_of(part, recurse=recurse)

    def buffers(self) -> dict[str, Tensor]:
        """Buffers, by their names in it."""
        return dict(self._part.named_buffers(recurse=self._recurse, remove_duplicate=False))

    def look(self) -> bool:
        """Run all rules, which gives buffers their values.

        Returns:
            Whether each parameter can be drawn by itself: no rule reads values of parameters.
        """
        is_apart = True
        for rule in self._rules:
            looks = _Looks(self.places.keys())
            try:
                with looks:
                    _fill(rule)
            except NotImplementedError:  # of torch: on the meta device there is nothing to be read
                return False
            for parameter in looks.found:
                self._looked_at.setdefault(parameter, []).append(rule)
            is_apart = is_apart and not looks.reads
        return is_apart

    def groups(self, *, is_apart: bool) -> list[list[nn.Parameter]]:
        """Return what is drawn at once, each after the other."""
        return [[each] for each in self.places] if is_apart else [[*self.places]]

    @contextmanager
    def drawn(self, group: list[nn.Parameter], seed: int) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Fill some parameters, for as long as it is entered.

        Args:
            group: One, or all.
            seed: Decides what is drawn.
        """
        rules = self._looked_at.get(group[0], []) if len(group) == 1 else self._rules
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
        for name, module in self.places[parameter]:
            setattr(module, name.rpartition(".")[2], value)

    def _get(self, parameter: nn.Parameter) -> Tensor:
        name, module = self.places[parameter][0]
        value: Tensor = getattr(module, name.rpartition(".")[2])
        return value.detach()


class _Looks(TorchDispatchMode):
    """Notes down which parameters operators write to, and whether any reads one.

    Args:
        parameters: Those that are looked for.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = {id(parameter): parameter for parameter in parameters}  # views are added
        self._alive: list[Tensor] = []  # so that no id is used twice
        self.found: dict[nn.Parameter, None] = {}
        self.reads = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and see what it gets."""
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
    """Fill a module, however often."""
    from transformers.initialization import guard_torch_init_functions  # noqa: PLC0415

    module, owner = rule
    setattr(module, _FILLED, False)
    with guard_torch_init_functions():
        owner._initialize_weights(module)  # noqa: SLF001 - what `initialize_weights` calls


def _parts(model: Any, layers: str) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """Yield what is filled at once: path, module, owner of the rule, whether children follow it."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    above = {layers.rsplit(".", n)[0] for n in range(layers.count(".") + 1)} | {""}

    def visit(
        path: str, module: nn.Module, owner: Any
    ) -> Iterator[tuple[str, nn.Module, Any, bool]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        if path not in above:
            yield path, module, owner, True
            return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}".lstrip("."), child, owner)
        yield path, module, owner, False

    yield from visit("", model, model)


def _rules(module: nn.Module, owner: Any, *, recurse: bool) -> Iterator[_Rule]:
    """Yield what fills a module: children first, each by the rule of the model that it is in."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    for child in module.children() if recurse else ():
        its_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _rules(child, its_owner, recurse=True)
    yield module, owner
