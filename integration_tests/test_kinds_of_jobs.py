"""`hp verify` of training loops of many kinds: equal where they are, and different where not."""

import functools
import os
from pathlib import Path

import msgspec
import pytest

from hp_platform.testing import run_distributed
from hp_train.jobs.compare import Comparison, Floor, compare
from hp_train.jobs.explain import explain
from hp_train.jobs.joined import Recording, join
from hp_train.jobs.request import VARIABLE, Request
from integration_tests.kinds_of_jobs import SOUND, STEPS, train


def work(request: bytes, kind: str, fault: str) -> None:
    os.environ[VARIABLE] = request.decode()
    from hp_train.jobs.recorder import begin  # noqa: PLC0415 - in the rank alone

    recorder = begin()
    train(kind, fault)
    recorder.flush()


def recorded(request: Request, kind: str, fault: str = "", *, ranks: int = 1) -> Recording:
    Path(request.folder).mkdir()
    run_distributed(work, msgspec.json.encode(request), kind, fault, world_size=ranks)
    return join(Path(request.folder))


def compared(tmp_path: Path, kind: str, fault: str = "") -> Comparison:
    request = functools.partial(Request, seed=0, steps=2 * STEPS)
    reference = recorded(request(folder=str(tmp_path / "reference")), kind)
    disturbed = [
        recorded(request(folder=str(tmp_path / f"disturbed-{i}"), disturb=i), kind) for i in (1, 2)
    ]
    job = request(folder=str(tmp_path / "job"), reference=str(tmp_path / "reference"))
    floor = Floor(reference, disturbed)
    return compare(recorded(job, kind, fault, ranks=2), reference, floor)


@pytest.mark.sample("images", "two_models", "closure")
@pytest.mark.parametrize("kind", SOUND)
def test_what_computes_the_same_is_equal(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind)
    assert not result.differences
    assert not result.unaligned
    assert {"first weight", "forward", "loss", "gradient", "weight"} <= result.largest.keys()


@pytest.mark.sample("many_evaluations")
@pytest.mark.parametrize("kind", [kind for kind in SOUND if kind != "doubled"])  # equal anyway
def test_a_model_that_is_not_reduced_is_found(tmp_path: Path, kind: str) -> None:
    result = compared(tmp_path, kind, "no-sync")
    first = result.differences[0]
    # The first model's update is the second; the second evaluation is of weights updated wrongly.
    step = 2 if kind == "two_models" else 1
    phase = "forward" if kind == "many_evaluations" else "gradient"
    assert (first.step, first.phase) == (step, phase)


def test_statistics_of_own_samples_are_found(tmp_path: Path) -> None:
    first = compared(tmp_path, "batch_norm").differences[0]
    assert (first.step, first.phase, first.name) == (1, "forward", "1")


@pytest.mark.sample
def test_random_numbers_of_own_samples_are_found_and_told(tmp_path: Path) -> None:
    result = compared(tmp_path, "dropout")
    first = result.differences[0]
    assert (first.step, first.phase, first.name) == (1, "forward", "dropout")
    assert any("dropout could explain it" in line for line in explain(result))
