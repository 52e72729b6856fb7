"""Run one chunk's forward and another's backward at once, each hiding the other's transfers."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from hp_overlap.coordinator import HookCoordinator, TraceEntry
from hp_overlap.pair import run_pair
from hp_overlap.turn import Hook, Side
from hp_platform import WeightGradQueue, is_waited, outside_graph, sync_hook

P = ParamSpec("P")
R = TypeVar("R")


class Launches(Protocol):
    """A carrier of rows to experts and back whose launches are apart from their ends.

    `hp_expert.Dispatcher` is one.

    Attributes:
        launch_dispatch: Function that launches the dispatch of a tensor, its first argument; see
            `CommComputeOverlap.wrap_dispatch`.
        launch_combine: Function that launches the combine of a tensor, its first argument; see
            `CommComputeOverlap.wrap_combine`.
    """

    @property
    def launch_dispatch(self) -> Callable[..., object]: ...  # noqa: D102

    @property
    def launch_combine(self) -> Callable[..., object]: ...  # noqa: D102


LaunchesT = TypeVar("LaunchesT", bound=Launches)


class PutOffWeights:
    """Weight gradients that the backward side puts off until the forward side waits for counts.

    See Note [Turns]. Where the forward side lends no turn, as in dense layers, the gradients of a
    layer are computed when the next one begins: at most one layer is put off.
    """

    def __init__(self) -> None:
        self._queue = WeightGradQueue()
        self._num_layers = 0

    def run(self, bwd_fn: Callable[[], object]) -> None:
        """Run a backward; at its end compute the gradients that are still put off."""
        try:
            with self._queue.defer(None):
                bwd_fn()
            self.compute()
        finally:
            self._queue.discard(None)  # after an error

    def compute(self) -> None:
        """Compute the gradients that were put off, and add them to those of the parameters."""
        self._num_layers = 0
        self._queue.flush(None)

    def enter_layer(self) -> None:
        """Note that the backward of a layer begins."""
        if self._num_layers:
            self.compute()
        self._num_layers += 1


class CommComputeOverlap:
    """Hides the expert all-to-alls of a forward and a backward behind each other's compute.

    The functions given to `wrap_dispatch` and `wrap_combine` launch a collective and return its
    result *unwaited* (`hp_platform.all_to_all_lazy`); permutations of the result belong after
    the wrapped call. Note [Turns] states the protocol.

    Args:
        coordinator: Coordinator at which the two sides meet; a new one when None.
        strict: While a pair runs, raise where a wrapped function returned a result that was
            waited for already, or its backward a gradient that was: nothing would be hidden.
        puts_off_weight_gradients: Whether the backward of a pair leaves the weight gradients that
            go through `hp_platform.submit_weight_grad` to the time in which the forward side
            waits for counts; see Note [Turns]. All are in `grad` when `run` returns. Only where
            nothing reads them before, as FSDP2 does at the end of each module's backward.

    Example:
        >>> overlap = CommComputeOverlap()
        >>> dispatch = overlap.wrap_dispatch(lambda x: x)
        >>> combine = overlap.wrap_combine(lambda x: x)
        >>> overlap.run(lambda: None, lambda: None)
    """

    def __init__(
        self,
        coordinator: HookCoordinator | None = None,
        *,
        strict: bool = False,
        puts_off_weight_gradients: bool = False,
    ) -> None:
        self._coordinator = coordinator if coordinator is not None else HookCoordinator()
        self._strict = strict
        self._weights = PutOffWeights() if puts_off_weight_gradients else None
        if self._weights is not None:
            self._coordinator.put_off = self._weights.compute

    @property
    def coordinator(self) -> HookCoordinator:
        """Return the coordinator at which the two sides meet."""
        return self._coordinator

    @property
    def trace(self) -> list[TraceEntry]:
        """Return the hooks of the current or last pair, in the order they were passed."""
        return self._coordinator.trace

    def wrap_dispatch(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Put hooks A and B around `fn`.

        Args:
            fn: Launches the dispatch of its first positional argument, a tensor, and returns a
                tensor or a tuple that begins with one, unwaited.

        Returns:
            A callable with the same signature. `torch.compile` leaves it out of its graphs.
        """
        return self._wrap(fn, "A", "B")

    def wrap_combine(self, fn: Callable[P, R], is_last_layer: bool = False) -> Callable[P, R]:
        """Put hooks C and D around `fn`.

        Args:
            fn: Launches the combine of its first positional argument; see `wrap_dispatch`.
            is_last_layer: Has no effect. The turn needs no mark on the last layer, and its
                hook D hands the turn over like any other, so that what follows the last
                combine is hidden as well.
        """
        del is_last_layer
        return self._wrap(fn, "C", "D")

    def wrap_dispatcher(self, dispatcher: LaunchesT) -> LaunchesT:
        """Return `dispatcher` with both of its launches wrapped.

        One whose `prepare` is in two parts (`hp_expert.PreparesInTwo`) meets hook N between them.

        Args:
            dispatcher: Dispatcher, which is not changed; the returned one uses it for all else.
        """
        after_counts = partial(self._meet, "forward", "N")
        return cast("LaunchesT", _WrappedLaunches(dispatcher, self, after_counts))

    def run(self, fwd_fn: Callable[[], object], bwd_fn: Callable[[], object]) -> None:
        """Run both callables to their ends, `fwd_fn` in this thread, `bwd_fn` in a helper.

        Receive what both need before, and send what they made after: neither may wait for
        another rank on anything but the wrapped collectives. The helper runs with this
        thread's device, stream, autocast, grad mode and context variables.

        Raises:
            BaseException: The first error of the two sides, with the other side's end as a note.
                The other side was stopped at its next hook, and no thread is left, except
                where a side never came back within the coordinator's time-out: the note and
                the log then name its place.
            RuntimeError: The coordinator is in use.
        """
        if self._weights is not None:
            bwd_fn = partial(self._weights.run, bwd_fn)
        run_pair(self._coordinator, fwd_fn, bwd_fn)

    def _meet(self, direction: Side, name: Hook) -> None:
        """Pass a hook of Note [Turns]."""
        coordinator = self._coordinator
        begins_layer = (direction, name) == ("backward", "D") and coordinator.is_enabled()
        if self._weights is not None and begins_layer and coordinator.side() == "backward":
            self._weights.enter_layer()
        coordinator.hook(direction, name)

    def _wrap(self, fn: Callable[P, R], before: Hook, after: Hook) -> Callable[P, R]:
        coordinator, name = self._coordinator, getattr(fn, "__qualname__", repr(fn))

        def check_gradient(gradient: Tensor) -> None:
            _require_unwaited(gradient, f"gradient of {name}", "backward", coordinator)

        @outside_graph
        @wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if not args or not isinstance(args[0], Tensor):
                raise TypeError(f"first positional argument of {name} must be a tensor")
            x = self._hook_tensor(args[0], before)
            if self._strict and x.requires_grad:
                x.register_hook(check_gradient)
            result = cast("Callable[..., Any]", fn)(x, *args[1:], **kwargs)
            first = result[0] if isinstance(result, tuple) else result
            if not isinstance(first, Tensor):
                raise TypeError(
                    f"result of {name} must be a tensor or a tuple that begins with one"
                )
            if self._strict:
                _require_unwaited(first, f"result of {name}", "forward", coordinator)
            hooked = self._hook_tensor(first, after)
            if not isinstance(result, tuple):
                return cast("R", hooked)
            make = getattr(type(result), "_make", type(result))
            return cast("R", make((hooked, *result[1:])))

        return wrapped

    def _hook_tensor(self, x: Tensor, name: Hook) -> Tensor:
        """Return `x` with hook `name` passed now and again when its gradient comes back.

        The hook is recorded in the graph also while the coordinator is disabled, because the
        backward of a forward that ran alone may be overlapped later.

        Args:
            x: Any shape and dtype; a lazy collective result stays unwaited.
            name: Hook A, B, C or D of Note [Turns].
        """
        return sync_hook(
            x,
            forward=partial(self._meet, "forward", name),
            backward=partial(self._meet, "backward", name),
        )


class _WrappedLaunches:
    def __init__(
        self, dispatcher: Launches, overlap: CommComputeOverlap, after_counts: Callable[[], None]
    ) -> None:
        self._dispatcher, self._after_counts = dispatcher, after_counts
        if hasattr(dispatcher, "start_prepare"):
            self.prepare = self._prepare_in_two
        self.launch_dispatch = overlap.wrap_dispatch(dispatcher.launch_dispatch)
        self.launch_combine = overlap.wrap_combine(dispatcher.launch_combine)

    def _prepare_in_two(self, *args: object, **kwargs: object) -> object:
        dispatcher: Any = self._dispatcher
        started = dispatcher.start_prepare(*args, **kwargs)
        self._after_counts()
        return dispatcher.finish_prepare(started)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # what `copy` asks of an object that has nothing yet
            raise AttributeError(name)
        return getattr(self._dispatcher, name)

    def __deepcopy__(self, memo: dict[int, object]) -> "_WrappedLaunches":
        return self  # as dispatchers do: copies of a module share the group and the coordinator

    def __repr__(self) -> str:
        return f"overlapped {self._dispatcher!r}"


def _require_unwaited(x: Tensor, what: str, direction: Side, coordinator: HookCoordinator) -> None:
    """Raise if `x`, the result of a wrapped collective, was waited for while a pair runs.

    Outside a pair nothing has to be hidden, and a recomputation may hand out saved results, so
    neither is looked at.

    Raises:
        ValueError: Its collective was waited for inside the wrapped function.
    """
    if coordinator.is_enabled() and coordinator.side() == direction and is_waited(x):
        raise ValueError(
            f"{what} ({tuple(x.shape)}, {x.dtype}) must be unwaited for its transfer to be "
            f"hidden: return the result of hp_platform.all_to_all_lazy and use it after the hook"
        )
