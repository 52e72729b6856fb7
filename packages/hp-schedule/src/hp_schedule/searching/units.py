"""Units of time and memory in which the numbers of a search are near 1.

Searches compare sums of floats with one small number. It fits seconds and nanoseconds alike only
if both are brought to one size first. Units are powers of two: changing them rounds nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hp_schedule.costs import Costs, ModelCosts, numbers


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
            recompute=_divided(costs.recompute, self.time),
            kept_input=_divided(costs.kept_input, self.memory),
            offloaded=_divided(costs.offloaded, self.memory),
            host_bandwidth=costs.host_bandwidth * self.time / self.memory,
            latency=_divided(costs.latency, self.time),
            bandwidth=costs.bandwidth * self.time,
        )


def _power_of_two(*values: Any) -> float:
    largest = max(number for value in values for number in numbers(value))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


def _divided(value: Any, unit: float) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: number / unit for key, number in value.items()}
    if isinstance(value, Sequence):
        return [_divided(entry, unit) for entry in value]
    return value / unit
