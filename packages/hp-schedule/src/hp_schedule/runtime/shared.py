"""Parameters that several stages have, for example an embedding tied to the output layer.

[Note: Gradients of one run] Every stage adds its own gradient to its own copy. At the end of a run
the copies are summed over the ranks. What earlier runs have left in `grad` is a sum already, so it
is put aside while a run lasts and added afterwards: gradients accumulate over runs.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import new_group
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.runtime.transport import close_group
from hp_schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class SharedParameterInfo:
    """One parameter that several stages have.

    Attributes:
        names: The parameter's qualified name in the module of each stage that has it. The stage
            with the lowest index gives the value at the start.
    """

    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A shared parameter on this rank.

    Attributes:
        parameter: The one object that this rank's stages use.
        group: Of the ranks that have it; None if this is the only one.
        source: The global rank that gives the value.
    """

    parameter: nn.Parameter
    group: ProcessGroup | None
    source: int


class SharedParameters:
    """The shared parameters of one rank; made by `share_parameters`."""

    def __init__(self, shared: Sequence[_Shared]) -> None:
        self._shared = list(shared)

    def broadcast(self) -> None:
        """Give every rank the value of the stage with the lowest index."""
        for shared in self._shared:
            if shared.group is not None:
                value = _local(shared.parameter.detach())
                dist.broadcast(value, shared.source, group=shared.group)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run what computes gradients inside; they are summed over the ranks at the end."""
        before = [shared.parameter.grad for shared in self._shared]
        for shared in self._shared:
            shared.parameter.grad = None
        yield
        self.sync_shared_parameters_grad()
        for shared, grad in zip(self._shared, before, strict=True):
            if grad is not None:
                parameter = shared.parameter
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    def sync_shared_parameters_grad(self) -> None:
        """Sum the gradients over the ranks; every rank calls it ([Note: Gradients of one run]).

        The runtime does so at the end of every run. A rank without a gradient adds nothing and
        gets the sum too.
        """
        for shared in self._shared:
            if shared.group is not None:
                if shared.parameter.grad is None:
                    shared.parameter.grad = torch.zeros_like(shared.parameter)
                dist.all_reduce(_local(shared.parameter.grad), group=shared.group)

    def close(self) -> None:
        """Close this rank's connections; ranks that wait for it fail."""
        while self._shared:
            shared = self._shared.pop()
            if shared.group is not None:
                close_group(shared.group)


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

    Stages of one rank then have one and the same `Parameter`, so make the optimizer afterwards.
    Ranks get the value of the lowest stage and sum their gradients at the end of each run.

    Args:
        infos: What is shared; the same on every caller.
        stages: This rank's stages.
        schedule: Says which rank has which stage.
        pipelines: As for `build_edge_groups`; not needed if all stages are on one rank.
        backend: Of the groups; default that of the default group.
        timeout: Of their collectives.

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
        group = source = None
        if len(set(places)) > 1:
            lists = [sorted({ranks[place] for place in places}) for ranks in pipelines]
            group = new_group(
                lists, name=f"shared parameter {number}", backend=backend, timeout=timeout
            )
            me = dist.get_rank()
            source = next((ranks[places[0]] for ranks in pipelines if me in ranks), None)
        parameter = _alias(info, here)
        if parameter is not None:
            shared.append(_Shared(parameter, group, 0 if source is None else source))
    result = SharedParameters(shared)
    result.broadcast()
    return result


def _alias(info: SharedParameterInfo, stages: Mapping[int, PipelineStage]) -> nn.Parameter | None:
    """Let the stages of this rank use the parameter of the first of them; return it."""
    mine = [stage for stage in sorted(info.names) if stage in stages]
    if not mine:
        return None
    first = stages[mine[0]].module.get_parameter(info.names[mine[0]])
    for stage in mine[1:]:
        module, name = stages[stage].module, info.names[stage]
        other = module.get_parameter(name)
        if other.shape != first.shape:
            raise ValueError(
                f"shape ({list(other.shape)}) of {name} of stage {stage} must equal that of stage "
                f"{mine[0]} ({list(first.shape)})"
            )
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, first)
    return first


def _local(x: Tensor) -> Tensor:
    # DTensor's module takes seconds to import; whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return x
    local: Tensor = x.to_local()
    return local
