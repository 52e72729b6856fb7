"""`hp-verify` of a job that is stopped and resumes, beside one that was never stopped."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording
from hp_verify.recording.request import Request
from integration_tests.jobs.recorded import record
from integration_tests.jobs.verify_resumes import LOST, train

STEPS = 4
FIRST = {
    "moments": "step 3, weight ",
    "updates": "step 3, weight ",
    "rate": "step 3, learning rate",
    "data": "step 3, input",
    "random": "step 3, forward 4",
    "weights": "step 3, forward 0",
    "buffers": "step 4, evaluation 2",
}
"""What is lost -> the first difference; evaluation alone uses the buffers."""


def recorded(
    folder: Path, *spans: tuple[int, int, int], lost: str = "", reference: str = ""
) -> Recording:
    """Record a job that is launched once for every span: ranks, first step, last step."""
    request = Request(str(folder), reference=reference, steps=STEPS, float64=True)
    for ranks, first, last in spans:
        job = partial(train, folder / "state.pt", first=first, last=last, lost=lost)
        found = record(request, job, ranks=ranks)
    return found


Judge = Callable[..., Comparison]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("resumes")
    expected = recorded(folder / "reference", (1, 0, STEPS))

    def judged(name: str, *spans: tuple[int, int, int], lost: str = "") -> Comparison:
        actual = recorded(folder / name, *spans, lost=lost, reference=str(folder / "reference"))
        return compare(actual, expected, Floor(expected, []))

    return judged


@pytest.mark.parametrize("cuts", [(2,), (1, 3)], ids=["once", "twice"])
def test_a_sound_resume_is_equal(cuts: tuple[int, ...], judge: Judge) -> None:
    ends = (0, *cuts, STEPS)
    spans = [(1, a, b) for a, b in pairwise(ends)]

    comparison = judge(f"sound-{len(cuts)}", *spans)

    assert comparison.first is None, comparison.first
    assert comparison.num_steps == STEPS
    assert not comparison.unaligned
    assert max(comparison.largest.values()) == 0.0


@pytest.mark.parametrize("lost", LOST)
def test_what_a_resume_loses_is_named(lost: str, judge: Judge) -> None:
    comparison = judge(lost, (1, 0, 2), (1, 2, STEPS), lost=lost)

    assert comparison.first is not None
    assert re.match(FIRST[lost], str(comparison.first)), comparison.first


@pytest.mark.sample
def test_the_command_joins_launches(tmp_path: Path) -> None:
    python = f"{sys.executable} -m integration_tests.jobs.verify_resumes"
    job = f"{python} {tmp_path}/job.pt 0 2 && {python} {tmp_path}/job.pt 2 4"
    hp = [sys.executable, "-m", "hp_verify", "--steps", "4", "--float64"]
    reference = [*python.split(), f"{tmp_path}/reference.pt", "0", "4"]

    def verified(script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*hp, "--", "sh", "-c", script, "--against", "--", *reference],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=Path(__file__).parents[2],
        )

    sound, lossy = verified(job), verified(f"{job} moments")

    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "job: 1 process, 4 steps" in sound.stdout
    assert lossy.returncode == 8
    assert "first difference: step 3, weight" in lossy.stdout
