import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hp_trainer.launch.heartbeats import Heartbeats, State
from hp_trainer.launch.supervise import Verdict, Watch, kill_ranks, process_state


@dataclass
class World:
    """Ranks that the test plays itself, and a clock that it turns."""

    path: Path
    num_ranks: int = 3
    now: float = 100.0
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats.create(self.path, num_ranks=self.num_ranks)
        self.ranks = [Heartbeats.attach(self.path, rank=rank) for rank in range(self.num_ranks)]
        self.watch = Watch(
            self.heartbeats,
            hang_seconds=10,
            start_seconds=60,
            clock=lambda: self.now,
            is_alive=lambda _pid: True,
        )

    def start(self) -> None:
        for rank in self.ranks:
            rank.tell(State.RUNNING)
            rank.beat(step=0, phase="build")

    def pass_seconds(self, seconds: float) -> Verdict | None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            verdict = self.watch.look()
            if verdict is not None:
                return verdict
        return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "heartbeat")


def test_a_slot_holds_what_its_rank_last_said(world: World) -> None:
    world.ranks[1].tell(State.RUNNING)
    world.ranks[1].beat(step=12, phase="1F3", waiting=True)
    slot = world.heartbeats.slots()[1]
    assert (slot.step, slot.phase, slot.waiting, slot.sequence) == (12, "1F3", True, 1)
    assert (slot.pid, slot.state) == (os.getpid(), State.RUNNING)
    assert world.heartbeats.slots()[0].state is State.ABSENT


def test_a_long_phase_is_cut_and_stays_readable(world: World) -> None:
    world.ranks[0].beat(step=0, phase="\N{GREEK SMALL LETTER PHI}" * 100)
    assert len(world.heartbeats.slots()[0].phase) <= 64


def test_all_ranks_see_a_request_to_stop(world: World) -> None:
    assert not any(rank.stop_requested() for rank in world.ranks)
    world.heartbeats.request_stop()
    assert all(rank.stop_requested() for rank in world.ranks)


def test_progress_of_any_rank_keeps_the_watch_quiet(world: World) -> None:
    world.start()
    for step in range(20):
        world.ranks[2].beat(step=step, phase="forward")
        assert world.pass_seconds(5) is None


def test_the_rank_that_waits_for_nobody_is_to_blame_for_a_hang(world: World) -> None:
    world.start()
    world.ranks[0].beat(step=5, phase="reduce", waiting=True)
    world.ranks[1].beat(step=5, phase="forward")
    world.ranks[2].beat(step=5, phase="reduce", waiting=True)
    verdict = world.pass_seconds(12)
    assert verdict is not None
    assert (verdict.rank, verdict.status, verdict.is_hang) == (1, 5, True)
    assert verdict.message == ("rank 1 hangs at step 5 (forward): no progress of any rank for 10 s")


def test_among_waiting_ranks_the_one_furthest_behind_is_to_blame(world: World) -> None:
    world.start()
    for rank, step in ((0, 5), (1, 5), (2, 4)):
        world.ranks[rank].beat(step=step, phase="reduce", waiting=True)
    verdict = world.pass_seconds(12)
    assert verdict is not None
    assert verdict.rank == 2


def test_a_rank_that_has_returned_is_not_to_blame(world: World) -> None:
    world.start()
    world.ranks[0].tell(State.RETURNED, status=0)
    world.ranks[1].tell(State.RETURNED, status=0)
    verdict = world.pass_seconds(12)
    assert verdict is not None
    assert verdict.rank == 2


def test_ranks_may_take_longer_to_start_than_to_step(world: World) -> None:
    world.ranks[0].tell(State.RUNNING)
    assert world.pass_seconds(50) is None
    verdict = world.pass_seconds(20)
    assert verdict is not None
    assert (verdict.rank, verdict.state, verdict.status) == (1, State.ABSENT, 5)


def test_time_in_which_the_launcher_was_stopped_does_not_count(world: World) -> None:
    world.start()
    assert world.pass_seconds(5) is None
    world.now += 3600
    assert world.watch.look() is None
    assert world.pass_seconds(4) is None
    assert world.pass_seconds(4) is not None


def test_the_first_failure_is_named_and_not_its_echoes(world: World) -> None:
    world.start()
    world.ranks[0].tell(State.FAILED, status=1, is_echo=True)
    world.ranks[2].beat(step=3, phase="optimizer")
    world.ranks[2].tell(State.FAILED, status=6, is_echo=False)
    world.ranks[1].tell(State.FAILED, status=1, is_echo=True)
    verdict = world.pass_seconds(2)
    assert verdict is not None
    assert (verdict.rank, verdict.state, verdict.status) == (2, State.FAILED, 6)
    assert verdict.message == "rank 2 failed at step 3 (optimizer)"


def test_a_lost_rank_is_named_and_not_those_that_noticed(world: World) -> None:
    world.start()
    world.ranks[0].tell(State.FAILED, status=1, is_echo=True)
    world.watch.is_alive = lambda pid: pid != 1
    _pretend_pid(world.ranks[1], 1)
    verdict = world.pass_seconds(2)
    assert verdict is not None
    assert (verdict.rank, verdict.status, verdict.is_hang) == (1, 7, False)


def test_a_rank_that_was_waited_for_in_vain_hangs(world: World) -> None:
    world.start()
    world.ranks[1].beat(step=2, phase="forward")
    world.ranks[0].tell(State.FAILED, status=1, is_echo=True)
    world.ranks[2].beat(step=2, phase="reduce", waiting=True)
    verdict = world.pass_seconds(2)
    assert verdict is not None
    assert (verdict.rank, verdict.status, verdict.is_hang) == (1, 5, True)
    assert "rank 0 gave up waiting" in verdict.message


def test_the_state_of_a_process_is_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid) == "T"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == ""


def test_killing_spares_ranks_that_never_came(world: World) -> None:
    kill_ranks(world.heartbeats.slots())


def _pretend_pid(rank: Heartbeats, pid: int) -> None:
    real = os.getpid
    os.getpid = lambda: pid
    try:
        rank.tell(State.RUNNING)
    finally:
        os.getpid = real
