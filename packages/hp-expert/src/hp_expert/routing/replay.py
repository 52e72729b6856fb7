"""Checks of experts that were recorded elsewhere.

Shape symbols: T tokens, K experts per token, E experts.
"""

import torch
from torch import Tensor


def check_replay(replay: Tensor, *, num_tokens: int, top_k: int, num_experts: int) -> None:
    """Refuse a record that is not a routing, reading its values: on CUDA the host waits for it.

    `TopKRouter.route` calls it on the CPU. On CUDA it looks at shape and dtype alone; experts that
    do not exist are found by the dispatcher, which reads the host anyway.

    Args:
        replay: Experts of each token, -1 for none [T, K].
        num_tokens: Number of tokens, T.
        top_k: Number of experts per token, K.
        num_experts: Number of experts, E.

    Raises:
        ValueError: If it is not int64 [T, K], or an expert is not in [-1, E), or is there twice for
            one token.
    """
    check_replay_shape(replay, num_tokens=num_tokens, top_k=top_k)
    is_wrong = (replay < -1) | (replay >= num_experts)
    ordered = replay.sort(dim=1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    num_wrong, num_double = torch.stack([is_wrong.sum(), is_double.sum()]).tolist()
    if num_wrong:
        raise ValueError(
            f"replayed experts must be in [-1, num_experts ({num_experts})), but {num_wrong} are "
            "not"
        )
    if num_double:
        raise ValueError(
            f"replayed experts of a token must be distinct, but {num_double} are there before"
        )


def check_replay_shape(replay: Tensor, *, num_tokens: int, top_k: int) -> None:
    """Refuse a record of another shape or dtype; reads no values."""
    if replay.shape != (num_tokens, top_k) or replay.dtype != torch.int64:
        raise ValueError(
            f"replay ({tuple(replay.shape)}, {replay.dtype}) must be int64 and [num_tokens "
            f"({num_tokens}), top_k ({top_k})]"
        )
