"""Attention by the calling convention of transformers, over a sequence that is split across ranks.

A model of transformers 5 makes its mask before its layers run, by a function that is registered
beside the attention. That function is told shapes, of this rank's part alone, and the kind of
mask, but not the position ids; these come with each layer. So it returns a `CallMask`, and the
first layer of the forward fills it in. Layers that are computed again find it filled in.

Shape symbols: B sequences of a batch, S whole sequence, N ranks, s = S / N, H query heads, G
key/value heads, D head size of queries and keys, E head size of values.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.api import ContextParallel
from hp_context.attention.core import Attention, masked_attention
from hp_context.batch import SequenceLayout, to_positions
from hp_context.batch.positions import documents_of_rows, gather_position_ids
from hp_context.checks import set_compared
from hp_context.hugging_face.mixers import current_trial
from hp_context.masks import BlockKind, Causal, Documents, Mask, SlidingWindow

Rows = list[int] | None  # sequences of a batch; None: all


class CallMask:
    """The mask of one forward of a model.

    Attributes:
        window: Keys that a query may see, itself included; None: all before it.
        error: Reason why the model cannot run; raised by the first layer, on all ranks.
        has_attention_mask: Whether the model was given a padding mask, with no padding in it.
        masks: Masks, each with its sequences; None before the first layer.
    """

    def __init__(
        self, window: int | None, error: Exception | None, *, has_attention_mask: bool
    ) -> None:
        self.window, self.error = window, error
        self.has_attention_mask = has_attention_mask
        self.masks: list[tuple[Mask, Rows]] | None = None

    @property
    def order(self) -> Mask:
        """Return the mask of a query within its document."""
        return Causal() if self.window is None else SlidingWindow(self.window - 1)


def make_call_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    device: torch.device | None = None,
    **others: object,
) -> CallMask:
    """Describe the mask of a forward: a mask function of transformers.

    Args:
        batch_size: Number of sequences in the batch, B.
        q_length: Length of the queries, s.
        kv_length: Length of the keys, s unless a cache holds some.
        q_offset: Keys before the first query.
        mask_function: What the model allows, as a function of local indices; used for a check.
        attention_mask: bool [B, s], false at padding.
        local_size: Window, or size of chunks.
        use_vmap: Whether the model adds a mask of its own.
        config: Configuration of the model.
        device: Device of the model.
        **others: What else transformers tells its own mask functions.
    """
    call = CallMask(local_size, None, has_attention_mask=attention_mask is not None)
    try:
        _check_cache(q_length, kv_length, q_offset, attention_mask)
        _check_kind(local_size, config, own=use_vmap, both="allow_is_bidirectional_skip" in others)
        if not others.get("allow_is_causal_skip", True):
            _check_causal(mask_function, batch_size, q_length, device)
        _check_padding(attention_mask)
    except ValueError as error:
        call.error = error
    return call


def _check_cache(
    q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None
) -> None:
    if attention_mask is not None and attention_mask.size(-1) != q_length:
        raise ValueError(
            f"attention_mask ({tuple(attention_mask.shape)}) must be of this rank's part of the "
            f"sequence ({q_length} positions): use shard_batch"
        )
    if kv_length != q_length or isinstance(q_offset, Tensor) or q_offset:
        raise ValueError(
            f"past_key_values (queries {q_length}, keys {kv_length}, offset {q_offset}) must be "
            f"None with hp_context: generate with another attn_implementation, and pass "
            f"use_cache=False in training"
        )


def _check_kind(local_size: int | None, config: object, *, own: bool, both: bool) -> None:
    if both:
        raise ValueError(
            "is_causal (False) must be True with hp_context: attention looks back only"
        )
    if own:
        raise ValueError(
            "the model adds a mask function of its own, which hp_context cannot tell from "
            "position_ids: pass the whole mask to the model as context_mask, a hp_context.Mask"
        )
    chunk, window = (getattr(config, n, None) for n in ("attention_chunk_size", "sliding_window"))
    if local_size is not None and (chunk is not None or local_size != window):
        raise ValueError(
            f"local attention (size {local_size}) must be a sliding window with hp_context, not "
            f"chunks (attention_chunk_size {chunk}, sliding_window {window})"
        )


def _check_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask must not mask padding with hp_context: give sequences padded on the "
            "right to shard_batch, which drops it (causal attention sees none of that padding), "
            "or pack them with position_ids"
        )


def _check_causal(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    device: torch.device | None,
) -> None:
    """Raise if some query sees the key after it, as tokens of one image do in some models.

    Such blocks change nothing else that transformers tells; neither do packed documents.
    """
    sequence = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_length - 1, device=device)[None, :]
    if bool(mask_function(sequence, torch.zeros_like(sequence), query, query + 1).any()):
        raise ValueError(
            "the model lets blocks of tokens see each other both ways, which hp_context cannot "
            "tell from position_ids: pass the whole mask as context_mask, a hp_context.Mask"
        )


# What a layer may pass, and why it cannot be computed if it does.
_REFUSED = {
    "position_bias": "scores have no bias",
    "cu_seq_lens_q": "documents are told by position_ids",
    "cu_seq_lens_k": "documents are told by position_ids",
    "cache": "there is no cache",
}


class SpreadAttention:
    """An attention function of transformers.

    Args:
        mesh_or_group: The ranks that share the sequence.
        ulysses_degree: See `ContextParallel`.
        ring: See `ContextParallel`.
        layout: See `ContextParallel`.
        load_balance: See `ContextParallel`.
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | ProcessGroup,
        *,
        ulysses_degree: int | None,
        ring: bool,
        layout: SequenceLayout,
        load_balance: bool = False,
    ) -> None:
        parallel = _Parallel(
            ulysses_degree,
            ring=ring,
            seq_dim=2,
            head_dim=1,
            layout=layout,
            load_balance=load_balance,
        )
        self._group, self._layout = parallel.group_of(mesh_or_group), parallel.layout
        self._core = parallel.apply(_Core(), mesh_or_group)

    def __call__(
        self,
        module: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        context_mask: Mask | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            module: The layer.
            query: [B, H, s, D].
            key: [B, G, s, D].
            value: [B, G, s, E].
            attention_mask: Return value of the registered mask function.
            dropout: Probability of dropping an attention weight.
            scaling: Factor of the scores; 1/sqrt(D) when None.
            softcap: Bound of the scores.
            s_aux: Sinks [H], of all heads.
            position_ids: int [B, s] or [1, s], positions in each document.
            context_mask: Mask by global positions, in place of that of `position_ids`.
            **others: Further arguments of a layer.

        Returns:
            [B, s, H, E], and no weights.

        Raises:
            ValueError: On all ranks, if something cannot be computed; the message says what.
            hp_platform.PeerError: Another rank has an error.
        """
        del module
        if (trial := current_trial()) is not None:
            return trial.attend(query, key, value, others)
        error: Exception | None = None
        try:
            _check_layer(others)
            _check_mask(attention_mask, context_mask, others)
            _check_positions(query, key, position_ids, needed=context_mask is None)
            num_ranks = self._group.size()
            self._layout.runs(query.size(2) * num_ranks, num_ranks)
        except ValueError as caught:
            error = caught
        call = attention_mask if isinstance(attention_mask, CallMask) else None
        if call is None or call.masks is None:
            sinks = None if s_aux is None else tuple(s_aux.shape)
            shapes = tuple(tuple(x.shape) for x in (query, key, value))
            same = {
                "shapes of queries, keys and values": shapes,
                "masks that attention is given": (*_known(call), context_mask),
                "settings of attention": (scaling, dropout, softcap, sinks, str(query.dtype)),
            }
            call = self._filled_in(
                call, position_ids, context_mask, error=error, query=query, same=same
            )
        elif error is not None:
            raise error
        assert call.masks is not None
        outs = []
        for mask, rows in call.masks:
            q, k, v = (x if rows is None else x[rows] for x in (query, key, value))
            outs.append(
                self._core(
                    q, k, v, mask, scale=scaling, dropout=dropout, softcap=softcap, sinks=s_aux
                )
            )
        if len(outs) == 1:
            return outs[0].transpose(1, 2).contiguous(), None
        computed = [row for _, rows in call.masks for row in rows or ()]
        order = [computed.index(row) for row in range(len(computed))]
        return torch.cat(outs)[order].transpose(1, 2).contiguous(), None

    def _filled_in(
        self,
        call: CallMask | None,
        position_ids: Tensor | None,
        context_mask: Mask | None,
        *,
        error: Exception | None,
        query: Tensor,
        same: Mapping[str, object],
    ) -> CallMask:
        """Exchange position ids and errors.

        A rank has its part of the position ids. Once in a forward, in its first layer, the ranks
        gather them: the whole of them tells where documents begin, and that they are positions of
        the whole sequence in the layout that attention computes with. The same exchange tells all
        ranks if one of them cannot go on. No other layer, and no recompute, exchanges or reads
        anything.
        """
        whole = gather_position_ids(
            position_ids,
            error=error,
            same=same,
            device=query.device,
            layout=self._layout,
            group=self._group,
        )
        assert call is not None  # it is an error otherwise
        if whole is not None:
            self._check_counted(whole, context_mask)
        if context_mask is not None:
            mask = context_mask if call.window is None else context_mask & call.order
            mask.check(query.size(2) * self._group.size())
            call.masks = [(mask, None)]
        elif whole is not None:
            order = f", in the order of {self._layout}" if self._group.size() > 1 else ""
            call.masks = _masks(call, documents_of_rows(whole, order=order))
        for mask, _ in call.masks or ():
            set_compared(mask, self._group)
        return call

    def _check_counted(self, whole: Tensor, context_mask: Mask | None) -> None:
        """Raise if every rank counts its positions from 0, as a model does that is given none."""
        num_ranks, seq_len = self._group.size(), whole.size(1)
        size = seq_len // num_ranks
        counted = torch.arange(size).repeat(num_ranks)
        counted = to_positions(counted, self._layout, num_ranks=num_ranks, seq_dim=0)
        if num_ranks == 1 or not bool((whole == counted).all()):
            return
        here, before = range(size, size + 1), range(size - 1, size)
        if context_mask is not None and context_mask.block(here, before) is BlockKind.EMPTY:
            return  # it cuts where the part of the next rank begins
        raise ValueError(
            f"position_ids must be positions of the whole sequence ({seq_len}), but all "
            f"{num_ranks} ranks count from 0 to {size - 1}, as the model does that is given none: "
            f"split the batch with shard_batch (documents of exactly {size} tokens need "
            f"context_mask as well); generate with another attn_implementation"
        )


class _Parallel(ContextParallel):
    def group_of(self, mesh_or_group: DeviceMesh | ProcessGroup) -> ProcessGroup:
        """Return the group of all ranks."""
        return self._resolve(mesh_or_group)


class _Core(Attention):
    """`Attention` that gets scale, dropout, soft cap and sinks with each call."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Mask | None = None,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend; shapes as in `masked_attention`."""
        return masked_attention(
            q,
            k,
            v,
            mask=self.mask if attn_mask is None else attn_mask,
            seq_dim=2,
            head_dim=1,
            scale=scale,
            dropout=dropout,
            softcap=softcap,
            sinks=sinks,
        )

    @property
    def needs_share(self) -> bool:
        """Return True: a call may have sinks or dropout."""
        return True


def _known(call: CallMask | None) -> tuple[object, ...]:
    return () if call is None else (call.window, call.has_attention_mask)


def _check_layer(others: dict[str, object]) -> None:
    for name, why in _REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(f"{name} must be None with hp_context: {why}")
    if others.get("output_attentions"):
        raise ValueError("output_attentions must be False with hp_context: no weights are kept")


def _check_mask(attention_mask: object, context_mask: object, others: dict[str, object]) -> None:
    if context_mask is not None and not isinstance(context_mask, Mask):
        raise ValueError(f"context_mask ({type(context_mask).__name__}) must be a hp_context.Mask")
    if not isinstance(attention_mask, CallMask):
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else "None"
        raise ValueError(  # noqa: TRY004  # of what the model was given, not of a type
            f"attention_mask ({what}) must be left to the model with hp_context, which makes it "
            f"from position_ids: pass a mask of your own as context_mask, a hp_context.Mask"
        )
    if attention_mask.error is not None:
        raise attention_mask.error
    window = others.get("sliding_window", attention_mask.window)
    if window != attention_mask.window:
        raise ValueError(
            f"sliding_window of the layer ({window}) must equal that of the mask that the model "
            f"made ({attention_mask.window})"
        )


def _check_positions(
    query: Tensor, key: Tensor, position_ids: Tensor | None, *, needed: bool
) -> None:
    batch, size = query.size(0), query.size(2)
    if key.size(2) != size:
        raise ValueError(
            f"keys ({key.size(2)}) must be of the same positions as queries ({size}) with "
            f"hp_context: it has no cache and no cross-attention"
        )
    if position_ids is None and needed:
        raise ValueError(
            "position_ids must reach attention with hp_context, and this model keeps them from "
            "it: pass the whole mask as context_mask, a hp_context.Mask"
        )
    if position_ids is not None and position_ids.shape not in ((1, size), (batch, size)):
        raise ValueError(
            f"position_ids ({tuple(position_ids.shape)}) must be [{batch}, {size}] or [1, {size}]"
        )


def _masks(call: CallMask, documents: list[Documents]) -> list[tuple[Mask, Rows]]:
    """Return a mask for each way that sequences of the batch are packed."""
    rows: dict[Documents, list[int]] = {}
    for row, of_row in enumerate(documents):
        rows.setdefault(of_row, []).append(row)
    if call.has_attention_mask and any(len(of_row.lengths) > 1 for of_row in rows):
        raise ValueError(
            "attention_mask must be None where position_ids pack documents: with it, "
            "transformers lets documents see each other"
        )
    masks = [call.order & of_row if len(of_row.lengths) > 1 else call.order for of_row in rows]
    return list(zip(masks, [None] if len(rows) == 1 else rows.values(), strict=True))
