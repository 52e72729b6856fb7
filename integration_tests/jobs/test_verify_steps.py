"""Which steps `hp-verify` looks at, what it says of jobs that fail, and how it ends."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from hp_base.errors import NotComparableError
from hp_verify.recording.events import SUFFIX, TENSORS

pytestmark = pytest.mark.usefixtures("forked_programs")

HP = [sys.executable, "-c", "import sys; from hp_verify.cli import main; sys.exit(main())"]
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]

JOB = textwrap.dedent(
    """
    import os
    import sys
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    def asked(name, default=0):
        words = [word.partition("=") for word in sys.argv[1:]]
        return next((float(value or 1) for word, _, value in words if word == name), default)

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if asked("import"):
        import no_such_module
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    net = model
    if size > 1:
        dist.init_process_group("gloo")
        if asked("fsdp"):
            from torch.distributed.fsdp import fully_shard
            fully_shard(model)
        else:
            net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    data = torch.Generator().manual_seed(1)
    for step in range(1, int(asked("steps", 6)) + 1):
        batch = torch.randn(4, 6, generator=data)[rank::size]
        if asked("evaluates"):
            with torch.no_grad():
                net(batch)
            continue
        loss = net(batch).square().mean()
        if step == asked("raises") and rank == 1:
            raise ValueError("no such batch")
        if step == asked("aborts") and rank == 0:
            os.abort()
        loss.backward()
        if asked("wrong") and step >= asked("wrong"):
            model[2].weight.grad.mul_(1.5)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(asked("sleeps"))
    if asked("raises") == -1:
        raise ValueError("cannot be saved")
    """
)


def verify(
    folder: Path,
    job: str,
    reference: str = "",
    *,
    flags: Sequence[str] = (),
    launch: Sequence[str] = PYTHON,
) -> "subprocess.CompletedProcess[str]":
    script = folder / "job.py"
    script.write_text(JOB)
    if "--keep" not in flags:
        flags = [*flags, "--keep", str(folder / f"kept-{len([*folder.iterdir()])}")]
    words = [*HP, "--once", *flags, "--", *launch, str(script), *job.split()]
    return subprocess.run(
        [*words, "--against", "--", *PYTHON, str(script), *reference.split()],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_gradient_that_is_wrong_from_the_fifth_of_six_steps_on_is_found(tmp_path: Path) -> None:
    found = verify(tmp_path, "fsdp wrong=5", launch=TORCHRUN)
    alright = verify(tmp_path, "fsdp", launch=TORCHRUN)

    assert found.returncode == 8, found.stdout + found.stderr
    assert "first difference: step 5, gradient 2.weight" in found.stdout
    assert alright.returncode == 0, alright.stdout + alright.stderr
    assert "equal over 6 steps, " in alright.stdout


@pytest.mark.parametrize("wrong", [100, 0])
def test_of_a_long_job_a_spread_up_to_its_end_is_looked_at(wrong: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = verify(tmp_path, f"steps=100 wrong={wrong}", "steps=100", flags=["--keep", str(kept)])

    over = r"over steps 1-16 and 8 of 84 others, the last among them, "
    assert re.search(over, done.stdout), done.stdout + done.stderr
    assert "job: 1 process, 100 steps" in done.stdout
    assert done.returncode == (8 if wrong else 0)
    assert ("first difference: step 100, gradient 2.weight" in done.stdout) is bool(wrong)
    names = {path.stem.rpartition("-")[2] for path in kept.glob(f"reference/{TENSORS}-*{SUFFIX}")}
    steps = sorted(map(int, names - {"000000"}))
    assert steps[:16] == [*range(1, 17)]
    assert [step for step in steps[16:-3] if step % 16] == []
    assert steps[-3:] == [98, 99, 100]
    for run in ("reference-1", "job"):
        assert len([*kept.glob(f"{run}/{TENSORS}-*")]) == len(steps) + 1


def test_a_number_of_steps_is_that_of_the_first(tmp_path: Path) -> None:
    done = verify(tmp_path, "wrong=5", flags=["--steps", "4"])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal over steps 1-4 of 6, " in done.stdout


@pytest.mark.parametrize(("job", "reference"), [("steps=7", ""), ("", "steps=7")])
def test_one_more_update_is_a_difference(job: str, reference: str, tmp_path: Path) -> None:
    done = verify(tmp_path, job, reference)

    assert done.returncode == 8
    only = "the job" if job else "the reference"
    assert f"first difference: step 7, update: 1.000e+00 (only {only} makes it" in done.stdout


@pytest.mark.sample
def test_what_was_seen_of_a_job_that_takes_too_long_is_compared(tmp_path: Path) -> None:
    for wrong in (2, 0):
        long = f"steps=1000 sleeps=0.5 wrong={wrong}"
        done = verify(tmp_path, long, "steps=1000 sleeps=0.5", flags=["--seconds", "15"])

        assert done.returncode == (8 if wrong else 0), done.stdout + done.stderr
        for who in ("reference", "job"):
            assert re.search(rf"note: the {who} was ended after \d+ s, ", done.stdout)
        assert re.search(r"over (steps 1-)?\d+ .*, until a run was ended, ", done.stdout)


@pytest.mark.sample
def test_a_job_that_takes_too_long_where_its_reference_does_not_has_failed(tmp_path: Path) -> None:
    done = verify(tmp_path, "sleeps=100", flags=["--seconds", "30"])

    assert done.returncode == 1
    assert "equal over step 1 of 6, until a run was ended" in done.stdout
    assert "the job was not done after 30 s" in done.stderr


FAILURES = {
    "raises=3": ("[rank1]: ValueError: no such batch", "equal over steps 1-2 of 6"),
    "import": ("No module named 'no_such_module'", ""),
    "aborts=3": ("rank 0 ended first, with status -6 (SIGABRT)", "equal over steps 1-2 of 6"),
}


@pytest.mark.parametrize("fault", FAILURES)
def test_a_job_that_fails_shows_its_own_error_first(fault: str, tmp_path: Path) -> None:
    raised, before = FAILURES[fault]
    done = verify(tmp_path, fault, launch=TORCHRUN)

    assert done.returncode == 1, done.stdout + done.stderr
    assert before in done.stdout
    first, *lines = done.stderr.splitlines()
    assert first.startswith("error: the job ended with status 1: ")
    own = "\n".join(lines).partition("\n...\n")[0]
    assert raised in own, done.stderr
    assert "ChildFailedError" not in done.stderr


def test_a_job_of_accelerate_that_fails_shows_its_own_error(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = verify(tmp_path, "import", launch=ACCELERATE)

    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr
    assert "CalledProcessError" not in done.stderr


def test_an_error_after_the_last_step_is_told(tmp_path: Path) -> None:
    done = verify(tmp_path, "raises=-1")

    assert done.returncode == 0, done.stdout + done.stderr
    note = "note: the job ended with status 1, after all 6 steps: ValueError: cannot be saved"
    assert note in done.stdout


def test_jobs_that_train_nothing_are_not_comparable(tmp_path: Path) -> None:
    done = verify(tmp_path, "evaluates", "evaluates")

    assert done.returncode == NotComparableError.exit_code, done.stdout + done.stderr
    assert "NOT COMPARABLE (no gradient, no weight) over 1 step, " in done.stdout


def test_a_difference_is_three_lines_and_a_page(tmp_path: Path) -> None:
    done = verify(tmp_path, "wrong=2", flags=["--keep", str(tmp_path / "kept")])

    lines = [line for line in done.stdout.splitlines() if not re.search(r", \d+\.\d s$", line)]
    assert len(lines) == 3, done.stdout
    assert lines[0].startswith("NOT EQUAL over 6 steps, ")
    assert lines[1].startswith("first difference: step 2, gradient 2.weight: ")
    assert lines[2].startswith("likely: ")
    page = tmp_path / "kept" / "report.txt"
    assert lines[2].endswith(f"; all of it: {page}")
    assert done.stderr == ""
    told = page.read_text()
    assert "\nFAIL  step 2, gradient 2.weight" in told
    assert "\nfirst difference: step 2, gradient 2.weight" in told
    assert told.startswith("job: ")
