"""Operators of a backward: their stream, and the line whose gradient each of them makes.

The engine runs a node of backward on the stream that was current when its operator ran forward, and
has streams wait for each other where gradients pass from one to another, and at the end. On `meta`
it knows no streams, so it is done here. When an operator of forward has run, its node of backward
exists; the next operator of the thread writes the origin into it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from hp_dry._internals import current_node, sequence_number

_KEY = "hp_dry"
_metadata = attrgetter("metadata")  # torch declares a method


@dataclass(frozen=True, slots=True)
class Origin:
    """Place at which an operator ran forward."""

    at: str
    place: str
    stream: int


class Backward:
    """Follows one thread of the host through backward.

    Attributes:
        origin: Where the operator ran forward whose gradient is computed now; None outside of
            backward and where gradients of a leaf are added up.
    """

    __slots__ = ("_home", "_last", "_node", "origin")

    def __init__(self) -> None:
        self._node: tuple[int, int] | None = None
        self._home = 0
        self._last: tuple[list[weakref.ref[Tensor]], Origin] | None = None
        self.origin: Origin | None = None

    def remember(self, made: list[Tensor], origin: Origin) -> None:
        """Keep what an operator returns until it has its node."""
        self._last = ([weakref.ref(x) for x in made], origin)

    def follow(self, stream: int) -> int:
        """Return the stream of the node that the engine runs now.

        Args:
            stream: Number of the current stream.
        """
        if self._last is not None:
            self._tag_nodes(*self._last)
            self._last = None
        node = current_node()
        key = None if node is None else (id(node), sequence_number(node))
        if key == self._node:
            return stream
        if self._node is None:
            self._home = stream
        self._node = key
        self.origin = None if node is None else _metadata(node).get(_KEY)
        return self._home if self.origin is None else self.origin.stream

    @staticmethod
    def _tag_nodes(made: list[weakref.ref[Tensor]], origin: Origin) -> None:
        for each in made:
            x = each()
            if x is not None and x.grad_fn is not None:
                _metadata(x.grad_fn).setdefault(_KEY, origin)
