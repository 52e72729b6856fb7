"""A mixture-of-experts layer: router, experts, and an optional shared expert."""

from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from hp_expert.dispatch import Dispatcher
from hp_expert.experts import GroupedExperts, autocast
from hp_expert.routing import Routing, TopKRouter
from hp_platform import PeerError


class MoE(nn.Module):
    """y = sum over a token's experts of weight * expert(x), plus shared(x).

    Args:
        router: Maps tokens to a `Routing`.
        experts: Where they go.
        shared: Every token goes through it as well; computed while rows travel.
    """

    def __init__(
        self, router: TopKRouter, experts: GroupedExperts, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"num_experts of the router ({router.num_experts}) must equal that of the experts "
                f"({experts.num_experts})"
            )
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor, *, replay: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Apply the layer.

        Args:
            x: [B, S, D], or any dims before the last two; what a router drops, it drops per
                sequence of S tokens. [S, D] is one sequence.
            replay: Experts to take instead of the router's, int64 [T, K] for the T tokens in order
                [B * S, ...]; see `TopKRouter.route`.

        Returns:
            y of the same shape, and the routing of the tokens in order [B * S, ...].

        Raises:
            ValueError: If the input is wrong.
            hp_platform.PeerError: If that of another rank is.
        """
        dispatcher = self.experts.dispatcher
        x_TD = x.reshape(-1, x.shape[-1])
        try:
            # Of the rows, not of x: their gradients are added before that of the shared expert.
            routing: Routing = self.router(x_TD.view(x.shape), replay=replay)
        except Exception:
            _refuse(dispatcher, x_TD)
            raise
        rows, state = dispatcher.prepare(autocast(x_TD), routing.experts, routing.weights)
        rows, state = dispatcher.launch_dispatch(rows, state)
        shared = None if self.shared is None else self.shared(x)
        batch = dispatcher.finish_dispatch(rows, state)
        rows = dispatcher.launch_combine(self.experts(batch), state)
        y = dispatcher.finish_combine(rows, state).view_as(x)
        return (y if shared is None else y + shared), routing


def _refuse(dispatcher: Dispatcher[Any], x_TD: Tensor) -> None:
    """Tell the other ranks, which are about to exchange rows, by an input that is refused."""
    with suppress(ValueError, PeerError):
        dispatcher.launch_dispatch(*dispatcher.prepare(x_TD, x_TD.new_empty(0, 0, 0)))
