"""What hp-train has recorded beside what one process has computed. Nothing is left out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hp_train.verify.compare_values import compare_runs
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


@dataclass(frozen=True)
class Judgement:
    """How far a run is from the reference.

    Attributes:
        error: Largest relative error.
        worst: Step, quantity and name of the tensor that has it.
        compared: Number of tensors and numbers that were compared.
        flaws: Sentences about tensors that could not be compared, and ranks that contradict each
            other.
    """

    error: float
    worst: str
    compared: int
    flaws: list[str]


def judge(
    steps: Sequence[RecordedStep], exported: Mapping[str, Tensor], expected: Trained
) -> Judgement:
    """Compare a run with the reference.

    Args:
        steps: Steps that ranks have recorded.
        exported: Weights that transformers has loaded from what was exported at the end.
        expected: Values that one process has computed.
    """
    theirs: list[dict[str, Mapping[str, Tensor]]] = [
        {LOSS: {"": _number(loss)}, NORM: {"": _number(norm)}, GRADIENT: gradients}
        for loss, norm, gradients in zip(
            expected.losses, expected.norms, expected.gradients, strict=True
        )
    ]
    theirs[0][LOGITS] = {"": expected.logits}
    theirs[-1] |= {WEIGHT: expected.weights, EXPORTED: expected.weights}
    last = replace(steps[-1], tensors={**steps[-1].tensors, EXPORTED: exported})
    found = compare_runs(
        [*steps[:-1], last],
        [RecordedStep(index, tensors) for index, tensors in enumerate(theirs, start=1)],
        norms_of=(),
        measure=_errors_of_norms,
    )
    differences = [each for names in found.worst.values() for each in names.values()]
    could_not = [str(each) for each in differences if each.note and math.isinf(each.error)]
    worst = max(differences, key=lambda each: each.error)
    compared = sum(
        name in step.tensors.get(quantity, {})
        for step, tensors in zip([*steps[:-1], last], theirs, strict=True)
        for quantity, names in tensors.items()
        for name in names
    )
    return Judgement(
        worst.error,
        f"step {worst.step}, {worst.phase} {worst.name}".strip() if worst.error else "",
        compared,
        [*found.flaws, *could_not],
    )


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _errors_of_norms(theirs: Mapping[str, Tensor]) -> Callable[[Tensor, Tensor], float]:
    """Measure norms of differences, relative to that of the tensor or to `_SMALL` of all."""
    least = _SMALL * math.sqrt(sum(float(tensor.square().sum()) for tensor in theirs.values()))

    def error_of(actual: Tensor, expected: Tensor) -> float:
        # What transformers itself loads as float32 has no more digits.
        ours, reference = actual.double(), expected.to(actual.dtype).double()
        error = float((ours - reference).norm()) / (max(float(reference.norm()), least) or 1.0)
        return math.inf if math.isnan(error) else error

    return error_of
