"""Pipeline schedules as data: generate, prove, simulate, draw and run (planning needs no torch)."""

from typing import TYPE_CHECKING

from hp_schedule.costs import Costs, ModelCosts
from hp_schedule.errors import DeadlockError, ScheduleError
from hp_schedule.executor import Driver, Executor, run_together
from hp_schedule.generators import SCHEDULES
from hp_schedule.generators.building_blocks import v_half, v_min
from hp_schedule.generators.dualpipe import dualpipe_v
from hp_schedule.generators.form import ClosedForm
from hp_schedule.generators.forward import forward_only
from hp_schedule.generators.gpipe import gpipe, looped_bfs
from hp_schedule.generators.interleaved import interleaved_1f1b
from hp_schedule.generators.one_f_one_b import one_f_one_b
from hp_schedule.generators.registry import ScheduleKind, closed_form
from hp_schedule.generators.u_shape import u_shape
from hp_schedule.generators.zbv import zbv
from hp_schedule.generators.zero_bubble import (
    grouped_interleaved,
    interleaved_zero_bubble,
    zero_bubble,
)
from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.measured import measured_costs
from hp_schedule.notation import from_csv, from_json, load, to_csv, to_json
from hp_schedule.passes import (
    Retention,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_offload,
    add_recompute,
    add_send_recv,
    auto_align_and_add_send_recv,
    drop_communication,
    drop_retention,
    pair_overlap,
)
from hp_schedule.passes.fitting import Fit, fit_memory
from hp_schedule.placement import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from hp_schedule.profiles import costs_from_json, costs_to_json
from hp_schedule.render import chrome_trace, step_grid, timeline_svg, timetable
from hp_schedule.schedule import Row, Schedule
from hp_schedule.simulation import ChannelModel, Path, Precedence, Simulation, length, simulate
from hp_schedule.timeline import Span, Timeline
from hp_schedule.transport import Message, MessageKind, Transport
from hp_schedule.validation import (
    Finding,
    FindingKind,
    Lacking,
    ValidationReport,
    validate,
    validate_pipeline_execution,
)

if TYPE_CHECKING:
    from hp_schedule.searching import SearchResult, search, shorten

__all__ = [
    "SCHEDULES",
    "ChannelModel",
    "ClosedForm",
    "Costs",
    "DeadlockError",
    "Driver",
    "Executor",
    "Finding",
    "FindingKind",
    "Fit",
    "Lacking",
    "Message",
    "MessageKind",
    "MetaStep",
    "MetaStepType",
    "ModelCosts",
    "Path",
    "Precedence",
    "Retention",
    "Row",
    "Schedule",
    "ScheduleError",
    "ScheduleKind",
    "SearchResult",
    "Simulation",
    "Span",
    "Timeline",
    "Transport",
    "ValidationReport",
    "__version__",
    "add_fsdp_reduce_grad",
    "add_fsdp_unshard_reshard",
    "add_offload",
    "add_recompute",
    "add_send_recv",
    "auto_align_and_add_send_recv",
    "chrome_trace",
    "closed_form",
    "costs_from_json",
    "costs_to_json",
    "drop_communication",
    "drop_retention",
    "dualpipe_v",
    "fit_memory",
    "forward_only",
    "from_csv",
    "from_json",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "gpipe",
    "grouped_interleaved",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "length",
    "load",
    "looped_bfs",
    "measured_costs",
    "one_f_one_b",
    "pair_overlap",
    "run_together",
    "search",
    "shorten",
    "simulate",
    "step_grid",
    "timeline_svg",
    "timetable",
    "to_csv",
    "to_json",
    "u_shape",
    "v_half",
    "v_min",
    "validate",
    "validate_pipeline_execution",
    "zbv",
    "zero_bubble",
]
__version__ = "0.1.0"

_OF_SEARCHING = frozenset(("SearchResult", "search", "shorten"))


def __getattr__(name: str) -> object:
    """Load the search when somebody asks for it: whoever runs a schedule needs none of it.

    Raises:
        AttributeError: When there is no such name.
    """
    if name in _OF_SEARCHING:
        from hp_schedule import searching  # noqa: PLC0415 - on demand

        return getattr(searching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
