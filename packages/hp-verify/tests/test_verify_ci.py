"""Checks of pull requests: several comparisons, minutes, files of results, pytest, an action."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree as ET

import pytest

from hp_verify import JobFailedError, verify
from hp_verify.budget import Budget
from hp_verify.cli import main

pytestmark = pytest.mark.usefixtures("forked_programs")

JOB = """
import itertools, pathlib, sys, torch
scale, steps, seconds = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with pathlib.Path(__file__).with_suffix(".ran").open("a") as file:
    file.write(f"{scale}\\n")
if scale == 0:
    sys.exit("\\x1b[31mno data <&>")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import time
for _ in itertools.islice(itertools.count(), steps or None):
    time.sleep(seconds)
    x = torch.randn(16, 8)
    (model(x).square().mean() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def command(job: Path, scale: float, steps: int = 3, seconds: float = 0.0) -> list[str]:
    return [sys.executable, str(job), str(scale), str(steps), str(seconds)]


def test_several_jobs_are_compared_with_one_run_of_their_reference(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, told, junit = (tmp_path / name for name in ("jobs.toml", "told.json", "junit.xml"))
    run = f"{sys.executable} {job}"
    against = f"--against -- {run} 1 3 0"
    file.write_text(
        f"same = '-- {run} 1.0 3 0 {against}'\n"
        f"twice = '''--no-outputs  # parameters are enough\n-- {run} 2 3 0\n{against}'''\n"
        f"fails = '-- {run} 0 3 0 {against}'\n"
    )
    files = ["--json", str(told), "--junit", str(junit)]

    assert main(["--once", "--jobs", str(file), *files]) == 8

    out, err = capsys.readouterr()
    assert err == ""
    assert "same: equal\ntwice: different\nfails: the job ended with status 1" in out
    assert out.count("reference: 1 process") == 2  # other flags are another question
    assert re.findall("^== .*", out, re.MULTILINE) == ["== same", "== twice", "== fails"]
    ran = (tmp_path / "job.ran").read_text().split()
    assert ran.count("1.0") == 3 + 1 + 3
    found = json.loads(told.read_text())["comparisons"]
    assert [(one["name"], one["verdict"], one["status"]) for one in found] == [
        ("same", "equal", 0),
        ("twice", "different", 8),
        ("fails", "failed", 1),
    ]
    same, twice, fails = (one["comparison"] for one in found)
    assert fails is None
    assert twice["differences"][0]["phase"] == "gradient"
    assert twice["differences"][0]["factor"] == pytest.approx(2)
    assert same["differences"] == []
    assert same["largest"]["weight"] == 0
    assert same["versions"].keys() >= {"Python", "hp-verify", "torch", "msgspec"}
    assert same["seconds"].keys() == {"reference", "reference-1", "reference-2", "job"}
    suite = ET.parse(junit).getroot()
    assert [case.get("name") for case in suite] == ["same", "twice", "fails"]
    assert [[part.tag for part in case] for case in suite] == [
        ["system-out"],
        ["failure", "system-out"],
        ["error", "system-out"],
    ]
    assert (suite[1][0].get("message") or "").startswith("step 1, gradient ")
    assert "2 times the reference's" in (suite[1][0].text or "")
    assert "no data <&>" in (suite[2][0].text or "")
    assert json.loads(suite[1][1].text or "") == found[1]


def test_the_profile_keeps_a_reference_in_the_users_cache(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--ci", "--", *command(job, 1), "--against", "--", *command(job, 1)]
    assert main(asked) == 0
    assert main(asked) == 0
    assert "reference: not run, it is kept" in capsys.readouterr().out
    assert len(list((tmp_path / "own" / "hp-verify").glob("*.kept"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'must have lines: NAME = "-- JOB --against -- REFERENCE"'),
        ("a = '--steps 2'", "must have lines: NAME"),
        ("a = '-- true'", "-- JOB must be followed by --against -- REFERENCE"),
        ("a = 1", "must be a file of jobs: Expected `str`, got `int`"),
        ("a = '-- true --against -- \"'", "must be a file of jobs: No closing quotation"),
        ("a = '--no -- true --against -- true'", "arguments: --no"),
        ("jobs = ", "must be a file of jobs: Invalid value"),
        (None, "must be a file of jobs: No such file"),
    ],
)
def test_a_wrong_file_of_jobs_is_one_line_and_nothing_runs(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "jobs.toml").write_text(text)
    assert main(["--jobs", str(tmp_path / "jobs.toml")]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--json /nowhere/x", "--json (/nowhere/x) must be a file that can be written"),
        ("--junit /nowhere/x", "--junit (/nowhere/x) must be a file that can be written"),
        ("--cache /proc/x", "--cache (/proc/x) must be a writable folder"),
        ("--minutes x", "--minutes (x) must be a number"),
        ("--jobs x", "--jobs must come without jobs behind --"),
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_runs(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags.split(), "--", "true", "--against", "--", "true"]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_results_of_a_failure_are_written_too(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    both = [*command(job, 1), "--against", "--", *command(job, 0)]
    assert main(["--json", str(told), "--", *both]) == 1
    (found,) = json.loads(told.read_text())["comparisons"]
    assert (found["verdict"], found["status"]) == ("failed", 1)
    assert "no data" in found["error"]
    assert "no data" in capsys.readouterr().err


def test_a_program_without_an_end_is_ended_after_its_steps(job: Path) -> None:
    began = time.monotonic()
    told: list[str] = []
    endless = command(job, 1, 0, 0.05)
    found = verify(endless, endless, steps=2, minutes=2, tell=told.append)
    assert found.is_equal
    assert found.num_steps == 2
    assert time.monotonic() - began < 60
    assert not verify(command(job, 2, 0, 0.05), endless, steps=2, minutes=2, again=False).is_equal


def test_a_program_that_is_too_slow_fails(job: Path) -> None:
    slow = command(job, 1, 3, 60)
    with pytest.raises(JobFailedError, match=r"was not done after (2\.|3 )"):
        verify(slow, slow, steps=2, minutes=0.2)


def test_a_job_that_is_slower_is_compared_as_far_as_it_came(job: Path) -> None:
    limits = {"job": 12.0, "job-again": 12.0}
    with patch.object(Budget, "limit", lambda _, run: limits.get(run, 100.0)):
        found = verify(command(job, 1, 60, 1.0), command(job, 1, 60), minutes=10)
    assert found.is_equal
    assert found.is_cut
    assert 0 < found.num_steps < 20


def test_a_reference_without_an_end_is_compared_as_far_as_it_came_and_kept_so(
    job: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    endless = command(job, 1, 0, 0.2)
    with patch.object(Budget, "limit", lambda _, run: 8.0 if run == "reference" else 100.0):
        for _ in range(2):
            cache = tmp_path / "cache"
            found = verify(endless, endless, minutes=10, cache=cache, tell=told.append)
            assert found.is_equal
            assert found.is_cut
    assert sum("not run" in line for line in told) == 1


def test_minutes_are_shared_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = Budget(10, 1800)
    assert budget.limit("reference") == 150
    now, budget.seconds["reference"] = 60.0, 60.0
    assert budget.limit("reference-1") == 270
    seeds = budget.seeds()
    assert next(seeds) == 1
    now = 130.0
    assert list(seeds) == [2]
    seeds = budget.seeds()
    assert next(seeds) == 1
    now = 300.0
    assert list(seeds) == []
    assert budget.limit("job") == 300
    now, budget.seconds["job"] = 420.0, 30.0
    assert budget.allows_second_runs()
    now = 421.0
    assert not budget.allows_second_runs()
    now = 700.0
    assert budget.limit("job-again") == 0
    unlimited = Budget(None, 1800)
    assert unlimited.limit("reference") == 1800
    unlimited.seconds = {"reference": 1e6, "job": 1e6}
    assert list(unlimited.seeds()) == [1, 2]
    assert unlimited.allows_second_runs()
    assert not unlimited.is_enough(tmp_path, 1)
    assert not Budget(10, 1800).is_enough(tmp_path, 1)


def test_second_runs_for_which_no_time_is_left_are_told(job: Path) -> None:
    with patch.object(Budget, "allows_second_runs", return_value=False):
        found = verify(command(job, 2), command(job, 1), minutes=10)
    assert found.again == "the 10 minutes leave no time for second runs"
    assert not found.is_equal


TEST = """
def test_it_is_equal(verify):
    found = verify({0!r}, against={1!r})
    assert found.num_steps == 3

def test_it_is_not(verify):
    verify({2!r}, against={1!r}, again=False)
"""


def test_a_fixture_of_pytest_fails_a_test_by_the_first_difference(
    job: Path, tmp_path: Path
) -> None:
    words = [" ".join(command(job, scale)) for scale in (1.0, 1, 2)]
    (tmp_path / "test_job.py").write_text(TEST.format(*words))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 1, ran.stdout
    assert "1 failed, 1 passed" in ran.stdout
    assert "first difference: step 1, gradient" in ran.stdout
    assert len((tmp_path / "job.ran").read_text().split()) == 5  # its reference ran three times


def test_the_fixture_loads_without_torch() -> None:
    program = "import sys, hp_verify.pytest_plugin; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-s", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "False\n"


def test_the_steps_of_the_action_run(tmp_path: Path) -> None:
    """Its shell's step, as GitHub starts it; steps of others are named alone."""
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((Path(__file__).parents[1] / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert [step["uses"].partition("@")[0] for step in steps if "uses" in step] == [
        "actions/cache",
        "actions/upload-artifact",
    ]
    (step,) = [step for step in steps if "run" in step]
    given = {name: about["default"] for name, about in action["inputs"].items()}
    given |= {"job": "true && true", "against": "true", "flags": "--once --steps 2"}
    (tmp_path / "step.sh").write_text(step["run"])
    env = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], value)
        for name, value in step["env"].items()
    }
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": paths, **env, **files},
    )
    assert ran.returncode == 12, ran.stdout + ran.stderr  # nothing of both was recorded
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == "status=12\n"
    assert "imported torch" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    (found,) = json.loads((tmp_path / "hp-verify.json").read_text())["comparisons"]
    assert found["verdict"] == "not comparable"
    assert found["job"] == ["bash", "-c", "true && true"]
    assert (tmp_path / ".hp-verify").is_dir()
    uploaded = steps[-1]["with"]["path"].split()
    assert all((tmp_path / name).exists() for name in uploaded)
