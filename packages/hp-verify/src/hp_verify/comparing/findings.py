"""Findings of a comparison of two jobs: differences, one of them exactly, and a program."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from hp_verify.comparing.ties import Flip
from hp_verify.recording import events as ev

UPDATE = "update"
"""Phase of a difference: one of both makes no such update."""
REDUCTION = "reduction"
_ORIGINS = {
    ev.BACKWARD: "in the backward: ranks' own gradients are wrong",
    REDUCTION: "in the reduction: ranks' own gradients add up to the reference's",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Tells what differs, where, and by how much.

    Attributes:
        step: Counted from 1.
        phase: One of `hp_verify.recording.events.PHASES`, or `UPDATE`.
        name: Module or parameter of the reference.
        error: Norm of the difference, relative to the reference's.
        bound: Largest error that rounding explains.
        factor: Factor of the reference's tensor that comes nearest.
        rest: Error that this factor leaves.
        who: Ranks that disagree with each other; empty: the job differs from the reference.
        note: Remark for people beside the numbers.
        origin: Place at which a gradient became wrong: `BACKWARD`, `REDUCTION`; empty: not known.
    """

    step: int
    phase: str
    name: str
    error: float
    bound: float
    factor: float = math.nan
    rest: float = math.nan
    who: str = ""
    note: str = ""
    origin: str = ""

    @property
    def is_same(self) -> bool:
        """Tell whether every value is the same, in the same dtype."""
        return self.error == 0.0 and not self.note

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        bound = f", rounding explains {self.bound:.1e}" if self.bound else ""
        notes = filter(None, (self.note, _ORIGINS.get(self.origin, "")))
        note = "".join(f" ({note})" for note in notes)
        return f"step {self.step}, {self.phase}{name}: {self.error:.3e}{bound}{note}"


@dataclass(frozen=True, slots=True)
class Exact:
    """Describes a first difference element by element.

    Attributes:
        sentence: Description of the elements that differ, with their ranks and kind.
        index: Where the largest error is in the whole tensor; of what is made of samples, the first
            is that of the sample.
        expected: The reference's value there.
        actual: The job's value there.
        ranks: Ranks whose parts differ.
        num_different: Elements that differ by more than rounding explains.
        num_elements: All elements.
        kind: Relation of the differing elements to the reference's; empty: none that is known.
    """

    sentence: str
    index: tuple[int, ...]
    expected: float
    actual: float
    ranks: tuple[int, ...]
    num_different: int
    num_elements: int
    kind: str = ""

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Shows a difference by a program in one process, with plain torch.

    Attributes:
        path: The program; what it reads lies beside it.
        text: Source of the program, at most 40 lines.
        output: Text that the program printed.
    """

    path: Path
    text: str
    output: str

    @property
    def verdict(self) -> str:
        """Return which side is wrong, as the program says in its last line."""
        return self.output.strip().rpartition("\n")[2]


@dataclass(slots=True)
class Comparison:
    """Tells what two jobs have in common and what not.

    Attributes:
        differences: Differences above their bounds, in the order of the computation.
        unaligned: Tensor or number that could not be compared -> reason.
        num_compared: Tensors and numbers that were compared.
        num_steps: Steps that both jobs have.
        largest: Phase -> largest error.
        random: Step -> explanation of its differences by dropout.
        more: Step -> sentences about calls that only the job makes.
        exact: The first difference, element by element; None: no second run was made, or it did
            not come again.
        reproduction: A program that shows it; None: none was made.
        again: Reason why a second run gave no `exact` or no `reproduction`.
        flip: First choice of a router that differs; None: none does.
        is_excused: Whether `flip` is a tie that rounding may break, and comes before all
            differences.
        versions: Python, hp-verify, torch, and libraries of a reference that is kept -> version.
        seconds: Run -> seconds that it took; of a reference that is kept its first run, once.
    """

    differences: list[Difference] = field(default_factory=list)
    unaligned: dict[str, str] = field(default_factory=dict)
    num_compared: int = 0
    num_steps: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    random: dict[int, str] = field(default_factory=dict)
    more: dict[int, list[str]] = field(default_factory=dict)
    exact: Exact | None = None
    reproduction: Reproduction | None = None
    again: str = ""
    flip: Flip | None = None
    is_excused: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> Difference | None:
        """Return the first difference; None: there is none."""
        return self.differences[0] if self.differences else None

    @property
    def together(self) -> list[Difference]:
        """Return the first difference and all others of its step and phase."""
        place = [(d.step, d.phase) for d in self.differences]
        return [d for d, where in zip(self.differences, place, strict=True) if where == place[0]]

    @property
    def is_equal(self) -> bool:
        """Tell whether something was compared, and nothing of it differs but by a tie."""
        return self.num_compared > 0 and (not self.differences or self.is_excused)
