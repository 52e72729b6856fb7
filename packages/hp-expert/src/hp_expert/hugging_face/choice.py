"""The choice of experts inside a block of a transformers model, replaced by another one.

Shape symbols: T tokens, E experts, K experts per token.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_expert.routing.recompute import decide

Listener = Callable[[nn.Module, Tensor], None]
"""A function that is told the module of experts, and the experts that it was given."""
Source = Callable[[nn.Module], Tensor | None]
"""A function that returns the experts for a module to take; None: its own choice."""
TopK = Callable[[], torch.return_types.topk]


class _Open(threading.local):
    """The contexts that are open in this thread.

    Not context variables, at which the compiler cuts graphs, nor defaults of the class: the
    compiler does not see attributes that hide them.

    Attributes:
        listeners: Functions that record the choices of layers.
        source: Function that has the experts for layers to take; None: layers choose.
        choice: Choice of the block that runs, if it is replaced or repeated; None otherwise.
    """

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self.source: Source | None = None
        self.choice: ReplacedChoice | None = None


_open = _Open()


class ReplacedChoice(TorchFunctionMode):
    """The choice of one layer in one call.

    Every router of transformers scores the experts and chooses by one `torch.topk` over all of
    them; the rest differs from model to model. Inside a block whose choice is replaced, that call
    returns the given experts and their scores, through which gradients flow as they do through the
    highest scores. Everything else is the model's own code.

    A recompute under `save_routing` takes the experts that its forward took.

    Args:
        owner: Module of the experts.
        num_experts: Number of experts, E.
        replay: Experts to take, int64 [T, K], -1 for no expert; None: those that the router
            chooses.

    Attributes:
        experts: Experts that were taken, [T, K]; None before the choice.
        num_chosen: Number of choices of the router; 1 if its choice can be replaced.
        repeated: Whether a recompute repeats the choice of its forward.
    """

    def __init__(self, owner: nn.Module, *, num_experts: int, replay: Tensor | None) -> None:
        super().__init__()
        self.experts: Tensor | None = None
        self.num_chosen, self.repeated = 0, True
        self._owner, self._num_experts, self._replay = owner, num_experts, replay

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Replace the choice of experts."""
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            assert isinstance(scores, Tensor)
            if scores.ndim == 2 and scores.shape[1] == self._num_experts:
                return self._choose(scores, partial(func, *args, **kwargs))
        return func(*args, **kwargs)

    def _choose(self, scores: Tensor, top_k: TopK) -> torch.return_types.topk:
        self.num_chosen += 1
        self.experts = decide(self._owner, partial(self._first_choice, top_k))
        # The dispatcher finds experts that do not exist, and raises on every rank.
        existing = self.experts.clamp(0, self._num_experts - 1)
        return torch.return_types.topk((scores.gather(1, existing), existing))

    def _first_choice(self, top_k: TopK) -> Tensor:
        self.repeated = False
        with torch.no_grad():  # a recompute that does not choose must save as many tensors
            live = top_k().indices
        if self._replay is None:
            return live
        replay = self._replay.to(live.device, torch.int64)
        return replay if replay.shape == live.shape else live

    def error(self, chosen: Tensor) -> ValueError | None:
        """Return an error if the choice could not be replaced, else None.

        Args:
            chosen: Experts that the router returns [T, K].
        """
        if self._replay is not None and self._replay.shape != chosen.shape:
            return ValueError(
                f"experts to replay ({tuple(self._replay.shape)}) must be [tokens, experts per "
                f"token] {tuple(chosen.shape)}"
            )
        if self.num_chosen != 1:
            return ValueError(
                f"calls of torch.topk over all experts ({self.num_chosen}) must be one: this "
                "router chooses in another way, which can be neither replayed nor saved"
            )
        return None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Replace the choice of the block that runs in this context."""
        outer, _open.choice = _open.choice, self
        try:
            with self:
                yield
        finally:
            _open.choice = outer


def current_choice() -> ReplacedChoice | None:
    """Return the choice of the block that runs, if it is replaced or repeated, else None."""
    return _open.choice


def current_listeners() -> tuple[Listener, ...]:
    """Return the functions that record the choices of layers."""
    return _open.listeners


def replayed(experts: nn.Module) -> Tensor | None:
    """Return the experts for a layer to take, or None if it chooses itself."""
    return None if _open.source is None else _open.source(experts)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell one more listener the choices of layers in this context."""
    outer, _open.listeners = _open.listeners, (*_open.listeners, listener)
    try:
        yield
    finally:
        _open.listeners = outer


@contextmanager
def replaying(source: Source) -> Iterator[None]:
    """Let layers take the experts of a source; for other layers ask the source around it."""
    outer = _open.source

    def find(experts: nn.Module) -> Tensor | None:
        found = source(experts)
        return outer(experts) if found is None and outer is not None else found

    _open.source = find
    try:
        yield
    finally:
        _open.source = outer
