"""Experts where some ranks have the same tokens, as tensor-parallel ranks of transformers have.

Note [Ranks with the same tokens]. Experts that ranks share must see each token once. Where several
of those ranks run the model on the same tokens, each sends a part of them, and what experts give is
put together behind them. The gradient of a token is there on the rank that has sent it, and is put
together in front. What a rank computes of experts is then of tokens of its own.

Shape symbols: T tokens, t of them on a rank, K experts per token, D width.
"""

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.dispatch.tensor_sliced import GatherSlices, Slice, even_sizes
from hp_platform import all_gather_uneven


def of_own_tokens(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: ProcessGroup,
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Call experts with this rank's part of the tokens.

    Args:
        forward: What experts compute, [t, D] to [t, D].
        group: The ranks with the same tokens.
        x_TD: [T, D], the same on all of these ranks.
        experts_TK: Experts of each token, int64 [T, K].
        weights_TK: What each counts [T, K].

    Returns:
        [T, D], the same on all of these ranks.
    """
    sizes = even_sizes(len(experts_TK), group.size())
    own = forward(
        Slice.apply(x_TD, sizes, group, _whole),
        experts_TK.split(sizes)[group.rank()],
        Slice.apply(weights_TK, sizes, group, _whole),
    )
    whole: Tensor = GatherSlices.apply(own, sizes, group, _whole)
    return whole


def _whole(x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
    return all_gather_uneven(x.contiguous(), sizes=sizes, group=group)
