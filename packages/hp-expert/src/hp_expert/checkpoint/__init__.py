"""Experts under the names of Hugging Face's checkpoints, and stacked as modules hold them."""

from hp_expert.checkpoint.convert import from_hf, to_hf
from hp_expert.checkpoint.load import load_experts
from hp_expert.checkpoint.names import ExpertNames, expert_names
from hp_expert.checkpoint.parts import StackedPart, stacked_parts
from hp_expert.checkpoint.save import save_experts

__all__ = [
    "ExpertNames",
    "StackedPart",
    "expert_names",
    "from_hf",
    "load_experts",
    "save_experts",
    "stacked_parts",
    "to_hf",
]
