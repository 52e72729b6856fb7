"""A dry device runs the code of a rank on CUDA: bytes as on a real device, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from hp_dry import DryDevice, Gpu
from hp_dry.trace import Allocate, Fault, Label, Launch, Release, Trace
from hp_platform import is_dry


class Block(nn.Module):
    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads = heads
        # Of 16 bits, the CPU keeps mean and scale in 16 bits, CUDA in 32.
        is_half = options.get("dtype") == torch.bfloat16
        self.norm = nn.Identity() if is_half else nn.LayerNorm(width, **options)
        self.qkv = nn.Linear(width, 3 * width, **options)
        self.up = nn.Linear(width, 4 * width, **options)
        self.down = nn.Linear(4 * width, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).flatten(2)
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


def steps(
    device: str,
    note: Callable[[], None],
    *,
    width: int,
    dtype: torch.dtype,
    recompute: bool,
    **adam: Any,
) -> None:
    torch.manual_seed(0)
    options: Any = {"device": device, "dtype": dtype}
    blocks = nn.ModuleList(Block(width, 4, **options) for _ in range(3))
    table, head = nn.Embedding(100, width, **options), nn.Linear(width, 100, **options)
    params = [p for m in (blocks, table, head) for p in m.parameters()]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(params, fused=True)
        if adam["fused"]
        else torch.optim.SGD(params, 0.1, momentum=0.9, foreach=True)
    )
    tokens = torch.zeros(2, 48, dtype=torch.int64, device=device)
    for _ in range(2):
        x = table(tokens)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        F.cross_entropy(head(x).flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        note()
        optimizer.step()
        optimizer.zero_grad()
        note()


@pytest.mark.parametrize(
    ("width", "dtype", "recompute", "fused"),
    [
        (64, torch.float32, False, True),
        (64, torch.float32, True, True),
        (96, torch.bfloat16, False, True),
        (32, torch.bfloat16, True, False),
        (48, torch.float64, True, True),
        (128, torch.float32, False, False),
    ],
)
def test_live_and_peak_bytes_are_those_of_a_real_device(
    width: int, dtype: torch.dtype, *, recompute: bool, fused: bool
) -> None:
    cpu, real, dry = torch.device("cpu"), [], []
    tracker = MemTracker()

    def note_real() -> None:
        now, peak = (
            tracker.get_tracker_snapshot(kind)[cpu]["Total"] for kind in ("current", "peak")
        )
        real.append((now, peak))
        tracker.reset_mod_stats()

    options: Any = {"width": width, "dtype": dtype, "recompute": recompute, "fused": fused}
    with tracker:
        steps("cpu", note_real, **options)
    with DryDevice() as gpu:
        steps(
            "cuda",
            lambda: dry.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())),
            **options,
        )
    assert dry == real
    assert not faults(gpu.trace)
    assert replayed(gpu.trace) == dry[-1][1]


def replayed(trace: Trace) -> int:
    """The peak that the events of a trace tell of."""
    sizes: dict[int, int] = {}
    now = peak = 0
    for event in trace:
        if isinstance(event, Allocate):
            sizes[event.block] = event.num_bytes
            now += event.num_bytes
            peak = max(peak, now)
        elif isinstance(event, Release):
            now -= sizes.pop(event.block)
    return peak


def faults(trace: Trace) -> list[str]:
    return [f"{event.what} at {event.at}" for event in trace if isinstance(event, Fault)]


def launches(trace: Trace) -> list[str]:
    return [event.what for event in trace if isinstance(event, Launch)]


def test_recompute_repeats_forward_operator_by_operator() -> None:
    kinds = []
    for recompute in (False, True):
        with DryDevice() as gpu:
            block = Block(32, 2, device="cuda")
            x = torch.randn(2, 8, 32, device="cuda", requires_grad=True)
            first = len(gpu.trace.events)
            y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            forward = launches(Trace(0, 1, {}, gpu.trace.events[first:]))
            first = len(gpu.trace.events)
            y.sum().backward()
            kinds.append((forward, launches(Trace(0, 1, {}, gpu.trace.events[first:]))))
    (plain, backward), (forward, both) = kinds
    assert plain == forward
    num = len(both) - len(backward)
    assert len(forward) - 2 <= num  # it stops at the last tensor that was saved
    assert both[2 : 2 + num] == forward[:num]
    assert both[:2] + both[2 + num :] == backward


@pytest.fixture(name="ranks")
def _ranks() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks")
def test_fsdp_holds_a_shard_and_gathers_a_block_at_a_time() -> None:
    width, num_blocks = 256, 4
    with DryDevice(3, 8, local_rank=3) as gpu:
        torch.cuda.set_device(3)
        mesh = init_device_mesh("cuda", (8,))
        with torch.device("meta"):
            model = nn.Sequential(*[Block(width, 4) for _ in range(num_blocks)])
        assert next(model.parameters()).device.type == "meta"
        assert torch.cuda.memory_allocated() == 0
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cuda")
        parameters = list(model.parameters())
        assert parameters[0].device == torch.device("cuda", 3)
        numel = sum(p.numel() for p in parameters)
        assert torch.cuda.memory_allocated() == numel * 4 // 8
        optimizer = torch.optim.AdamW(parameters, fused=True)
        for _ in range(2):
            model(torch.randn(1, 8, width, device="cuda")).float().square().mean().backward()
            norm: Any = nn.utils.clip_grad_norm_(parameters, 1.0)
            assert norm.full_tensor().item() == 0.0
            optimizer.step()
            optimizer.zero_grad()
        # Shards, two moments of them, and a step for each parameter.
        kept = numel * 4 // 8 * 3 + 4 * len(parameters)
        assert kept <= torch.cuda.memory_allocated() <= 1.1 * kept
    ops = [event for event in gpu.trace.events if type(event).__name__ == "Collective"]
    gathers = [each for each in ops if "allgather" in getattr(each, "op")]  # noqa: B009
    assert len(gathers) == 2 * 2 * num_blocks  # in forward and in backward of two steps
    assert not faults(gpu.trace)


def attributes() -> dict[str, Any]:
    owners = (torch, torch.cuda, torch.cuda.memory, torch.cuda.nccl, torch.accelerator)
    owners = (
        *owners,
        torch.backends.cuda,
        torch._C,
        Tensor,
        torch.UntypedStorage,
        threading.Thread,
    )  # type: ignore[assignment]
    return {f"{owner.__name__}.{k}": v for owner in owners for k, v in vars(owner).items()}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_torch_is_changed_afterwards(*, fails: bool) -> None:
    torch.cuda.Stream, torch.accelerator.current_accelerator()  # what torch makes when it is asked
    before, meta = attributes(), torch.empty(2, device="meta")
    try:
        with DryDevice() as gpu:
            assert is_dry()
            x = torch.randn(4, 8, 3, 16, device="cuda", dtype=torch.bfloat16)
            F.scaled_dot_product_attention(x, x, x)
            assert meta.device.type == "cuda" or meta.is_meta
            assert 1 / (0 if fails else 1)
    except ZeroDivisionError:
        assert fails
    assert not is_dry()
    after = attributes()
    assert {name for name in before if before[name] is not after.get(name)} == set()
    assert not after.keys() - before.keys()
    assert meta.is_meta
    assert not torch.empty(2, device="meta").is_cuda
    num = len(gpu.trace.events)
    torch.nn.functional.dropout(torch.empty(2, device="meta"), 0.5)
    del x
    assert len(gpu.trace.events) == num


def test_only_one_device_at_a_time() -> None:
    with DryDevice(), pytest.raises(RuntimeError, match="inside a DryDevice already"):
        DryDevice().__enter__()
    assert not is_dry()


def test_memory_of_meta_is_none_until_it_is_made() -> None:
    with DryDevice() as gpu:
        with torch.device("meta"):
            layer = nn.Linear(8, 8)
        copy = torch.empty_like(layer.weight)
        assert (layer.weight.device.type, copy.device.type) == ("meta", "meta")
        assert layer.weight.is_meta
        assert not layer.weight.is_cuda
        assert gpu.storages.live_bytes == 0
        with pytest.raises(NotImplementedError, match="no data"):
            layer.to("cuda")
        layer.to_empty(device="cuda")
        assert gpu.storages.live_bytes == 4 * (64 + 8)
        assert layer.weight.to("meta").is_meta
        assert gpu.storages.live_bytes == 4 * (64 + 8)


def test_the_gpu_is_as_told() -> None:
    told = Gpu("Some GPU", 10 * 2**30, (10, 0), 148, 4)
    with DryDevice(gpu=told):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 4
        assert torch.cuda.get_device_capability() == (10, 0)
        found = torch.cuda.get_device_properties(0)
        assert (found.name, found.total_memory, found.multi_processor_count) == (
            "Some GPU",
            10 * 2**30,
            148,
        )
        x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info() == (10 * 2**30 - (1 << 20), 10 * 2**30)
        del x
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 1 << 20
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        with pytest.raises(RuntimeError, match="below num_devices"):
            torch.cuda.set_device(4)


def test_labels_name_the_memory_of_tensors() -> None:
    with DryDevice() as gpu:
        x, y = torch.empty(3, device="cuda"), torch.empty(3)
        gpu.label([x, y], "parameters")
        found = [event for event in gpu.trace if isinstance(event, Label)]
        assert [(event.block, event.kind) for event in found] == [(gpu.block_of(x), "parameters")]


def test_what_runs_as_a_graph_is_refused_in_one_sentence() -> None:
    with DryDevice():
        with pytest.raises(RuntimeError, match=r"torch\.compile is not there in a dry run"):
            torch.compile(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="CUDAGraph is not there in a dry run"):
            torch.cuda.CUDAGraph()
        with pytest.raises(
            RuntimeError, match=r"torch\.autocast of cuda is not there in a dry run"
        ):
            torch.autocast("cuda", dtype=torch.bfloat16).__enter__()
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", enabled=False):
            pass


def test_a_number_names_a_device() -> None:
    with DryDevice():
        found = [torch.zeros(2, device=0), torch.zeros(2).to(0), torch.zeros(2).cuda(0)]
        assert {x.device for x in found} == {torch.device("cuda", 0)}
        assert found[0].untyped_storage().device == torch.device("cuda", 0)
        assert torch.zeros(2).untyped_storage().device == torch.device("cpu")
        assert torch.get_device_module() is torch.cuda
        assert found[0].to(torch.zeros(2)).device.type == "cpu"


def test_addresses_tell_storages_apart() -> None:
    with DryDevice():
        x, y = torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda")
        assert x.data_ptr() != y.data_ptr()
        assert x[1].data_ptr() == x.data_ptr() + 16
        assert torch.empty(0, device="cuda").data_ptr() == 0
