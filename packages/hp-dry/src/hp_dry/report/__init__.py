"""Report of a dry run: memory, work and traffic of classes of ranks, as data, text and a page.

It needs no torch, so that a stored trace can be read on any machine.
"""

from hp_dry.report.curve import curve_svg
from hp_dry.report.labels import add_labels
from hp_dry.report.page import page
from hp_dry.report.report import report
from hp_dry.report.summary import RankSummary, Saved, Summary, from_json, summarize, to_json
from hp_dry.report.traffic import Communicator, Count, Operation, Traffic, traffic_of
from hp_dry.report.usage import Block, Memory, Moment, Point, Span, memory_of
from hp_dry.report.work import Cell, Cost, Pace, Rates, WaitLine, Work, rates_of, work_of

__all__ = [
    "Block",
    "Cell",
    "Communicator",
    "Cost",
    "Count",
    "Memory",
    "Moment",
    "Operation",
    "Pace",
    "Point",
    "RankSummary",
    "Rates",
    "Saved",
    "Span",
    "Summary",
    "Traffic",
    "WaitLine",
    "Work",
    "add_labels",
    "curve_svg",
    "from_json",
    "memory_of",
    "page",
    "rates_of",
    "report",
    "summarize",
    "to_json",
    "traffic_of",
    "work_of",
]
