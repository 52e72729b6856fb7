"""Costs of layouts in memory and time, without running them, and the search for the best one."""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_plan.costs.machine import MACHINES, Machine
    from hp_plan.layouts.choose import Choice, choose
    from hp_plan.price.estimate import Estimate, estimate
    from hp_plan.price.traffic import Spread

__all__ = [
    "MACHINES",
    "Choice",
    "Estimate",
    "Machine",
    "Spread",
    "__version__",
    "choose",
    "estimate",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Choice": "hp_plan.layouts.choose",
        "Estimate": "hp_plan.price.estimate",
        "MACHINES": "hp_plan.costs.machine",
        "Machine": "hp_plan.costs.machine",
        "Spread": "hp_plan.price.traffic",
        "choose": "hp_plan.layouts.choose",
        "estimate": "hp_plan.price.estimate",
    },
)
