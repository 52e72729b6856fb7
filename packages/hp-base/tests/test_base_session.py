"""What is shown of the output of a command that failed, its own error first; other systems."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from hp_base.environment import usable_cores
from hp_base.session import kill_when_parent_dies, last_lines, raised_in

BOX = """Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
job.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_19:00:00
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 1234) (SIGABRT)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 1234
============================================================
"""
SAID = (
    "W1128 19:00:00.123000 1234 torch/distributed/elastic/multiprocessing/api.py:900] Sending "
    "process 12 closing signal SIGTERM\n"
)


def traceback(raised: str, rank: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "job.py", line 1, in <module>', raised]
    return "".join(f"{rank}{line}\n" for line in lines)


OF_1 = traceback("KeyError: 'a'", "[rank1]: ") + traceback("ValueError: no data", "[rank1]: ")
OF_0 = traceback("RuntimeError: Connection closed by peer", "[rank0]: ")
ACCELERATE = """Traceback (most recent call last):
  File "/lib/accelerate/commands/launch.py", line 900, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'job.py']' returned non-zero exit status 1.
"""
SHOWN = {
    "of the rank that failed first": (
        f"epoch 1\n{OF_1}{OF_0}{SAID}{BOX.replace('-6', '1').replace(' (SIGABRT)', '')}",
        traceback("ValueError: no data", "[rank1]: "),
        "ValueError: no data",
    ),
    "of an import": (
        f"{traceback('ImportError: no such')}{traceback('ImportError: no such')}{SAID}{BOX}",
        traceback("ImportError: no such"),
        "ImportError: no such",
    ),
    "of an abort": (
        f"terminate called\n{SAID}{BOX}",
        "rank 1 ended first, with status -6 (SIGABRT)\n...\nterminate called",
        "",
    ),
    "of an abort and of a rank that sees it": (
        f"{OF_0}{SAID}{BOX}",
        f"rank 1 ended first, with status -6 (SIGABRT)\n...\n{OF_0}",
        "RuntimeError: Connection closed by peer",
    ),
    "of accelerate": (
        f"epoch 1\n{traceback('ValueError: no data')}{ACCELERATE}",
        f"{traceback('ValueError: no data')}...\nepoch 1",
        "ValueError: no data",
    ),
    "of several lines": (
        traceback("RuntimeError: Error in loading:\n\tMissing key"),
        traceback("RuntimeError: Error in loading:\n\tMissing key"),
        "RuntimeError: Error in loading:",
    ),
    "of words": (f"no more data\n{SAID}", "no more data", ""),
}


@pytest.mark.parametrize("case", SHOWN)
def test_an_error_of_its_own_is_shown_before_all_else(case: str, tmp_path: Path) -> None:
    text, begin, raised = SHOWN[case]
    log = tmp_path / "log.txt"
    log.write_text(text)
    assert last_lines(log).startswith(begin.rstrip("\n"))
    assert "ChildFailedError" not in last_lines(log)
    assert "CalledProcessError" not in last_lines(log)
    assert raised_in(log) == raised


def test_without_a_log_nothing_is_shown(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.txt") == raised_in(tmp_path / "none.txt") == ""


def test_elsewhere_nothing_of_linux_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    monkeypatch.delattr(os, "sched_getaffinity")
    kill_when_parent_dies()
    assert usable_cores() == os.cpu_count()
