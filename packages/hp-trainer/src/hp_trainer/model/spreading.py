"""A stage cut over the ranks that share it, on the meta device."""

from collections.abc import Mapping
from functools import partial

from torch.distributed import ProcessGroup

import hp_context
from hp_base.errors import ConfigError
from hp_context import Attention
from hp_expert import ExpertParallel, ExpertTensorParallel
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.parameter import chunk
from hp_trainer.model.block import Block
from hp_trainer.model.capabilities import Spreading
from hp_trainer.model.sharding import shard
from hp_trainer.model.stage import Stage, experts_of
from hp_trainer.model.tensor_parallel import cut_tensors


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
        cut(vocabulary_of(mesh, vocab_size), groups["tp"])
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


def vocabulary_of(mesh: Mesh, vocab_size: int) -> range:
    """Return the tokens whose embedding rows and logits are on this rank."""
    return chunk(range(vocab_size), mesh.size("tp"), mesh.index("tp"))


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
