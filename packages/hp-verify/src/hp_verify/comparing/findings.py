"""Findings of a comparison of two jobs: differences, one of them exactly, and a program."""

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path

from hp_verify.comparing.ties import Flip
from hp_verify.recording import events as ev

UPDATE = "update"
"""Phase of a difference: one of both makes no such update."""
REDUCTION = "reduction"
NOT_OWN = "not that of its own gradients"
"""Note of a norm that is wrong whatever gradients are."""
_ORIGINS = {
    ev.BACKWARD: "in the backward: ranks' own gradients are wrong",
    REDUCTION: "in the reduction: ranks' own gradients add up to the reference's",
}


class Verdict(enum.StrEnum):
    """Says what a comparison has come to."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"


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
        steps: Updates that were compared, counted from 1.
        num_made: Updates that the reference makes.
        is_cut: Whether a run was ended before its own end, so that later steps were not compared.
        largest: Phase -> largest error.
        random: Step -> explanation of its differences by dropout.
        more: Step -> sentences about calls that only the job makes.
        exact: The first difference, element by element; None: no second run was made, or it did
            not come again.
        reproduction: A program that shows it; None: none was made.
        again: Reason why a second run gave no `exact` or no `reproduction`.
        page: File with all that is known of a difference; None: none was written.
        flip: First choice of a router that differs; None: none does.
        is_excused: Whether `flip` is a tie that rounding may break, and comes before all
            differences.
        versions: Python, hp-verify, and libraries that the reference has imported -> version.
        seconds: Run -> seconds that it took; of a reference that is kept its first run, once.
    """

    differences: list[Difference] = field(default_factory=list)
    unaligned: dict[str, str] = field(default_factory=dict)
    num_compared: int = 0
    steps: list[int] = field(default_factory=list)
    num_made: int = 0
    is_cut: bool = False
    largest: dict[str, float] = field(default_factory=dict)
    random: dict[int, str] = field(default_factory=dict)
    more: dict[int, list[str]] = field(default_factory=dict)
    exact: Exact | None = None
    reproduction: Reproduction | None = None
    again: str = ""
    page: Path | None = None
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
    def num_steps(self) -> int:
        """Count the updates that were compared."""
        return len(self.steps)

    @property
    def over(self) -> str:
        """Say which updates were compared, and of how many."""
        made, num = max(self.num_made, *self.steps, 0), len(self.steps)
        first = next((i for i, step in enumerate(self.steps) if step != i + 1), num)
        said = f"steps 1-{first}" if first > 1 else f"step {first}"
        if num == made:
            said = f"{made} step{'s' * (made != 1)}"
        elif first == num:
            said += f" of {made}"
        else:
            last = ", the last among them" * (self.steps[-1] == made)
            said += f" and {num - first} of {made - first} others{last}"
        return said + ", until a run was ended" * self.is_cut

    @property
    def verdict(self) -> Verdict:
        """Tell whether the jobs are equal, different, or cannot be compared.

        They are equal where nothing differs, but by a tie, and a gradient or a weight was compared.
        """
        if self.differences and not self.is_excused:
            return Verdict.DIFFERENT
        are_told = any(phase in self.largest for phase in (ev.GRADIENT, ev.CLIPPED, ev.WEIGHT))
        return Verdict.EQUAL if are_told else Verdict.NOT_COMPARABLE

    @property
    def is_equal(self) -> bool:
        """Tell whether the verdict is that the jobs are equal."""
        return self.verdict == Verdict.EQUAL
