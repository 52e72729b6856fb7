"""Combinations of features and what became of them, as data. No torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import msgspec

EQUAL, REFUSED, DIFFERENT = "equal", "not comparable", "different"
"""States of a combination. `REFUSED`: the library refuses it, or its result cannot be compared."""

Errors = Mapping[str, float]
"""Name of a tensor -> its error relative to the expected one; NaN and infinity are errors."""


@dataclass(frozen=True)
class Case:
    """A combination that ranks compute and compare by themselves.

    Attributes:
        name: Name within its family; the first word says what is tried.
        work: Function of a rank within a process group: the errors of what it has seen.
        ranks: Number of ranks.
        limit: Largest error that rounding explains.
    """

    name: str
    work: Callable[[], Errors]
    ranks: int = 2
    limit: float = 1e-9


@dataclass(frozen=True)
class Job:
    """A combination that trains under hp-verify's recorder, beside the same in one process.

    Attributes:
        name: Name within its family; the first word says what is tried.
        train: What every rank does.
        reference: What one process does.
        group: Name of the reference: jobs of one group have one reference.
        ranks: Number of ranks.
        meets: Whether the process group is made before the job begins.
        start: Whether it begins with the reference's weights: those of a DTensor depend on ranks.
    """

    name: str
    train: Callable[[], None]
    reference: Callable[[], None]
    group: str
    ranks: int = 2
    meets: bool = True
    start: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a combination.

    Attributes:
        family: Name of its family.
        name: Name within the family.
        state: One of the states above.
        error: Largest error; None: it is not finite.
        where: Tensor that has it, or the first difference.
        reason: Line of the library's error.
    """

    family: str
    name: str
    state: str
    error: float | None = 0.0
    where: str = ""
    reason: str = ""


FAMILIES: dict[str, tuple[str, ...]] = {
    "operators": ("torch",),
    "operators_2d": ("torch",),
    "redistributions": ("torch",),
    "collectives": ("torch",),
    "schedules": ("torch",),
    "sharded": ("torch",),
    "replicated": ("torch",),
    "styles": ("torch",),
    "updates": ("torch",),
    "checkpoints": ("torch",),
    "accelerated": ("torch", "accelerate", "transformers"),
    "trained": ("torch", "accelerate", "transformers"),
    "spread": ("torch", "transformers"),
    "tuned": ("torch", "trl", "accelerate", "transformers"),
    "deepspeeded": ("torch", "deepspeed", "transformers"),
    "scripts": ("torch", "torchtitan", "megatron-core"),
}
"""Module of a family -> packages whose versions its results are about."""


def cases_of(family: str) -> Iterator[Case | Job]:
    """Return the combinations of a family, which imports its libraries."""
    found: Iterable[Case | Job] = import_module(f"{__package__}.{family}").cases()
    return iter(found)


def versions_of(family: str) -> dict[str, str]:
    """Return the versions of a family's packages; empty: one of these is not installed."""
    try:
        return {name: version(name) for name in FAMILIES[family]}
    except PackageNotFoundError:
        return {}
