"""Along which dim ranks share out a parameter, by its name. No torch."""

import re

HIDDEN_DIM = {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1}
"""Which dim of an expert's parameter is its hidden width."""

_CUTS = {
    "embedding.weight": 0,
    "output.weight": 0,
    **{f"attention.{w}.{p}": 0 for w in ("wq", "wk", "wv") for p in ("weight", "bias")},
    "attention.core.sinks": 0,
    "attention.wq_b.weight": 0,
    "attention.wkv_b.weight": 0,
    "attention.wo.weight": 1,
    "feed_forward.w1.weight": 0,
    "feed_forward.w3.weight": 0,
    "feed_forward.w2.weight": 1,
}

_OF_A_BLOCK = re.compile(r"^(layers\.\d+|mtp\.\d+\.block)\.")


def chunk(whole: range, num_chunks: int, index: int) -> range:
    """One of the chunks of consecutive indices that `torch.chunk` makes; the last may be empty."""
    size = -(-len(whole) // num_chunks)
    return whole[size * index : size * (index + 1)]


def cut_dim(name: str) -> int | None:
    """The dim along which tensor-parallel ranks share out a parameter, None if each has all of it.

    Args:
        name: Global name of the parameter.
    """
    return _CUTS.get(name_in_block(name))


def name_in_block(name: str) -> str:
    """The name of a parameter less its layer's, as the module of a layer has it."""
    return _OF_A_BLOCK.sub("", name)
