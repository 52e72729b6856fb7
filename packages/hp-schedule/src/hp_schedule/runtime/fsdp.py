"""Sharded parameters under the command of a schedule: a protocol, and FSDP2 (`fully_shard`)."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from hp_platform import set_fsdp_frees_parameters, set_fsdp_hooks
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule
from hp_schedule.steps import BWD_WEIGHT, FSDP_KINDS, FSDP_REDUCE_GRAD, encode


class StageSharding(Protocol):
    """Gathers and frees the parameters of stages when the schedule says so.

    The driver calls `during_run` around a whole run, the others at the steps of the schedule, all
    from the thread that runs the schedule, save for `wait_unshard`, which handlers may cause from
    their own threads.
    """

    def during_run(self) -> AbstractContextManager[None]:
        """Return a context in which the hooks of the FSDP itself start no collective.

        Left by an exception it need not restore more than a later run needs.
        """

    def unshard(self, stage: PipelineStage) -> None:
        """Start to gather a stage's parameters; does not wait for them."""

    def wait_unshard(self, stage: PipelineStage) -> None:
        """Wait until a stage's parameters are there; called before each of its compute steps.

        Raises:
            RuntimeError: If nobody has gathered them.
        """

    def reshard(self, stage: PipelineStage) -> None:
        """Free a stage's gathered parameters."""

    def reduce_grad(self, stage: PipelineStage) -> None:
        """Reduce the gradients that a stage's backwards of this run have left."""


if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, UnshardHandle

_FSDP: Final = "torch.distributed.fsdp"
"""Imported by whoever shards a module; it takes two seconds, which others need not spend."""

_REDUCE: Final = "hp_schedule_reduce_grad"
"""The method that sharded modules get for the small backward."""


class FullySharded:
    """Carries out the FSDP steps of a schedule; an `hp_schedule.runtime.StageSharding`.

    `fully_shard` is applied to the modules of the stages, or to modules inside them, before. From
    then on `reshard_after_forward` is off for them. How gradients are averaged is set on the
    modules as usual: `set_gradient_divide_factor`.

    Args:
        stages: This rank's stages, the sharded ones among them.

    Raises:
        ValueError: If no stage has a sharded module.
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._modules = {stage.stage_index: sharded_modules(stage.module) for stage in stages}
        if not any(self._modules.values()):
            raise ValueError(
                f"stages ({[stage.stage_index for stage in stages]}) must have modules that "
                "fully_shard was applied to"
            )
        self._roots = {stage.stage_index: _outermost(stage.module) for stage in stages}
        self._gathering: dict[int, list[UnshardHandle]] = {}
        self._gathered = {index for index, modules in self._modules.items() if not modules}
        for root in (root for roots in self._roots.values() for root in roots):
            setattr(root, _REDUCE, _identity)
            sys.modules[_FSDP].register_fsdp_forward_method(root, _REDUCE)

    @contextmanager
    def during_run(self) -> Iterator[None]:
        """Switch FSDP's hooks off, and on again at the end."""
        self._set(False)
        for module in self._all():
            module.set_reshard_after_forward(False, recurse=False)
            # Otherwise each would gather the one that ran before it, perhaps of another stage.
            module.set_modules_to_backward_prefetch([module])
            set_fsdp_frees_parameters(module, False)
            set_fsdp_hooks(module, active=False)
        try:
            yield
        finally:
            self._set(True)
            for module in self._all():
                module.set_modules_to_backward_prefetch([])
                set_fsdp_frees_parameters(module, True)
                set_fsdp_hooks(module, active=True)

    def unshard(self, stage: PipelineStage) -> None:
        """Start to gather a stage's parameters."""
        modules = self._modules[stage.stage_index]
        handles = [module.unshard(async_op=True) for module in modules]
        self._gathering[stage.stage_index] = [handle for handle in handles if handle is not None]

    def wait_unshard(self, stage: PipelineStage) -> None:
        """Wait until a stage's parameters are there.

        Raises:
            RuntimeError: If nobody has gathered them.
        """
        index = stage.stage_index
        if index in self._gathering:
            for handle in self._gathering.pop(index):
                handle.wait()
            self._gathered.add(index)
        elif index not in self._gathered:
            raise RuntimeError(
                f"parameters of stage {index} must be gathered before it computes: the schedule "
                "needs UNSHARD steps (hp_schedule.add_fsdp_unshard_reshard)"
            )

    def reshard(self, stage: PipelineStage) -> None:
        """Free a stage's gathered parameters."""
        self.wait_unshard(stage)
        self._free(stage.stage_index)
        if self._modules[stage.stage_index]:
            self._gathered.discard(stage.stage_index)

    def reduce_grad(self, stage: PipelineStage) -> None:
        """Reduce the gradients of all backwards.

        FSDP's own hooks gather parameters before a module's forward and backward, free them after,
        and reduce gradients in every backward. A schedule knows better when: its UNSHARD, RESHARD
        and REDUCE_GRAD steps do so, and nothing else does. The hooks are silent
        (`hp_platform.set_fsdp_hooks`). Those that cast for mixed precision stay, but are left
        nothing to launch: parameters are gathered when they run, and reducing and freeing are
        switched off. In REDUCE_GRAD reducing is switched on for one small backward through the
        outermost sharded module, whose end reduces what all microbatches have left. So gradients
        are reduced once, however many microbatches and whichever halves of backwards there were. A
        forward and a backward of one module in two threads would still make hooks that stay free
        parameters between them, which `hp_platform.set_fsdp_frees_parameters` prevents; all else is
        done with public methods of `FSDPModule`.

        Waits for nothing on CUDA, where the gradients are ready for the current stream.
        """
        index = stage.stage_index
        free_again = index not in self._gathered and index not in self._gathering
        self._set(True, index)
        for root in self._roots[index]:
            _reduce(root, stage.device)
        self._set(False, index)
        if free_again:
            self._free(index)

    def _set(self, value: bool, stage_index: int | None = None) -> None:
        for module in self._all() if stage_index is None else self._modules[stage_index]:
            module.set_requires_gradient_sync(value, recurse=False)
            module.set_is_last_backward(value)
            if stage_index is None:
                # Freeing is the schedule's from the first to the last step.
                module.set_reshard_after_backward(value, recurse=False)

    def _free(self, stage_index: int) -> None:
        for module in self._modules[stage_index]:
            set_fsdp_frees_parameters(module, True)
            module.reshard()
            set_fsdp_frees_parameters(module, False)

    def _all(self) -> Iterator["FSDPModule"]:
        return (module for modules in self._modules.values() for module in modules)


def sharded_modules(module: nn.Module) -> list["FSDPModule"]:
    """Return the modules inside, or the module itself, that `fully_shard` was applied to."""
    return [inner for inner in module.modules() if _is_sharded(inner)]


def check_sharding(
    stages: Iterable[PipelineStage], schedule: Schedule, sharding: StageSharding | None
) -> None:
    """Refuse stages and schedules that would silently leave gradients unreduced.

    Raises:
        ValueError: If stages have sharded modules and nobody reduces the gradients of W steps, or a
            schedule with FSDP steps lacks REDUCE_GRAD for one; or if a module is wrapped for DDP,
            which reduces in the first of several backwards only.
    """
    for stage in () if schedule.is_forward_only else stages:
        if any(isinstance(x, nn.parallel.DistributedDataParallel) for x in stage.module.modules()):
            raise ValueError(
                f"module of stage {stage.stage_index} must not be a DistributedDataParallel, which "
                "takes one backward for all: use fully_shard, or reduce gradients after the run"
            )
        if not sharded_modules(stage.module):
            continue
        codes = schedule.steps[schedule.stage_to_rank[stage.stage_index]].codes()
        if sharding is None and not schedule.kinds & FSDP_KINDS:
            if BWD_WEIGHT in schedule.kinds:
                raise ValueError(
                    f"sharding (None) must be given: fully_shard was applied to stage "
                    f"{stage.stage_index}, and its hooks would not reduce what W steps compute"
                )
        elif encode(FSDP_REDUCE_GRAD, stage.stage_index) not in codes:
            raise ValueError(
                f"schedule must have a REDUCE_GRAD step for stage {stage.stage_index}, which "
                "fully_shard was applied to (hp_schedule.add_fsdp_reduce_grad)"
            )


def _outermost(module: nn.Module) -> list["FSDPModule"]:
    """Return the sharded modules that lie in no other one."""
    if _is_sharded(module):
        return [module]
    return [root for child in module.children() for root in _outermost(child)]


def _reduce(root: "FSDPModule", device: torch.device) -> None:
    """Run a backward through nothing but the hooks of a sharded module."""
    with torch.enable_grad():
        x = torch.zeros((), device=device, requires_grad=True)
        y: Tensor = getattr(root, _REDUCE)(x)
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(y, torch.zeros_like(y))


def _identity(x: Tensor) -> Tensor:
    return x.clone()


def _is_sharded(module: nn.Module) -> TypeGuard["FSDPModule"]:
    fsdp = sys.modules.get(_FSDP)
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
