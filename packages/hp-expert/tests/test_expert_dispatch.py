"""The calls of a dispatcher: what they cost, when they wait, and how they fail."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_expert import (
    AllToAllDispatcher,
    BoundedAllToAllDispatcher,
    Dispatcher,
    ExpertParallel,
    GroupedExperts,
    LocalDispatcher,
)
from hp_expert.dispatch.exchange_plan import Header, raise_on_all_ranks
from hp_platform import PeerError, is_waited, new_group
from hp_platform.testing import run_distributed, run_in_threads, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, DIM, HIDDEN = 8, 4, 6


def tokens(rank: int, *, count: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, DIM, generator=generator, dtype=dtype).requires_grad_()


def choices(rank: int, *, count: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.rand(count, EXPERTS, generator=generator).argsort(-1)[:, :2]


def fixed_experts() -> GroupedExperts:
    experts = GroupedExperts(EXPERTS, DIM, HIDDEN, dtype=torch.float64)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in experts.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn)
    return experts


def test_rows_arrive_at_their_experts_and_return_to_their_tokens() -> None:
    """Experts that multiply by their own index plus one, done by hand between the calls."""

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher, x, experts = (
            AllToAllDispatcher(group, EXPERTS),
            tokens(group.rank()),
            choices(0),
        )
        sent, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts))
        batch = dispatcher.finish_dispatch(sent, state)
        assert batch.counts is not None
        assert sum(batch.counts) == batch.rows.shape[0] == batch.order.numel()
        assert batch.num_tokens_per_expert.tolist() == list(batch.counts)
        out = torch.empty_like(batch.rows)
        for local, span in enumerate(batch.spans()):
            rows = batch.order[span]
            out[rows] = batch.rows[rows] * (group.rank() * 4 + local + 1)
        y = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
        assert torch.allclose(y, x * (experts + 1).sum(1, keepdim=True), rtol=1e-14)

    run_in_threads(rank_main, world_size=2)


@pytest.mark.parametrize("kind", ["local", "plain", "deduplicated", "bounded"])
def test_tokens_and_choices_of_one_rank_may_have_other_strides(kind: str) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        dispatchers: dict[str, Dispatcher[Any]] = {
            "local": LocalDispatcher(EXPERTS),
            "plain": AllToAllDispatcher(group, EXPERTS, deduplicate=False),
            "deduplicated": AllToAllDispatcher(group, EXPERTS, deduplicate=True),
            "bounded": BoundedAllToAllDispatcher(group, EXPERTS, 9 * 2, "cpu"),
        }
        dispatcher, rank = dispatchers[kind], group.rank()
        given, found = [tokens(rank).detach(), choices(rank), torch.rand(9, 2)], []
        for _ in range(2):
            sent, state = dispatcher.launch_dispatch(*dispatcher.prepare(*given))
            batch = dispatcher.finish_dispatch(sent, state)
            found.append((batch.rows, batch.order, batch.weights))
            given = [t.t().contiguous().t() for t in given] if rank == 0 else given
        assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))

    run_in_threads(rank_main, world_size=1 if kind == "local" else 2, timeout=10)


@pytest.mark.parametrize("kind", ["plain", "bounded"])
def test_new_tensors_are_made_where_the_tokens_are_or_on_the_host(kind: str) -> None:
    """Whatever `torch.set_default_device` says; what is made on the meta device has no values."""

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher: Dispatcher[Any] = AllToAllDispatcher(group, EXPERTS, deduplicate=False)
        if kind == "bounded":
            dispatcher = BoundedAllToAllDispatcher(group, EXPERTS, 18, "cpu", control=group)
        x, experts = tokens(group.rank()), choices(group.rank())
        with torch.device("meta"):
            sent, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts))
            rows = dispatcher.finish_dispatch(sent, state).rows
            y = dispatcher.finish_combine(dispatcher.launch_combine(rows, state), state)
            y.sum().backward()
            with pytest.raises((ValueError, PeerError), match="must equal rows"):
                dispatcher.prepare(x[: 9 - group.rank()], experts)
        assert torch.equal(y, 2 * x)  # two choices, and experts that return what they get
        assert x.grad is not None
        assert (x.grad == 2).all()

    run_in_threads(rank_main, world_size=2, timeout=10)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_launches_return_unwaited_in_both_directions(deduplicate: bool) -> None:
    def rank_main(group: dist.ProcessGroup) -> list[bool]:
        dispatcher = AllToAllDispatcher(group, EXPERTS, deduplicate)
        x = tokens(group.rank())
        weights, waited = torch.ones(9, 2, requires_grad=True), list[bool]()
        rows, state = dispatcher.prepare(x, choices(group.rank()), weights)
        # What dispatch's exchange brings back in backward.
        rows.register_hook(lambda grad: waited.append(is_waited(grad)))
        sent, state = dispatcher.launch_dispatch(rows, state)
        waited.append(is_waited(sent))
        batch = dispatcher.finish_dispatch(sent, state)
        waited.append(is_waited(batch.rows))
        back = dispatcher.launch_combine(batch.rows, state)
        waited.append(is_waited(back))
        y = dispatcher.finish_combine(back, state)
        waited.append(is_waited(y))
        # What combine's exchange brings back in backward.
        batch.rows.register_hook(lambda grad: waited.append(is_waited(grad)))
        y.sum().backward()
        return waited

    for waited in run_in_threads(rank_main, world_size=2):
        assert waited == [False, True, False, True, False, False]


def two_threads(concurrent: bool) -> list[Tensor]:
    """Two microbatches through one module, each with a group of its own."""
    world = dist.group.WORLD
    assert world is not None
    ranks = list(range(world.size()))
    groups = [new_group([ranks], name=name) for name in "ab"]
    experts = fixed_experts()
    ExpertParallel().apply(experts, world)
    xs = [tokens(2 * world.rank() + i, count=64) for i in range(2)]
    ys: list[Tensor | None] = [None, None]

    def microbatch(i: int) -> None:
        group = groups[i]
        assert group is not None
        dispatcher = AllToAllDispatcher(group, EXPERTS)
        for _ in range(5):
            rows, state = dispatcher.prepare(xs[i], choices(i, count=64))
            sent, state = dispatcher.launch_dispatch(rows, state)
            out = experts(dispatcher.finish_dispatch(sent, state))
            ys[i] = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
        y = ys[i]
        assert y is not None
        y.square().sum().backward()

    threads = [threading.Thread(target=microbatch, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        if not concurrent:
            thread.join()
    for thread in threads:
        thread.join()
    found = [*ys, *(x.grad for x in xs), *(p.grad for p in experts.parameters())]
    assert all(t is not None for t in found)
    return [t.detach() for t in found if t is not None]


def test_two_threads_do_not_disturb_each_other() -> None:
    together = run_distributed(two_threads, True, world_size=2)
    one_by_one = run_distributed(two_threads, False, world_size=2)
    for mine, theirs in zip(together, one_by_one, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _out_of_range(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = choices(rank)
    if rank == 1:
        experts[0, 0], experts[3, 1] = EXPERTS, -2
    return tokens(rank), experts, None


def _too_few_choices(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = choices(rank)
    return tokens(rank), experts[:-1] if rank == 1 else experts, None


def _float_choices(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = choices(rank)
    return tokens(rank), experts.double() if rank == 1 else experts, None


def _wrong_weights(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    return tokens(rank), choices(rank), torch.ones(9, 2 + (rank == 1)).double()


def _two_devices(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = choices(rank)
    return tokens(rank), experts.to("meta") if rank == 1 else experts, None


def _no_choices(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    return tokens(rank), choices(rank)[:, : 0 if rank == 1 else 2], None


def _whole_sequences(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    x = tokens(rank)
    return x.view(3, 3, DIM) if rank == 1 else x, choices(rank), None


BAD_ON_RANK_1 = [
    (_out_of_range, r"experts must be in \[0, num_experts \(8\)\), or -1 for none, but 2 are not"),
    (_too_few_choices, r"rows of experts \(8\) must equal rows of x \(9\)"),
    (_float_choices, r"experts \(\(9, 2\), torch.float64\) must be \[T, K\] and int64"),
    (_wrong_weights, r"weights \(\(9, 3\), torch.float64\) must have the shape of experts"),
    (_two_devices, r"devices of x, experts and weights .* must be the same"),
    (_no_choices, r"columns of experts \(0\) be at least 1"),
    (_whole_sequences, r"x \(\(3, 3, 4\), torch.float64\) must be \[T, D\]"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ON_RANK_1)
def test_wrong_input_of_one_rank_is_an_error_on_all_and_harms_nothing(
    make: Callable[[int], tuple[Tensor, Tensor, Tensor | None]], message: str
) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = AllToAllDispatcher(group, EXPERTS)
        kind: type[Exception] = ValueError if group.rank() == 1 else PeerError
        with pytest.raises(kind, match=message) as caught:
            dispatcher.prepare(*make(group.rank()))
        assert group.rank() == 1 or "rank 1 failed" in str(caught.value)
        prepared = dispatcher.prepare(tokens(group.rank()), choices(group.rank()))
        sent, state = dispatcher.launch_dispatch(*prepared)
        assert dispatcher.finish_dispatch(sent, state).rows.shape == (sum(state.counts or ()), DIM)

    run_in_threads(rank_main, world_size=4, timeout=20)


@pytest.mark.parametrize("make", [_out_of_range, _too_few_choices, _wrong_weights])
def test_one_process_refuses_the_same(
    make: Callable[[int], tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    message = next(text for function, text in BAD_ON_RANK_1 if function is make)
    with pytest.raises(ValueError, match=message):
        LocalDispatcher(EXPERTS).prepare(*make(1))


def test_ranks_that_disagree_about_rows_all_raise() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        x = tokens(0, dtype=torch.float32 if group.rank() else torch.float64)
        message = rf"rank {group.rank()}: x \(width 4, .*\) must equal that of rank"
        with pytest.raises(ValueError, match=message):
            AllToAllDispatcher(group, EXPERTS).prepare(x, choices(0))

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_counts_that_do_not_fit_on_one_rank_are_an_error_on_all() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = fixed_experts()
        ExpertParallel().apply(experts, group)
        counts = torch.tensor([1, 2, 0, 3, 0, 0, 1, 2 + group.rank()])
        kind, message = (ValueError, "must equal") if group.rank() else (PeerError, "rank 1")
        with pytest.raises(kind, match=message):
            experts(tokens(0), counts)

    run_in_threads(rank_main, world_size=2, timeout=20)


def test_sorted_rows_travel_by_their_counts() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = fixed_experts()
        counts = torch.tensor([1, 2, 0, 3, 0, 0, 1, 2]).roll(group.rank())
        expected = experts(tokens(group.rank()), counts)
        ExpertParallel().apply(experts, group)
        actual = experts(tokens(group.rank()), counts)
        assert torch.allclose(actual, expected, rtol=1e-12)

    run_in_threads(rank_main, world_size=4)


def rank_without_message(num_slices: int) -> int:
    """Return the rank in the error for a wrong last slice, where no message can be sent."""
    group = new_group([[0, 1], [2, 3]], name="ep")
    assert group is not None
    verdicts = [[0, 0]] * (2 * num_slices - 1) + [[-1, 0]]
    groups = [group] * (1 if num_slices == 1 else 2)
    with pytest.raises(PeerError, match="has wrong input") as caught:
        raise_on_all_ranks(None, Header(0), verdicts, groups=groups, device=torch.device("meta"))
    return caught.value.rank


def test_a_rank_with_wrong_input_is_named_by_its_place_among_all() -> None:
    for num_slices in (1, 2):
        assert run_distributed(rank_without_message, num_slices, world_size=4) == [1, 1, 3, 3]


def absent_rank() -> None:
    world = dist.group.WORLD
    assert world is not None
    group = new_group([[0, 1]], name="impatient", timeout=timedelta(seconds=1))
    assert group is not None
    if world.rank() == 0:
        with pytest.raises(RuntimeError):
            AllToAllDispatcher(group, EXPERTS).prepare(tokens(0), choices(0))
    dist.barrier()  # rank 1 does nothing until rank 0 has given up


def test_a_rank_that_never_comes_is_an_error_within_the_time_out() -> None:
    run_distributed(absent_rank, world_size=2)


def gone_after_the_dispatch() -> None:
    world = dist.group.WORLD
    assert world is not None
    group = new_group([[0, 1]], name="impatient", timeout=timedelta(seconds=1))
    assert group is not None
    dispatcher = AllToAllDispatcher(group, EXPERTS)
    sent, state = dispatcher.launch_dispatch(*dispatcher.prepare(tokens(0), choices(0)))
    rows = dispatcher.finish_dispatch(sent, state).rows
    if world.rank() == 0:
        with pytest.raises(RuntimeError):
            dispatcher.finish_combine(dispatcher.launch_combine(rows, state), state)
    dist.barrier()


def test_a_rank_that_is_gone_before_the_combine_is_an_error_within_the_time_out() -> None:
    run_distributed(gone_after_the_dispatch, world_size=2)


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_gradient_wanted_on_some_ranks_only_is_an_error_before_anybody_waits_for_it(
    of_weights: bool,
) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        wanted = group.rank() > 0
        x, weights = tokens(0).requires_grad_(of_weights or wanted), torch.rand(9, 2)
        weights.requires_grad_(of_weights and wanted)
        dispatcher = AllToAllDispatcher(group, EXPERTS)
        with pytest.raises(ValueError, match=r"(?=.*with gradient).*must equal that"):
            dispatcher.prepare(x, choices(0), weights)
        with torch.no_grad():
            dispatcher.prepare(x, choices(0), weights)

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_ranks_with_other_numbers_of_experts_all_raise() -> None:
    """Their counts differ in length, which must not be what they trip over."""

    def rank_main(group: dist.ProcessGroup) -> None:
        num_experts = 2000 if group.rank() == 3 else EXPERTS
        with pytest.raises(ValueError, match=r"2 of \d+ experts.*must equal that of rank"):
            AllToAllDispatcher(group, num_experts).prepare(tokens(0), choices(0))

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_ranks_must_divide_the_experts() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        message = r"num_experts \(8\) must be divisible by the size of the expert group \(3\)"
        with pytest.raises(ValueError, match=message):
            AllToAllDispatcher(group, EXPERTS)

    run_in_threads(rank_main, world_size=3)


def beside_rows() -> tuple[bool, list[str]]:
    """A layer that exchanges all but rows in a group of its own; and one of other ranks."""
    group = dist.group.WORLD
    assert group is not None
    small = dist.new_group()
    layers = []
    for dispatcher in (
        AllToAllDispatcher(group, EXPERTS, True),
        AllToAllDispatcher(group, EXPERTS, True, small),
    ):
        torch.manual_seed(group.rank())
        x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
        chosen = torch.randint(EXPERTS, (9, 2))
        sent: list[str] = []

        def note(name: str, args: tuple[Any, ...], _: object, sent: list[str] = sent) -> None:
            if name.startswith("_c10d_functional::all_to_all"):
                sent.append("small" if args[-1] == small.group_name else "rows")

        with watch_operators(note):
            rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, chosen, weights))
            batch = dispatcher.finish_dispatch(rows, state)
            assert batch.weights is not None
            y = batch.rows * batch.weights.sum(1, keepdim=True)
            y = dispatcher.finish_combine(dispatcher.launch_combine(y, state), state)
            y.square().sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        layers.append((sent, [y.detach(), x.grad, weights.grad]))
    same = all(map(torch.equal, layers[0][1], layers[1][1]))
    alone = dist.new_group([0])
    if group.rank() == 0:
        with pytest.raises(ValueError, match=r"ranks of small_group \(\[0\]\) must equal those of"):
            AllToAllDispatcher(group, EXPERTS, small_group=alone)
    return same, layers[1][0]


def test_all_but_rows_may_travel_in_a_group_of_its_own() -> None:
    for same, sent in run_distributed(beside_rows, world_size=2):
        assert same
        # Codes, weights, rows, outputs; the gradients of outputs, rows and weights.
        assert sent == ["small", "small", "rows", "rows", "rows", "rows", "small"]
