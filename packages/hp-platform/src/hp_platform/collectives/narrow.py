"""Parameters that FSDP2 gathers in a narrower dtype than the dtype of their gradients."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_platform import _internals

aten = torch.ops.aten


class NarrowParameter(Tensor):
    """Tensor that reports one dtype and stores its values in a narrower dtype; read-only.

    It can be sliced, cast to the narrower dtype, used as the table of
    `torch.nn.functional.embedding` and get a gradient. Other operators are refused, because they
    would use rounded values as exact values.

    Args:
        stored: Values in the narrower dtype, contiguous.
        dtype: Dtype that the tensor reports.
    """

    stored: Tensor

    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> Self:
        """Make a tensor without memory of its own."""
        made: Self = _internals.make_wrapper(cls, stored, dtype=dtype)
        made.stored = stored
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        """Show both dtypes."""
        return f"NarrowParameter({self.stored}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """See torch's protocol for compilers."""
        return ["stored"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], dtype: torch.dtype, size: object, stride: object
    ) -> "NarrowParameter":
        """See torch's protocol for compilers."""
        del size, stride
        return NarrowParameter(tensors["stored"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what stands for none
        cls,
        func: object,
        types: object,
        args: _internals.Arguments = (),
        kwargs: _internals.Keywords | None = None,
    ) -> Tensor:
        """Run one of the operators that are allowed."""
        run = _READS.get(func)
        found = None if run is None else run(*args, **kwargs or {})
        if found is None:
            raise ValueError(
                f"a parameter that FSDP gathers in another dtype (set_fsdp_gather_dtype) must be "
                f"cast to that before anything else reads it: {func}"
            )
        return found


def _again(x: NarrowParameter, *_args: object) -> Tensor | None:
    return NarrowParameter(x.stored.detach(), x.dtype)


def _reshaped(
    x: NarrowParameter, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor | None:
    is_same = (tuple(size), tuple(stride), offset or 0) == (tuple(x.shape), x.stride(), 0)
    return _again(x) if is_same else None


def _cast(
    x: NarrowParameter, *, dtype: torch.dtype | None = None, **_others: object
) -> Tensor | None:
    return x.stored.detach() if dtype == x.stored.dtype else None


def _part(x: NarrowParameter, *place: int | None) -> Tensor:
    return NarrowParameter(aten.slice.Tensor(x.stored, *place), x.dtype)


def _rows(x: NarrowParameter, ids: Tensor, *options: object) -> Tensor:
    # The values of a row are narrow, and their sum in backward is wide.
    rows: Tensor = aten.embedding.default(x.stored, ids, *options)
    return rows.to(x.dtype)


_READS: dict[object, Callable[..., Tensor | None]] = {
    aten.detach.default: _again,
    aten.alias.default: _again,
    aten.as_strided.default: _reshaped,
    aten.slice.Tensor: _part,
    _internals.to_copy: _cast,
    aten.embedding.default: _rows,
}


def set_fsdp_gather_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let FSDP2 gather parameters in a narrower dtype.

    With `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` the gathered parameter is a bf16 tensor,
    so that autograd rounds and sums its gradients in bf16, for all parameters of a module. Here
    each parameter has its own gathered dtype, through the hooks that FSDP2 offers
    (`fsdp_pre_all_gather`): the shard is cast, and half of the bytes are exchanged and stored. The
    module sees a tensor that reports the dtype of the shard and gets gradients of that dtype, but
    stores its values in the narrow dtype. A cast before the gather gives the same bits as a cast
    after it. Code that reads such a parameter casts it, which costs nothing.

    Gradients stay in the dtype of the parameter. Code that uses the gathered parameter must cast it
    to `dtype` first, or look up rows in it (`torch.nn.functional.embedding`); other uses raise
    ValueError.

    Args:
        parameters: Parameters that `fully_shard` has sharded, already on their device. Parameters
            of one module may have several gathered dtypes. Parameters of `dtype` are not changed.
        dtype: Dtype in which the parameters are gathered.

    Raises:
        TypeError: If a parameter is not sharded.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            raise TypeError(
                f"parameter of shape {tuple(parameter.shape)} must be sharded by fully_shard"
            )
        if parameter.dtype == dtype:
            continue
        shard = _internals.shard_of(parameter)
        hooks = _Hooks(weakref.ref(shard), dtype)
        shard.fsdp_pre_all_gather = hooks.before
        shard.fsdp_post_all_gather = hooks.after


class _Hooks:
    """Hooks that FSDP2 calls for a shard, before and after it gathers."""

    def __init__(self, shard: Callable[[], Tensor | None], dtype: torch.dtype) -> None:
        self._shard, self._dtype = shard, dtype

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor], torch.Size]:
        """Return the shard to gather, padded as FSDP2 expects it, and the whole size."""
        del outer_stride, module, mp_policy
        shard = self._shard()
        assert shard is not None
        size = list(shard.shape)
        if size[1:] == list(outer_size[1:]):
            size[0] = -(-outer_size[0] // mesh.size())
        padded = shard.as_strided(size, shard.stride())  # its memory is as large on every rank
        return (padded.to(self._dtype),), outer_size

    def after(
        self,
        outputs: Sequence[Tensor],
        outer_size: torch.Size,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the parameter for the module; later gathers fill the same memory."""
        if out is not None:
            return None
        (whole,) = outputs
        values = whole.reshape(-1)[: outer_size.numel()].view(outer_size)
        return NarrowParameter(values, dtype), ()
