"""The parameters of a model: what modules declare of them, and what of each is on this rank.

Initialisation, weight decay, tensor parallelism, FSDP, checkpoints, conversion and `hp plan` read
declarations, and never what a parameter is called here.

A table may be the embedding and the output matrix, on two stages. Both have it under its one global
name, so it starts the same on both, is cut the same and is one tensor in a checkpoint. On two
ranks, each has a copy; the gradients of both are summed over the pair, last of all sums, so that
both add the same two numbers and the copies stay equal bit for bit. On one rank, as in schedules
that go there and back, both stages have the same memory, or, where FSDP shards each stage by
itself, a copy that is written after every update. There too each stage has a gradient of its own,
and they are added when all microbatches are done: whose turn comes when is the schedule's, and sums
in another order are other numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from hp_base.errors import ConfigError
from hp_expert import GroupedExperts, TopKRouter
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.parameter import ParameterSpec

M = TypeVar("M", bound=nn.Module)

_EXPERTS = {
    name: ParameterSpec(
        "bias" if name.startswith("b") else "matrix",
        is_expert=True,
        hidden_dim=dim,
        is_residual=name == "w2",
    )
    for name, dim in GroupedExperts.hidden_dims.items()
}
_MATRIX = {"weight": ParameterSpec(), "bias": ParameterSpec("bias")}
_NORM = {"weight": ParameterSpec("norm"), "bias": ParameterSpec("bias")}
_KNOWN: dict[type[nn.Module], dict[str, ParameterSpec]] = {
    GroupedExperts: _EXPERTS,
    TopKRouter: _MATRIX,
    nn.Linear: _MATRIX,
    nn.Embedding: {"weight": ParameterSpec(is_table=True)},
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
}
"""Modules of hp-expert and torch, which cannot say it themselves."""


class Declared(NamedTuple):
    """A parameter or buffer of a whole model.

    Attributes:
        shape: Shape of the whole of it.
        spec: What it is.
        published: Name in files of transformers, as most families have it.
    """

    shape: tuple[int, ...]
    spec: ParameterSpec
    published: str


def declare(module: M, published: str | None = None, **specs: ParameterSpec) -> M:
    """Say what the parameters of a module are.

    Modules that need not: `torch.nn`'s Linear, Embedding, LayerNorm and RMSNorm, those of hp-expert
    and those of `hp_trainer.model`.

    Args:
        module: Module whose own parameters, not those of its children, are described.
        published: Its path in published files, from that of the module around it; None: leave it.
        specs: What each parameter is, by its name in the module.

    Returns:
        The module.
    """
    module.__dict__.setdefault("parameter_specs", {}).update(specs)
    if published is not None:
        module.__dict__["published_path"] = published
    return module


def declared(model: nn.Module) -> dict[str, Declared]:
    """Return everything that a model, or a stage of a model, has declared, by global name.

    Args:
        model: Whole: neither cut nor sharded yet.

    Returns:
        Parameters first, in the order of `torch.nn.Module.named_parameters`, then buffers.

    Raises:
        hp_base.errors.ConfigError: When a parameter is not declared.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found: dict[str, Declared] = {}
    for path, published, module in _modules(model):
        of_kind = next((specs for kind, specs in _KNOWN.items() if isinstance(module, kind)), {})
        known = of_kind | module.__dict__.get("parameter_specs", {})
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for leaf, tensor in own:
            name = f"{path}.{leaf}".lstrip(".")
            if name not in parameters and name not in buffers:
                continue  # tied to one that was listed
            spec = known.get(leaf, ParameterSpec("bias") if name in buffers else None)
            if spec is None:
                raise ConfigError(
                    f"parameter {name} of the model must be declared: "
                    f"hp_trainer.model.declare(module, {leaf}=ParameterSpec(...))"
                )
            found[name] = Declared(tuple(tensor.shape), spec, f"{published}.{leaf}".lstrip("."))
    return {name: found[name] for name in (*parameters, *buffers)}


def _modules(
    module: nn.Module, path: str = "", published: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """Return all modules with their path here and in published files."""
    published = f"{published}.{module.__dict__.get('published_path', '')}".strip(".")
    yield path, published, module
    for name, child in module.named_children():
        yield from _modules(child, f"{path}.{name}".lstrip("."), published)


class Cut(NamedTuple):
    """One cut of a parameter over the ranks of a group.

    Attributes:
        group: Name, see :data:`hp_trainer.layout.ranks.GROUPS`.
        dim: Dim that is cut, in chunks as `torch.chunk` makes them.
    """

    group: str
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter, known by its name in the whole model.

    Attributes:
        name: Global name.
        tensor: Tensor as the module has it: plain, or a DTensor where FSDP shards it.
        local: The values that are here, sharing the memory of ``tensor``; a leaf, for the
            optimizer.
        shape: Shape of the whole parameter.
        cuts: How the whole becomes the local part, one cut after the other.
        replicas: Groups whose ranks hold the same values.
        unsummed: Those of them over which gradients are to be summed after backward: all, but for
            copies of what FSDP shards, over which it sums, and ranks that have whole gradients, as
            those that share out experts' hidden width have of output biases.
        spec: What it is.
        span: First and last + 1 index of the local part in the whole, for each dim.
        tied_copies: The same parameter in other stages of this rank, with gradients of their own:
            in the same memory, or a copy, where FSDP shards each stage by itself.
        tied_ranks: Ranks whose stages have a copy; gradients are summed over them after all other
            sums.
    """

    name: str
    tensor: nn.Parameter
    local: Tensor
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    replicas: tuple[str, ...]
    unsummed: tuple[str, ...]
    spec: ParameterSpec
    span: tuple[tuple[int, int], ...]
    tied_copies: tuple[nn.Parameter, ...] = ()
    tied_ranks: ProcessGroup | None = None

    @property
    def has_copies(self) -> bool:
        """Tell whether the gradient is summed over other ranks after backward."""
        return bool(self.unsummed) or self.tied_ranks is not None

    @property
    def experts(self) -> range | None:
        """Return the global indices of the local experts; None if it is no expert's."""
        return range(*self.span[0]) if self.spec.is_expert else None

    @torch.no_grad()
    def update_tied_copies(self) -> None:
        """Give other stages of this rank the values that ``local`` has now."""
        for twin in self.tied_copies:
            copy = local_part(twin)
            if copy.data_ptr() != self.local.data_ptr():
                copy.copy_(self.local)

    def as_whole(self, local: Tensor, mesh: Mesh) -> Tensor:
        """Describe a tensor cut as this parameter is: a DTensor, or itself where nothing is cut.

        Args:
            local: Tensor with the shape of the local part; memory is shared.
            mesh: Mesh of the run.
        """
        if not self.cuts:
            return local
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return DTensor.from_local(
            local,
            mesh.submesh(*(cut.group for cut in self.cuts)),
            [Shard(cut.dim) for cut in self.cuts],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )


def named_parameters(
    stage: nn.Module,
    whole: Mapping[str, Declared] | None = None,
    mesh: Mesh | None = None,
) -> list[Parameter]:
    """Return all parameters of a stage, after it has been cut and sharded.

    Args:
        stage: Its parameters carry their global names.
        whole: What `declared` said before it was cut; None: nothing is cut.
        mesh: Mesh of the run, if something is cut.
    """
    known = declared(stage) if whole is None else whole
    found = []
    for name, tensor in stage.named_parameters():
        shape, spec, _ = known[name]
        cuts: tuple[Cut, ...] = ()
        replicas: tuple[str, ...] = ()
        if mesh is not None:
            cuts, replicas = _placement(tensor, spec, mesh)
        summed = {_copies(spec)} if isinstance(tensor, DTensor) else set()
        summed |= {"tp"} if spec.is_whole_on_tp else set()
        summed |= {"etp"}  # whose ranks have all rows of an expert: `hp_expert.routed_swiglu`
        found.append(
            Parameter(
                name=name,
                tensor=tensor,
                local=local_part(tensor),
                shape=shape,
                cuts=cuts,
                replicas=replicas,
                unsummed=tuple(group for group in replicas if group not in summed),
                spec=spec,
                span=_span(shape, cuts, mesh),
            )
        )
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Return what is here of a tensor, without a graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placement(
    tensor: Tensor, spec: ParameterSpec, mesh: Mesh
) -> tuple[tuple[Cut, ...], tuple[str, ...]]:
    """Return the groups over which a parameter is cut, and those with copies of what is left."""
    replicas = [_copies(spec), *(group for group, dim in spec.cuts.items() if dim is None)]
    cuts = [
        Cut(group, dim)
        for group, dim in spec.cuts.items()
        if dim is not None and mesh.size(group) > 1
    ]
    if isinstance(tensor, DTensor):
        placement = tensor.placements[-1]  # those before are of copies
        assert isinstance(placement, Shard)
        cuts.append(Cut("expert_shard" if spec.is_expert else "fsdp", placement.dim))
    return tuple(cuts), tuple(group for group in replicas if mesh.size(group) > 1)


def _copies(spec: ParameterSpec) -> str:
    """Return the group of data-parallel ranks with the same part of a parameter."""
    return "expert_replicate" if spec.is_expert else "dp_replicate"


def _span(
    shape: Iterable[int], cuts: Iterable[Cut], mesh: Mesh | None
) -> tuple[tuple[int, int], ...]:
    parts = [range(size) for size in shape]
    for group, dim in cuts:
        assert mesh is not None
        parts[dim] = mesh.share(parts[dim], group)
    return tuple([(part.start, part.stop) for part in parts])


def share_tables(first: nn.Module, last: nn.Module, names: Iterable[str]) -> None:
    """Let two stages of one rank have tables in one memory, unless FSDP shards each by itself.

    Args:
        first: First stage.
        last: Last stage.
        names: Global names of the tables.
    """
    for name in names:
        table, copy = first.get_parameter(name), last.get_parameter(name)
        if isinstance(table, DTensor):
            continue
        shared = nn.Parameter(table.detach())
        for module in last.modules():
            for leaf, parameter in [*module.named_parameters(recurse=False)]:
                if parameter is copy:  # wherever a module has it
                    setattr(module, leaf, shared)


def merge_copies(
    parameters: Iterable[Parameter], tied: Iterable[str], tied_ranks: ProcessGroup | None
) -> list[Parameter]:
    """List every parameter of a rank once, however many of its stages have it.

    Args:
        parameters: Parameters of all stages.
        tied: Global names of what the first and the last stage both have.
        tied_ranks: Ranks with copies of it.
    """
    known: dict[str, Parameter] = {}
    for parameter in parameters:
        first = known.setdefault(parameter.name, parameter)
        if parameter.tensor is not first.tensor:
            known[parameter.name] = replace(
                first, tied_copies=(*first.tied_copies, parameter.tensor)
            )
    for name in known.keys() & {*tied}:
        known[name] = replace(known[name], tied_ranks=tied_ranks)
    return list(known.values())


def collect_gradients(parameters: Iterable[Parameter]) -> None:
    """Let each ``local`` have what backward left on the module; zeros where that is nothing.

    An expert that nobody chose has no gradient. Nothing is called for a parameter that is whole.
    """
    for parameter in parameters:
        module_has, local = parameter.tensor, parameter.local
        found, module_has.grad = module_has.grad, None
        if isinstance(found, DTensor):
            found = found.to_local()
        for twin in parameter.tied_copies:
            found = _added(found, twin)
        local.grad = torch.zeros_like(local) if found is None else found


def _added(total: Tensor | None, twin: nn.Parameter) -> Tensor | None:
    """Take the gradient of a copy and add it."""
    found, twin.grad = twin.grad, None
    if isinstance(found, DTensor):
        found = found.to_local()
    if total is None or found is None:
        return found if total is None else total
    return total + found
