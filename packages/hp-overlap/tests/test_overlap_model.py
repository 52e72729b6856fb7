"""Every interleaving of two chunks on the shipped state machine, and its launch order."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import pytest

from hp_overlap import coordinator
from hp_overlap.coordinator import OTHER, SECTIONS, Hook, Side, Turn

T = TypeVar("T")
# What a backward runs again, and when: nothing, each layer before its backward, all layers first,
# or each layer with the results of its exchanges saved (selective checkpointing).
Recompute = Literal["none", "layer", "chunk", "saved"]
SIDES: tuple[Side, Side] = ("forward", "backward")


class Step(NamedTuple):
    """Launch `launch`, or reach `hook` of `direction`, or raise."""

    launch: str = ""
    hook: Hook | None = None
    direction: Side = "forward"
    fails: bool = False


class State(NamedTuple):
    """Where both sides are: next step, blocked in a hook or at the start, ended; and the log."""

    at: tuple[int, int]
    waiting: tuple[bool, bool]
    turn: Turn
    log: tuple[str, ...] = ()


class Outcome(NamedTuple):
    logs: set[tuple[str, ...]]
    deadlocks: list[State]


def forward_layer(tag: str, layer: int, *, dense: bool) -> list[Step]:
    steps = [Step(f"{tag}attention{layer}")]
    if not dense:
        steps.append(Step(hook="N"))
    for hook, launch in (("A", "dispatch"), ("B", "experts"), ("C", "combine"), ("D", "")):
        if not dense:
            name: Hook = hook  # type: ignore[assignment]
            steps += [Step(hook=name), *([Step(f"{tag}{launch}{layer}")] if launch else [])]
    return steps


def forward_chunk(layers: int, dense: frozenset[int] = frozenset()) -> list[Step]:
    return [s for i in range(layers) for s in forward_layer("F.", i, dense=i in dense)]


def recomputed_layer(layer: int, recompute: Recompute, *, dense: bool) -> list[Step]:
    steps = forward_layer("B.again.", layer, dense=dense)
    return [s for s in steps if recompute != "saved" or not collectives((s.launch,))]


def backward_chunk(
    layers: int, dense: frozenset[int] = frozenset(), *, recompute: Recompute = "none"
) -> list[Step]:
    steps = [Step("B.head")]
    if recompute == "chunk":
        for i in range(layers):
            steps += recomputed_layer(i, recompute, dense=i in dense)
    for i in reversed(range(layers)):
        if recompute in ("layer", "saved"):
            steps += recomputed_layer(i, recompute, dense=i in dense)
        if i not in dense:
            for hook, section in SECTIONS["backward"].items():
                steps += [Step(hook=hook, direction="backward")]
                steps += [Step(f"B.{section}{i}")] if section != "attention" else []
        steps.append(Step(f"B.attention{i}"))
    return steps


def put(pair: tuple[T, T], i: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if i == 0 else (pair[0], value)


def successors(
    state: State, programs: tuple[list[Step], list[Step]], interrupted: Side | None
) -> Iterator[State]:
    """All states one atomic action of either thread away, or one signal in a waiting thread."""
    for i, side in enumerate(SIDES):
        program, position, turn = programs[i], state.at[i], state.turn
        if position > len(program):
            continue
        moved = state._replace(waiting=put(state.waiting, i, False))
        on = moved._replace(at=put(state.at, i, position + 1))
        failed = moved._replace(
            at=put(state.at, i, len(program) + 1),
            turn=turn.left(side, failed=True),
            log=(*state.log, f"{side}!"),
        )
        if state.waiting[i]:
            if side == interrupted or turn.stops(side):
                yield failed
            if turn.ready(side) and not turn.stops(side) and turn.lent:
                assert side == "backward"
                yield state._replace(turn=turn.given_back(), log=(*state.log, "B.weights"))
            elif turn.ready(side) and not turn.stops(side):
                yield moved
            continue
        assert turn.holder == side or turn.stops(side), "both sides run"
        if position == len(program):
            yield on._replace(turn=turn.left(side, failed=False))
            continue
        step = program[position]
        if step.fails:
            yield failed
        elif step.hook is None:
            yield on._replace(log=(*state.log, step.launch))
        else:
            reached = turn.at_hook(side, step.direction, step.hook)
            yield on._replace(waiting=put(state.waiting, i, True), turn=reached)


def explore(forward: list[Step], backward: list[Step], interrupted: Side | None = None) -> Outcome:
    """Walk through every interleaving; the two threads start in any order."""
    programs = (forward, backward)
    start = State((0, 0), (True, True), Turn())
    seen, stack, outcome = {start}, [start], Outcome(set(), [])
    while stack:
        state = stack.pop()
        following = list(successors(state, programs, interrupted))
        if not following:
            if all(n > len(p) for n, p in zip(state.at, programs, strict=True)):
                outcome.logs.add(state.log)
            else:
                outcome.deadlocks.append(state)
        fresh = [s for s in following if s not in seen]
        seen.update(fresh)
        stack += fresh
    return outcome


def collectives(log: tuple[str, ...]) -> list[str]:
    return [name for name in log if "dispatch" in name or "combine" in name]


def masks(layers: int) -> list[frozenset[int]]:
    return [frozenset(i for i in range(layers) if bits >> i & 1) for bits in range(1 << layers)]


@pytest.mark.parametrize(("forward", "backward"), list(product(range(5), range(5))))
def test_every_pair_of_chunks_has_one_launch_order_and_no_deadlock(
    forward: int, backward: int
) -> None:
    cases = product(masks(forward), masks(backward), get_args(Recompute))
    for dense_f, dense_b, recompute in cases:
        chunks = (
            forward_chunk(forward, dense_f),
            backward_chunk(backward, dense_b, recompute=recompute),
        )
        outcome = explore(*chunks)
        assert not outcome.deadlocks, (dense_f, dense_b, recompute)
        assert len(outcome.logs) == 1, (dense_f, dense_b, recompute)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_collectives_alternate_in_the_documented_order(layers: int) -> None:
    (log,) = explore(forward_chunk(layers), backward_chunk(layers)).logs
    expected = []
    for i in range(layers):
        j = layers - 1 - i
        expected += [f"B.combine{j}", f"F.dispatch{i}", f"B.dispatch{j}", f"F.combine{i}"]
    assert collectives(log) == expected


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_what_follows_a_collective_is_the_other_side_s_compute(layers: int) -> None:
    (log,) = explore(forward_chunk(layers), backward_chunk(layers)).logs
    for launched, following in pairwise(log):
        if collectives((launched,)):
            assert launched[0] != following[0]
            assert not collectives((following,))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_weight_gradients_come_between_what_launches_counts_and_what_reads_them(
    layers: int,
) -> None:
    (log,) = explore(forward_chunk(layers), backward_chunk(layers)).logs
    for launched, following in pairwise(log):
        assert (following == "B.weights") == launched.startswith("F.attention")
    for launched, following in pairwise([name for name in log if name != "B.weights"]):
        assert (launched.startswith("F.attention")) == following.startswith("F.dispatch")
    assert log.count("B.weights") == layers


def test_a_forward_alone_lends_nothing() -> None:
    (log,) = explore(forward_chunk(3), []).logs
    assert "B.weights" not in log


def test_a_recomputed_layer_is_one_uninterrupted_run_of_launches() -> None:
    (log,) = explore(forward_chunk(3), backward_chunk(3, recompute="layer")).logs
    again = ["attention", "dispatch", "experts", "combine"]
    for layer in range(3):
        first = log.index(f"B.again.attention{layer}")
        assert list(log[first : first + 4]) == [f"B.again.{name}{layer}" for name in again]


@pytest.mark.parametrize("failing", SIDES)
def test_a_failure_anywhere_ends_both_sides_within_one_section(failing: Side) -> None:
    chunks = {"forward": forward_chunk(2), "backward": backward_chunk(2, recompute="layer")}
    for position in range(len(chunks[failing]) + 1):
        broken = dict(chunks)
        broken[failing] = [*chunks[failing][:position], Step(fails=True)]
        outcome = explore(broken["forward"], broken["backward"])
        assert not outcome.deadlocks
        (log,) = outcome.logs
        # The other one waits in a hook when it happens, or has ended: it launches nothing more.
        survivors = [name for name in log[log.index(f"{failing}!") :] if not name.endswith("!")]
        assert survivors == []
        assert set(log) >= {f"{failing}!"}


@pytest.mark.parametrize("interrupted", SIDES)
def test_a_signal_in_a_waiting_side_lets_the_other_finish_its_section_only(
    interrupted: Side,
) -> None:
    outcome = explore(forward_chunk(2), backward_chunk(2), interrupted)
    assert not outcome.deadlocks
    for log in outcome.logs:
        if f"{interrupted}!" in log:
            after = log[log.index(f"{interrupted}!") + 1 :]
            assert sum(not name.endswith("!") for name in after) <= 1


def test_the_coordinator_needs_no_torch() -> None:
    folder = Path(coordinator.__file__).parent
    code = (
        "import sys, types\n"
        "package = types.ModuleType('hp_overlap')\n"  # its __init__ imports torch
        f"package.__path__ = [{str(folder)!r}]\n"
        "sys.modules['hp_overlap'] = package\n"
        "from hp_overlap.coordinator import HookCoordinator\n"
        "assert HookCoordinator().is_enabled() is False\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_coordinator_fits_in_a_hundred_lines() -> None:
    assert len(inspect.getsource(coordinator.HookCoordinator).splitlines()) < 100


def test_the_two_sides_are_each_other_s_other() -> None:
    assert all(OTHER[OTHER[side]] == side for side in SIDES)
