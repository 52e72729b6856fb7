"""What hp-train has recorded beside what one process has computed. Nothing is left out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hp_verify.recording.values import RecordedStep
from integration_tests.models.architectures.trained import Trained

LOGITS, LOSS, NORM, GRADIENT, WEIGHT, EXPORTED = (
    "logits",
    "loss",
    "norm",
    "gradient",
    "weight",
    "exported weight",
)
_SMALL = 1e-3
"""Share of all gradients below which the error of one is a share of that, and not of itself: what
is zero but for rounding has no digits that could agree."""


@dataclass(slots=True)
class Judgement:
    """How far a run is from the reference.

    Attributes:
        error: Largest relative error.
        worst: What has it.
        compared: Tensors and numbers that were compared.
        flaws: What could not be compared, and ranks that contradict each other.
    """

    error: float = 0.0
    worst: str = ""
    compared: int = 0
    flaws: list[str] = field(default_factory=list)

    def add(self, what: str, error: float) -> None:
        """Take a comparison in."""
        self.compared += 1
        error = math.inf if math.isnan(error) else error
        if error > self.error:
            self.error, self.worst = error, what


def judge(
    steps: Sequence[RecordedStep], exported: Mapping[str, Tensor], expected: Trained
) -> Judgement:
    """Compare a run with the reference.

    Args:
        steps: What ranks have recorded.
        exported: Weights that transformers has loaded from what was exported at the end.
        expected: What one process has computed.
    """
    found = Judgement()
    for step, losses, norms, gradients in zip(
        steps, expected.losses, expected.norms, expected.gradients, strict=True
    ):
        found.flaws += [f"step {step.index}: {flaw}" for flaw in step.flaws]
        if step.index == 1:
            _compare(
                found, f"step 1, {LOGITS}", step.tensors.get(LOGITS, {}), {"": expected.logits}
            )
        for quantity, number in ((LOSS, losses), (NORM, norms)):
            scalar = {"": torch.tensor(number, dtype=torch.float64)}
            what = f"step {step.index}, {quantity}"
            _compare(found, what, step.tensors.get(quantity, {}), scalar)
        _compare(found, f"step {step.index}, {GRADIENT}", step.tensors.get(GRADIENT, {}), gradients)
    for quantity, weights in ((WEIGHT, steps[-1].tensors.get(WEIGHT, {})), (EXPORTED, exported)):
        _compare(found, quantity, weights, expected.weights)
    return found


def _compare(
    found: Judgement, what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    found.flaws += [f"{what} {name} is missing" for name in expected if name not in actual]
    found.flaws += [f"{what} {name} is one too many" for name in actual if name not in expected]
    least = _SMALL * math.sqrt(sum(float(t.square().sum()) for t in expected.values()))
    for name in [name for name in expected if name in actual]:
        # What transformers itself loads as float32 has no more digits.
        ours, theirs = actual[name].double(), expected[name].to(actual[name].dtype).double()
        if ours.shape != theirs.shape:
            shapes = f"{list(ours.shape)} must be {list(theirs.shape)}"
            found.flaws.append(f"{what} {name} has another shape: {shapes}")
            continue
        scale = max(float(theirs.norm()), least) or 1.0
        found.add(f"{what} {name}".strip(), float((ours - theirs).norm()) / scale)
