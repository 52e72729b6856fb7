"""Check that gradients find the same way back for every microbatch of a run.

An output that does not require grad gets no gradient, and what it was computed from does not
train: right for masks, tables and frozen stages, which are so for every microbatch. Where some
microbatches get a gradient and others do not, something was detached, or computed under
`torch.no_grad`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from hp_schedule.runtime.specs import Specs


class GradientPaths:
    """Checks that an output requires grad for every microbatch of a run or for none."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, list[bool]]] = {}

    def check(
        self,
        stage: int,
        microbatch: int,
        outputs: Sequence[Tensor],
        *,
        expected: Callable[[], Specs | None],
    ) -> None:
        """Check the outputs of a forward that trains against the first microbatch's.

        Args:
            stage: Index of the stage.
            microbatch: Index of the microbatch.
            outputs: Outputs of the stage for that microbatch.
            expected: Returns the specs that the next stage expects; called only if a gradient is
                missing.

        Raises:
            ValueError: If an output requires grad for some microbatches only, and the next stage
                expects it to.
        """
        requires = [x.requires_grad for x in outputs]
        other, first = self._first.setdefault(stage, (microbatch, requires))
        for index, (before, now) in enumerate(zip(first, requires, strict=False)):
            if before == now:
                continue
            specs = expected()
            if specs is None or any(spec.has_grad for spec in specs[index : index + 1]):
                has, lacks = (other, microbatch) if before else (microbatch, other)
                raise ValueError(
                    f"output {index} of stage {stage}, microbatch {lacks} must require grad, as "
                    f"that of microbatch {has} does: it was detached, or computed under no_grad. "
                    "If it is not to train, say so in the input_spec of the next stage "
                    "(requires_grad=False)"
                )
