"""Ranks of torchrun meet in a store of their own, whatever is left in that of their agent."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported, but untyped

from hp_base.errors import HangError
from hp_platform import RankInfo
from hp_trainer.launch.agent import meet, why_no_node_is_replaced

_SECONDS = timedelta(seconds=20)


def start(port: int, *, world_size: int) -> set[str]:
    """Let ranks meet, each with its own connection, and return what one told the others."""

    def rank_of(rank: int) -> str:
        agents = TCPStore("localhost", port, is_master=False, timeout=_SECONDS)
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        info = RankInfo(rank, world_size, rank, world_size)
        served = meet(agents, info, env, timeout=_SECONDS)
        mine = TCPStore("localhost", int(env["MASTER_PORT"]), is_master=False, timeout=_SECONDS)
        if served is not None:
            mine.set("from rank 0", env["MASTER_PORT"])
        told = mine.get("from rank 0").decode()
        mine.add("done", 1)
        while served is not None and mine.add("done", 0) < world_size:
            pass
        assert (env["TORCHELASTIC_USE_AGENT_STORE"], env["MASTER_PORT"]) == ("False", told)
        return told

    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(rank_of, range(world_size)))


def test_every_start_meets_in_a_store_of_its_own() -> None:
    agents = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found = [start(agents.port, world_size=size) for size in (3, 3, 2)]
    assert [len(ports) for ports in found] == [1, 1, 1]


def _addresses_that_listen(port: int) -> set[str]:
    """Hexadecimal, as the kernel lists them."""
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_ranks_of_one_machine_meet_on_loopback() -> None:
    agents = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "localhost", "NCCL_SOCKET_IFNAME": "eth7"}
    found: list[set[str]] = []

    def rank_of(rank: int) -> None:
        mine = dict(env)
        own: Any = agents  # untyped in torch
        served = meet(own.clone(), RankInfo(rank, 2, rank, 2), mine, timeout=_SECONDS)
        assert (mine["MASTER_ADDR"], mine["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        assert mine["NCCL_SOCKET_IFNAME"] == "eth7"
        if served is not None:
            found.append(_addresses_that_listen(int(mine["MASTER_PORT"])))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_of, range(2)))
    assert found == [{"0100007F"}]


def test_the_word_of_a_dead_rank_does_not_pass_for_that_of_its_successor() -> None:
    agents = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agents.set("hp_train/meeting/1", "word")
    agents.set("hp_train/meeting/1/word", f"earlier {agents.port}")
    agents.set("hp_train/meeting/earlier/1", "")
    (port,) = start(agents.port, world_size=2)
    assert port != str(agents.port)
    agents.set("hp_train/meeting/1", "word")
    with pytest.raises(HangError, match=r"rank 1 did not start within 0\.3 s"):
        meet(
            agents,
            RankInfo(0, 2, 0, 2),
            {"MASTER_ADDR": "localhost"},
            timeout=timedelta(seconds=0.3),
        )


def test_a_rank_that_meets_nobody_says_whom_it_waited_for() -> None:
    agents = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agents.set("hp_train/meeting/1/word", f"earlier {agents.port}")
    with pytest.raises(HangError, match=r"rank 0 did not start within 0\.3 s"):
        meet(agents, RankInfo(1, 2, 1, 2), {}, timeout=timedelta(seconds=0.3))


@pytest.mark.parametrize(
    ("changed", "warns"),
    [
        ({}, True),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ({"GROUP_WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
    ],
)
def test_agents_that_cannot_replace_a_node_are_warned_of(
    changed: dict[str, str], *, warns: bool
) -> None:
    env = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert bool(why_no_node_is_replaced(env | changed)) == warns
    assert not why_no_node_is_replaced({})
