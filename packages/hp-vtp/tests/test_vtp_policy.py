"""What may cross the trust boundary, and agreement over a layout."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import new_group
from hp_platform.testing import run_distributed
from hp_vtp import PipelineLayout
from hp_vtp.policy import EdgePolicy, Payload, PolicyError, Recorder
from hp_vtp.reductions import all_ok, barrier, loss_scale
from hp_vtp.transport import TensorMeta, Transport

META = TensorMeta((3,), torch.float32)
TOKENS = TensorMeta((3,), torch.int64)


def add_one(x: Tensor) -> Tensor:
    return x + 1


def cross(policy: EdgePolicy, expected: float) -> None:
    """An activation there, a gradient back; then what is refused, which leaves the edge usable."""
    with Transport(PipelineLayout.straight([1, 2]), policy=policy) as transport:
        if transport.rank == 0:
            with pytest.raises(PolicyError, match=r"tensors\[0\]\.dtype \(torch.int64\) must be"):
                transport.send([torch.arange(3)], source=0, destination=1, microbatch=4)
            transport.send([torch.zeros(3)], source=0, destination=1, microbatch=4)
            (gradient,) = transport.receive([META], source=1, destination=0).wait()
            assert gradient.tolist() == [2.0] * 3
        else:
            handle = transport.receive([META], source=0, destination=1, microbatch=4)
            assert handle.wait()[0].tolist() == [expected] * 3
            transport.send([torch.full((3,), 2.0)], source=1, destination=0)


def check_policy() -> None:
    recorder = Recorder(keep_values=True)
    cross(EdgePolicy(frozenset({0}), recorder=recorder), 0.0)
    (crossing,) = recorder.crossings
    assert crossing.metas == (META,)
    if dist.get_rank() == 0:
        assert (crossing.payload, crossing.microbatch) == (Payload.ACTIVATION, 4)
        assert crossing.values[0].tolist() == [0.0] * 3
    else:
        assert crossing.payload is Payload.GRADIENT
    # What leaves the trusted stage is transformed, what comes back is not.
    cross(EdgePolicy(frozenset({0}), transform=add_one), 1.0)
    with Transport(
        PipelineLayout.straight([1, 2]),
        policy=EdgePolicy(frozenset({0}), allow=frozenset({Payload.GRADIENT})),
    ) as transport:
        if transport.rank == 0:
            with pytest.raises(PolicyError, match=r"payload \(activation\) must be one of"):
                transport.send([torch.zeros(3)], source=0, destination=1)
    # Within one side nothing is asked.
    with Transport(
        PipelineLayout.straight([1, 2]), policy=EdgePolicy(frozenset({0, 1}))
    ) as transport:
        if transport.rank == 0:
            transport.send([torch.arange(3)], source=0, destination=1)
        else:
            (tokens,) = transport.receive([TOKENS], source=0, destination=1).wait()
            assert tokens.tolist() == [0, 1, 2]


def test_the_policy_refuses_transforms_and_records() -> None:
    run_distributed(check_policy, world_size=3)


def check_agreement() -> tuple[float, float]:
    """Return when this rank came to the barrier and when it left it."""
    group = new_group([[0, 1, 2]], name="control", timeout=timedelta(seconds=40))
    assert group is not None
    assert all_ok(True, group=group)
    assert not all_ok(dist.get_rank() != 1, group=group)
    came = time.time()
    barrier(group=group, where="the step")
    left = time.time()
    assert loss_scale(PipelineLayout.u_shaped([1, 1], dp=[1, 2]), 5) == 0.1
    transport = Transport(PipelineLayout.straight([1, 2]))
    transport.close()
    assert transport.abort("rank 0: late") == "rank 0: late"  # which touches nothing any more
    return came, left


def test_all_ranks_agree_and_wait_for_each_other() -> None:
    times = run_distributed(check_agreement, world_size=3)
    assert max(came for came, _ in times) <= min(left for _, left in times)
