"""Which experts a token goes to, and what keeps them equally busy."""

from hp_expert.routing.balance import sequence_balance_loss
from hp_expert.routing.router import Routing, TopKRouter

__all__ = ["Routing", "TopKRouter", "sequence_balance_loss"]
