"""What a model costs before it is cut into stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_schedule.costs import Costs, Latency


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of one rank's share of a model, so that any number of stages can be compared.

    A rank's share is the model divided by the number of ranks; with v stages on every rank a stage
    is 1 / v of it.

    Attributes:
        forward: Duration of the forward of one microbatch through one rank's share.
        input_grad: Duration of the backward of its inputs.
        weight_grad: Duration of the backward of its weights.
        activation: Memory that a microbatch holds in one rank's share.
        first_scale: The first stage's costs relative to the others'; memory stays.
        last_scale: The last stage's.
        microbatch_scale: Each microbatch's costs and memory relative to those above; empty for
            microbatches of one size.
        latency: Latency of a message between ranks; see `Costs`.
        message: Size of a microbatch's message between two stages.
        bandwidth: Size per unit of time of every channel.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    activation: float = 1.0
    first_scale: float = 1.0
    last_scale: float = 1.0
    microbatch_scale: Sequence[float] = ()
    latency: Latency = 0.0
    message: float = 0.0
    bandwidth: float = math.inf

    def of_stages(self, num_ranks: int, num_stages: int) -> Costs:
        """Return the costs of equal stages, but for the first and the last."""
        share = [num_ranks / num_stages] * num_stages
        scales = share.copy()
        scales[0] *= self.first_scale
        scales[-1] *= self.last_scale
        return Costs(
            forward=self._table(self.forward, scales),
            input_grad=self._table(self.input_grad, scales),
            weight_grad=self._table(self.weight_grad, scales),
            activation=self._table(self.activation, share),
            latency=self.latency,
            message=self._table(self.message, [1.0] * num_stages),
            bandwidth=self.bandwidth,
        )

    def _table(self, cost: float, scales: list[float]) -> list[float | Sequence[float]]:
        if not self.microbatch_scale:
            return [cost * scale for scale in scales]
        return [[cost * scale * size for size in self.microbatch_scale] for scale in scales]
