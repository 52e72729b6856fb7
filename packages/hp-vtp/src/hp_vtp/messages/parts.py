"""Checks that tensors to be sent are a rank's parts of the declared ones."""

from collections.abc import Sequence

from torch import Tensor

from hp_vtp.messages import TensorMeta
from hp_vtp.plan import TransferPlan
from hp_vtp.topology.stages import Edge, Replicated, Sharded


def own_metas(edge: Edge, tensors: Sequence[Tensor], *, where: str) -> tuple[TensorMeta, ...]:
    """Return the metas of tensors that the source stage holds whole.

    Raises:
        ValueError: If the stage holds slices.
    """
    if isinstance(edge.source_boundary, Sharded):
        raise ValueError(  # noqa: TRY004 (an argument is missing, none is of a wrong type)
            f"{where}: metas (None) must be given where the source boundary is "
            f"{edge.source_boundary}, since a slice does not tell the global shape"
        )
    return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def require_parts(
    tensors: Sequence[Tensor],
    metas: Sequence[TensorMeta],
    plans: Sequence[TransferPlan],
    *,
    index: int,
    where: str,
) -> None:
    """Compare tensors with the parts that a source rank should have.

    Args:
        tensors: Tensors to be sent.
        metas: Global shape and dtype of each tensor.
        plans: Transfer plan of each tensor.
        index: Position of this rank in the source stage.
        where: Beginning of the messages of errors.

    Raises:
        ValueError: If a number, a shape or a dtype differs.
    """
    if len(tensors) != len(metas):
        raise ValueError(
            f"{where}: len(tensors) ({len(tensors)}) must equal len(metas) ({len(metas)})"
        )
    for i, (tensor, meta, plan) in enumerate(zip(tensors, metas, plans, strict=True)):
        expected = plan.source_shape(index)
        if tuple(tensor.shape) != expected:
            kind = "whole" if isinstance(plan.source, Replicated) else f"slice {index}"
            raise ValueError(
                f"{where}: tensors[{i}].shape ({tuple(tensor.shape)}) must equal that of the "
                f"{kind} ({expected})"
            )
        if tensor.dtype != meta.dtype:
            raise ValueError(
                f"{where}: tensors[{i}].dtype ({tensor.dtype}) must equal metas[{i}].dtype "
                f"({meta.dtype})"
            )


def describe(plans: Sequence[TransferPlan], metas: Sequence[TensorMeta]) -> str:
    """Return a readable text of everything that both ends must agree on."""
    return "; ".join(
        f"{str(meta.dtype).removeprefix('torch.')}{list(plan.shape)} "
        f"{plan.source} -> {plan.destination} by {plan.algorithm}"
        + (f" in {plan.chunks}" if plan.chunks > 1 else "")
        for plan, meta in zip(plans, metas, strict=True)
    )
