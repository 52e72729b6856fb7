"""hp-train's own trainer through `hp-verify -- JOB --against -- REFERENCE`: equal, or found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, resolve
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.events import START, WEIGHT
from hp_verify.recording.request import Request, environment
from integration_tests.jobs.test_verify_faults import SMALL
from integration_tests.jobs.verify_door import MORE, PROGRAM
from integration_tests.jobs.verify_faults import CONTEXT, FAULTS, LAYOUTS, PIPELINE, SHARDED, TENSOR

ROOT = Path(__file__).parents[1]
ONE = "train.microbatch_size=1"
ALL = FAULTS | MORE
BY_LAST_BIT = "one_number_of_one_gradient_off_by_its_last_bit"
"""Rounding explains it; `hp verify CONFIG` compares such pairs of layouts bit by bit."""
SOUND = (
    "",
    *LAYOUTS,
    f"{PIPELINE} pipeline.schedule=1f1b",
    f"{PIPELINE} pipeline.schedule=zero_bubble",
    f"{SHARDED} {CONTEXT}",
    f"{TENSOR} {PIPELINE}",
    f"{SHARDED} mesh.dp_replicate=2 mesh.gather=stage mesh.ep=2 {ONE}",
    f"{TENSOR} model.tie_embeddings=true",
)
AS_ANOTHER_LAYOUT_SAVED = {
    "moments_that_another_layout_saved_are_not_loaded": "",
}
"""Layout of the first launch, which has no bug, where that is not the second's."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents so short that most sequences have several."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}+{i * i}"}) + "\n" for i in range(400)))
    return str(path)


def config_of(corpus: str, layout: str, fault: str = "") -> Config:
    overrides = {**SMALL, "data.paths": [corpus], "run.name": fault}
    overrides |= {key: value for key, _, value in (o.partition("=") for o in layout.split())}
    config = resolve(str(ROOT / "verify.toml"), overrides.items(), env={}).config
    return PROGRAM.applied_to(checked_config(config, dtype="float64"))


JOB = """
import sys
from pathlib import Path
import msgspec
from hp_trainer.config import Config
from hp_trainer.launch.launcher import run_entry

folder, *configs = sys.argv[1:]
for text in configs:
    config = msgspec.json.decode(text, type=Config)
    status = run_entry(config, Path(folder), entry="integration_tests.jobs.verify_door:work")
    if status:
        sys.exit(status)
"""


def recorded(folder: Path, *configs: Config, reference: str = "") -> Recording:
    """Record a job with a launch of ranks for each config."""
    run = folder / "run"
    run.mkdir(parents=True)
    request = Request(str(folder), reference=reference, steps=PROGRAM.steps)
    texts = [msgspec.json.encode(config).decode() for config in configs]
    env = environment(request)
    env["PYTHONPATH"] = os.pathsep.join((env["PYTHONPATH"], str(ROOT.parent)))
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(run), *texts],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return join(folder)


Judge = Callable[[str, str], Comparison]


@pytest.fixture(scope="module")
def judge(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("door")
    known: dict[str, Recording] = {}

    def reference(model: str) -> Recording:
        """One process, in two launches as all are."""
        if model not in known:
            config = config_of(corpus, model)
            known[model] = recorded(folder / f"reference-{len(known)}", config, config)
        return known[model]

    def judged(layout: str, fault: str) -> Comparison:
        config = config_of(corpus, layout, fault)
        first = config
        if fault in AS_ANOTHER_LAYOUT_SAVED:
            first = config_of(corpus, AS_ANOTHER_LAYOUT_SAVED[fault])
        model = " ".join(o for o in layout.split() if o.startswith("model."))
        expected = reference(model)
        actual = recorded(folder / f"{fault}-{len(list(folder.iterdir()))}", first, config)
        return compare(actual, expected, Floor(expected, []))

    return judged


@pytest.mark.sample(f"{PIPELINE} pipeline.schedule=zero_bubble")
@pytest.mark.parametrize("layout", SOUND, ids=lambda layout: layout or "one process")
def test_a_sound_layout_is_equal(layout: str, judge: Judge) -> None:
    comparison = judge(layout, "")

    assert comparison.first is None, comparison.first
    assert not comparison.unaligned, comparison.unaligned
    assert comparison.num_steps == PROGRAM.steps
    assert comparison.num_compared > 1000


def test_correction_biases_are_called_as_parameters_are(corpus: str, tmp_path: Path) -> None:
    step = recorded(tmp_path, config_of(corpus, "model.correction_bias=true")).steps[1]

    for phase in (START, WEIGHT):
        names = [name for name in step.tensors[phase] if name.endswith("correction_bias")]
        assert names
        assert not [name for name in names if name.startswith("model.")], names


@pytest.mark.sample("evaluation_alone_is_wrong")
@pytest.mark.parametrize("name", [name for name in ALL if name != BY_LAST_BIT])
def test_a_bug_is_found(name: str, judge: Judge) -> None:
    fault = ALL[name]
    said = re.match(r"step \[?(\d+)", fault.found)
    assert said is not None
    steps = [int(digit) for digit in said[1]]

    comparison = judge(fault.layout, name)

    assert comparison.first is not None
    # What is evaluated or saved after a step is seen in the next one here.
    assert min(steps) <= comparison.first.step <= max(steps) + 1, comparison.first


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hp_train"]


def through_the_command(
    corpus: str, tmp_path: Path, start: list[str], *changes: str
) -> subprocess.CompletedProcess[str]:
    """Compare a run that modules of Python start, and what is changed in it, with one process."""
    keys = {**SMALL, "train.dtype": "float64", "train.steps": 2, "train.eval_every": 2}
    train = ["train", str(ROOT / "verify.toml")]
    train += [f"--{key}={value}" for key, value in keys.items()]
    train += [f"--data.paths={corpus}", f"--run.output_dir={tmp_path}"]
    python = [sys.executable, "-m"]
    job = [*python, *start, *train, *changes]
    reference = [*python, "hp_train", *train]
    return subprocess.run(
        [*python, "hp_verify", "--steps", "2", "--", *job, "--against", "--", *reference],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.sample
@pytest.mark.parametrize("start", [["hp_train"], TORCHRUN], ids=lambda start: start[0])
def test_hp_train_itself_is_a_job(start: list[str], corpus: str, tmp_path: Path) -> None:
    """With ranks that the launcher forks, or torchrun starts."""
    done = through_the_command(corpus, tmp_path, start, "--mesh.tp=2")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "job: 2 processes" in done.stdout
    assert "could not be compared" not in done.stdout


@pytest.mark.sample
def test_what_ranks_of_torchrun_do_otherwise_is_found(corpus: str, tmp_path: Path) -> None:
    changes = "--mesh.dp_shard=2", "--train.max_grad_norm=0.01"
    done = through_the_command(corpus, tmp_path, TORCHRUN, *changes)

    assert done.returncode == 8, done.stdout + done.stderr
    assert "first difference: step 1, clipped gradient" in done.stdout
