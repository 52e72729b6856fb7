"""Multi-token prediction: modules that each predict one token further ahead.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2). Where the paper leaves it open, the published
weights decide: a module takes the hidden states after the final norm, the embedding comes first in
what it projects, and its own norm comes before the shared output matrix.

Shape symbols: B sequences, S positions, P of them that a module predicts from, D model width,
V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_context import Documents, Mask
from hp_train.config import ModelConfig
from hp_train.model.attention import Limits
from hp_train.model.block import Block, Microbatch
from hp_train.model.layers import Linear, RMSNorm
from hp_train.model.rotary import Rotation


class PredictionModule(nn.Module):
    """Mixes hidden states with the embeddings of later tokens, by one block.

    Args:
        config: Of the model.
        depth: 1 for the first module: how much further ahead than the model it predicts.
    """

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.hidden_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.projection = Linear(2 * config.dim, config.dim)
        layer = config.num_layers + depth - 1
        self.block = Block(config, layer, f"mtp.{depth - 1}.block")
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        *,
        rotation: Rotation,
        microbatch: Microbatch,
        documents: Limits = None,
    ) -> Tensor:
        """Return the hidden states that the output matrix takes, [B, P, D].

        Args:
            hidden: Of the module before, or of the model after its final norm, [B, P, D].
            embedded: Embeddings of the tokens that come `depth` later, [B, P, D].
            rotation: Of the positions.
            microbatch: What travels with the call.
            documents: What limits attention.
        """
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        x = self.projection(both)
        x = self.block(x, rotation=rotation, microbatch=microbatch, documents=documents)
        y: Tensor = self.norm(x)
        return y


def prediction_loss(
    modules: nn.ModuleList,
    hidden: Tensor,
    embedded: Tensor,
    *,
    weight: float,
    rotation: Rotation,
    microbatch: Microbatch,
    logits_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return this microbatch's share of the weighted mean loss of all modules, a scalar.

    The last tokens of a sequence have nothing far enough ahead of them, and a module of depth k
    sees S - k positions. A prediction that would look across a target that is not to be learned,
    which is where a document ends, does not count.

    Args:
        modules: The modules, first depth first.
        hidden: Of the model after its final norm, [B, S, D].
        embedded: Embeddings of the tokens, [B, S, D].
        weight: Of the mean over modules.
        rotation: Of the S positions.
        microbatch: With targets.
        logits_of: The output matrix, [B, P, D] to [B, P, V].
    """
    assert microbatch.targets is not None
    targets, length = microbatch.targets, hidden.shape[1]
    learned = targets >= 0
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for depth, module in enumerate(modules, start=1):
        span = length - depth
        hidden = module(
            hidden[:, :span],
            embedded[:, depth:],
            rotation=rotation.first(span),
            microbatch=microbatch,
            documents=_shortened(microbatch.documents, depth),
        )
        learned = learned[:, :span] & (targets[:, depth:] >= 0)
        aims = targets[:, depth:].masked_fill(~learned, -1)
        rows = logits_of(hidden).flatten(0, 1).to(total.dtype)
        loss = F.cross_entropy(rows, aims.flatten(), ignore_index=-1, reduction="sum")
        loss = loss * (weight / (len(modules) * microbatch.num_sequences * span))
        microbatch.prediction_losses.append(loss.detach())
        total = total + loss
    return total


def _shortened(documents: Limits, num_missing: int) -> Limits:
    """What limits attention to sequences whose last positions are not there."""
    return documents and tuple(_cut_short(mask, num_missing) for mask in documents)


def _cut_short(mask: Mask, num_missing: int) -> Mask:
    """Documents without the last positions; other masks do not know the length."""
    if not isinstance(mask, Documents):
        return mask
    lengths = list(mask.lengths)
    while num_missing:
        taken = min(lengths[-1], num_missing)
        lengths[-1] -= taken
        num_missing -= taken
        if not lengths[-1]:
            lengths.pop()
    return Documents(tuple(lengths))
