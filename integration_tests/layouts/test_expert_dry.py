"""An MoE layer on a dry device takes the branches of CUDA, without Triton and without a GPU."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hp_dry import DryDevice, active_device, run_ranks
from hp_dry.trace import Allocate, Fault, Launch
from hp_expert import ExchangeRead, ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_expert.kernels import kernels_for, triton_rows, triton_sorting
from hp_platform import initialize
from hp_platform.dry_device import answering


def test_rows_are_moved_by_triton_as_far_as_shapes_go() -> None:
    T, K, D, R = 6, 2, 16, 12
    with DryDevice() as gpu:
        x = torch.empty(T, D, device="cuda", dtype=torch.bfloat16)
        assert kernels_for(x) is triton_rows
        token, slot = (torch.empty(R, device="cuda", dtype=torch.int64) for _ in range(2))
        inverse = torch.empty(T, K, device="cuda", dtype=torch.int64)
        weights = torch.empty(T, K, device="cuda")
        first = len(gpu.trace.events)
        rows = triton_rows.gather_rows(x, token, holes=True)
        y = triton_rows.sum_rows(rows, inverse, weights, holes=True)
        grads = triton_rows.sum_rows_backward(y, rows, slot, weights, holes=True)
        assert (rows.shape, y.shape) == ((R, D), (T, D))
        assert [grad.shape for grad in grads] == [(R, D), (T, K)]
        events = gpu.trace.events[first:]
    found = [event for event in events if isinstance(event, Launch)]
    moved = [(event.what, event.num_bytes) for event in found if event.what.startswith("hp_expert")]
    # As the table of `triton_rows` has it, with operands read once.
    assert moved == [
        ("hp_expert.gather_rows", 2 * T * D + 8 * R + 2 * R * D),
        ("hp_expert.sum_rows", 2 * R * D + 8 * T * K + 4 * T * K + 2 * T * D),
        ("hp_expert.sum_rows_backward", 2 * T * D + 4 * R * D + 8 * R + 8 * T * K),
    ]
    assert len([event for event in events if isinstance(event, Allocate)]) == 4
    assert kernels_for(torch.empty(2, 2)) is not triton_rows


def test_a_layer_runs_forward_and_backward() -> None:
    with DryDevice() as gpu:
        with torch.device("cuda"):
            layer = MoE(TopKRouter(64, 8, 2), GroupedExperts(8, 64, 32)).to(torch.bfloat16)
        x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, _ = layer(x)
        y.square().sum().backward()
        assert (y.shape, y.device.type) == (x.shape, "cuda")
        assert all(p.grad is not None for p in layer.parameters())
        names = {event.what for event in gpu.trace if isinstance(event, Launch)}
        assert "hp_expert.sum_rows" in names
        assert not [event for event in gpu.trace if isinstance(event, Fault)]


def test_sizes_that_differ_from_step_to_step_make_no_variants_of_kernels() -> None:
    with DryDevice() as gpu:
        for num_rows in (1, 7, 16):
            experts = torch.zeros(num_rows, 2, device="cuda", dtype=torch.int64)
            counted = triton_sorting.count(experts, 8)
            triton_sorting.place(experts, counted)
            triton_sorting.fill(experts, counted, num_local=4, num_ranks=2, room=num_rows)
            triton_sorting.encode(
                experts.view(-1), experts, num_local=4, num_ranks=2, dtype=torch.uint8
            )
            values = torch.zeros(num_rows, device="cuda")
            triton_rows.gather_rows(values, experts[:, 0].contiguous(), holes=True)
        found = {e.variant for e in gpu.trace if isinstance(e, Launch) and e.variant}
        names = [variant.split()[0] for variant in found]
        assert len(names) == len(set(names)) == 6
        # A layer's own width is no such number.
        triton_rows.gather_rows(torch.zeros(2, 7, device="cuda"), experts[:, 0], holes=True)
        triton_rows.gather_rows(torch.zeros(2, 16, device="cuda"), experts[:, 0], holes=True)
        rows = {e.variant for e in gpu.trace if isinstance(e, Launch)} - found - {""}
    assert len(rows) == 2


def kernels_of_a_step(dtype: torch.dtype, *, deduplicate: bool, get_rows: bool) -> list[str]:
    """Kernels of ours that rank 0 of two launches, whose experts get all rows or none."""
    with torch.device("cuda"):
        router, experts = TopKRouter(64, 8, 2), GroupedExperts(8, 64, 32, bias=True)
    assert dist.group.WORLD is not None
    ExpertParallel(deduplicate=deduplicate).apply(experts, dist.group.WORLD)
    layer = MoE(router, experts).to(dtype)
    x = torch.randn(16, 64, device="cuda", dtype=dtype, requires_grad=True)

    def answer(copy: Tensor, purpose: object) -> Tensor:
        assert isinstance(purpose, ExchangeRead)
        here, there = (8, 0) if get_rows else (0, 8)
        return purpose.numbers([here] * 4 + [there] * 4, [2 * here, 2 * there], like=copy)

    events = active_device().trace.events
    first = len(events)
    with answering(answer):
        layer(x)[0].square().sum().backward()
    return sorted({e.variant for e in events[first:] if isinstance(e, Launch) and e.variant})


def kernels_of_steps() -> list[tuple[list[str], list[str]]]:
    """With rows and without, each way that experts are computed and rows are sent."""
    initialize(device_type="cuda")
    ways = itertools.product((torch.bfloat16, torch.float32), (True, False))
    steps = [partial(kernels_of_a_step, dtype, deduplicate=chosen) for dtype, chosen in ways]
    return [(step(get_rows=True), step(get_rows=False)) for step in steps]


def test_experts_without_rows_launch_every_kernel_that_those_with_rows_do() -> None:
    """A rank that gets its first rows later than others loads nothing under a message."""
    run = run_ranks(kernels_of_steps, world_size=2, representatives={0: (0, 1)})
    for with_rows, without in run.results[0]:
        assert len(with_rows) >= 8
        assert without == with_rows
