"""Steps that all ranks take together, or none does."""

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_platform.failures.agreement import agreeing

T = TypeVar("T")


def on_all_ranks(action: Callable[[], T], *, group: ProcessGroup | None, where: str) -> T:
    """Do something on every rank, and raise on all of them if it fails on one.

    Args:
        action: This rank's part; no collective that another rank may miss.
        group: CPU group of the ranks; None: this rank is alone.
        where: What is done, for the message.

    Returns:
        What this rank's part gave.
    """
    with agreeing(group=group, where=where):
        try:
            return action()
        except OSError as failure:
            raise CheckpointError(
                f"cannot {where}: {failure.filename}: {failure.strerror}"
            ) from None
