import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from hp_base.signals import ONE_REQUEST_SECONDS, STOP_SIGNALS, StopFlag, StopTrap


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_raises_the_flag_and_ends_nothing(signum: int) -> None:
    flag = StopFlag()
    flag.install()
    assert not flag.requested
    os.kill(os.getpid(), signum)
    assert flag.requested


def test_what_the_launcher_passes_on_raises_the_flag() -> None:
    word = [False]
    flag = StopFlag(passed_on=lambda: word[0])
    assert not flag.requested
    word[0] = True
    assert flag.requested


def test_a_second_request_ends_a_rank_at_once() -> None:
    program = f"""
        import os, signal, time
        from hp_base.signals import StopFlag
        StopFlag().install()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep({ONE_REQUEST_SECONDS + 0.1})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    end = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=30, check=False)
    assert end.returncode == 128 + signal.SIGTERM


def test_a_burst_of_signals_is_one_request() -> None:
    with StopTrap() as trap:
        for signum in STOP_SIGNALS:
            os.kill(os.getpid(), signum)
        assert trap.first == STOP_SIGNALS[0]
        assert trap.second == 0


def test_a_later_signal_is_a_second_request() -> None:
    with StopTrap() as trap:
        trap.is_watched = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ONE_REQUEST_SECONDS + 0.05)
        os.kill(os.getpid(), signal.SIGINT)
        assert (trap.first, trap.second) == (signal.SIGTERM, signal.SIGINT)
        assert trap.waiting_seconds > ONE_REQUEST_SECONDS


def test_a_second_request_breaks_off_a_start_that_nobody_watches() -> None:
    with StopTrap():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(ONE_REQUEST_SECONDS + 0.05)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGINT)
        assert end.value.code == 130


def test_handlers_are_as_before_after_the_trap() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopTrap():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopTrap() as trap:
        os.kill(os.getpid(), signal.SIGHUP)
        assert trap.first == 0
