"""FSDP2 over the parameters of a stage: what is one unit, what it prefetches, when it reduces.

Note [Units of FSDP]. By stage, a schedule says when parameters are gathered and gradients reduced;
what is one unit for that does not matter, and it is each block and the rest. By block, FSDP's own
hooks gather a unit when it is called, and reduce its gradients when its backward ends. The
embedding and the output matrix are units of their own then: the embedding is there while rows are
looked up in it, and not in backward; the output matrix from the loss to its gradient. A table that
is both on one stage, and what else is in no block, stays from the stage's forward to its backward.
By stage, ranks of one machine with a CPU gather into memory that they have in common: it takes one
copy of the parameters, of all of them together; by block, memory is what matters.

Gradients are summed over the ranks that keep copies as well (HSDP), of each unit when it was
reduced. Over those ranks sums are of all microbatches, in the backward of the last one.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import TypeGuard

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from hp_expert import fully_shard_experts
from hp_platform import set_fsdp_exchanges
from hp_schedule import MetaStep, MetaStepType
from hp_trainer.layout.mesh import Mesh
from hp_trainer.model.layers import Embedding, Lender
from hp_trainer.model.stage import Stage, experts_of


def shard(module: Stage, mesh: Mesh, *, by_block: bool) -> None:
    """Apply FSDP2 to a stage; gradients are sums, as everywhere here.

    Args:
        module: A stage on the meta device, cut already.
        mesh: Mesh of the run.
        by_block: Whether FSDP gathers and reduces by itself, see Note [Units of FSDP].
    """
    if mesh.size("expert_shard") > 1:
        over = _with_copies(mesh, "expert_replicate", "expert_shard")
        fully_shard_experts(module, over, divide_gradients_by=1.0)
        for part in experts_of(module):
            set_fsdp_exchanges(part, group=mesh.groups["expert_shard"], in_place=not by_block)
    if mesh.size("fsdp") > 1:
        _shard_dense(module, mesh, by_block=by_block)
    if by_block:
        prefetch_blocks(module)


def _with_copies(mesh: Mesh, copies: str, shards: str) -> DeviceMesh:
    return mesh.submesh(*([copies] if mesh.size(copies) > 1 else []), shards)


def _shard_dense(module: Stage, mesh: Mesh, *, by_block: bool) -> None:
    units = module.units(by_block=by_block)
    device_mesh, group = _with_copies(mesh, "dp_replicate", "fsdp"), mesh.groups["fsdp"]
    experts = {p for part in experts_of(module) for p in part.parameters(recurse=False)}
    for part in (*units, module):
        fully_shard(part, mesh=device_mesh, ignored_params=experts)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        # More than one rank sums here; see Note [Sums, scaled apart].
        part.set_force_sum_reduction_for_comms(True)
        set_fsdp_exchanges(part, group=group, in_place=not by_block)
        if isinstance(part, Lender):
            register_fsdp_forward_method(part, "lend")
        if isinstance(part, Lender) and part is units[-1]:
            part.set_reshard_after_forward(False)  # backward begins with it


def prefetch_blocks(module: Stage) -> None:
    """Let FSDP gather the next unit while one computes, in forward and in backward.

    Its own order for backward is that of the last forward, which in a pipeline may be that of
    another microbatch.

    Args:
        module: Stage whose units are sharded, or not.
    """
    whole = module.units(by_block=True)
    units = [[part for part in unit.modules() if is_sharded(part)] for unit in whole]
    root = [part for part in [module] if isinstance(part, FSDPModule)]
    if not root:  # experts alone are sharded, each layer's by itself
        return
    forward = [*root, *itertools.chain(*units)]
    for one, other in itertools.pairwise(forward):
        one.set_modules_to_forward_prefetch([other])
    if whole and isinstance(whole[0], Embedding):  # whose backward does not read it
        (table,) = units.pop(0)
        table.set_unshard_in_backward(False)
        table.set_modules_to_backward_prefetch([table])
    backward = [*root, *itertools.chain(*reversed(units))]
    # The last one would choose by itself if it had nothing.
    for one, other in zip(backward, [*backward[1:], *backward[-1:]], strict=True):
        one.set_modules_to_backward_prefetch([other])


class LastBackward:
    """Lets FSDP by block do in the last backward of a stage alone what is done once in a step.

    That is the sum over ranks that keep copies; and all of the reduction, if gradients are to stay
    whole until then.

    Args:
        modules: Stage index -> module, for the stages of this rank.
        num_microbatches: Backwards of each of them in a step.
        reduce_once: Whether gradients are to stay whole.
        on_step: Called before each step, too.
    """

    def __init__(
        self,
        modules: Mapping[int, Stage],
        num_microbatches: int,
        *,
        reduce_once: bool,
        on_step: Callable[[MetaStep], None] | None,
    ) -> None:
        self._parts = {
            index: [part for part in module.modules() if is_sharded(part)]
            for index, module in modules.items()
        }
        self._num_microbatches, self._reduce_once = num_microbatches, reduce_once
        self._done = dict.fromkeys(modules, 0)
        self._on_step = on_step

    def before(self, step: MetaStep) -> None:
        """Count a step of a schedule before it runs."""
        if step.type is MetaStepType.BWD and step.stage_index is not None:
            self._count(step.stage_index)
        if self._on_step is not None:
            self._on_step(step)

    def _count(self, stage: int) -> None:
        done = self._done[stage] + 1
        self._done[stage] = done % self._num_microbatches
        if done not in (1, self._num_microbatches):
            return
        is_last = done == self._num_microbatches
        for part in self._parts[stage]:
            if self._reduce_once:
                part.set_requires_gradient_sync(is_last, recurse=False)
            else:
                part.set_requires_all_reduce(is_last, recurse=False)


def is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP shards parameters of its own."""
    return isinstance(module, FSDPModule)
