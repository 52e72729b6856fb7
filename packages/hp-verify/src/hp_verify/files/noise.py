"""A test that tells from which step on two curves of losses differ by more than noise.

What is tested is the difference of both curves, step by step: the trend and the difficulty of
batches, which both have in common, are gone. If it is noise, its mean over the last steps, however
many, is zero. The statistic is the largest such mean, in units of its standard error, over all
numbers of last steps. Neighbouring steps are correlated, so a standard error is that of a
first-order autoregression; how large the statistic becomes by chance is told by series that are
made of the residuals' own innovations, drawn in blocks (a block bootstrap of a sieve; Buehlmann
1997, Politis and Romano 1994), each judged in the same way, its own correlation and variance
estimated anew. Repeats of the first run give the noise itself, with its slow drift, which residuals
of one difference cannot tell from an effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_base.errors import DataError

_LEAST_STEPS = 20
_LEAST_DRAWS = 400
_MOST_POINTS = 4000
"""Longer curves are averaged over so many groups of steps."""
_LARGEST_RHO = 0.98

Curve = dict[int, float]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """Tells whether two curves differ by more than noise, and from where on.

    Attributes:
        differs: Whether the second curve differs from the first by more than noise.
        chance: Probability of as large a statistic by noise alone; at least 1 / (draws + 1).
        step: First step that differs, about.
        offset: Mean difference of the steps that follow.
        noise: Standard deviation of a single step's difference that is noise.
        correlation: Correlation of neighbouring steps' noise.
        visible: Smallest offset over the last half of the steps that would be found 19 times of 20.
        num_steps: Steps that both curves have.
        not_finite: Whether it is the step at which one alone is not finite.
    """

    differs: bool
    chance: float
    step: int
    offset: float
    noise: float
    correlation: float
    visible: float
    num_steps: int
    not_finite: bool = False


def compare_curves(
    first: Curve,
    second: Curve,
    repeats: Sequence[Curve] = (),
    *,
    level: float = 0.01,
    draws: int | None = None,
    seed: int = 0,
) -> CurveComparison:
    """Say whether a curve differs from another by more than noise.

    Args:
        first: Step -> loss.
        second: The same, of the run to be judged.
        repeats: Curves of the first run done again, other noise and all else alike.
        level: Probability of calling noise a difference.
        draws: Series of noise that are drawn; None: as many as `level` needs.
        seed: Seed of these draws.

    Raises:
        DataError: When fewer than 20 steps are in all of them.
    """
    draws = max(_LEAST_DRAWS, round(4 / level)) if draws is None else draws
    steps = sorted(set(first).intersection(second, *repeats))
    _require_enough(steps, "in common")
    rows = np.array([[c[s] for s in steps] for c in (first, *repeats, second)], dtype=np.float64)
    bad = ~np.isfinite(rows)
    if (apart := np.flatnonzero(bad[-1] != bad[:-1].any(axis=0))).size:
        step = steps[int(apart[0])]
        return CurveComparison(
            True, 0.0, step, math.nan, 0.0, 0.0, 0.0, len(steps), not_finite=True
        )
    good = np.flatnonzero(~bad.any(axis=0))
    rows, steps = rows[:, good], [steps[index] for index in good]
    _require_enough(steps, "with finite losses")
    width = -(-len(steps) // _MOST_POINTS)
    groups = len(steps) // width
    rows = rows[:, : groups * width].reshape(len(rows), groups, width).mean(axis=2)
    difference = rows[-1] - rows[:-1].mean(axis=0)
    if not difference.any():
        return CurveComparison(False, 1.0, steps[0], 0.0, 0.0, 0.0, 0.0, len(steps))
    rng = np.random.default_rng(seed)
    if repeats:
        among = rows[:-1] - rows[:-1].mean(axis=0)
        share = math.sqrt((1 + 1 / len(among)) / (1 - 1 / len(among)))
        noise = _Noise.of_known(among * share)
    else:
        noise = _Noise.of_residuals(difference)
    statistic, at = noise.statistic(difference[None])
    by_chance, _ = noise.statistic(noise.draw(rng, draws, groups))
    chance = (1 + int((by_chance >= statistic[0]).sum())) / (draws + 1)
    begin = int(at[0])
    threshold = float(np.quantile(by_chance, 1 - level))
    error = noise.error / math.sqrt(groups / 2)
    return CurveComparison(
        differs=chance <= level,
        chance=chance,
        step=steps[begin * width],
        offset=float(difference[begin:].mean()),
        noise=noise.deviation,
        correlation=noise.rho,
        visible=(threshold + 1.645) * error,
        num_steps=len(steps),
    )


def report_curves(answer: CurveComparison, level: float, num_repeats: int) -> str:
    """Say in lines what was found.

    Args:
        answer: Comparison of two curves.
        level: Probability of calling noise a difference.
        num_repeats: Number of repeats of the first run that the noise is known by.
    """
    steps = f"{answer.num_steps} steps"
    if answer.not_finite:
        return f"DIFFERENT: at step {answer.step} one loss alone is not finite; {steps}"
    whose = f"{num_repeats} repeats" if num_repeats else "the difference's own residuals"
    noise = (
        f"noise by {whose}: {answer.noise:.2e} a step, correlation {answer.correlation:.2f}; "
        f"an offset of {answer.visible:.2e} over the last half would be seen\n"
    )
    if not answer.differs:
        chance = f"chance {answer.chance:.2g}, not below {level:g}"
        return f"{noise}not told apart over {steps} ({chance})"
    return (
        f"{noise}DIFFERENT from about step {answer.step}: by {answer.offset:+.3e} on the mean from "
        f"there (chance {answer.chance:.2g}, {steps})"
    )


def _require_enough(steps: Sequence[int], which: str) -> None:
    if len(steps) < _LEAST_STEPS:
        raise DataError(f"curves must have {_LEAST_STEPS} steps {which}, and have {len(steps)}")


@dataclass(frozen=True, slots=True)
class _Noise:
    """Model of the differences of two runs as noise.

    Attributes:
        rho: Correlation of neighbours.
        deviation: Standard deviation.
        innovations: Residuals of each value after that before it, `[series, steps]`.
        is_known: Whether it is from repeats; else every series tells of its own noise.
    """

    rho: float
    deviation: float
    innovations: _Floats
    is_known: bool

    @classmethod
    def of_known(cls, series: _Floats) -> "_Noise":
        """Estimate noise with mean zero from examples, `[series, steps]`."""
        rho = _correlation(series)
        innovations = series[:, 1:] - rho * series[:, :-1]
        return cls(rho, float(np.sqrt((series**2).mean())), innovations, True)

    @classmethod
    def of_residuals(cls, difference: _Floats) -> "_Noise":
        """Estimate noise from the residuals of a difference, two levels removed."""
        left = _residuals(difference[None])
        rho = float(_rho(left)[0])
        innovations = left[:, 1:] - rho * left[:, :-1]
        return cls(rho, float(left.std()), innovations - innovations.mean(), False)

    @property
    def error(self) -> float:
        """Return the standard error of the mean of a series, times the root of its length."""
        return float(np.sqrt((self.innovations**2).mean()) / (1 - self.rho))

    def draw(self, rng: np.random.Generator, count: int, length: int) -> _Floats:
        """Draw series of noise, `[count, length]`; blocks stay where they are if that is known."""
        available = self.innovations.shape[1]
        block = max(1, round(1.5 * available ** (1 / 3)))
        warm = min(200, math.ceil(5 / (1 - self.rho)))
        number = -(-(length + warm) // block)
        begins = rng.integers(0, available, (count, number))
        index = (begins[:, :, None] + np.arange(block)).reshape(count, -1) % available
        which = rng.integers(0, len(self.innovations), (count, number)).repeat(block, axis=1)
        signs = rng.choice((-1.0, 1.0), (count, number)).repeat(block, axis=1)
        if self.is_known:  # noise may grow in time
            near = (np.arange(number) * block - warm).clip(0, available - 1)
            shift = rng.integers(-block, block + 1, (count, number)) + near
            index = (shift[:, :, None] + np.arange(block)).reshape(count, -1).clip(0, available - 1)
        shocks = self.innovations[which, index] * signs
        drawn = np.empty_like(shocks)
        state = np.zeros(count)
        for step in range(shocks.shape[1]):
            state = self.rho * state + shocks[:, step]
            drawn[:, step] = state
        return np.asarray(drawn[:, warm : warm + length])

    def statistic(self, series: _Floats) -> tuple[_Floats, NDArray[np.int64]]:
        """Return each series' largest mean of last steps in standard errors, and its first step."""
        sizes = np.arange(series.shape[1], 0, -1)
        scanned = np.abs(series[:, ::-1].cumsum(axis=1)[:, ::-1]) / np.sqrt(sizes)
        scanned[:, sizes < max(8, len(sizes) // 20)] = 0.0
        at = scanned.argmax(axis=1)
        largest = scanned[np.arange(len(series)), at]
        if self.is_known:
            return largest / self.error, at
        left = _residuals(series)
        rho = _rho(left)
        shocks = left[:, 1:] - rho[:, None] * left[:, :-1]
        return largest / (np.sqrt((shocks**2).mean(axis=1)) / (1 - rho) + 1e-300), at


def _residuals(series: _Floats) -> _Floats:
    """Remove two levels from series; they change where that explains the most."""
    length = series.shape[1]
    sums = series.cumsum(axis=1)
    sizes = np.arange(1, length + 1)
    before, after = sums[:, :-1], sums[:, -1:] - sums[:, :-1]
    gain = before**2 / sizes[:-1] + after**2 / (length - sizes[:-1])
    cut = gain.argmax(axis=1)
    rows = np.arange(len(series))
    early = np.arange(length) <= cut[:, None]
    levels = np.where(
        early,
        (before[rows, cut] / sizes[cut])[:, None],
        (after[rows, cut] / (length - sizes[cut]))[:, None],
    )
    return np.asarray(series - levels)


def _rho(left: _Floats) -> _Floats:
    """Return correlation of neighbours, without the bias that two estimated levels bring."""
    length = left.shape[1]
    raw = (left[:, 1:] * left[:, :-1]).sum(axis=1) / ((left**2).sum(axis=1) + 1e-300)
    return np.asarray(np.clip(raw + (2 + 6 * raw) / length, 0.0, _LARGEST_RHO))


def _correlation(series: _Floats) -> float:
    """Return correlation of neighbours in series whose mean is zero."""
    raw = (series[:, 1:] * series[:, :-1]).sum() / ((series**2).sum() + 1e-300)
    return float(np.clip(raw, 0.0, _LARGEST_RHO))
