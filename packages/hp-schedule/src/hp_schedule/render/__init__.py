"""Pictures of schedules and of their runs."""

from hp_schedule.render.svg import timeline_svg
from hp_schedule.render.timetable import step_grid, timetable
from hp_schedule.render.trace import chrome_trace

__all__ = ["chrome_trace", "step_grid", "timeline_svg", "timetable"]
