"""Tensor parallelism with sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198).

Between layers each tensor-parallel rank has a slice of the positions. A layer whose matrices are
cut gathers the positions first and, at its end, sums what the ranks have and keeps its slice. So
does the embedding, and the output matrix gathers what the final norm gave and computes some logits
on each rank, of which `linear_cross_entropy` makes the loss. What is not cut (norms, routers,
shared experts) sees a part of the positions or feeds a part of the heads, so its gradients are
summed over the ranks. Experts are dealt out over these ranks as over any others, see
`hp_trainer.layout.ranks`.

Shape symbols: B sequences, S positions, s of them on a rank, D model width.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_base.errors import ConfigError
from hp_platform import all_gather_uneven, outside_graph, reduce_scatter_uneven
from hp_trainer.layout.parameter import chunk
from hp_trainer.model.capabilities import CutByExchanges, Exchanges
from hp_trainer.model.declared import declared
from hp_trainer.model.layers import Embedding
from hp_trainer.model.loss import linear_cross_entropy
from hp_trainer.model.stage import Stage


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
