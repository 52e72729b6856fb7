"""Thread state, streams, events and hooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import (
    Event,
    ThreadContext,
    all_to_all_lazy,
    current_stream,
    initialize,
    is_waited,
    sync_hook,
    use_stream,
)
from hp_platform._internals import is_multithreading_enabled
from hp_platform.launch import schedule_as_batch
from hp_platform.testing import run_distributed, run_in_threads

T = TypeVar("T")
TASKS = Path("/proc/self/task")  # the threads of this process


def _in_thread(fn: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def _state() -> tuple[bool, bool, bool, torch.dtype, bool]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        is_multithreading_enabled(),
    )


def _threads_of_a_product_in_a_helper() -> int:
    """How many threads the system sees more after a helper's product than in it alone."""
    context, x = ThreadContext.capture(), torch.ones(512, 512)
    x @ x

    def helper() -> int:
        before = len(list(TASKS.iterdir()))
        with context.apply():
            x @ x
        return len(list(TASKS.iterdir())) - before

    return _in_thread(helper)


@pytest.mark.skipif(not TASKS.exists(), reason="needs Linux")
def test_a_helper_thread_computes_in_as_many_threads_as_its_starter() -> None:
    # OpenMP would give a new thread as many as there are cores.
    assert run_distributed(_threads_of_a_product_in_a_helper, world_size=1) == [0]


def test_a_helper_thread_takes_over_the_state_of_its_starter() -> None:
    default = _state()
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.float16),
        torch.autograd.set_multithreading_enabled(False),
    ):
        expected = _state()
        context = ThreadContext.capture()

    def helper() -> tuple[object, object]:
        with context.apply():
            inside = _state()
        return inside, _state()

    assert expected == (False, False, True, torch.float16, False)
    assert _in_thread(helper) == (expected, default)


def test_inference_mode_is_taken_over() -> None:
    with torch.inference_mode():
        context = ThreadContext.capture()

    def helper() -> bool:
        with context.apply():
            return torch.ones(1).is_inference()

    assert _in_thread(helper)


def test_state_is_restored_after_an_exception() -> None:
    with torch.no_grad():
        context = ThreadContext.capture()
    with pytest.raises(ZeroDivisionError), context.apply():
        raise ZeroDivisionError
    assert torch.is_grad_enabled()


def test_streams_and_events_are_null_on_a_cpu() -> None:
    device = torch.device("cpu")
    stream = current_stream(device)
    assert stream is None
    event = Event(device)
    with use_stream(stream):
        event.record(stream)
    event.wait(stream)
    event.synchronize()
    assert event.query()


def test_hooks_are_called_once_per_direction_in_order() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = sync_hook(x * 2, forward=lambda: order.append("a"), backward=lambda: order.append("A"))
    z = sync_hook(y * 3, forward=lambda: order.append("b"), backward=lambda: order.append("B"))
    z.sum().backward()
    assert order == ["a", "b", "B", "A"]
    assert torch.equal(x.grad, torch.full((2,), 6.0))  # type: ignore[arg-type]


def test_without_a_gradient_only_the_forward_hook_is_called() -> None:
    order: list[str] = []
    y = sync_hook(
        torch.ones(2), forward=lambda: order.append("f"), backward=lambda: order.append("b")
    )
    assert not y.requires_grad
    assert order == ["f"]


def test_a_hook_does_not_wait_for_a_tensor_in_flight() -> None:
    def rank_main(group: ProcessGroup) -> dict[str, bool]:
        seen: dict[str, bool] = {}
        x = torch.ones(4, requires_grad=True)
        h = x * 2
        h.register_hook(lambda grad: seen.update(backward=is_waited(grad)))
        y = sync_hook(all_to_all_lazy(sync_hook(h), group=group))
        seen["forward"] = is_waited(y)
        y.sum().backward()
        return seen

    expected = {"forward": False, "backward": False}
    assert run_in_threads(rank_main, world_size=2) == [expected] * 2


def test_an_exception_in_a_hook_reaches_the_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sync_hook(torch.ones(1), forward=fail)
    y = sync_hook(torch.ones(1, requires_grad=True), backward=fail)
    with pytest.raises(ZeroDivisionError):
        y.backward()


# The compiler looks at `grad` of the tensor in between and means to hide the warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_hook_in_a_compiled_region_is_called_in_every_pass() -> None:
    calls: list[str] = []

    def function(x: Tensor) -> Tensor:
        y = sync_hook(x * 2, forward=lambda: calls.append("f"), backward=lambda: calls.append("b"))
        return y * 3

    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 6.0))  # type: ignore[arg-type]
    assert calls == ["f", "b"] * 2


def _policies() -> set[int]:
    return {os.sched_getscheduler(int(task.name)) for task in TASKS.iterdir()}


def _policies_of_a_rank() -> tuple[set[int], set[int], int]:
    before = _policies()
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    initialize(device_type="cpu")  # the default group and its threads exist

    def idle() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        schedule_as_batch()
        return os.sched_getscheduler(0)

    return before, _policies(), _in_thread(idle)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no such policy on this system")
def test_threads_of_ranks_take_no_core_by_waking_up_unless_somebody_says_otherwise() -> None:
    batch = {os.SCHED_BATCH}
    found = run_distributed(_policies_of_a_rank, world_size=2)
    assert found == [(batch, batch, os.SCHED_IDLE)] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no such policy on this system")
def test_a_sandbox_that_allows_no_other_policy_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*given: object) -> None:
        asked.append(given)
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda _thread: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    schedule_as_batch()
    assert asked
