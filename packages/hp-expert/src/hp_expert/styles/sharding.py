"""The parameters of experts cut into parts of ranks, after an agreement of all ranks.

Shape symbols: E experts, D width, H hidden width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_expert.experts.module import GroupedExperts
from hp_expert.placement import ExpertRanks
from hp_platform import PeerError, all_gather_json
from hp_platform.dry_device import is_dry


def shard_dim(name: str, axis: str) -> int | None:
    """Return the dim of a parameter that is cut along an axis, "ep" or "tp"; None: no dim."""
    return 0 if axis == "ep" else GroupedExperts.hidden_dims[name]


def keep_part(experts: GroupedExperts, ranks: ExpertRanks) -> None:
    """Keep this rank's part of every parameter: of the experts (dim 0) and of their hidden dim.

    Nothing is communicated: the values of a part are those that this rank has.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        mine = _part(_part(parameter.detach(), 0, ranks.ep), shard_dim(name, "tp"), ranks.tp)
        # A copy, so that the whole parameter can be freed.
        kept = mine.clone() if mine.numel() < parameter.numel() else mine
        if ranks.mesh is not None:
            dims = [shard_dim(name, axis) for axis in ranks.axes]
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            kept = DTensor.from_local(
                kept.contiguous(),
                ranks.mesh,
                placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        setattr(experts, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    experts.first_expert = ranks.ep_rank * (experts.num_experts // ranks.ep_size)
    # Outputs of tp ranks are summed, so only one of them adds the bias.
    experts.adds_output_bias = ranks.tp_rank == 0


def shared_parameters(found: list[GroupedExperts]) -> list[list[tuple[GroupedExperts, str]]]:
    """Return the modules and names of each parameter that several modules share."""
    places: dict[nn.Parameter, list[tuple[GroupedExperts, str]]] = {}
    for experts in found:
        for name, parameter in experts.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((experts, name))
    return [those for those in places.values() if len(those) > 1]


def require_divisible(experts: GroupedExperts, ranks: ExpertRanks) -> None:
    """Check that experts can be cut into equal parts, which torch would pad silently otherwise.

    Raises:
        ValueError: If they cannot, or a subclass has other parameters, which have no known cut.
    """
    if experts.num_experts % ranks.ep_size:
        raise ValueError(
            f"num_experts ({experts.num_experts}) must be divisible by the size of the expert "
            f"group ({ranks.ep_size})"
        )
    for name, parameter in experts.named_parameters(recurse=False):
        if name not in experts.hidden_dims:
            raise ValueError(
                f"parameter ({name}) must be one of {tuple(experts.hidden_dims)} to be cut"
            )
        dim = experts.hidden_dims[name]
        if dim is not None and parameter.shape[dim] % ranks.tp_size:
            raise ValueError(
                f"hidden ({parameter.shape[dim]}) must be divisible by the size of the tensor "
                f"group ({ranks.tp_size})"
            )


def agree_on(found: Sequence[nn.Module], error: Exception | None, ranks: ExpertRanks) -> None:
    """Return on all ranks if all have the same experts and no error, else raise on all ranks.

    Args:
        found: Modules that this rank is about to spread.
        error: Error of this rank, if any.
        ranks: The ranks, all of which must call.

    Raises:
        Exception: `error`, on the ranks that have one.
        hp_platform.PeerError: On the other ranks, if a rank has an error.
        ValueError: If experts differ between ranks, or the groups do not form a grid of ranks.
    """
    said = [mine := _say(found, error, ranks)]
    for group in ranks.groups():
        gathered = all_gather_json(said, of=list[_Said], group=group)
        said = [entry for part in gathered for entry in part]
    if error is not None:
        raise error
    for entry in said:
        if entry.error:
            text = f"rank {entry.rank} cannot spread experts: {entry.error}"
            raise PeerError(text, rank=entry.rank)
    expected = [(e, t, said[t].column) for e in range(ranks.ep_size) for t in range(ranks.tp_size)]
    # In a dry run one rank answers for others, with its own place in the grid.
    is_grid = [(entry.ep_rank, entry.tp_rank, entry.column) for entry in said] == expected
    if not (is_grid or is_dry()):
        raise ValueError("the ep and tp groups must be the rows and columns of one grid of ranks")
    for entry in said:
        if entry.experts != mine.experts:
            raise ValueError(
                f"experts ({mine.experts}) must equal those of rank {entry.rank} ({entry.experts})"
            )


def _part(x: Tensor, dim: int | None, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or dim is None:
        return x
    return x.chunk(group.size(), dim)[group.rank()]


class _Said(NamedTuple):
    """The message of a rank to the others.

    Attributes:
        rank: Global rank.
        ep_rank: Rank in the ep group.
        tp_rank: Rank in the tp group.
        column: Global ranks of the ep group.
        experts: Shape and dtype of each parameter, by name, of each module.
        error: Error of this rank; empty: none.
    """

    rank: int
    ep_rank: int
    tp_rank: int
    column: list[int]
    experts: list[dict[str, tuple[int | str, ...]]]
    error: str


def _say(found: Sequence[nn.Module], error: Exception | None, ranks: ExpertRanks) -> _Said:
    return _Said(
        rank=next((dist.get_process_group_ranks(g)[g.rank()] for g in ranks.groups()), 0),
        ep_rank=ranks.ep_rank,
        tp_rank=ranks.tp_rank,
        column=[] if ranks.ep is None else dist.get_process_group_ranks(ranks.ep),
        experts=[
            {n: (*p.shape, str(p.dtype)) for n, p in e.named_parameters(recurse=False)}
            for e in found
        ],
        error="" if error is None else f"{type(error).__name__}: {error}",
    )
