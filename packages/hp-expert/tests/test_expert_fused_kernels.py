"""Kernels of routing, sorting and activations against torch's operations, in Triton's interpreter.

With CUDA they run on the GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_expert import (
    BoundedAllToAllDispatcher,
    BufferOverflowError,
    ClampedSwiGLU,
    ExpertParallel,
    GroupedExperts,
    GroupedProducts,
    MoE,
    SwiGLU,
    TopKRouter,
)
from hp_expert.batch import ExpertBatch
from hp_expert.dispatch import bounded, deduplicated
from hp_expert.dispatch.all_to_all import by_expert
from hp_expert.dispatch.exchange_plan import CODE, COUNTS, INVALID, MOST, ROWS, Header
from hp_expert.experts.activation import Activation
from hp_expert.kernels import (
    torch_rows,
    triton_activation,
    triton_buffers,
    triton_rows,
    triton_sorting,
)
from hp_expert.permute import count_slots, permute_slots, sort_slots
from hp_expert.routing.recompute import save_routing
from hp_platform.testing import run_distributed

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and "triton" not in sys.modules:
    # Read when Triton is imported, and when it decorates a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# With CUDA all of this file is a test on the GPU.
pytestmark = [pytest.mark.gpu] if CUDA else []

MODULES = (
    "batch",
    "permute",
    "dispatch.all_to_all",
    "dispatch.bounded",
    "dispatch.deduplicated",
    "experts.activate",
    "experts.grouped",
    "experts.weight_gradient",
    "routing.router",
)


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    pytest.importorskip("triton")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported without TRITON_INTERPRET=1, and there is no CUDA")


def choose_kernels(patch: pytest.MonkeyPatch, fused: bool) -> None:
    """Let kernels be Triton's, or torch's, for every module."""
    for name in MODULES:
        module = importlib.import_module(f"hp_expert.{name}")
        if hasattr(module, "fuses"):
            patch.setattr(module, "fuses", lambda _: fused)
        if hasattr(module, "kernels_for"):
            patch.setattr(
                module,
                "kernels_for",
                lambda _: triton_rows if fused else torch_rows,
            )
        if hasattr(module, "stays_on_device"):
            patch.setattr(module, "stays_on_device", lambda _: True)


@pytest.fixture(name="by_kernels")
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return partial(choose_kernels, monkeypatch)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalised": {"normalize": False, "scaling_factor": 16.0},
    "sigmoid with a bias": {
        "score_function": "sigmoid",
        "correction_bias": True,
        "scaling_factor": 2.5,
    },
    "groups": {"num_groups": 4, "num_limited_groups": 2, "correction_bias": True},
    "groups by their best": {"num_groups": 8, "num_limited_groups": 3, "group_score": "max"},
    "capacity": {"capacity_factor": 1.0},
    "capacity by position": {"capacity_factor": 1.0, "drop_policy": "position"},
}


def routed(
    router: TopKRouter, logits: Tensor, grads: tuple[Tensor, Tensor], replay: Tensor | None
) -> list[Tensor]:
    """Return the routing of a router, its gradient and its loads."""
    router.load.zero_()
    logits = logits.clone().requires_grad_()
    found = router.route(logits, replay=replay)
    torch.autograd.backward([found.weights, found.scores], grads)
    assert logits.grad is not None
    before = found.experts if found.before_drop is None else found.before_drop
    return [
        found.weights.detach(),
        found.scores.detach(),
        found.experts,
        before,
        logits.grad,
        router.load.clone(),
    ]


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ROUTERS)
def test_one_pass_routes_as_torch_does(
    by_kernels: Callable[[bool], None], kind: str, dtype: torch.dtype, *, replayed: bool
) -> None:
    torch.manual_seed(0)
    router = TopKRouter(4, 16, 4, **ROUTERS[kind], dtype=dtype, device=DEVICE)
    if router.correction_bias is not None:
        router.correction_bias.uniform_(-0.1, 0.1)
    logits = torch.randn(2, 20, 16, dtype=dtype, device=DEVICE)
    logits[0, 3], logits[1, 4, 2] = 0, logits[1, 4, 1]  # ties
    grads = (torch.randn(40, 4).to(logits), torch.randn(40, 16).to(logits))
    replay = None
    if replayed:
        by_kernels(False)
        replay = router.route(logits.roll(1, 0)).experts.clone()
        replay[5, 1] = -1
    results = []
    for fused in (False, True):
        by_kernels(fused)
        results.append(routed(router, logits, grads, replay))
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for expected, actual in zip(*results, strict=True):
        if expected.is_floating_point():
            torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
        else:
            assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
@pytest.mark.parametrize(
    ("kind", "num_experts"),
    [(kind, n) for kind in ("softmax", "sigmoid with a bias") for n in (6, 8)] + [("groups", 8)],
)
def test_a_token_whose_scores_are_no_numbers_gets_experts_that_exist(
    by_kernels: Callable[[bool], None], kind: str, num_experts: int
) -> None:
    torch.manual_seed(0)
    router = TopKRouter(4, num_experts, 3, **ROUTERS[kind], device=DEVICE)
    logits = torch.randn(1, 6, num_experts, device=DEVICE)
    logits[0, 1], logits[0, 2, 1], logits[0, 3, 1:] = torch.nan, torch.nan, torch.nan
    logits[0, 4, 2] = torch.inf
    grads = (torch.randn(6, 3).to(logits), torch.randn(6, num_experts).to(logits))
    results = []
    for fused in (False, True):
        by_kernels(fused)
        results.append(routed(router, logits, grads, None))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_recompute_routes_as_its_forward(by_kernels: Callable[[bool], None]) -> None:
    by_kernels(True)
    router = TopKRouter(4, 8, 2, device=DEVICE)
    first, again = save_routing()
    with first:
        before = router.route(torch.randn(6, 8, device=DEVICE))
    with again:
        after = router.route(torch.randn(6, 8, device=DEVICE))
    assert torch.equal(before.experts, after.experts)


@pytest.mark.parametrize("sizes", [(5, 2, 3), (300, 8, 14), (200, 3, 128), (0, 2, 4), (7, 1, 1)])
def test_slots_are_sorted_as_torch_does(
    by_kernels: Callable[[bool], None], sizes: tuple[int, int, int]
) -> None:
    by_kernels(False)
    num_tokens, top_k, num_experts = sizes
    experts = torch.randint(-1, num_experts + 2, (num_tokens, top_k), device=DEVICE)
    counted = count_slots(experts, num_experts)
    expected = sort_slots(counted.keys)
    starts = triton_sorting.count(experts, num_experts)
    order, token, inverse = triton_sorting.place(experts, starts)
    num_valid = int(counted.counts[:num_experts].sum())
    assert torch.equal(starts.counts, counted.counts)
    assert torch.equal(starts.ends.long(), counted.counts[:num_experts].cumsum(0))
    assert torch.equal(order[:num_valid], expected.order[:num_valid])
    assert torch.equal(token[:num_valid], expected.token[:num_valid])
    assert (order[num_valid:] == -1).all()
    assert (token[num_valid:] == -1).all()
    assert torch.equal(inverse, expected.inverse.where(expected.inverse < num_valid, -1))


@pytest.mark.parametrize("fused_projections", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", [SwiGLU(), ClampedSwiGLU(limit=0.5)], ids=type)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_activations_and_their_gradients_are_those_of_torch(
    dtype: torch.dtype, activation: Activation, *, weighted: bool, fused_projections: bool
) -> None:
    torch.manual_seed(0)
    P, H = 6, 40
    form = triton_activation.Form()
    if isinstance(activation, ClampedSwiGLU):
        form = triton_activation.Form(activation.limit, activation.alpha)
    both = torch.randn(P, 2 * H, device=DEVICE).to(dtype)
    gate, up = both.chunk(2, 1)
    if not fused_projections:
        gate, up = gate.contiguous(), up.contiguous()
    dh = torch.randn(P, H, device=DEVICE).to(dtype)
    slot = torch.randperm(P, device=DEVICE)
    row = torch.arange(P, device=DEVICE)
    row[3], both[3] = -1, torch.nan
    there = row >= 0
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(P, device=DEVICE, dtype=wide) if weighted else None
    g, u, d = (x.to(wide)[there] for x in (gate, up, dh))
    gated = activation.gate(g)
    h = activation.product(gated, u)
    w = torch.ones(P - 1, device=DEVICE) if weights is None else weights[slot][there]
    dg, du, dot = torch.empty_like(g), torch.empty_like(g), (d * h).sum(1)
    activation.backward(d.clone() * w.to(wide)[:, None], g, u, gated, dg, du)
    extra = torch.rand(P, device=DEVICE)
    made = torch.empty_like(gate.expand(P, H)), torch.empty_like(gate.expand(P, H))
    if fused_projections:
        halves = torch.empty_like(both).chunk(2, 1)
        made = halves[0], halves[1]
    through = triton_activation.activate_backward(
        dh, (gate, up), made, form, at=(row, slot), weights_S=weights, extra_P=extra
    )
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual.to(wide), expected.to(wide), rtol=bound, atol=bound)

    close(triton_activation.activate(gate, up, row, form)[there], h)
    close(through.scaled[there], h * w.to(wide)[:, None])
    close(made[0][there], dg)
    close(made[1][there], du)
    assert (through.weights is None) == (weights is None)
    if through.weights is not None:
        close(through.weights[slot][there], dot + extra[there].to(wide))
        assert through.weights[slot[3]] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("activation", [SwiGLU(), ClampedSwiGLU(limit=0.5)], ids=type)
def test_what_is_no_number_stays_none_through_an_activation(activation: Activation) -> None:
    form = triton_activation.Form()
    if isinstance(activation, ClampedSwiGLU):
        form = triton_activation.Form(activation.limit, activation.alpha)
    gate, up, dh = torch.randn(3, 3, 8, device=DEVICE).unbind()
    gate[0, 1], up[1, 2] = torch.nan, torch.nan
    gated = activation.gate(gate)
    expected = activation.product(gated, up)
    dpre = torch.empty_like(gate), torch.empty_like(up)
    activation.backward(dh.clone(), gate, up, gated, *dpre)
    row = torch.arange(3, device=DEVICE)
    made = torch.empty_like(gate), torch.empty_like(up)
    triton_activation.activate_backward(
        dh, (gate, up), made, form, at=(row, row), weights_S=None, extra_P=None
    )
    found = triton_activation.activate(gate, up, row, form), *made
    for actual, wanted in zip(found, (expected, *dpre), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_gradients_of_idle_experts_are_zeroed_and_no_others() -> None:
    gradient = torch.full((4, 50, 60), torch.nan, device=DEVICE)
    gradient[1], gradient[3] = 1, 2
    triton_activation.zero_idle(gradient, torch.tensor([0, 5, 0, 1], device=DEVICE))
    for expert, value in enumerate((0, 1, 0, 2)):
        assert (gradient[expert] == value).all()


@pytest.mark.parametrize("activation", [SwiGLU(), ClampedSwiGLU()], ids=type)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_experts", [6, 40])
def test_a_layer_by_kernels_is_the_layer_by_torch(
    by_kernels: Callable[[bool], None], activation: Activation, num_experts: int, *, bias: bool
) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(num_experts, 16, 24, bias=bias, activation=activation, device=DEVICE)
    experts.products = GroupedProducts()
    # Of 40 experts some are idle.
    router = TopKRouter(16, num_experts, 3, capacity_factor=1.2, device=DEVICE)
    layer = MoE(router, experts)
    x, grad = (torch.randn(2, 9, 16, device=DEVICE) for _ in range(2))
    results = []
    for fused in (False, True):
        by_kernels(fused)
        rows = x.clone().requires_grad_()
        y, routing = layer(rows)
        assert (routing.experts < 0).any()
        given = [rows, *layer.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y, given, grad)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(40, 3, 4, 2), (70, 4, 3, 5), (3, 1, 1, 2), (0, 2, 2, 2)])
def test_rows_and_codes_are_sorted_as_torch_does(
    by_kernels: Callable[[bool], None], sizes: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(0)
    T, K, W, L = sizes
    experts = torch.randint(-1, W * L, (T, K), device=DEVICE)
    found: list[tuple[Any, ...]] = []
    for fused in (False, True):
        by_kernels(fused)
        counted = count_slots(experts, W * L)
        where = deduplicated.destinations(counted.experts, num_local=L, num_ranks=W)
        num_rows = int(where.num_rows().sum())
        num_slots = int((experts >= 0).sum())
        rows = deduplicated.sort_rows(where)
        slots, codes = deduplicated.sort_codes(counted, where, num_local=L)
        rows, slots = (
            (rows.without_padding(num_rows), slots.without_padding(num_slots))
            if fused
            else (rows.first(num_rows), slots.first(num_slots))
        )
        found.append(
            (
                where.num_rows(),
                where.most_slots(),
                *rows[:3],
                *slots[:3],
                codes[:num_slots],
            )
        )
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual, expected)
    codes, num_rows = found[0][-1], int(found[0][0].sum())
    most = max(int(found[0][1].max()), 1)
    slot, order = deduplicated.unpack(codes, num_slots_per_row=most)
    mine, places = deduplicated.place_codes(
        codes, num_rows=num_rows, num_slots_per_row=most, num_local=L
    )
    assert torch.equal(mine, slot)
    assert torch.equal(places.slot, order)
    assert torch.equal(places.row, order // most)
    expected = torch.full((num_rows * most,), -1, device=DEVICE)
    expected[order] = torch.arange(order.numel(), device=DEVICE)
    assert torch.equal(places.position.view(-1), expected)
    counts = torch.bincount(codes.long() // 2, minlength=L)
    assert torch.equal(places.ends.long(), counts.cumsum(0))


@pytest.mark.parametrize("sizes", [(30, 3, 2, 3, 40), (30, 3, 2, 3, 4), (400, 2, 3, 1, 90)])
@pytest.mark.parametrize("few", [False, True])
def test_buffers_are_filled_as_torch_does(
    by_kernels: Callable[[bool], None], sizes: tuple[int, ...], *, few: bool
) -> None:
    torch.manual_seed(0)
    T, K, W, L, room = sizes
    experts = torch.randint(-1, W * L + 1, (T if not few else 0, K), device=DEVICE)  # and none such
    x = torch.randn(experts.shape[0], 2, device=DEVICE)
    found = []
    for fused in (False, True):
        by_kernels(fused)
        counted = count_slots(experts, W * L)
        counts_WL = counted.counts[: W * L].view(W, L)
        told = bounded._told(Header.of(x, experts, None, num_experts=W * L), counted, counts_WL)
        filled = bounded._into_buffer(counted, counts_WL, rows_per_pair=room)
        weights = torch.rand(experts.shape, device=DEVICE, generator=_seeded()).requires_grad_()
        sent = permute_slots(weights, filled)
        sent.backward(torch.arange(len(sent), device=DEVICE, dtype=sent.dtype))
        found.append((told, *filled[:3], sent.detach(), weights.grad))
    told = found[0][0]
    told[:, ROWS] = found[1][0][:, ROWS]  # says nothing here
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual, expected)


def _seeded() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(0)


@pytest.mark.parametrize("most", [3, 12])
@pytest.mark.parametrize("sizes", [(1, 1, 5), (2, 3, 20), (4, 5, 300), (3, 40, 70)])
def test_received_rows_are_sorted_as_torch_does(sizes: tuple[int, int, int], most: int) -> None:
    torch.manual_seed(0)
    W, L, room = sizes
    received = torch.randint(0, most, (W, COUNTS + L + 3), device=DEVICE)
    received[:, CODE], received[:, INVALID] = 7, 0
    received[:, MOST] = received[:, COUNTS : COUNTS + L].sum(1).amax()
    counts_WL = bounded._clipped(received[:, COUNTS : COUNTS + L], rows_per_pair=room)
    blocks = torch.cat([counts_WL, room - counts_WL.sum(1, keepdim=True)], dim=1)
    order = by_expert(blocks, num_rows=W * room)
    batch = ExpertBatch(torch.empty(W * room, 1), None, order, None, counts_WL.sum(0))
    expected = batch.places()
    for weights, code, invalid in (
        (None, 7, 0),
        (torch.tensor([[torch.nan]], device=DEVICE), 8, 0),
        (torch.ones(1, 1, device=DEVICE), 7, 2),
    ):
        found = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        received[-1, INVALID] = invalid
        made = triton_buffers.sort_received(
            received,
            bounded._COLUMNS,
            code=code,
            room=room,
            num_local=L,
            weights=weights,
            found=found,
            dtype=torch.bfloat16,
        )
        total = int(counts_WL.sum())
        assert torch.equal(made.row, expected.row)
        assert torch.equal(made.row[:total], order[:total])
        assert torch.equal(made.position, expected.position.view(-1))
        assert torch.equal(made.ends, expected.ends)
        assert torch.equal(made.num_tokens_per_expert, counts_WL.sum(0))
        excess = int(received[0, MOST])
        excess = 0 if excess <= room else excess if code == 7 else room + 1
        assert found.tolist() == [excess, invalid, W * (code - 7)]
        assert bool(made.poison.isnan()) == bool(found.any())


@pytest.mark.parametrize("way", ["one by one", "deduplicated", "in buffers", "in small buffers"])
def test_a_layer_over_ranks_by_kernels_is_the_layer_by_torch(
    by_kernels: Callable[[bool], None], way: str
) -> None:
    by_kernels(True)
    run_distributed(layer_of_a_rank, way, world_size=2)


def layer_of_a_rank(way: str) -> None:
    patch = pytest.MonkeyPatch()
    group = dist.group.WORLD
    assert group is not None
    results, needed = [], []
    for fused in (False, True):
        choose_kernels(patch, fused)
        torch.manual_seed(0)
        layer = MoE(TopKRouter(16, 6, 3, capacity_factor=1.2), GroupedExperts(6, 16, 24))
        layer.experts.products = GroupedProducts()
        style = ExpertParallel(deduplicate=way == "deduplicated")
        if "buffers" in way:
            rows = 30 if way == "in buffers" else 12
            make = partial(BoundedAllToAllDispatcher, rows_per_pair=rows, device=DEVICE)
            style = ExpertParallel(dispatcher=make)
        style.apply(layer, group)
        torch.manual_seed(1 + group.rank())
        x, grad = torch.randn(9, 16, requires_grad=True), torch.randn(9, 16)
        y, _ = layer(x)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)])
        needed.append(overflow_of(layer))
    patch.undo()
    assert needed[0] == needed[1]
    assert (needed[0] > 0) == (way == "in small buffers")
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def overflow_of(layer: MoE) -> int:
    """Most rows of a pair of ranks, if they did not fit."""
    try:
        if isinstance(layer.experts.dispatcher, BoundedAllToAllDispatcher):
            layer.experts.dispatcher.check()
    except BufferOverflowError as error:
        return error.rows_needed
    return 0
