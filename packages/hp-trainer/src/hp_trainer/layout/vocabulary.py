"""Tiles of logits, where all of them would take too much memory at once. No torch.

Note [Logits in tiles]. The logits of a microbatch can be the largest tensor of a training: 4.6 GiB
at 8,192 tokens and a vocabulary of 151,936. Where they take more than `TILE_BYTES`, a tile of them
is there at a time: some rows of the output matrix for some tokens. What lies inside is the
vocabulary, so that a tile completes its rows of the weight gradient but for the other runs of
tokens, of which there are few; and only as many rows of the input gradient are added up at once as
a run has tokens.
"""

from typing import NamedTuple

LOSS = "loss"
"""What errors and dry runs say is being done there."""
WIDE_BYTES = 4
"""Of an element of what is never computed in less than fp32."""
TILE_BYTES = 64 << 20
"""Largest tile of logits, in the dtype of the loss."""
_TOKENS = 4096
_ALIGNED = 64
"""Rows of the output matrix that tiles begin at multiples of, for kernels."""


class LogitTile(NamedTuple):
    """Shape of a tile of logits.

    Attributes:
        tokens: Tokens of a tile; the last ones have fewer.
        rows: Rows of the output matrix, likewise.
    """

    tokens: int
    rows: int


def logit_tile(num_tokens: int, num_rows: int, *, size: int) -> LogitTile | None:
    """Return the shape of tiles; None: all logits are held. See Note [Logits in tiles].

    Args:
        num_tokens: Tokens of a microbatch whose logits a rank computes.
        num_rows: Rows of the output matrix that it has.
        size: Bytes of an element of activations; a loss is computed in fp32 or wider.
    """
    size = max(size, WIDE_BYTES)
    if num_tokens * num_rows * size <= TILE_BYTES:
        return None
    tokens = min(num_tokens, _TOKENS)
    most = TILE_BYTES // (tokens * size)
    rows = -(-num_rows // -(-num_rows // most))  # as many tiles of about the same size
    return LogitTile(tokens, min(-(-rows // _ALIGNED) * _ALIGNED, most))
