"""First weights of a model of transformers, drawn by the model's own rule.

Note [Drawn whole, kept in part]. The rules of transformers fill whole modules, in an order, from
torch's generator. So a layer, or a part outside of layers, is made whole in float32 on the CPU, and
filled with a generator that the seed and its name decide; of that a rank keeps what it has. Every
layout has the same bits. One layer at a time is in memory, whole, on every rank that has a share of
it. Buffers, which are no weights, come out of the same rules.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hp_platform.dry import is_dry
from hp_platform.store import Part
from hp_train.base.randomness import derive_seed
from hp_train.config import ModelConfig
from hp_train.errors import ConfigError
from hp_train.model.parameters import Parameter
from hp_train.transformers_model.load import has_weights, load_folder
from hp_train.transformers_model.made import on_meta
from hp_train.transformers_model.outline import outline_of

if TYPE_CHECKING:
    from hp_train.transformers_model.stage import TransformersStage


@torch.no_grad()
def fill(
    stage: "TransformersStage",
    parameters: Sequence[Parameter],
    config: ModelConfig,
    *,
    seed: int,
    on_progress: Callable[[], None],
) -> None:
    """Fill the local part of parameters, and buffers; see Note [Drawn whole, kept in part].

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
    dtype = stage.compute_dtype
    with stage.lifted():
        for path, values in drawn(config, seed, names, dtype=dtype, buffers_alone=from_files):
            for leaf, value in values.items():
                name = f"{path}.{leaf}".lstrip(".")
                if name in buffers:
                    buffers[name].copy_(value)
                elif name in wanted and not from_files:
                    keep(wanted[name], value)
            on_progress()
    if from_files:
        parts = {p.name: Part(p.local, p.shape, tuple(s for s, _ in p.span)) for p in parameters}
        kept = {name: Part.of(buffer) for name, buffer in stage.kept_buffers.items()}
        load_folder(config, parts | kept, on_progress=on_progress)


def keep(parameter: Parameter, whole: Tensor) -> None:
    """Copy what is here of a parameter from the whole of it."""
    parameter.local.copy_(whole[tuple(slice(*span) for span in parameter.span)])


def drawn(
    config: ModelConfig, seed: int, names: set[str], *, dtype: torch.dtype, buffers_alone: bool
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Layers and other parts of a model, one at a time, filled.

    Args:
        config: Model configuration with the folder.
        seed: Seed of the run.
        names: Global names that are wanted: parts without one are left out.
        dtype: Dtype of the computation; some buffers are rounded to it.
        buffers_alone: Whether parameters are not drawn.

    Yields:
        Path, and parameters and buffers by their names behind it.
    """
    from transformers.initialization import guard_torch_init_functions  # noqa: PLC0415

    model = on_meta(config, dtype, buffers=True)
    for path, part, owner, recurse in _parts(model, outline_of(config).layers):
        prefix = f"{path}." if path else ""
        own: dict[str, Tensor] = dict(
            part.named_parameters(recurse=recurse, remove_duplicate=False)
        )
        own |= dict(part.named_buffers(recurse=recurse, remove_duplicate=False))
        if not any(f"{prefix}{leaf}" in names for leaf in own):
            continue
        if not buffers_alone:
            _give_memory(part, recurse=recurse)
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(derive_seed(seed, "init", path))
            _apply(part, owner, recurse=recurse)
        values: dict[str, Tensor] = dict(
            part.named_parameters(recurse=recurse, remove_duplicate=False)
        )
        for leaf, value in () if buffers_alone else values.items():
            if not value.isfinite().all():
                raise ConfigError(
                    f"{type(model).__name__} must have a rule for the first values of "
                    f"{prefix}{leaf}; start from the weights of a folder"
                )
        yield path, values | dict(part.named_buffers(recurse=recurse))
        _give_memory(part, recurse=recurse, device="meta")


def _give_memory(part: nn.Module, *, recurse: bool, device: str = "cpu") -> None:
    """Give parameters memory, or take it; what is one parameter stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in part.modules() if recurse else [part]:
        for leaf, old in [*module.named_parameters(recurse=False)]:
            if id(old) not in made:
                new = torch.full_like(old, torch.nan, device=device) if old.is_meta else old
                new = new.to(device, torch.float32)
                made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
            setattr(module, leaf, made[id(old)])


def _parts(model: Any, layers: str) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """What is filled at once: path, module, who has the rule, and whether children belong to it."""
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


def _apply(module: nn.Module, owner: Any, *, recurse: bool) -> None:
    """Fill a module by the rule of the model that it is in, children first."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    for child in module.children() if recurse else ():
        _apply(child, child if isinstance(child, PreTrainedModel) else owner, recurse=True)
    owner._initialize_weights(module)  # noqa: SLF001 - what `initialize_weights` calls
