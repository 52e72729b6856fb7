"""Units of time and memory in which the numbers of a search are near 1.

Searches compare sums of floats with one small number. It fits seconds and nanoseconds alike only
if both are brought to one size first. Units are powers of two: changing them rounds nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hp_schedule.costs import Costs, ModelCosts, PerStep, numbers


class Units(NamedTuple):
    """A unit of time and one of memory, in those of the costs."""

    time: float
    memory: float

    @classmethod
    def fitting(cls, costs: ModelCosts | Costs) -> "Units":
        """Return units between half the largest duration, the largest activation, and all of it."""
        return cls(
            _power_of_two(costs.forward, costs.input_grad, costs.weight_grad),
            _power_of_two(costs.activation),
        )

    def apply(self, costs: Costs) -> Costs:
        """Return costs in these units; those of sharded parameters, which no search needs, stay."""
        return replace(
            costs,
            forward=_divided(costs.forward, self.time),
            input_grad=_divided(costs.input_grad, self.time),
            weight_grad=_divided(costs.weight_grad, self.time),
            activation=_divided(costs.activation, self.memory),
            recompute=None if costs.recompute is None else _divided(costs.recompute, self.time),
            kept_input=_divided(costs.kept_input, self.memory),
            offloaded=None if costs.offloaded is None else _divided(costs.offloaded, self.memory),
            host_bandwidth=costs.host_bandwidth * self.time / self.memory,
            latency=(
                {edge: number / self.time for edge, number in costs.latency.items()}
                if isinstance(costs.latency, Mapping)
                else costs.latency / self.time
            ),
            bandwidth=costs.bandwidth * self.time,
        )


def _power_of_two(*values: PerStep) -> float:
    largest = max(number for value in values for number in numbers(value))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


def _divided(value: PerStep, unit: float) -> PerStep:
    if not isinstance(value, Sequence):
        return value / unit
    return [
        [number / unit for number in entry] if isinstance(entry, Sequence) else entry / unit
        for entry in value
    ]
