"""Optional capabilities of a stage: methods that a model may have beside those of `Stage`.

A stage has a capability if it has all methods of the protocol; without it a run does what the
protocol's docstring says, or refuses the layout that needs it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup

import hp_context


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of tensor-parallel ranks around matrices that they share out.

    Attributes:
        gather: [B, s, D] of this rank's positions to [B, S, D] of all.
        scatter: [B, S, D] summed over ranks to this rank's positions [B, s, D].
        linear_cross_entropy: See `hp_trainer.model.loss`; takes [T, D] of all positions, this
            rank's rows of the output matrix, [v, D], and the targets of all positions.
    """

    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Counted:
    """Counting functions in place of the kernels and exchanges of a stage that runs once.

    Shape symbols besides: N query heads, H width of a head, T tokens, K experts of a token.

    Attributes:
        attend: Of q, k and v, [B, S, N, H] each, and the positions that a query sees on average;
            returns what attention would.
        mix: Of rows [T, D], their experts [T, K] and weights, the elements of an expert and those
            that its computation keeps of a row; returns what experts would.
        exchange: Of elements that tensor-parallel ranks put together, as if backward had as many.
    """

    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    mix: Callable[..., Tensor]
    exchange: Callable[[float], None]


@runtime_checkable
class CutByExchanges(Protocol):
    """A stage whose parameters with a `tp_dim` may be cut over tensor-parallel ranks.

    Without this, and without `Spreading`, a stage is refused where `mesh.tp` is more than 1.
    """

    def place_exchanges(self, exchanges: Exchanges) -> None:
        """Put what tensor-parallel ranks exchange where parameters with a `tp_dim` need it."""
        ...


@runtime_checkable
class Spreading(Protocol):
    """A stage that spreads itself over ranks, in place of `hp_trainer.model.spreading`."""

    def expect_ranks(self, sizes: Mapping[str, int]) -> None:
        """Prepare for the ranks that will share the stage, before anything is declared or cut.

        Args:
            sizes: Number of ranks by axis: "ep", "tp", "cp".

        Raises:
            hp_base.errors.ConfigError: When so many ranks cannot share the stage.
        """
        ...

    def cut(self, vocabulary: range, group: ProcessGroup) -> None:
        """Keep this rank's part of every matrix that tensor-parallel ranks share.

        Args:
            vocabulary: Tokens whose logits this rank computes.
            group: The tensor-parallel ranks, more than one.
        """
        ...

    def spread_attention(self, context: "hp_context.ContextParallel", group: ProcessGroup) -> None:
        """Let context-parallel ranks share sequences.

        Args:
            context: How the ranks exchange keys and values.
            group: The ranks, more than one.
        """
        ...

    def spread_experts(self, groups: Mapping[str, ProcessGroup], *, hidden: bool) -> None:
        """Spread experts over ranks.

        Args:
            groups: "ep", the ranks that share the experts out; "etp", those that share each expert;
                "tp", those that share what is around experts.
            hidden: Whether ranks share out the hidden width of each expert, too.
        """
        ...


@runtime_checkable
class Countable(Protocol):
    """A stage that helps `hp plan` to run it once on the meta device, where it is more than blocks.

    A stage without this capability is run as it is.
    """

    def expect_no_values(self) -> None:
        """Prepare for tensors without values: no shape may depend on them from now on."""
        ...

    def stand_alone(self, sizes: Mapping[str, int], exchange: Callable[[float], None]) -> None:
        """Act as one of so many ranks while the others are missing, after ranks were expected.

        Args:
            sizes: Number of ranks by axis: "ep", "tp", "cp".
            exchange: See `Counted`.
        """
        ...

    def be_counted(self, counted: Counted) -> None:
        """Put counting functions in place of attention and experts that only the stage knows."""
        ...


@runtime_checkable
class DocumentTrial(Protocol):
    """A stage that finds out by a trial whether documents of a sequence stay apart in it.

    A stage all of whose attention is `hp_context.Attention` needs none.
    """

    def try_documents(self) -> None:
        """Run a trial, once weights are there; all ranks that share the stage call it together.

        Raises:
            hp_base.errors.ConfigError: When a document sees another.
        """
        ...
