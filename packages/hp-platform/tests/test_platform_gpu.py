"""Collectives, sends, streams and recorded devices on CUDA; each rank takes a GPU or shares one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import (
    Event,
    RankInfo,
    Runtime,
    ThreadContext,
    WeightGradQueue,
    agree,
    all_gather_uneven,
    all_to_all,
    all_to_all_lazy,
    all_to_all_wait,
    backend_for,
    current_stream,
    float64_norms,
    initialize,
    irecv,
    isend,
    launch_all_to_all,
    linear,
    mesh_of,
    new_group,
    reduce_scatter_uneven,
    shutdown,
    start_all_to_all,
    use_stream,
    wait_tensor,
)
from hp_platform.testing import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = 2
TIMEOUT = timedelta(seconds=60)


def _on_gpus(address: str) -> Runtime:
    """A world of the backend that the GPUs of this machine want, instead of Gloo's."""
    shutdown()
    info = RankInfo.from_env()
    assert info is not None
    sharers = -(-RANKS // torch.cuda.device_count())
    backend = backend_for(torch.device("cuda"), ranks_per_device=sharers)
    return initialize(
        info, device_type="cuda", timeout=TIMEOUT, init_method=address, backend=backend
    )


def _group(name: str) -> ProcessGroup:
    group = new_group([range(RANKS)], name=name)
    assert group is not None
    return group


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/rendezvous"


def _world(address: str) -> tuple[str, str, str, float]:
    runtime = _on_gpus(address)
    group = _group("own")
    x = torch.full((3,), runtime.info.rank + 1.0, dtype=torch.float64, device=runtime.device)
    dist.all_reduce(x, group=group)
    agree(group=runtime.control)
    mesh = mesh_of({"ep": group}, list(range(RANKS)), device_type="cuda")
    shutdown()
    return runtime.device.type, runtime.backend, mesh.device_type, x.sum().item()


def test_a_world_on_gpus_has_a_control_group_on_the_cpu(address: str) -> None:
    for device, backend, mesh, total in run_distributed(_world, address, world_size=RANKS):
        assert (device, mesh, total) == ("cuda", "cuda", 9.0)
        if torch.cuda.device_count() >= RANKS:
            assert backend == "nccl"


def _exchanges(address: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Result and gradient of every form of all-to-all, with uneven blocks."""
    runtime = _on_gpus(address)
    group, rank = _group("ep"), runtime.info.rank
    splits = {"input_splits": [rank, 2], "output_splits": [[0, 1], [2, 2]][rank]}
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": lambda x: all_to_all(x, group=group, **splits),
        "lazy": lambda x: wait_tensor(all_to_all_lazy(x, group=group, **splits)),
        "split": lambda x: all_to_all_wait(start_all_to_all(x, group=group, **splits)),
        "launched": lambda x: launch_all_to_all(x, group=group, **splits).wait() + 0 * x.sum(),
    }
    found = {}
    for name, form in forms.items():
        x = torch.arange(4.0 * (rank + 2), device=runtime.device).view(-1, 4).to(dtype)
        x = (x + 100 * rank).requires_grad_()
        y = form(x)
        y.square().sum().backward()
        assert x.grad is not None
        found[name] = y.detach().cpu(), x.grad.cpu()
    shutdown()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_all_to_all_moves_rows_and_gradients(address: str, dtype: torch.dtype) -> None:
    first, second = run_distributed(_exchanges, address, dtype, world_size=RANKS)
    rows = [torch.arange(4.0 * (r + 2)).view(-1, 4).to(dtype) + 100 * r for r in range(RANKS)]
    # Rank 0 keeps none of its 2 rows; rank 1 sends the first of its 3.
    expected = [rows[1][:1], torch.cat([rows[0], rows[1][1:]])]
    for rank, found in enumerate((first, second)):
        for name, (y, grad) in found.items():
            assert torch.equal(y, expected[rank]), name
            wanted = torch.zeros_like(grad) if name == "launched" else 2 * rows[rank]
            assert torch.equal(grad, wanted), name


def _gathers(address: str) -> tuple[Tensor, Tensor, Tensor]:
    runtime = _on_gpus(address)
    group, rank, sizes = _group("cp"), runtime.info.rank, [3, 1]
    x = torch.full((sizes[rank], 2), rank + 1.0, device=runtime.device, requires_grad=True)
    whole = all_gather_uneven(x, sizes=sizes, group=group)
    (whole * (rank + 1)).sum().backward()
    part = reduce_scatter_uneven(whole.detach(), sizes=sizes, group=group)
    assert x.grad is not None
    result = whole.detach().cpu(), x.grad.cpu(), part.cpu()
    shutdown()
    return result


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs a GPU for each of two ranks")
def test_uneven_shards_are_gathered_and_scattered(address: str) -> None:
    for rank, (whole, grad, part) in enumerate(
        run_distributed(_gathers, address, world_size=RANKS)
    ):
        assert whole[:, 0].tolist() == [1, 1, 1, 2]
        assert grad.unique().tolist() == [3]
        assert part.unique().tolist() == [2 * (rank + 1)]


def _messages(address: str, count: int) -> list[float]:
    """Both directions at once, several under way, the sender's memory used again at once."""
    runtime = _on_gpus(address)
    rank, device = runtime.info.rank, runtime.device
    other = 1 - rank
    groups = [_group("0->1"), _group("1->0")]
    for source, group in enumerate(groups):  # NCCL connects at the first message, and waits
        first = torch.zeros(1, device=device)
        if rank == source:
            isend(first, other, group=group).wait()
        else:
            irecv(first, other, group=group).wait()
    numel = 1 << 20
    receives = [
        irecv(torch.empty(numel, device=device), other, group=groups[other]) for _ in range(count)
    ]
    sends = []
    for index in range(count):
        busy = torch.ones(512, 512, device=device)
        for _ in range(20):  # the message is written long after the host has sent it off
            busy = busy @ busy / 512
        sends.append(isend(busy[0, 0] * (10 * rank + index) + torch.zeros(numel, device=device),
                           other, group=groups[rank]))  # fmt: skip
        torch.full((numel,), -1.0, device=device)
    found = [receive.wait() for receive in receives]
    for send in sends:
        send.wait()
    ends = [value for x in found for value in (x[0].item(), x[-1].item())]
    shutdown()
    return ends


def test_messages_arrive_whole_whatever_happens_to_the_senders_memory(address: str) -> None:
    first, second = run_distributed(_messages, address, 4, world_size=RANKS)
    assert first == pytest.approx([value for i in range(4) for value in (10.0 + i, 10.0 + i)])
    assert second == pytest.approx([value for i in range(4) for value in (float(i), float(i))])


def test_a_stream_waits_for_an_event_of_another() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    side, ready = torch.cuda.Stream(device), Event(device)
    with use_stream(side):
        assert current_stream(device) == side
        x = torch.ones(1024, 1024, device=device)
        for _ in range(50):
            x = x @ x / 1024
        ready.record()
    ready.wait()
    total = x.sum()
    x.record_stream(torch.cuda.current_stream(device))
    assert total.item() == pytest.approx(1024 * 1024)
    ready.synchronize()
    assert ready.query()


def test_a_thread_takes_over_the_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    side = torch.cuda.Stream(device)
    found: list[torch.cuda.Stream | None] = []
    with use_stream(side):
        context = ThreadContext.capture()

    def run() -> None:
        with context.apply():
            found.append(current_stream(device))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [side]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_put_off_are_those_of_an_ordinary_backward(dtype: torch.dtype) -> None:
    queue = WeightGradQueue()
    grads = []
    for put_off in (False, True):
        torch.manual_seed(0)
        weight = torch.randn(16, 8, device="cuda", dtype=dtype, requires_grad=True)
        y = linear(torch.randn(4, 8, device="cuda", dtype=dtype), weight).square().sum()
        if put_off:
            with queue.defer(0):
                y.backward()
            assert weight.grad is None
            assert queue.flush(0) == 1
        else:
            y.backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_float64_need_no_copy_and_those_of_torch_do(dtype: torch.dtype) -> None:
    x = torch.randn(1 << 24, device="cuda").to(dtype)
    expected = torch.linalg.vector_norm(x.cpu().double())

    def bytes_meanwhile(norm: Callable[[], Tensor]) -> int:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.testing.assert_close(norm().cpu(), expected, rtol=1e-12, atol=0)
        return torch.cuda.max_memory_allocated() - held

    assert bytes_meanwhile(lambda: float64_norms([x])[0]) < 1 << 20
    # Which is what a dry device counts: `results.py`.
    assert bytes_meanwhile(lambda: torch.linalg.vector_norm(x, dtype=torch.float64)) >= 8 << 24
