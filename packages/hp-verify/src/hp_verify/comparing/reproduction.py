"""Results of a second run around a first difference: its exact place, a program that shows it."""

from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 40
"""Of a program that shows a difference."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Describes a first difference element by element.

    Attributes:
        sentence: Which elements differ, on which ranks, and what they are.
        index: Where the largest error is in the whole tensor; of what is made of samples, the first
            is that of the sample.
        expected: The reference's value there.
        actual: The job's value there.
        ranks: Those whose parts differ.
        num_different: Elements that differ by more than rounding explains.
        num_elements: All elements.
        kind: What the differing elements are; empty: nothing that is known.
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
        text: Its source, at most `MOST_LINES` lines.
        output: What it printed when it was run.
    """

    path: Path
    text: str
    output: str

    @property
    def verdict(self) -> str:
        """Return which side is wrong, as the program says in its last line."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""
