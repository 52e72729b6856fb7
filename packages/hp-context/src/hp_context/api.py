"""`ContextParallel`: run a core attention over a sequence that is split across ranks.

Ulysses: the hooks exchange q, k and v before the core and its output afterwards.

All-gather K/V: an `hp_context.Attention` gets its mask as a `GatheredMask`, which computes the
blocks of this rank; any other core gets all keys and values, gathered by the hook before it, and
the rows of the mask that belong to its queries.

Ring: an `hp_context.Attention` gets a `RingMask`, which computes the same blocks as keys come.
Hybrid: the exchange of Ulysses over the inner ranks, then one of the two over the outer ones.
Whatever belongs to a call travels in its arguments, so that microbatches, threads and recomputation
do not meet.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, H query heads, h = H / N, G
key/value heads, D head size.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.attention.core import (
    Attention,
    CoreMask,
    PositionsOnly,
    check_core,
    check_used,
    guard,
)
from hp_context.attention.parts import PartsMask
from hp_context.attention.spread import HeadSplit, Spread, split_heads
from hp_context.batch import (
    CONTIGUOUS,
    Deal,
    HeadTail,
    SequenceLayout,
    check_part,
    length_of,
    to_positions,
    to_ranks,
    without_deal,
)
from hp_context.checks import (
    Dims,
    check_local,
    check_parts,
    compare,
    content_of,
    is_new,
    is_of_the_data,
    set_compared,
)
from hp_context.masks import Full, Mask
from hp_context.methods.all_gather import GatheredMask, gather_keys
from hp_context.methods.hybrid import Axes, axes_of_mesh, plain_axes, split_group
from hp_context.methods.in_flight import (
    Call,
    Exchange,
    OverlapRates,
    parts_of_rank,
    recall,
    remember,
)
from hp_context.methods.ring import RingMask
from hp_context.methods.ulysses import head_to_seq
from hp_platform import outside_graph, resolve_group

M = TypeVar("M", bound=nn.Module)
Arguments = tuple[tuple[object, ...], dict[str, object]]

_applied: WeakSet[nn.Module] = WeakSet()  # two exchanges around one module would cancel


class ContextParallel:
    """Splits the sequence of attention over ranks; everything around it sees s positions.

    In the Ulysses mode q, k and v are exchanged so that the core attention sees the whole
    sequence with a part of the heads: whatever mask it applies to positions stays right.
    Key/value heads that N does not divide are sent to every rank that needs them.

    In the all-gather K/V mode each rank keeps its queries, with all heads, and gets the keys and
    values of all ranks. The mask must be known here: that of an `hp_context.Attention` is, and is
    computed block by block; any other core attention needs `mask` and a parameter to take it.

    With a degree between, d adjacent ranks share heads as in Ulysses, and ranks of the same place
    in these rows gather keys and values: the hybrid mode. It asks of the core attention what the
    all-gather K/V mode does.

    In the ring mode, `ring=True`, keys and values are not gathered: they pass from rank to rank,
    the next ones on their way while those that are there are computed. A rank has its own and
    those of one other rank at a time. It is for an `hp_context.Attention` alone, and goes with any
    `ulysses_degree`. Under a causal mask use it with `load_balance=True`.

    Args:
        ulysses_degree: Ranks that share the heads. The size of the group is the Ulysses mode, 1
            the all-gather K/V mode, what divides the size is the hybrid mode. None: all ranks, or
            1 in the ring mode.
        ring: Send keys and values round a ring of the ranks that do not share heads.
        seq_dim: Dimension of the sequence in q, k, v and the output.
        head_dim: Dimension of the heads; the last dimension is the head size.
        qkv_indices: Positions of q, k, v among the arguments of the core attention.
        qkv_kwarg_names: Names of q, k, v, for a core attention that takes them by keyword; a
            keyword that a call passes goes before the position.
        mask: Description of the keys that a query may see. The core gets it as `mask_kwarg_name` in
            every call that does not pass one. None: the core attention has a mask of its own.
        mask_kwarg_name: Parameter of the core attention for a mask. An `hp_context.Attention`
            gets the description, any other module a bool tensor, true where allowed: [S, S], or
            the rows of its queries outside the Ulysses mode. A call may pass a `Mask`, or, to
            another module, a tensor that covers the whole sequence.
        layout: Positions that each rank has; the same as of `shard_sequence`. A mask that comes
            with a `Deal` has another one for its call.
        load_balance: Short for `layout=HeadTail()`.

    Raises:
        ValueError: Arguments contradict each other, or this version does not have the mode.

    Example:
        >>> core = Attention(Causal())
        >>> ContextParallel().apply(core, group)  # doctest: +SKIP
        >>> out = core(q, k, v)  # [B, s, H, D] in, [B, s, H, D] out; doctest: +SKIP
    """

    def __init__(
        self,
        ulysses_degree: int | None = None,
        *,
        ring: bool = False,
        seq_dim: int = 1,
        head_dim: int = 2,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        mask: Mask | None = None,
        mask_kwarg_name: str = "attn_mask",
        layout: SequenceLayout = CONTIGUOUS,
        load_balance: bool = False,
    ) -> None:
        if ulysses_degree is not None and ulysses_degree < 1:
            raise ValueError(f"ulysses_degree ({ulysses_degree}) must be >= 1, or None")
        if len(qkv_indices) != 3 or len(set(qkv_indices)) != 3 or min(qkv_indices) < 0:
            raise ValueError(f"qkv_indices ({tuple(qkv_indices)}) must be three positions >= 0")
        if qkv_kwarg_names and len(set(qkv_kwarg_names)) != 3:
            raise ValueError(f"qkv_kwarg_names ({tuple(qkv_kwarg_names)}) must be three names")
        if load_balance and layout not in (CONTIGUOUS, HeadTail()):
            raise ValueError(f"load_balance=True means HeadTail(), but layout ({layout}) is given")
        self.ulysses_degree = 1 if ring and ulysses_degree is None else ulysses_degree
        self.ring = ring
        self.dims = Dims(seq_dim, head_dim)
        self.qkv_indices = tuple(qkv_indices)
        self.qkv_kwarg_names = tuple(qkv_kwarg_names)
        self.mask = mask
        self.mask_kwarg_name = mask_kwarg_name
        self.layout = HeadTail() if load_balance else layout
        self._hybrid: dict[str, Axes] = {}  # by the name of the group that was split
        self._meshes: dict[DeviceMesh, ProcessGroup] = {}
        # What ranks have compared: shapes, with the group, and core attentions.
        self._agreed: set[tuple[object, ...]] = set()
        self._had_documents: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def apply(self, module: M, mesh_or_group: DeviceMesh | ProcessGroup) -> M:
        """Hook the exchange around the forward of a core attention.

        Args:
            module: Takes q, k, v; returns the attention output, or a tuple that begins with it
                and whose other elements stay as this rank computed them.
            mesh_or_group: The ranks that share the sequence, in its order. A mesh of two axes,
                outer and inner, stands for both groups of the hybrid mode; every rank of it, or of
                a group that is to be split, must call.

        Returns:
            `module`.

        Raises:
            ValueError: The degree does not fit the ranks, the mode needs to know the mask of the
                module or does not allow its dropout, the module cannot take the mask, or it is
                context parallel already.
        """
        group = self._resolve(mesh_or_group)
        axes = self._axes(group)
        if module in _applied:
            raise ValueError(f"module ({type(module).__name__}) must be made parallel only once")
        position = self._mask_position(module)
        if axes.outer is not None:
            takes, name = position is not None, self.mask_kwarg_name
            check_core(module, self.mask, takes=takes, name=name, mode=axes.mode, ring=axes.ring)
            if not isinstance(module, Attention):
                guard(module, PositionsOnly(axes.mode, self.mask_kwarg_name))
        _applied.add(module)

        def before(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> Arguments:
            return self._exchange_inputs(module, args, kwargs, group, position)

        def after(
            _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
        ) -> object:
            return self._exchange_output(args, kwargs, output, group)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)
        return module

    @outside_graph
    def _exchange_inputs(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        group: ProcessGroup,
        mask_position: int | None,
    ) -> Arguments:
        slots = self._slots(args, kwargs)
        values: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        q, k, v = (values[slot] for slot in slots)
        by_position = mask_position is not None and mask_position < len(args)
        mask_slot: Any = mask_position if by_position else self.mask_kwarg_name
        axes = self._axes(group)
        given = self.mask if values.get(mask_slot) is None else values[mask_slot]
        error: Exception | None = None
        mask: Mask | Tensor | None = None
        layout, limits = self.layout, given
        spread: Spread | None = None
        split: HeadSplit | None = None
        placed, runs = None, tuple[tuple[range, ...], ...]()
        try:
            (q, k, v), placed = parts_of_rank([q, k, v], self.dims)
            check_local(q, k, v, dims=self.dims, num_ranks=axes.degree)
            limits, layout = self._layout_of(given)
            seq_len = length_of(layout, q.size(self.dims.seq), group.size())
            check_part(layout, q.size(self.dims.seq), group=group, degree=axes.degree)
            runs = axes.runs(layout, seq_len)
            spread = None if axes.outer is None else Spread(axes.outer, runs)
            if axes.inner is not None:
                split = self._split(q, k, axes.inner)
            share = None if split is None or axes.inner is None else split.share(axes.inner.rank())
            core = CoreMask(self.mask_kwarg_name, axes.mode, seq_len, spread, share)
            if isinstance(module, Attention):
                mask = core.of_attention(module, limits, q, takes=mask_position is not None)
                mask = self._over_parts(mask, core, axes, q.device.type, layout=layout)
            else:
                mask = core.of_other(limits, q.device)
        except (TypeError, ValueError) as caught:
            error = caught

        def settings() -> object:
            needs = mask.fingerprint if isinstance(mask, PartsMask) else None
            return axes.mode, runs, self._rates(q.device.type), _terms_of(module), needs

        self._agree(error, (module, given), (q, k, v), settings, group, layout=layout)
        if mask is not None or limits is not given:
            values[mask_slot] = mask
        if axes.inner is not None:
            q, k, v = self._exchange(q, k, v, axes.inner)
            if axes.outer is None:
                order = partial(to_positions, num_ranks=axes.degree, seq_dim=self.dims.seq)
                q, k, v = (order(x, layout) for x in (q, k, v))
        if spread is not None and not isinstance(mask, PartsMask):
            k, v = gather_keys(k, v, spread, seq_dim=self.dims.seq)
        if split is not None or placed is not None:
            remember(q, Call(None if split is None else split.query_counts, placed, layout))
        values |= zip(slots, (q, k, v), strict=True)
        return (
            tuple(values[i] for i in range(len(args))),
            {name: value for name, value in values.items() if isinstance(name, str)},
        )

    def _layout_of(self, given: object) -> tuple[object, SequenceLayout]:
        """Return a call's mask without its layout, and that layout; else `self.layout`."""
        if not isinstance(given, Mask):
            return given, self.layout
        limits, deal = without_deal(given)
        return limits, self.layout if deal is None else deal

    def _over_parts(
        self,
        mask: Mask | None,
        core: CoreMask,
        axes: Axes,
        device_type: str,
        *,
        layout: SequenceLayout,
    ) -> Mask | None:
        """Return the mask that gets keys from other ranks, where these have them."""
        if mask is None or core.spread is None:
            return mask
        if axes.ring:
            straight = isinstance(layout, Deal)
            return RingMask(mask, core.spread, core.mode, core.share, straight=straight)
        rates = self._rates(device_type)
        return GatheredMask(mask, core.spread, core.mode, core.share, rates)

    def _rates(self, device_type: str) -> OverlapRates | None:
        """Return the rates by which exchanges overlap; None: they do not, nor are there strides."""
        del device_type
        return None

    def _split(self, q: Tensor, k: Tensor, group: ProcessGroup) -> HeadSplit:
        """Return the heads that each rank of `group` gets."""
        return split_heads(q.size(self.dims.head), k.size(self.dims.head), group.size())

    def _exchange(self, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> list[Tensor]:
        """Return q, k, v of the whole sequence, parts in rank order, with this rank's heads."""
        pairs = zip((q, k, v), self._exchanges(q, k, group), strict=True)
        return [exchange(x) for x, exchange in pairs]

    def _exchanges(self, q: Tensor, k: Tensor, group: ProcessGroup) -> list[Exchange]:
        """Return the exchanges of q, k and v."""
        split = self._split(q, k, group)
        of_keys = Exchange(group, self.dims, split.kv_index, split.kv_counts)
        return [Exchange(group, self.dims, None, split.query_counts), of_keys, of_keys]

    @outside_graph
    def _exchange_output(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, group: ProcessGroup
    ) -> object:
        axes = self._axes(group)
        for argument in (*args, *kwargs.values()):
            check_used(argument)
        slot = self._slots(args, kwargs)[0]
        q = kwargs[slot] if isinstance(slot, str) else args[slot]
        call = recall(q)
        if call is None and axes.inner is not None:
            raise ValueError(
                "q of the core attention must be the one that the exchange made, but a hook that "
                "was registered after apply has put another in its place: register it before"
            )
        if call is None:
            return output
        first = output[0] if isinstance(output, tuple) else output
        if axes.inner is not None:
            _check_output(first, q, self.dims)
            if axes.outer is None:
                order = partial(to_ranks, num_ranks=axes.degree, seq_dim=self.dims.seq)
                first = order(first, call.layout)
            first = head_to_seq(
                first,
                group=axes.inner,
                seq_dim=self.dims.seq,
                head_dim=self.dims.head,
                head_counts=call.head_counts,
            )
        if call.placed is not None:
            first = call.placed.restored(first)
        if not isinstance(output, tuple):
            return first
        make = getattr(type(output), "_make", type(output))
        return make((first, *output[1:]))

    def _slots(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[int | str]:
        """Return the position or the name of q, k and v among the arguments."""
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
        self,
        error: Exception | None,
        core: tuple[nn.Module, object],
        qkv: tuple[Tensor, Tensor, Tensor],
        settings: Callable[[], object],
        group: ProcessGroup,
        *,
        layout: SequenceLayout,
    ) -> None:
        """Raise on all ranks or on none; see Note [When ranks compare].

        A rank that comes with another shape and no mask of its data cannot be told apart from one
        that is late, short of one more collective in every call.
        """
        (module, mask), (q, k, v) = core, qkv
        if mask is None and isinstance(module, Attention):
            mask = module.mask
        is_dealt = isinstance(layout, Deal)
        sizes = [list(x.shape) for x in (q, k, v)]
        for size in sizes if is_dealt else ():
            size[self.dims.seq] = -1  # ranks may have parts of different lengths
        shapes = (group.group_name, *map(tuple, sizes), q.dtype)
        is_first = shapes not in self._agreed
        has_documents = is_of_the_data(mask)
        as_before = self._had_documents.get(module) is has_documents
        if not is_first and as_before and not is_new(mask, group):
            if error is not None:
                raise error
            return
        facts: dict[str, object] = {
            "local sequence lengths": sizes[0][self.dims.seq] if error is None else None,
            "shapes and dtypes of q, k, v": [*map(tuple, sizes), str(q.dtype)],
            "masks": mask,
            "settings of attention": settings() if error is None else None,
        }
        content = torch.zeros(2, dtype=torch.int64, device=q.device)
        if is_first and error is None:
            content = content_of(q, dims=self.dims)
        contents = compare(error, facts, group=group, device=q.device, content=content)
        if is_first:
            check_parts(contents, q, group=group)
        self._agreed.add(shapes)
        self._had_documents[module] = has_documents
        if isinstance(mask, Mask):
            set_compared(mask, group)

    def _resolve(self, mesh_or_group: DeviceMesh | ProcessGroup) -> ProcessGroup:
        """Return the group of all ranks; make those of the hybrid mode, once for all layers."""
        degree = self.ulysses_degree
        # Without a degree two axes may as well be data parallel and context parallel ones.
        if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim > 1 and degree is not None:
            if mesh_or_group not in self._meshes:
                group, axes = axes_of_mesh(mesh_or_group, degree, ring=self.ring)
                self._meshes[mesh_or_group], self._hybrid[group.group_name] = group, axes
            return self._meshes[mesh_or_group]
        group = resolve_group(mesh_or_group)
        if degree in (None, 1, group.size()) or group.group_name in self._hybrid:
            return group
        if group.size() % degree:
            raise ValueError(
                f"ulysses_degree ({degree}) must divide the number of ranks ({group.size()})"
            )
        self._hybrid[group.group_name] = split_group(group, degree, ring=self.ring)
        return group

    def _axes(self, group: ProcessGroup) -> Axes:
        plain = plain_axes(group, self.ulysses_degree, ring=self.ring)
        return self._hybrid.get(group.group_name, plain)

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


def _terms_of(module: nn.Module) -> object:
    """Return the scale, the soft cap, the dropout and the shape of the sinks of an `Attention`."""
    if not isinstance(module, Attention):
        return type(module).__qualname__
    dropout = module.dropout if module.training else 0.0
    sinks = None if module.sinks is None else tuple(module.sinks.shape)
    return module.scale, module.softcap, dropout, sinks


def _check_output(output: object, q: Tensor, dims: Dims) -> None:
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
