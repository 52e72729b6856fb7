"""The command as a stranger has it: a plain torch program, and nothing else of ours."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

JOB = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    x = torch.randn(16, 8)
    (model(x).square().mean() * (2.0 if step == int(sys.argv[1]) else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_command_and_the_package_load_without_torch() -> None:
    program = "import sys, hp_verify.cli; hp_verify.cli.parser(); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "False\n"


@pytest.mark.sample("forked")
@pytest.mark.parametrize("start", ["forked", "as installed"])
def test_the_command_names_the_step_of_a_fault(
    start: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command, run = [sys.executable, "-m", "hp_verify"], [sys.executable, str(job)]
    if start == "forked":
        request.getfixturevalue("forked_programs")
    else:
        command = [str(Path(sys.executable).with_name("hp-verify"))]
    ran = subprocess.run(
        [*command, "--once", "--", *run, "1", "--against", "--", *run, "9"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ran.returncode == 8
    assert "\nfirst difference: step 2, gradient" in ran.stdout
    assert ran.stderr == ""


def test_no_trainer_of_ours_is_needed() -> None:
    needed = {"hp-verify", "hp-base", "hp-checkpoint", "hp-platform"}
    (mine,) = (each for each in distributions() if each.metadata["Name"] == "hp-verify")
    assert mine.requires is not None
    assert {name for name in needed if any(r.startswith(name) for r in mine.requires)} == needed - {
        "hp-verify"
    }
