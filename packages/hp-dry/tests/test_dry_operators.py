"""What a dry device notes of operators: kernels, reads of the host, and what CUDA refuses."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dry import DryDevice
from hp_dry.trace import Event, Fault, HostWait, Launch
from hp_platform.dry_device import launch


def line() -> str:
    """The line of the caller, as a trace says it."""
    frame = inspect.stack()[1]
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"


def only(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def noted(gpu: DryDevice, action: Callable[[], object], kind: type[Event]) -> list[Any]:
    first = len(gpu.trace.events)
    action()
    return only(gpu.trace.events[first:], kind)


HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "aten._local_scalar_dense": lambda x: x.sum().item(),
    "aten.nonzero": lambda x: x.nonzero(),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten.index by a mask": lambda x: x[x > 0],
    "aten.masked_select": lambda x: x.masked_select(x > 0),
    "aten._unique2": lambda x: x.unique(),
    "aten.bincount": lambda x: torch.bincount(x.flatten().long()),
    "aten.repeat_interleave": lambda x: x.repeat_interleave(x[0].long(), 1),
    "copy to host": lambda x: x.cpu(),
    "copy to device": lambda x: torch.tensor([1.0], device=x.device),
    "torch.cuda.synchronize": lambda _: torch.cuda.synchronize(),
    "Stream.synchronize": lambda _: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", HOST_READS)
def test_a_read_of_the_host_is_found_with_its_line(what: str) -> None:
    with DryDevice() as gpu:
        x = torch.randn(4, 4, device="cuda")
        waits = noted(gpu, lambda: HOST_READS[what](x), HostWait)
    assert [wait.what for wait in waits] == [what]
    assert waits[0].at.startswith("packages/hp-dry/tests/test_dry_operators.py:")
    number = int(waits[0].at.split(" < ")[0].rsplit(":", 1)[1])
    source = inspect.getsource(HOST_READS[what]).strip()
    lines = inspect.getsourcelines(HOST_READS[what])
    assert lines[1] <= number < lines[1] + len(lines[0]), source


def test_what_reads_no_value_has_the_host_wait_for_nothing() -> None:
    with DryDevice() as gpu:
        x = torch.randn(4, 4, device="cuda")

        def run() -> None:
            x[x > 0] = 0.0
            x.masked_fill_(x > 0, 1.0)
            x[:, torch.arange(2, device="cuda")].sum()
            x.repeat_interleave(torch.ones(4, device="cuda").long(), 0, output_size=4)
            (x + torch.tensor(3.0)).where(x > 0, 0.0)
            torch.zeros(3, pin_memory=True).to("cuda", non_blocking=True)
            x.to("cpu", non_blocking=True)

        assert noted(gpu, run, HostWait) == []
        assert only(gpu.trace.events, Fault) == []


def test_the_host_reads_zeros() -> None:
    with DryDevice():
        x = torch.ones(2, 3, device="cuda")
        assert (x.sum().item(), x.long().sum().item(), bool((x > 0).all())) == (0.0, 0, False)
        assert x.tolist() == [[0.0] * 3] * 2
        assert x[x > 0].shape == (0,)
        assert x.nonzero().shape == (0, 2)
        host = torch.ones(2, 3).copy_(x)
        assert host.device.type == "cpu"
        assert host.sum() == 0
        assert torch.ones(2).sum().item() == 2  # the host's own memory is real


def adam_with_a_step_on_the_host(**options: Any) -> Callable[[], object]:
    p = nn.Parameter(torch.zeros(4, device="cuda"))
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW([p], **options)
    zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[p] = {"step": torch.zeros(()), **zeros}
    return optimizer.step


FAULTS: dict[str, Callable[[], object]] = {
    "_fused_adamw_": lambda: (adam_with_a_step_on_the_host(fused=True)(),),
    "addmm": lambda: nn.Linear(4, 4)(torch.zeros(2, 4, device="cuda")),
    "add.Tensor": lambda: torch.zeros(4, device="cuda") + torch.zeros(4),
    "_foreach_add_": lambda: torch._foreach_add_(
        [torch.zeros(4, device="cuda")], [torch.zeros(())]
    ),
    "add_.Tensor": lambda: torch.zeros(()).add_(torch.zeros((), device="cuda")),
    "asynchronous copy to device": lambda: torch.zeros(4).to("cuda", non_blocking=True),
    "asynchronous copy to host": lambda: torch.zeros(4).copy_(
        torch.zeros(4, device="cuda"), non_blocking=True
    ),
    "a generator of cpu": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "memory on cuda:1": lambda: (torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:1")),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cuda_refuses_is_found_with_its_line(what: str) -> None:
    with DryDevice() as gpu:
        found = noted(gpu, FAULTS[what], Fault)
    assert len(found) == 1
    assert what in found[0].what
    assert found[0].at.startswith("packages/hp-dry/tests/test_dry_operators.py:")


def test_numpy_of_the_device_is_refused() -> None:
    with DryDevice() as gpu, pytest.raises(TypeError, match="can't convert cuda:0 device type"):
        torch.zeros(3, device="cuda").numpy()
    assert [fault.what for fault in only(gpu.trace.events, Fault)] == [
        "numpy of a tensor that is not on the host"
    ]


def test_steps_of_adam_may_be_on_the_host_where_it_is_not_fused() -> None:
    with DryDevice() as gpu:
        step = adam_with_a_step_on_the_host(foreach=False)
        assert noted(gpu, step, Fault) == []


def test_a_launch_says_what_it_reads_writes_and_multiplies() -> None:
    with DryDevice() as gpu:
        a = torch.empty(8, 16, device="cuda", dtype=torch.bfloat16)
        b = torch.empty(16, 32, device="cuda", dtype=torch.bfloat16)
        c, at = a @ b, line()
        (found,) = only(gpu.trace.events, Launch)
        assert found.at.split(" < ")[0] == f"packages/hp-dry/tests/{at}"
        assert (found.what, found.flops) == ("aten.mm.default", 2 * 8 * 16 * 32)
        assert found.num_bytes == 2 * (8 * 16 + 16 * 32 + 8 * 32)
        assert (found.reads, found.writes) == (
            (gpu.block_of(a), gpu.block_of(b)),
            (gpu.block_of(c),),
        )
        views = noted(gpu, lambda: (c.view(-1), c.t(), c[0], torch.empty_like(c)), Launch)
        assert views == []
        (zeroed,) = noted(gpu, c.zero_, Launch)
        assert (zeroed.reads, zeroed.writes) == ((), (gpu.block_of(c),))
        assert noted(gpu, lambda: c[:0] + 1, Launch) == []


def test_operators_of_backward_name_the_line_of_forward() -> None:
    with DryDevice() as gpu:
        layer = nn.Linear(4, 4, device="cuda")
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        at = line()
        y = layer(x).relu()
        loss = y.sum()
        found = {event.what: event.at for event in noted(gpu, loss.backward, Launch)}
    number = int(at.split(":")[1]) + 1
    assert found["aten.threshold_backward.default"].split(" < ")[0].endswith(f":{number}")
    assert found["aten.mm.default"].split(" < ")[0].endswith(f":{number}")


def kernels_of_attention(gpu: DryDevice, q: Tensor, k: Tensor, **options: Any) -> set[str]:
    def run() -> None:
        F.scaled_dot_product_attention(q, k, k, **options).square().sum().backward()

    names = {event.what for event in noted(gpu, run, Launch)}
    return {name.split(".")[1] for name in names if "attention" in name or "bmm" in name}


def test_attention_takes_the_kernel_that_cuda_would() -> None:
    flash, efficient = (
        {f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward"}
        for kind in ("flash", "efficient")
    )

    def heads(num: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(1, num, 32, 16, device="cuda", dtype=dtype, requires_grad=True)

    with DryDevice() as gpu:
        half, wide = heads(8, torch.bfloat16), heads(8, torch.float32)
        shared, double = heads(2, torch.bfloat16), heads(8, torch.float64)
        mask = torch.ones(32, 32, dtype=torch.bool, device="cuda")
        assert kernels_of_attention(gpu, half, half, is_causal=True) == flash
        assert kernels_of_attention(gpu, half, shared, enable_gqa=True) == flash
        assert kernels_of_attention(gpu, half, half, attn_mask=mask) == efficient
        assert kernels_of_attention(gpu, wide, wide) == efficient
        assert kernels_of_attention(gpu, half, shared, attn_mask=mask, enable_gqa=True) == {"bmm"}
        assert kernels_of_attention(gpu, double, double) == {"bmm"}


def test_flash_attention_does_not_hold_the_scores() -> None:
    with DryDevice():
        q = torch.empty(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
        held = torch.cuda.memory_allocated()
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert torch.cuda.max_memory_allocated() - held < 1.1 * (y.nbytes + 8 * 4096 * 4)


def test_dropout_keeps_bools_and_a_norm_keeps_its_scale() -> None:
    with DryDevice() as gpu:
        x = torch.empty(64, 64, device="cuda", requires_grad=True)
        held = gpu.storages.live_bytes
        y = F.dropout(x, 0.5)
        assert gpu.storages.live_bytes - held == 64 * 64 * (4 + 1)
        held = gpu.storages.live_bytes
        z = nn.RMSNorm(64, elementwise_affine=False)(x)
        assert gpu.storages.live_bytes - held == 64 * 64 * 4 + 64 * 4
        (y + z).sum().backward()
        assert x.grad is not None


def test_kernels_that_torch_does_not_know_are_written_down() -> None:
    with DryDevice() as gpu:
        x, y = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
        launch("package.kernel", pytest.fail, reads=(x,), writes=(y,))
        (found,) = only(gpu.trace.events, Launch)
        assert (found.what, found.num_kernels, found.num_bytes) == ("package.kernel", 1, 32)
        assert (found.reads, found.writes) == ((gpu.block_of(x),), (gpu.block_of(y),))
        launch("package.kernel", pytest.fail, reads=(torch.empty(4),), writes=(y,))
        assert len(only(gpu.trace.events, Fault)) == 1
    ran: list[int] = []
    launch("package.kernel", lambda: ran.append(1), reads=(), writes=())
    assert ran == [1]


def test_grouped_products_and_packed_attention_have_shapes() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    with DryDevice() as gpu:
        x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ends = torch.full((4,), 128, device="cuda", dtype=torch.int32)
        F.grouped_mm(x, w, offs=ends).square().sum().backward()
        q = torch.randn(512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        starts = torch.zeros(3, device="cuda", dtype=torch.int32)
        varlen.varlen_attn(q, q, q, starts, starts, 256, 256).square().sum().backward()
        assert [each.grad is not None for each in (x, w, q)] == [True] * 3
        assert only(gpu.trace.events, HostWait) == only(gpu.trace.events, Fault) == []


def test_products_in_groups_multiply_as_often_as_rows_have_matrices() -> None:
    with DryDevice() as gpu:
        x = torch.empty(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ends = torch.empty(4, device="cuda", dtype=torch.int32)
        F.grouped_mm(x, w, offs=ends).square().sum().backward()
        found = [each for each in only(gpu.trace.events, Launch) if "grouped_mm" in each.what]
        assert [each.flops for each in found] == [2 * 512 * 64 * 128] * 3


def test_what_looks_rows_up_reads_those_rows_and_no_table() -> None:
    with DryDevice() as gpu:
        table = torch.empty(1000, 8, device="cuda")
        rows = torch.empty(5, device="cuda", dtype=torch.int64)
        for look_up in (F.embedding, lambda rows, table: table.index_select(0, rows)):
            before = len(gpu.trace.events)
            look_up(rows, table)
            (found,) = only(gpu.trace.events[before:], Launch)
            assert found.num_bytes == 2 * 5 * 8 * 4 + 5 * 8


@pytest.mark.parametrize(
    ("reduce", "cast"),
    [
        (lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), 8),
        (lambda x: x.sum(dtype=torch.float64), 8),
        (lambda x: x.sum(), 0),
        (lambda x: x.mean(dtype=torch.float64), 8),
        (lambda x: torch._foreach_norm([x], 2, dtype=torch.float64), 0),
    ],
)
def test_a_reduction_in_a_wider_dtype_has_a_copy_meanwhile(
    reduce: Callable[[torch.Tensor], object], cast: int
) -> None:
    with DryDevice() as gpu:
        x = torch.empty(1000, device="cuda")
        kept = gpu.storages.live_bytes
        gpu.storages.reset_peak()
        reduce(x)
        assert 0 <= gpu.storages.peak_bytes - kept - 1000 * cast <= 8
        assert gpu.storages.live_bytes == kept


def test_packed_attention_counts_what_its_segments_may_need() -> None:
    """Rows, not segments, are as many as they are; gradients are summed in memory of their own."""
    forward = torch.ops.aten._flash_attention_forward
    backward = torch.ops.aten._flash_attention_backward
    with DryDevice() as gpu:
        q = torch.empty(512, 4, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(512, 2, 64, device="cuda", dtype=torch.bfloat16)
        starts = torch.zeros(9, device="cuda", dtype=torch.int32)
        given = (starts, starts, 256, 256, 0.0, True)
        held = gpu.storages.live_bytes
        out, lse, *state, _ = forward(q, k, k, *given, False, scale=1.0)
        kept = gpu.storages.live_bytes
        assert kept - held - out.nbytes - lse.nbytes < 64
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 512), torch.float32)
        gpu.storages.reset_peak()
        grads = backward(q, q, k, k, out, lse, *given, state[0], state[1], scale=1.0)
        rows = 512 + 8 * 128
        meanwhile = 4 * rows * (4 + 4 * 64) + 2 * 512 * 4 * 64 * 2
        made = sum(each.nbytes for each in grads)
        assert gpu.storages.peak_bytes - kept == made + meanwhile
        assert gpu.storages.live_bytes - kept == made
        launched = {each.what: each for each in only(gpu.trace.events, Launch)}
        flops = 2 * 2 * 512 * 256 * 4 * 64
        assert launched["aten._flash_attention_forward.default"].flops == flops
        assert launched["aten._flash_attention_backward.default"].flops == 5 * flops // 2
        assert launched["aten._flash_attention_backward.default"].num_kernels == 5
        assert only(gpu.trace.events, HostWait) == only(gpu.trace.events, Fault) == []


def test_what_is_offloaded_takes_no_memory_of_the_host() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    with DryDevice():
        x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        before = resident()
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
        assert resident() - before < 1 << 26
        torch.cuda.synchronize()
        assert not host[:: 1 << 26].any()
        assert not torch.ones(4).pin_memory().copy_(x[:4]).any()  # what is small is as ever
