"""`CommComputeOverlap.run` with threads and no ranks: order, failures, time-outs, signals."""

import contextlib
import copy
import gc
import logging
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor

from hp_overlap import (
    CommComputeOverlap,
    HookCoordinator,
    OverlapAbortedError,
    OverlapTimeoutError,
    TraceEntry,
)
from hp_overlap.coordinator import SECTIONS, Hook, Side
from hp_platform import ThreadContext

setting: ContextVar[str] = ContextVar("setting", default="unset")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def chunk(
    coordinator: HookCoordinator,
    side: Side,
    layers: int,
    *,
    visit: Callable[[Hook | None], None] = lambda _: None,
) -> Callable[[], None]:
    """Pass all hooks of a chunk; `visit` is called in each section with the hook before it."""

    def run() -> None:
        visit(None)
        for _ in range(layers):
            for name in SECTIONS[side]:
                coordinator.hook(side, name)
                visit(name)

    return run


def fail_at(name: Hook | None, error: BaseException) -> Callable[[Hook | None], None]:
    def visit(hook: Hook | None) -> None:
        if hook == name:
            raise error

    return visit


def sections(trace: list[TraceEntry]) -> list[tuple[Side, str]]:
    return [(entry.side, entry.section) for entry in trace]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_trace_is_the_documented_pairing(layers: int) -> None:
    overlap = CommComputeOverlap()
    co = overlap.coordinator
    overlap.run(chunk(co, "forward", layers), chunk(co, "backward", layers))
    steady: list[tuple[Side, str]] = [
        ("backward", "combine"),
        ("backward", "weight gradients"),
        ("forward", "counts"),
        ("forward", "dispatch"),
        ("backward", "experts"),
        ("backward", "dispatch"),
        ("forward", "experts"),
        ("forward", "combine"),
        ("backward", "attention"),
    ]
    boundary: list[tuple[Side, str]] = [("backward", "combine"), ("forward", "attention")]
    expected = list(steady)
    for _ in range(layers - 1):
        expected += [*boundary, *steady[1:]]
    assert sections(overlap.trace) == [*expected, ("forward", "attention")]


@pytest.mark.parametrize(("forward", "backward"), [(0, 3), (3, 0), (1, 4), (4, 1), (0, 0)])
def test_unequal_chunks_end(forward: int, backward: int) -> None:
    overlap = CommComputeOverlap()
    co = overlap.coordinator
    overlap.run(chunk(co, "forward", forward), chunk(co, "backward", backward))
    sides = [entry.side for entry in overlap.trace]
    lent = sum(entry.section == "weight gradients" for entry in overlap.trace)
    assert (sides.count("forward"), sides.count("backward")) == (5 * forward, 4 * backward + lent)
    assert min(forward, backward) <= lent <= forward
    assert not co.is_enabled()


def test_hooks_are_no_ops_while_disabled() -> None:
    coordinator = HookCoordinator()
    coordinator.hook("forward", "B")
    assert coordinator.trace == []


def test_only_one_side_runs_at_a_time_and_random_failures_never_hang() -> None:
    for seed in range(3000):
        orders = {_random_pair(seed) for _ in range(2 if seed % 10 == 0 else 1)}
        assert len(orders) == 1


def _random_pair(seed: int) -> tuple[object, ...]:
    draw = random.Random(seed)
    overlap = CommComputeOverlap(HookCoordinator(timeout=20))
    inside: list[Side] = []
    order: list[object] = []

    def visitor(side: Side, fails_at: int | None) -> Callable[[Hook | None], None]:
        count = iter(range(10_000))

        def visit(name: Hook | None) -> None:
            assert not inside
            inside.append(side)
            if draw.random() < 0.02:
                time.sleep(0.0005)
            order.append((side, name))
            inside.pop()
            if next(count) == fails_at:
                raise ValueError(side)

        return visit

    def program(side: Side) -> Callable[[], None]:
        fails_at = draw.choice([None, None, draw.randint(0, 12)])
        layers = draw.randint(0, 5)
        return chunk(overlap.coordinator, side, layers, visit=visitor(side, fails_at))

    try:
        overlap.run(program("forward"), program("backward"))
    except ValueError as error:
        order.append(str(error))
    return tuple(order)


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("hook", [None, "A", "B", "C", "D"])
def test_root_error_is_raised_with_the_other_side_s_end_as_a_note(
    failing: Side, hook: Hook | None
) -> None:
    overlap = CommComputeOverlap()
    root = KeyError("lost expert")
    visits = {failing: fail_at(hook, root)}
    programs = {
        side: chunk(overlap.coordinator, side, 2, visit=visits.get(side, lambda _: None))
        for side in SECTIONS
    }
    with pytest.raises(KeyError, match="lost expert") as caught:
        overlap.run(programs["forward"], programs["backward"])
    assert caught.value is root
    (note,) = root.__notes__
    other = "backward" if failing == "forward" else "forward"
    assert note.startswith(f"{other} side of the overlapped pair ended with: ")
    assert f"{failing} side failed" in note
    assert not overlap.coordinator.is_enabled()


def test_a_pair_runs_again_after_a_failure() -> None:
    overlap = CommComputeOverlap()
    co = overlap.coordinator
    with pytest.raises(ValueError, match="first"):
        overlap.run(chunk(co, "forward", 2, visit=fail_at("C", ValueError("first"))), lambda: None)
    overlap.run(chunk(co, "forward", 2), chunk(co, "backward", 2))
    assert len(overlap.trace) == 2 * (5 + 4) + 2  # the turn is lent once for each layer


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_that_was_handled_keeps_nothing_alive(failing: Side) -> None:
    overlap = CommComputeOverlap()
    kept: list[weakref.ref[Tensor]] = []

    def fail() -> None:
        held = torch.ones(3)
        kept.append(weakref.ref(held))
        raise ValueError("lost")

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            if failing == "forward":
                overlap.run(fail, chunk(overlap.coordinator, "backward", 2))
            else:
                overlap.run(chunk(overlap.coordinator, "forward", 2), fail)
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()


def test_a_long_pair_is_not_a_silent_one() -> None:
    """The time-out is between hooks: a side that recomputes several layers keeps passing them."""
    overlap = CommComputeOverlap(HookCoordinator(timeout=0.4))
    co = overlap.coordinator

    def backward() -> None:
        for _ in range(6):
            time.sleep(0.15)
            co.hook("forward", "A")
        chunk(co, "backward", 1)()

    overlap.run(chunk(co, "forward", 1), backward)
    assert [entry.section for entry in overlap.trace[:6]] == ["recompute"] * 6


def test_an_error_after_the_other_side_s_end_has_no_note() -> None:
    overlap = CommComputeOverlap()
    with pytest.raises(ValueError, match="alone") as caught:
        overlap.run(
            lambda: None,
            chunk(overlap.coordinator, "backward", 1, visit=fail_at("A", ValueError("alone"))),
        )
    assert not hasattr(caught.value, "__notes__")


def test_system_exit_in_the_helper_reaches_the_caller() -> None:
    overlap = CommComputeOverlap()
    co = overlap.coordinator
    with pytest.raises(SystemExit):
        overlap.run(
            chunk(co, "forward", 2), chunk(co, "backward", 2, visit=fail_at("B", SystemExit(3)))
        )


def test_a_forward_that_never_arrives_is_logged_at_once_and_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    overlap = CommComputeOverlap(HookCoordinator(timeout=0.5))
    co = overlap.coordinator
    logged_in_time: list[bool] = []

    def stuck(name: Hook | None) -> None:
        if name == "B":
            time.sleep(1.5)
            logged_in_time.append(bool(caplog.records))

    with caplog.at_level(logging.ERROR), pytest.raises(OverlapTimeoutError) as caught:
        overlap.run(chunk(co, "forward", 2, visit=stuck), chunk(co, "backward", 2))
    assert logged_in_time == [True]
    assert str(caught.value) == (
        "backward side at hook A: no turn within timeout (0.5 s), "
        "forward side still in section 'experts' after hook B"
    )
    assert "forward side of the overlapped pair ended with" in caught.value.__notes__[0]


def test_a_backward_that_never_arrives_is_reported_and_left_behind() -> None:
    overlap = CommComputeOverlap(HookCoordinator(timeout=0.5))
    co = overlap.coordinator
    release = threading.Event()
    ends: list[str] = []

    def stuck(name: Hook | None) -> None:
        if name == "B":
            release.wait(20)

    def backward() -> None:
        try:
            chunk(co, "backward", 2, visit=stuck)()
        except OverlapAbortedError as error:
            ends.append(str(error))
            raise

    with pytest.raises(OverlapTimeoutError, match="forward side at hook B") as caught:
        overlap.run(chunk(co, "forward", 2), backward)
    assert "thread is left in section 'dispatch' after hook B" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="no live side"):
        overlap.run(lambda: None, lambda: None)
    release.set()
    (helper,) = [t for t in threading.enumerate() if t.name == "hp-overlap-backward"]
    helper.join(20)
    assert ends == ["backward side stopped at hook A: forward side failed"]
    co.timeout = 20
    overlap.run(chunk(co, "forward", 1), chunk(co, "backward", 1))


def test_a_backward_that_hangs_alone_is_reported() -> None:
    overlap = CommComputeOverlap(HookCoordinator(timeout=0.5))
    release = threading.Event()

    def stuck(_: Hook | None) -> None:
        release.wait(20)

    backward = chunk(overlap.coordinator, "backward", 1, visit=stuck)
    with pytest.raises(OverlapTimeoutError, match="forward side at its start: no turn"):
        overlap.run(lambda: None, backward)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "hp-overlap-backward":
            thread.join(20)


def test_keyboard_interrupt_stops_both_sides() -> None:
    overlap = CommComputeOverlap()
    co = overlap.coordinator
    passed: list[Hook | None] = []

    def interrupt(name: Hook | None) -> None:
        passed.append(name)
        if name == "B":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the forward side, waiting in its hook, gets the signal

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        overlap.run(chunk(co, "forward", 3), chunk(co, "backward", 3, visit=interrupt))
    assert time.monotonic() - start < 60  # no turn was waited for in vain; 0.3 s on a quiet machine
    assert passed == [None, "D", "C", "B"]
    assert "backward side stopped at hook A" in caught.value.__notes__[0]


def test_keyboard_interrupt_works_after_the_forward_has_ended() -> None:
    overlap = CommComputeOverlap()

    def interrupt(name: Hook | None) -> None:
        if name == "C":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        overlap.run(lambda: None, chunk(overlap.coordinator, "backward", 3, visit=interrupt))


def test_the_helper_inherits_the_caller_s_settings() -> None:
    seen: dict[str, object] = {}

    def look() -> None:
        seen["variable"] = setting.get()
        seen["grad"] = torch.is_grad_enabled()
        seen["autocast"] = torch.is_autocast_enabled("cpu")
        seen["multithreading"] = ThreadContext.capture().multithreading

    token = setting.set("mine")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        CommComputeOverlap().run(lambda: None, look)
    setting.reset(token)
    expected = {"variable": "mine", "grad": False, "autocast": True, "multithreading": False}
    assert seen == expected


def test_wrapped_functions_keep_name_signature_and_the_rest_of_a_tuple() -> None:
    overlap = CommComputeOverlap()

    def dispatch(x: Tensor, scale: float, *, bias: float = 0.0) -> tuple[Tensor, str]:
        return x * scale + bias, "counts"

    wrapped = overlap.wrap_dispatch(dispatch)
    y, counts = wrapped(torch.ones(2), 3.0, bias=1.0)
    assert wrapped.__name__ == "dispatch"
    assert (y.tolist(), counts) == ([4.0, 4.0], "counts")


def test_a_hooked_graph_has_the_same_gradient() -> None:
    overlap = CommComputeOverlap()
    dispatch, combine = overlap.wrap_dispatch(torch.sin), overlap.wrap_combine(torch.cos, True)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    (hooked,) = torch.autograd.grad(combine(dispatch(x)).sum(), x)
    (plain,) = torch.autograd.grad(torch.cos(torch.sin(x)).sum(), x)
    assert torch.equal(hooked, plain)


class Shift:
    """Adds on the way there and subtracts on the way back."""

    amount = 2.0

    def launch_dispatch(self, x: Tensor, state: str) -> tuple[Tensor, str]:
        return x + self.amount, state + " sent"

    def launch_combine(self, y: Tensor, state: str) -> Tensor:
        assert state.endswith("sent")
        return y - self.amount


def test_a_wrapped_dispatcher_passes_all_four_hooks_and_is_otherwise_the_same() -> None:
    overlap = CommComputeOverlap()
    shift = overlap.wrap_dispatcher(Shift())

    def forward() -> None:
        y, state = shift.launch_dispatch(torch.zeros(2), "a")
        assert shift.launch_combine(y, state).tolist() == [0.0, 0.0]

    overlap.run(forward, lambda: None)
    assert [entry.hook for entry in overlap.trace] == ["A", "B", "C", "D"]
    assert shift.amount == 2.0
    assert copy.deepcopy(shift) is shift
    assert copy.copy(shift).amount == 2.0
    with pytest.raises(AttributeError, match="missing"):
        shift.missing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("bad", [lambda _: "text", lambda x: (1, x)])
def test_a_wrapped_function_must_return_a_tensor_first(bad: Callable[[Tensor], object]) -> None:
    with pytest.raises(TypeError, match="must be a tensor"):
        CommComputeOverlap().wrap_dispatch(bad)(torch.ones(1))


def test_a_wrapped_function_needs_a_positional_tensor() -> None:
    with pytest.raises(TypeError, match="first positional argument"):
        CommComputeOverlap().wrap_dispatch(lambda *, x: x)(x=torch.ones(1))


def test_strict_refuses_a_waited_result_while_a_pair_runs() -> None:
    overlap = CommComputeOverlap(strict=True)
    dispatch = overlap.wrap_dispatch(torch.sin)
    dispatch(torch.ones(2))  # alone, there is nothing to hide
    with pytest.raises(ValueError, match=r"result of .*sin .* must be unwaited"):
        overlap.run(lambda: dispatch(torch.ones(2)), lambda: None)


def test_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"timeout \(0\) must be > 0"):
        HookCoordinator(timeout=0)
