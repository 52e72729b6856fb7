"""Outputs that are full, closed or read by nobody, and letters that they do not have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_base.errors import MachineError

_HP = "import sys; sys.argv[0] = 'hp'; from hp_train.cli import main; sys.exit(main())"


def shell(
    redirect: str, program: str, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of Python with what a shell makes of its streams."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", sys.executable, "-c", program, *arguments],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | (env or {}),
    )


@pytest.mark.parametrize(
    ("redirect", "why"),
    [("> /dev/full", b"No space left on device"), (">&-", b"Bad file descriptor")],
)
@pytest.mark.parametrize("arguments", [("config", "quickstart"), ("--help",), ("doctor", "-h")])
def test_a_command_whose_answer_is_lost_says_so_in_one_line(
    arguments: tuple[str, ...], redirect: str, why: bytes
) -> None:
    end = shell(redirect, _HP, *arguments)
    assert end.stderr == b"error: standard output cannot be written: " + why + b"\n"
    assert end.returncode == MachineError.exit_code


def test_a_command_that_nobody_reads_ends_quietly() -> None:
    end = shell("| true; exit ${PIPESTATUS[0]}", _HP, "config", "quickstart", "--origins")
    assert (end.returncode, end.stderr) in [(141, b""), (0, b"")]  # it may be through before


def test_a_refusal_that_cannot_be_said_has_its_status() -> None:
    for redirect in ("2> /dev/full", "2>&-", "<&- >&- 2>&-"):
        end = shell(redirect, _HP, "config", "nothing")
        assert (end.returncode, end.stdout, end.stderr) == (2, b"", b"")


@pytest.mark.parametrize("command", ["config", "doctor", "train"])
def test_a_current_folder_that_is_gone_is_named(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    lines = f"cd {gone} && rmdir {gone} && "
    end = subprocess.run(
        ["bash", "-c", f'{lines} "$@"', "bash", sys.executable, "-c", _HP, command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert end.returncode == MachineError.exit_code
    line = "error: the current folder is gone, it was removed: cd to one that is there\n"
    assert end.stderr.endswith(line)  # bash says something of its own
    assert "Traceback" not in end.stderr
