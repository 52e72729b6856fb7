"""Devices, process groups and differentiable collectives over torch.distributed, fully typed.

A public name loads its module at its first use, so that sends need no FSDP, for example.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_platform.autograd import (
        WeightGradQueue,
        linear,
        outside_graph,
        put_off_weight_grad,
        submit_weight_grad,
        sync_hook,
    )
    from hp_platform.collectives.collectives import (
        StartedAllToAll,
        all_gather_uneven,
        all_to_all,
        all_to_all_lazy,
        all_to_all_wait,
        is_waited,
        launch_all_gather,
        launch_all_to_all,
        reduce_scatter_uneven,
        start_all_to_all,
        wait_tensor,
    )
    from hp_platform.collectives.fsdp import (
        set_fsdp_exchanges,
        set_fsdp_frees_parameters,
        set_fsdp_gather_dtype,
        set_fsdp_hooks,
    )
    from hp_platform.collectives.p2p import irecv, isend, isend_irecv
    from hp_platform.collectives.pending import Pending
    from hp_platform.device import (
        Event,
        backend_for,
        current_stream,
        float64_norms,
        local_device,
        side_stream,
        use_stream,
    )
    from hp_platform.dry_device import is_dry
    from hp_platform.failures.failures import (
        FailureNote,
        FailureReport,
        PeerError,
        break_group,
        default_note,
        explained,
        failing_together,
        first_failure,
        give_up,
        is_echo,
        is_no_failure,
        mark_agreed,
        raise_first,
    )
    from hp_platform.failures.messages import agree, all_gather_json, on_one_rank
    from hp_platform.groups import (
        mesh_of,
        new_group,
        new_group_of_members,
        new_groups,
        resolve_group,
    )
    from hp_platform.launch import RankInfo, Runtime, initialize, shutdown
    from hp_platform.threads import ThreadContext, doing, mark_place, place_of

__all__ = [
    "Event",
    "FailureNote",
    "FailureReport",
    "PeerError",
    "Pending",
    "RankInfo",
    "Runtime",
    "StartedAllToAll",
    "ThreadContext",
    "WeightGradQueue",
    "__version__",
    "agree",
    "all_gather_json",
    "all_gather_uneven",
    "all_to_all",
    "all_to_all_lazy",
    "all_to_all_wait",
    "backend_for",
    "break_group",
    "current_stream",
    "default_note",
    "doing",
    "explained",
    "failing_together",
    "first_failure",
    "float64_norms",
    "give_up",
    "initialize",
    "irecv",
    "is_dry",
    "is_echo",
    "is_no_failure",
    "is_waited",
    "isend",
    "isend_irecv",
    "launch_all_gather",
    "launch_all_to_all",
    "linear",
    "local_device",
    "mark_agreed",
    "mark_place",
    "mesh_of",
    "new_group",
    "new_group_of_members",
    "new_groups",
    "on_one_rank",
    "outside_graph",
    "place_of",
    "put_off_weight_grad",
    "raise_first",
    "reduce_scatter_uneven",
    "resolve_group",
    "set_fsdp_exchanges",
    "set_fsdp_frees_parameters",
    "set_fsdp_gather_dtype",
    "set_fsdp_hooks",
    "shutdown",
    "side_stream",
    "start_all_to_all",
    "submit_weight_grad",
    "sync_hook",
    "use_stream",
    "wait_tensor",
]
__version__ = "0.1.0"

_HOMES = {
    "Event": "hp_platform.device",
    "FailureNote": "hp_platform.failures.failures",
    "FailureReport": "hp_platform.failures.failures",
    "PeerError": "hp_platform.failures.failures",
    "Pending": "hp_platform.collectives.pending",
    "RankInfo": "hp_platform.launch",
    "Runtime": "hp_platform.launch",
    "StartedAllToAll": "hp_platform.collectives.collectives",
    "ThreadContext": "hp_platform.threads",
    "WeightGradQueue": "hp_platform.autograd",
    "agree": "hp_platform.failures.messages",
    "all_gather_json": "hp_platform.failures.messages",
    "all_gather_uneven": "hp_platform.collectives.collectives",
    "all_to_all": "hp_platform.collectives.collectives",
    "all_to_all_lazy": "hp_platform.collectives.collectives",
    "all_to_all_wait": "hp_platform.collectives.collectives",
    "backend_for": "hp_platform.device",
    "break_group": "hp_platform.failures.failures",
    "current_stream": "hp_platform.device",
    "default_note": "hp_platform.failures.failures",
    "doing": "hp_platform.threads",
    "explained": "hp_platform.failures.failures",
    "failing_together": "hp_platform.failures.failures",
    "first_failure": "hp_platform.failures.failures",
    "float64_norms": "hp_platform.device",
    "give_up": "hp_platform.failures.failures",
    "initialize": "hp_platform.launch",
    "irecv": "hp_platform.collectives.p2p",
    "is_dry": "hp_platform.dry_device",
    "is_echo": "hp_platform.failures.failures",
    "is_no_failure": "hp_platform.failures.failures",
    "is_waited": "hp_platform.collectives.collectives",
    "isend": "hp_platform.collectives.p2p",
    "isend_irecv": "hp_platform.collectives.p2p",
    "launch_all_gather": "hp_platform.collectives.collectives",
    "launch_all_to_all": "hp_platform.collectives.collectives",
    "linear": "hp_platform.autograd",
    "local_device": "hp_platform.device",
    "mark_agreed": "hp_platform.failures.failures",
    "mark_place": "hp_platform.threads",
    "mesh_of": "hp_platform.groups",
    "new_group": "hp_platform.groups",
    "new_group_of_members": "hp_platform.groups",
    "new_groups": "hp_platform.groups",
    "on_one_rank": "hp_platform.failures.messages",
    "outside_graph": "hp_platform.autograd",
    "place_of": "hp_platform.threads",
    "put_off_weight_grad": "hp_platform.autograd",
    "raise_first": "hp_platform.failures.failures",
    "reduce_scatter_uneven": "hp_platform.collectives.collectives",
    "resolve_group": "hp_platform.groups",
    "set_fsdp_exchanges": "hp_platform.collectives.fsdp",
    "set_fsdp_frees_parameters": "hp_platform.collectives.fsdp",
    "set_fsdp_gather_dtype": "hp_platform.collectives.fsdp",
    "set_fsdp_hooks": "hp_platform.collectives.fsdp",
    "shutdown": "hp_platform.launch",
    "side_stream": "hp_platform.device",
    "start_all_to_all": "hp_platform.collectives.collectives",
    "submit_weight_grad": "hp_platform.autograd",
    "sync_hook": "hp_platform.autograd",
    "use_stream": "hp_platform.device",
    "wait_tensor": "hp_platform.collectives.collectives",
}
"""Module of each public name."""


if not TYPE_CHECKING:  # type checkers know the names from above

    def __getattr__(name: str) -> object:
        """Load the module of a public name, as `hp_base.lazy` does; hp-platform needs torch alone.

        Raises:
            AttributeError: When there is no such name.
        """
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """List all names, for `help` and completion."""
        return sorted({*globals(), *_HOMES})
