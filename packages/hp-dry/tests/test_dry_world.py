"""Ranks of a dry run meet: groups, values of hosts, operations of devices, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hp_platform
from hp_dry import DryRun, DryRunError, prove, run_ranks, same_program
from hp_dry.trace import Collective, HostMessage, HostWait, Trace, WaitWork
from hp_platform.testing import run_distributed, run_in_threads, slow_group

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:barrier:UserWarning"
)
TIMEOUT = 90.0
PAIR = {0: range(2), 2: range(2, 4)}  # two classes of two ranks


def run(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    classes: Mapping[int, Sequence[int]] | None = None,
) -> DryRun:
    return run_ranks(
        function, *args, world_size=world_size, representatives=classes, timeout=TIMEOUT
    )


def collectives(trace: Trace) -> list[Collective]:
    return [event for event in trace.events if isinstance(event, Collective)]


def test_ranks_meet_where_the_path_of_temporary_files_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 200)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert run(os.getppid, world_size=2).results == {0: os.getpid(), 1: os.getpid()}
    assert list(long.iterdir()) == []


# What product code asks for


def start() -> list[Any]:
    runtime = hp_platform.initialize(device_type="cuda")
    control = runtime.control
    size = dist.get_world_size()
    rows = [list(range(first, first + 2)) for first in range(0, size, 2)]
    pairs = hp_platform.new_group(rows, name="tp")
    cpu = hp_platform.new_group(rows, name="tp control", backend="gloo")
    assert pairs is not None
    assert cpu is not None
    hp_platform.agree(group=control)
    with hp_platform.failing_together("step 1", groups=[control]):
        told = hp_platform.all_gather_json(dist.get_rank(), of=int, group=control)
    over_nccl = hp_platform.all_gather_json([dist.get_rank()], of=list[int], group=None)
    row = dist.get_process_group_ranks(pairs)
    mesh = hp_platform.mesh_of({"tp": pairs}, row, device_type="cuda")
    y = hp_platform.all_to_all(torch.ones(4, 2, device="cuda"), group=mesh)
    first = hp_platform.on_one_rank(lambda: "from rank 0", of=str, group=control)
    backends = [str(dist.get_backend(group)) for group in (None, control, pairs, cpu)]
    served = runtime.backend
    hp_platform.shutdown()
    return [told, over_nccl, first, backends, served, list(y.shape), str(y.device)]


@pytest.mark.parametrize("classes", [None, PAIR, {0: range(4)}])
def test_initialize_and_groups_work_whoever_has_a_process(
    classes: dict[int, Sequence[int]] | None,
) -> None:
    ran = run(start, classes=classes)
    speaks = ran.classes.representative
    backends = ["nccl", "gloo", "nccl", "gloo"]
    for rank, found in ran.results.items():
        expected = [list(speaks), [[each] for each in speaks], "from rank 0", backends, "nccl"]
        assert found == [*expected, [4, 2], f"cuda:{rank}"]
    assert prove(ran.traces, classes=ran.classes) == []
    families = {"world", "control", "tp", "tp control"}
    assert all(set(trace.families) == families for trace in ran.traces.values())
    assert ran.traces[0].groups["tp[0,1]"] == (0, 1)
    assert ran.traces[0].families["tp"] == ((0, 1), (2, 3))


def test_64_ranks_of_one_class_share_no_device() -> None:
    """What counts ranks in the store counts every rank of a class; a device is a rank's own."""
    ran = run(start, world_size=64, classes={0: range(64)})
    assert ran.results[0][4] == "nccl"


def plain() -> list[Any]:
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (2, size // 2), mesh_dim_names=("a", "b"))
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x, group=mesh.get_group("a"))
    group = dist.new_group([0, 1], backend="gloo")
    numbers = torch.tensor([float(rank)])
    if rank < 2:
        dist.all_reduce(numbers, group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    some: list[Any] = [("of", rank)]
    dist.broadcast_object_list(some, src=0)
    dist.barrier()
    dist.destroy_process_group()
    return [numbers.item(), objects, some, str(x.device)]


def test_plain_torch_meets_its_ranks() -> None:
    ran = run(plain)
    objects = [{"rank": rank} for rank in range(4)]
    for rank, found in ran.results.items():
        number = 1.0 if rank < 2 else float(rank)
        assert found == [number, objects, [["of", 0]], "cuda:0"]
    assert prove(ran.traces) == []
    names = set(ran.traces[1].groups)
    assert {"world[0,1,2,3]", "mesh_a[1,3]", "mesh_b[0,1]", "undefined[0,1]"} <= names
    waits = [e for e in ran.traces[0].events if isinstance(e, HostWait) and e.what == "barrier"]
    assert len(waits) == 1


def eager() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="half")
    assert half is not None
    for group in (mesh.get_group("a"), mesh.get_group("b"), half):
        assert dist.get_backend(group) == "nccl"
        dist.all_reduce(torch.ones(2, device="cuda"), group=group)
    assert dist.get_process_group_ranks(half) == ([0, 1] if rank < 2 else [2, 3])


def test_groups_are_split_off() -> None:
    ran = run(eager, classes={0: [0, 1, 2, 3]})
    assert prove(ran.traces, classes=ran.classes) == []
    trace = ran.traces[0]
    splits = [e for e in trace.events if isinstance(e, HostMessage) and e.op == "split_group"]
    assert splits[-1].detail == "[0,1], [2,3]"
    assert trace.families["half"] == ((0, 1), (2, 3))


def names_its_own() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc=f"half {rank // 2}")
    dist.all_reduce(torch.ones(2, device="cuda"), group=half)


def test_each_rank_may_name_the_group_that_it_gets_of_a_split() -> None:
    ran = run(names_its_own, classes={0: [0, 1], 2: [2, 3]})
    assert prove(ran.traces, classes=ran.classes) == []


# Operations of the device


def operations() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(4, 2, device="cuda")
    y = torch.zeros(4 * size, 2, device="cuda")
    work = dist.all_gather_into_tensor(y, x, async_op=True)
    work.wait()
    dist.reduce_scatter_tensor(x, y)
    dist.all_gather(
        [torch.zeros(n + 1, device="cuda") for n in range(size)],
        torch.zeros(rank + 1, device="cuda"),
    )
    dist.all_to_all_single(
        torch.zeros(size * (rank + 1), device="cuda"),
        torch.zeros(sum(range(1, size + 1)), device="cuda"),
        [rank + 1] * size,
        list(range(1, size + 1)),
    )
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.isend, x, ahead), dist.P2POp(dist.irecv, torch.zeros_like(x), behind)]
    for each in dist.batch_isend_irecv(batch):
        each.wait()
    with dist.distributed_c10d._coalescing_manager(device=x.device, async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    world = dist.group.WORLD
    assert world is not None
    z = dist._functional_collectives.all_reduce(x, "avg", world)
    z = z + 1
    dist.broadcast(z, src=1)
    dist.all_reduce(z, op=dist.ReduceOp.MAX)


def test_operations_of_the_device_are_written_down() -> None:
    ran = run(operations)
    assert prove(ran.traces) == []
    trace = ran.traces[1]
    found = collectives(trace)
    shown = [(each.op, each.detail) for each in found]
    assert shown == [
        ("all_gather", ""),
        ("reduce_scatter", "sum"),
        ("all_gather", ""),
        ("all_to_all", ""),
        ("send", ""),
        ("recv", ""),
        ("all_reduce", "sum"),
        ("all_reduce", "sum"),
        ("all_reduce", "avg"),
        ("broadcast", "root 1"),
        ("all_reduce", "max"),
    ]
    gather, scatter, uneven, exchange, send, receive, one, two, functional, *_ = found
    assert gather.stream != gather.issuer == scatter.stream == 0
    assert gather.inputs == (((4, 2), "float32"),)
    assert gather.outputs == (((16, 2), "float32"),)
    assert [shape for shape, _ in uneven.outputs] == [(1,), (2,), (3,), (4,)]
    assert exchange.input_splits == (1, 2, 3, 4)
    assert exchange.output_splits == (2, 2, 2, 2)
    assert (send.peer, receive.peer) == (2, 0)
    assert send.batch == receive.batch >= 0
    assert one.batch == two.batch >= 0
    assert one.batch != send.batch
    waited = {event.work for event in trace.events if isinstance(event, WaitWork)}
    assert waited == {each.work for each in found}
    assert functional.reads != functional.writes
    assert all(
        each.at.startswith("test_dry_world.py") or "test_dry_world.py" in each.at for each in found
    )


# Values of hosts


def values() -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0) + 10 * rank
    found = {}

    def keep(name: str, x: torch.Tensor) -> None:
        found[name] = x.flatten().tolist()

    x = mine.clone()
    dist.all_reduce(x)
    keep("all_reduce", x)
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    keep("max", x)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, mine)
    keep("all_gather", torch.stack(parts))
    x = mine.clone()
    dist.broadcast(x, src=2)
    keep("broadcast", x)
    x = torch.zeros(size)
    dist.all_to_all_single(x, torch.arange(float(size)) + 10 * rank)
    keep("all_to_all", x)
    x = torch.zeros(1)
    dist.reduce_scatter_tensor(x, torch.arange(float(size)) + 10 * rank)
    keep("reduce_scatter", x)
    parts = [torch.zeros(2) for _ in range(size)] if rank == 1 else []
    dist.gather(mine, parts or None, dst=1)
    keep("gather", torch.stack(parts) if parts else torch.zeros(0))
    x = torch.zeros(2)
    dist.scatter(x, [mine + n for n in range(size)] if rank == 1 else None, src=1)
    keep("scatter", x)
    x = torch.zeros(2)
    work = dist.irecv(x, src=(rank - 1) % size)
    assert work is not None
    dist.send(mine, dst=(rank + 1) % size)
    work.wait()
    keep("message", x)
    dist.barrier()
    return found


def values_in_dry_world() -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    return values()


def test_values_of_hosts_are_those_of_gloo() -> None:
    """The same function on real Gloo, in as many processes, gives the same numbers."""
    ran = run(values_in_dry_world)
    real = run_distributed(values, world_size=4, timeout=TIMEOUT)
    assert [ran.results[rank] for rank in range(4)] == real
    assert prove(ran.traces) == []


def relay() -> list[float]:
    """Stages of two: numbers go from stage to stage, over a ring of hosts."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group([0, 2], group_desc="pp"), dist.new_group([1, 3], group_desc="pp")]
    x = torch.tensor([float(rank)])
    group = rows[rank % 2]
    if rank < 2:
        dist.send(x + 5, rank + 2, group=group)
    else:
        dist.recv(x, rank - 2, group=group)
    y = torch.zeros(1)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(y, (rank - 1) % size)
    assert work is not None
    work.wait()
    return [x.item(), y.item()]


def test_messages_go_from_class_to_class() -> None:
    ran = run(relay, classes={0: [0, 1], 2: [2, 3]})
    # Rank 1 has sent what rank 0 did, and rank 3 got what rank 2 did: each to the next of the ring.
    assert ran.results == {0: [0.0, 5.0], 2: [5.0, 0.0]}
    assert prove(ran.traces, classes=ran.classes) == []


def test_two_ranks_of_a_class_are_compared() -> None:
    traces = run(relay).traces
    assert same_program(traces[2], traces[3]) is None
    told = same_program(traces[0], traces[2])
    assert told is not None
    assert "send" in told


# Faults


def faulty(fault: str) -> None:  # noqa: C901 # a fault at a time
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, size = dist.get_rank(), dist.get_world_size()
    bad = rank == 2
    names = ["a", "b"]
    if fault == "groups in another order" and bad:
        names.reverse()
    groups = {name: dist.new_group(list(range(size)), group_desc=name) for name in names}
    a, b = groups["a"], groups["b"]
    x = torch.zeros(8, 5 if fault == "shape" and bad else 4, device="cuda")
    x = x.to(torch.bfloat16) if fault == "dtype" and bad else x
    if not (fault == "skips" and bad):
        dist.all_reduce(x, group=a)  # LINE first
    op = dist.ReduceOp.MAX if fault == "reduction" and bad else dist.ReduceOp.SUM
    dist.all_reduce(torch.zeros(3, device="cuda"), op=op, group=b)  # LINE second
    rows = [3, 1, 2, 2] if fault == "splits" and bad else [2] * size
    y = torch.zeros(8, device="cuda")
    dist.all_to_all_single(y, y.clone(), [2] * size, rows, group=a)  # LINE exchange
    if rank == 0 or (rank == 1 and fault != "send"):
        other = 1 - rank
        batch = [dist.P2POp(dist.isend, x, other, a), dist.P2POp(dist.irecv, x.clone(), other, a)]
        for work in dist.batch_isend_irecv(batch):  # LINE message
            work.wait()
    if fault == "cycle":
        for group in (b, a) if bad else (a, b):
            dist.all_reduce(x, group=group)  # LINE cycle
    if fault == "leaves" and bad:
        return
    if fault == "host":
        if bad:
            dist.barrier()  # LINE early
        dist.all_reduce(x, group=a)  # LINE device
        x.sum().item()  # LINE read
        if not bad:
            dist.barrier()  # LINE late
    dist.all_reduce(x, group=b)  # LINE last


FAULTS = {
    "skips": ("operation", "first"),
    "shape": ("shape", "first"),
    "dtype": ("dtype", "first"),
    "reduction": ("reduction", "second"),
    "splits": ("splits", "exchange"),
    "send": ("message", "message"),
    "cycle": ("deadlock", "cycle"),
    "leaves": ("missing", "last"),
    "host": ("deadlock", "read"),
    "groups in another order": ("groups", ""),
}


def test_the_program_without_a_fault_is_sound() -> None:
    assert prove(run(faulty, "").traces) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_real_program_is_named(fault: str) -> None:
    kind, mark = FAULTS[fault]
    found = [p for p in prove(run(faulty, fault).traces) if not p.is_warning]
    problem = next((p for p in found if p.kind == kind), None)
    assert problem is not None, list(map(str, found))
    assert (0 if fault == "send" else 2) in problem.ranks
    if mark:
        lines = Path(__file__).read_text().splitlines()
        line = next(n for n, text in enumerate(lines, 1) if text.endswith(f"# LINE {mark}"))
        assert any(f"test_dry_world.py:{line}" in at for at in problem.at), str(problem)


# Ends


def fails(how: str) -> None:
    runtime = hp_platform.initialize(device_type="cuda")
    with hp_platform.failing_together("step 3", groups=[runtime.control], everything=True):
        if dist.get_rank() == 1:
            if how == "raises":
                raise KeyError("what is wrong")  # LINE raises
            if how == "ends":
                os._exit(7)
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "returns":
                return
        hp_platform.agree(group=runtime.control)
        hp_platform.agree(group=runtime.control)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 failed", "KeyError", "what is wrong", "step 3", "test_dry_world.py:"]),
        ("ends", ["rank 1 failed", "exit status 7"]),
        ("is killed", ["rank 1 failed", "exit status -9"]),
        ("returns", ["rank 1 has ended"]),
    ],
)
def test_the_first_that_fails_is_named(how: str, words: list[str]) -> None:
    with pytest.raises(DryRunError) as caught:
        run(fails, how)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    if how != "returns":
        assert caught.value.rank == 1


def gives_up() -> str:
    """Rank 1 breaks a group of NCCL, by a thread; what rank 0 says, who waits in it."""
    runtime = hp_platform.initialize(device_type="cuda")
    pair = hp_platform.new_group([[0, 1]], name="pair")
    assert pair is not None
    said = ""
    if dist.get_rank() == 1:
        hp_platform.break_group(pair)
    else:
        try:
            hp_platform.all_gather_json(0, of=int, group=pair)
        except RuntimeError as error:
            said = str(error)
    hp_platform.agree(group=runtime.control)
    return said


def test_who_waits_in_a_group_that_was_broken_is_told() -> None:
    said = run(gives_up, world_size=2).results
    assert "rank 1 has given up pair[0,1]" in said[0]
    assert said[1] == ""


def hangs(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(1000)  # LINE sleeps
    dist.barrier()


def test_a_hang_ends_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(DryRunError) as caught:
        run_ranks(hangs, str(tmp_path), world_size=2, timeout=6)
    text = str(caught.value)
    assert "did not end in time" in text
    assert "rank 1 waits for barrier 1 of world[0,1]" in text
    assert "in hangs" in text
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        assert not Path(f"/proc/{pid}").exists()


def begins_and_ends() -> int:
    dist.init_process_group("nccl")
    dist.destroy_process_group()
    return 1


def test_groups_of_the_caller_do_not_end_in_its_forks() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        slow_group(group)  # which torch knows from then on

    run_in_threads(rank_main, world_size=2)
    assert run_ranks(begins_and_ends, world_size=2, timeout=20).results == {0: 1, 1: 1}


@pytest.mark.parametrize("classes", [{0: [0, 1]}, {0: [0, 1], 1: [2, 3]}, {0: [0, 1, 2, 3], 5: []}])
def test_classes_must_be_a_partition(classes: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="must stand for every rank"):
        run(values, classes=classes)


def tell_members() -> list[list[int]]:
    hp_platform.initialize()
    rows = [list(range(first, first + 4)) for first in range(0, 128, 4)]
    group = hp_platform.new_group(rows, name="four")
    told: list[list[int]] = hp_platform.all_gather_json(
        dist.get_process_group_ranks(group), of=list[int], group=group
    )
    return told


def test_texts_in_which_ranks_have_more_digits_are_sent_in_one_size() -> None:
    classes = {0: range(127), 127: (127,)}  # of 124 to 126 is heard what 0 says in its own group
    ran = run(tell_members, world_size=128, classes=classes)
    assert prove(ran.traces, classes=classes) == []
    assert ran.results[127] == [[0, 1, 2, 3]] * 3 + [[124, 125, 126, 127]]
