"""A failure inside a layer on one rank: all ranks end, and say which rank, where and why."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform import PeerError, failing_together, initialize, new_group
from hp_platform.testing import run_distributed

DIM, EXPERTS, WORLD = 8, 6, 3
FAILS = 1


class Unlucky(nn.Module):
    """Fails in forward or in backward."""

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if not self.backward:
            raise MemoryError("no room")
        y = x * 1.0
        y.register_hook(_no_room)
        return y


def _no_room(_gradient: Tensor) -> Tensor:
    raise MemoryError("no room")


def _layer(shared: nn.Module | None = None) -> MoE:
    torch.manual_seed(0)
    router = TopKRouter(DIM, EXPERTS, top_k=2)
    return MoE(router, GroupedExperts(EXPERTS, DIM, 16), shared)


def _break(layer: MoE, where: str) -> None:
    """Have one rank fail at a place."""
    if where == "router":
        layer.router.register_forward_pre_hook(lambda *_: Unlucky()(torch.ones(1)))
    elif where == "experts":
        layer.experts.register_forward_pre_hook(lambda *_: Unlucky()(torch.ones(1)))
    elif where == "backward of experts":
        broken = Unlucky(backward=True)
        layer.experts.register_forward_hook(lambda _module, _args, y: broken(y))


def _fail(where: str) -> tuple[str, str]:
    runtime = initialize()
    group = new_group([range(WORLD)], name="ep", timeout=timedelta(seconds=60))
    assert group is not None
    rank = runtime.info.rank
    is_shared = where == "shared expert"
    shared: nn.Module | None = nn.Identity() if is_shared else None
    layer = _layer(Unlucky() if is_shared and rank == FAILS else shared)
    ExpertParallel().apply(layer, group)
    if rank == FAILS:
        _break(layer, where)
    kind: Any = MemoryError if rank == FAILS else PeerError
    with pytest.raises(kind) as caught:
        _step(layer)
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    return type(caught.value).__name__, f"{caught.value} {notes}"


def _step(layer: MoE) -> None:
    with failing_together("step 7"):
        y, _ = layer(torch.ones(4, 5, DIM, requires_grad=True))
        y.sum().backward()


@pytest.mark.parametrize("where", ["router", "experts", "shared expert", "backward of experts"])
def test_every_rank_ends_and_names_the_one_that_failed(where: str) -> None:
    said = run_distributed(_fail, where, world_size=WORLD, timeout=45)
    place = "step 7" if where == "backward of experts" else f"step 7, {where}"
    for rank, (kind, text) in enumerate(said):
        if rank == FAILS:
            assert (kind, "no room" in text) == ("MemoryError", True)
        elif where == "router":
            begin = (
                "rank 1 failed before the exchange of rows between experts: MemoryError: no room"
            )
            assert text.startswith(f"{begin} (in {place})"), text
        else:
            assert text.startswith(f"rank 1, {place}: MemoryError: no room"), text


def _go_on_after_a_refusal() -> float:
    initialize()
    group = new_group([range(WORLD)], name="ep")
    assert group is not None
    layer = _layer()
    ExpertParallel().apply(layer, group)
    handle = layer.router.register_forward_pre_hook(lambda *_: Unlucky()(torch.ones(1)))
    with pytest.raises((MemoryError, PeerError)):
        _step(layer)
    handle.remove()
    return float(layer(torch.ones(4, 5, DIM))[0].detach().sum())


def test_a_router_that_fails_leaves_the_groups_usable() -> None:
    expected = float(_layer()(torch.ones(4, 5, DIM))[0].detach().sum())
    assert (
        run_distributed(_go_on_after_a_refusal, world_size=WORLD)
        == [pytest.approx(expected, rel=1e-6)] * WORLD
    )
