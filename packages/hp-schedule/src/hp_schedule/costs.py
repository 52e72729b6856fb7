"""What the steps of a schedule cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_schedule.packing import BWD, BWD_INPUT, BWD_WEIGHT, FWD, TYPES

PerStage = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations in seconds (or any unit, the results are in it too) and memory.

    Attributes:
        forward: Duration of a stage's forward.
        input_grad: Duration of the backward of its input.
        weight_grad: Duration of the backward of its weights; a full backward takes both.
        latency: Time from the moment a message is sent and its receive posted to its arrival.
        activation: Memory a microbatch holds in a stage from its forward to the end of its
            backward, in any unit.

    Raises:
        ValueError: If a number is negative.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    latency: float = 0.0
    activation: PerStage = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "latency", "activation"):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                if not number >= 0:
                    raise ValueError(f"{name} ({number}) must be >= 0")

    def durations(self, num_stages: int) -> tuple[tuple[float, ...], ...]:
        """Return the duration of every step, indexed by kind, then by stage.

        Raises:
            ValueError: If a sequence does not have one number per stage.
        """
        forward = per_stage("forward", self.forward, num_stages)
        input_grad = per_stage("input_grad", self.input_grad, num_stages)
        weight_grad = per_stage("weight_grad", self.weight_grad, num_stages)
        full = tuple(i + w for i, w in zip(input_grad, weight_grad, strict=True))
        columns = {FWD: forward, BWD: full, BWD_INPUT: input_grad, BWD_WEIGHT: weight_grad}
        nothing = (0.0,) * num_stages
        return tuple(columns.get(kind, nothing) for kind in range(len(TYPES)))


def per_stage(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    """Return one number per stage.

    Raises:
        ValueError: If a sequence has another length.
    """
    if not isinstance(value, Sequence):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ValueError(f"len({name}) ({len(value)}) must equal num_stages ({num_stages})")
    return tuple(map(float, value))
