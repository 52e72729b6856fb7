"""Wrong input of one rank, or input that differs between ranks, must be an error on all of them."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from hp_expert.dispatch import AnyDispatcher, MakeDispatcher
from hp_expert.testing.conformance import agree_on, check_late, check_parity, run
from hp_expert.testing.problem import Batch, Case, make_batch, make_matrices
from hp_platform import launch_all_to_all

Spoil = Callable[[Batch, Case], Batch]


def _no_such_expert(batch: Batch, case: Case) -> Batch:
    experts = batch.experts.clone()
    experts[0, 0] = case.num_experts
    return replace(batch, experts=experts)


def _below_nowhere(batch: Batch, _case: Case) -> Batch:
    experts = batch.experts.clone()
    experts[-1, -1] = -2
    return replace(batch, experts=experts)


def _too_few(batch: Batch, _case: Case) -> Batch:
    return replace(batch, experts=batch.experts[:-1])


def _fractions(batch: Batch, _case: Case) -> Batch:
    return replace(batch, experts=batch.experts.double())


def _sequences(batch: Batch, _case: Case) -> Batch:
    return replace(batch, x=batch.x.detach().unsqueeze(0).requires_grad_())


def _other_weights(batch: Batch, _case: Case) -> Batch:
    assert batch.weights is not None
    return replace(batch, weights=batch.weights.detach()[:, :0])


def _other_dtype(batch: Batch, case: Case) -> Batch:
    other = torch.float32 if case.dtype != torch.float32 else torch.bfloat16
    return replace(batch, x=batch.x.detach().to(other).requires_grad_())


def _other_width(batch: Batch, case: Case) -> Batch:
    return replace(batch, x=batch.x.detach()[:, : case.dim // 2].contiguous().requires_grad_())


def _other_top_k(batch: Batch, _case: Case) -> Batch:
    assert batch.weights is not None
    both = [torch.cat([t.detach(), t.detach()], 1) for t in (batch.experts, batch.weights)]
    return replace(batch, experts=both[0], weights=both[1].requires_grad_())


def _no_weights(batch: Batch, _case: Case) -> Batch:
    return replace(batch, weights=None)


SPOILS: dict[str, Spoil] = {
    "an expert that does not exist": _no_such_expert,
    "an expert below -1": _below_nowhere,
    "experts for too few tokens": _too_few,
    "experts that are no integers": _fractions,
    "tokens of three dims": _sequences,
    "weights of another shape": _other_weights,
}
DISAGREEMENTS: dict[str, Spoil] = {
    "another dtype than elsewhere": _other_dtype,
    "another width than elsewhere": _other_width,
    "more experts per token than elsewhere": _other_top_k,
    "no weights, other than elsewhere": _no_weights,
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
