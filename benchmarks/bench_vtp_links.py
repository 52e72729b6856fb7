"""Measure transfers between unequal stages over links of limited speed. Needs root and Linux.

Every rank gets a network namespace of its own with two interfaces: one to its stage, unlimited, and
one to the other stage, limited both ways. Nothing of the machine's own network is touched, and all
namespaces are removed at the end.

    python benchmarks/bench_vtp_links.py --tp 2 4 --mib 16
    python benchmarks/bench_vtp_links.py --tp 4 8 --mib 8 --rate 100

Prints the medians for the leader with broadcast and for the plan chosen by cost, their ratio, the
bound, and what of a transfer is left to wait for after enough compute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from namespaces import connect, inside, ip, namespaces, remove_all, switch_on

from hp_vtp import Algorithm, Links, PipelineLayout, bound_seconds, plan_transfer
from hp_vtp.transport import TensorMeta, Transport

PREFIX = "hpvtp"
SWITCH = f"{PREFIX}sw"
REPEATS = 4
ALGORITHMS: tuple[Algorithm, ...] = ("leader", "auto")


def build_network(sizes: list[int], rate: int) -> None:
    """Connect the ranks of each stage by a bridge, and all of them by another one."""
    for bridge in ("stage0", "stage1", "cut"):
        ip("-n", SWITCH, "link", "add", bridge, "type", "bridge")
        ip("-n", SWITCH, "link", "set", bridge, "up")
    stages = [0] * sizes[0] + [1] * sizes[1]
    for rank, stage in enumerate(stages):
        space = f"{PREFIX}{rank}"
        for name, bridge, address in (
            ("near", f"stage{stage}", f"10.{stage + 1}.0.{rank + 1}/24"),
            ("far", "cut", f"10.9.0.{rank + 1}/24"),
        ):
            connect(space, name, to=SWITCH, end=f"{name}{rank}")
            ip("-n", SWITCH, "link", "set", f"{name}{rank}", "master", bridge, "up")
            switch_on(space, name, address=address)
        run(space, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")
        limit = ("tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "60ms")
        run(space, "tc", "qdisc", "add", "dev", "far", "root", *limit)
        run(SWITCH, "tc", "qdisc", "add", "dev", f"far{rank}", "root", *limit)
    for rank, stage in enumerate(stages):
        for other, at in enumerate(stages):
            if at != stage:
                way = (f"10.{at + 1}.0.{other + 1}/32", "via", f"10.9.0.{other + 1}", "dev", "far")
                own = f"10.{stage + 1}.0.{rank + 1}"
                ip("-n", f"{PREFIX}{rank}", "route", "add", *way, "src", own)


def run(space: str, *arguments: str) -> None:
    """Run a command in a namespace."""
    subprocess.run(inside(space, *arguments), check=True)  # noqa: S603 (our own arguments)


def measure(layout: PipelineLayout, num: int, algorithm: Algorithm, links: Links) -> float:
    """Median seconds of a transfer, from the first call to the last rank that has its part."""
    meta = TensorMeta((num,), torch.float32)
    times = []
    with Transport(layout, algorithm=algorithm, links=links) as transport:
        for _ in range(REPEATS + 1):
            dist.barrier()
            start = time.perf_counter()
            transfer(transport, meta)
            taken = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times.append(taken.item())
    return statistics.median(times[1:])


def exposed(layout: PipelineLayout, num: int, compute: float, links: Links) -> float:
    """Median seconds of `wait` after `compute` seconds of something else, on the slowest rank."""
    meta = TensorMeta((num,), torch.float32)
    times = []
    with Transport(layout, links=links) as transport:
        for _ in range(REPEATS):
            dist.barrier()
            waited = transfer(transport, meta, compute=compute)
            taken = torch.tensor([waited])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times.append(taken.item())
    return statistics.median(times)


def local_bandwidth(layout: PipelineLayout) -> float:
    """Bytes/s at which a rank of stage 1 receives the others' parts, as all of them gather at once.

    The namespaces share their processors, which are what limits it.
    """
    ranks = list(layout.stages[1].replicas[0])
    group = dist.new_group(ranks)
    slowest = torch.zeros(1)
    if dist.get_rank() in ranks:
        part = torch.ones(2**20)
        whole = part.new_empty(len(ranks) * part.numel())
        times = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            dist.all_gather_into_tensor(whole, part, group=group)
            times.append(time.perf_counter() - start)
        slowest.fill_(statistics.median(times[1:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return (len(ranks) - 1) * 2**20 * 4 / slowest.item()


def transfer(transport: Transport, meta: TensorMeta, *, compute: float = 0.0) -> float:
    """Transfer one tensor from stage 0 to stage 1; return the seconds spent in `wait`."""
    if transport.layout.stage_of(transport.rank) == 0:
        transport.send([torch.ones(meta.shape)], source=0, destination=1).wait()
        return 0.0
    handle = transport.receive([meta], source=0, destination=1)
    time.sleep(compute)
    start = time.perf_counter()
    handle.wait()
    return time.perf_counter() - start


def run_rank(sizes: list[int], mib: float, rate: int) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    layout = PipelineLayout.straight(sizes)
    num = int(mib * 2**20) // 4
    gathering = local_bandwidth(layout)
    links = Links(
        cross_bandwidth=rate * 1e6 / 8,
        cross_latency=2e-4,
        local_bandwidth=gathering,
        local_latency=1e-4,
    )
    plan = plan_transfer(
        (num,), num_sources=sizes[0], num_destinations=sizes[1], itemsize=4, links=links
    )
    bound = bound_seconds(plan, links)
    seconds = {name: measure(layout, num, name, links) for name in ALGORITHMS}
    left = exposed(layout, num, 1.5 * seconds["auto"], links)
    if dist.get_rank() == 0:
        print(
            f"TP {sizes[0]} -> {sizes[1]}, {mib:g} MiB, {rate} Mbit/s per rank, "
            f"{gathering / 1e6:.0f} MB/s among the ranks of a stage: "
            f"leader {seconds['leader'] * 1e3:.0f} ms, {plan.algorithm} in {plan.chunks} chunk(s) "
            f"{seconds['auto'] * 1e3:.0f} ms, ratio {seconds['leader'] / seconds['auto']:.2f}, "
            f"bound {bound * 1e3:.0f} ms, {seconds['auto'] / bound:.2f} of it; exposed at wait "
            f"after 1.5 times that of compute {left * 1e3:.2f} ms "
            f"({100 * left / seconds['auto']:.2f} %)"
        )
    dist.barrier()
    dist.destroy_process_group()


def launch(sizes: list[int], arguments: list[str]) -> int:
    """Run one process per rank, each in its namespace; return the worst exit status."""
    processes = []
    for rank in range(sum(sizes)):
        env = os.environ | {
            "GLOO_SOCKET_IFNAME": "near",
            "MASTER_ADDR": "10.1.0.1",
            "MASTER_PORT": "29611",
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(sizes)),
            "OMP_NUM_THREADS": "1",
        }
        command = inside(f"{PREFIX}{rank}", sys.executable, *arguments, "--rank")
        processes.append(subprocess.Popen(command, env=env))  # noqa: S603 (our own arguments)
    return max(process.wait(timeout=500) for process in processes)


def main() -> int:
    """Build the network, run the ranks, remove the network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, nargs=2, default=[2, 4], help="ranks of both stages")
    parser.add_argument("--mib", type=float, default=16.0, help="size of the tensor")
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of a rank's link")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.tp, args.mib, args.rate)
        return 0
    remove_all(PREFIX)
    with namespaces([SWITCH, *(f"{PREFIX}{rank}" for rank in range(sum(args.tp)))]):
        build_network(args.tp, args.rate)
        return launch(args.tp, sys.argv)


if __name__ == "__main__":
    sys.exit(main())
