"""An MoE layer on a dry device takes the branches of CUDA, without Triton and without a GPU."""

from __future__ import annotations

import torch

from hp_expert import GroupedExperts, MoE, TopKRouter
from hp_expert.kernels import kernels_for, triton_rows
from hp_platform.dry import DryDevice
from hp_platform.dry.trace import Allocate, Fault, Launch


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
