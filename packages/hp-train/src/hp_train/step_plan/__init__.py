"""What a step runs, planned from the lengths of its documents: microbatches, ranks and order.

`costs` tells what documents cost, and `learned` what they cost a model; `partition` which of them
share a microbatch; `planner` makes the plan, by `templates`; `plan` is it, as data; `proof` says
that it runs, `price` how long it takes, and `bound` how long any takes. `rivals` are plans by other
rules, `generators` draws lengths, `comparison` compares, and `percentiles` are of many steps.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_train.step_plan.bound import lower_bound
    from hp_train.step_plan.costs import StageCosts, StepCosts
    from hp_train.step_plan.learned import learned_costs, step_layout
    from hp_train.step_plan.plan import PlannedMicrobatch, StepPlan, from_text, to_text
    from hp_train.step_plan.planner import Planner
    from hp_train.step_plan.price import StepPrice, price
    from hp_train.step_plan.proof import prove
    from hp_train.step_plan.work import Pipeline

__all__ = [
    "Pipeline",
    "PlannedMicrobatch",
    "Planner",
    "StageCosts",
    "StepCosts",
    "StepPlan",
    "StepPrice",
    "from_text",
    "learned_costs",
    "lower_bound",
    "price",
    "prove",
    "step_layout",
    "to_text",
]

__getattr__ = lazily(
    __name__,
    {
        "Pipeline": "hp_train.step_plan.work",
        "PlannedMicrobatch": "hp_train.step_plan.plan",
        "Planner": "hp_train.step_plan.planner",
        "StageCosts": "hp_train.step_plan.costs",
        "StepCosts": "hp_train.step_plan.costs",
        "StepPlan": "hp_train.step_plan.plan",
        "StepPrice": "hp_train.step_plan.price",
        "from_text": "hp_train.step_plan.plan",
        "learned_costs": "hp_train.step_plan.learned",
        "lower_bound": "hp_train.step_plan.bound",
        "price": "hp_train.step_plan.price",
        "prove": "hp_train.step_plan.proof",
        "step_layout": "hp_train.step_plan.learned",
        "to_text": "hp_train.step_plan.plan",
    },
)
