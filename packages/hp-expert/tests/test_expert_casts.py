"""Parameters that are wider than the rows, cast by the caller once for many calls."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_expert import ExpertParallel, GroupedExperts, TensorParallel
from hp_platform.testing import run_distributed

EXPERTS, DIM, HIDDEN, CALLS = 4, 8, 6, 3
COUNTS = torch.tensor([3, 0, 4, 2])


class Casts:
    """Makes each cast once, and counts them."""

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}
        self.num_asked = 0

    def __call__(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        self.num_asked += 1
        if parameter.dtype == dtype:
            return None
        return self.made.setdefault(id(parameter), parameter.detach().to(dtype))


def experts_of(*, bias: bool = False) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(EXPERTS, DIM, HIDDEN, bias=bias)


def trained(experts: GroupedExperts, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of some calls."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(CALLS):
        rows = torch.randn(9, DIM, generator=generator).to(dtype).requires_grad_()
        out = experts(rows, COUNTS)
        out.float().square().sum().backward()
        assert rows.grad is not None
        found += [out.detach(), rows.grad]
    return [*found, *(local(p.grad) for p in experts.parameters())]


def local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("bias", [False, True])
def test_given_casts_are_used_in_forward_and_backward_and_change_no_bit(bias: bool) -> None:
    apart = experts_of(bias=bias)
    once, casts = copy.deepcopy(apart), Casts()
    once.cast_of = casts
    expected, actual = trained(apart, torch.bfloat16), trained(once, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    num_parameters = len(list(once.parameters()))
    assert len(casts.made) == num_parameters
    assert casts.num_asked == 2 * CALLS * num_parameters
    assert {p.grad.dtype for p in once.parameters() if p.grad is not None} == {torch.float32}


def test_no_cast_is_wanted_where_the_rows_have_the_dtype_of_the_parameters() -> None:
    apart = experts_of()
    once, casts = copy.deepcopy(apart), Casts()
    once.cast_of = casts
    expected, actual = trained(apart, torch.float32), trained(once, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert casts.num_asked == 0
    assert not casts.made


def _spread(style: Callable[[], ExpertParallel | TensorParallel]) -> bool:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    apart, once = experts_of(), experts_of()
    for experts in (apart, once):
        style().apply(experts, mesh)
        assert isinstance(experts.w1, DTensor)
    casts = Casts()
    once.cast_of = casts
    expected, actual = trained(apart, torch.bfloat16), trained(once, torch.bfloat16)
    assert len(casts.made) == 3
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("style", [ExpertParallel, TensorParallel])
def test_casts_of_experts_on_several_ranks_are_of_what_is_here(
    style: Callable[[], ExpertParallel | TensorParallel],
) -> None:
    assert run_distributed(_spread, style, world_size=2, timeout=60) == [True, True]
