"""`Stage`: the part of a model that the trainer, the planner and checkpoints use.

Weights of a stage are cast once to the dtype of its activations, gathered in that dtype, and the
casts dropped when weights change.

Shape symbols: B sequences, S positions of a rank, D width of the stream, V vocabulary.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
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
from hp_expert import GroupedExperts, SpreadExperts
from hp_platform import set_fsdp_gather_dtype
from hp_trainer.config import ModelConfig
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.layers import Embedding, Linear, WeightCasts, cast_linear
from hp_trainer.model.loss import linear_cross_entropy
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.recompute import Recompute, recomputed

_SMALL = 1 << 14
"""Bytes below which a saved tensor is not worth a copy of its own."""


class Stage(nn.Module):
    """One pipeline stage of a model.

    A model is a function that makes its stages: `build(config, vocab_size, layers=..., first=...,
    last=..., compute_dtype=...)`, the arguments of `TransformerStage`. `model.factory` names it. A
    stage derives from `Stage` and has its blocks in `layers`, under their index in the whole model,
    so that names and initial weights of parameters are those of the whole model on every layout.
    Parameters that are not those of known modules are declared (`hp_trainer.model.declare`).
    Everything else follows: blocks are what FSDP shards, what runs again in backward and what a
    compiler gets; modules of hp-expert are spread over ranks, and so is `hp_context.Attention`.
    What only some models can do is in `hp_trainer.model.capabilities`.

    `forward(x, *, microbatch)` gets token ids int64 [B, S] on the first stage and what the stage
    before returned on others, and a `Microbatch`. It returns [B, S, D] in `compute_dtype`. The last
    stage returns what :meth:`predict` makes of its hidden states, or logits [B, S, V] in any case.
    Parameters are fp32 or wider: `hp_trainer.model.Linear` casts its weight to the dtype of its
    input.

    Attributes:
        layers: Blocks of this stage, by their index in the whole model. Each maps its first
            argument, [B, S, D], to the same.
        sequence_ranks: Ranks with other positions of the same sequences; None: there are none.
        casts: Dense weights that were cast already; None: each call casts its own.
        kept_casts: The same of all weights, experts' included; see `hp_trainer.model.stage`.
        linear_cross_entropy: Function that computes the loss of `predict`, see
            `hp_trainer.model.linear_cross_entropy`.
        is_split: Whether some schedule may compute weight gradients later than input gradients.

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
        self.kept_casts: WeightCasts | None = None
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
        """Return the modules that backward may run again and a compiler gets, `layers` at least."""
        return [*self.layers.values()]

    def units(self, *, by_block: bool) -> Sequence[nn.Module]:
        """Return the modules that FSDP shards as one unit each, in the order of forward.

        No parameter is in two of them.

        Args:
            by_block: Whether FSDP gathers each unit when it is called (`mesh.gather = "block"`):
                parameters of a unit are then read in its `forward` alone, or in `Lender.lend`.
        """
        del by_block
        return self.blocks

    @property
    def casting(self) -> Sequence[nn.Module]:
        """Return the modules that read their own parameters in `compute_dtype` alone.

        FSDP gathers these parameters in that dtype, and others as they are.
        """
        return [part for part in self.modules() if isinstance(part, Linear | GroupedExperts)]

    @property
    def kept_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that a checkpoint has besides parameters, by global name."""
        return dict(self.named_buffers())

    def initialize(
        self,
        parameters: Sequence[Parameter],
        config: ModelConfig,
        *,
        seed: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill the parameters and buffers of this stage, with the same values in every layout.

        Args:
            parameters: Parameters of this stage, cut and sharded.
            config: The whole model.
            seed: Seed of the run.
            on_progress: Called again and again, as this may take minutes.
        """
        for buffer in self.buffers():  # correction biases
            buffer.zero_()
        initialize_parameters(parameters, config, seed=seed, on_progress=on_progress)

    def recompute(self, what: Recompute) -> None:
        """Let parts of every block run again in backward instead of being kept.

        Args:
            what: Here "none" or "full": a block of one's own has no parts.
        """
        for block in self.blocks if what == "full" else ():
            block.forward = partial(recomputed, block.forward)


def experts_of(stage: nn.Module) -> list[SpreadExperts]:
    """Return the modules whose own parameters are experts, which ranks may share out."""
    return [m for m in stage.modules() if isinstance(m, SpreadExperts)]


def gather_narrow(stage: Stage) -> None:
    """Let FSDP gather in `compute_dtype` the parameters that are cast to it.

    The same bits are computed with; half of the bytes of a float32 parameter travel.

    Args:
        stage: Stage on its device, sharded or not; changed in place.
    """
    sharded = [
        weight
        for part in stage.casting
        for weight in part.parameters(recurse=False)
        if isinstance(weight, DTensor)
    ]
    set_fsdp_gather_dtype(sharded, stage.compute_dtype)


def split_weight_gradients(stage: Stage, *, is_split: bool) -> None:
    """Say whether some schedule may compute weight gradients later than input gradients."""
    stage.is_split = is_split
    for part in stage.modules():
        if isinstance(part, Linear | Embedding):
            part.is_split = is_split


def share_casts(stage: Stage, *, sharded: bool = True) -> None:
    """Cast weights once for many calls, until `forget_casts` is called.

    Args:
        stage: Changed in place.
        sharded: Whether to keep casts of weights that FSDP shards, too, which must then stay
            gathered for as long.
    """
    casts = stage.kept_casts = WeightCasts()
    parts = [p for p in stage.modules() if isinstance(p, Linear | Embedding | GroupedExperts)]
    left_out = [] if sharded else [part for part in parts if _is_sharded(part)]
    if not any(isinstance(part, Linear | Embedding) for part in left_out):
        stage.casts = casts
    for part in parts:
        if isinstance(part, Linear):
            part.casts = stage.casts
        elif isinstance(part, GroupedExperts) and part not in left_out:
            part.cast_of = casts.of


def is_activation(stage: Stage, saved: Tensor) -> bool:
    """Tell whether a tensor that autograd saves is large and of one microbatch, and no cast."""
    if saved.nbytes < _SMALL:
        return False
    casts = () if stage.kept_casts is None else stage.kept_casts.made
    memory = saved.untyped_storage()
    return all(cast.untyped_storage() is not memory for cast in casts)


def forget_casts(stage: Stage) -> None:
    """Cast weights anew at their next use: they have changed, or memory is wanted."""
    if stage.kept_casts is not None:
        stage.kept_casts.clear()


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
