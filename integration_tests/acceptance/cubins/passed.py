"""Which dtypes the packages really pass to their kernels, so that those are what is compiled.

Layers of every kind run forward and backward on a device that computes nothing, where launches of
kernels are written down. That needs no Triton.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hp_dry import run_ranks
from hp_expert import (
    AllToAllDispatcher,
    BoundedAllToAllDispatcher,
    ClampedSwiGLU,
    ExpertParallel,
    GroupedExperts,
    MoE,
    TopKRouter,
    gather_slots,
    sort_by_expert,
    sum_slots,
)
from hp_expert.kernels import (
    triton_activation,
    triton_buffers,
    triton_routing,
    triton_rows,
    triton_sorting,
)
from hp_plan.costs.routing import parse_skew
from hp_platform import initialize
from hp_platform.dry_device import answering
from hp_train.dry_run.answers import Answers
from hp_trainer.config.options import resolve

_BACKWARD = "activate_backward bfloat16 bfloat16 bfloat16 float32"
PASSED = {
    "activate bfloat16 bfloat16 bfloat16 int64",
    f"{_BACKWARD} bfloat16 bfloat16 bfloat16 int32 int32 float32 -",
    f"{_BACKWARD} bfloat16 bfloat16 bfloat16 int64 int64 float32 -",
    f"{_BACKWARD} bfloat16 bfloat16 bfloat16 int64 int64 float32 float32",
    "count int32 int32",
    "count int32 int64",
    "decode int64 int64 int32 int64",
    "decode int64 int64 uint8 int64",
    "encode int32 int64 int64",
    "encode uint8 int64 int32",
    "encode uint8 int64 int64",
    "fill int64 int64 int64 int32 int64",
    "find_ranks int64 int32 int32",
    "find_ranks int64 int32 int64",
    "gather_rows bfloat16 bfloat16 int32",
    "gather_rows bfloat16 bfloat16 int64",
    "gather_rows float32 float32 int32",
    "gather_rows float32 float32 int64",
    "gather_values float32 float32 int32",
    "gather_values float32 float32 int64",
    "place int64 int64 int64 int32 int32",
    "place int64 int64 int64 int32 int64",
    "route float32 float32 int64 float32 - -",
    "route_backward float32 int64 float32 - float32 int64",
    "scan int32 int64 int32 int32",
    "sort_received int64 int64 int32 int64 bfloat16 int64 int64 float32",
    "sort_received int64 int64 int32 int64 float32 int64 int64 float32",
    "sum_rows bfloat16 bfloat16 - int64 -",
    "sum_rows bfloat16 bfloat16 - int64 float32",
    "sum_rows bfloat16 bfloat16 bfloat16 int64 -",
    "sum_rows float32 bfloat16 - int64 -",
    "sum_rows float32 bfloat16 - int64 float32",
    "sum_rows float32 float32 - int32 -",
    "sum_rows float32 float32 - int32 float32",
    "sum_rows float32 float32 - int64 -",
    "sum_rows float32 float32 - int64 float32",
    "sum_rows_backward bfloat16 float32 bfloat16 bfloat16 int64 float32",
    "sum_rows_backward float32 float32 float32 float32 int64 float32",
    "tell int64 int64",
    "zero_idle bfloat16 int64",
}
"""What `passed` returns: kernel, and the dtype of each tensor in order, `-` for one left out."""

LAUNCHERS = triton_activation, triton_buffers, triton_routing, triton_rows, triton_sorting
TOKENS, DIM, HIDDEN, TOP_K, EXPERTS, MANY_EXPERTS = 16, 64, 32, 2, 8, 512


def passed() -> set[str]:
    """Run the layers as one of two ranks, and return what reached the kernels, as in `PASSED`."""
    run = run_ranks(_layers, world_size=2, representatives={0: (0, 1)}, timeout=120)
    return set(run.results[0])


def _layers() -> list[str]:
    initialize(device_type="cuda")
    found: set[str] = set()
    skew = parse_skew("uniform", resolve("debug-qwen3-moe", env={}).config.model)
    with ExitStack() as stack:
        stack.enter_context(answering(Answers(skew)))
        for launcher in LAUNCHERS:
            noted = partial(_note, found, launcher._launch)
            stack.enter_context(mock.patch.object(launcher, "_launch", noted))
        for dtype in (torch.bfloat16, torch.float32):
            for layer in _of_every_kind():
                _run(layer.to(dtype), dtype)
            _by_hand(dtype)
        for layer, dtype in itertools.product(_of_every_kind(), (torch.bfloat16, torch.float32)):
            with _autocast():  # of fp32 weights
                _run(layer, dtype)
    return sorted(found)


@contextmanager
def _autocast() -> Iterator[None]:
    """Let layers find bf16 autocast; `torch.autocast` is refused in dry runs.

    torch's own operators are not narrowed: what reaches our kernels does not depend on that.
    """
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


def _run(layer: MoE, dtype: torch.dtype) -> None:
    x = torch.randn(TOKENS, DIM, device="cuda", dtype=dtype, requires_grad=True)
    layer(x)[0].square().sum().backward()


def _note(
    found: set[str],
    launch: Callable[..., None],
    kernel: str,
    grid: tuple[int, ...],
    **given: Any,
) -> None:
    operands = (*given["made"], *given["given"])
    tensors = [x for x in operands if x is None or isinstance(x, Tensor)]
    found.add(" ".join([kernel, *("-" if x is None else str(x.dtype)[6:] for x in tensors)]))
    launch(kernel, grid, **given)


def _of_every_kind() -> Iterator[MoE]:
    def bounded(group: dist.ProcessGroup, num_experts: int) -> BoundedAllToAllDispatcher:
        return BoundedAllToAllDispatcher(group, num_experts, TOKENS * TOP_K, "cuda")

    yield _layer(None)
    yield _layer(None, bias=True, activation=ClampedSwiGLU())
    yield _layer(ExpertParallel(deduplicate=False))
    yield _layer(ExpertParallel(deduplicate=True))
    yield _layer(ExpertParallel(deduplicate=True), num_experts=MANY_EXPERTS)
    yield _layer(ExpertParallel(dispatcher=bounded))


def _layer(style: ExpertParallel | None, *, num_experts: int = EXPERTS, **options: Any) -> MoE:
    with torch.device("cuda"):
        experts = GroupedExperts(num_experts, DIM, HIDDEN, **options)
        router = TopKRouter(DIM, num_experts, TOP_K)
    if style is not None:
        style.apply(experts, _world())
    return MoE(router, experts)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _by_hand(dtype: torch.dtype) -> None:
    """What no layer of ours does: rows sorted and summed by functions, narrow ids."""
    x = torch.randn(TOKENS, DIM, device="cuda", dtype=dtype, requires_grad=True)
    chosen = torch.zeros(TOKENS, TOP_K, device="cuda", dtype=torch.int64)
    weights = torch.rand(TOKENS, TOP_K, device="cuda", requires_grad=True)
    permutation = sort_by_expert(chosen)
    sum_slots(gather_slots(x, permutation), permutation, weights).sum().backward()
    for deduplicate in (True, False):
        dispatcher = AllToAllDispatcher(_world(), EXPERTS, deduplicate)
        dispatcher.prepare(x.detach(), chosen.to(torch.int32), weights.detach())
