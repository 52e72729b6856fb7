"""Multi-token prediction: modules that each predict one token further ahead.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2). Where the paper leaves it open, the published
weights decide: a module takes the hidden states after the final norm, the embedding comes first in
what it projects, and its own norm comes before the shared output matrix.

A module sees all positions of a sequence. The last ones have nothing far enough ahead of them: they
read the last token again and predict nothing, and attention is causal, so they matter to no other.
They do take part in the balancing of experts.

Shape symbols: B sequences, S positions, D model width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hp_trainer.config import ModelConfig
from hp_trainer.model.attention import Limits
from hp_trainer.model.block import Block, Microbatch
from hp_trainer.model.layers import Linear, RMSNorm
from hp_trainer.model.parameters import declare
from hp_trainer.model.rotary import Rotation


class PredictionModule(nn.Module):
    """Mixes hidden states with the embeddings of later tokens, by one block.

    Args:
        config: Configuration of the model.
        depth: 1 for the first module: how much further ahead than the model it predicts.
    """

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        eps = config.norm_eps
        self.embedding_norm = RMSNorm(config.dim, eps=eps, published="enorm")
        self.hidden_norm = RMSNorm(config.dim, eps=eps, published="hnorm")
        self.projection = Linear(2 * config.dim, config.dim, published="eh_proj")
        layer = config.num_layers + depth - 1
        declare(self, f"model.layers.{layer}")
        self.block = Block(config, layer, f"mtp.{depth - 1}.block")
        self.norm = RMSNorm(config.dim, eps=eps, published="shared_head.norm")

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        *,
        rotation: Rotation,
        microbatch: Microbatch,
        documents: Limits = None,
    ) -> Tensor:
        """Return the hidden states that the output matrix takes, [B, S, D].

        Args:
            hidden: Hidden states of the previous module, or of the model after its final norm,
                [B, S, D].
            embedded: Embeddings of the tokens that come `depth` later, [B, S, D].
            rotation: Rotary cosines and sines of the positions.
            microbatch: What travels with the call.
            documents: What limits attention.
        """
        x = self.projection(
            torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        )
        x = self.block(x, rotation=rotation, microbatch=microbatch, documents=documents)
        y: Tensor = self.norm(x)
        return y


def prediction_loss(
    modules: nn.ModuleList,
    hidden: Tensor,
    embedded: Sequence[Tensor],
    *,
    rotation: Rotation,
    microbatch: Microbatch,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return this microbatch's share of the mean loss of all modules, a scalar.

    A prediction that would look across a target that is not to be learned, which is where a
    document ends, does not count.

    Args:
        modules: The modules, first depth first.
        hidden: Hidden states of the model after its final norm, [B, S, D].
        embedded: Embeddings of the tokens `depth` later, [B, S, D], for each module.
        rotation: Rotary cosines and sines of the positions that attention sees.
        microbatch: Says what is to be predicted.
        loss_of: Function that maps hidden states [B, S, D] and targets [B, S] to the sum of their
            loss.
    """
    ahead = microbatch.ahead
    assert ahead is not None
    is_first = not microbatch.prediction_losses  # and not a forward that runs again
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for module, later, targets, count in zip(
        modules, embedded, ahead.targets, ahead.num_targets, strict=True
    ):
        hidden = module(
            hidden,
            later,
            rotation=rotation,
            microbatch=microbatch,
            documents=microbatch.documents,
        )
        loss = loss_of(hidden, targets) / (len(modules) * max(1, count))
        if is_first:
            microbatch.prediction_losses.append(loss.detach())
        total = total + loss
    return total
