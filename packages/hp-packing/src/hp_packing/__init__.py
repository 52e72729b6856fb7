"""Steps planned from the lengths of their documents: microbatches, ranks and order.

`costs` are the costs of documents, and `learned` those of a model's own. `planning` makes a plan,
`plan` is its data, `pricing` its price, `proof` the proof that it runs, `bound` a lower bound of
all plans. `steps` trains by plans. `comparison` and `lengths` compare them with other rules.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_packing.bound import lower_bound
    from hp_packing.costs import Pipeline, StageCosts, StepCosts
    from hp_packing.learned import learned_costs, step_layout
    from hp_packing.plan import PlannedMicrobatch, StepPlan, from_text, to_text
    from hp_packing.planning.planner import Planner
    from hp_packing.pricing import StepPrice, price
    from hp_packing.proof import prove

__all__ = [
    "Pipeline",
    "PlannedMicrobatch",
    "Planner",
    "StageCosts",
    "StepCosts",
    "StepPlan",
    "StepPrice",
    "__version__",
    "from_text",
    "learned_costs",
    "lower_bound",
    "price",
    "prove",
    "step_layout",
    "to_text",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Pipeline": "hp_packing.costs",
        "PlannedMicrobatch": "hp_packing.plan",
        "Planner": "hp_packing.planning.planner",
        "StageCosts": "hp_packing.costs",
        "StepCosts": "hp_packing.costs",
        "StepPlan": "hp_packing.plan",
        "StepPrice": "hp_packing.pricing",
        "from_text": "hp_packing.plan",
        "learned_costs": "hp_packing.learned",
        "lower_bound": "hp_packing.bound",
        "price": "hp_packing.pricing",
        "prove": "hp_packing.proof",
        "step_layout": "hp_packing.learned",
        "to_text": "hp_packing.plan",
    },
)
