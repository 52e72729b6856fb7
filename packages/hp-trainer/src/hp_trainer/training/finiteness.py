"""Steps whose loss or gradient is not finite; see docs/how-to/stop-and-resume.md.

Note [skipped step]: a step whose loss or gradient norm is not finite changes nothing but the
position of the run. Its gradients and the loads of its routers are dropped: weights, Adam's
moments, Adam's count of updates and correction biases are bit for bit what they were. The step is
counted, its sequences are not read again, and the learning rate goes on. So the number of updates
is the number of steps minus that of skipped ones, and both are saved.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import NumericsError
from hp_platform import all_gather_json
from hp_trainer.config import TrainConfig
from hp_trainer.model.parameters import Parameter


@dataclass
class Skips:
    """Steps that changed nothing; see Note [skipped step].

    Attributes:
        total: Skipped steps of the whole run.
        in_a_row: Skipped steps in a row, up to now.
    """

    total: int = 0
    in_a_row: int = 0

    def done(self) -> None:
        """Note that a step was not skipped."""
        self.in_a_row = 0

    def add(self, problem: str, config: TrainConfig) -> None:
        """Count a step that is to be skipped.

        Args:
            problem: Step and what is wrong with it; the same on all ranks.
            config: Says whether steps are skipped, and how many.

        Raises:
            NumericsError: When it must not be skipped.
        """
        if config.not_finite == "stop":
            raise NumericsError(problem)
        if self.in_a_row == config.max_skipped_steps:
            raise NumericsError(f"{problem}, after {self.in_a_row} skipped steps in a row")
        self.total += 1
        self.in_a_row += 1


def describe_not_finite(
    *,
    loss: float,
    share: float,
    bad: Sequence[str],
    before: Sequence[Tensor],
    parameters: Iterable[Parameter],
    group: ProcessGroup,
) -> str:
    """Name the parameter and the ranks where a value is not finite. All ranks call together.

    A value that is not finite spreads: through sums to the ranks that hold the same parameter,
    through backward to all layers before. So of several parameters the one nearest to the output is
    named, and the ranks are those on which it was so before gradients were summed over copies.

    Args:
        loss: Loss of the whole step.
        share: This rank's part of it.
        bad: Entries of the gradient norm that are not finite, the same on all ranks.
        before: Norms of what this rank gave to sums over copies.
        parameters: This rank's, with their gradients.
        group: CPU group.

    Returns:
        A clause for a message, the same on all ranks.
    """
    mine = not math.isfinite(share)
    if math.isfinite(loss):
        alone = [p.local.grad for p in parameters if not p.has_copies and p.local.grad is not None]
        mine = not all(bool(part.isfinite().all()) for part in (*before, *alone))
    everyone = all_gather_json(mine, of=bool, group=group)
    ranks = [str(rank) for rank, is_source in enumerate(everyone) if is_source]
    source = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else ""
    if not math.isfinite(loss):
        return f"the loss ({loss}) is not finite{source}"
    if not bad:  # finite one by one, infinite in sum
        return "the norm of the gradients is not finite"
    more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the gradient of {_nearest_to_output(bad)}{more} is not finite{source}"


def _nearest_to_output(names: Sequence[str]) -> str:
    def depth(name: str) -> tuple[int, list[int], str]:
        place = {"embedding": 0, "layers": 1}.get(name.partition(".")[0], 2)
        return place, [int(number) for number in re.findall(r"\.(\d+)\.", name)], name

    return max(names, key=depth)
