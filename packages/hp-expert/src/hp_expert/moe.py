"""A mixture-of-experts layer: router, experts, and an optional shared expert.

A layer reads on the host how many rows each expert and each rank gets, and sizes its tensors by
these numbers, which no graph of `torch.compile` can contain. So graphs are cut exactly here: the
router and everything around the layer are compiled, and the part between the routing and the sum of
the outputs runs without a compiler. There is one such part in each layer, and two with a shared
expert, which is compiled as well and runs while rows travel. These parts do not depend on the
graphs: another number of tokens compiles nothing anew.
"""

from torch import Tensor, nn

from hp_expert.batch import LocalDispatcher
from hp_expert.dispatch import (
    dispatching,
    groups_of,
    refuse,
    rows_for,
    through_experts,
)
from hp_expert.experts.module import GroupedExperts
from hp_expert.routing.router import Routing, TopKRouter
from hp_platform import doing, failing_together, mark_place, outside_graph, raise_first


class MoE(nn.Module):
    """y = sum over a token's experts of weight * expert(x), plus shared(x).

    Args:
        router: Module that maps tokens to a `Routing`.
        experts: Experts of the layer, on this rank and others.
        shared: Shared expert, which every token goes through as well; computed while rows travel.
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

    def forward(
        self, x: Tensor, *, replay: Tensor | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Apply the layer.

        Args:
            x: Tokens [B, S, D], or any dims before the last two; [S, D] is one sequence. A router
                with a capacity drops slots per sequence of S tokens.
            replay: Experts to take instead of the router's choice, int64 [T, K] for the T = B * S
                tokens; see `TopKRouter.route`.
            padding: Tokens that go to no expert and are not counted, bool [B, S]; None: none. The
                shared expert computes them as any other.

        Returns:
            y of the shape and dtype of x, and the routing of the T tokens. Under `torch.autocast`
            the experts multiply in its dtype and the sum over a token's experts is fp32 or wider;
            between ranks rows travel in the dtype of autocast.

        Raises:
            ValueError: If the input is wrong.
            hp_platform.PeerError: If the input of another rank is wrong, or anything else fails
                there: with rank, place and error of the first failure.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        try:
            # A view of the rows, not x: their gradients are added before that of the shared expert.
            options = {} if padding is None else {"padding": padding}
            routing: Routing = self.router(x_TD.view(x.shape), replay=replay, **options)
        except Exception as error:
            _refuse(self.experts, x_TD, error)
            raise
        if self.shared is None:
            return _through_experts(self.experts, x_TD, routing, x), routing
        rows, state = _send(self.experts, x_TD, routing)
        try:
            shared = self.shared(x)
        except Exception as error:
            _give_up(self.experts, error)
            raise
        return _receive(self.experts, rows, state, x, shared), routing


@outside_graph
def _through_experts(
    experts: GroupedExperts, x_TD: Tensor, routing: Routing, like: Tensor
) -> Tensor:
    """Bring tokens to their experts, apply those, and sum their outputs in the shape of `like`."""
    dispatcher = experts.dispatcher
    if type(dispatcher) is LocalDispatcher:  # no other rank waits, or must learn of errors
        place = "dispatch"
        try:
            _, batch = dispatcher.prepare(x_TD, routing.experts, routing.weights)
            place = "experts"
            y: Tensor = experts(batch)
        except Exception as error:
            mark_place(error, place)
            raise
        return y.view_as(like)
    with dispatching(dispatcher):
        rows = rows_for(dispatcher, x_TD)
        rows, state = dispatcher.prepare(rows, routing.experts, routing.weights)
    return through_experts(dispatcher, experts, rows, state).view_as(like).to(like.dtype)


@outside_graph
def _send(experts: GroupedExperts, x_TD: Tensor, routing: Routing) -> tuple[Tensor, object]:
    dispatcher = experts.dispatcher
    with dispatching(dispatcher):
        rows = rows_for(dispatcher, x_TD)
        rows, state = dispatcher.prepare(rows, routing.experts, routing.weights)
    return dispatcher.launch_dispatch(rows, state)


@outside_graph
def _receive(
    experts: GroupedExperts, rows: Tensor, state: object, like: Tensor, shared: Tensor
) -> Tensor:
    dispatcher = experts.dispatcher
    with failing_together(groups=groups_of(dispatcher)):
        batch = dispatcher.finish_dispatch(rows, state)
        with doing("experts"):
            y = experts(batch)
        rows = dispatcher.launch_combine(y, state)
        # The few operators that follow stay here, or they would become a graph of their own.
        y = dispatcher.finish_combine(rows, state).view_as(like).to(like.dtype)
        return y + shared


@outside_graph
def _refuse(experts: GroupedExperts, x_TD: Tensor, error: Exception) -> None:
    mark_place(error, "router")
    refuse(experts.dispatcher, x_TD, error)


@outside_graph
def _give_up(experts: GroupedExperts, error: Exception) -> None:
    """Tell the other ranks, which wait for rows, of an error in the shared expert."""
    mark_place(error, "shared expert")
    raise_first(error, groups_of(experts.dispatcher))
