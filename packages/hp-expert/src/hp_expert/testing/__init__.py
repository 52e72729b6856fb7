"""Checks of dispatchers, and a count of the host's waits for a device.

`check_dispatcher` runs all checks that `hp_expert`'s own dispatchers pass. It needs no test
framework: every rank calls it, in processes or threads.
"""

from torch.distributed import ProcessGroup

from hp_expert.dispatch import MakeDispatcher
from hp_expert.testing.conformance import (
    DISAGREEMENTS,
    SPOILS,
    check_errors,
    check_interleaving,
    check_parity,
    check_recompute,
    check_reruns,
    check_threads,
)
from hp_expert.testing.host_reads import host_reads
from hp_expert.testing.problem import ROUTINGS, Case

__all__ = [
    "DISAGREEMENTS",
    "ROUTINGS",
    "SPOILS",
    "Case",
    "MakeDispatcher",
    "check_dispatcher",
    "check_errors",
    "check_interleaving",
    "check_parity",
    "check_recompute",
    "check_reruns",
    "check_threads",
    "host_reads",
]


def check_dispatcher(
    make: MakeDispatcher,
    group: ProcessGroup,
    case: Case | None = None,
    *,
    second_group: ProcessGroup | None = None,
) -> None:
    """Run all checks on every rank of the group; return or raise on every rank.

    Args:
        make: Function that makes a dispatcher for a group and a number of experts.
        group: The ranks. A dispatcher that hangs ends with the time-out of the group.
        case: Sizes, dtype, device and bound; None: the defaults.
        second_group: Another group of the same ranks, for two threads that run at once.

    Raises:
        AssertionError: If the dispatcher gives a wrong answer, or lets wrong input pass.
        Exception: Error of the dispatcher.
    """
    case = case or Case()
    check_parity(make, group, case)
    check_reruns(make, group, case)
    check_interleaving(make, group, case)
    check_threads(make, group, case, second_group=second_group)
    check_recompute(make, group, case)
    check_errors(make, group, case)
