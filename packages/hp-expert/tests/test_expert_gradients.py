"""The norm of gradients and clipping by it, over ranks that hold different parts."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hp_expert import (
    ExpertParallel,
    ExpertRanks,
    ExpertTensorParallel,
    GroupedExperts,
    TensorParallel,
    clip_grad_norm_,
    grad_norm,
    shard_groups,
)
from hp_platform import new_group
from hp_platform.testing import run_distributed, run_in_threads

EXPERTS, DIM, HIDDEN = 4, 6, 8
NORMS = [2.0, 1.0, 3.5, math.inf]


class Model(nn.Module):
    """Experts among other parameters, some of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.experts = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True)
        self.frozen = nn.Linear(DIM, 1).requires_grad_(False)


def with_gradients(dtype: torch.dtype = torch.float64) -> Model:
    """The same parameters and gradients on every rank."""
    model, generator = Model().to(dtype), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        drawn = torch.randn(2, *parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        parameter.data.copy_(drawn[0])
        parameter.grad = drawn[1] if parameter.requires_grad else None
    return model


def cut_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The gradient of a `DTensor` from that of all of it."""
    if not isinstance(parameter, DTensor):
        return value
    full = DTensor.from_local(
        value, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
    )
    return full.redistribute(parameter.device_mesh, parameter.placements)


def spread(layout: str) -> Model:
    """Give every parameter its part of the gradient it has in one process."""
    model = with_gradients()
    gradients = [p.grad for p in model.parameters()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    if layout == "ep on a mesh":
        ExpertParallel().apply(model, mesh["ep"])
    elif layout == "tp on a mesh":
        TensorParallel().apply(model, mesh["tp"])
    elif layout == "both on a mesh":
        ExpertTensorParallel().apply(model, mesh)
    elif layout == "ep":
        ExpertParallel().apply(model, mesh["ep"].get_group())
    else:
        ExpertTensorParallel().apply(model, (mesh["ep"].get_group(), mesh["tp"].get_group()))
    dense = model.dense.weight
    model.dense.weight = nn.Parameter(
        DTensor.from_local(dense.detach(), mesh, [Replicate(), Replicate()]).redistribute(
            mesh, [Replicate(), Shard(0)]
        )
    )
    e, t = mesh.get_coordinate() or (0, 0)
    for (name, parameter), value in zip(model.named_parameters(), gradients, strict=True):
        if value is None:
            continue
        mine = value
        if name.startswith("experts.") and not isinstance(parameter, DTensor):
            mine = value.chunk(2)[e]
            hidden = [d for d in range(1, mine.ndim) if parameter.shape[d] != mine.shape[d]]
            for dim in hidden:
                mine = mine.chunk(2, dim)[t]
        parameter.grad = cut_like(parameter, mine)
    return model


def norms_and_clipped(layout: str) -> tuple[list[float], list[float], float]:
    model, whole = spread(layout), with_gradients()
    found = [grad_norm(model, norm_type=p).item() for p in NORMS]
    again = shard_groups(model)
    listed = [grad_norm(model.parameters(), norm_type=p, sharded=again).item() for p in NORMS]
    assert found == listed
    before = clip_grad_norm_(model, 0.5)
    assert before.dtype == torch.float64
    assert before.item() == found[0]
    expected = [
        nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None], p)
        for p in NORMS
    ]
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    dense, expected_dense = model.dense.weight.grad, whole.dense.weight.grad
    assert isinstance(dense, DTensor)
    assert expected_dense is not None
    difference = dense.full_tensor() - expected_dense
    error = float(difference.abs().max() / expected_dense.abs().max())
    after = grad_norm(model).item()
    return found, [float(e) for e in expected], max(error, abs(after / 0.5 - 1) - 1e-5)


LAYOUTS = ["ep on a mesh", "tp on a mesh", "both on a mesh", "ep", "ep and tp"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on gathers of two axes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_over_ranks_is_that_of_one_process(layout: str) -> None:
    results = run_distributed(norms_and_clipped, layout, world_size=4)
    for found, expected, error in results:
        assert found == pytest.approx(expected, rel=1e-12)
        assert error < 1e-12
    assert all(found == results[0][0] for found, *_ in results)  # the same bits


class Copies(ExpertParallel):
    """Leaves all experts on every rank."""

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        del experts, ranks


class PlainParts(ExpertParallel):
    """Cuts w1 alone, into plain tensors whatever the ranks are."""

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        w1 = experts.w1.detach().chunk(ranks.ep_size)[ranks.ep_rank]
        experts.w1 = nn.Parameter(w1.clone())


def norms_of_own_styles() -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    norms = []
    for style in (Copies(), PlainParts()):
        for ranks in (mesh, mesh.get_group()):
            model = with_gradients()
            gradient = model.experts.w1.grad
            assert gradient is not None
            style.apply(model, ranks)
            if isinstance(style, PlainParts):
                model.experts.w1.grad = gradient.chunk(2)[dist.get_rank()]
            norms.append(float(grad_norm(model)))
    return norms


def test_styles_of_ones_own_may_cut_what_they_like() -> None:
    gradients = [p.grad for p in with_gradients().parameters() if p.grad is not None]
    expected = nn.utils.get_total_norm(gradients).item()
    for found in run_distributed(norms_of_own_styles, world_size=2):
        assert found == pytest.approx([expected] * 4, rel=1e-12)


def torch_fails() -> None:
    model = spread("ep on a mesh")
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_torch_cannot_clip_what_is_on_different_meshes() -> None:
    run_distributed(torch_fails, world_size=4)


def partial() -> float:
    """A gradient that is still a sum over ranks counts as the sum."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 0.0 + 4 * rank]), mesh, [Partial()])
    clip_grad_norm_(parameter, 1.0)
    return float(grad_norm([parameter]))


def test_a_gradient_that_is_a_partial_sum_is_summed_first() -> None:
    # (6, 4) has a norm of 7.2; scaling the parts scales the sum.
    assert run_distributed(partial, world_size=2) == pytest.approx([1.0, 1.0], rel=1e-6)


def test_ranks_with_other_parameters_are_counted_together() -> None:
    def stage(group: dist.ProcessGroup) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([3.0 + group.rank()])
        return clip_grad_norm_([parameter], 100.0, across=group).item()

    assert run_in_threads(stage, world_size=2) == [5.0, 5.0]


def test_a_rank_without_any_gradient_takes_part() -> None:
    def rank_main(group: dist.ProcessGroup) -> float:
        parameter = nn.Parameter(torch.zeros(2))
        if group.rank() == 1:
            parameter.grad = torch.tensor([3.0, 4.0])
        return float(grad_norm([parameter], sharded={parameter: [group]}))

    assert run_in_threads(rank_main, world_size=3) == [5.0, 5.0, 5.0]


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_if_wanted() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([math.nan if group.rank() else 1.0, 1.0])
        sharded: dict[Tensor, Any] = {parameter: [group]}
        assert not grad_norm([parameter], sharded=sharded, norm_type=math.inf).isfinite()
        with pytest.raises(RuntimeError, match=r"norm of gradients \(nan\) must be finite"):
            clip_grad_norm_([parameter], 1.0, sharded=sharded, error_if_nonfinite=True)
        if group.rank() == 0:
            assert parameter.grad.tolist() == [1.0, 1.0]

    run_in_threads(rank_main, world_size=2)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_process_clips_as_torch_does(dtype: torch.dtype, foreach: bool | None) -> None:
    mine, theirs = with_gradients(dtype), with_gradients(dtype)
    norm = clip_grad_norm_(mine, 0.5, foreach=foreach)
    if dtype == torch.float64:
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    else:  # torch takes the norm in the dtype of the gradients
        nn.utils.clip_grads_with_norm_(theirs.parameters(), 0.5, norm)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-13 if dtype == torch.float64 else 0)


def test_gradients_below_the_largest_norm_stay() -> None:
    model = with_gradients()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clip_grad_norm_(model.parameters(), 1e9)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_nothing_has_a_norm_of_zero() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert grad_norm(nn.Linear(2, 2)).item() == 0.0


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_the_type_of_the_norm_must_be_positive(norm_type: float) -> None:
    with pytest.raises(ValueError, match=rf"norm_type \({norm_type}\) must be positive"):
        grad_norm([], norm_type=norm_type)


def scale(ep: int, tp: int) -> list[float]:
    """Gradients of a loss over all tokens need no factor: sums over replicas are all there is."""
    grids = [[e * tp + t for e in range(ep)] for t in range(tp)]
    rows = [[e * tp + t for t in range(tp)] for e in range(ep)]
    ep_group, tp_group = new_group(grids, name="ep"), new_group(rows, name="tp")
    assert ep_group is not None
    assert tp_group is not None
    ratios = []
    experts, whole = with_gradients().experts, with_gradients().experts
    ExpertTensorParallel().apply(experts, (ep_group, tp_group))
    counts = torch.full((EXPERTS,), 2)
    inputs = [torch.ones(2 * EXPERTS, DIM, dtype=torch.float64, requires_grad=True) for _ in "ab"]
    # The loss is a mean over ep ranks with the same tokens, and so is the same in one process.
    for module, x, share in zip((experts, whole), inputs, (1 / ep, 1), strict=True):
        module.zero_grad()
        (module(x, counts).sum() * share).backward()
    for parameter, other in zip(experts.parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        part = other.grad.chunk(ep)[ep_group.rank()]
        for dim in range(1, part.ndim):
            if part.shape[dim] != parameter.shape[dim]:
                part = part.chunk(tp, dim)[tp_group.rank()]
        ratios.append(float((parameter.grad - part).abs().max() / part.abs().max()))
    mine, theirs = (x.grad for x in inputs)
    assert mine is not None
    assert theirs is not None
    ratios.append(float((mine * ep - theirs).abs().max() / theirs.abs().max()))
    return ratios


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)])
def test_no_factor_of_the_number_of_ranks_is_in_a_gradient(ep: int, tp: int) -> None:
    assert max(map(max, run_distributed(scale, ep, tp, world_size=ep * tp))) < 1e-13
