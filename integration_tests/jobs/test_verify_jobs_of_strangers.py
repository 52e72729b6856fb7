"""`hp-verify -- JOB --against -- REFERENCE` of programs that know nothing of hp-*."""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "verify-any-job.md").read_text()
HP = [sys.executable, "-c", "import sys; from hp_verify.cli import main; sys.exit(main())"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

JOB = textwrap.dedent(
    """
    import os
    import subprocess
    import sys
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    OTHER = (
        "import torch; net = torch.nn.Linear(2, 2); net(torch.ones(1, 2)).sum().backward();"
        "torch.optim.SGD(net.parameters(), 0.1).step()"
    )
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 16)

        def forward(self, x):
            mixed = self.up(x).relu()
            return mixed * 1.5 if rank == 1 and "mixed" in sys.argv else mixed

    model = nn.Sequential(nn.Embedding(30, 8), Mix(), nn.Linear(16, 30))
    net = model
    if size > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
    if "fail" in sys.argv:
        raise SystemExit("no data here")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for step in range(2):
        if step == 1 and "break" in sys.argv and rank == 1:
            raise SystemExit("out of memory")
        if step == 1 and "hangs" in sys.argv and rank == 1:
            time.sleep(1000)
        if step == 1 and "early" in sys.argv:
            break
        tokens = torch.randint(30, (4, 9), generator=generator)[rank::size]
        logits = net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss * size if "scaled" in sys.argv else loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and "starts" in sys.argv:
            subprocess.run([sys.executable, "-c", OTHER], check=True)
            if not (child := os.fork()):
                nn.Linear(2, 2)(torch.ones(1, 2))
                raise SystemExit
            os.waitpid(child, 0)
    if "abort" in sys.argv:
        if size > 1:
            dist.barrier()  # or the launcher ends one that is not done
        os.abort()
    if size > 1:
        dist.destroy_process_group()
    """
)


def verify(
    tmp_path: Path, *job: str, flags: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "job.py").write_text(JOB)
    script = str(tmp_path / "job.py")
    launch = [*LAUNCH, "--nproc-per-node=2"]
    command = [*HP, "--steps", "2", "--verbose", *flags, "--", *launch, script, *job]
    return subprocess.run(
        [*command, "--against", "--", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_job_that_breaks_is_compared_until_then(tmp_path: Path) -> None:
    done = verify(tmp_path, "break", "scaled")

    assert done.returncode == 1
    assert "what the job computed before it failed:" in done.stdout
    assert "first difference: step 1, gradient" in done.stdout
    assert "the job ended with status 1" in done.stderr


def test_updates_that_are_not_made_are_a_difference(tmp_path: Path) -> None:
    done = verify(tmp_path, "early")

    assert done.returncode == 8
    assert (
        "first difference: step 2, update: 1.000e+00 (only the reference makes it)" in done.stdout
    )


def as_on_the_page(folder: Path, number: int, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Copy the job of the page, and run one of the commands that the page begins with."""
    commands, job = re.findall(r"```(?:sh|python)\n(.*?)```", PAGE, re.DOTALL)[:2]
    (folder / "job.py").write_text(job)
    known = {"hp-verify": HP, "torchrun": LAUNCH, "python": [sys.executable]}
    words = [known.get(word, [word]) for word in shlex.split(commands.splitlines()[number])]
    command = [*words[0], *flags, *(word for some in words[1:] for word in some)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )


def test_data_parallel_training_equals_one_process(tmp_path: Path) -> None:
    done = as_on_the_page(tmp_path, 0)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "job: 2 processes, 4 steps" in done.stdout
    assert "equal over 4 steps" in done.stdout
    assert "could not be compared" not in done.stdout


def test_a_loss_that_is_scaled_twice_is_named_as_on_the_page(tmp_path: Path) -> None:
    done = as_on_the_page(tmp_path, 1, "--verbose")

    assert done.returncode == 8
    shown = re.findall(r"^(?:NOT EQUAL|first difference:|likely:) .*", PAGE, re.MULTILINE)[:3]
    for line in (*re.findall(r"^likely: .*|^      and .*", PAGE, re.MULTILINE)[1:4], *shown[:2]):
        assert line in done.stdout
    assert shown[2].partition(";")[0] in done.stdout
    assert "exactly: all 30 elements differ, which ranks 0 and 1 hold: they are 2" in done.stdout
    assert "the job their mean on rank 0, their mean on rank 1" in done.stdout


@pytest.mark.sample
def test_programs_that_a_rank_starts_and_rules_that_fit_nothing_are_listed(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[parameter]]\nname = "other"\n')
    done = verify(tmp_path, "starts", flags=["--once", "--rules", str(rules)])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "job: 2 processes, 2 steps" in done.stdout
    assert "3 could not be compared:" in done.stdout
    assert "rule other: it fits no parameter of the job" in done.stdout
    for program in ("-c", "job.py"):
        assert f"evaluation ({program}, started by the job): no rank" in done.stdout


@pytest.mark.sample
def test_a_rank_that_hangs_ends_with_what_there_was(tmp_path: Path) -> None:
    done = verify(tmp_path, "hangs", flags=["--once", "--seconds", "60"])

    assert done.returncode == 1
    assert "what the job computed before it failed:" in done.stdout
    assert "equal over step 1 of 2, until a run was ended" in done.stdout
    assert "the job was not done after 60 s" in done.stderr


def test_what_goes_wrong_after_the_last_step_is_told_and_does_not_count(tmp_path: Path) -> None:
    done = verify(tmp_path, "abort")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: the job ended with status 1, after all 2 steps" in done.stdout
    assert "equal over 2 steps" in done.stdout


def test_steps_that_are_missing_after_a_failure_count(tmp_path: Path) -> None:
    done = verify(tmp_path, "abort", flags=["--steps", "3"])

    assert done.returncode == 1
    assert "the job ended with status 1" in done.stderr


def test_a_module_of_the_program_itself_is_computed_again(tmp_path: Path) -> None:
    done = verify(tmp_path, "mixed")

    assert done.returncode == 8
    assert "first difference: step 1, forward 1:" in done.stdout
    assert "samples 1, 3 of 4, which rank 1 holds (rank 0: right): they are 3/2" in done.stdout
    assert "the job's layout of 1 is wrong: its inputs and weights are right" in done.stdout
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("reproduction: "))
    program = shlex.split(line.removeprefix("reproduction: "))
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    assert "the job's layout of 1 is wrong" in ran.stdout
    shutil.rmtree(Path(program[-1]).parent)


def test_the_second_run_can_be_left_out(tmp_path: Path) -> None:
    done = verify(tmp_path, "mixed", flags=["--once"])

    assert done.returncode == 8
    assert "once more" not in done.stdout
    assert "exactly:" not in done.stdout


def test_a_job_that_fails_is_told_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    script = str(tmp_path / "job.py")
    done = subprocess.run(
        [*HP, "--", "true", "--against", "--", sys.executable, script, "fail"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 1
    assert "the reference ended with status 1" in done.stderr
    assert "no data here" in done.stderr
