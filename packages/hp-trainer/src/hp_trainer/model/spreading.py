"""A stage spread over the ranks that share it: matrices, sequences and experts cut, then FSDP2.

Tensor parallelism comes with sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198).
Between layers each tensor-parallel rank has a slice of the positions. A layer whose matrices are
cut gathers the positions first and, at its end, sums what the ranks have and keeps its slice. So
does the embedding, and the output matrix gathers what the final norm gave and computes some logits
on each rank, of which `linear_cross_entropy` makes the loss. What is not cut (norms, routers,
shared experts) sees a part of the positions or feeds a part of the heads, so its gradients are
summed over the ranks. Experts are dealt out over these ranks as over any others, see
`hp_trainer.layout.ranks`.

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

Shape symbols: B sequences, S positions, s of them on a rank, D model width.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import hp_context
from hp_base.errors import ConfigError
from hp_context import Attention
from hp_expert import ExpertParallel, ExpertTensorParallel, fully_shard_experts
from hp_platform import all_gather_uneven, outside_graph, reduce_scatter_uneven, set_fsdp_exchanges
from hp_schedule import MetaStep, MetaStepType
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import chunk
from hp_trainer.model.block import Block
from hp_trainer.model.capabilities import CutByExchanges, Exchanges, Spreading
from hp_trainer.model.layers import Embedding, Lender
from hp_trainer.model.loss import linear_cross_entropy
from hp_trainer.model.parameters import declared
from hp_trainer.model.stage import Stage, experts_of


def spread(
    stage: Stage,
    mesh: Mesh,
    context: "hp_context.ContextParallel | None",
    vocab_size: int,
    *,
    by_block: bool,
) -> None:
    """Cut a stage over the ranks of a mesh: matrices, then sequences, then experts, then shards.

    Args:
        stage: Stage on the meta device; changed in place.
        mesh: Mesh of the run.
        context: How context-parallel ranks exchange keys and values; None: there are none.
        vocab_size: Tokens of the vocabulary.
        by_block: Whether FSDP gathers and reduces by itself, see Note [Units of FSDP].

    Raises:
        hp_base.errors.ConfigError: When the model cannot be cut so.
    """
    own = stage if isinstance(stage, Spreading) else None
    groups, hidden = mesh.groups, mesh.size("etp") > 1
    if mesh.size("tp") > 1:
        cut = partial(cut_tensors, stage) if own is None else own.cut
        cut(mesh.share(range(vocab_size), "tp"), groups["tp"])
    if mesh.size("cp") > 1:
        share = partial(_spread_attention, stage) if own is None else own.spread_attention
        assert context is not None
        share(context, groups["cp"])
    for part in stage.modules():
        if isinstance(part, Stage | Block) and mesh.size("sequence") > 1:
            part.sequence_ranks = groups["sequence"]
    if own is None:
        _spread_experts(stage, groups, hidden=hidden)
    else:
        own.spread_experts(groups, hidden=hidden)
    shard(stage, mesh, by_block=by_block)


def _spread_attention(
    stage: Stage, context: "hp_context.ContextParallel", group: ProcessGroup
) -> None:
    attentions = [part for part in stage.modules() if isinstance(part, Attention)]
    if not attentions:
        raise ConfigError("mesh.cp must be 1 for a model without hp_context.Attention")
    for attention in attentions:
        context.apply(attention, group)


def _spread_experts(stage: Stage, groups: Mapping[str, ProcessGroup], *, hidden: bool) -> None:
    for part in experts_of(stage):
        if hidden:
            # Ranks that share an expert's width have different positions.
            ExpertTensorParallel(sliced=True).apply(part, (groups["ep"], groups["etp"]))
        else:
            ExpertParallel().apply(part, groups["ep"])


def cut_tensors(stage: Stage, vocabulary: range, group: ProcessGroup) -> None:
    """Keep this rank's part of every parameter, and put the exchanges where they belong.

    Args:
        stage: Stage on the meta device; changed in place.
        vocabulary: Tokens whose logits this rank computes.
        group: The tensor-parallel ranks.

    Raises:
        hp_base.errors.ConfigError: When the stage has no place for exchanges.
    """
    if not isinstance(stage, CutByExchanges):
        raise ConfigError(f"mesh.tp must be 1 for {type(stage).__name__}: no place_exchanges")
    for name, tensor in declared(stage).items():
        path, _, leaf = name.rpartition(".")
        module, dim = stage.get_submodule(path), tensor.spec.tp_dim
        if isinstance(module, Embedding):
            stage.set_submodule(path, VocabParallelEmbedding(module, group))
        elif dim is not None:
            part = module.get_parameter(leaf).chunk(group.size(), dim)[group.rank()]
            setattr(module, leaf, nn.Parameter(torch.empty_like(part)))
    stage.place_exchanges(
        Exchanges(
            gather=partial(gather_positions, group=group),
            scatter=partial(sum_positions, group=group),
            linear_cross_entropy=partial(linear_cross_entropy, first=vocabulary.start, group=group),
        )
    )


class VocabParallelEmbedding(Embedding):
    """A part of the rows of an embedding.

    Args:
        whole: The embedding, on the meta device.
        group: Its ranks have a part each.
    """

    def __init__(self, whole: nn.Embedding, group: ProcessGroup) -> None:
        mine = chunk(range(whole.num_embeddings), group.size(), group.rank())
        like = whole.weight
        super().__init__(len(mine), whole.embedding_dim, device=like.device, dtype=like.dtype)
        self.first = mine.start
        self._group = group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in the base class
        """Map token ids int64 [B, S] to this rank's positions [B, s, D]."""
        row = input - self.first
        is_here = (row >= 0) & (row < self.num_embeddings)
        found = super().forward(row.where(is_here, 0))
        return sum_positions(found * is_here[..., None], group=self._group)


@outside_graph
def gather_positions(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Gather [B, s, D] to [B, S, D]; backward sums and keeps this rank's positions."""
    return all_gather_uneven(x, sizes=[x.shape[1]] * group.size(), dim=1, group=group)


@outside_graph
def sum_positions(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Sum [B, S, D] over ranks to this rank's positions [B, s, D]; backward gathers."""
    sizes = [x.shape[1] // group.size()] * group.size()
    return reduce_scatter_uneven(x, sizes=sizes, dim=1, group=group)


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
