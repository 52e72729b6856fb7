"""The host stays within a bound of the device."""

import threading
from collections.abc import Callable

import pytest
import torch

from hp_expert import RunAhead

CPU = torch.device("cpu")


class Device:
    """Reaches marks when told to, or when somebody waits; keeps the most that were ahead."""

    def __init__(self) -> None:
        self.made, self.waited_for = list["StandIn"](), list[int]()

    def make_mark(self, device: torch.device) -> "StandIn":
        assert device == CPU
        self.made.append(StandIn(self, len(self.made)))
        return self.made[-1]


class StandIn:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number, self.recorded = device, number, False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.device.waited_for.append(self.number)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_host_waits_for_the_mark_that_is_limit_marks_back(limit: int) -> None:
    device = Device()
    run_ahead = RunAhead(limit, make_mark=device.make_mark)
    for number in range(8):
        run_ahead.mark(CPU)
        assert device.waited_for == list(range(number + 1 - limit))
    assert all(mark.recorded for mark in device.made)


def test_threads_share_the_bound_and_wait_for_every_mark_once() -> None:
    device = Device()
    run_ahead = RunAhead(4, make_mark=device.make_mark)

    def work() -> None:
        for _ in range(100):
            run_ahead.mark(CPU)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device.waited_for) == len(set(device.waited_for)) == 400 - 4


def test_a_thread_that_waits_holds_up_no_other() -> None:
    released, entered = threading.Event(), threading.Event()

    class Slow(StandIn):
        def synchronize(self) -> None:
            if self.number == 0:
                entered.set()
                assert released.wait(5)

    device, made = Device(), list[Slow]()

    def make(_: torch.device) -> Slow:
        made.append(Slow(device, len(made)))
        return made[-1]

    run_ahead = RunAhead(1, make_mark=make)
    run_ahead.mark(CPU)
    waiting = threading.Thread(target=run_ahead.mark, args=(CPU,))
    waiting.start()
    assert entered.wait(5)
    run_ahead.mark(CPU)  # returns, as number 1 has been reached
    released.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_it_does_nothing_on_a_cpu_and_needs_a_limit() -> None:
    run_ahead = RunAhead(1)
    for _ in range(3):
        run_ahead.mark(CPU)
    with pytest.raises(ValueError, match=r"limit \(0\) must be at least 1"):
        RunAhead(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_a_gpu_that_is_behind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    spin: Callable[[int], None] = torch.cuda._sleep
    run_ahead, after = RunAhead(2), torch.cuda.Event()
    run_ahead.mark(device)
    spin(200_000_000)
    run_ahead.mark(device)
    after.record()
    run_ahead.mark(device)  # waits for the first mark, which is before the work
    assert not after.query()
    run_ahead.mark(device)  # waits for the second, which is after it
    assert after.query()
