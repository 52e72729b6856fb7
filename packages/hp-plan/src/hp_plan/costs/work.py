"""Work of a part of a model: its weights, operations, kept bytes and exchanges. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from hp_trainer.config import ModelConfig
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.layout.vocabulary import WIDE_BYTES

KernelKind = Literal["product", "grouped", "attention", "memory"]
"""Products of matrices, those of experts, attention proper, and what only moves bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Something that a GPU launches for a microbatch, once or several times.

    Attributes:
        kind: What limits it besides memory.
        launches: Kernels, copies and fills, however many tokens there are.
        launches_per_token: Those besides that grow with them.
        flops: Operations of matrices per token.
        bytes: Bytes read and written per token, every operand once.
        fixed_bytes: Bytes read and written however many tokens there are, such as weights.
        is_expert: Whether these are weights of routed experts.
    """

    kind: KernelKind = "memory"
    launches: float = 0.0
    launches_per_token: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    fixed_bytes: float = 0.0
    is_expert: bool = False

    def __add__(self, other: "Kernel") -> "Kernel":
        """Both, one after the other; of the kind of the second."""
        return replace(
            other,
            launches=self.launches + other.launches,
            launches_per_token=self.launches_per_token + other.launches_per_token,
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            fixed_bytes=self.fixed_bytes + other.fixed_bytes,
        )


class Kernels(NamedTuple):
    """The kernels of a part of a model for a microbatch, each with its number of launches.

    Attributes:
        forward: Kernels of forward.
        backward: Kernels of backward, without what runs again.
        again: What backward runs again.
    """

    forward: Counter[Kernel]
    backward: Counter[Kernel]
    again: Counter[Kernel]

    @classmethod
    def of(cls, parts: Iterable["Kernels"]) -> "Kernels":
        """All of some parts."""
        found = cls(Counter(), Counter(), Counter())
        for part in parts:
            for mine, others in zip(found, part, strict=True):
                mine.update(others)
        return found


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter.

    Attributes:
        name: Name within its module.
        shape: Shape of the whole parameter.
        spec: What it is.
        is_cast: Whether it is computed with in the dtype of activations, and gathered in it.
    """

    name: str
    shape: tuple[int, ...]
    spec: ParameterSpec = field(default_factory=ParameterSpec)
    is_cast: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A module, or several of them one after the other. Told apart by identity, as a cached key.

    Attributes:
        weights: Its parameters, in the order of `torch.nn.Module.parameters`.
        flops: Operations of the forward per token; a multiplication and its addition are two.
        scores: Those of them that are attention proper.
        kept: Bytes per token that autograd keeps from forward to backward.
        gathered: Elements per token that tensor-parallel ranks put together in forward, at the
            entry of what they cut.
        summed: Elements per token that they sum in forward, at its end.
        whole: Bytes per token that each of them keeps of all positions, where there are several.
        heads: Elements per token that context-parallel ranks exchange for attention.
        attentions: Number of layers whose attention has that exchange.
        rows: Rows of width D per token that travel to experts and back, in one direction.
        routed: Bytes per token of `kept` that are of such rows.
        balances: Number of layers that sum the loads of experts over ranks that share a sequence.
        losses: Number of losses, of which ranks that cut the vocabulary sum the parts.
        logits: Logits of a token, where this has the loss.
        again: What backward runs again of the forward, operations and exchanges; None: nothing.
    """

    weights: tuple[Weight, ...] = ()
    flops: float = 0.0
    scores: float = 0.0
    kept: float = 0.0
    gathered: float = 0.0
    summed: float = 0.0
    whole: float = 0.0
    heads: float = 0.0
    attentions: float = 0.0
    rows: float = 0.0
    routed: float = 0.0
    balances: float = 0.0
    losses: float = 0.0
    logits: float = 0.0
    again: "Work | None" = None

    @property
    def exchanged(self) -> tuple[float, ...]:
        """Return what `EXCHANGED` names."""
        cut = self.gathered + self.summed
        return (cut, self.heads, self.attentions, self.rows, self.balances, self.losses)

    def kept_bytes(self, tokens: int, *, tp: int = 1, padded: float = 1.0) -> float:
        """Bytes that a microbatch keeps from forward to backward on a rank.

        Args:
            tokens: Number of tokens of the microbatch that attention sees on the rank.
            tp: Ranks that share them.
            padded: Rows of a buffer for experts, by those that are routed.
        """
        kept = self.kept + (padded - 1) * self.routed
        return (kept / tp + (self.whole if tp > 1 else 0.0)) * tokens

    def cast_bytes(self, *, size: int, tp: int = 1, expert_ranks: int = 1) -> float:
        """Bytes of what is cast to the dtype of activations, which all microbatches share.

        Args:
            size: Bytes of an element of activations.
            tp: Ranks that share the dense matrices.
            expert_ranks: Ranks that share the experts.
        """
        if size >= WIDE_BYTES:
            return 0.0
        dense, routed = _cast_elements(self)
        return (dense / tp + routed / expert_ranks) * size

    def __add__(self, other: "Work") -> "Work":
        return together((self, other))

    def under(self, prefix: str) -> "Work":
        """The same with a prefix before the names."""
        weights = tuple(replace(w, name=prefix + w.name) for w in self.weights)
        return replace(self, weights=weights)


@lru_cache(maxsize=4096)
def _cast_elements(work: Work) -> tuple[int, int]:
    """Elements of dense matrices that are cast, and of experts."""
    cast = [weight for weight in work.weights if weight.is_cast]
    dense = sum(w.size for w in cast if not w.spec.is_expert)
    return dense, sum(w.size for w in cast if w.spec.is_expert)


def together(parts: Iterable[Work]) -> Work:
    """All of some parts, one after the other."""
    found = list(parts)
    weights = tuple(chain.from_iterable(part.weights for part in found))
    sums: dict[str, Any] = {name: sum(getattr(p, name) for p in found) for name in _SUMMED}
    again = [part.again for part in found if part.again is not None]
    return Work(weights, **sums, again=together(again) if again else None)


_SUMMED = tuple(each.name for each in fields(Work) if each.name not in ("weights", "again"))

EXCHANGED = ("summed", "heads", "attentions", "rows", "balances", "losses")
"""What ranks exchange inside layers: as much is what they gather and what they sum."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The work of a block, by its parts.

    Attributes:
        attend: Up to the first residual connection; of a block of one's own, nothing.
        feed: What follows it; of a block of one's own, all of it.
        rest: What runs only once, whatever backward runs again.
    """

    attend: Work
    feed: Work
    rest: Work


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The work of a model, by its parts.

    Attributes:
        before: What the first stage has in front of its blocks.
        blocks: The blocks, by global name; those of multi-token prediction are behind the others.
        after: What the last stage has behind its blocks, up to the output matrix.
        loss: The product with the output matrix, and the loss of all logits at once.
        tiled_loss: The same by tiles of logits, see `hp_trainer.layout.vocabulary`; of a model of
            one's own, which has its own loss, all logits at once.
        tied: Parameters of `before` that the last stage has too.
    """

    before: Work
    blocks: Mapping[str, BlockWork]
    after: Work
    loss: Work
    tiled_loss: Work
    tied: tuple[Weight, ...]


def alike(model: ModelConfig) -> dict[int, int]:
    """The first layer of the kind of each; of a model of one's own nothing is known of kinds."""
    firsts: dict[object, int] = {}
    found = {}
    for index in range(model.num_layers):
        kind = index if model.is_own else (model.is_dense(index), model.has_window(index))
        found[index] = firsts.setdefault(kind, index)
    return found
