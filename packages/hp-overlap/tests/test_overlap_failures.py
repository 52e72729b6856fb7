"""A side that fails on one rank: both sides end on every rank, and the rank is named."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_overlap import CommComputeOverlap, HookCoordinator
from hp_platform import PeerError, all_to_all_lazy, failing_together, initialize, new_group
from hp_platform.testing import run_distributed

WORLD, FAILS, LAYERS = 3, 1, 3


def _fail(side: str) -> tuple[str, str, int]:
    """Run a pair whose sides exchange in every layer; one of them fails on one rank."""
    initialize()
    group = new_group([range(WORLD)], name="ep", timeout=timedelta(seconds=60))
    assert group is not None
    # A time-out after which nobody could tell the failure from a hang.
    overlap = CommComputeOverlap(HookCoordinator(timeout=60))
    dispatch = overlap.wrap_dispatch(lambda x: all_to_all_lazy(x, group=group))
    combine = overlap.wrap_combine(lambda x: all_to_all_lazy(x, group=group))

    def unlucky(where: str, layer: int) -> None:
        if where == side and layer == 1 and dist.get_rank() == FAILS:
            raise MemoryError("no room")

    def unlucky_gradient(layer: int, _gradient: Tensor) -> None:
        unlucky("backward", layer)

    def chunk(x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            unlucky("forward", layer)
            x = combine(dispatch(x * 1.0) + 1.0) * 2.0
        return x

    y = torch.ones(WORLD, 2, requires_grad=True)
    for layer in range(LAYERS):
        y = combine(dispatch(y * 1.0) + 1.0) * 2.0
        y.register_hook(partial(unlucky_gradient, layer))
    loss = y.sum()
    try:
        with failing_together("step 2"):
            overlap.run(lambda: chunk(torch.ones(WORLD, 2, requires_grad=True)), loss.backward)
    except (MemoryError, RuntimeError) as error:
        helpers = [thread.name for thread in threading.enumerate() if "overlap" in thread.name]
        return type(error).__name__, str(error), len(helpers)
    return "nothing", "", 0


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_every_rank_ends_both_sides_and_names_the_one_that_failed(side: str) -> None:
    said = run_distributed(_fail, side, world_size=WORLD, timeout=30)
    for rank, (kind, text, helpers) in enumerate(said):
        assert helpers == 0
        if rank == FAILS:
            assert (kind, text) == ("MemoryError", "no room")
        else:
            assert kind == PeerError.__name__
            assert text.startswith("rank 1, step 2: MemoryError: no room")
