"""`hp-verify --curves`: losses told apart from noise, no more often than is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hp_base.errors import DataError
from hp_verify.cli import main
from hp_verify.files.curves import read_curve
from hp_verify.files.noise import Curve, compare_curves

NOISE, BATCHES = 0.02, 0.1
LENGTH = 200


def noise(rng: np.random.Generator, length: int, rho: float) -> NDArray[np.float64]:
    """A first-order autoregression with standard deviation 1."""
    shocks = rng.normal(size=length + 100)
    values = np.empty_like(shocks)
    state = 0.0
    for index, shock in enumerate(shocks):
        values[index] = state = rho * state + shock
    return np.asarray(values[100:] * np.sqrt(1 - rho**2))


def curves(
    seed: int, *, rho: float, offset: float = 0.0, start: int = 0, count: int = 2
) -> list[Curve]:
    """Curves of one distribution; the second one is off by a multiple of the noise from a step."""
    rng = np.random.default_rng(seed)
    step = np.arange(LENGTH)
    common = 3 + 5 / np.sqrt(1 + step) + BATCHES * rng.normal(size=LENGTH)
    found = [common + NOISE * noise(rng, LENGTH, rho) for _ in range(count)]
    found[1] = found[1] + NOISE * offset * (step >= start)
    return [dict(enumerate(map(float, values))) for values in found]


def share(trials: int, *, rho: float, offset: float = 0.0, start: int = 0, count: int = 2) -> float:
    """Part of the trials in which a difference is told."""
    told = 0
    for seed in range(trials):
        first, second, *repeats = curves(seed, rho=rho, offset=offset, start=start, count=count)
        told += compare_curves(first, second, repeats, draws=200, seed=seed).differs
    return told / trials


@pytest.mark.sample("0.5-2", "0.5-4")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_noise_is_seldom_called_a_difference(rho: float, count: int) -> None:
    assert share(120, rho=rho, count=count) <= 0.06  # 1 in 100 is asked for


@pytest.mark.sample("0.5-1.5-2", "0.5-1.5-4")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("rho", "offset"), [(0.0, 0.8), (0.5, 1.5), (0.8, 3.0)])
def test_an_offset_is_found(rho: float, offset: float, count: int) -> None:
    """By so many standard deviations of a step's noise, from the middle on."""
    assert share(40, rho=rho, offset=offset, start=LENGTH // 2, count=count) >= 0.85


def test_the_first_step_is_told() -> None:
    first, second = curves(1, rho=0.3, offset=3.0, start=120)

    answer = compare_curves(first, second)

    assert answer.differs
    assert abs(answer.step - 120) <= 5
    assert answer.offset == pytest.approx(3 * NOISE, rel=0.3)
    assert answer.noise == pytest.approx(NOISE * np.sqrt(2), rel=0.3)
    assert answer.visible < 3 * NOISE


def test_equal_curves_are_equal() -> None:
    first, _ = curves(0, rho=0.0)

    assert not compare_curves(first, first).differs


def test_a_loss_that_is_not_finite_is_a_difference_where_it_is() -> None:
    first, second = curves(0, rho=0.0)
    second[57] = float("nan")

    answer = compare_curves(first, second)

    assert (answer.differs, answer.step, answer.not_finite) == (True, 57, True)


def test_curves_without_common_steps_are_refused() -> None:
    with pytest.raises(DataError, match="20 steps in common"):
        compare_curves({0: 1.0}, {1: 1.0})


FORMS = {
    "metrics.jsonl": '{{"step": {0}, "loss": {1}, "lr": 1}}',
    "run.csv": "{0},{1}",
    "log.txt": "[2026-01-01] iteration {0}/ 900 | lm loss: {1} | grad norm: 2.0",
    "titan.log": "[rank0]: step: {0:2}  loss: {1}  memory: 3.0GiB",
}


@pytest.mark.parametrize("name", FORMS)
def test_curves_are_read_from_what_runs_write(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = [FORMS[name].format(step, loss) for step, loss in ((1, 2.5), (2, 1.25e-1), (2, 0.25))]
    path.write_text("\n".join(["step,loss"] * name.endswith("csv") + lines) + "\n")

    assert read_curve(path) == {1: 2.5, 2: 0.25}


def test_any_log_is_read_by_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("L=3.5 after 7\nnothing\nL=nan after 8\n")

    curve = read_curve(path, r"L=(?P<loss>\S+) after (?P<step>\d+)")

    assert curve[7] == 3.5
    assert np.isnan(curve[8])


def test_a_pattern_of_a_log_leaves_files_beside_it_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n1,2.5\n2,0.25\n")

    assert read_curve(path, r"step=(?P<step>\d+) loss=(?P<loss>\S+)") == {1: 2.5, 2: 0.25}


@pytest.mark.parametrize("pattern", ["(", "one (group)"])
def test_a_wrong_pattern_is_refused(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x")
    with pytest.raises(DataError, match="--pattern"):
        read_curve(path, pattern)


def test_the_command_has_the_statuses_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = curves(3, rho=0.2, offset=4.0, start=100, count=3)
    paths = []
    for name, curve in zip("abc", (first, second, third), strict=True):
        paths.append(tmp_path / f"{name}.jsonl")
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in curve.items()]
        paths[-1].write_text("\n".join(lines) + "\n")
    a, b, c = map(str, paths)

    assert main(["--curves", a, c]) == 0
    assert main(["--curves", a, b]) == 8
    assert main(["--curves", a, b, c]) == 8
    assert main(["--curves", a]) == 2
    assert main(["--curves", a, str(tmp_path / "none")]) == 3

    told = capsys.readouterr()
    assert "not told apart over 200 steps" in told.out
    assert "from about step" in told.err


def test_curves_that_are_nowhere_finite_are_refused() -> None:
    curve = dict.fromkeys(range(40), float("nan"))
    with pytest.raises(DataError, match="20 steps with finite losses, and have 0"):
        compare_curves(curve, dict(curve))
