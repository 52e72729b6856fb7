"""One block of the transformer: attention and feed-forward, whatever the model family.

Shape symbols: B sequences, S positions, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert import (
    ClampedSwiGLU,
    GroupedExperts,
    MoE,
    Routing,
    SwiGLU,
    TopKRouter,
    document_balance_loss,
    sequence_balance_loss,
)
from hp_platform import doing
from hp_trainer.config import ModelConfig
from hp_trainer.model.attention import Limits, make_attention
from hp_trainer.model.capabilities import Exchanges
from hp_trainer.model.layers import DropoutKey, FeedForward, RMSNorm, dropout
from hp_trainer.model.parameters import declare
from hp_trainer.model.recompute import Recompute, recomputed, recomputed_but_products
from hp_trainer.model.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Balanced:
    """Documents whose experts are balanced, each by itself, where a plan packs them together.

    The loss is the mean of their values by tokens: with documents of one length it is that of
    sequences of this length.

    Attributes:
        documents: The document of each position that is on this rank between layers, int64 [s];
            -1: padding.
        lengths: Tokens of each, int64 [N].
        num_tokens: Tokens of the whole step over all ranks: what sums are divided by.
    """

    documents: Tensor
    lengths: Tensor
    num_tokens: int


class Ahead(NamedTuple):
    """For each module of multi-token prediction, depth 1 first, what it reads and predicts.

    Attributes:
        tokens: int64 [B, S], the token `depth` places later; past the end the last one again.
        targets: int64 [B, S], the token `depth + 1` places later, negative where there is none or
            a document ends before it.
        num_targets: Targets of the whole step over all ranks: what sums are divided by.
    """

    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_targets: tuple[int, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Ahead":
        """Return the same with every tensor replaced."""
        tokens, targets = (tuple(map(function, part)) for part in (self.tokens, self.targets))
        return Ahead(tokens, targets, self.num_targets)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The microbatch that a stage works on: everything about it but the activations.

    Attributes:
        num_sequences: Sequences of the whole step over all ranks: what sums are divided by.
        key: Which activations to drop; None outside training.
        positions: Positions of the tokens that attention sees on this rank, in their sequence or,
            in a planned step, in their document, int64 [S]; None: 0 .. S - 1.
        documents: What limits attention besides the model's own mask, for each sequence.
        padding: Which positions hold nothing, of those that are on this rank between layers, bool
            [B, S]: no expert computes them and no balance counts them. None: none on any rank.
        balanced: What is balanced instead of sequences; None: sequences are.
        targets: The token after each, int64 [B, S] of the positions that attention sees on this
            rank, negative where none is to be learned: the last stage returns their loss. None: it
            returns logits.
        ahead: What multi-token prediction reads and predicts, for the positions that attention
            sees here; None outside training.
        balance_losses: Each MoE layer puts its detached share of the balancing loss here, under
            its name, so that a part that runs again does not count twice.
        prediction_losses: Each multi-token prediction module appends its detached share of their
            mean loss here.
    """

    num_sequences: int
    key: DropoutKey | None = None
    positions: Tensor | None = None
    documents: Limits = None
    padding: Tensor | None = None
    balanced: Balanced | None = None
    targets: Tensor | None = None
    ahead: Ahead | None = None
    balance_losses: dict[str, Tensor] = field(default_factory=dict)
    prediction_losses: list[Tensor] = field(default_factory=list)


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
    """Attention and feed-forward, each behind a norm and a residual connection.

    Attributes:
        sequence_ranks: Ranks with other positions of the same sequences; None: there are none.
        recompute: What runs again in backward.
        attend: Norm and attention, [B, S, D] to [B, S, D]; may be replaced by what compiles it.
        feed: Norm and feed-forward, likewise, with the decisions of the router if there is one.

    Args:
        config: Configuration of the model.
        layer: Global index, which decides whether it is dense and has a window.
        name: Global name; part of the key of dropout.
        published: See `hp_trainer.model.declare`.
    """

    def __init__(
        self, config: ModelConfig, layer: int, name: str, *, published: str | None = None
    ) -> None:
        super().__init__()
        declare(self, published)
        self.name = name
        self.sequence_ranks: ProcessGroup | None = None
        self.recompute: Recompute = "none"
        self.dropout = config.dropout
        self.balance_coefficient = config.balance_coefficient
        eps = config.norm_eps
        self.attention_norm = RMSNorm(config.dim, eps=eps, published="input_layernorm")
        self.attention = make_attention(config, layer)
        self.feed_forward_norm = RMSNorm(config.dim, eps=eps, published="post_attention_layernorm")
        dense = config.is_dense(layer)
        self.moe = None if dense else make_moe(config)
        self.feed_forward = None
        if dense:
            self.feed_forward = FeedForward(
                config.dim, config.dense_hidden, is_cut=True, published="mlp"
            )
        self.attend: Callable[[Tensor, Rotation, Limits], Tensor] = self._attend
        self.feed: Callable[[Tensor, Tensor | None], tuple[Tensor, Routing | None]] = self._feed

    def forward(
        self,
        x: Tensor,
        *,
        rotation: Rotation,
        microbatch: Microbatch,
        documents: Limits = None,
    ) -> Tensor:
        """Map [B, S, D] to [B, S, D].

        Args:
            x: [B, S, D].
            rotation: Rotary cosines and sines of the positions.
            microbatch: What travels with the call.
            documents: What limits attention besides the layer's own mask.
        """
        if self.recompute == "full":
            return recomputed(self._run, x, rotation, microbatch, documents)
        if self.recompute == "selective":
            return recomputed_but_products(self._run, x, rotation, microbatch, documents)
        return self._run(x, rotation, microbatch, documents)

    def place_exchanges(self, exchanges: Exchanges) -> None:
        """Gather positions before attention and feed-forward, and sum after them."""

        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return exchanges.gather(args[0]), *args[1:]

        self.attention.register_forward_pre_hook(before)
        self.attention.wo.finish = exchanges.scatter
        if self.feed_forward is not None:
            self.feed_forward.register_forward_pre_hook(before)
            self.feed_forward.w2.finish = exchanges.scatter

    def _run(
        self, x: Tensor, rotation: Rotation, microbatch: Microbatch, documents: Limits
    ) -> Tensor:
        key, again = microbatch.key, self.recompute
        args = (x, rotation, documents)
        with doing(self.name):
            y = recomputed(self.attend, *args) if again == "attention" else self.attend(*args)
            if self.dropout:
                y = dropout(y, self.dropout, key, f"{self.name}.attention")
            x = x + y
            if again == "feed_forward":
                y = recomputed(self._feed_forward, x, microbatch)
            else:
                y = self._feed_forward(x, microbatch)
            if self.dropout:
                y = dropout(y, self.dropout, key, f"{self.name}.feed_forward")
            return x + y

    def _attend(self, x: Tensor, rotation: Rotation, documents: Limits) -> Tensor:
        y: Tensor = self.attention(self.attention_norm(x), rotation=rotation, documents=documents)
        return y

    def _feed(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Routing | None]:
        x = self.feed_forward_norm(x)
        if self.feed_forward is not None:
            return self.feed_forward(x), None
        assert self.moe is not None
        result: tuple[Tensor, Routing] = self.moe(x, padding=padding)
        return result

    def _feed_forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        y, routing = self.feed(x, microbatch.padding)
        if routing is None or self.balance_coefficient == 0.0 or microbatch.key is None:
            return y
        assert self.moe is not None
        if microbatch.balanced is not None:
            loss = self._of_documents(routing, microbatch.balanced)
        else:
            B, S, _ = x.shape
            loss_B = sequence_balance_loss(
                routing.scores.view(B, S, -1),
                routing.experts.view(B, S, -1),
                num_experts=self.moe.experts.num_experts,
                group=self.sequence_ranks,
                padding=microbatch.padding,
            )
            loss = loss_B.sum() * (self.balance_coefficient / microbatch.num_sequences)
        microbatch.balance_losses[self.name] = loss.detach()
        return add_loss(y, loss)

    def _of_documents(self, routing: Routing, balanced: Balanced) -> Tensor:
        """Return the balancing loss of documents, this microbatch's share of that of the step."""
        documents, lengths = balanced.documents, balanced.lengths
        loss_N = document_balance_loss(
            routing.scores, routing.experts, documents, lengths, group=self.sequence_ranks
        )
        return (loss_N * lengths).sum() * (self.balance_coefficient / balanced.num_tokens)


def make_moe(config: ModelConfig) -> MoE:
    """Build the mixture of experts of one layer."""
    router = TopKRouter(
        config.dim,
        config.num_experts,
        config.top_k,
        score_function=config.router_score,
        normalize=config.router_normalize,
        scaling_factor=config.router_scale,
        bias=config.router_bias,
        correction_bias=config.correction_bias,
        counts_load=config.correction_bias,  # which alone is corrected by it
        num_groups=config.num_expert_groups,
        num_limited_groups=config.num_limited_groups,
    )
    clamped = ClampedSwiGLU(limit=config.swiglu_limit, alpha=config.swiglu_alpha)
    experts = GroupedExperts(
        config.num_experts,
        config.dim,
        config.expert_hidden,
        bias=config.expert_bias,
        activation=SwiGLU() if config.expert_activation == "swiglu" else clamped,
    )
    shared_hidden = config.num_shared_experts * config.expert_hidden
    shared = None
    if shared_hidden:
        shared = FeedForward(config.dim, shared_hidden, is_cut=False, published="shared_experts")
    return declare(MoE(declare(router, "gate"), declare(experts, "experts"), shared=shared), "mlp")


def look_ahead(tokens: Tensor, targets: Tensor, num_targets: tuple[int, ...]) -> Ahead:
    """Move tokens and targets of whole sequences, for multi-token prediction.

    The token some places later may be on another rank, in whatever order ranks share positions. So
    tokens and targets are moved while the sequence is whole, and each rank takes those of its own
    positions.

    Args:
        tokens: int64 [B, S].
        targets: The token after each, int64 [B, S], negative where none is to be learned.
        num_targets: Number of targets of the whole step, for each module.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    aims = targets
    for depth in range(1, len(num_targets) + 1):
        later = place + depth
        is_there, later = later < len(place), later.clamp(max=len(place) - 1)
        # No place in between may be one from which nothing is to be learned.
        aims = targets[:, later].masked_fill(~is_there | (aims < 0), -1)
        found[0].append(tokens[:, later])
        found[1].append(aims)
    return Ahead(tuple(found[0]), tuple(found[1]), num_targets)
