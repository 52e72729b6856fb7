"""The command line of hp-verify: one grammar, and wrong ones in a line."""

import subprocess
import sys
from pathlib import Path

import pytest

from hp_verify import __version__
from hp_verify.cli import main

RUN = ["--", "true"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "-- JOB must be given, or one of --checkpoint, --manifest, --curves"),
        ("--steps 2", "-- JOB must be given, or one of --checkpoint, --manifest, --curves"),
        ("-- true", "-- JOB must be followed by --against -- REFERENCE"),
        ("-- true --against other", "-- JOB must be followed by --against -- REFERENCE"),
        ("-- --against -- true", "both the job and the reference must be commands"),
        ("-- true --against --", "both the job and the reference must be commands"),
        ("--curves a b -- true --against -- true", "--curves must come without jobs behind --"),
        ("--checkpoint a b --curves a b", "argument --curves: not allowed with argument"),
        ("--checkpoint a", "argument --checkpoint: expected 2 arguments"),
        ("--curves a", "--curves must be followed by two curves or more"),
        ("--steps 0 -- true --against -- true", "--steps (0) must be at least 1"),
        ("--step 2 -- true --against -- true", "unrecognized arguments: --step 2"),
        ("--float64 job.py", "unrecognized arguments: job.py"),
        ("--rules nowhere -- true --against -- true", "--rules (nowhere): No such file"),
        ("--names nowhere --checkpoint a b", "--names (nowhere) must be a JSON file"),
        ("--keep /proc/x -- true --against -- true", "--keep (/proc/x) must be a folder that can"),
        ("-- /no/such --against -- /no/such", "/no/such cannot be started"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--help", *RUN], ["--steps", "2", "--help"]])
def test_help_is_of_the_command_and_not_of_a_job(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: hp-verify [FLAGS] -- JOB [ARGS] --against -- REFERENCE [ARGS]")
    assert "--curves CURVE" in told


def test_the_installed_command_helps_without_torch(tmp_path: Path) -> None:
    """A module of that name in the way ends whatever imports it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported torch')")
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported numpy')")
    command = str(Path(sys.executable).with_name("hp-verify"))
    for flag, told in (("--help", "--against -- REFERENCE"), ("--version", __version__)):
        ran = subprocess.run(
            [command, flag],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert told in ran.stdout


def test_a_reader_that_leaves_ends_it_quietly_and_an_output_that_is_closed_in_a_line() -> None:
    command = str(Path(sys.executable).with_name("hp-verify"))
    gone = subprocess.run(
        ["/bin/sh", "-c", f"{command} --help | true; {command} --help >&-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = "error: standard output cannot be written: Bad file descriptor\n"
    assert (gone.returncode, gone.stdout, gone.stderr) == (11, "", told)
