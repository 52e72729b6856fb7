"""torchrun's agents start ranks again: after one is killed or hangs, and after a node is lost.

A node is an agent and its rank. Nodes are numbered by the order of their addresses, so that the
addresses decide which place a new one takes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # exported, but untyped

from hp_checkpoint.runs.directory import complete_checkpoints
from integration_tests.reliability.kills import TINY
from integration_tests.runs import write_corpus

pytestmark = pytest.mark.usefixtures("forked_programs")

TAKES_MINUTES = pytest.mark.skipif(
    os.environ.get("HP_SLOW_RESTARTS") != "1", reason="takes minutes; nox -s reliability runs it"
)
WAIT_SECONDS = 240.0
BOUND_SECONDS = 300.0  # between a fault and the next step; 38 s on a quiet machine
SETTINGS: dict[str, object] = {
    "mesh.pp": 2,
    "mesh.dp_replicate": 1,
    "mesh.ep": 1,
    "pipeline.stages_per_rank": 1,
    "train.log_every": 1,
}
AGENT = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=5", "--rdzv-id=job")
ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Agents:
    """Agents of one run, what they print, and their end."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.run = folder, name, folder / name
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pids: set[int] = set()

    def start(self, *options: str, **settings: object) -> subprocess.Popen[bytes]:
        command = [*AGENT, *options, "-m", "hp_train", "train"]
        command += keys(self.folder, self.name, **settings)
        log = self.folder / f"{self.name}-{len(self.processes)}.log"
        with log.open("wb") as out:
            env = os.environ | ENV
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        self.processes.append(process)
        return process

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """Process ids of an agent's ranks."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        found = [
            pid for pid in children if b"hp_train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        self._pids |= {int(pid) for pid in found}
        return [int(pid) for pid in found]

    def output(self) -> str:
        logs = sorted(self.folder.glob(f"{self.name}-*.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until something is so."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < WAIT_SECONDS, f"{what}: {self.output()}"
            time.sleep(0.02)
        return time.monotonic() - start

    def wait_for_checkpoint(self) -> None:
        saved = self.run / "checkpoints"
        self.wait_for(lambda: bool(complete_checkpoints(saved)), "no checkpoint")

    def seconds_to_next_step(self, resumed: int) -> float:
        """Until a step is done after resuming so many times in all."""

        def is_done() -> bool:
            starts = self.output().split("resumed from")
            return len(starts) > resumed and "\nstep " in starts[-1]

        return self.wait_for(is_done, "no step after the fault")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                self.ranks(process)
                process.kill()
                process.wait()
        for pid in self._pids:
            with suppress(ProcessLookupError, FileNotFoundError):
                if b"hp_train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def keys(folder: Path, name: str, **settings: object) -> list[str]:
    places = {"run.output_dir": folder, "run.name": name, "data.paths": folder / "corpus.jsonl"}
    values = dict(TINY) | SETTINGS | places | settings
    return [f"--{key}={value}" for key, value in values.items()]


def rows(run: Path) -> list[tuple[float, ...]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the text, and a run that nothing happened to."""
    path = tmp_path_factory.mktemp("runs")
    write_corpus(path)
    command = [sys.executable, "-m", "hp_train", "train", *keys(path, "quiet")]
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_SECONDS)
    return path


@pytest.fixture
def agents(folder: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    started = Agents(folder, name)
    yield started
    started.end()


@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=TAKES_MINUTES)],
    ids=["killed", "hangs"],
)
def test_ranks_are_started_again_after_one_is_lost_or_hangs(
    signum: signal.Signals, agents: Agents
) -> None:
    agent = agents.start("--nproc-per-node=2", **{"launch.step_timeout_seconds": 4})
    agents.wait_for_checkpoint()
    _, second = agents.ranks(agent)
    os.kill(second, signum)
    seconds = agents.seconds_to_next_step(1)
    sys.stdout.write(f"{seconds:.1f} s from {signum.name} to the next step\n")
    assert seconds < BOUND_SECONDS
    assert agent.wait(WAIT_SECONDS) == 0, agents.output()
    assert rows(agents.run) == rows(agents.folder / "quiet")


@TAKES_MINUTES
def test_two_nodes_start_again_after_one_loses_its_rank(agents: Agents) -> None:
    port = free_port()
    nodes = [start_node(agents, port, number, is_host=number == 1) for number in (1, 2)]
    agents.wait_for_checkpoint()
    (rank,) = agents.ranks(nodes[1])
    os.kill(rank, signal.SIGKILL)
    seconds = agents.seconds_to_next_step(1)
    sys.stdout.write(f"{seconds:.1f} s from the loss of a rank to the next step\n")
    assert seconds < BOUND_SECONDS
    assert [node.wait(WAIT_SECONDS) for node in nodes] == [0, 0], agents.output()
    assert rows(agents.run) == rows(agents.folder / "quiet")


@TAKES_MINUTES
@pytest.mark.parametrize(
    ("stays", "loses", "comes", "signum", "whom"),
    [
        pytest.param(1, 2, 3, signal.SIGKILL, "node", id="second-by-second"),
        pytest.param(2, 1, 3, signal.SIGKILL, "node", id="first-by-second"),
        pytest.param(3, 1, 2, signal.SIGKILL, "node, the store elsewhere", id="first-by-first"),
        pytest.param(1, 2, 3, signal.SIGKILL, "agent", id="its-agent-alone"),
        # No connection is closed, as when a machine loses its power or its network.
        pytest.param(1, 2, 3, signal.SIGSTOP, "node", id="frozen"),
    ],
)
def test_a_lost_node_is_replaced_and_the_run_ends_as_a_quiet_one(
    agents: Agents,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stays: int,
    loses: int,
    comes: int,
    signum: signal.Signals,
    whom: str,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store: Store | None = None
    port = free_port()
    if whom == "node, the store elsewhere":
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    kept = start_node(agents, port, stays, is_host=store is None)
    lost = start_node(agents, port, loses)
    agents.wait_for_checkpoint()
    lose(agents, lost, signum, rank_too=whom != "agent")
    new = start_node(agents, port, comes)
    seconds = agents.seconds_to_next_step(1)
    sys.stdout.write(f"{seconds:.1f} s from the loss of a node to the next step\n")
    assert seconds < BOUND_SECONDS
    assert [kept.wait(WAIT_SECONDS), new.wait(WAIT_SECONDS)] == [0, 0], agents.output()
    assert "cannot be replaced" not in agents.output()
    assert rows(agents.run) == rows(agents.folder / "quiet")


@TAKES_MINUTES
def test_without_the_host_of_the_meeting_point_the_job_ends_and_resumes_when_started_again(
    agents: Agents,
) -> None:
    port = free_port()
    host = start_node(agents, port, 1, is_host=True)
    other = start_node(agents, port, 2)
    agents.wait_for_checkpoint()
    lose(agents, host, signal.SIGKILL, rank_too=True)
    began = time.monotonic()
    assert other.wait(BOUND_SECONDS) != 0
    sys.stdout.write(f"ended {time.monotonic() - began:.1f} s after the host was lost\n")
    assert "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in agents.output()
    port = free_port()
    again = [start_node(agents, port, 1, is_host=True)]
    again.append(start_node(agents, port, 2))
    assert [agent.wait(WAIT_SECONDS) for agent in again] == [0, 0], agents.output()
    assert "resumed from" in agents.output()
    assert rows(agents.run) == rows(agents.folder / "quiet")


def start_node(
    agents: Agents, port: int, number: int, *, is_host: bool = False
) -> subprocess.Popen[bytes]:
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    where = (f"--rdzv-conf=is_host={int(is_host)}", f"--local-addr=127.0.0.{number}")
    return agents.start("--nnodes=2", "--nproc-per-node=1", *meeting, *where)


def lose(
    agents: Agents,
    agent: subprocess.Popen[bytes],
    signum: signal.Signals,
    *,
    rank_too: bool,
) -> None:
    ranks = agents.ranks(agent)
    agent.send_signal(signum)
    if rank_too:
        for pid in ranks:
            os.kill(pid, signum)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
