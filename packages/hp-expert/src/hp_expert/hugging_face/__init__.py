"""Models of Hugging Face's transformers: their experts over ranks, and their routing replayed."""

from hp_expert.hugging_face.apply import apply_to_transformers, register_with_transformers
from hp_expert.hugging_face.replay import RoutingRecord, record_routing, replay_routing

__all__ = [
    "RoutingRecord",
    "apply_to_transformers",
    "record_routing",
    "register_with_transformers",
    "replay_routing",
]
