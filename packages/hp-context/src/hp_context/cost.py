"""How many bytes a rank sends to others in one attention, by mode; tests hold exchanges to it.

In every mode each rank sends the same number, up to the heads of `head_to_seq` that a rank keeps.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, d Ulysses degree, n = N / d ranks that
gather keys, H query heads, G key/value heads, g key/value heads a rank computes with, D head size
of queries and keys, E head size of values.
"""

from typing import NamedTuple

import torch

from hp_context.heads import kv_heads_per_rank, legal_degrees


class ExchangedBytes(NamedTuple):
    """What one rank sends to the others.

    Attributes:
        forward: Bytes.
        backward: Bytes.
    """

    forward: int
    backward: int


def exchanged_bytes(
    *,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_ranks: int,
    ulysses_degree: int | None = None,
    value_size: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    gathers_again: bool = True,
) -> ExchangedBytes:
    """Return what a mode of `ContextParallel` sends, to choose one by.

    The exchange of heads sends, in either direction, of B*s positions

        (d - 1) / d * (H*D + d*g*(D + E) + H*E)   elements: q, k and v, the output.

    Gathering keys sends the g heads of B*s*d positions to n - 1 ranks: (n - 1) * g * (D + E) in
    forward, the same again in backward, and the gradients home in float32 or wider. For G divisible
    by d and D = E, all-gather K/V sends less than Ulysses forward where N < 1 + H / G.

    Args:
        seq_len: S.
        num_heads: H.
        num_kv_heads: G.
        head_size: D.
        num_ranks: N.
        ulysses_degree: d; None is N, as in `ContextParallel`.
        value_size: E; None is D.
        batch_size: B.
        dtype: Of q, k and v.
        gathers_again: Whether backward gathers keys and values again, as for an
            `hp_context.Attention`. For any other core attention they are kept, and it does not.

    Raises:
        ValueError: The heads, the ranks or the sequence cannot be divided so.
    """
    degree = num_ranks if ulysses_degree is None else ulysses_degree
    value_size = head_size if value_size is None else value_size
    _check(seq_len, num_heads, num_kv_heads, num_ranks, degree)
    width = dtype.itemsize
    wide = torch.promote_types(dtype, torch.float32).itemsize
    positions = batch_size * seq_len // num_ranks
    local_kv_heads = kv_heads_per_rank(num_heads, num_kv_heads, degree)
    key_and_value = head_size + value_size
    row = num_heads * key_and_value + degree * local_kv_heads * key_and_value
    heads = positions * row * (degree - 1) // degree * width
    keys = positions * (num_ranks - degree) * local_kv_heads * key_and_value
    again = width if gathers_again else 0
    return ExchangedBytes(heads + keys * width, heads + keys * (again + wide))


def _check(seq_len: int, num_heads: int, num_kv_heads: int, num_ranks: int, degree: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
    if degree < 1 or num_ranks % degree:
        raise ValueError(f"ulysses_degree ({degree}) must divide the number of ranks ({num_ranks})")
    if num_heads % degree:
        raise ValueError(
            f"ulysses_degree ({degree}) must divide num_heads ({num_heads}); legal degrees: "
            f"{legal_degrees(num_heads)}"
        )
    if seq_len % num_ranks:
        raise ValueError(
            f"sequence length ({seq_len}) must be divisible by the number of ranks ({num_ranks}); "
            f"pad it by {-seq_len % num_ranks}"
        )
