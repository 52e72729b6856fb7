"""A mixture-of-experts layer: router, experts, and an optional shared expert.

Note [Outside the graph]. A layer reads on the host how many rows each expert and each rank gets,
and sizes its tensors by that, which no graph of `torch.compile` can contain. So graphs are cut
exactly here: the router and all that surrounds the layer are compiled, and what lies between the
routing and the sum of the outputs runs as without a compiler. That is one region for each layer;
with a shared expert, which is compiled as well and runs while rows travel, it is two. Nothing in
them depends on what was compiled: another number of tokens compiles nothing anew.
"""

from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from hp_expert.experts import GroupedExperts, autocast
from hp_expert.routing import Routing, TopKRouter
from hp_platform import PeerError, outside_graph


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
        x_TD = x.reshape(-1, x.shape[-1])
        try:
            # Of the rows, not of x: their gradients are added before that of the shared expert.
            routing: Routing = self.router(x_TD.view(x.shape), replay=replay)
        except Exception:
            _refuse(self.experts, x_TD)
            raise
        if self.shared is None:
            return _through_experts(self.experts, x_TD, routing, x), routing
        rows, state = _send(self.experts, x_TD, routing)
        shared = self.shared(x)
        return _receive(self.experts, rows, state, x, shared), routing


@outside_graph
def _through_experts(
    experts: GroupedExperts, x_TD: Tensor, routing: Routing, like: Tensor
) -> Tensor:
    """Bring tokens to their experts, apply those, and sum their outputs in the shape of `like`."""
    rows, state = _send(experts, x_TD, routing)
    return _receive(experts, rows, state, like)


@outside_graph
def _send(experts: GroupedExperts, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Any]:
    dispatcher = experts.dispatcher
    rows, state = dispatcher.prepare(autocast(x_TD), routing.experts, routing.weights)
    return dispatcher.launch_dispatch(rows, state)


@outside_graph
def _receive(
    experts: GroupedExperts, rows: Tensor, state: Any, like: Tensor, shared: Tensor | None = None
) -> Tensor:
    dispatcher = experts.dispatcher
    batch = dispatcher.finish_dispatch(rows, state)
    rows = dispatcher.launch_combine(experts(batch), state)
    # What little follows stays here, or it would make up a graph of its own.
    y = dispatcher.finish_combine(rows, state).view_as(like)
    return y if shared is None else y + shared


@outside_graph
def _refuse(experts: GroupedExperts, x_TD: Tensor) -> None:
    """Tell the other ranks, which are about to exchange rows, by an input that is refused."""
    dispatcher = experts.dispatcher
    with suppress(ValueError, PeerError):
        dispatcher.launch_dispatch(*dispatcher.prepare(x_TD, x_TD.new_empty(0, 0, 0)))
