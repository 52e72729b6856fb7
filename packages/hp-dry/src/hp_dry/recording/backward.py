"""Operators of a backward: their streams, and the forward lines of which they are the gradients.

The autograd engine runs a node of backward on the stream that was current when its operator ran in
forward. It makes streams wait for each other where a gradient passes from one stream to another,
and at the end. On `meta` the engine has no streams, so that this module does both. After an
operator of forward has run, its node of backward exists; the next operator of the thread stores the
origin in the node.
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
    """Line, place and stream of an operator in forward."""

    at: str
    place: str
    stream: int


class Backward:
    """State of one thread of the host in backward.

    Attributes:
        origin: Origin of the operator whose gradient is computed now; None outside of backward and
            while gradients of a leaf are summed.
    """

    __slots__ = ("_home", "_last", "_node", "origin")

    def __init__(self) -> None:
        self._node: tuple[int, int] | None = None
        self._home = 0
        self._last: tuple[list[weakref.ref[Tensor]], Origin] | None = None
        self.origin: Origin | None = None

    def remember(self, made: list[Tensor], origin: Origin) -> None:
        """Store the results of an operator until their node of backward exists."""
        self._last = ([weakref.ref(x) for x in made], origin)

    def follow(self, stream: int) -> int:
        """Return the stream of the node that the autograd engine runs now.

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
