"""`hp-verify` of jobs of accelerate, DeepSpeed, torchtitan, Megatron, transformers and TRL.

Each as a user of that library writes it, and not one line for us. `nox -s libraries` installs them.
"""

import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hp_base.session import last_lines, status_of
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.files.checkpoints import compare as compare_checkpoints
from hp_verify.files.sources import opened_source
from hp_verify.recording.request import Request, environment

FOLDER = Path(__file__).parent / "libraries"
LIBRARIES = {
    "accelerate": "accelerate",
    "trainer": "transformers",
    "deepspeed": "deepspeed",
    "titan": "torchtitan",
    "megatron": "megatron",
    "trl": "trl",
}
"""Job -> module that it imports."""

SOUND = {
    "accelerate ddp": ("accelerate", "--batch 2"),
    "accelerate fsdp2": ("accelerate", "--batch 2 --fsdp 2"),
    "accelerate fsdp1": ("accelerate", "--batch 2 --fsdp 1"),
    "accelerate fsdp1 original": ("accelerate", "--batch 2 --fsdp 1 --original"),
    "trainer ddp": ("trainer", "--batch 2"),
    "trainer accumulated": ("trainer", "--batch 1 --accumulate 2"),
    "trainer accumulated bf16": ("trainer", "--batch 1 --accumulate 2 --bf16"),
    "trainer fsdp2": ("trainer", "--batch 2 --fsdp 2"),
    "trainer fsdp1": ("trainer", "--batch 2 --fsdp 1"),
    "deepspeed zero-1": ("deepspeed", "--stage 1"),
    "deepspeed zero-2": ("deepspeed", "--stage 2"),
    "deepspeed zero-2 in turn": ("deepspeed", "--stage 2 --in-turn"),
    "deepspeed zero-3": ("deepspeed", "--stage 3"),
    "titan fsdp": ("titan", ""),
    "titan tp": ("titan", "--tp 2"),
    "megatron dp": ("megatron", ""),
    "megatron distributed optimizer": ("megatron", "--distributed-optimizer"),
    "megatron tp": ("megatron", "--tp 2"),
    "megatron sp": ("megatron", "--tp 2 --sequence-parallel"),
    "megatron bf16": ("megatron", "--bf16"),
    "megatron bf16 distributed optimizer": ("megatron", "--bf16 --distributed-optimizer"),
    "megatron experts": ("megatron", "--experts 4 --ep 2"),
    "megatron experts distributed optimizer": (
        "megatron",
        "--experts 4 --ep 2 --distributed-optimizer",
    ),
    # Each of two groups is clipped by its own norm; of one of them a rank may have nothing.
    "megatron two norms": ("megatron", "--mtp"),
    "megatron two norms distributed optimizer": ("megatron", "--mtp --distributed-optimizer"),
    "trl sft": ("trl", "--batch 2"),
    "trl sft accumulated": ("trl", "--batch 1 --accumulate 2"),
    "trl sft packed": ("trl", "--packed --batch 2"),
    "trl sft packed fsdp2": ("trl", "--packed --batch 2 --fsdp 2"),
    "trl dpo": ("trl", "--dpo --batch 2"),
    "trl dpo fsdp2": ("trl", "--dpo --batch 2 --fsdp 2"),
}

SAME = {
    "trainer accumulated bf16": "--bf16",
    "megatron bf16": "--bf16",
    "megatron bf16 distributed optimizer": "--bf16",
    "megatron experts": "--experts 4",
    "megatron experts distributed optimizer": "--experts 4",
    "megatron two norms": "--mtp",
    "megatron two norms distributed optimizer": "--mtp",
    "trl sft packed": "--packed",
    "trl sft packed fsdp2": "--packed",
    "trl dpo": "--dpo",
    "trl dpo fsdp2": "--dpo",
}
"""Arguments of a job that its reference is given as well."""

# Job: what is wrong, phase of the first difference, its name, a word of what is likely.
WRONG = {
    "accelerate ddp": ("scaled", "gradient", "", "2 times"),
    "accelerate fsdp2": ("scaled", "gradient", "", "2 times"),
    "accelerate fsdp1": ("scaled", "gradient", "", "2 times"),
    "trainer fsdp2": ("scaled", "gradient", "", "2 times"),
    "deepspeed zero-2": ("decay", "weight", "norm", "update"),
    "deepspeed zero-3": ("decay", "weight", "norm", "update"),
    "titan fsdp": ("local-count", "gradient", "", "2 times"),
    "megatron distributed optimizer": ("no-finalize", "gradient", "", ""),
    "megatron sp": ("no-finalize", "gradient", "norm", ""),
    "megatron experts distributed optimizer": ("no-finalize", "gradient", "", ""),
    "megatron two norms distributed optimizer": ("no-finalize", "gradient", "", ""),
    "trl sft packed": ("scaled", "gradient", "", "2 times"),
    "trl dpo fsdp2": ("scaled", "gradient", "", "2 times"),
}


def recorded(folder: Path, job: str, arguments: str, ranks: int, **request: object) -> Recording:
    folder.mkdir(exist_ok=True)  # of a reference that another test has tried
    script = [str(FOLDER / f"{job}_job.py"), *arguments.split()]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    asked = Request(str(folder), steps=3, **request)  # type: ignore[arg-type]
    command = [sys.executable, *(launch if ranks > 1 or job == "deepspeed" else []), *script]
    env = {**environment(asked), "OMP_NUM_THREADS": "1"}
    status = status_of(command, folder / "log.txt", seconds=300, env=env)
    assert status == 0, last_lines(folder / "log.txt")
    return join(folder)


Judge = Callable[..., Comparison]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("libraries")

    @functools.cache
    def reference(job: str, same: str) -> tuple[Path, Recording, Floor]:
        place = folder / f"{job}{same}"
        expected = recorded(place, job, same, 1)
        other = folder / f"{job}{same}-other"
        floor = recorded(other, job, same, 1, reference=str(place), disturb=1)
        return place, expected, Floor(expected, [floor])

    def judged(case: str, wrong: str, against: str = "") -> Comparison:
        job, arguments = SOUND[case]
        for name in filter(None, [job, against]):
            if importlib.util.find_spec(LIBRARIES[name]) is None:
                pytest.skip(f"{LIBRARIES[name]} is not installed")
        if job == "deepspeed" and shutil.which("c++") is None:
            pytest.skip("DeepSpeed builds an operator at its start, and there is no C++ compiler")
        there, expected, floor = reference(against or job, SAME.get(case, ""))
        given = f"{arguments} --wrong {wrong}" if wrong else arguments
        place = folder / f"{case}-{wrong}"
        start = job == "titan"  # a DTensor's random values on a CPU are those of its layout
        actual = recorded(place, job, given, 2, reference=str(there), start=start)
        return compare(actual, expected, floor)

    return judged


def compared(comparison: Comparison, phases: Sequence[str]) -> dict[str, str]:
    """What could not be compared of some phases."""
    return {n: why for n, why in comparison.unaligned.items() if n.startswith(tuple(phases))}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_job_is_equal(case: str, judge: Judge) -> None:
    comparison = judge(case, "")

    assert comparison.first is None, (comparison.differences[:5], explain(comparison))
    assert comparison.num_steps == 3
    parameters = ("first weight", "gradient", "clipped", "weight", "optimizer state")
    assert not compared(comparison, parameters)
    assert {*parameters[1:2], "weight", "optimizer state exp_avg"} <= comparison.largest.keys()


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_found_and_named(case: str, judge: Judge) -> None:
    wrong, phase, name, likely = WRONG[case]

    comparison = judge(case, wrong)

    first = comparison.first
    assert first is not None
    assert first.phase == phase, first
    assert re.search(name, first.name), first
    assert likely in " ".join(explain(comparison)), explain(comparison)


def test_checkpoints_of_megatron_are_read_and_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    """The same run, whose optimizer's state is saved in two ways."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron is not installed")
    for name in ("fully_reshardable", "dp_reshardable"):
        more = ["--distributed-optimizer", "--save", str(tmp_path / name), "--sharding", name]
        script = [str(FOLDER / "megatron_job.py"), *more]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        log, env = tmp_path / f"{name}.txt", {**os.environ, "OMP_NUM_THREADS": "1"}
        status = status_of([sys.executable, *launch, *script], log, seconds=300, env=env)
        assert status == 0, last_lines(log)

    with ExitStack() as stack:
        here, there = (
            stack.enter_context(opened_source(tmp_path / name))
            for name in ("fully_reshardable", "dp_reshardable")
        )
        result = compare_checkpoints(here, there, ignore="optimizer")

    assert result.is_equal, (result.differences, result.missing, result.extra)
    assert sum(result.counts.values()) == 9
    # Megatron 0.19 keeps what is in no part as one more object, where 0.16 has a file of its own.
    common = "common_state" if "common_state" in result.notes[-1] else "common.pt"
    assert all("rng_state (2 parts)" in n and common in n for n in result.notes[-2:])
    kept = [name for name in here.tensors if name.startswith("optimizer.state.exp_avg.")]
    assert len(kept) == 9


def test_one_library_equals_another(judge: Judge) -> None:
    # What is wrong for DeepSpeed's own reference is what the job of accelerate does.
    comparison = judge("deepspeed zero-3", "decay", "accelerate")

    assert comparison.first is None, (comparison.differences[:5], explain(comparison))
    assert not compared(comparison, ("first weight", "gradient", "clipped", "weight", "optimizer"))
