"""Slots of each expert when no router runs: a model of skew, the same on all ranks. No torch.

Shape symbols: T tokens of a rank, K experts per token, E experts, W ranks that share them.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_trainer.config import ModelConfig

_MOST_BYTES = 1 << 26
_HALVINGS = 60
_LARGEST_POWER = 1e6
_MOST_LOADS = 8
_MANY_TOKENS = 1 << 16
"""Tokens that are enough for whole numbers of slots to have the ratio of shares."""
ALL_LAYERS = "layers"
"""Name in a file of the shares of layers that it does not name."""


@dataclass(frozen=True, slots=True)
class Skew:
    """Shares of the slots of a layer.

    Attributes:
        name: Value of `--skew` on the command line.
        gini: Gini coefficient of the shares, 0 to 1; None: `shares` has them.
        shares: Share of each expert, of any sum, by the name of a layer such as `"layers.3"`;
            layers without an entry have the shares of `ALL_LAYERS`, and without that equal shares.
    """

    name: str
    gini: float | None = None
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def slots(
        self, layer: str, *, num_tokens: int, top_k: int, num_experts: int, num_ranks: int
    ) -> tuple[int, ...]:
        """Return the slots of each expert for T tokens: E numbers of sum T * K, each at most T.

        With a Gini coefficient, at most `_MOST_LOADS` of the ranks have different loads, which the
        others repeat: so few ranks stand for all.

        Args:
            layer: Name of the layer.
            num_tokens: T, tokens of the rank.
            top_k: K, experts per token.
            num_experts: E, experts of the layer.
            num_ranks: W, expert-parallel ranks.
        """
        total = num_tokens * top_k
        if self.gini is None:
            shares = self.shares.get(layer, self.shares.get(ALL_LAYERS, (1.0,) * num_experts))
            return rounded(shares, total, most=num_tokens)
        period = num_experts // num_ranks * math.gcd(num_ranks, _MOST_LOADS)
        if total * period % num_experts:
            period = num_experts
        part = total * period // num_experts
        shares = unequal(self.gini, period, most=num_tokens / part if part else 1.0)
        return rounded(shares, part, most=num_tokens) * (num_experts // period)

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of layers with shares of their own, and `ALL_LAYERS`."""
        return tuple(dict.fromkeys((*self.shares, ALL_LAYERS)))


def parse_skew(text: str, model: ModelConfig) -> Skew:
    """Read a value of ``--skew``: ``uniform``, ``gini=0.4`` or a JSON file.

    Such a file has a list of E numbers for all layers, or lists by the name of a layer, and
    under ``"layers"`` for the others. Only the ratios of the numbers count.

    Args:
        text: Value of the flag.
        model: Model of the run.

    Raises:
        ConfigError: When it has another form, or is more unequal than K experts per token can be.
    """
    if text == "uniform":
        return Skew(text)
    if not model.num_experts:
        raise ConfigError(f"--skew ({text}) must be uniform for a model without experts")
    if text.startswith("gini="):
        return Skew(text, gini=_coefficient(text, model))
    return Skew(text, shares=_read(Path(text), model.num_experts))


def busiest_load(skew: Skew, model: ModelConfig, num_ranks: int) -> float:
    """Return the rows of the busiest of W ranks divided by the mean, averaged over layers."""
    names = [f"layers.{index}" for index in range(model.num_layers) if not model.is_dense(index)]
    known = Counter(name if name in skew.shares else ALL_LAYERS for name in names)
    total = 0.0
    for layer, times in known.items():
        slots = skew.slots(
            layer,
            num_tokens=_MANY_TOKENS,
            top_k=model.top_k,
            num_experts=model.num_experts,
            num_ranks=num_ranks,
        )
        part = model.num_experts // num_ranks
        rows = [sum(slots[first : first + part]) for first in range(0, len(slots), part)]
        total += times * max(rows) * num_ranks / sum(rows)
    return total / len(names)


@lru_cache(maxsize=256)
def rounded(shares: tuple[float, ...], total: int, *, most: int) -> tuple[int, ...]:
    """Round shares to whole numbers of a given sum, none above `most`.

    The excess of a share goes to the others in the ratio of theirs.
    """
    wanted = _capped([share / sum(shares) * total for share in shares], most)
    numbers = [math.floor(number) for number in wanted]
    by_rest = sorted(range(len(numbers)), key=lambda e: (numbers[e] - wanted[e], e))
    while left := total - sum(numbers):
        for expert in [e for e in by_rest if numbers[e] < most][:left]:
            numbers[expert] += 1
    return tuple(numbers)


@lru_cache(maxsize=256)
def unequal(wanted: float, count: int, *, most: float) -> tuple[float, ...]:
    """Return shares of sum 1 with a Gini coefficient, none above `most`, in a fixed order.

    They follow a Lorenz curve x ** power, whose power is searched by bisection.
    """

    def shares(power: float) -> list[float]:
        ends = [(index / count) ** power for index in range(count + 1)]
        return _capped([b - a for a, b in itertools.pairwise(ends)], most)

    low, high = 1.0, 2.0
    while gini(shares(high)) < wanted and high < _LARGEST_POWER:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gini(shares(middle)) < wanted else (low, middle)
    found = shares(high)
    Random(0).shuffle(found)  # noqa: S311 - nothing is secret
    return tuple(found)


def rows_per_rank(
    slots: Sequence[int], num_tokens: int, top_k: int, num_ranks: int
) -> tuple[int, ...]:
    """Return the number of T tokens that go to each of W ranks at least once.

    A token chooses an expert with probability slots / T, independently of its other choices; with
    equal shares it chooses any K experts with the same probability.
    """
    num_local = len(slots) // num_ranks
    parts = [slots[rank * num_local :][:num_local] for rank in range(num_ranks)]
    return tuple(_rows(part, num_tokens, top_k, num_experts=len(slots)) for part in parts)


def _rows(slots: Sequence[int], num_tokens: int, top_k: int, *, num_experts: int) -> int:
    if not sum(slots):
        return 0
    if max(slots) - min(slots) <= 1:
        elsewhere = math.comb(num_experts - len(slots), top_k)
        missed = elsewhere / math.comb(num_experts, top_k)
    else:
        missed = math.prod(1 - number / num_tokens for number in slots)
    least = max(*slots, -(-sum(slots) // min(top_k, len(slots))), 0)
    return min(max(round(num_tokens * (1 - missed)), least), num_tokens, sum(slots))


def gini(numbers: Sequence[float]) -> float:
    """Return the Gini coefficient: 0 if all are equal, near 1 if one number has everything."""
    count, total = len(numbers), sum(numbers)
    weighted = sum(rank * number for rank, number in enumerate(sorted(numbers), start=1))
    return 2 * weighted / (count * total) - (count + 1) / count


def _coefficient(text: str, model: ModelConfig) -> float:
    try:
        wanted = float(text.removeprefix("gini="))
    except ValueError:
        wanted = math.nan
    largest = 1 - model.top_k / model.num_experts
    if not 0 <= wanted < largest:
        raise ConfigError(
            f"--skew ({text}) must be like gini=0.4, at least 0 and below {largest:.3f}: a token "
            f"goes to {model.top_k} of {model.num_experts} different experts"
        )
    return wanted


def _capped(numbers: Sequence[float], most: float) -> list[float]:
    """Cap numbers at a bound, and share the excess among the others in their ratio."""
    found = list(numbers)
    full: set[int] = set()
    while excess := [i for i, number in enumerate(found) if number > most and i not in full]:
        over = sum(found[i] - most for i in excess)
        full.update(excess)
        rest = [i for i in range(len(found)) if i not in full]
        base = sum(found[i] for i in rest)
        for i in excess:
            found[i] = most
        for i in rest:
            found[i] += over * (found[i] / base if base else 1 / len(rest))
    return found


def _read(path: Path, num_experts: int) -> dict[str, tuple[float, ...]]:
    try:
        text = read_named(path, limit=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--skew ({path}) must be uniform, gini=0.4 or a readable file: {why_not(error)}"
        ) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--skew ({path}) must be JSON: {why_not(error)}") from None
    if not isinstance(found, dict):
        found = {ALL_LAYERS: found}
    return {str(name): _numbers(path, name, row, num_experts) for name, row in found.items()}


def _numbers(path: Path, name: str, row: object, num_experts: int) -> tuple[float, ...]:
    is_good: Callable[[object], bool] = lambda x: (  # noqa: E731
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < math.inf
    )
    if not isinstance(row, list) or len(row) != num_experts or not all(map(is_good, row)):
        raise ConfigError(
            f"--skew ({path}): {name} must be a list of {num_experts} numbers, none negative"
        )
    if not sum(row):
        raise ConfigError(f"--skew ({path}): the sum of {name} must be above 0")
    return tuple(map(float, row))
