"""Which layouts the host binds, which launches kernels: by hp plan and by hp dry-run."""

import pytest
from msgspec.structs import replace

from hp_dry.report.summary import RankSummary, Summary, summarize
from hp_dry.report.tables import paces
from hp_dry.report.work import Cell, Cost, Work
from hp_dry.trace import Trace
from hp_plan.costs.machine import MACHINES, Machine, machine_named
from hp_plan.layouts.report import details, table
from hp_plan.price.estimate import planned
from hp_trainer.config import Config
from hp_trainer.config.options import resolve

H100 = MACHINES["h100"]


def config() -> Config:
    return resolve("debug-llama3", [("mesh.dp_shard", 1), ("mesh.pp", 1)], env={}).config


def lines(machine: Machine, found: Config) -> tuple[list[str], list[str]]:
    estimate = planned(found, machine, vocab_size=256).estimate()
    return table([estimate]), details(estimate)


def test_a_plan_says_which_layouts_the_host_binds() -> None:
    one = config()
    shown, told = lines(H100, one)
    assert "host" in shown[0].split()
    assert shown[-1] == "host    binds 1 of these: it launches for longer than a device computes"
    assert any(line.endswith(": the device waits for it") for line in told)
    fast = H100.with_values(launch_seconds=1e-12)
    shown, told = lines(fast, one)
    assert "0%" in shown[1].split()
    assert not any("binds" in line or "waits" in line for line in (*shown, *told))
    shown, told = lines(MACHINES["cpu"], one)
    assert "host" not in shown[0].split()


def rank(*costs: Cost) -> RankSummary:
    cells = tuple(
        Cell(phase="forward", microbatch=i, layer="", cost=c) for i, c in enumerate(costs)
    )
    work = Work(step=1, total=sum(costs, Cost()), before=Cost(), cells=cells, waits=())
    return replace(summarize(Trace(0, 1)), work=work)


def test_a_dry_run_says_whether_host_or_device_sets_the_pace() -> None:
    machine = machine_named("NVIDIA H100 80GB HBM3")
    assert machine is H100
    second_of_products = Cost(launches=100, flops=int(machine.flops))
    half_of_bytes = Cost(launches=100, bytes=int(machine.memory_bandwidth / 2), flops=7)
    pace = rank(second_of_products, half_of_bytes).work.pace(machine)
    assert pace.device == pytest.approx(1.5)
    assert pace.host == pytest.approx(200 * machine.launch_seconds)
    assert not pace.host_binds
    many = Cost(launches=400_000)
    summary = Summary(
        name="x",
        layout="",
        world_size=1,
        gpu="NVIDIA H100 80GB HBM3",
        gpu_bytes=1,
        beside={},
        ranks=(rank(second_of_products, many), rank(second_of_products)),
    )
    rows = paces(summary).rows
    assert [row[-1] for row in rows] == ["host", "device"]
    assert rows[0][3] == "200%"
    assert paces(replace(summary, gpu="Tesla T4")).rows == []
