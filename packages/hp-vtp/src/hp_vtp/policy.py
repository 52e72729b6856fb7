"""A policy of the tensors that may leave the owner of the data, and a record of those that did.

This is not privacy. Activations and gradients of a model that the other side knows allow it to
reconstruct inputs and labels (UnSplit, arXiv 2108.09033, does so for plain split learning). The
policy makes sure that nothing else leaves by mistake; whoever needs more adds noise in `transform`
and accounts for it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from hp_vtp.messages import TensorMeta
from hp_vtp.topology.stages import Edge

__all__ = [
    "Crossing",
    "EdgePolicy",
    "Payload",
    "PolicyError",
    "Recorder",
]


class Payload(StrEnum):
    """The content of a transfer."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SHAPES = "shapes"


class PolicyError(ValueError):
    """A transfer was about to cross the trust boundary that the policy does not allow."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One transfer over the trust boundary, as a rank sent its part of it.

    Attributes:
        edge: Edge of the transfer.
        payload: Content, as declared by the sender.
        microbatch: Index of the microbatch; None if the sender did not say.
        metas: Global shapes and dtypes.
        values: Copies of this rank's parts, if the recorder keeps them.
    """

    edge: Edge
    payload: Payload
    microbatch: int | None
    metas: tuple[TensorMeta, ...]
    values: tuple[Tensor, ...] = ()


class Recorder:
    """Records the transfers that cross; for tests and audits. Any thread may write to it."""

    def __init__(self, *, keep_values: bool = False) -> None:
        """Start empty; `keep_values` copies the tensors too."""
        self.keep_values = keep_values
        self._lock = threading.Lock()
        self._crossings: list[Crossing] = []

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """Return the transfers in the order in which this rank sent them."""
        with self._lock:
            return tuple(self._crossings)

    def add(self, crossing: Crossing) -> None:
        """Record a transfer."""
        with self._lock:
            self._crossings.append(crossing)


@dataclass(frozen=True)
class EdgePolicy:
    """The policy of tensors that pass between trusted stages and the others.

    Attributes:
        trusted: Physical stages of the data's owner.
        allow: Kinds of transfers that may cross; all others are refused.
        allow_integers: Whether activations may contain integers and booleans, which tokens and
            labels are, and masks.
        transform: Applied to every floating-point tensor that leaves a trusted stage, for example
            to add noise; returns one of the same shape and dtype.
        recorder: Recorder of the transfers that cross, in either direction.
    """

    trusted: frozenset[int]
    allow: frozenset[Payload] = frozenset(Payload)
    allow_integers: bool = False
    transform: Callable[[Tensor], Tensor] | None = None
    recorder: Recorder | None = field(default=None, compare=False)

    def crosses(self, edge: Edge, chain: Sequence[int]) -> bool:
        """Tell whether an edge leads into or out of the trusted stages."""
        return (chain[edge.source] in self.trusted) != (chain[edge.destination] in self.trusted)

    def apply(
        self,
        tensors: Sequence[Tensor],
        *,
        edge: Edge,
        chain: Sequence[int],
        payload: Payload,
        microbatch: int | None,
        metas: Sequence[TensorMeta],
        where: str,
    ) -> tuple[Tensor, ...]:
        """Check the tensors that a rank is about to send, and return those that it may send.

        Args:
            tensors: This rank's parts.
            edge: Edge of the transfer.
            chain: Chain of the layout: the physical stage of each logical stage.
            payload: Content of the transfer.
            microbatch: Index of the microbatch; None if the sender did not say.
            metas: Global shapes and dtypes.
            where: Beginning of the message of the error.

        Raises:
            PolicyError: If it may not cross; nothing has been sent.
        """
        if not self.crosses(edge, chain):
            return tuple(tensors)
        if payload not in self.allow:
            allowed = sorted(map(str, self.allow))
            raise PolicyError(f"{where}: payload ({payload}) must be one of {allowed} to cross")
        for i, meta in enumerate(metas):
            if (
                payload is not Payload.SHAPES
                and not self.allow_integers
                and not meta.dtype.is_floating_point
            ):
                raise PolicyError(
                    f"{where}: tensors[{i}].dtype ({meta.dtype}) must be floating-point to cross "
                    "(allow_integers is False: tokens and labels stay where they are)"
                )
        leaving = chain[edge.source] in self.trusted
        if self.transform is not None and leaving and payload is not Payload.SHAPES:
            tensors = [self._transformed(x, where) for x in tensors]
        if self.recorder is not None:
            kept = tuple(x.detach().clone() for x in tensors) if self.recorder.keep_values else ()
            self.recorder.add(Crossing(edge, payload, microbatch, tuple(metas), kept))
        return tuple(tensors)

    def _transformed(self, x: Tensor, where: str) -> Tensor:
        if self.transform is None or not x.is_floating_point():
            return x
        y = self.transform(x.detach())
        if y.shape != x.shape or y.dtype != x.dtype:
            raise PolicyError(
                f"{where}: result of transform ({y.dtype}{list(y.shape)}) must be like its input "
                f"({x.dtype}{list(x.shape)})"
            )
        return y
