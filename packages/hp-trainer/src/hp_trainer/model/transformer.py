"""A decoder-only transformer, dense or with experts, cut into pipeline stages.

A stage holds a run of layers; the first also holds the embedding, the last the final norm, the
output matrix, which may be a copy of the embedding, and the modules of multi-token prediction.
Parameters keep the names they have in the
whole model (``layers.5.attention.wq`` is that on every stage of every layout), so that names
identify them in initialisation, gradient norm and checkpoints.

Shape symbols: B sequences, S positions, D model width, V vocabulary, M modules of multi-token
prediction.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_base.errors import ConfigError
from hp_trainer.config import ModelConfig
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.model.block import Block, Microbatch, add_loss
from hp_trainer.model.capabilities import Exchanges
from hp_trainer.model.layers import Embedding, Linear, RMSNorm, dropout
from hp_trainer.model.parameters import Declared, declare, declared
from hp_trainer.model.prediction import PredictionModule, prediction_loss
from hp_trainer.model.recompute import Recompute
from hp_trainer.model.rotary import Rotation, rotation
from hp_trainer.model.stage import Stage, factory_of
from hp_trainer.plugins import plugin


class TransformerStage(Stage):
    """One pipeline stage of the model.

    Attributes:
        before_output: What hidden states go through before the output matrix: where that is cut
            over ranks, the gathering of their positions.

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
        layers: Iterable[int],
        first: bool,
        last: bool,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(compute_dtype=compute_dtype)
        self.config = config
        self.is_first = first
        self.embedding = self.norm = self.output = None
        if first or (last and config.tie_embeddings):
            self.embedding = Embedding(vocab_size, config.dim, published="model.embed_tokens")
        self.layers = nn.ModuleDict(
            {str(i): Block(config, i, f"layers.{i}", published=f"model.layers.{i}") for i in layers}
        )
        if last:
            self.norm = RMSNorm(config.dim, eps=config.norm_eps, published="model.norm")
        if last and not config.tie_embeddings:
            self.output = Linear(config.dim, vocab_size, tp_dim=0, published="lm_head")
            declare(self.output, weight=ParameterSpec(tp_dim=0, is_table=True))
        depths = range(1, config.num_mtp_modules + 1) if last else range(0)
        self.mtp = nn.ModuleList(PredictionModule(config, depth) for depth in depths)
        self.before_output: Callable[[Tensor], Tensor] | None = None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """See `Stage.blocks`; those of multi-token prediction are among them."""
        return [part for part in self.modules() if isinstance(part, Block)]

    def units(self, *, by_block: bool) -> Sequence[nn.Module]:
        """See `Stage.units`: by block the embedding comes before the blocks, the output behind."""
        first: nn.Module | None = self.embedding if self.is_first else None
        last: nn.Module | None = None
        if self.norm is not None:
            last = self.embedding if self.output is None else self.output
        if first is last or not by_block:  # a table that is both is read all the time
            return self.blocks
        return [part for part in (first, *self.blocks, last) if part is not None]

    @property
    def casting(self) -> Sequence[nn.Module]:
        """See `Stage.casting`; rows of the embedding are cast when they have been looked up."""
        return [*(p for p in self.children() if isinstance(p, Embedding)), *super().casting]

    def recompute(self, what: Recompute) -> None:
        """See `Stage.recompute`."""
        for part in self.modules():
            if isinstance(part, Block):
                part.recompute = what

    def place_exchanges(self, exchanges: Exchanges) -> None:
        """See `hp_trainer.model.capabilities.CutByExchanges`."""
        for part in self.modules():
            if isinstance(part, Block):
                part.place_exchanges(exchanges)
        self.before_output = exchanges.gather
        self.linear_cross_entropy = exchanges.linear_cross_entropy

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage.

        Args:
            x: Token ids int64 [B, S] on the first stage, what the stage before returned on others.
            microbatch: What travels with the call.

        Returns:
            On the last stage the loss, a scalar, see `Microbatch.targets`; without targets logits
            [B, S, V]. Activations [B, S, D] on others; with multi-token prediction
            [B, S, (1 + M) D], beside them the embeddings of later tokens, which it needs at the
            end.
        """
        config, ahead = self.config, microbatch.ahead
        later: Sequence[Tensor] = ()
        if self.is_first:
            assert self.embedding is not None
            tokens = x if ahead is None else torch.cat((x, *ahead.tokens))
            x, *later = self.embedding(tokens).to(self.compute_dtype).split(len(x))
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
            return self._predict(hidden, microbatch.targets)
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
            loss_of=self._predict,
        )
        return add_loss(hidden, loss * self.config.mtp_weight)

    def _predict(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """See `Stage.predict`; of this rank's hidden states, [B, s, D]."""
        if self.before_output is not None:
            x = self.before_output(x)
        holder = self.embedding if self.output is None else self.output
        assert holder is not None
        return holder.lend(self.predict, x, targets)


def tied_parameters(config: ModelConfig) -> tuple[str, ...]:
    """Return parameters that the first and the last stage of a model both have, by global name."""
    if config.transformers:
        found: tuple[str, ...] = _of_transformers(config).tied_parameters(config)
        return found
    return ("embedding.weight",) if config.tie_embeddings else ()


def build_stage(
    config: ModelConfig,
    vocab_size: int,
    *,
    layers: Iterable[int],
    first: bool,
    last: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> Stage:
    """Make a stage on the meta device: of `model.factory`, of transformers, or a transformer's.

    Raises:
        hp_base.errors.ConfigError: When the factory cannot be imported, or makes something else.
    """
    make: Callable[..., object] = TransformerStage
    if config.transformers:
        make = _of_transformers(config)
    elif config.factory:
        make = factory_of(config.factory)
    with torch.device("meta"):
        stage = make(
            config,
            vocab_size,
            layers=layers,
            first=first,
            last=last,
            compute_dtype=compute_dtype,
        )
    if not isinstance(stage, Stage):
        kind = f"{type(stage).__module__}.{type(stage).__qualname__}"
        raise ConfigError(
            f'model.factory ("{config.factory}") must make a hp_trainer.model.Stage, not {kind}'
        )
    return stage


def _of_transformers(config: ModelConfig) -> Any:
    """Return the stages of models of transformers, a package above this one."""
    asked_by = f"model.transformers ({config.transformers})"
    return plugin("hp_trainer.models", "transformers", asked_by=asked_by, package="hp-transformers")


def whole_model(model: ModelConfig) -> Stage:
    """Return the whole model as one stage on the meta device."""
    return build_stage(
        model, model.vocab_size, layers=range(model.num_layers), first=True, last=True
    )


def model_tensors(model: ModelConfig) -> dict[str, Declared]:
    """Return what all parameters and buffers are, by global name."""
    return declared(whole_model(model))


def model_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and buffers, by global name."""
    return {name: tensor.shape for name, tensor in model_tensors(model).items()}


def count_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model, without correction biases."""
    return sum(parameter.numel() for parameter in whole_model(model).parameters())
