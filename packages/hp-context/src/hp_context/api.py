"""`ContextParallel`: run a core attention over a sequence that is split across ranks.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, H query heads, h = H / N, G
key/value heads, D head size.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.checks import Dims, check_between_ranks, check_local
from hp_context.heads import kv_head_index
from hp_context.kernels import Attention
from hp_context.masks import Full, Mask, mask_tensor
from hp_context.ulysses import head_to_seq, seq_to_head
from hp_platform import resolve_group

M = TypeVar("M", bound=nn.Module)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_applied: WeakSet[nn.Module] = WeakSet()  # two exchanges around one module would cancel


class ContextParallel:
    """Splits the sequence of attention over ranks; everything around it sees s positions.

    In the Ulysses mode, the one of this version, q, k and v are exchanged so that the core
    attention sees the whole sequence with a part of the heads: whatever mask it applies to
    positions stays right. Key/value heads that N does not divide are sent to every rank that
    needs them.

    Args:
        ulysses_degree: Ranks that share the heads; the size of the group when None.
        seq_dim: Dimension of the sequence in q, k, v and the output.
        head_dim: Dimension of the heads; the last dimension is the head size.
        qkv_indices: Positions of q, k, v among the arguments of the core attention.
        qkv_kwarg_names: Their names, for a core attention that takes them by keyword; a name
            that is present goes before the position.
        mask: Which keys a query may see. The core attention gets it as `mask_kwarg_name` in
            every call that does not pass one. None: the core attention has a mask of its own.
        mask_kwarg_name: Parameter of the core attention for a mask. An `hp_context.Attention`
            gets the description, any other module a bool tensor [S, S], true where allowed. A
            call may pass a `Mask`, or a tensor that covers the whole sequence.

    Raises:
        ValueError: Arguments that cannot be, or a mode that this version does not have.

    Example:
        >>> core = Attention(Causal())
        >>> ContextParallel().apply(core, group)  # doctest: +SKIP
        >>> out = core(q, k, v)  # [B, s, H, D] in, [B, s, H, D] out; doctest: +SKIP
    """

    def __init__(
        self,
        ulysses_degree: int | None = None,
        *,
        seq_dim: int = 1,
        head_dim: int = 2,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        mask: Mask | None = None,
        mask_kwarg_name: str = "attn_mask",
    ) -> None:
        if ulysses_degree is not None and ulysses_degree < 1:
            raise ValueError(f"ulysses_degree ({ulysses_degree}) must be >= 1, or None")
        if ulysses_degree == 1:
            raise ValueError(_unavailable("all-gather K/V", ulysses_degree))
        if len(qkv_indices) != 3 or len(set(qkv_indices)) != 3 or min(qkv_indices) < 0:
            raise ValueError(f"qkv_indices ({tuple(qkv_indices)}) must be three positions >= 0")
        if qkv_kwarg_names and len(set(qkv_kwarg_names)) != 3:
            raise ValueError(f"qkv_kwarg_names ({tuple(qkv_kwarg_names)}) must be three names")
        self.ulysses_degree = ulysses_degree
        self.dims = Dims(seq_dim, head_dim)
        self.qkv_indices = tuple(qkv_indices)
        self.qkv_kwarg_names = tuple(qkv_kwarg_names)
        self.mask = mask
        self.mask_kwarg_name = mask_kwarg_name
        self._agreed: set[tuple[object, ...]] = set()

    def apply(self, module: M, mesh_or_group: DeviceMesh | ProcessGroup) -> M:
        """Hook the exchange around the forward of a core attention.

        Args:
            module: Takes q, k, v; returns the attention output, or a tuple that begins with it
                and whose other elements stay as this rank computed them.
            mesh_or_group: The ranks that share the sequence, in its order.

        Returns:
            `module`.

        Raises:
            ValueError: The mode is not available, the module cannot take the mask, or it is
                context parallel already.
        """
        group = resolve_group(mesh_or_group)
        if self.ulysses_degree not in (None, group.size()):
            if group.size() % self.ulysses_degree:
                raise ValueError(
                    f"ulysses_degree ({self.ulysses_degree}) must divide the number of ranks "
                    f"({group.size()})"
                )
            raise ValueError(_unavailable("hybrid", self.ulysses_degree))
        if module in _applied:
            raise ValueError(f"module ({type(module).__name__}) must be made parallel only once")
        position = self._mask_position(module)
        _applied.add(module)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            return self._exchange_inputs(module, args, kwargs, group, position)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return self._exchange_output(args, kwargs, output, group)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)
        return module

    def _exchange_inputs(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: ProcessGroup,
        mask_position: int | None,
    ) -> Arguments:
        slots = self._slots(args, kwargs)
        values: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        q, k, v = (values[slot] for slot in slots)
        mask_slot: int | str = self.mask_kwarg_name
        if mask_position is not None and mask_position < len(args):
            mask_slot = mask_position
        error: Exception | None = None
        mask: Mask | Tensor | None = None
        try:
            check_local(q, k, v, dims=self.dims, num_ranks=group.size())
            mask = self._whole_mask(module, values.get(mask_slot), q, group.size())
        except (TypeError, ValueError) as caught:
            error = caught
        self._agree(error, q, k, v, group)
        if mask is not None:
            values[mask_slot] = mask
        if group.size() > 1:
            values |= zip(slots, self._exchange(q, k, v, group), strict=True)
        return (
            tuple(values[i] for i in range(len(args))),
            {name: value for name, value in values.items() if isinstance(name, str)},
        )

    def _exchange(self, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> list[Tensor]:
        """Return q, k, v of the whole sequence with this rank's heads."""
        index = kv_head_index(q.size(self.dims.head), k.size(self.dims.head), group.size())
        return [
            seq_to_head(
                x, group=group, seq_dim=self.dims.seq, head_dim=self.dims.head, head_index=heads
            )
            for x, heads in ((q, None), (k, index), (v, index))
        ]

    def _exchange_output(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, group: ProcessGroup
    ) -> Any:
        if group.size() == 1:
            return output
        first = output[0] if isinstance(output, tuple) else output
        slot = self._slots(args, kwargs)[0]
        q = kwargs[slot] if isinstance(slot, str) else args[slot]
        _check_output(first, q, self.dims)
        mine = head_to_seq(first, group=group, seq_dim=self.dims.seq, head_dim=self.dims.head)
        if not isinstance(output, tuple):
            return mine
        make = getattr(type(output), "_make", type(output))
        return make((mine, *output[1:]))

    def _slots(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int | str]:
        """Return where q, k, v are: a position or a name each."""
        names = self.qkv_kwarg_names or ("", "", "")
        slots: list[int | str] = []
        for letter, index, name in zip("qkv", self.qkv_indices, names, strict=True):
            slot: int | str = name if name in kwargs else index
            positional = args[index] if index < len(args) else None
            value = kwargs.get(name, positional)
            if not isinstance(value, Tensor):
                known = f"position {index}" + (f" or keyword {name}" if name else "")
                raise TypeError(f"{letter} ({type(value).__name__}) must be a tensor at {known}")
            slots.append(slot)
        return slots

    def _agree(
        self, error: Exception | None, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup
    ) -> None:
        """Raise on all ranks or on none, once per shape.

        A rank that comes with another shape later cannot be told apart from one that is late,
        short of one more collective in every call.
        """
        shapes = (group.group_name, q.shape, k.shape, v.shape, q.dtype)
        if shapes not in self._agreed:
            check_between_ranks(error, q, dims=self.dims, group=group)
            self._agreed.add(shapes)
        if error is not None:
            raise error

    def _whole_mask(
        self, module: nn.Module, given: Any, q: Tensor, num_ranks: int
    ) -> Mask | Tensor | None:
        """Return the mask of the whole sequence in the form that `module` takes."""
        seq_len = q.size(self.dims.seq) * num_ranks
        if isinstance(given, Tensor):
            if given.size(-1) != seq_len or given.size(-2) not in (1, seq_len):
                raise ValueError(
                    f"{self.mask_kwarg_name} ({tuple(given.shape)}) must cover the whole "
                    f"sequence ({seq_len} queries, {seq_len} keys), or be a hp_context.Mask"
                )
            return given
        mask = self.mask if given is None else given
        if isinstance(module, Attention):
            (module.mask if mask is None else mask).check(seq_len)
        if mask is None or isinstance(module, Attention):
            return mask
        if not isinstance(mask, Mask):
            kind = type(mask).__name__
            raise TypeError(f"{self.mask_kwarg_name} ({kind}) must be a tensor or a Mask")
        return mask_tensor(mask, seq_len, device=q.device)

    def _mask_position(self, module: nn.Module) -> int | None:
        """Return the position of the mask among the parameters, after checking that it fits."""
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = self.mask_kwarg_name in parameters
        if self.mask is not None and not (known or takes_any):
            raise ValueError(
                f"mask ({self.mask}) must be applied by the core attention, but "
                f"{type(module).__name__}.forward has no parameter {self.mask_kwarg_name}: name "
                f"it by mask_kwarg_name, or pass mask=None if the module masks on its own"
            )
        own = module.mask if isinstance(module, Attention) else Full()
        if self.mask is not None and own not in (Full(), self.mask):
            raise ValueError(f"mask ({self.mask}) must equal the mask of the module ({own})")
        return list(parameters).index(self.mask_kwarg_name) if known else None


def _check_output(output: Any, q: Tensor, dims: Dims) -> None:
    """Raise unless the core attention returned the whole sequence with the heads it was given."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    seq_len, heads = q.size(dims.seq), q.size(dims.head)
    fits = (
        isinstance(output, Tensor)
        and output.ndim > max(dims.seq, dims.head)
        and output.size(dims.seq) == seq_len
        and output.size(dims.head) % heads == 0
    )
    if not fits:
        raise ValueError(
            f"output of the core attention ({shape}) must have the sequence ({seq_len}) at "
            f"seq_dim ({dims.seq}) and the heads ({heads}) at head_dim ({dims.head})"
        )


def _unavailable(mode: str, degree: int) -> str:
    return (
        f"the {mode} mode (ulysses_degree={degree}) is not available in this version: leave "
        f"ulysses_degree None for Ulysses over all ranks"
    )
