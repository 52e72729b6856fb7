"""Experts under the names of Hugging Face's checkpoints, and stacked as modules hold them.

A module at `path` has stacked tensors, `path.gate_up_proj`; a checkpoint has a tensor for each
expert and projection, `path.7.gate_proj.weight`. Here are the names; other modules convert, load
and save.
"""

from dataclasses import dataclass, replace
from typing import Literal

Projection = Literal["gate", "up", "down"]

PROJECTIONS: dict[str, tuple[Projection, ...]] = {
    "w1": ("gate",),
    "w2": ("down",),
    "w3": ("up",),
    "b1": ("gate",),
    "b2": ("down",),
    "b3": ("up",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
    "gate_up_proj_bias": ("gate", "up"),
    "down_proj_bias": ("down",),
}
"""The projections in the rows of a stacked tensor, by its name."""
BIASES = {"b1", "b2", "b3", "gate_up_proj_bias", "down_proj_bias"}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the projections of experts in a family of checkpoints.

    Attributes:
        gate: Name of the gate projection.
        up: Name of the up projection.
        down: Name of the down projection.
        renamed: Pairs of a part of names in modules and its replacement in the checkpoint, applied
            one after the other.
        is_stacked: Whether the checkpoint has `gate_up_proj` and `down_proj`, stacked, instead.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()
    is_stacked: bool = False

    def file_key(self, key: str) -> str:
        """Return the name in a checkpoint of a tensor that a module calls `key`."""
        for mine, theirs in self.renamed:
            key = key.replace(mine, theirs)
        return key

    def module_key(self, key: str) -> str:
        """Return the name in a module of a tensor that a checkpoint calls `key`."""
        for mine, theirs in reversed(self.renamed):
            key = key.replace(theirs, mine)
        return key

    def expert_key(self, path: str, expert: int, projection: Projection, *, bias: bool) -> str:
        """Return the name of one projection of one expert in a checkpoint.

        Args:
            path: Path of the module that has the stacked tensors.
            expert: Index of the expert among all experts.
            projection: Projection of that expert.
            bias: Whether to name the bias instead of the weight.
        """
        kind = "bias" if bias else "weight"
        return f"{self.prefix(path)}{expert}.{getattr(self, projection)}.{kind}"

    def prefix(self, path: str) -> str:
        """Return the prefix of the names of a module's experts in a checkpoint."""
        return self.file_key(f"{path}.") if path else ""

    def stacked_key(self, path: str, projection: Projection, *, bias: bool) -> str:
        """Return the name of a stacked tensor in a checkpoint that has them."""
        name = "down_proj" if projection == "down" else "gate_up_proj"
        stacked = f"{name}{'_bias' if bias else ''}"
        return self.file_key(f"{path}.{stacked}" if path else stacked)


_W123 = ExpertNames(gate="w1", up="w3", down="w2")
_MIXTRAL = replace(_W123, renamed=((".mlp.", ".block_sparse_moe."),))
_PHIMOE = replace(
    _MIXTRAL,
    renamed=(*_MIXTRAL.renamed, (".block_sparse_moe.router.", ".block_sparse_moe.gate.")),
)
_ERNIE = ExpertNames(renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),))
_GRANITE = ExpertNames(
    renamed=(
        # In full, because names of shared experts contain `input_linear` as well.
        (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
        (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ),
    is_stacked=True,
)
_FAMILIES = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    "phimoe": _PHIMOE,
    "ernie4_5_moe": _ERNIE,
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "lfm2_moe": _W123,
}


def expert_names(model_type: str) -> ExpertNames:
    """Return the names of a model type of transformers (`model.config.model_type`).

    Unknown types get the names of most types: `path.7.gate_proj.weight`.
    """
    return _FAMILIES.get(model_type, ExpertNames())
