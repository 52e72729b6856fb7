"""Transfers over real ranks, against slices of the same tensor in one process."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_platform.testing import run_distributed
from hp_vtp import Algorithm, Links, PipelineLayout, Placement, Replicated, Sharded, StageLayout
from hp_vtp.transport import TensorMeta, Transport

TIMEOUT = timedelta(seconds=30)


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def part(x: torch.Tensor, placement: Placement, index: int, ranks: int) -> torch.Tensor:
    """The slice that the layout gives to one rank, computed without a plan."""
    if isinstance(placement, Replicated):
        return x
    n = x.shape[placement.dim]
    start, stop = n * index // ranks, n * (index + 1) // ranks
    return x.narrow(placement.dim, start, stop - start)


def check_boundary(
    transport: Transport,
    source: int,
    destination: int,
    metas: tuple[TensorMeta, ...],
    domain: int,
    *,
    by_host: bool = False,
) -> None:
    """Send over one edge and compare, bit for bit, with a slice of the tensor."""
    edge = transport.layout.edge(source, destination, domain=domain)
    seeds = range(1000 * source + 10 * destination + 100 * domain, 10**6)
    tensors = [
        whole(meta.shape, meta.dtype, seed) for meta, seed in zip(metas, seeds, strict=False)
    ]
    rank = transport.rank
    ends: Any = {"source": source, "destination": destination, "domain": domain}
    ends["by_host"] = by_host
    if rank in edge.source_ranks:
        a, index = len(edge.source_ranks), edge.source_ranks.index(rank)
        local = [
            part(x, Replicated() if meta.replicated else edge.source_boundary, index, a)
            for x, meta in zip(tensors, metas, strict=True)
        ]
        transport.send(local, metas=metas, **ends)
    if rank in edge.destination_ranks:
        b, index = len(edge.destination_ranks), edge.destination_ranks.index(rank)
        received = transport.receive(metas, **ends).wait()
        for x, y, meta in zip(tensors, received, metas, strict=True):
            placement = Replicated() if meta.replicated else edge.destination_boundary
            assert y.is_contiguous()
            assert y.requires_grad == (edge.is_forward and y.is_floating_point())
            assert y.is_leaf
            torch.testing.assert_close(y, part(x, placement, index, b), rtol=0, atol=0)


def check_layout(
    layout: PipelineLayout, metas: tuple[TensorMeta, ...], algorithm: Algorithm
) -> int:
    """Activations through the whole chain, then gradients back, for every domain."""
    with Transport(layout, algorithm=algorithm, timeout=TIMEOUT) as transport:
        for domain in range(layout.num_domains):
            for stage in range(layout.num_stages - 1):
                check_boundary(transport, stage, stage + 1, metas, domain)
            for stage in reversed(range(layout.num_stages - 1)):
                check_boundary(transport, stage + 1, stage, metas, domain)
    return dist.get_rank()


def check_placements(sizes: tuple[int, int], algorithms: tuple[Algorithm, ...]) -> None:
    metas = (TensorMeta((5, 7, 3), torch.float32),)
    first = tuple(range(sizes[0]))
    second = tuple(range(sizes[0], sum(sizes)))
    for algorithm in algorithms:
        for source, destination in (
            *((Replicated(), Replicated()), (Replicated(), Sharded(1))),
            *((Sharded(1), Replicated()), (Sharded(1), Sharded(1))),
        ):
            stages = (StageLayout((first,), source), StageLayout((second,), destination))
            check_layout(PipelineLayout(stages, (0, 1)), metas, algorithm)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 2)])
def test_a_transfer_equals_the_slice_of_one_process(sizes: tuple[int, int]) -> None:
    run_distributed(check_placements, sizes, ("interval", "leader"), world_size=sum(sizes))


def test_direct_transfers_equal_the_slice_of_one_process() -> None:
    run_distributed(check_placements, (2, 3), ("direct",), world_size=5)


def check_chunks() -> tuple[int, ...]:
    """Slow links between stages and fast ones within make chunks worth while."""
    links = Links(cross_bandwidth=1e8, cross_latency=0, local_bandwidth=1e8, local_latency=0)
    stages = (StageLayout(((0, 1),), Sharded(1)), StageLayout(((2, 3, 4),)))
    metas = (TensorMeta((3, 150, 300), torch.float32), TensorMeta((5,), torch.int64, True))
    with Transport(PipelineLayout(stages, (0, 1)), links=links) as transport:
        check_boundary(transport, 0, 1, metas, 0)
        check_boundary(transport, 1, 0, metas, 0)
        edge = transport.layout.edge(0, 1)
        return tuple(plan.chunks for plan in transport.plan(edge, metas))


def by_hosts(layout: PipelineLayout, metas: tuple[TensorMeta, ...]) -> bool:
    """Transfers by host among others on the same edges."""
    with Transport(layout, timeout=TIMEOUT) as transport:
        for by_host in (True, False, True):
            for source, destination in ((0, 1), (1, 0)):
                check_boundary(transport, source, destination, metas, 0, by_host=by_host)
    return True


def test_a_transfer_through_the_memory_of_hosts_equals_the_slice_of_one_process() -> None:
    stages = (StageLayout(((0, 1),), Sharded(1)), StageLayout(((2, 3, 4),), Sharded(1)))
    layout = PipelineLayout(stages, (0, 1))
    metas = (TensorMeta((2, 7, 3), torch.float32), TensorMeta((5,), torch.int64, replicated=True))
    assert run_distributed(by_hosts, layout, metas, world_size=5) == [True] * 5


def test_chunks_arrive_whole() -> None:
    assert run_distributed(check_chunks, world_size=5)[0] == (8, 1)


MIXED = (
    TensorMeta((6, 5, 4), torch.bfloat16),
    TensorMeta((7,), torch.bool, replicated=True),
    TensorMeta((), torch.float64, replicated=True),
    TensorMeta((2, 9), torch.int64),
    TensorMeta((0, 9), torch.float32),
)


def test_several_tensors_travel_together() -> None:
    stages = (StageLayout(((3, 0),), Sharded(0)), StageLayout(((4, 1, 2),)))
    layout = PipelineLayout(stages, (0, 1))
    run_distributed(check_layout, layout, MIXED, "auto", world_size=5)


@pytest.mark.parametrize("chain", [(0, 1, 0), (0, 1, 0, 1, 0)])
def test_a_chain_that_returns_keeps_its_edges_apart(chain: tuple[int, ...]) -> None:
    layout = PipelineLayout.from_ranks([[1], [0, 2]], chain=chain)
    metas = (TensorMeta((4, 6), torch.float32),)
    run_distributed(check_layout, layout, metas, "interval", world_size=3)


def test_one_first_stage_serves_two_domains() -> None:
    layout = PipelineLayout.u_shaped([2, 2], dp=[1, 2])
    metas = (TensorMeta((4, 6), torch.float32),)
    run_distributed(check_layout, layout, metas, "interval", world_size=6)


def check_inputs_untouched() -> None:
    with Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT) as transport:
        if transport.rank == 0:
            x = torch.arange(12.0, requires_grad=True)
            y = (x * 1).view(3, 4).t()  # neither a leaf nor contiguous
            transport.send([y], source=0, destination=1)
            assert y.grad_fn is not None
        else:
            metas = [TensorMeta((4, 3), torch.float32)]
            (y,) = transport.receive(metas, source=0, destination=1).wait()
            assert torch.equal(y, torch.arange(12.0).view(3, 4).t())


def test_a_strided_activation_with_a_graph_can_be_sent() -> None:
    run_distributed(check_inputs_untouched, world_size=2)
