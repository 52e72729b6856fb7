"""What the trainer, the planner and checkpoints ask of a model.

Note [Models of one's own]. A model is a function that makes its stages:
`build(config, vocab_size, layers=..., first=..., last=..., compute_dtype=...)`, the arguments of
`TransformerStage`. `model.factory` names it. A stage derives from `Stage` and has its blocks in
`layers`, under their index in the whole model, so that names and initial weights of parameters are
those of the whole model on every layout. Parameters that are not those of known modules are
declared (`hp_trainer.model.declare`). Everything else follows: blocks are what FSDP shards, what
runs again in backward and what a compiler gets; modules of hp-expert are spread over ranks, and so
is `hp_context.Attention`.

Shape symbols: B sequences, S positions of a rank, D width of the stream, V vocabulary.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_base.errors import ConfigError
from hp_context import Attention, ContextParallel
from hp_expert import ExpertParallel, ExpertTensorParallel, GroupedExperts
from hp_platform import set_fsdp_gather_dtype
from hp_trainer.config import ModelConfig
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.layers import Embedding, Linear, WeightCasts, cast_linear
from hp_trainer.model.loss import linear_cross_entropy
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.recompute import Recompute, recomputed

_SMALL = 1 << 14
"""Bytes below which a saved tensor is not worth a copy of its own."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What tensor-parallel ranks exchange around matrices that they share out.

    Attributes:
        gather: [B, s, D] of this rank's positions to [B, S, D] of all.
        scatter: [B, S, D] summed over ranks to this rank's positions [B, s, D].
        linear_cross_entropy: See `hp_trainer.model.loss`; takes [T, D] of all positions, this
            rank's rows of the output matrix, [v, D], and the targets of all positions.
    """

    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Counted:
    """What takes the place of kernels and exchanges of a stage that runs once to be counted.

    Shape symbols besides: N query heads, H width of a head, T tokens, K experts of a token.

    Attributes:
        attend: Of q, k and v, [B, S, N, H] each, and the positions that a query sees on average;
            returns what attention would.
        mix: Of rows [T, D], their experts [T, K] and weights, the elements of an expert and those
            that its computation keeps of a row; returns what experts would.
        exchange: Of elements that tensor-parallel ranks put together, as if backward had as many.
    """

    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    mix: Callable[..., Tensor]
    exchange: Callable[[float], None]


class Stage(nn.Module):
    """One pipeline stage of a model; see Note [Models of one's own].

    `forward(x, *, microbatch)` gets token ids int64 [B, S] on the first stage and what the stage
    before returned on others, and a `Microbatch`. It returns [B, S, D] in `compute_dtype`. The last
    stage returns what :meth:`predict` makes of its hidden states, or logits [B, S, V] in any case.
    Parameters are fp32 or wider: `hp_trainer.model.Linear` casts its weight to the dtype of its
    input.

    Attributes:
        layers: Blocks of this stage, by their index in the whole model. Each maps its first
            argument, [B, S, D], to the same.
        sequence_ranks: Ranks with other positions of the same sequences; None: there are none.
        casts: Where dense weights are found once they were cast; see :meth:`share_casts`.
        linear_cross_entropy: What computes a loss, see `hp_trainer.model.linear_cross_entropy`.
        is_split: See :meth:`split_weight_gradients`.

    Args:
        compute_dtype: Dtype of activations; parameters may be wider.
    """

    layers: nn.ModuleDict
    width_sent: int | None = None
    """Width of what travels from stage to stage; None: `ModelConfig.stage_width`."""

    def __init__(self, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.sequence_ranks: ProcessGroup | None = None
        self.casts: WeightCasts | None = None
        self._made: WeightCasts | None = None
        self.is_split = True
        self.linear_cross_entropy: Callable[..., Tensor] = linear_cross_entropy

    def predict(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
        """Return the loss of hidden states, a scalar, without holding large logits; or the logits.

        Args:
            x: Hidden states [B, S, D].
            weight: Output matrix [V, D], this stage's parameter.
            targets: `Microbatch.targets`; None: logits [B, S, V] are returned.
        """
        if targets is None:
            return cast_linear(x, weight, casts=self.casts)
        rows = x.flatten(0, 1)
        return self.linear_cross_entropy(
            rows, weight, targets.flatten(), casts=self.casts, is_split=self.is_split
        )

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return what FSDP shards as one unit, backward runs again and a compiler gets."""
        return [*self.layers.values()]

    @property
    def apart(self) -> Sequence[nn.Module]:
        """Blocks whose parameters are in no other block: FSDP shards each as one unit."""
        return self.blocks

    @property
    def units(self) -> Sequence[nn.Module]:
        """Say what FSDP shards as one unit each where it gathers by block, in the order of forward.

        Of each unit parameters are read in its `forward` alone, or in `Lender.lend`.
        """
        return self.apart

    @property
    def casting(self) -> Sequence[nn.Module]:
        """Modules that cast what they read of their own parameters to `compute_dtype`.

        FSDP gathers these parameters in it, and others as they are.
        """
        return [part for part in self.modules() if isinstance(part, Linear | GroupedExperts)]

    @property
    def attentions(self) -> Sequence[Attention]:
        """Return what context-parallel ranks share out."""
        return [part for part in self.modules() if isinstance(part, Attention)]

    @property
    def kept_buffers(self) -> Mapping[str, Tensor]:
        """Return what a checkpoint has besides parameters, by global name."""
        return dict(self.named_buffers())

    def initialize(
        self,
        parameters: Sequence[Parameter],
        config: ModelConfig,
        *,
        seed: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill what is here of parameters and buffers, the same whatever the layout.

        Args:
            parameters: Parameters of this stage, cut and sharded.
            config: The whole model.
            seed: Seed of the run.
            on_progress: Called again and again.
        """
        for buffer in self.buffers():  # correction biases
            buffer.zero_()
        initialize_parameters(parameters, config, seed=seed, on_progress=on_progress)

    @property
    def experts(self) -> Sequence[nn.Module]:
        """Modules whose own parameters are experts, which ranks share out."""
        return [part for part in self.modules() if isinstance(part, GroupedExperts)]

    def expect_no_values(self) -> None:
        """Hear that it will run on tensors without values: no shape may depend on them."""

    def expect_ranks(self, sizes: Mapping[str, int]) -> None:
        """Hear how many ranks will share this stage, before anything of it is declared or cut.

        Args:
            sizes: Ranks by axis: "ep", "tp", "cp".
        """

    def stand_alone(self, sizes: Mapping[str, int], exchange: Callable[[float], None]) -> None:
        """Be one of so many ranks with nobody there, after :meth:`expect_ranks`, to be counted.

        Args:
            sizes: Number of ranks by axis: "ep", "tp", "cp".
            exchange: See `Counted`.
        """

    def be_counted(self, counted: Counted) -> None:
        """Let what nobody else knows of be counted instead of computed."""

    def try_documents(self) -> None:
        """See that documents of a sequence stay apart, once weights are there.

        What has all its attention from hp-context needs no trial. All ranks that share the stage
        call it together.

        Raises:
            hp_base.errors.ConfigError: When a document sees another.
        """

    def spread_experts(self, groups: Mapping[str, ProcessGroup], *, hidden: bool) -> None:
        """Spread experts over ranks.

        Args:
            groups: "ep", the ranks that share them out; "etp", those that share each of them;
                "tp", those that share what is around.
            hidden: Whether ranks share out the hidden width of each, too.
        """
        for part in self.experts:
            if hidden:
                # Ranks that share an expert's width have different positions.
                ExpertTensorParallel(sliced=True).apply(part, (groups["ep"], groups["etp"]))
            else:
                ExpertParallel().apply(part, groups["ep"])

    def spread_attention(self, context: ContextParallel, group: ProcessGroup) -> None:
        """Let ranks share sequences.

        Args:
            context: How they exchange.
            group: The ranks, more than one.

        Raises:
            hp_base.errors.ConfigError: When nothing here knows how.
        """
        if not self.attentions:
            raise ConfigError("mesh.cp must be 1 for a model without hp_context.Attention")
        for attention in self.attentions:
            context.apply(attention, group)

    @property
    def cut_by_itself(self) -> Callable[["Stage", range, ProcessGroup], None] | None:
        """Say what cuts it over tensor-parallel ranks; None: `hp_trainer.model.tensor_parallel`."""
        return None

    def place_exchanges(self, exchanges: Exchanges) -> None:
        """Put what tensor-parallel ranks exchange where parameters with a `tp_dim` need it."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut over ranks")

    def recompute(self, what: Recompute) -> None:
        """Let parts of every block run again in backward instead of being kept.

        Args:
            what: Here "none" or "full": a block of one's own has no parts.
        """
        for block in self.blocks if what == "full" else ():
            block.forward = partial(recomputed, block.forward)

    def gather_narrow(self) -> None:
        """Let FSDP gather in `compute_dtype` what is cast to it; on its device and sharded, or not.

        The same bits are computed with; half of the bytes of a float32 parameter travel.
        """
        sharded = [
            weight
            for part in self.casting
            for weight in part.parameters(recurse=False)
            if isinstance(weight, DTensor)
        ]
        set_fsdp_gather_dtype(sharded, self.compute_dtype)

    def split_weight_gradients(self, *, is_split: bool) -> None:
        """Say whether some schedule may compute weight gradients later than input gradients."""
        self.is_split = is_split
        for part in self.modules():
            if isinstance(part, Linear | Embedding):
                part.is_split = is_split

    def share_casts(self, *, sharded: bool = True) -> None:
        """Cast weights once for many calls; from now on :meth:`forget_casts` is to be called.

        Args:
            sharded: Whether also those that FSDP shards, which must then be there for as long.
        """
        casts = self._made = WeightCasts()
        parts = [p for p in self.modules() if isinstance(p, Linear | Embedding | GroupedExperts)]
        left_out = [] if sharded else [part for part in parts if _is_sharded(part)]
        if not any(isinstance(part, Linear | Embedding) for part in left_out):
            self.casts = casts
        for part in parts:
            if isinstance(part, Linear):
                part.casts = self.casts
            elif isinstance(part, GroupedExperts) and part not in left_out:
                part.cast_of = casts.of

    def is_activation(self, saved: Tensor) -> bool:
        """Say if what autograd saves is of one microbatch, and large enough to be copied away."""
        if saved.nbytes < _SMALL:
            return False
        casts = () if self._made is None else self._made.made
        memory = saved.untyped_storage()
        return all(cast.untyped_storage() is not memory for cast in casts)

    def forget_casts(self) -> None:
        """Cast weights anew at their next use: they have changed, or memory is wanted."""
        if self._made is not None:
            self._made.clear()


def _is_sharded(part: nn.Module) -> bool:
    return any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False))


@cache
def factory_of(name: str) -> Callable[..., Any]:
    """Import what `model.factory` names.

    Args:
        name: `package.module:function`, or `path/to/file.py:function`.

    Raises:
        hp_base.errors.ConfigError: When there is no such thing.
    """
    path, _, function = name.rpartition(":")
    try:
        module = _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        found: Callable[..., Any] = attrgetter(function)(module)
    except Exception as error:
        raise ConfigError(
            f'model.factory ("{name}") must be importable: {type(error).__name__}: {error}'
        ) from error
    return found


def _from_file(path: Path) -> ModuleType:
    """Import a file as a script is: what lies beside it can be imported too."""
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.append(folder)
    # Not under its own name, which may be that of an installed module.
    spec = importlib.util.spec_from_file_location(f"hp_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
