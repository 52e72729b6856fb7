"""A decoder-only transformer, dense or with experts, cut into pipeline stages.

A stage holds a run of layers; the first also holds the embedding, the last the final norm, the
output matrix and the modules of multi-token prediction. Parameters keep the names they have in the
whole model (``layers.5.attention.wq`` is that on every stage of every layout), so that names
identify them in initialisation, gradient norm and checkpoints.

Shape symbols: B sequences, S positions, D model width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from hp_platform import linear
from hp_train.config import ModelConfig
from hp_train.model.block import Block, Microbatch, add_loss
from hp_train.model.layers import Linear, RMSNorm, dropout
from hp_train.model.prediction import PredictionModule, prediction_loss
from hp_train.model.rotary import Rotation, rotation


class TransformerStage(nn.Module):
    """One pipeline stage of the model.

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
        self.embedding = nn.Embedding(vocab_size, config.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config, i, f"layers.{i}") for i in layers})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if last else None
        tied = config.tie_embeddings and first
        self.output = Linear(config.dim, vocab_size) if last and not tied else None
        depths = range(1, config.num_mtp_modules + 1) if last else range(0)
        self.mtp = nn.ModuleList(PredictionModule(config, depth) for depth in depths)

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage.

        Args:
            x: Token ids int64 [B, S] on the first stage, what the stage before returned on others.
            microbatch: What travels with the call.

        Returns:
            Logits [B, S, V] on the last stage. Activations [B, S, D] on others; with multi-token
            prediction [B, S, 2D], beside them the embeddings, which it needs at the end.
        """
        embedded: Tensor | None = None
        if self.embedding is not None:
            embedded = self.embedding(x).to(self.compute_dtype)
            x = dropout(embedded, self.config.dropout, microbatch.key, "embedding")
        elif self.config.num_mtp_modules:
            x, embedded = x.chunk(2, dim=-1)
        turn = rotation(self.config, _positions(x, microbatch))
        for block in self.layers.values():
            x = block(x, rotation=turn, microbatch=microbatch, documents=microbatch.documents)
        if self.norm is not None:
            return self._logits(self._look_ahead(self.norm(x), embedded, turn, microbatch))
        if self.config.num_mtp_modules and embedded is not None:
            return torch.cat((x, embedded), dim=-1)
        return x

    def _look_ahead(
        self, hidden: Tensor, embedded: Tensor | None, turn: Rotation, microbatch: Microbatch
    ) -> Tensor:
        """Let the losses of multi-token prediction, if there are any, hang on the hidden states."""
        if len(self.mtp) == 0 or microbatch.targets is None or embedded is None:
            return hidden
        loss = prediction_loss(
            self.mtp,
            hidden,
            embedded,
            weight=self.config.mtp_weight,
            rotation=turn,
            microbatch=microbatch,
            logits_of=self._logits,
        )
        return add_loss(hidden, loss)

    def _logits(self, x: Tensor) -> Tensor:
        if self.output is not None:
            logits: Tensor = self.output(x)
            return logits
        assert self.embedding is not None
        return linear(x, self.embedding.weight.to(x.dtype))


def _positions(x: Tensor, microbatch: Microbatch) -> Tensor:
    if microbatch.positions is not None:
        return microbatch.positions
    return torch.arange(x.shape[1], device=x.device)
