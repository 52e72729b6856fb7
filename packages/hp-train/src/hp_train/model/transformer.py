"""A decoder-only mixture-of-experts transformer, cut into pipeline stages.

A stage holds a run of layers; the first also holds the embedding, the last the final norm and the
output matrix. Parameters keep the names they have in the whole model (``layers.5.attention.wq``
is that on every stage of every layout), so that names identify them in initialisation, gradient
norm and checkpoints.

Shape symbols: B sequences, S positions, D model width, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hp_expert import GroupedExperts, MoE, Routing, TopKRouter, sequence_balance_loss
from hp_platform import linear
from hp_train.config import ModelConfig
from hp_train.model.layers import Attention, DropoutKey, Linear, RMSNorm, SwiGLU, dropout


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What every stage needs to know of the microbatch it works on. It travels with the call.

    Attributes:
        num_sequences: Sequences of the whole step over all ranks: what sums are divided by.
        key: Which activations to drop; None outside training.
        balance_losses: Each MoE layer appends its detached share of the balancing loss here.
    """

    num_sequences: int
    key: DropoutKey | None = None
    balance_losses: list[Tensor] = field(default_factory=list)


class _AddLoss(torch.autograd.Function):
    """Identity on ``x`` that lets ``loss`` take part in the backward as if it had been added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Add a term to the training loss from inside the model, whatever stage this is.

    The step's loss is a sum over ranks of terms already divided by global counts, so every term
    enters backward with gradient one.

    Args:
        x: Activations the term must outlive, any shape.
        loss: The term, a scalar.
    """
    y: Tensor = _AddLoss.apply(x, loss)
    return y


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual connection."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.name = f"layers.{index}"
        self.dropout = config.dropout
        self.balance_coefficient = config.balance_coefficient
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(
            config.dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim or config.dim // config.num_heads,
            rope_theta=config.rope_theta,
        )
        self.feed_forward_norm = RMSNorm(config.dim, eps=config.norm_eps)
        dense = index < config.num_dense_layers
        self.moe = None if dense else _moe(config)
        self.feed_forward = SwiGLU(config.dim, config.dense_hidden) if dense else None

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        key = microbatch.key
        y = self.attention(self.attention_norm(x))
        x = x + dropout(y, self.dropout, key, f"{self.name}.attention")
        y = self._feed_forward(self.feed_forward_norm(x), microbatch)
        return x + dropout(y, self.dropout, key, f"{self.name}.feed_forward")

    def _feed_forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        if self.feed_forward is not None:
            dense: Tensor = self.feed_forward(x)
            return dense
        assert self.moe is not None
        result: tuple[Tensor, Routing] = self.moe(x)
        y, routing = result
        if self.balance_coefficient == 0.0 or microbatch.key is None:
            return y
        B, S, _ = x.shape
        loss_B = sequence_balance_loss(
            routing.scores.view(B, S, -1),
            routing.experts.view(B, S, -1),
            num_experts=self.moe.experts.num_experts,
        )
        loss = loss_B.sum() * (self.balance_coefficient / microbatch.num_sequences)
        microbatch.balance_losses.append(loss.detach())
        return add_loss(y, loss)


def _moe(config: ModelConfig) -> MoE:
    shared_hidden = config.num_shared_experts * config.expert_hidden
    return MoE(
        TopKRouter(config.dim, config.num_experts, config.top_k),
        GroupedExperts(config.num_experts, config.dim, config.expert_hidden),
        shared=SwiGLU(config.dim, shared_hidden) if shared_hidden else None,
    )


class TransformerStage(nn.Module):
    """One pipeline stage of the model.

    Args:
        config: The whole model.
        vocab_size: V.
        layers: Global indices of the layers this stage holds.
        first: Whether it holds the embedding.
        last: Whether it holds the final norm and the output matrix.
        compute_dtype: Dtype of activations; parameters may be wider.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        layers: range,
        first: bool,
        last: bool,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.dropout = config.dropout
        self.embedding = nn.Embedding(vocab_size, config.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in layers})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if last else None
        tied = config.tie_embeddings and first
        self.output = Linear(config.dim, vocab_size) if last and not tied else None

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage.

        Args:
            x: Token ids int64 [B, S] on the first stage, activations [B, S, D] on others.
            microbatch: What travels with the call.

        Returns:
            Logits [B, S, V] on the last stage, activations [B, S, D] on others.
        """
        if self.embedding is not None:
            x = self.embedding(x).to(self.compute_dtype)
            x = dropout(x, self.dropout, microbatch.key, "embedding")
        for block in self.layers.values():
            x = block(x, microbatch=microbatch)
        return x if self.norm is None else self._logits(self.norm(x))

    def _logits(self, x: Tensor) -> Tensor:
        if self.output is not None:
            logits: Tensor = self.output(x)
            return logits
        assert self.embedding is not None
        return linear(x, self.embedding.weight.to(x.dtype))
