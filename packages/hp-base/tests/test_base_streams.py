"""Outputs that are full, closed or read by nobody, and letters that they do not have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_base.errors import MachineError

_STREAMS = "from hp_base.streams import endure, own_streams; own_streams(); "

_COMMAND = """
import sys
from hp_base import ConfigError, DataError, run_command

def run(arguments):
    if arguments == ["refused"]:
        raise ConfigError("no")
    if arguments == ["no data"]:
        raise DataError("there is none")
    if arguments == ["stopped"]:
        raise KeyboardInterrupt
    if arguments == ["broken"]:
        open("/nowhere/at/all")
    print("an answer")
    return 0

sys.exit(run_command(run))
"""


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
def test_a_command_whose_answer_is_lost_says_so_in_one_line(redirect: str, why: bytes) -> None:
    end = shell(redirect, _COMMAND)
    assert end.stderr == b"error: standard output cannot be written: " + why + b"\n"
    assert end.returncode == MachineError.exit_code


def test_a_command_that_nobody_reads_ends_quietly() -> None:
    end = shell("| true; exit ${PIPESTATUS[0]}", _COMMAND)
    assert (end.returncode, end.stderr) in [(141, b""), (0, b"")]  # it may be through before


def test_a_refusal_that_cannot_be_said_has_its_status() -> None:
    for redirect in ("2> /dev/full", "2>&-", "<&- >&- 2>&-"):
        end = shell(redirect, _COMMAND, "refused")
        assert (end.returncode, end.stdout, end.stderr) == (2, b"", b"")


def test_a_command_that_ends_early_says_so_in_one_line() -> None:
    for given, says, status in (
        ("refused", b"error: no\n", 2),
        ("no data", b"error: there is none\n", 3),
        ("broken", b"error: FileNotFoundError: ", 11),
        ("stopped", b"", 130),
    ):
        end = shell("", _COMMAND, given)
        assert (end.returncode, end.stdout) == (status, b"")
        assert end.stderr.startswith(says)
        assert end.stderr.count(b"\n") == bool(says)


def test_a_current_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    lines = f"cd {gone} && rmdir {gone} && "
    end = subprocess.run(
        ["bash", "-c", f'{lines} "$@"', "bash", sys.executable, "-c", _COMMAND],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert end.returncode == MachineError.exit_code
    line = "error: the current folder is gone, it was removed: cd to one that is there\n"
    assert end.stderr.endswith(line)  # bash says something of its own
    assert "Traceback" not in end.stderr


@pytest.mark.parametrize("redirect", ["> /dev/full", ">&-", "| true; exit ${PIPESTATUS[0]}"])
def test_a_run_goes_on_without_standard_output_and_says_so_once(redirect: str) -> None:
    says = "print('lost', flush=True); time.sleep(0.2); "
    end = shell(redirect, f"import sys, time; {_STREAMS} endure(); {says * 3} sys.exit(75)")
    assert end.returncode == 75
    assert end.stderr.count(b"\n") == 1
    assert end.stderr.endswith(b"; the run goes on, its numbers are in metrics.jsonl\n")


def test_what_is_printed_never_stands_in_a_file_that_was_opened_later(tmp_path: Path) -> None:
    program = f"""
import os, sys
{_STREAMS} endure()
file = os.open("{tmp_path / "checkpoint"}", os.O_RDWR | os.O_CREAT)
assert file > 2, file
print("for people", flush=True)
os.write(1, b"from a library") and os.write(2, b"from a library")
assert os.fstat(file).st_size == 0
"""
    assert shell("<&- >&- 2>&-", program).returncode == 0


def test_letters_that_an_output_does_not_have_are_escaped_and_bytes_of_a_path_stay() -> None:
    program = f"{_STREAMS} print('\\u03b1 \\udce9 \\ufffd \\ud800')"
    for encoding, expected in {
        "ascii": b"\\u03b1 \xe9 \\ufffd \\ud800\n",
        "latin-1": b"\\u03b1 \xe9 \\ufffd \\ud800\n",
        "utf-8": "\u03b1 ".encode() + b"\xe9" + " \ufffd ".encode() + b"\\ud800\n",
    }.items():
        end = shell("", program, env={"PYTHONIOENCODING": encoding})
        assert (end.returncode, end.stdout) == (0, expected), end.stderr


def test_a_pipe_that_does_not_wait_gets_all_of_it() -> None:
    program = f"""
import os
os.set_blocking(1, False)
{_STREAMS}
print("x" * 1_000_000)
"""
    assert len(shell("| (sleep 0.3; cat)", program).stdout) == 1_000_001
