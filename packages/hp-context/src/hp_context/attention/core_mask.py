"""The mask of a call in the form that the core attention takes, after checking that it fits.

A guard keeps a foreign core attention from masking its queries by their shape.

Shape symbols: S whole sequence, t queries that the core attention gets (S, but for the modes that
gather keys).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_context.attention.core import Attention, HeadsMask, SpreadMask, check_dropout
from hp_context.attention.spread import HeadShare, Spread
from hp_context.masks import Mask, block_tensor, mask_tensor


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
        self._check(func, given)
        return func(*args, **kwargs)

    def _check(self, func: Callable[..., object], given: dict[str, object]) -> None:
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
