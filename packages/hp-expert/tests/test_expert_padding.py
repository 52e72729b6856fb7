"""Batches whose counts are on the device alone: positions after the last valid one are padding."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hp_expert import ExpertBatch, GroupedProducts, LocalDispatcher
from hp_expert.experts import loop
from hp_expert.experts.grouped import Grouped
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import Backend, ExpertWeights, Projections
from hp_expert.testing import host_reads

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K, PADDING = 13, 8, 16, 6, 2, 9
STORED = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


class Dirty(GroupedProducts):
    """Leaves NaN where a product may leave whatever was in memory."""

    def forward(self, x_PK: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        return self._spoil(super().forward(x_PK, weight_LMK, ends), ends)

    def input_gradient(self, dy_PM: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        return self._spoil(super().input_gradient(dy_PM, weight_LMK, ends), ends)

    def _spoil(self, y_PM: Tensor, ends: Tensor) -> Tensor:
        y_PM[ends[-1] :] = torch.nan
        return y_PM


BACKENDS = pytest.mark.parametrize(
    "backend", [loop, Grouped(), Grouped(Dirty())], ids=["loop", "grouped", "dirty"]
)


class Problem(NamedTuple):
    """A batch, and what gradients are taken of."""

    batch: ExpertBatch
    experts: ExpertWeights
    leaves: list[Tensor]

    def run(self, backend: Backend) -> list[Tensor]:
        y = routed_swiglu_by(backend, self.batch, self.experts)
        upstream = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, upstream)]


def problem(dtype: torch.dtype, *, fused: bool, weighted: bool = True) -> Problem:
    """Slots of experts 1 .. 3 only are listed here: expert 0 has none, 4 and 5 are elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x, weights = drawn(TOKENS, DIM), drawn(TOKENS, TOP_K)
    rows, parts = (2 * HIDDEN, 1) if fused else (HIDDEN, 2)
    gate_up = [drawn(EXPERTS, rows, DIM) for _ in range(parts)]
    biases = [drawn(EXPERTS, rows) for _ in range(parts)]
    down, bias = drawn(EXPERTS, DIM, HIDDEN), drawn(EXPERTS, DIM)
    chosen = torch.stack(
        [1 + torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    )
    dispatcher = LocalDispatcher(EXPERTS)
    batch = dispatcher.finish_dispatch(
        *dispatcher.prepare(x, chosen, weights if weighted else None)
    )
    assert batch.counts is not None
    counts = (*batch.counts[:-2], 0, 0)
    batch = batch._replace(
        order=batch.order[: sum(counts)],
        counts=counts,
        num_tokens_per_expert=torch.tensor(counts),
    )
    experts = ExpertWeights(Projections(tuple(gate_up), down), Projections(tuple(biases), bias))
    leaves = [x, *([weights] if weighted else []), *gate_up, down, *biases, bias]
    return Problem(batch, experts, leaves)


def padded(whole: Problem, filling: int) -> Problem:
    """The same without counts on the host, and with any numbers for slots of padding."""
    order = torch.cat([whole.batch.order, torch.full((PADDING,), filling)])
    return whole._replace(batch=whole.batch._replace(order=order, counts=None))


def poison() -> None:
    """Leave NaN in the memory that the next tensors get."""
    sizes = [DIM, HIDDEN, 2 * HIDDEN, EXPERTS * DIM * HIDDEN]
    for elements in (size * rows for size in sizes for rows in (1, TOKENS, 2 * TOKENS, 64)):
        blocks = [torch.full((elements,), torch.nan) for _ in range(20)]
        del blocks


def close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Sums of the same terms: products may add them up in another order, by where memory starts."""
    bound = 4 * torch.finfo(expected[0].dtype).eps
    pairs = zip(actual, expected, strict=True)
    return all((a - b).abs().max() <= bound * b.abs().max() for a, b in pairs)


@BACKENDS
@STORED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_padding_changes_nothing(backend: Backend, dtype: torch.dtype, *, fused: bool) -> None:
    whole = problem(dtype, fused=fused)
    expected = whole.run(backend if backend is loop else Grouped())
    assert all(t.isfinite().all() for t in expected)
    for filling in (0, -1, 2**40):
        poison()
        assert close(padded(whole, filling).run(backend), expected)


@BACKENDS
def test_padding_changes_nothing_without_routing_weights(backend: Backend) -> None:
    whole = problem(torch.float32, fused=False, weighted=False)
    expected = whole.run(backend if backend is loop else Grouped())
    assert close(padded(whole, -1).run(backend), expected)


@BACKENDS
def test_rows_without_slots_get_exact_zeros(backend: Backend) -> None:
    whole = padded(problem(torch.float32, fused=True), 0)
    y, dx, dweights, *_ = whole.run(backend)
    listed = torch.zeros(TOKENS * TOP_K, dtype=torch.bool)
    listed[whole.batch.order[:-PADDING]] = True
    nowhere = ~listed.view(TOKENS, TOP_K)
    assert nowhere.all(1).any()
    assert not y[nowhere.all(1)].any()
    assert not dx[nowhere.all(1)].any()
    assert not dweights[nowhere].any()


@BACKENDS
def test_a_buffer_of_nothing_but_padding_gives_zeros(backend: Backend) -> None:
    whole = problem(torch.float32, fused=True)
    empty = whole.batch._replace(
        order=torch.full((PADDING,), -1),
        counts=None,
        num_tokens_per_expert=torch.zeros(EXPERTS, dtype=torch.int64),
    )
    poison()
    assert not any(t.any() for t in whole._replace(batch=empty).run(backend))
    x = whole.leaves[0][:0].detach().requires_grad_()
    weights = whole.leaves[1][:0].detach().requires_grad_()
    none = empty._replace(rows=x, weights=weights)
    y, *grads = Problem(none, whole.experts, [x, weights, *whole.leaves[2:]]).run(backend)
    assert y.shape == (0, DIM)
    assert not any(g.any() for g in grads)


@STORED
def test_the_grouped_product_never_reads_the_host(*, fused: bool) -> None:
    whole = padded(problem(torch.bfloat16, fused=fused), -1)
    with host_reads() as reads:
        whole.run(Grouped())
    assert reads == []


def test_one_expert_after_the_other_reads_the_counts_once() -> None:
    whole = padded(problem(torch.float32, fused=False), -1)
    with host_reads() as reads:
        whole.run(loop)
    assert reads == ["tolist"]


def test_fp64_which_grouped_products_do_not_have_is_read_and_looped() -> None:
    whole = padded(problem(torch.float64, fused=False), -1)
    expected = problem(torch.float64, fused=False).run(loop)
    actual = routed_swiglu_by(None, whole.batch, whole.experts)
    assert torch.equal(actual, expected[0])


def test_products_can_be_replaced_in_one_place() -> None:
    calls: list[str] = []

    class Counting(GroupedProducts):
        def forward(self, x_PK: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
            calls.append("forward")
            return super().forward(x_PK, weight_LMK, ends)

        def input_gradient(self, dy_PM: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
            calls.append("input")
            return super().input_gradient(dy_PM, weight_LMK, ends)

        def weight_gradient(self, dy_PM: Tensor, x_PK: Tensor, ends: Tensor) -> Tensor:
            calls.append("weight")
            return super().weight_gradient(dy_PM, x_PK, ends)

    for fused, products in ((True, 2), (False, 3)):
        calls.clear()
        problem(torch.float32, fused=fused).run(Grouped(Counting()))
        assert sorted(calls) == sorted(["forward", "input", "weight"] * products)
