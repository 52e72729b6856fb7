"""What the package gives to a program: jobs, checkpoints and curves compared, without a command."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hp_verify
from hp_base.errors import ConfigError
from hp_verify import (
    JobFailedError,
    Verdict,
    compare_checkpoints,
    compare_curves,
    read_curve,
    report,
    report_checkpoints,
    verify,
    write_manifest,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

JOB = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == int(sys.argv[2]):
        sys.exit("no more data")
    (model(torch.randn(8, 4)).square().mean() * float(sys.argv[1])).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    (tmp_path / "job.py").write_text(JOB)
    return [sys.executable, str(tmp_path / "job.py")]


def test_two_jobs_are_compared_and_the_difference_can_be_read(
    job: list[str], tmp_path: Path
) -> None:
    told: list[str] = []

    comparison = verify(
        [*job, "2", "9"], [*job, "1", "9"], keep=tmp_path / "kept", tell=told.append
    )

    assert not comparison.is_equal
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.phase) == (1, "gradient")
    assert comparison.first.factor == pytest.approx(2)
    assert comparison.exact is not None
    assert comparison.reproduction is not None
    assert comparison.reproduction.path.is_relative_to(tmp_path / "kept")
    assert "first difference: step 1, gradient" in report(comparison)
    assert comparison.page == tmp_path / "kept" / "report.txt"
    assert comparison.verdict is Verdict.DIFFERENT
    assert str(comparison.verdict) == "different"
    assert [line.partition(":")[0] for line in told] == [
        "reference",
        *["reference, other sums"] * 2,
        "job",
        "reference, once more",
        "job, once more",
    ]
    with pytest.raises(ConfigError, match="must be a folder that can be made"):
        verify(job, job, keep=tmp_path / "kept")


def test_equal_jobs_are_equal_and_nothing_else_is_said(job: list[str]) -> None:
    once = [*job, "1", "9"]
    ran = subprocess.run(
        [sys.executable, "-m", "hp_verify", "--", *once, "--against", "--", *once],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("equal over 3 steps")


def test_of_a_job_that_fails_it_is_told_what_it_had_computed(
    job: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobFailedError, match="no more data") as failed:
        verify([*job, "1", "2"], [*job, "1", "9"])

    assert failed.value.so_far is not None
    assert "equal over steps 1-2 of 3, until a run was ended" in report(failed.value.so_far)
    assert capfd.readouterr() == ("", "")


def test_checkpoints_are_compared_and_listed(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3)
    for name, tensors in (("a", {"w": values}), ("b", {"w": values + 1}), ("c", {"w": values})):
        (tmp_path / name).mkdir()
        save_file(tensors, str(tmp_path / name / "model.safetensors"))

    assert write_manifest(tmp_path / "c", tmp_path / "c.json") == 1
    assert compare_checkpoints(tmp_path / "a", tmp_path / "c.json").is_equal
    wrong = compare_checkpoints(tmp_path / "a", tmp_path / "b")

    [difference] = wrong.differences
    assert difference.name == "w"
    assert "NOT EQUAL" in report_checkpoints(wrong)


def test_curves_are_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    for path, offset in zip(paths, (0.0, 1.0), strict=True):
        losses = enumerate(rng.normal(size=60) * 0.1 + offset)
        path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in losses))
    first, second = map(read_curve, paths)

    assert compare_curves(first, second).differs
    assert not compare_curves(first, first).differs


def test_names_are_listed_and_load_when_they_are_used() -> None:
    program = "import sys, hp_verify; hp_verify.verify; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "False\n"
    assert all(getattr(hp_verify, name) is not None for name in hp_verify.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hp_verify.nothing  # noqa: B018
