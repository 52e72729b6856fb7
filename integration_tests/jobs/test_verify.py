"""`hp verify`: layouts equal one process, wrong ones are found, jobs of one's own work."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_base.errors import DifferenceError, HangError
from hp_trainer.config.options import resolve
from hp_trainer.layout.schedules import count_microbatches, training_schedule
from integration_tests.jobs.verify_faults import MATRIX
from integration_tests.runs import write_corpus

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "verify.toml")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("corpus")))


def verify(*arguments: str, timeout: float = 280) -> tuple[int, str]:
    """Run the command as a person does; everything it prints."""
    paths = [str(ROOT.parent), os.environ.get("PYTHONPATH", "")]
    end = subprocess.run(
        [sys.executable, "-m", "hp_train", "verify", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    return end.returncode, end.stdout


def test_generated_layouts_equal_one_process(corpus: str) -> None:
    """A bounded sample; `nox -s verify` runs 150 of them for 20 steps."""
    status, text = verify(
        *(MODEL, "model.num_layers=4", "model.num_dense_layers=2", "--data", corpus),
        *("train.global_batch_size=6", "--generate", "3", "--steps", "2", "--processes", "2:4"),
    )
    assert status == 0, text
    assert "one process equals the oracle" in text
    assert "3 of 3 layouts equal one process" in text
    assert "0 could not be run" in text


@pytest.mark.sample("v_half")
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (
            "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 pipeline.stages_per_rank=2",
            "pipeline.schedule=interleaved_zero_bubble,train.recompute=full",
        ),
        # One table at both ends of one stage, of two stages of one rank, and cut.
        ("pipeline.schedule=zero_bubble", "pipeline.schedule=1f1b"),
        (
            "mesh.pp=2 pipeline.schedule=v_half pipeline.stages_per_rank=2",
            "pipeline.schedule=zbv,train.recompute=full",
        ),
        (
            "mesh.tp=2 pipeline.schedule=interleaved_zero_bubble pipeline.stages_per_rank=2",
            "pipeline.schedule=looped_bfs",
        ),
        # Parameters come and go inside of what runs again; parts of attention are overwritten.
        (
            "mesh.dp_shard=2 mesh.ep=2 mesh.gather=block pipeline.schedule=gpipe",
            "train.recompute=selective",
        ),
        ("mesh.cp=2 mesh.cp_ring=true", "train.recompute=selective"),
    ],
    ids=["sharded", "one rank", "v_half", "tp", "by block", "ring"],
)
def test_schedule_and_recompute_do_not_change_a_bit(layout: str, other: str, corpus: str) -> None:
    arguments = [*layout.split(), f"--against={other}", "--steps", "2"]
    status, text = verify(MODEL, "--data", corpus, *arguments)
    assert status == 0, text
    assert "they differ in nothing that may change a bit" in text
    assert re.search(r"bitwise equal over 2 steps, [\d,]+ numbers$", text.rstrip())


@pytest.mark.parametrize(
    ("retention", "steps"),
    [("recompute", {"RECOMPUTE"}), ("offload", {"OFFLOAD", "RELOAD"})],
    ids=["recompute", "offload"],
)
def test_what_ranks_do_with_microbatches_under_way_does_not_change_a_bit(
    retention: str, steps: set[str], corpus: str
) -> None:
    keys = {
        "mesh.pp": 2,
        "pipeline.schedule": "1f1b",
        "pipeline.stages_per_rank": 1,
        "train.global_batch_size": 12,
        "pipeline.retention": retention,
    }
    config = resolve(MODEL, keys.items(), env={}).config
    number = count_microbatches(config)
    schedule = training_schedule(config.pipeline, num_ranks=2, num_microbatches=number)
    ran = {step.type.name for row in schedule.steps for step in row if step is not None}
    assert ran >= steps
    layout = [f"{key}={value}" for key, value in keys.items()]
    status, text = verify(
        *(MODEL, "--data", corpus, *layout, "--against=pipeline.retention=keep", "--steps", "1")
    )
    assert status == 0, text
    assert "they differ in nothing that may change a bit" in text
    assert re.search(r"bitwise equal over 1 steps?, [\d,]+ numbers$", text.rstrip())


def test_the_first_difference_is_named_by_step_quantity_and_parameter(corpus: str) -> None:
    status, text = verify(
        MODEL,
        "--data",
        corpus,
        *("mesh.dp_replicate=2", "train.global_batch_size=6", "model.num_layers=4"),
        *("model.num_dense_layers=2", "run.name=one_gradient_from_step_six"),
        "--job",
        "integration_tests.jobs.verify_faults:build",
    )
    assert status == DifferenceError.exit_code, text
    assert f"first difference: step 6, gradient {MATRIX}: 1.0" in text
    assert f"error: the layouts differ, first at step 6, gradient {MATRIX}" in text
    assert "NOT EQUAL within 1e-12 over 8 steps, " in text


def test_a_shrunk_config_keeps_the_fault_of_the_large_one(corpus: str) -> None:
    keys = ["mesh.dp_replicate=2", "mesh.ep=1", "mesh.etp=2", "mesh.pp=1"]
    keys += ["pipeline.schedule=1f1b", "pipeline.stages_per_rank=1"]
    keys.append("run.name=output_biases_are_summed_over_ranks_that_have_them_whole")
    asked = ["gpt-oss-20b", "--data.tokenizer=", "--data", corpus, *keys, "--shrink", "--steps=1"]
    status, text = verify(*asked, "--job", "integration_tests.jobs.verify_faults:build")
    assert status == DifferenceError.exit_code, text
    assert re.search(r"first difference: step 1, gradient \S+moe\.experts\.b2", text), text


def test_one_process_is_compared_with_the_oracle_and_everything_is_looked_at(corpus: str) -> None:
    status, text = verify("debug-mixtral", "--data", corpus, "--data.eval_fraction=0.2", "--shrink")
    assert status == 0, text
    assert "against  oracle, in float64" in text
    assert "1 run: 8 steps" in text
    assert re.search(r"the first step: 1 run of 8 steps will take about \d+ s", text)
    for quantity in ("tokens", "targets", "eval loss", "saved", "loaded", "second moment"):
        assert quantity in text
    assert re.search(r"equal within 1e-12 over 8 steps, [\d,]{7,} numbers", text)


def test_fp32_is_compared_with_a_wider_bound_and_the_choices_of_experts(corpus: str) -> None:
    keys = ["mesh.cp=2", "mesh.tp=2", "mesh.ep=2", "train.global_batch_size=6"]
    status, text = verify(
        MODEL, "--data", corpus, *keys, "--dtype", "float32", "--shrink", "--steps=3"
    )
    assert status == 0, text
    assert "equal within 1e-05 over 3 steps, " in text


@pytest.mark.parametrize(("job", "expected"), [("OwnModel", 0), ("OwnModelUnsummed", 8)])
def test_a_job_of_ones_own_goes_through_the_same_hook(job: str, expected: int, corpus: str) -> None:
    status, text = verify(
        MODEL,
        "--data",
        corpus,
        "mesh.dp_replicate=4",
        "--job",
        f"integration_tests.jobs.verify_jobs:{job}",
        "--steps=3",
    )
    assert status == expected, text
    assert ("first difference: step 1, loss" in text) is (expected != 0)


@pytest.mark.parametrize(("job", "status"), [("TiedExperts", 0), ("ApartExperts", 8)])
def test_a_difference_after_a_choice_that_rounding_decides_is_excused(
    job: str, status: int, corpus: str
) -> None:
    ended, text = verify(
        *(MODEL, "--data", corpus, "mesh.dp_replicate=2", "--dtype=float32", "--steps=1"),
        *("--job", f"integration_tests.jobs.verify_jobs:{job}"),
    )
    assert ended == status, text
    assert "first other choice: step 1, router: 1 token chooses other experts, scores at" in text
    assert "first difference: step 1, loss: 1.000e+00" in text
    assert ("excused: it follows from that choice, which rounding decides" in text) is (status == 0)


def test_a_layout_that_hangs_is_ended_and_named(corpus: str) -> None:
    began = time.monotonic()
    status, text = verify(
        MODEL,
        "--data",
        corpus,
        "mesh.dp_replicate=2",
        "--launch.hang_seconds=5",
        "--job",
        "integration_tests.jobs.verify_jobs:Hanging",
    )
    assert status == HangError.exit_code, text
    assert "error: rank 1 hangs at step" in text
    assert "time.sleep(3600)" in text or "verify_jobs.py" in text
    assert "ended with status 5" in text
    assert time.monotonic() - began < 600  # of an hour; 20 s on a quiet machine
