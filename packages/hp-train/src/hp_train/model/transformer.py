"""A decoder-only transformer, dense or with experts, cut into pipeline stages.

A stage holds a run of layers; the first also holds the embedding, the last the final norm, the
output matrix, which may be a copy of the embedding, and the modules of multi-token prediction.
Parameters keep the names they have in the
whole model (``layers.5.attention.wq`` is that on every stage of every layout), so that names
identify them in initialisation, gradient norm and checkpoints.

Shape symbols: B sequences, S positions, D model width, V vocabulary, M modules of multi-token
prediction.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_expert import GroupedExperts
from hp_train.config import ModelConfig
from hp_train.model.block import Block, Microbatch, add_loss
from hp_train.model.layers import Embedding, Linear, RMSNorm, WeightCasts, cast_linear, dropout
from hp_train.model.prediction import PredictionModule, prediction_loss
from hp_train.model.rotary import Rotation, rotation


class TransformerStage(nn.Module):
    """One pipeline stage of the model.

    Attributes:
        before_output: What hidden states go through before the output matrix: where that is cut
            over ranks, the gathering of their positions.
        cross_entropy: Function that maps logits and targets of tokens to the sum of their losses.
        casts: Where weights are found once they were cast; see :meth:`share_casts`.

    Args:
        config: The whole model.
        vocab_size: V.
        layers: Global indices of the layers this stage holds.
        first: Whether it holds the embedding.
        last: Whether it holds the final norm, the output matrix and what predicts further ahead.
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
        self.config = config
        self.compute_dtype = compute_dtype
        self.is_first = first
        has_table = first or (last and config.tie_embeddings)
        self.embedding = Embedding(vocab_size, config.dim) if has_table else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, f"layers.{i}") for i in layers})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if last else None
        has_output = last and not config.tie_embeddings
        self.output = Linear(config.dim, vocab_size) if has_output else None
        depths = range(1, config.num_mtp_modules + 1) if last else range(0)
        self.mtp = nn.ModuleList(PredictionModule(config, depth) for depth in depths)
        self.casts: WeightCasts | None = None
        self.before_output: Callable[[Tensor], Tensor] | None = None
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def share_casts(self) -> None:
        """Cast weights once for many calls; from now on :meth:`forget_casts` is to be called."""
        self.casts = WeightCasts()
        for part in self.modules():
            if isinstance(part, Linear):
                part.casts = self.casts
            elif isinstance(part, GroupedExperts):
                part.cast_of = self.casts.of

    def forget_casts(self) -> None:
        """Cast weights anew at their next use: they have changed, or memory is wanted."""
        if self.casts is not None:
            self.casts.clear()

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage.

        Args:
            x: Token ids int64 [B, S] on the first stage, what the stage before returned on others.
            microbatch: What travels with the call.

        Returns:
            Logits [B, S, V] on the last stage. Activations [B, S, D] on others; with multi-token
            prediction [B, S, (1 + M) D], beside them the embeddings of later tokens, which it
            needs at the end.
        """
        config, ahead = self.config, microbatch.ahead
        later: Sequence[Tensor] = ()
        if self.is_first:
            assert self.embedding is not None
            tokens = x if ahead is None else torch.cat((x, *ahead.tokens))
            x, *later = self.embedding(tokens).to(self.compute_dtype).split(len(x))
            if config.dropout:
                x = dropout(x, config.dropout, microbatch.key, "embedding")
        elif config.num_mtp_modules:
            x, *later = x.split(config.dim, dim=-1)
            x = x.contiguous()  # strides like those that later blocks see: graphs serve all
        positions = microbatch.positions
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        turn = rotation(config, positions)
        for block in self.layers.values():
            x = block(x, rotation=turn, microbatch=microbatch, documents=microbatch.documents)
        if self.norm is not None:
            hidden = self.norm(x)
            if ahead is not None:
                hidden = self._predict_ahead(hidden, later, turn, microbatch)
            return self._logits(hidden)
        if ahead is None:
            return F.pad(x, (0, config.stage_width - config.dim))
        return torch.cat((x, *later), dim=-1)

    def _predict_ahead(
        self, hidden: Tensor, later: Sequence[Tensor], turn: Rotation, microbatch: Microbatch
    ) -> Tensor:
        """Let the loss of multi-token prediction hang on the hidden states."""
        loss = prediction_loss(
            self.mtp,
            hidden,
            later,
            rotation=turn,
            microbatch=microbatch,
            logits_of=self._logits,
            cross_entropy=self.cross_entropy,
        )
        return add_loss(hidden, loss * self.config.mtp_weight)

    def _logits(self, x: Tensor) -> Tensor:
        if self.before_output is not None:
            x = self.before_output(x)
        if self.output is not None:
            logits: Tensor = self.output(x)
            return logits
        assert self.embedding is not None
        return cast_linear(x, self.embedding.weight, casts=self.casts)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy of all tokens whose target is not negative, a scalar.

    Args:
        logits: [T, V], fp32 or wider.
        targets: int64 [T].
    """
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
