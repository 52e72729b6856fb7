"""Layouts compared without running them: memory, time and traffic of every rank.

`modules` says what each module of the model has and does, and is the only place that knows;
`machine` what the hardware does; `memory` and `traffic` what a layout makes of them on one rank;
`estimate` lays the pipeline schedule over it; `choose` compares layouts. `measure` alone imports
torch, and hp-expert where experts are shared out.
"""

from hp_plan.costs.machine import MACHINES, Machine
from hp_plan.layouts.choose import Choice, choose
from hp_plan.price.estimate import Estimate
from hp_plan.price.gather import estimate
from hp_plan.price.traffic import Spread

__all__ = ["MACHINES", "Choice", "Estimate", "Machine", "Spread", "choose", "estimate"]
