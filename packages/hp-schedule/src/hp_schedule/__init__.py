"""Pipeline schedules as data: generate, prove, simulate, draw and run (planning needs no torch).

A name loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_schedule.costs import Costs, ModelCosts, costs_from_json, costs_to_json
    from hp_schedule.executor import Driver, Executor, run_together
    from hp_schedule.generators import SCHEDULES
    from hp_schedule.generators.dualpipe import dualpipe_v
    from hp_schedule.generators.form import ClosedForm, ScheduleKind, closed_form
    from hp_schedule.generators.one_f_one_b import (
        forward_only,
        gpipe,
        interleaved_1f1b,
        looped_bfs,
        one_f_one_b,
    )
    from hp_schedule.generators.u_shape import u_shape
    from hp_schedule.generators.v_shape import v_half, v_min, zbv
    from hp_schedule.generators.zero_bubble import (
        grouped_interleaved,
        interleaved_zero_bubble,
        zero_bubble,
    )
    from hp_schedule.notation import from_csv, from_json, load, to_csv, to_json
    from hp_schedule.passes.communication import (
        add_send_recv,
        auto_align_and_add_send_recv,
        drop_communication,
    )
    from hp_schedule.passes.fitting import Fit, fit_memory
    from hp_schedule.passes.fsdp import add_fsdp_reduce_grad, add_fsdp_unshard_reshard
    from hp_schedule.passes.overlap import pair_overlap
    from hp_schedule.passes.retention import Retention, add_offload, add_recompute, drop_retention
    from hp_schedule.render import chrome_trace, step_grid, timeline_svg, timetable
    from hp_schedule.schedule import (
        DeadlockError,
        Row,
        Schedule,
        ScheduleError,
        generate_rank_to_stage_mapping,
        generate_stage_to_rank_mapping,
    )
    from hp_schedule.searching.construct import shorten
    from hp_schedule.searching.search import SearchResult, search
    from hp_schedule.simulation.channels import ChannelModel
    from hp_schedule.simulation.precedence import Path, Precedence, length
    from hp_schedule.simulation.simulate import Simulation, simulate
    from hp_schedule.steps import MetaStep, MetaStepType
    from hp_schedule.timeline import Span, Timeline, measured_costs
    from hp_schedule.transport import Message, MessageKind, Transport
    from hp_schedule.validation.report import Finding, FindingKind, Lacking, ValidationReport
    from hp_schedule.validation.validate import validate, validate_pipeline_execution

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

_HOMES = {
    "SCHEDULES": "hp_schedule.generators",
    "ChannelModel": "hp_schedule.simulation.channels",
    "ClosedForm": "hp_schedule.generators.form",
    "Costs": "hp_schedule.costs",
    "DeadlockError": "hp_schedule.schedule",
    "Driver": "hp_schedule.executor",
    "Executor": "hp_schedule.executor",
    "Finding": "hp_schedule.validation.report",
    "FindingKind": "hp_schedule.validation.report",
    "Fit": "hp_schedule.passes.fitting",
    "Lacking": "hp_schedule.validation.report",
    "Message": "hp_schedule.transport",
    "MessageKind": "hp_schedule.transport",
    "MetaStep": "hp_schedule.steps",
    "MetaStepType": "hp_schedule.steps",
    "ModelCosts": "hp_schedule.costs",
    "Path": "hp_schedule.simulation.precedence",
    "Precedence": "hp_schedule.simulation.precedence",
    "Retention": "hp_schedule.passes.retention",
    "Row": "hp_schedule.schedule",
    "Schedule": "hp_schedule.schedule",
    "ScheduleError": "hp_schedule.schedule",
    "ScheduleKind": "hp_schedule.generators.form",
    "SearchResult": "hp_schedule.searching.search",
    "Simulation": "hp_schedule.simulation.simulate",
    "Span": "hp_schedule.timeline",
    "Timeline": "hp_schedule.timeline",
    "Transport": "hp_schedule.transport",
    "ValidationReport": "hp_schedule.validation.report",
    "add_fsdp_reduce_grad": "hp_schedule.passes.fsdp",
    "add_fsdp_unshard_reshard": "hp_schedule.passes.fsdp",
    "add_offload": "hp_schedule.passes.retention",
    "add_recompute": "hp_schedule.passes.retention",
    "add_send_recv": "hp_schedule.passes.communication",
    "auto_align_and_add_send_recv": "hp_schedule.passes.communication",
    "chrome_trace": "hp_schedule.render",
    "closed_form": "hp_schedule.generators.form",
    "costs_from_json": "hp_schedule.costs",
    "costs_to_json": "hp_schedule.costs",
    "drop_communication": "hp_schedule.passes.communication",
    "drop_retention": "hp_schedule.passes.retention",
    "dualpipe_v": "hp_schedule.generators.dualpipe",
    "fit_memory": "hp_schedule.passes.fitting",
    "forward_only": "hp_schedule.generators.one_f_one_b",
    "from_csv": "hp_schedule.notation",
    "from_json": "hp_schedule.notation",
    "generate_rank_to_stage_mapping": "hp_schedule.schedule",
    "generate_stage_to_rank_mapping": "hp_schedule.schedule",
    "gpipe": "hp_schedule.generators.one_f_one_b",
    "grouped_interleaved": "hp_schedule.generators.zero_bubble",
    "interleaved_1f1b": "hp_schedule.generators.one_f_one_b",
    "interleaved_zero_bubble": "hp_schedule.generators.zero_bubble",
    "length": "hp_schedule.simulation.precedence",
    "load": "hp_schedule.notation",
    "looped_bfs": "hp_schedule.generators.one_f_one_b",
    "measured_costs": "hp_schedule.timeline",
    "one_f_one_b": "hp_schedule.generators.one_f_one_b",
    "pair_overlap": "hp_schedule.passes.overlap",
    "run_together": "hp_schedule.executor",
    "search": "hp_schedule.searching.search",
    "shorten": "hp_schedule.searching.construct",
    "simulate": "hp_schedule.simulation.simulate",
    "step_grid": "hp_schedule.render",
    "timeline_svg": "hp_schedule.render",
    "timetable": "hp_schedule.render",
    "to_csv": "hp_schedule.notation",
    "to_json": "hp_schedule.notation",
    "u_shape": "hp_schedule.generators.u_shape",
    "v_half": "hp_schedule.generators.v_shape",
    "v_min": "hp_schedule.generators.v_shape",
    "validate": "hp_schedule.validation.validate",
    "validate_pipeline_execution": "hp_schedule.validation.validate",
    "zbv": "hp_schedule.generators.v_shape",
    "zero_bubble": "hp_schedule.generators.zero_bubble",
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Load the module of a public name, as `hp_base.lazy` does; hp-schedule needs no package.

    Raises:
        AttributeError: If there is no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List all names, for `help` and completion."""
    return sorted({*globals(), *_HOMES})
