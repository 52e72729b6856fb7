"""Result of a run of a schedule."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hp_schedule.runtime.split_batch import concat_outputs
from hp_schedule.timeline import Timeline


class PipelineResult:
    """Result of a run on one rank.

    Args:
        losses: See the attribute.
        outputs: See the attribute.
        timeline: Returns the spans.
        concat_dim: Dimension along which outputs are put together.

    Attributes:
        losses: One detached scalar per microbatch on the rank of the last stage, not scaled; empty
            elsewhere, and without both loss function and backwards.
        outputs: Outputs of the last stage for each microbatch, detached; empty elsewhere, and in
            training unless asked for.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        outputs: Sequence[Any],
        *,
        timeline: Callable[[], Timeline],
        concat_dim: int = 0,
    ) -> None:
        self.losses = list(losses)
        self.outputs = list(outputs)
        self._timeline = timeline
        self._concat_dim = concat_dim

    @property
    def output(self) -> Any:
        """The outputs of all microbatches in one; None where there are none."""
        return concat_outputs(self.outputs, dim=self._concat_dim)

    @property
    def timeline(self) -> Timeline:
        """This rank's spans, in seconds since the epoch; empty if nothing was recorded.

        On CUDA the first look waits until the device has got to the end of the run.
        """
        return self._timeline()
