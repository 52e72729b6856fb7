"""Attention of a whole sequence under a mask, alone or under `ContextParallel`.

`CoreMask` makes the mask of a call in the form that a core attention takes, after checking that it
fits. A guard keeps a foreign core attention from masking its queries by their shape.

Shape symbols: B batch, S sequence, H query heads, h query heads of a rank, G key/value heads (G
divides H), D head size of queries and keys, E head size of values, t queries that
the core attention gets (S, but for the modes that gather keys).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_context.attention.causal_strips import attend_in_strips, strips_apply
from hp_context.attention.segmented import attend_whole, masks_of_calls
from hp_context.attention.softmax import Scores, attend_by_blocks, blocks_pay, narrowed
from hp_context.attention.spread import HeadShare, Spread
from hp_context.batch import without_deal
from hp_context.kernels import varlen
from hp_context.kernels.reference import Dropout, draw_seed
from hp_context.masks import Causal, Full, Mask, block_tensor, mask_tensor, of_sequences
from hp_context.masks.segments import is_known
from hp_platform import outside_graph

_HEADS_FIRST = (2, 1)


@dataclass(frozen=True, slots=True)
class Terms:
    """Numbers of a call of attention beside q, k, v and its mask.

    Attributes:
        scale: Factor of the scores.
        softcap: Bound of the scores; None: no bound.
        sinks: [h], of the query heads of this rank.
        dropout: Probability of dropping an attention weight.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def plain(self) -> bool:
        """Tell whether torch's attention takes all of them."""
        return self.softcap is None and self.sinks is None and not self.dropout


class SpreadMask(Mask):
    """A mask whose attention runs over ranks that share a sequence, its heads, or both.

    `masked_attention` leaves the work to it: q, k and v are parts then. It belongs to one call.
    `used` tells afterwards whether the core attention has handed its work over; one that has not
    would have attended to its own part as if it were all.

    Args:
        mask: Which keys a query may see.
        mode: Name of the mode of `ContextParallel`, for messages.
        share: The query heads of this rank among all; None: it has all of them.
    """

    def __init__(self, mask: Mask, mode: str, share: HeadShare | None = None) -> None:
        self.mask, self.mode, self.share = mask, mode, share
        self.used = False

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return self.mask.allowed(query, key)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """Return [B, h, s, E] for this rank's q [B, h, s, D], k [B, g, s, D], v [B, g, s, E]."""


def check_dropout(dropout: float, mode: str) -> None:
    """Raise `ValueError` if there is dropout, which only the Ulysses mode allows."""
    if dropout:
        raise ValueError(f"dropout ({dropout}) must be 0 in {mode}: use ulysses_degree=None")


class HeadsMask(SpreadMask):
    """The mask of an attention that has the whole sequence and some of the heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """See `SpreadMask.attend`."""
        self.used = True
        first_head = 0 if self.share is None else self.share.own.start
        return _attend(q, k, v, self.mask, terms, first_head=first_head)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    seq_dim: int = 1,
    head_dim: int = 2,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the whole sequence.

    Full and causal masks go to torch's attention as they are. Other masks are computed by blocks
    where that is less work than all pairs of positions: packed documents and windows. Soft caps,
    sinks and dropout are always computed by blocks.

    Args:
        q: [B, S, H, D], or [B, H, S, D] with seq_dim=2 and head_dim=1.
        k: Keys, shaped as `q` but with G heads.
        v: Values, shaped as `k` but with head size E.
        mask: Which keys a query may see, by global positions.
        seq_dim: Dimension of S.
        head_dim: Dimension of the heads.
        scale: Factor of the scores; 1/sqrt(D) when None.
        dropout: Probability of dropping an attention weight. Which are dropped follows from a
            seed that is drawn from torch's generator of the CPU, the head and the positions.
        softcap: Bound c of the scores: c * tanh(score / c).
        sinks: [H], one more score for every query of a head, whose weight goes nowhere. Of all
            heads, also where ranks share them.

    Returns:
        Like `q` with head size E.

    Raises:
        ValueError: The mask does not fit S, or a number is out of its range.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    dims = seq_dim, head_dim
    if softcap is not None or sinks is not None or dropout or not isinstance(mask, Full | Causal):
        return _special(q, k, v, mask, Terms(scale, softcap, sinks, dropout), dims=dims)
    q, k = q.movedim(dims, _HEADS_FIRST), k.movedim(dims, _HEADS_FIRST)
    return _by_torch(q, k, v.movedim(dims, _HEADS_FIRST), mask, scale).movedim(_HEADS_FIRST, dims)


class Attention(nn.Module):
    """A core attention whose mask is a `Mask`; runs alone or under `ContextParallel`.

    Args:
        mask: Which keys a query may see; a call may pass another one as `attn_mask`.
        seq_dim: Dimension of the sequence in q, k, v and the output.
        head_dim: Dimension of the heads.
        scale: Factor of the scores; 1/sqrt(D) when None.
        dropout: Probability of dropping an attention weight in training.
        softcap: Bound of the scores; see `masked_attention`.
        sinks: [H], their initial values; a parameter of the module. It is a replicated parameter
            as any other: its gradient on a rank is of the positions, or of the heads, that the
            rank computed, and the sum over ranks is the whole.
    """

    def __init__(
        self,
        mask: Mask | None = None,
        *,
        seq_dim: int = 1,
        head_dim: int = 2,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.mask: Mask = Full() if mask is None else mask
        self.seq_dim, self.head_dim = seq_dim, head_dim
        self.scale, self.dropout, self.softcap = scale, dropout, softcap
        self.sinks = None if sinks is None else nn.Parameter(sinks)

    @property
    def needs_share(self) -> bool:
        """Tell whether a call must know which of all heads a rank has."""
        return self.sinks is not None or (self.dropout > 0 and self.training)

    def takes_batch(self, q: Tensor, v: Tensor, masks: Sequence[Mask]) -> bool:
        """Tell whether a batch whose sequences have masks of their own is computed at once.

        Where it is not, an `EachSequence` goes one sequence after the other, with as many kernels
        and exchanges as if each were a call. The answer is the same on all ranks of a sequence.

        Args:
            q: Queries, as `forward` is given them.
            v: Values, likewise.
            masks: What limits the keys of each sequence, beside the mask of the module.
        """
        drops = self.dropout and self.training
        if q.device.type not in varlen.DEVICES or self.softcap is not None or drops:
            return False
        none = slice(0)  # no number is cast where autocast is on
        q, _, v = narrowed(q[:, none], q[:, none], v[:, none])
        rest, deals = zip(*map(without_deal, (self.mask, *masks)), strict=True)
        if len(set(deals[1:])) > 1:  # positions of one sequence are not those of the next
            return False
        return varlen.applies(q, v) and all(mask is None or is_known(mask) for mask in rest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None) -> Tensor:
        """Attend; shapes as in `masked_attention`."""
        return masked_attention(
            q,
            k,
            v,
            mask=self.mask if attn_mask is None else attn_mask,
            seq_dim=self.seq_dim,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            softcap=self.softcap,
            sinks=self.sinks,
        )


@outside_graph
def _special(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, *, dims: tuple[int, int]
) -> Tensor:
    """Attend where torch's attention cannot, or not as well: one break of a compiled graph."""
    _check(q, terms)
    q, k = q.movedim(dims, _HEADS_FIRST), k.movedim(dims, _HEADS_FIRST)
    v = v.movedim(dims, _HEADS_FIRST)
    share = mask.share if isinstance(mask, SpreadMask) else None
    if terms.sinks is not None:
        terms = replace(terms, sinks=_own_sinks(terms.sinks, share, q.size(1)))
    if isinstance(mask, SpreadMask):
        out = mask.attend(q, k, v, terms)
    else:
        out = _attend(q, k, v, mask, terms)
    return out.movedim(_HEADS_FIRST, dims)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, *, first_head: int = 0
) -> Tensor:
    """Attend by blocks where they pay: [B, H, S, D], [B, G, S, D], [B, G, S, E] to [B, H, S, E]."""
    seq_len = q.size(2)
    mask.check(seq_len)
    if q.device.type in varlen.DEVICES:
        out = _in_one_call(q, k, v, mask, terms)
        if out is not None:
            return out
    if mask.of_batch:
        return torch.cat(
            [
                _attend(
                    q[b : b + 1], k[b : b + 1], v[b : b + 1], each, terms, first_head=first_head
                )
                for b, each in enumerate(of_sequences(mask, q.size(0)))
            ]
        )
    plain = isinstance(mask, Full | Causal) or q.ndim != 4
    if terms.plain and (plain or not blocks_pay(mask, seq_len, q.device.type)):
        return _by_torch(q, k, v, mask, terms.scale)
    dropped = Dropout(terms.dropout, draw_seed(), first_head) if terms.dropout else None
    scores = Scores(mask, terms.scale, terms.softcap, dropped)
    return attend_by_blocks((q, k, v), terms.sinks, scores)


def _in_one_call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms) -> Tensor | None:
    """Attend by a kernel of variable lengths; None where there is none or torch's does as well."""
    by_torch = terms.plain and isinstance(mask, Full | Causal)
    if terms.softcap is not None or terms.dropout or by_torch:
        return None
    q, k, v = narrowed(q, k, v)
    masks = masks_of_calls(q, v, mask)
    if masks is None:
        return None
    return attend_whole((q, k, v), terms.sinks, masks=masks, scale=terms.scale)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    plain = isinstance(mask, Full | Causal)
    if isinstance(mask, Causal) and q.size(-1) != v.size(-1) and strips_apply(q, k):
        return attend_in_strips(q, k, v, scale)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plain else mask_tensor(mask, q.size(2), device=q.device),
        is_causal=isinstance(mask, Causal),
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )


def _check(q: Tensor, terms: Terms) -> None:
    if not 0 <= terms.dropout < 1:
        raise ValueError(f"dropout ({terms.dropout}) must be >= 0 and < 1")
    if terms.softcap is not None and terms.softcap <= 0:
        raise ValueError(f"softcap ({terms.softcap}) must be > 0, or None")
    if q.ndim != 4 and not terms.plain:
        raise ValueError(f"q ({tuple(q.shape)}) must have 4 dims with softcap, sinks or dropout")


def _own_sinks(sinks: Tensor, share: HeadShare | None, num_heads: int) -> Tensor:
    """Return the sinks of this rank's heads, [h]."""
    to_local: Callable[[], Tensor] | None = getattr(sinks, "to_local", None)  # a DTensor's
    sinks = sinks if to_local is None else to_local()
    share = HeadShare(range(num_heads), num_heads) if share is None else share
    if sinks.shape != (share.total,) or len(share.own) != num_heads:
        raise ValueError(
            f"sinks ({tuple(sinks.shape)}) must have one number for each head of q ({share.total})"
        )
    return sinks[share.own.start : share.own.stop]


@dataclass(frozen=True, slots=True)
class CoreMask:
    """Makes the mask of a call in the form that a core attention takes.

    Attributes:
        name: Parameter of the core attention that takes the mask, for messages.
        mode: Name of the mode of `ContextParallel`, for messages.
        seq_len: Length of the whole sequence, S.
        spread: Queries of each rank; None in the Ulysses mode, where each rank has all.
        share: Query heads of this rank; None: all.
    """

    name: str
    mode: str
    seq_len: int
    spread: Spread | None
    share: HeadShare | None = None

    def of_attention(
        self, module: Attention, given: object, q: Tensor, *, takes: bool
    ) -> Mask | None:
        """Return the mask for an `Attention`: a description, always where the sequence is spread.

        Raises:
            TypeError: `given` is no description.
            ValueError: It does not fit the sequence, or the mode the module.
        """
        if given is not None and not isinstance(given, Mask):
            raise TypeError(f"{self.name} ({type(given).__name__}) must be a Mask")
        mask = module.mask if given is None else given
        mask.check(self.seq_len)
        if self.spread is None:
            if not module.needs_share:
                return given
            check_takes(module, takes=takes, name=self.name, mode=self.mode)
            return HeadsMask(mask, self.mode, self.share)
        check_dropout(module.dropout, self.mode)
        if q.ndim != 4:
            raise ValueError(f"q ({tuple(q.shape)}) must have 4 dims in {self.mode}")
        return mask

    def of_other(self, given: object, device: torch.device) -> Tensor | None:
        """Return the mask for any other module: a tensor [..., t, S].

        Raises:
            TypeError: `given` is neither a description nor a tensor.
            ValueError: It does not fit the sequence.
        """
        if given is None:
            return None
        if isinstance(given, Tensor):
            return self._rows(given)
        if not isinstance(given, Mask):
            raise TypeError(f"{self.name} ({type(given).__name__}) must be a tensor or a Mask")
        if self.spread is None:
            return mask_tensor(given, self.seq_len, device=device)
        given.check(self.seq_len)
        whole, mine = self.spread.whole, self.spread.mine
        return torch.cat([block_tensor(given, run, whole, device=device) for run in mine])

    def _rows(self, mask: Tensor) -> Tensor:
        """Return the rows of a mask of the whole sequence that belong to these queries."""
        seq_len = self.seq_len
        if mask.size(-1) != seq_len or mask.size(-2) not in (1, seq_len):
            raise ValueError(
                f"{self.name} ({tuple(mask.shape)}) must cover the whole sequence ({seq_len} "
                f"queries, {seq_len} keys), or be a hp_context.Mask"
            )
        if self.spread is None or mask.size(-2) == 1:
            return mask
        return torch.cat([mask[..., run.start : run.stop, :] for run in self.spread.mine], -2)


def check_takes(module: Attention, *, takes: bool, name: str, mode: str) -> None:
    """Raise `ValueError` unless an `Attention` takes a mask where its call needs one."""
    if not takes:
        raise ValueError(
            f"mask_kwarg_name ({name}) must name a parameter of {type(module).__name__}.forward "
            f"in {mode}"
        )


def check_core(
    module: nn.Module, mask: Mask | None, *, takes: bool, name: str, mode: str, ring: bool
) -> None:
    """Raise `ValueError` unless the mask of a core attention that sees some queries is known."""
    kind = type(module).__name__
    if isinstance(module, Attention):
        check_dropout(module.dropout, mode)
        check_takes(module, takes=takes, name=name, mode=mode)
    elif ring:
        raise ValueError(
            f"module ({kind}) must be an Attention of hp_context in {mode}, where no rank ever has "
            f"all keys: use ring=False with the same ulysses_degree"
        )
    elif mask is None:
        raise ValueError(
            f"mask (None) must be given for {kind} in {mode}, where it sees a part of the "
            f"queries: mask=Full() if it has none, or ulysses_degree=None"
        )


def check_used(mask: object) -> None:
    """Raise `ValueError` if an `Attention` has not handed its call to the mask it was given."""
    if isinstance(mask, SpreadMask) and not mask.used:
        raise ValueError(
            f"the core attention must pass its attn_mask to masked_attention in {mask.mode}; "
            f"it computed something else from its part of the sequence"
        )


_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class PositionsOnly(TorchFunctionMode):
    """Refuses attention calls that take the shape of their input for positions.

    Args:
        mode: Name of the mode of `ContextParallel`, for messages.
        mask_name: Parameter of the core attention that has the mask.
    """

    def __init__(self, mode: str, mask_name: str) -> None:
        super().__init__()
        self.mode, self.mask_name = mode, mask_name

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run `func` unless it is a call that is refused."""
        del types
        kwargs = kwargs or {}
        given = dict(kwargs)
        if func is F.scaled_dot_product_attention:
            given |= zip(_POSITIONAL, args, strict=False)
        if given.get("is_causal"):
            raise ValueError(
                f"{func.__name__}(is_causal=True) must not be called in "
                f"{self.mode}, where the queries are a part of the sequence: pass it the mask in "
                f"{self.mask_name}, or use ulysses_degree=None"
            )
        if given.get("dropout_p"):
            raise ValueError(
                f"dropout_p ({given['dropout_p']}) must be 0 in {self.mode}: "
                f"use ulysses_degree=None"
            )
        return func(*args, **kwargs)


def guard(module: nn.Module, mode: PositionsOnly) -> None:
    """Run the forward of `module` under `mode` from now on.

    The guarded forward is a method of the module, so that copies of the module guard their own.
    """
    original = module.forward
    of_instance = "forward" in vars(module)

    @wraps(original)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        run = original if of_instance else MethodType(type(self).forward, self)
        with mode:
            return run(*args, **kwargs)

    module.forward = MethodType(forward, module)
