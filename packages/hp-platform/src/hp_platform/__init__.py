"""Devices, process groups and differentiable collectives over torch.distributed, fully typed."""

from hp_platform.autograd.graphs import outside_graph, sync_hook
from hp_platform.autograd.weight_grads import (
    WeightGradQueue,
    linear,
    put_off_weight_grad,
    submit_weight_grad,
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
    set_fsdp_hooks,
)
from hp_platform.collectives.narrow import set_fsdp_gather_dtype
from hp_platform.collectives.p2p import irecv, isend, isend_irecv
from hp_platform.collectives.pending import Pending
from hp_platform.device.device import backend_for, local_device
from hp_platform.device.float64 import float64_norms
from hp_platform.device.streams import Event, current_stream, side_stream, use_stream
from hp_platform.failures.agreement import agree
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
from hp_platform.failures.messages import all_gather_json, on_one_rank
from hp_platform.groups import (
    mesh_of,
    new_group,
    new_group_of_members,
    new_groups,
    resolve_group,
)
from hp_platform.host_reads import is_dry
from hp_platform.launch import RankInfo, Runtime, initialize, shutdown
from hp_platform.threads.context import ThreadContext
from hp_platform.threads.places import doing, mark_place, place_of

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
