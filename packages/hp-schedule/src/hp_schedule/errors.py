"""The errors of schedules.

ValueError
    ScheduleError       a schedule that must not run
        DeadlockError   its ranks wait for each other
"""


class ScheduleError(ValueError):
    """A schedule breaks a rule; the message names the cell and shows the timetable around it."""


class DeadlockError(ScheduleError):
    """The ranks of a schedule wait for each other, or for something that never happens."""
