"""Which experts a token goes to, and what keeps them equally busy."""

from hp_expert.routing.balance import (
    document_balance_loss,
    global_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)
from hp_expert.routing.correction import (
    load_imbalance,
    register_correction_bias_update,
    take_loads,
    update_correction_biases,
)
from hp_expert.routing.recompute import save_routing
from hp_expert.routing.replay import check_replay
from hp_expert.routing.router import Routing, TopKRouter

__all__ = [
    "Routing",
    "TopKRouter",
    "check_replay",
    "document_balance_loss",
    "global_balance_loss",
    "load_imbalance",
    "register_correction_bias_update",
    "router_z_loss",
    "save_routing",
    "sequence_balance_loss",
    "take_loads",
    "update_correction_biases",
]
