"""Work of a part of a model: its weights, operations, kept bytes and exchanges. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from hp_trainer.config import ModelConfig
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.layout.vocabulary import WIDE_BYTES

KernelKind = Literal["product", "grouped", "attention", "memory"]
"""Matrix products, grouped products of experts, attention proper, and kernels that move bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Kernels that a GPU launches for a microbatch, priced as one.

    Attributes:
        kind: Kind of operation, which has a rate besides that of memory.
        launches: Number of kernels, copies and fills that does not depend on tokens.
        launches_per_token: Further launches per token.
        flops: Operations of matrix products per token.
        bytes: Bytes read and written per token, every operand once.
        fixed_bytes: Bytes read and written whatever the number of tokens, such as weights.
        is_expert: Whether the weights are those of routed experts.
    """

    kind: KernelKind = "memory"
    launches: float = 0.0
    launches_per_token: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    fixed_bytes: float = 0.0
    is_expert: bool = False

    def __add__(self, other: "Kernel") -> "Kernel":
        """Return both, one after the other, with the kind of the second."""
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
        backward: Kernels of backward, without those of recomputation.
        again: Kernels of forward that backward runs again.
    """

    forward: Counter[Kernel]
    backward: Counter[Kernel]
    again: Counter[Kernel]

    @classmethod
    def of(cls, parts: Iterable["Kernels"]) -> "Kernels":
        """Return the kernels of some parts together."""
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
        spec: Declaration of the parameter.
        is_cast: Whether it is cast to the dtype of activations, and gathered in that dtype.
    """

    name: str
    shape: tuple[int, ...]
    spec: ParameterSpec = field(default_factory=ParameterSpec)
    is_cast: bool = False

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work of a module, or of several in sequence. Compared by identity, as a key of caches.

    Attributes:
        weights: Parameters, in the order of `torch.nn.Module.parameters`.
        flops: Operations of the forward per token; a multiplication and its addition are two.
        scores: Operations of attention proper, which `flops` includes.
        kept: Bytes per token that autograd keeps from forward to backward.
        gathered: Elements per token that tensor-parallel ranks gather in forward, in front of
            layers that are cut.
        summed: Elements per token that tensor-parallel ranks sum in forward, behind such layers.
        whole: Bytes per token of all positions that each of several tensor-parallel ranks keeps.
        heads: Elements per token that context-parallel ranks exchange for attention.
        attentions: Number of layers whose attention has that exchange.
        rows: Rows of width D per token that travel to experts and back, in one direction.
        routed: Bytes per token of such rows, which `kept` includes.
        balances: Number of layers that sum the loads of experts over ranks that share a sequence.
        losses: Number of losses whose parts tensor-parallel ranks sum.
        logits: Logits of a token, if the loss is part of this.
        again: Work of the forward that backward runs again; None: there is none.
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
    again: "Work | None" = field(default=None, kw_only=True)

    @classmethod
    def counted(
        cls,
        counts: Mapping[str, float],
        weights: tuple[Weight, ...] = (),
        *,
        again: "Work | None" = None,
    ) -> "Work":
        """Return work with the counts of its attributes; those that are missing are 0."""
        return cls(weights, *(counts.get(name, 0.0) for name in _SUMMED), again=again)

    @property
    def exchanged(self) -> tuple[float, ...]:
        """Return the amounts that `EXCHANGED` names."""
        cut = self.gathered + self.summed
        return (cut, self.heads, self.attentions, self.rows, self.balances, self.losses)

    def kept_bytes(self, tokens: int, *, tp: int = 1, padded: float = 1.0) -> float:
        """Return the bytes that a microbatch keeps from forward to backward on a rank.

        Args:
            tokens: Number of tokens of the microbatch that attention sees on the rank.
            tp: Tensor-parallel ranks that share the tokens.
            padded: Rows of a buffer for experts, divided by the routed ones.
        """
        kept = self.kept + (padded - 1) * self.routed
        return (kept / tp + (self.whole if tp > 1 else 0.0)) * tokens

    def cast_bytes(self, *, size: int, tp: int = 1, expert_ranks: int = 1) -> float:
        """Return the bytes of weights cast to the dtype of activations, once for all microbatches.

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
        """Return the same work with a prefix before the names of weights."""
        weights = tuple(replace(w, name=prefix + w.name) for w in self.weights)
        return replace(self, weights=weights)


@lru_cache(maxsize=4096)
def _cast_elements(work: Work) -> tuple[int, int]:
    """Return the elements of weights that are cast: of dense matrices, and of experts."""
    cast = [weight for weight in work.weights if weight.is_cast]
    dense = sum(w.size for w in cast if not w.spec.is_expert)
    return dense, sum(w.size for w in cast if w.spec.is_expert)


def together(parts: Iterable[Work]) -> Work:
    """Return the work of some parts in sequence."""
    found = list(parts)
    weights = tuple(chain.from_iterable(part.weights for part in found))
    sums = {name: sum(getattr(p, name) for p in found) for name in _SUMMED}
    again = [part.again for part in found if part.again is not None]
    return Work.counted(sums, weights, again=together(again) if again else None)


_SUMMED = tuple(each.name for each in fields(Work) if each.name not in ("weights", "again"))

EXCHANGED = ("summed", "heads", "attentions", "rows", "balances", "losses")
"""Exchanges of ranks inside layers; "summed" includes gathers, which take as long."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The work of a block, by its parts.

    Attributes:
        attend: Work up to the first residual connection; empty for a block of one's own.
        feed: Work behind that; all of a block of one's own.
        rest: Work that is never run again.
    """

    attend: Work
    feed: Work
    rest: Work


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The work of a model, by its parts.

    Attributes:
        before: Work of the first stage in front of its blocks.
        blocks: Work of blocks, by global name; those of multi-token prediction come last.
        after: Work of the last stage behind its blocks, up to the output matrix.
        loss: Product with the output matrix, and the loss of all logits at once.
        tiled_loss: Loss by tiles of logits, see `hp_trainer.layout.vocabulary`; `loss` again for a
            model of one's own, which has its own loss.
        tied: Parameters of `before` that the last stage has as well.
    """

    before: Work
    blocks: Mapping[str, BlockWork]
    after: Work
    loss: Work
    tiled_loss: Work
    tied: tuple[Weight, ...]


def alike(model: ModelConfig) -> dict[int, int]:
    """Return the first layer of the kind of each layer; in a model of one's own, each is a kind."""
    firsts: dict[object, int] = {}
    found = {}
    for index in range(model.num_layers):
        kind = index if model.is_own else (model.is_dense(index), model.has_window(index))
        found[index] = firsts.setdefault(kind, index)
    return found
