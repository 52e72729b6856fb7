"""The call of a stage that is running: its modules read it here, and leave the model's forward."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from torch import Tensor, nn

from hp_trainer.model.recompute import recomputed
from hp_transformers.stages.balance import Balancing

P = ParamSpec("P")
R = TypeVar("R")


class Call(NamedTuple):
    """The call of a stage, as its modules read it.

    Attributes:
        hidden: Hidden states that the stage before has sent, [B, S, ...]; None on the first stage.
        wants_logits: Whether the output matrix is applied; if not, its input leaves the model.
        balancing: Loss that balances experts; None: there is none.
    """

    hidden: Tensor | None
    wants_logits: bool = True
    balancing: Balancing | None = None


_NO_CALL = Call(None)
_call: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


class LeftError(Exception):
    """Raised to leave the forward of a model with hidden states.

    Args:
        hidden: Hidden states where it was left, [B, S, ...].
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def current_call() -> Call:
    """Return the call that is running; outside of calls an empty one."""
    return _call.get()


def in_call(call: Call, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose modules belong to the call of a stage."""
    token = _call.set(call)
    try:
        return function(*args, **kwargs)
    finally:
        _call.reset(token)


def recomputed_in_call(forward: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    """Call a layer that runs again in backward, then within the same call of its stage."""
    return recomputed(partial(in_call, _call.get(), forward, **kwargs), *args)


def leave(*args: Tensor, **kwargs: Tensor) -> NoReturn:
    """Take the place of the first layer of the next stage: leave with its input."""
    raise LeftError(args[0] if args else kwargs["hidden_states"])


def leave_without_logits(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Take the place of the output matrix: leave with its input where a loss needs no logits."""
    if _call.get().wants_logits:
        return forward(x)
    raise LeftError(x)


def observe_router(
    place: int | None, _module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]
) -> None:
    """Hand the logits of a router to the loss that balances experts; a forward hook.

    Args:
        place: Index of the logits in the output; None: they are all of the output.
        output: Output of the router.
    """
    if (balancing := _call.get().balancing) is not None:
        logits = output if place is None else output[place]
        assert isinstance(logits, Tensor)
        balancing.see(logits)


def balanced(
    forward: Callable[..., Tensor | tuple[Tensor, ...]], index: int, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """Call a layer, and attach the balancing loss of its routers to its output.

    Args:
        forward: Forward of the layer.
        index: Index of the layer in the model.
        *args: Arguments of the layer.
        **kwargs: Further arguments.
    """
    if (balancing := _call.get().balancing) is None:
        return forward(*args, **kwargs)
    balancing.begin()
    output = forward(*args, **kwargs)
    if isinstance(output, Tensor):
        return balancing.attach(index, output)
    return type(output)([balancing.attach(index, output[0]), *output[1:]])
