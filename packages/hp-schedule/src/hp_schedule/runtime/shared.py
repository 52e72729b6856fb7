"""Parameters that several stages have, for example an embedding tied to the output layer.

Note [Gradients of one run]. Every stage adds up a gradient of its own, also where stages of one
rank have one parameter: whose turn comes when is the schedule's, and sums in another order are
other numbers. At the end of a run these are added up in the order of the stages, so that they have
the same bits wherever the stages are. To add all parts of a microbatch first, as autograd does
with one parameter in one graph, every stage would have to keep a gradient for each microbatch until
the last of them is backward, or to send it. What earlier runs have left in `grad` is a sum already,
so it is put aside while a run lasts and added afterwards: gradients accumulate over runs.

Note [Tied parameters]. Stages of one rank have one and the same `Parameter`. Where `fully_shard` is
applied to them, before or after, each has its own sharded parameter instead. Those are copies like
the ones on other ranks: they start with the same value and get the same gradient, so an optimizer
keeps them equal. Which parameters there are is therefore looked up when the first run starts.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import new_group
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.runtime.transport import close_group
from hp_schedule.schedule import Schedule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class SharedParameterInfo:
    """One parameter that several stages have.

    Its gradient is the sum over stages, in ascending order, of the sums over microbatches. One
    graph with one parameter gives it to rounding only (1e-12 in fp64, tested): there autograd adds
    what all uses give for one microbatch, then the microbatches. Note [Gradients of one run].

    Attributes:
        names: The parameter's qualified name in the module of each stage that has it. The stage
            with the lowest index gives the value at the start.
    """

    names: Mapping[int, str]


_NamedParameter = tuple[int, nn.Module, str]
"""A stage, its module, and the name of a parameter in it."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A shared parameter on this rank.

    Attributes:
        places: This rank's modules that have it, with its name in each.
        group: Process group of the ranks that have it; None if this is the only one.
        owners: The global rank of each stage that has it, by stage in ascending order; the first
            one gives the value.
    """

    places: Sequence[_NamedParameter]
    group: ProcessGroup | None
    owners: Mapping[int, int]

    def by_stage(self) -> dict[int, nn.Parameter]:
        """Return the parameters of this rank's stages; Note [Tied parameters]."""
        return {stage: module.get_parameter(name) for stage, module, name in self.places}


class SharedParameters:
    """The shared parameters of one rank; made by `share_parameters`."""

    def __init__(self, shared: Sequence[_Shared]) -> None:
        self._shared = list(shared)
        self._apart: list[dict[int, Tensor | None]] = [{} for _ in shared]

    @cached_property
    def _by_stage(self) -> list[dict[int, nn.Parameter]]:
        return [shared.by_stage() for shared in self._shared]

    @cached_property
    def _copies(self) -> list[list[nn.Parameter]]:
        return [_once(parameters.values()) for parameters in self._by_stage]

    def broadcast(self) -> None:
        """Give every copy the value of the lowest stage, and freeze it if that one is."""
        for shared in self._shared:
            first, *others = _once(shared.by_stage().values())
            if shared.group is not None:
                source = next(iter(shared.owners.values()))
                dist.broadcast(_local(first.detach()), source, group=shared.group)
                trains = torch.tensor(int(first.requires_grad), device=first.device)
                dist.broadcast(trains, source, group=shared.group)
                first.requires_grad_(bool(trains))
            for other in others:
                _local(other.detach()).copy_(_local(first.detach()))
                other.requires_grad_(first.requires_grad)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Sum the gradients that are computed inside over all copies at the end."""
        parameters = [parameter for copies in self._copies for parameter in copies]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for apart in self._apart:
            apart.clear()
        yield
        self.sync_shared_parameters_grad()
        for parameter, grad in zip(parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Keep the gradients that a stage computes inside apart from those of other stages."""
        mine = [
            (parameters[stage], apart)
            for parameters, copies, apart in zip(
                self._by_stage, self._copies, self._apart, strict=True
            )
            if stage in parameters and len(copies) < len(parameters)
        ]
        for parameter, apart in mine:
            parameter.grad = apart.pop(stage, None)
        yield
        for parameter, apart in mine:
            apart[stage], parameter.grad = parameter.grad, None

    def sync_shared_parameters_grad(self) -> None:
        """Sum the gradients of all stages; every rank calls it (Note [Gradients of one run]).

        The runtime does so at the end of every run. A stage without a gradient adds nothing and
        gets the sum too. Frozen parameters are left out, so freeze or unfreeze them on all ranks
        alike.
        """
        for shared, parameters, (first, *others), apart in zip(
            self._shared, self._by_stage, self._copies, self._apart, strict=True
        ):
            if first.requires_grad:
                grads = apart or {stage: p.grad for stage, p in parameters.items()}
                first.grad = _sum_by_stage(shared, first, grads)
            for other in others if first.requires_grad else ():
                # Not the same tensor, which what scales gradients in place would scale twice.
                other.grad = None if first.grad is None else first.grad.clone()
            apart.clear()

    def close(self) -> None:
        """Close this rank's connections; ranks that wait for it fail."""
        for shared in self._shared:
            if shared.group is not None:
                close_group(shared.group)
        # Those of this rank alone stay: without other ranks a failed run can be followed by others.
        self._shared = [replace(shared, group=None) for shared in self._shared]


def share_parameters(
    infos: Sequence[SharedParameterInfo],
    stages: Sequence[PipelineStage],
    *,
    schedule: Schedule,
    pipelines: Sequence[Sequence[int]] = (),
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> SharedParameters:
    """Make the stages of all ranks share parameters; every rank of the world calls this.

    Stages of one rank then have one and the same `Parameter`, save for sharded ones (Note [Tied
    parameters]), so make the optimizer afterwards. Ranks get the value of the lowest stage, and are
    frozen if it is, and sum their gradients at the end of each run.

    Args:
        infos: What is shared; the same on every caller.
        stages: This rank's stages.
        schedule: Says which rank has which stage.
        pipelines: Same as for `build_edge_groups`; not needed if all stages are on one rank.
        backend: Backend of the groups; default that of the default group.
        timeout: Time-out of their collectives; default that of the default group.

    Raises:
        ValueError: If a stage does not exist, or the shapes of its parameters differ on this rank.
        AttributeError: If a stage has no parameter of that name.
    """
    here = {stage.stage_index: stage for stage in stages}
    shared = []
    for number, info in enumerate(infos):
        if not info.names or not all(0 <= stage < schedule.num_stages for stage in info.names):
            raise ValueError(
                f"stages ({sorted(info.names)}) of a shared parameter must be >= 0 and < "
                f"num_stages ({schedule.num_stages})"
            )
        places = [schedule.stage_to_rank[stage] for stage in sorted(info.names)]
        group, owners = None, dict.fromkeys(sorted(info.names), 0)
        if len(set(places)) > 1:
            lists = [sorted({ranks[place] for place in places}) for ranks in pipelines]
            group = new_group(
                lists, name=f"shared parameter {number}", backend=backend, timeout=timeout
            )
            me = dist.get_rank()
            own = next((ranks for ranks in pipelines if me in ranks), ())
            owners = dict(
                zip(owners, [own[place] for place in places] if own else [], strict=False)
            )
        mine = _alias(info, here)
        if mine:
            shared.append(_Shared(mine, group, owners))
    result = SharedParameters(shared)
    result.broadcast()
    return result


def _alias(info: SharedParameterInfo, stages: Mapping[int, PipelineStage]) -> list[_NamedParameter]:
    """Let the stages of this rank use the parameter of the first of them; return the places."""
    mine = [stage for stage in sorted(info.names) if stage in stages]
    places = [(stage, stages[stage].module, info.names[stage]) for stage in mine]
    for stage, module, name in places[1:]:
        first = places[0][1].get_parameter(places[0][2])
        other = module.get_parameter(name)
        if other.shape != first.shape:
            raise ValueError(
                f"shape ({list(other.shape)}) of {name} of stage {stage} must equal that of stage "
                f"{mine[0]} ({list(first.shape)})"
            )
        if not _is_sharded(other):
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, first)
    return places


def _once(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return each parameter once."""
    return list({id(parameter): parameter for parameter in parameters}.values())


def _sum_by_stage(
    shared: _Shared, like: Tensor, grads: Mapping[int, Tensor | None]
) -> Tensor | None:
    """Add up the gradients of all stages in ascending order; None if no rank but this has any.

    Args:
        shared: Shared parameter.
        like: A parameter of this rank.
        grads: Gradients of this rank's stages, by index of the stage.
    """
    total: Tensor | None = None
    for stage, owner in shared.owners.items():
        grad = grads.get(stage)
        if shared.group is not None:
            grad = torch.zeros_like(like.detach()) if grad is None else grad
            dist.broadcast(_local(grad), owner, group=shared.group)
        if grad is not None:
            total = grad.clone() if total is None else total.add_(grad)
    return total


def _local(x: Tensor) -> Tensor:
    return x.to_local() if _is_sharded(x) else x


def _is_sharded(x: Tensor) -> "TypeGuard[DTensor]":
    # DTensor's module takes seconds to import; whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
