"""Checks that any dispatcher must pass, whatever moves its rows.

Wrong input of one rank, or input that differs between ranks, must be an error on all of them.

All ranks of a group call each function. It returns on all of them, or raises an `AssertionError` on
all of them that names the fault and the place; errors of the dispatcher are passed on. A dispatcher
that leaves ranks waiting for each other runs into the time-out of the group: give it a short one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from hp_expert.dispatch import AnyDispatcher, MakeDispatcher
from hp_expert.testing.problem import (
    ROUTINGS,
    Answer,
    Batch,
    Case,
    answer_of,
    apply_experts,
    batch_problems,
    expected,
    make_batch,
    make_matrices,
)
from hp_platform import ThreadContext, launch_all_to_all
from hp_platform.testing import compare

_DEFAULT = Case()


def check_parity(
    make: MakeDispatcher,
    group: ProcessGroup,
    case: Case = _DEFAULT,
    *,
    routings: Iterable[str] = tuple(ROUTINGS),
) -> None:
    """Check that outputs and all gradients are those of one process, for routings of `ROUTINGS`.

    With routing weights and without; outputs and gradients of dropped slots must be exactly zero.
    """
    dispatcher = make(group, case.num_experts)
    for routing in routings:
        for weighted in (True, False):
            batch = make_batch(case, group.rank(), group.size(), routing=routing, weighted=weighted)
            actual = run(dispatcher, batch, make_matrices(case, group.rank(), group.size()))
            answers = expected(case, group.size(), routing=routing, weighted=weighted)
            problems = _differences(actual, answers[group.rank()], case.largest_error)
            problems += _not_zero(actual, batch)
            where = f"{routing}, {'with' if weighted else 'without'} routing weights"
            agree_on(problems, group, where=where, device=case.device)
            check_late(case, dispatcher)


def check_reruns(make: MakeDispatcher, group: ProcessGroup, case: Case = _DEFAULT) -> None:
    """Check that a batch gives the same bits again, by the same dispatcher and by another."""
    dispatchers = [make(group, case.num_experts)] * 2 + [make(group, case.num_experts)]
    first, *others = [_sequentially(d, _batches(case, group, 1), case, group) for d in dispatchers]
    for other in others:
        _agree_on_bits(other, first, group, case, where="a rerun")


def check_interleaving(make: MakeDispatcher, group: ProcessGroup, case: Case = _DEFAULT) -> None:
    """Check that batches whose calls interleave have the bits of batches on their own.

    All are dispatched before the first is combined, and combined in another order; backwards run
    in both orders.
    """
    dispatcher = make(group, case.num_experts)
    alone = _sequentially(dispatcher, _batches(case, group, 3), case, group)
    for backward_order in ((0, 1, 2), (2, 1, 0)):
        batches, matrices = _batches(case, group, 3), _matrices(case, group)
        flights = [dispatcher.prepare(b.x, b.experts, b.weights) for b in batches]
        flights = [dispatcher.launch_dispatch(*flight) for flight in flights]
        outs = [apply_experts(dispatcher.finish_dispatch(*f), matrices) for f in flights]
        ys: dict[int, Tensor] = {}
        for i in (1, 0, 2):
            state = flights[i][1]
            ys[i] = dispatcher.finish_combine(dispatcher.launch_combine(outs[i], state), state)
        answers = {i: answer_of(batches[i], matrices, ys[i]) for i in backward_order}
        together = [answers[i] for i in range(3)]
        _agree_on_bits(together, alone, group, case, where="interleaved batches")
        check_late(case, dispatcher)


def check_threads(
    make: MakeDispatcher,
    group: ProcessGroup,
    case: Case = _DEFAULT,
    *,
    second_group: ProcessGroup | None = None,
) -> None:
    """Check that every call may come from another thread.

    Between launch and finish of a batch, another one runs from forward to backward. With a second
    group of the same ranks, two threads run batches at the same time, each with its own dispatcher
    and group.
    """
    dispatcher = make(group, case.num_experts)
    alone = _sequentially(dispatcher, _batches(case, group, 2), case, group)
    batches, matrices = _batches(case, group, 2), _matrices(case, group)
    first, second = (_flight(dispatcher, batch, matrices) for batch in batches)
    _in_turn(first, 2)  # its rows are on their way
    answer = _in_turn(second, 7)
    _in_turn(first, 4)
    crossed = [next(first), answer]
    _agree_on_bits(crossed, alone, group, case, where="calls from several threads")
    if second_group is not None:
        _check_concurrency(dispatcher, make(second_group, case.num_experts), group, case, alone)
    check_late(case, dispatcher)


def check_recompute(make: MakeDispatcher, group: ProcessGroup, case: Case = _DEFAULT) -> None:
    """Check that a forward that `torch.utils.checkpoint` recomputes has the same bits."""
    dispatcher = make(group, case.num_experts)
    alone = _sequentially(dispatcher, _batches(case, group, 2), case, group)
    for reentrant in (False, True):
        batches, matrices = _batches(case, group, 2), _matrices(case, group)
        ys = [_checkpointed(dispatcher, batch, matrices, reentrant) for batch in batches]
        answers = [answer_of(b, matrices, y) for b, y in zip(batches, ys, strict=True)]
        where = f"recompute, use_reentrant={reentrant}"
        _agree_on_bits(answers, alone, group, case, where=where)
        check_late(case, dispatcher)


def run(dispatcher: AnyDispatcher, batch: Batch, matrices: Tensor) -> Answer:
    """Send a batch through all calls, with a check of the rows that arrive; take the gradients."""
    *_, answer = _flight(dispatcher, batch, matrices)
    return answer


def _flight(dispatcher: AnyDispatcher, batch: Batch, matrices: Tensor) -> Iterator[Answer]:
    """Send a batch through all calls.

    Yields:
        An answer after each of the six calls, and then again: empty but for the last.
    """
    nothing = Answer(batch.x, batch.x, None, matrices)
    rows, state = dispatcher.prepare(batch.x, batch.experts, batch.weights)
    yield nothing
    rows, state = dispatcher.launch_dispatch(rows, state)
    yield nothing
    arrived = dispatcher.finish_dispatch(rows, state)
    yield nothing
    problems = batch_problems(arrived, num_local=len(matrices))
    rows = apply_experts(arrived, matrices)
    yield nothing
    rows = dispatcher.launch_combine(rows, state)
    yield nothing
    y = dispatcher.finish_combine(rows, state)
    yield nothing
    yield answer_of(batch, matrices, y, problems=problems)


def _in_turn(flight: Iterator[Answer], count: int) -> Answer:
    """Run the next steps of a batch, each in its own thread; return the result of the last."""
    found: list[Answer] = []
    for _ in range(count):
        _in_threads([lambda: found.append(next(flight))])
    return found[-1]


def agree_on(
    problems: list[str], group: ProcessGroup, *, where: str, device: torch.device | str
) -> None:
    """Raise AssertionError on all ranks if there are problems on any."""
    problem_counts = torch.full((group.size(), 1), len(problems), device=device)
    found = launch_all_to_all(problem_counts, group=group).wait().flatten().tolist()
    if problems:
        raise AssertionError(f"rank {group.rank()}, {where}: {'; '.join(problems)}")
    if any(found):
        failed = [rank for rank, count in enumerate(found) if count]
        raise AssertionError(f"rank {group.rank()}, {where}: ranks {failed} found errors")


def check_late(case: Case, dispatcher: AnyDispatcher) -> None:
    """Let a dispatcher raise errors that it finds later than in `prepare`."""
    if case.late_check is not None:
        case.late_check(dispatcher)


def _batches(case: Case, group: ProcessGroup, count: int) -> list[Batch]:
    """Make batches of different routing, so that the state of one does not fit another."""
    kinds = ("random", "some slots dropped", "random")
    return [
        make_batch(case, group.rank(), group.size(), routing=kinds[i], seed=i) for i in range(count)
    ]


def _matrices(case: Case, group: ProcessGroup) -> Tensor:
    return make_matrices(case, group.rank(), group.size())


def _sequentially(
    dispatcher: AnyDispatcher, batches: list[Batch], case: Case, group: ProcessGroup
) -> list[Answer]:
    matrices = _matrices(case, group)
    answers = [run(dispatcher, batch, matrices) for batch in batches]
    check_late(case, dispatcher)
    return answers


def _checkpointed(
    dispatcher: AnyDispatcher, batch: Batch, matrices: Tensor, reentrant: bool
) -> Tensor:
    def layer(x: Tensor, weights: Tensor, held: Tensor) -> Tensor:
        rows, state = dispatcher.prepare(x, batch.experts, weights)
        rows, state = dispatcher.launch_dispatch(rows, state)
        out = apply_experts(dispatcher.finish_dispatch(rows, state), held)
        return dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)

    y: Tensor = checkpoint(layer, batch.x, batch.weights, matrices, use_reentrant=reentrant)
    return y


def _check_concurrency(
    first: AnyDispatcher,
    second: AnyDispatcher,
    group: ProcessGroup,
    case: Case,
    alone: list[Answer],
) -> None:
    batches = _batches(case, group, 2)
    answers: dict[int, Answer] = {}

    def work(i: int, dispatcher: AnyDispatcher) -> None:
        matrices = _matrices(case, group)
        for _ in range(5):
            answers[i] = run(dispatcher, batches[i], matrices)

    _in_threads([partial(work, 0, first), partial(work, 1, second)])
    _agree_on_bits([answers[0], answers[1]], alone, group, case, where="two threads at once")


def _in_threads(works: list[Callable[[], object]]) -> None:
    """Run each function in its own thread, and wait; raise the error that came first."""
    context = ThreadContext.capture()

    def run_here(work: Callable[[], object]) -> None:
        with context.apply():
            work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in as_completed([pool.submit(run_here, work) for work in works]):
            done.result()


def _agree_on_bits(
    actual: list[Answer], alone: list[Answer], group: ProcessGroup, case: Case, *, where: str
) -> None:
    problems = [problem for answer in actual for problem in answer.problems]
    for i, (mine, theirs) in enumerate(zip(actual, alone, strict=True)):
        for name, tensor in theirs.tensors().items():
            if not torch.equal(mine.tensors()[name], tensor):
                problems.append(f"{name} of batch {i} has other bits than the batch on its own")
    agree_on(problems, group, where=where, device=case.device)


def _differences(actual: Answer, answer: Answer, bound: float) -> list[str]:
    comparison = compare(actual.tensors(), answer.tensors(), bound=bound)
    return [*actual.problems, *([] if comparison.ok else [str(comparison)])]


def _not_zero(actual: Answer, batch: Batch) -> list[str]:
    """Return the problems of dropped slots, whose results must be exactly zero."""
    if actual.y.shape != batch.x.shape:
        return []  # `_differences` has said so
    dropped, problems = batch.experts < 0, []
    if actual.dweights is not None and actual.dweights.where(dropped, 0).any():
        problems.append("gradients of the weights of dropped slots must be exactly zero")
    nowhere = dropped.all(1, keepdim=True)
    if actual.y.where(nowhere, 0).any() or actual.dx.where(nowhere, 0).any():
        problems.append("outputs and gradients of tokens that go nowhere must be exactly zero")
    return problems


Spoil = Callable[[Batch, Case], Batch]


def _with_expert(batch: Batch, place: int, expert: int) -> Batch:
    """Return the batch with another expert in the first or the last place (-1)."""
    experts = batch.experts.clone()
    experts[place, place] = expert
    return replace(batch, experts=experts)


def _with_x(batch: Batch, x: Tensor) -> Batch:
    return replace(batch, x=x.requires_grad_())


def _twice_the_choices(batch: Batch) -> Batch:
    assert batch.weights is not None
    both = [torch.cat([t.detach(), t.detach()], 1) for t in (batch.experts, batch.weights)]
    return replace(batch, experts=both[0], weights=both[1].requires_grad_())


SPOILS: dict[str, Spoil] = {
    "an expert that does not exist": lambda batch, case: _with_expert(batch, 0, case.num_experts),
    "an expert below -1": lambda batch, _: _with_expert(batch, -1, -2),
    "experts for too few tokens": lambda batch, _: replace(batch, experts=batch.experts[:-1]),
    "experts that are no integers": lambda batch, _: replace(batch, experts=batch.experts.double()),
    "tokens of three dims": lambda batch, _: _with_x(batch, batch.x.detach().unsqueeze(0)),
    "weights of another shape": lambda batch, _: replace(
        batch, weights=None if batch.weights is None else batch.weights.detach()[:, :0]
    ),
}
DISAGREEMENTS: dict[str, Spoil] = {
    "another dtype than elsewhere": lambda batch, case: _with_x(
        batch,
        batch.x.detach().to(torch.bfloat16 if case.dtype == torch.float32 else torch.float32),
    ),
    "another width than elsewhere": lambda batch, case: _with_x(
        batch, batch.x.detach()[:, : case.dim // 2].contiguous()
    ),
    "more experts per token than elsewhere": lambda batch, _: _twice_the_choices(batch),
    "no weights, other than elsewhere": lambda batch, _: replace(batch, weights=None),
}


def check_errors(
    make: MakeDispatcher,
    group: ProcessGroup,
    case: Case | None = None,
    *,
    spoils: Collection[str] = (*SPOILS, *DISAGREEMENTS),
) -> None:
    """Check that wrong input of the last rank raises on every rank, and the next batch is right.

    `prepare` raises, or else `Case.late_check`. A different number of experts on a rank must raise
    as well.

    Args:
        make: Function that makes a dispatcher for a group and a number of experts.
        group: The ranks.
        case: Sizes, dtype and device; None: the defaults.
        spoils: Names in `SPOILS` and `DISAGREEMENTS` to try.
    """
    case = case or Case()
    dispatcher, is_last = make(group, case.num_experts), group.rank() == group.size() - 1
    possible = SPOILS if group.size() == 1 else SPOILS | DISAGREEMENTS
    wanted = {name: spoil for name, spoil in possible.items() if name in spoils}
    for name, spoil in wanted.items():
        batch = make_batch(case, group.rank(), group.size())
        if is_last:
            batch = spoil(batch, case)
        _must_raise(dispatcher, batch, group, case, where=name)
    if group.size() > 1:
        disagreeing = make(group, case.num_experts * (2 if is_last else 1))
        batch = make_batch(case, group.rank(), group.size())
        _must_raise(disagreeing, batch, group, case, where="another number of experts")
    check_parity(make, group, case, routings=["random"])


def _must_raise(
    dispatcher: AnyDispatcher, batch: Batch, group: ProcessGroup, case: Case, *, where: str
) -> None:
    try:
        dispatcher.prepare(batch.x, batch.experts, batch.weights)
    except Exception:  # noqa: BLE001  # any error will do
        raised = 1
    else:
        raised = 0
    mine = torch.full((group.size(), 1), raised, device=case.device)
    ranks_raised = launch_all_to_all(mine, group=group).wait().flatten().tolist()
    problems = []
    if 0 < sum(ranks_raised) < group.size():
        problems.append(f"ranks that raised ({ranks_raised}) must be all or none")
    elif not raised:
        matrices = make_matrices(case, group.rank(), group.size())
        try:
            run(dispatcher, batch, matrices)
            check_late(case, dispatcher)
        except Exception:  # noqa: BLE001
            raised = 1
        if not raised:
            problems.append("nothing was raised")
    agree_on(problems, group, where=where, device=case.device)
