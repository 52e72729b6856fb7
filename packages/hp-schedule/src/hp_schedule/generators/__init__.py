"""Schedules from their closed forms; compute steps only, `add_send_recv` adds the messages.

Every module of this package is imported here, whatever it is called, and what it defines with
`schedule_kind` is a schedule everywhere.
"""

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from hp_schedule.generators.form import REGISTERED, ScheduleKind

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    kind.name: kind for kind in sorted(REGISTERED, key=lambda kind: (kind.order, kind.name))
}
"""All schedules by name, in the order of lists; 1F1B as people write it."""
