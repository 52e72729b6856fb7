"""How often a run asks NCCL for communicators while it starts, counted without a GPU.

One process stands for rank 0 of 256. Whether the default communicator can be split, and the device,
are said for it; the calls of torch are recorded, and answered with groups that send nothing.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from hp_context.methods.hybrid import split_group
from hp_platform import Runtime, _internals, groups
from hp_platform.launch import RankInfo
from hp_schedule.runtime import build_edge_groups
from hp_trainer.config import MeshConfig
from hp_trainer.layout.communicators import pipeline_layout
from hp_trainer.layout.mesh import build_mesh, tied_group
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import KINDS
from hp_vtp.transport.channel import build_edge_groups as build_uneven_edge_groups

MOST = 20
WORLD = 256
_MINUTE = timedelta(minutes=1)


class Calls:
    """Every call for a communicator of more than one rank that rank 0 takes part in."""

    def __init__(self) -> None:
        self.lists: list[list[list[int]]] = []

    def split(self, *, split_ranks: Sequence[Sequence[int]], **_: object) -> ProcessGroup | None:
        everyone = list(itertools.chain.from_iterable(split_ranks))
        assert len(set(everyone)) == len(everyone), "no rank may be in two parts"
        assert all(len(part) > 1 for part in split_ranks), "one rank needs no communicator"
        self.lists.append([list(part) for part in split_ranks])
        mine = next((part for part in split_ranks if 0 in part), None)
        return None if mine is None else self._group(mine)

    def new(self, ranks: Sequence[int], *, backend: str, **_: object) -> ProcessGroup | None:
        if backend != "gloo" and len(ranks) > 1:
            self.lists.append([list(ranks)])
        return self._group(ranks) if 0 in ranks else None

    def _group(self, ranks: Sequence[int]) -> ProcessGroup:
        group: ProcessGroup = _new_group(
            list(ranks), backend="fake", use_local_synchronization=True
        )
        return group


_new_group = dist.new_group


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    recorded = Calls()
    monkeypatch.setattr(_internals, "can_split", lambda _world: True, raising=False)
    monkeypatch.setattr(_internals, "nccl_options", lambda **_: None)
    monkeypatch.setattr(groups, "_device", lambda **_: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "split_group", recorded.split)
    monkeypatch.setattr(dist, "new_group", recorded.new)
    yield recorded
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(calls: Calls, config: MeshConfig, schedule: str = "1f1b") -> int:
    """Make all groups of a layout as rank 0; return how many calls that took, the first included.

    The first call is that for the default group.
    """
    layout = Layout.of(config)
    calls.lists.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "fake", rank=0, world_size=layout.world_size, store=_internals.HashStore()
    )
    world = dist.group.WORLD
    assert world is not None
    info = RankInfo(0, layout.world_size, 0, 8)
    runtime = Runtime(info, torch.device("cpu"), "nccl", _MINUTE, world)
    mesh = build_mesh(layout, runtime, timeout=_MINUTE)
    kind = KINDS[schedule]
    built = kind.build(layout.pp, 2 * layout.pp, kind.stages_per_rank or 1)
    if layout.is_even and not kind.returns:
        build_edge_groups(layout.pipelines(), backend="nccl", timeout=_MINUTE)
    else:
        chain = pipeline_layout(layout, built.stage_to_rank)
        build_uneven_edge_groups(chain, name="pipeline", backend="nccl")
    places = built.stage_to_rank
    first, last = layout.stages[places[0]], layout.stages[places[-1]]
    if first.num_ranks == last.num_ranks:
        tied_group(mesh, runtime, places, timeout=_MINUTE)
    if config.cp > 2:
        split_group(mesh.groups["cp"], 2)
    return 1 + len(calls.lists)


def _sizes(product: int, num_axes: int) -> list[tuple[int, ...]]:
    """All ways to write a power of two as a product of powers of two."""
    if num_axes == 1:
        return [(product,)]
    firsts = [1 << n for n in range(product.bit_length())]
    return [(first, *rest) for first in firsts for rest in _sizes(product // first, num_axes - 1)]


def test_no_layout_of_256_ranks_takes_more_than_20_communicators(calls: Calls) -> None:
    found: dict[MeshConfig, int] = {}
    chosen = random.Random(0).sample([sizes for sizes in _sizes(WORLD, 5) if sizes[0] < 64], 120)
    experts = itertools.cycle([(1, 1), (8, 1), (4, 2), (2, 1), (1, 2), (8, 2)])
    for (pp, replicate, shard, cp, tp), (ep, etp) in zip(chosen, experts, strict=False):
        fits = shard * cp * tp % (ep * etp) == 0
        config = MeshConfig(
            pp=pp,
            dp_replicate=replicate,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            ep=ep if fits else 1,
            etp=etp if fits else 1,
        )
        found[config] = _start(calls, config)
    assert len(found) >= 100
    assert max(found.values()) <= MOST, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("schedule", ["1f1b", "u_shape"])
@pytest.mark.parametrize("tp", [(1, 3), (2, 6), (1, 2, 4, 1), (8, 8, 8, 8, 16, 16)])
def test_stages_of_different_sizes_take_as_few(
    calls: Calls, schedule: str, tp: tuple[int, ...]
) -> None:
    shard = WORLD // sum(tp)
    config = MeshConfig(pp=len(tp), dp_shard=shard, stage_tp=tp)
    assert _start(calls, config, schedule) <= MOST


def test_what_the_calls_of_a_layout_are_for(calls: Calls) -> None:
    config = MeshConfig(pp=4, dp_replicate=2, dp_shard=16, tp=2, ep=8)
    # The default group, eight axes, the world, four directions of edges, the tied embedding.
    assert _start(calls, config) == 15


def test_a_ring_of_an_odd_number_of_stages_takes_six_calls(calls: Calls) -> None:
    dist.init_process_group("fake", rank=0, world_size=15, store=_internals.HashStore())
    pipelines = [[place + 3 * stage for stage in range(5)] for place in range(3)]
    build_edge_groups(pipelines, backend="nccl", timeout=_MINUTE)
    assert len(calls.lists) <= 6
    pairs = [tuple(part) for lists in calls.lists for part in lists]
    assert len(pairs) == 3 * 2 * 5, "each directed edge of each pipeline has one of its own"
