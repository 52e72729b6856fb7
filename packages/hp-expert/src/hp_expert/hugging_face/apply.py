"""The experts of an unmodified transformers model, spread over ranks in one call."""

from importlib import import_module
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_expert.batch import LocalDispatcher
from hp_expert.dispatch import AnyDispatcher, MakeDispatcher
from hp_expert.dispatch.all_to_all import AllToAllDispatcher
from hp_expert.hugging_face.modules import (
    DispatchedExperts,
    RoutedBlock,
    change_class,
    expert_modules,
    experts_forward,
    num_experts_of,
    refusal,
)
from hp_expert.placement import ExpertRanks
from hp_expert.styles.sharding import agree_on
from hp_platform import resolve_group

ModelT = TypeVar("ModelT", bound=nn.Module)


def apply_to_transformers(
    model: ModelT,
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    *,
    dispatcher: MakeDispatcher = AllToAllDispatcher,
    same_tokens: DeviceMesh | ProcessGroup | None = None,
) -> ModelT:
    """Spread the experts of a transformers model over ranks, in place.

    Every rank copies an equal run of each layer's experts, so that the whole parameters can be
    freed; they may be on any device, the meta device included. Routers, shared experts and all
    other modules stay whole on every rank. Every rank then runs the model on its own tokens, as
    often as the other ranks. The gradients of experts are summed over the tokens of all ranks;
    other gradients are of the tokens of this rank.

    Args:
        model: A model of transformers 5, or a part of one.
        mesh_or_group: The ranks: a one-dimensional mesh, on which the experts' parameters become
            `DTensor`, sharded along dim 0; or a group, which leaves them plain tensors of the local
            experts. None: this rank keeps all experts, and this package computes them.
        dispatcher: Function that makes the dispatcher from a group and the number of experts.
        same_tokens: Ranks that run the model on the same tokens, such as tensor-parallel ranks:
            each sends a part of them to experts, see `hp_expert.hugging_face.modules`. None:
            every rank has its own tokens.

    Returns:
        `model`.

    Raises:
        ValueError: On every rank, before anything is changed: if the model has no experts, or
            some that cannot be computed here (the message says which and why), or a number of them
            that the ranks cannot share equally, or was applied before, or experts differ between
            ranks.
        hp_platform.PeerError: On the other ranks, if it is so on one rank only.
    """
    group = None if mesh_or_group is None else resolve_group(mesh_or_group)
    mesh = mesh_or_group if isinstance(mesh_or_group, DeviceMesh) else None
    same = None if same_tokens is None else resolve_group(same_tokens)
    ranks = None if group is None else ExpertRanks(group, mesh=mesh, axes=("ep",))
    found, dispatchers, error = _checked_and_made(model, dispatcher, group)
    agree_on(list(found.values()), error, ranks or ExpertRanks())
    tied: dict[int, nn.Parameter] = {}  # id of a parameter of several modules -> its local part
    for experts, its_dispatcher in zip(found.values(), dispatchers, strict=True):
        total = num_experts_of(experts)
        first = 0 if group is None else _partition(experts, group, mesh, tied)
        change_class(experts, DispatchedExperts)
        assert isinstance(experts, DispatchedExperts)
        experts.dispatcher = its_dispatcher
        experts.first_expert, experts.total_experts = first, total
        experts.ranks = ranks
        experts.same_tokens = same if same is not None and same.size() > 1 else None
    for path in found:
        parent, _, name = path.rpartition(".")
        if path:
            _let_choose(model.get_submodule(parent), name)
    return model


def register_with_transformers(name: str = "hp_expert") -> None:
    """Let transformers compute the experts of a single process with this package.

    Afterwards `from_pretrained(..., experts_implementation="hp_expert")` or
    `model.set_experts_implementation("hp_expert")` selects it. The registry holds for the whole
    process.

    Raises:
        ImportError: If transformers is not installed, or has no such registry.
    """
    try:
        registry = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError):
        raise ImportError("needs transformers 5: pip install 'transformers>=5'") from None
    registry.register(name, experts_forward)


def _checked_and_made(
    model: nn.Module, dispatcher: MakeDispatcher, group: ProcessGroup | None
) -> tuple[dict[str, nn.Module], list[AnyDispatcher], Exception | None]:
    """Return all modules of experts and their dispatchers, or the error to tell all ranks."""
    try:
        found = _checked(model)
        return found, [_make(dispatcher, group, num_experts_of(e)) for e in found.values()], None
    except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
        return {}, [], error


def _checked(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts by path, or raise."""
    found = dict(expert_modules(model))
    if not found:
        raise ValueError(
            f"model ({type(model).__name__}) must have layers with experts in stacked weights "
            "(gate_up_proj, down_proj)"
        )
    for path, experts in found.items():
        if isinstance(experts, DispatchedExperts):
            raise ValueError(f"{path} ({type(experts).__name__}) must be spread over ranks once")  # noqa: TRY004  # of the call, not of a type
        why = refusal(experts) or _hidden_forward(model, path)
        if why is not None:
            raise ValueError(f"{path} ({type(experts).__name__}) cannot be spread: {why}")
    return found


def _hidden_forward(model: nn.Module, path: str) -> str | None:
    """Return why the forward of another class would not be called, or None if it would."""
    parent = path.rpartition(".")[0]
    for module in (model.get_submodule(path), model.get_submodule(parent)):
        if "forward" in vars(module):
            kind = type(module).__name__
            return f"something (a device map?) has replaced the forward of this one {kind}"
    return None


def _make(
    dispatcher: MakeDispatcher, group: ProcessGroup | None, num_experts: int
) -> AnyDispatcher:
    if group is None:
        return LocalDispatcher(num_experts)
    made = dispatcher(group, num_experts)  # refuses a number that the ranks cannot share
    alone = group.size() == 1 and dispatcher is AllToAllDispatcher
    return LocalDispatcher(num_experts) if alone else made


def _partition(
    experts: nn.Module,
    group: ProcessGroup,
    mesh: DeviceMesh | None,
    tied: dict[int, nn.Parameter],
) -> int:
    """Keep this rank's experts; return the index of the first one."""
    num_local = num_experts_of(experts) // group.size()
    first = group.rank() * num_local
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if id(parameter) not in tied:
            # A copy, so that the whole parameter can be freed.
            mine: Tensor = parameter.detach()[first : first + num_local].clone()
            if mesh is not None:
                mine = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            tied[id(parameter)] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
        setattr(experts, name, tied[id(parameter)])
    return first


def _let_choose(block: nn.Module, experts_name: str) -> None:
    """Change a block so that the choice of its router can be replayed, or repeated."""
    change_class(block, RoutedBlock)
    assert isinstance(block, RoutedBlock)
    block.experts_name = experts_name
