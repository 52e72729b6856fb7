"""Run one chunk's forward and another's backward at once, each hiding the other's transfers."""

import contextvars
import logging
import threading
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from hp_overlap.coordinator import (
    OTHER,
    Hook,
    HookCoordinator,
    OverlapAbortedError,
    OverlapTimeoutError,
    Side,
    TraceEntry,
)
from hp_platform import (
    ThreadContext,
    WeightGradQueue,
    failing_together,
    give_up,
    is_waited,
    outside_graph,
    sync_hook,
)

_logger = logging.getLogger("hp_overlap")

# A side that was silent for a whole time-out gets this long to end, not another time-out.
_LAST_SECONDS = 1.0

_Errors = dict[Side, BaseException]
"""Errors that the sides raised so far, the root cause first."""


def run_pair(
    coordinator: HookCoordinator, fwd_fn: Callable[[], object], bwd_fn: Callable[[], object]
) -> None:
    """Run `fwd_fn` in this thread and `bwd_fn` in a helper; see `CommComputeOverlap.run`."""
    errors: _Errors = {}
    with failing_together():  # the helper's exchanges belong to it as well
        helper = _Helper(coordinator, bwd_fn, errors)
        coordinator.enable()
        try:
            helper.start()
            _run_side(coordinator, "forward", fwd_fn, errors)
            if not errors:
                helper.await_progress()
        except BaseException as error:  # noqa: BLE001 - no thread to be had, a time-out, a signal
            errors.setdefault("forward", error)
            coordinator.leave("forward", failed=True)
        if helper.join():
            coordinator.disable()
        try:
            _raise_root(errors)
        finally:
            errors.clear()  # this frame is in the error's traceback: a cycle that holds tensors


class _Helper:
    """The thread of the backward side."""

    def __init__(
        self, coordinator: HookCoordinator, bwd_fn: Callable[[], object], errors: _Errors
    ) -> None:
        self._coordinator, self._bwd_fn, self._errors = coordinator, bwd_fn, errors
        self._context = ThreadContext.capture()
        # Not `join`: interrupted by a signal, it marks a running thread as ended (bpo-45274).
        self._ended = threading.Event()
        variables = contextvars.copy_context()
        self._thread = threading.Thread(
            target=variables.run, args=(self._run,), name="hp-overlap-backward", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def await_progress(self) -> None:
        """Wait for the end while the side, alone by now, keeps passing hooks."""
        coordinator, passed = self._coordinator, -1
        while not self._ended.is_set():
            if len(coordinator.trace) == passed:
                raise OverlapTimeoutError(
                    f"forward side at its end: backward side still in "
                    f"{coordinator.places['backward']} after timeout ({coordinator.timeout:g} s)"
                )
            passed = len(coordinator.trace)
            self._ended.wait(coordinator.timeout)

    def join(self) -> bool:
        """Wait for the end; False if the side is stuck and its thread has to be left behind."""
        if self._thread.ident is None:
            return True
        silent = any(isinstance(error, OverlapTimeoutError) for error in self._errors.values())
        if self._ended.wait(_LAST_SECONDS if silent else self._coordinator.timeout):
            self._thread.join()
            return True
        note = (
            "backward side did not stop in time, its thread is left in "
            f"{self._coordinator.places['backward']}"
        )
        _logger.error("%s", note)
        for error in self._errors.values():
            error.add_note(note)
        return False

    def _run(self) -> None:
        try:
            _run_side(self._coordinator, "backward", self._run_in_context, self._errors)
        finally:
            self._ended.set()

    def _run_in_context(self) -> None:
        # Backward then runs here on every device, not in the thread that autograd keeps for it:
        # the hooks know their side by its thread, and the forward side may call autograd too.
        with self._context.apply(), torch.autograd.set_multithreading_enabled(False):
            self._bwd_fn()


def _run_side(
    coordinator: HookCoordinator, side: Side, fn: Callable[[], object], errors: _Errors
) -> None:
    try:
        coordinator.await_turn(side)
        fn()
    except BaseException as error:  # noqa: BLE001 - run_pair raises it
        # The other side may wait for a rank that waits for this side: it must wake now.
        stopped = isinstance(error, OverlapAbortedError)
        errors.setdefault(side, error if stopped else give_up(error))
        coordinator.leave(side, failed=True)
        if isinstance(error, OverlapTimeoutError):
            # The other side may never come back to let `run_pair` raise: say it now.
            _logger.error("%s", error)  # noqa: TRY400 - its traceback comes from `run`
    else:
        coordinator.leave(side, failed=False)


def _raise_root(errors: _Errors) -> None:
    """Raise the first of `errors` with the other one as a note; return if there is none."""
    for side, root in errors.items():
        other = errors.get(OTHER[side])
        if other is not None:
            said = "".join(traceback.format_exception_only(other)).strip()
            root.add_note(f"{OTHER[side]} side of the overlapped pair ended with: {said}")
        try:
            raise root
        finally:
            del root, other  # for the same reason


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

    Attributes:
        coordinator: Coordinator at which the two sides meet.

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
        self.coordinator = coordinator if coordinator is not None else HookCoordinator()
        self._strict = strict
        self._weights = PutOffWeights() if puts_off_weight_gradients else None
        if self._weights is not None:
            self.coordinator.put_off = self._weights.compute

    @property
    def trace(self) -> list[TraceEntry]:
        """Return the hooks of the current or last pair, in the order they were passed."""
        return self.coordinator.trace

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
        run_pair(self.coordinator, fwd_fn, bwd_fn)

    def _meet(self, direction: Side, name: Hook) -> None:
        """Pass a hook of Note [Turns]."""
        coordinator = self.coordinator
        begins_layer = (direction, name) == ("backward", "D") and coordinator.is_enabled()
        if self._weights is not None and begins_layer and coordinator.side() == "backward":
            self._weights.enter_layer()
        coordinator.hook(direction, name)

    def _wrap(self, fn: Callable[P, R], before: Hook, after: Hook) -> Callable[P, R]:
        coordinator, name = self.coordinator, getattr(fn, "__qualname__", repr(fn))

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
