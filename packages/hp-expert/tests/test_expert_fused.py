"""Weights as they are found: fused, tied, used twice, frozen, or parts of DTensors."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_expert import (
    ExpertBatch,
    GroupedExperts,
    LocalDispatcher,
    routed_swiglu,
)
from hp_expert.experts import loop
from hp_expert.experts.grouped import Grouped
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import Backend, ExpertWeights, Projections
from hp_platform import WeightGradQueue
from hp_platform.testing import run_distributed, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 12, 16, 32, 8, 2
BACKENDS = pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def batch_of(dtype: torch.dtype = torch.float32) -> ExpertBatch:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    x, weights = drawn(TOKENS, DIM, dtype=dtype), drawn(TOKENS, TOP_K, dtype=dtype)
    dispatcher = LocalDispatcher(EXPERTS)
    return dispatcher.finish_dispatch(*dispatcher.prepare(x, chosen, weights))


def fused(backend: Backend, batch: ExpertBatch, gate_up: Tensor, down: Tensor) -> Tensor:
    weights: Projections[Tensor] = Projections((gate_up,), down)
    biases: Projections[Tensor | None] = Projections((None,), None)
    return routed_swiglu_by(backend, batch, ExpertWeights(weights, biases))


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_weights_are_not_copied_and_have_one_gradient(
    backend: Backend, dtype: torch.dtype
) -> None:
    gate_up = drawn(EXPERTS, 2 * HIDDEN, DIM, dtype=dtype)
    down, batch = drawn(EXPERTS, DIM, HIDDEN, dtype=dtype), batch_of(dtype)
    copies: list[str] = []

    def look(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del kwargs
        large = any(isinstance(a, Tensor) and a.numel() >= gate_up.numel() // 2 for a in args)
        if large and name.removeprefix("aten::").startswith(("_to_copy", "clone", "copy_", "cat")):
            copies.append(name)

    with watch_operators(look):
        fused(backend, batch, gate_up, down).sum().backward()
    assert copies == []
    assert gate_up.grad is not None
    assert gate_up.grad.shape == gate_up.shape
    assert gate_up.grad.is_contiguous()
    gate, up = (half.detach().clone().requires_grad_() for half in gate_up.chunk(2, 1))
    routed_swiglu(batch, gate, up, down).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    separate = torch.cat([gate.grad, up.grad], 1)
    bound = 8 * torch.finfo(dtype).eps * separate.abs().max()
    assert (gate_up.grad - separate).abs().max() <= bound


@BACKENDS
def test_frozen_fused_weights_get_no_gradient_and_rows_do(backend: Backend) -> None:
    gate_up, down = drawn(EXPERTS, 2 * HIDDEN, DIM), drawn(EXPERTS, DIM, HIDDEN)
    batch = batch_of()
    fused(backend, batch, gate_up, down).sum().backward()
    expected, batch.rows.grad = batch.rows.grad, None
    frozen = [gate_up.detach(), down.detach()]
    fused(backend, batch, *frozen).sum().backward()
    assert expected is not None
    assert batch.rows.grad is not None
    assert torch.equal(batch.rows.grad, expected)


@BACKENDS
def test_uses_of_one_weight_add_up(backend: Backend) -> None:
    queue = WeightGradQueue()

    def gradients(*, tied: bool, defer: bool = False) -> list[Tensor]:
        first = [drawn(EXPERTS, 2 * HIDDEN, DIM), drawn(EXPERTS, DIM, HIDDEN)]
        second = first if tied else [w.detach().clone().requires_grad_() for w in first]
        batch = batch_of()
        y = fused(backend, batch, *first)
        loss = fused(backend, batch._replace(rows=0.1 * y), *second).square().sum()
        if defer:
            with queue.defer(0):
                loss.backward()
            queue.flush(0)
        else:
            loss.backward()
        return [w.grad for w in (*first, *second) if w.grad is not None]

    apart = gradients(tied=False)
    for defer in (False, True):
        both = gradients(tied=True, defer=defer)
        for total, one, other in zip(both[:2], apart[:2], apart[2:], strict=True):
            assert torch.equal(total, one + other)


def test_gate_and_up_may_be_the_same_weight() -> None:
    tied, down, batch = drawn(EXPERTS, HIDDEN, DIM), drawn(EXPERTS, DIM, HIDDEN), batch_of()
    other = tied.detach().clone().requires_grad_()
    apart = routed_swiglu(batch, tied, other, down).sum()
    expected = sum(torch.autograd.grad(apart, [tied, other]))
    (both,) = torch.autograd.grad(routed_swiglu(batch, tied, tied, down).sum(), [tied])
    assert torch.equal(both, torch.as_tensor(expected))


def tensor_parallel() -> None:
    """Cut the hidden dim: outputs and input gradients of ranks add up to those of one process."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True, dtype=torch.float64)
    expected_batch, batch = batch_of(torch.float64), batch_of(torch.float64)
    expected = whole(expected_batch)
    expected.square().sum().backward()
    cut = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True, dtype=torch.float64)
    places = {"w1": Shard(1), "w3": Shard(1), "w2": Shard(2), "b1": Shard(1), "b3": Shard(1)}
    spread(cut, whole, mesh, {name: [place] for name, place in places.items()})
    cut.adds_output_bias = mesh.get_rank() == 0
    assert cut.num_local_experts == EXPERTS
    out = cut(batch)
    total = out.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    queue = WeightGradQueue()
    with queue.defer(0):
        out.backward(2 * total)
    assert queue.flush(0) == 6
    same_gradients(cut, whole)
    for mine, one in ((batch.rows, expected_batch.rows), (batch.weights, expected_batch.weights)):
        assert mine is not None
        assert one is not None
        assert mine.grad is not None
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, one.grad, rtol=1e-12, atol=1e-12)


def expert_parallel() -> None:
    """Cut the experts: each rank computes the slots of its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    whole = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True, dtype=torch.float64)
    expected_batch, batch = batch_of(torch.float64), batch_of(torch.float64)
    expected = whole(expected_batch)
    expected.square().sum().backward()
    cut = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True, dtype=torch.float64)
    spread(cut, whole, mesh, {})
    assert batch.counts is not None
    here = slice(EXPERTS // 2 * (rank := mesh.get_rank()), EXPERTS // 2 * (rank + 1))
    start, stop = sum(batch.counts[: here.start]), sum(batch.counts[: here.stop])
    out = cut(
        batch._replace(
            order=batch.order[start:stop],
            counts=batch.counts[here],
            num_tokens_per_expert=batch.num_tokens_per_expert[here],
        )
    )
    total = out.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    out.backward(2 * total)
    same_gradients(cut, whole)


def spread(
    cut: GroupedExperts, whole: GroupedExperts, mesh: DeviceMesh, places: dict[str, list[Shard]]
) -> None:
    """Give `cut` the parameters of `whole` as DTensors, cut along the experts by default."""
    default = [Replicate()] if places else [Shard(0)]
    for name, parameter in whole.named_parameters():
        placed = distribute_tensor(parameter.detach(), mesh, places.get(name, default))
        setattr(cut, name, nn.Parameter(placed))


def same_gradients(cut: GroupedExperts, whole: GroupedExperts) -> None:
    for (name, mine), one in zip(cut.named_parameters(), whole.parameters(), strict=True):
        gradient = mine.grad
        assert isinstance(mine, DTensor)
        assert isinstance(gradient, DTensor), name
        assert gradient.placements == mine.placements
        full = gradient.full_tensor()
        torch.testing.assert_close(full, one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [tensor_parallel, expert_parallel])
def test_parts_of_dtensors_have_dtensors_for_gradients(ranks: Callable[[], None]) -> None:
    run_distributed(ranks, world_size=2, timeout=30)
