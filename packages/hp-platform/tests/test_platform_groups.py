"""Groups are communicators of their own, and meshes stand on them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from hp_platform import (
    _internals,
    all_to_all,
    launch_all_to_all,
    mesh_of,
    new_group,
    new_group_of_members,
    new_groups,
    resolve_group,
)
from hp_platform import groups as groups_module
from hp_platform.testing import RankError, run_distributed


def _mesh_axis_that_spans_the_world() -> tuple[bool, bool]:
    torch_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "ep"))
    ep = new_group([[0, 1]], name="ep")
    pp = new_group([[0], [1]], name="pp")
    assert ep is not None
    assert pp is not None
    ours = mesh_of({"pp": pp, "ep": ep}, [[0, 1]], device_type="cpu")
    assert ours["ep"].get_group() is ep
    assert resolve_group(ours["ep"]) is ep
    assert ours["pp"].size() == 1
    return torch_mesh.get_group("ep") is dist.group.WORLD, ours.get_group("ep") is dist.group.WORLD


def test_an_axis_that_spans_the_world_is_not_the_default_group() -> None:
    """torch's mesh reuses the default group there; that is what these groups are for."""
    assert run_distributed(_mesh_axis_that_spans_the_world, world_size=2) == [(True, False)] * 2


def _two_groups_in_opposite_orders() -> list[float]:
    """Each rank launches on the two groups in its own order, from one thread."""
    rank = dist.get_rank()
    first, second = (new_group([[0, 1]], name=name) for name in ("ep", "cp"))
    assert first is not None
    assert second is not None
    assert first is not second
    order = [first, second] if rank == 0 else [second, first]
    started = {}
    for group in order:
        value = 10.0 * rank + (1.0 if group is first else 2.0)
        started[group] = launch_all_to_all(torch.full((2,), value), group=group)
    return [*started[first].wait().tolist(), *started[second].wait().tolist()]


def test_groups_over_the_same_ranks_do_not_share_a_queue() -> None:
    """With one queue, these exchanges would be paired crosswise."""
    result = run_distributed(_two_groups_in_opposite_orders, world_size=2, timeout=20)
    assert result == [[1.0, 11.0, 2.0, 12.0]] * 2


def _one_group_is_blocked() -> float:
    """Rank 1 enters the slow group's exchange only after the other group's has finished."""
    slow, quick = (new_group([[0, 1]], name=name) for name in ("slow", "quick"))
    assert slow is not None
    assert quick is not None
    if dist.get_rank() == 0:
        waiting = threading.Thread(target=lambda: all_to_all(torch.ones(2), group=slow))
        waiting.start()
        time.sleep(0.05)
    result = all_to_all(torch.full((2,), float(dist.get_rank())), group=quick)
    if dist.get_rank() == 0:
        waiting.join()
    else:
        all_to_all(torch.ones(2), group=slow)
    return result.sum().item()


def test_a_blocked_group_does_not_block_another_over_the_same_ranks() -> None:
    assert run_distributed(_one_group_is_blocked, world_size=2, timeout=20) == [1.0, 1.0]


def _subgroups() -> tuple[list[int], int, timedelta | None]:
    group = new_group([[0, 2], [1, 3]], name="dp", timeout=timedelta(seconds=7))
    assert group is not None
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    options = group._get_backend(torch.device("cpu")).options
    return dist.get_process_group_ranks(group), int(total.item()), options._timeout


def _polling_threads() -> tuple[int, int]:
    """Of Gloo, in this process: before and after some groups were made; the groups are used."""
    before = _count_threads("gloo_tcp_loop")
    groups = [new_group([[0, 1]], name=name) for name in ("ep", "cp", "dp")]
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2
    dist.destroy_process_group(groups.pop(0))
    dist.all_reduce(torch.ones(1), group=groups[0])
    return before, _count_threads("gloo_tcp_loop")


def _count_threads(name: str) -> int:
    return sum(path.read_text().strip() == name for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_over_gloo_share_the_thread_that_polls() -> None:
    """Each such thread wakes a hundred times a second; a rank of hp-train has up to 18 groups."""
    counts = run_distributed(_polling_threads, world_size=2)
    if counts[0][0] == 0:
        pytest.skip("this torch gives its threads no names")
    assert counts == [(1, 1)] * 2


def test_each_rank_gets_the_group_it_is_in() -> None:
    results = run_distributed(_subgroups, world_size=4)
    seven = timedelta(seconds=7)
    assert results == [([0, 2], 2, seven), ([1, 3], 4, seven)] * 2


def _left_out() -> tuple[bool, timedelta]:
    group = new_group([[0]], name="first")
    every = new_group([[0, 1]], name="every")
    assert every is not None
    timeouts = [g._get_backend(torch.device("cpu")).options._timeout for g in (every, _world())]
    assert timeouts[0] == timeouts[1]
    return group is None, timeouts[0]


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def test_a_rank_in_no_list_gets_none_and_time_outs_are_inherited() -> None:
    results = run_distributed(_left_out, world_size=2, timeout=30)
    assert [r[0] for r in results] == [False, True]
    assert results[0][1] == timedelta(seconds=90)


def _other_order() -> None:
    names = ["ep", "cp"] if dist.get_rank() == 0 else ["cp", "ep"]
    for name in names:
        new_group([[0, 1]], name=name)


def test_another_order_of_construction_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(RankError, match=r"rank 1: new_group call 0 \(cp .*rank 0 \(ep") as caught:
        run_distributed(_other_order, world_size=2, timeout=20)
    assert caught.value.rank == 1


def _refused(lists: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_group(lists, name="x")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([], "non-empty"),
        ([[0], []], "non-empty"),
        ([[0, 1], [1]], "disjoint"),
        ([[0, 2]], r"inside the world \(2 ranks\)"),
        ([[1, 0]], "ascending"),
    ],
)
def test_wrong_lists_are_refused(lists: list[list[int]], message: str) -> None:
    run_distributed(_refused, lists, message, world_size=2)


def test_groups_need_a_default_group() -> None:
    with pytest.raises(RuntimeError, match="must be initialised"):
        new_group([[0]], name="x")


def _overlapping() -> tuple[dict[str, tuple[list[int], float]], int]:
    """Groups of a line of five ranks, whose ends have fewer than the middle; all are used."""
    calls = 0
    make = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        group = make(*args, **kwargs)
        calls += isinstance(group, ProcessGroup)
        return group

    dist.new_group = counted
    lists = {f"{rank}->{rank + 1}": [[rank, rank + 1]] for rank in range(4)}
    lists["ends"] = [[0, 4]]
    found = {}
    for _ in range(2):  # the same again is not the same groups
        groups = new_groups(lists)
        for name, group in groups.items():
            total = torch.tensor(10.0 ** dist.get_rank())
            dist.all_reduce(total, group=group)
            found[name] = (dist.get_process_group_ranks(group), total.item())
    after = new_group([[0, 1, 2, 3, 4]], name="after")
    assert after is not None
    dist.all_reduce(torch.ones(1), group=after)
    return found, calls


def test_groups_that_overlap_are_made_in_rounds_by_their_members_alone() -> None:
    results = run_distributed(_overlapping, world_size=5, timeout=60)
    for rank, (found, calls) in enumerate(results):
        line = {f"{a}->{a + 1}": [a, a + 1] for a in range(4) if rank in (a, a + 1)}
        expected = line | ({"ends": [0, 4]} if rank in (0, 4) else {})
        assert found == {
            name: (ranks, sum(10.0**each for each in ranks)) for name, ranks in expected.items()
        }
        assert calls == 5, "two groups, twice, and one"


def _of_members() -> list[float]:
    """Ranks 1 and 3 make groups while 0 makes others and 2 none at all."""
    rank, sums = dist.get_rank(), []
    if rank != 2:
        ranks = [1, 3] if rank else [0]
        for _ in range(2):
            group = new_group_of_members(ranks, name="some")
            total = torch.ones(1) * rank
            dist.all_reduce(total, group=group)
            sums.append(total.item())
    everyone = new_group([[0, 1, 2, 3]], name="all")
    assert everyone is not None
    dist.barrier(group=everyone)
    return sums


def test_some_ranks_make_a_group_without_the_others() -> None:
    results = run_distributed(_of_members, world_size=4, timeout=60)
    assert results == [[0.0, 0.0], [4.0, 4.0], [], [4.0, 4.0]]


def _other_members_call() -> None:
    new_group_of_members([0, 1], name=f"rank {dist.get_rank()}")


def test_members_that_make_something_else_are_told() -> None:
    message = r"rank 1: new_group call 0 \(rank 1 .* must equal that of rank 0 \(rank 0"
    with pytest.raises(RankError, match=message):
        run_distributed(_other_members_call, world_size=2, timeout=20)


class _Splits:
    """torch's calls for groups, as a rank of an NCCL world makes them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.split: list[list[list[int]]] = []
        self.names: list[str] = []
        patch.setattr(_internals, "can_split", lambda _world: True)
        patch.setattr(_internals, "nccl_options", lambda **_: None)
        patch.setattr(groups_module, "_finish", lambda group, *_, **__: group)
        patch.setattr(dist, "split_group", self._split)
        patch.setattr(dist, "new_group", self._alone)

    def _split(self, *, split_ranks: list[list[int]], **_: object) -> ProcessGroup | None:
        self.split.append(split_ranks)
        self._note()
        return _world() if any(dist.get_rank() in ranks for ranks in split_ranks) else None

    def _alone(self, ranks: list[int], *, device_id: object, **_: object) -> ProcessGroup | None:
        assert len(ranks) == 1
        if ranks != [dist.get_rank()]:
            return None
        assert device_id is None, "a communicator of one rank is not connected"
        self._note()
        return _world()

    def _note(self) -> None:
        self.names.append(distributed_c10d._process_group_name([], use_hashed_name=True))


def _on_nccl() -> tuple[list[list[list[int]]], list[str], list[bool]]:
    with pytest.MonkeyPatch.context() as patch:
        calls = _Splits(patch)
        made = [
            new_group([[0, 1], [2, 3]], name="ep", backend="nccl"),
            new_group([[0], [1], [2, 3]], name="tp", backend="nccl"),
            new_group([[0], [1], [2], [3]], name="alone", backend="nccl"),
            new_group([[1, 2]], name="pair", backend="nccl"),
        ]
    return calls.split, calls.names, [group is not None for group in made]


def test_nccl_splits_its_world_once_for_all_parts_and_never_for_one_rank() -> None:
    results = run_distributed(_on_nccl, world_size=4, timeout=60)
    split = [[[0, 1], [2, 3]], [[2, 3]], [[1, 2]]]
    assert [result[0] for result in results] == [split] * 4, "all ranks take part in every split"
    assert [result[2] for result in results] == [
        [True, True, True, False],
        [True, True, True, True],
        [True, True, True, True],
        [True, True, True, False],
    ]
    # Members of a part have one name for it, other parts another.
    first = [names[0] for _, names, _ in results]
    assert first[0] == first[1] != first[2] == first[3]


def _bound_device_while_making_groups() -> tuple[object, object]:
    """Pretend that the default group is NCCL's, bound to a device."""
    world = _world()
    world.bound_device_id = torch.device("cuda", 0)
    seen: list[object] = []
    make = dist.new_group

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(world.bound_device_id)
        return make(*args, **kwargs)

    dist.new_group = spy
    new_group([[0], [1]], name="x", backend="gloo")
    return seen, world.bound_device_id


def test_gloo_groups_beside_an_nccl_world_do_not_split_its_communicator() -> None:
    expected = ([None, None], torch.device("cuda", 0))
    assert run_distributed(_bound_device_while_making_groups, world_size=2) == [expected] * 2


def _meshes() -> None:
    rank = dist.get_rank()
    dp = new_group([[0, 2], [1, 3]], name="dp")
    ep = new_group([[0, 1], [2, 3]], name="ep")
    assert dp is not None
    assert ep is not None
    mesh = mesh_of({"dp": dp, "ep": ep}, [[0, 1], [2, 3]], device_type="cpu")
    assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]
    assert resolve_group(mesh["dp"]) is dp
    with pytest.raises(ValueError, match=r"mesh.ndim \(2\) must equal 1: .*'dp', 'ep'"):
        resolve_group(mesh)
    with pytest.raises(ValueError, match="ranks along axis dp"):
        mesh_of({"dp": ep, "ep": dp}, [[0, 1], [2, 3]], device_type="cpu")
    with pytest.raises(ValueError, match=r"depth of ranks \(1\) must equal"):
        mesh_of({"dp": dp, "ep": ep}, [0, 1, 2, 3], device_type="cpu")
    with pytest.raises(ValueError, match="must contain rank"):
        mesh_of({"dp": dp}, [4, 5], device_type="cpu")
    line = mesh_of({"ep": ep}, dist.get_process_group_ranks(ep), device_type="cpu")
    assert line.get_group() is ep
    received = all_to_all(torch.full((2,), float(rank)), group=line)
    assert received.tolist() == [rank - rank % 2, rank - rank % 2 + 1]


def test_meshes_over_our_groups() -> None:
    run_distributed(_meshes, world_size=4)


def test_only_groups_and_meshes_resolve() -> None:
    with pytest.raises(TypeError, match=r"mesh_or_group \(list\) must be"):
        resolve_group([0, 1])  # type: ignore[arg-type]
