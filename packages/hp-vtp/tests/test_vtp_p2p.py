"""The point-to-point functions users know, and the autograd versions of send and receive."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_vtp import PipelineLayout
from hp_vtp.autograd import receive, send
from hp_vtp.p2p import (
    Timer,
    logical_stage,
    vtp_recv_backward,
    vtp_recv_forward,
    vtp_send_backward,
    vtp_send_forward,
)
from hp_vtp.transport import TensorMeta, Transport
from hp_vtp.transport.handles import Handle

SHAPE = (3, 5)
TIMEOUT = timedelta(seconds=30)


class CountingTimers:
    """Notes which timers ran, as Megatron's would be called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        assert log_level == 2
        timers = self

        class Named:
            def start(self) -> None:
                timers.seen.append(f"{name} start")

            def stop(self) -> None:
                timers.seen.append(f"{name} stop")

        return Named()


def loop(asynchronous: bool) -> list[str]:
    """A U-shape of two stages: edge, cloud, edge; every transfer adds one to the tensor."""
    layout = PipelineLayout.u_shaped([1, 2])
    timers = CountingTimers()
    with Transport(layout, timeout=TIMEOUT) as transport:
        is_edge = layout.stage_of(transport.rank) == 0
        assert layout.is_leader(transport.rank) == (transport.rank < 2)
        assert logical_stage(transport) == (0 if is_edge else 1)
        assert logical_stage(transport, is_end_stage=True) == (2 if is_edge else 1)

        def forward(microbatch: int, *, end: bool) -> Tensor | None:
            if not asynchronous:
                return vtp_recv_forward(
                    SHAPE,
                    transport,
                    dtype=torch.float64,
                    is_end_stage=end,
                    microbatch=microbatch,
                    timers=timers,
                )
            handle = vtp_recv_forward(
                SHAPE,
                transport,
                dtype=torch.float64,
                async_op=True,
                is_end_stage=end,
                microbatch=microbatch,
                timers=timers,
            )
            assert handle is None or isinstance(handle, Handle)
            return None if handle is None else handle.wait()[0]

        def backward(microbatch: int, *, end: bool) -> Tensor | None:
            if not asynchronous:
                return vtp_recv_backward(
                    SHAPE, transport, dtype=torch.float64, is_end_stage=end, microbatch=microbatch
                )
            handle = vtp_recv_backward(
                SHAPE,
                transport,
                dtype=torch.float64,
                async_op=True,
                is_end_stage=end,
                microbatch=microbatch,
            )
            return None if handle is None else handle.wait()[0]

        for i in range(2):
            x = forward(i, end=False)
            if is_edge:
                assert x is None  # the chain begins here
                x = torch.full(SHAPE, float(i), dtype=torch.float64)
                vtp_send_forward(x, transport, microbatch=i, timers=timers)
                y = forward(i, end=True)
                assert y is not None
                assert y.requires_grad
                assert y.unique().tolist() == [i + 1.0]
                # At the end of the chain nothing goes on and nothing comes back.
                assert vtp_send_forward(y, transport, is_end_stage=True) is None
                assert backward(i, end=True) is None
                vtp_send_backward(y.detach() + 1, transport, is_end_stage=True, microbatch=i)
                gradient = backward(i, end=False)
                assert gradient is not None
                assert not gradient.requires_grad
                assert gradient.unique().tolist() == [i + 3.0]
                assert vtp_send_backward(gradient, transport) is None
            else:
                assert x is not None
                vtp_send_forward(x.detach() + 1, transport, microbatch=i, timers=timers)
                gradient = backward(i, end=True)
                assert gradient is not None
                vtp_send_backward(gradient + 1, transport, microbatch=i, timers=timers)
    return timers.seen


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_four_functions_go_round_a_u_shape(asynchronous: bool) -> None:
    seen = run_distributed(loop, asynchronous, world_size=3)
    first = ["forward-send start", "forward-send stop", "forward-recv start", "forward-recv stop"]
    assert seen[0][:4] == first
    last = ["backward-send start", "backward-send stop"]
    assert seen[1][-2:] == last


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()
    return nn.Sequential(first, nn.Tanh()), second


def join(sizes: tuple[int, int]) -> float:
    """Two plain modules, each on all ranks of its stage; return the largest gradient error."""
    encoder, decoder = modules()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.arange(3)
    decoder(encoder(x) * tokens[:, None]).square().sum().backward()
    expected = [p.grad for m in (encoder, decoder) for p in m.parameters()]
    encoder, decoder = modules()
    layout = PipelineLayout.straight(sizes)
    metas = [TensorMeta((3, 6), torch.float64), TensorMeta((3,), torch.int64)]
    with Transport(layout, timeout=TIMEOUT) as transport:
        if layout.stage_of(transport.rank) == 0:
            send(transport, [encoder(x), tokens], source=0, destination=1).backward()
            mine, wanted = list(encoder.parameters()), expected[:2]
        else:
            hidden, weights = receive(transport, metas, source=0, destination=1)
            assert hidden.requires_grad
            assert not weights.requires_grad
            decoder(hidden * weights[:, None]).square().sum().backward()
            mine, wanted = list(decoder.parameters()), expected[2:]
    worst = 0.0
    for parameter, grad in zip(mine, wanted, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        worst = max(worst, ((parameter.grad - grad).abs().max() / grad.abs().max()).item())
    return worst


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3)])
def test_autograd_goes_through_a_transfer(sizes: tuple[int, int]) -> None:
    assert max(run_distributed(join, sizes, world_size=sum(sizes))) <= 1e-12


def lose_gradient() -> None:
    """The receiver dies of an error in its backward: the sender's backward raises."""
    transport = Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT)
    if transport.rank == 0:
        x = torch.ones(2, requires_grad=True)
        token = send(transport, [x * 2], source=0, destination=1)
        with pytest.raises(RuntimeError, match="rank 1: no gradient today"):
            token.backward()
    else:
        receive(transport, [TensorMeta((2,), torch.float32)], source=0, destination=1)
        transport.abort("rank 1: no gradient today")
    dist.barrier()
    transport.close()


def test_a_backward_that_waits_in_vain_raises() -> None:
    run_distributed(lose_gradient, world_size=2)
