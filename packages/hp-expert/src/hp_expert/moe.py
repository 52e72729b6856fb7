"""A mixture-of-experts layer: router, experts, and an optional shared expert."""

from torch import Tensor, nn

from hp_expert.experts import GroupedExperts, autocast
from hp_expert.routing import Routing, TopKRouter


class MoE(nn.Module):
    """y = sum over a token's experts of weight * expert(x), plus shared(x).

    Args:
        router: Maps tokens [T, D] to a `Routing`.
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

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Apply the layer.

        Args:
            x: [B, S, D], or any dims before the last.

        Returns:
            y of the same shape, and the routing of the tokens in order [B * S, ...].
        """
        x_TD = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(x_TD)
        dispatcher = self.experts.dispatcher
        rows, state = dispatcher.prepare(autocast(x_TD), routing.experts, routing.weights)
        rows, state = dispatcher.launch_dispatch(rows, state)
        shared = None if self.shared is None else self.shared(x)
        batch = dispatcher.finish_dispatch(rows, state)
        rows = dispatcher.launch_combine(self.experts(batch), state)
        y = dispatcher.finish_combine(rows, state).view_as(x)
        return (y if shared is None else y + shared), routing
