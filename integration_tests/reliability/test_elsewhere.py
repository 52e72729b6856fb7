"""hp-schedule, hp-plan and hp-verify need nothing that Linux has and macOS has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_checkpoint import rename, save, sources_of

ELSEWHERE = Path(__file__).with_name("elsewhere.py")
PACKAGES = sorted(path.name for path in Path(__file__).parents[2].glob("packages/*/src/hp_*"))
JOB = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
"""

pytestmark = pytest.mark.usefixtures("forked_programs")


def run(folder: Path, *arguments: str, elsewhere: bool = True) -> tuple[int, str]:
    """Run a program of ours; return its exit status and what it printed."""
    here = f"import sys, {arguments[0]} as program; sys.exit(program.main())"
    command = [str(ELSEWHERE), *arguments] if elsewhere else ["-c", here, *arguments[1:]]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_all_modules_of_all_packages_load(tmp_path: Path) -> None:
    status, said = run(tmp_path, "import", *PACKAGES)
    assert (status, int(said.split()[-2]) > 400) == (0, True)


def test_schedules_are_made_and_checked(tmp_path: Path) -> None:
    made = ("hp_schedule.cli", "generate", "1f1b", "--ranks", "4", "--microbatches", "6")
    assert run(tmp_path, *made) == run(tmp_path, *made, elsewhere=False)
    assert run(tmp_path, *made)[0] == 0


@pytest.mark.parametrize("flags", [(), ("--search", "1")], ids=["priced", "searched"])
def test_layouts_are_planned(tmp_path: Path, flags: tuple[str, ...]) -> None:
    asked = ("hp_train.cli", "plan", "debug-qwen3", "--gpus", "8", "--machine", "h100", *flags)
    status, said = run(tmp_path, *asked)
    assert status == 0, said
    assert "dp_shard" in said


def saved(folder: Path, name: str, value: float) -> Path:
    tensors = {"w": torch.full((4, 3), value), "b": torch.arange(3.0)}
    commit = lambda staging: rename(staging, lambda _: name)  # noqa: E731
    return save(folder, name, lambda: sources_of(tensors), commit=commit, group=None)


def test_checkpoints_are_compared(tmp_path: Path) -> None:
    one, same, other = (saved(tmp_path, n, v) for n, v in (("a", 1.0), ("b", 1.0), ("c", 1.5)))
    compare = ("hp_verify.cli", "--checkpoint", str(one))
    assert run(tmp_path, *compare, str(same))[0] == 0
    status, said = run(tmp_path, *compare, str(other))
    assert (status, "differ in 1 tensors" in said) == (8, True), said


def test_jobs_are_compared(tmp_path: Path) -> None:
    for name, rate in (("job", 0.1), ("other", 0.2)):
        (tmp_path / f"{name}.py").write_text(JOB.format(rate=rate))
    python = [sys.executable, str(tmp_path / "job.py")]
    compare = ("hp_verify.cli", "--once", "--", *python, "--against", "--", *python)
    assert run(tmp_path, *compare)[0] == 0
    assert run(tmp_path, *compare[:-1], str(tmp_path / "other.py"))[0] == 8
