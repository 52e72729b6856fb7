"""Two sides on two threads: start, end, failure, time-out, signal."""

import contextvars
import logging
import threading
import traceback
from collections.abc import Callable

import torch

from hp_overlap.coordinator import HookCoordinator, OverlapAbortedError, OverlapTimeoutError
from hp_overlap.turn import OTHER, Side
from hp_platform import ThreadContext, failing_together, give_up

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
