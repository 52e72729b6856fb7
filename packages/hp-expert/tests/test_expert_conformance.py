"""The suite that proves a dispatcher: it passes those of this package and no wrong one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_expert import (
    AllToAllDispatcher,
    BoundedAllToAllDispatcher,
    ExpertBatch,
    LocalDispatcher,
)
from hp_expert.testing import (
    Case,
    MakeDispatcher,
    check_dispatcher,
    check_errors,
    check_interleaving,
    check_parity,
    check_recompute,
    check_reruns,
    check_threads,
)
from hp_platform import new_group
from hp_platform.testing import RankError, run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(group: dist.ProcessGroup, num_experts: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(group, num_experts, deduplicate=False)


def deduplicated(group: dist.ProcessGroup, num_experts: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(group, num_experts, deduplicate=True)


def bounded(group: dist.ProcessGroup, num_experts: int) -> BoundedAllToAllDispatcher:
    return BoundedAllToAllDispatcher(group, num_experts, 60, "cpu", control=group)


def local(group: dist.ProcessGroup, num_experts: int) -> LocalDispatcher:
    del group
    return LocalDispatcher(num_experts)


CASES: dict[str, tuple[MakeDispatcher, Case]] = {
    "plain": (plain, Case()),
    "deduplicated": (deduplicated, Case(top_k=4)),
    "bounded": (bounded, Case(late_check=BoundedAllToAllDispatcher.check)),
}


def all_checks(name: str) -> None:
    world = dist.group.WORLD
    assert world is not None
    second_group = new_group([list(range(world.size()))], name="second")
    make, case = CASES[name]
    check_dispatcher(make, world, case, second_group=second_group)


@pytest.mark.sample("plain-2", "deduplicated-2", "bounded-4")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_dispatchers_of_this_package_pass(name: str, world_size: int) -> None:
    run_distributed(all_checks, name, world_size=world_size)


@pytest.mark.parametrize(
    ("make", "case"), [(local, Case()), (local, Case(top_k=8)), *CASES.values()]
)
def test_dispatchers_pass_on_one_rank(make: MakeDispatcher, case: Case) -> None:
    run_in_threads(lambda group: check_dispatcher(make, group, case), world_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [plain, deduplicated])
def test_lower_precision_passes_with_a_bound_of_its_own(
    make: MakeDispatcher, dtype: torch.dtype
) -> None:
    case = Case(dtype=dtype, top_k=4)
    run_in_threads(lambda group: check_parity(make, group, case), world_size=2)


@dataclass
class Wrapped:
    """Right; the others are this with one thing wrong."""

    inner: Any

    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        return self.inner.prepare(x, experts, weights)

    def launch_dispatch(self, rows: Tensor, state: Any) -> Any:
        return self.inner.launch_dispatch(rows, state)

    def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
        batch: ExpertBatch = self.inner.finish_dispatch(rows, state)
        return batch

    def launch_combine(self, y: Tensor, state: Any) -> Tensor:
        returned: Tensor = self.inner.launch_combine(y, state)
        return returned

    def finish_combine(self, rows: Tensor, state: Any) -> Tensor:
        y: Tensor = self.inner.finish_combine(rows, state)
        return y


class StateOnItself(Wrapped):
    """Remembers the last batch."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.last: Any = SimpleNamespace()

    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        rows, self.last.state = self.inner.prepare(x, experts, weights)
        return rows, None

    def launch_dispatch(self, rows: Tensor, state: Any) -> Any:
        del state
        rows, self.last.state = self.inner.launch_dispatch(rows, self.last.state)
        return rows, None

    def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
        del state
        return super().finish_dispatch(rows, self.last.state)

    def launch_combine(self, y: Tensor, state: Any) -> Tensor:
        del state
        return super().launch_combine(y, self.last.state)

    def finish_combine(self, rows: Tensor, state: Any) -> Tensor:
        del state
        return super().finish_combine(rows, self.last.state)


class StateOfTheThread(StateOnItself):
    """Remembers the last batch of each thread."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.last = threading.local()


class LastPositionFirst(Wrapped):
    """Off by one in the order."""

    def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
        batch = super().finish_dispatch(rows, state)
        return batch._replace(order=batch.order.roll(1))


class ForgottenPosition(Wrapped):
    """Off by one in the counts on the host."""

    def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
        batch = super().finish_dispatch(rows, state)
        counts = list(batch.counts or ())
        if counts[0]:
            counts[0] -= 1
        return batch._replace(counts=tuple(counts))


class NoWeightGradient(Wrapped):
    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        return super().prepare(x, experts, None if weights is None else weights.detach())


class NoTokenGradient(Wrapped):
    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        return super().prepare(x.detach(), experts, weights)


class DroppedSlotsToTheFirstExpert(Wrapped):
    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        return super().prepare(x, experts.where(experts != -1, 0), weights)


class LosesAToken(Wrapped):
    """One output too few, on one rank."""

    def finish_combine(self, rows: Tensor, state: Any) -> Tensor:
        y = super().finish_combine(rows, state)
        return y[1:] if self.inner.group.rank() else y


class AlmostTheSameAgain(Wrapped):
    """Has an age."""

    age = 0

    def finish_combine(self, rows: Tensor, state: Any) -> Tensor:
        self.age += 1
        return super().finish_combine(rows, state) * (1 + self.age * 1e-15)


class TwoBuffers(Wrapped):
    """Every third batch overwrites what the first of three returned."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.buffers: list[Any] = [None, None]

    def launch_dispatch(self, rows: Tensor, state: Any) -> Any:
        rows, state = super().launch_dispatch(rows, state)
        self.buffers = [self.buffers[1], (rows, state)]
        return rows, state

    def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
        if all(rows is not kept[0] for kept in self.buffers if kept is not None):
            rows = rows * 0
        return super().finish_dispatch(rows, state)


class EverythingIsFine(Wrapped):
    """Takes what it can of wrong experts."""

    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        return super().prepare(x, experts.clamp(-1, self.inner.num_experts - 1), weights)


class RaisesAlone(Wrapped):
    """Asks nobody else."""

    def prepare(self, x: Tensor, experts: Tensor, weights: Tensor | None = None) -> Any:
        if experts.numel() and int(experts.max()) >= self.inner.num_experts:
            experts = experts.clamp_max(self.inner.num_experts - 1)
            super().prepare(x, experts, weights)
            raise ValueError("no such expert")
        return super().prepare(x, experts, weights)


WRONG: list[tuple[type[Wrapped], Callable[..., None], str]] = [
    (LastPositionFirst, check_parity, "random, with routing weights: .*y"),
    (ForgottenPosition, check_parity, r"counts \(.*\) must equal num_tokens_per_expert"),
    (NoWeightGradient, check_parity, "dweights"),
    (NoTokenGradient, check_parity, "dx"),
    (DroppedSlotsToTheFirstExpert, check_parity, "some slots dropped.*must be exactly zero"),
    (LosesAToken, check_parity, r"AssertionError: rank \d, random, with routing weights: "),
    (AlmostTheSameAgain, check_reruns, "a rerun: y of batch 0 has other bits"),
    (StateOnItself, check_interleaving, "must equal rows of x|has other bits"),
    (TwoBuffers, check_interleaving, "interleaved batches: y of batch 0 has other bits"),
    (StateOnItself, check_threads, "must equal rows of x|has other bits"),
    (StateOfTheThread, check_threads, "has no attribute 'state'"),
    (EverythingIsFine, check_errors, "an expert that does not exist: nothing was raised"),
    (RaisesAlone, check_errors, r"ranks that raised \(\[0, 1\]\) must be all or none"),
]


@pytest.mark.parametrize(("wrong", "check", "message"), WRONG)
def test_a_wrong_dispatcher_fails(
    wrong: type[Wrapped], check: Callable[..., None], message: str
) -> None:
    def make(group: dist.ProcessGroup, num_experts: int) -> Any:
        return wrong(plain(group, num_experts))

    with pytest.raises(RankError, match=f"(?s){message}"):
        run_in_threads(lambda group: check(make, group, Case()), world_size=2, timeout=5)


def test_a_batch_recomputed_differently_fails() -> None:
    """A dispatcher whose second call of a batch differs from the first: recompute meets it."""

    class Alternating(Wrapped):
        calls = 0

        def finish_dispatch(self, rows: Tensor, state: Any) -> ExpertBatch:
            self.calls += 1
            batch = super().finish_dispatch(rows, state)
            recomputed = torch.is_grad_enabled() and self.calls > 4
            return batch._replace(rows=batch.rows * 2) if recomputed else batch

    def make(group: dist.ProcessGroup, num_experts: int) -> Any:
        return Alternating(plain(group, num_experts))

    with pytest.raises(RankError, match=r"recompute, use_reentrant=False: .* has other bits"):
        run_in_threads(lambda group: check_recompute(make, group), world_size=2, timeout=5)


def test_what_is_right_passes_though_it_is_wrapped() -> None:
    def make(group: dist.ProcessGroup, num_experts: int) -> Any:
        return Wrapped(plain(group, num_experts))

    run_in_threads(lambda group: check_dispatcher(make, group), world_size=2, timeout=20)


def test_the_default_case_is_changed_by_name() -> None:
    case = replace(Case(), dtype=torch.float32)
    assert case.largest_error == 16 * torch.finfo(torch.float32).eps
    assert Case(bound=0.5).largest_error == 0.5
