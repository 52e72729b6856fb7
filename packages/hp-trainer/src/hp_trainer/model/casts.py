"""Weights of a stage in the dtype of its activations: cast once, gathered narrow, dropped."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_expert import GroupedExperts
from hp_platform import set_fsdp_gather_dtype
from hp_trainer.model.layers import Embedding, Linear, WeightCasts
from hp_trainer.model.stage import Stage

_SMALL = 1 << 14
"""Bytes below which a saved tensor is not worth a copy of its own."""


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
