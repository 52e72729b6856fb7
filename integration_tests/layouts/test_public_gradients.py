"""Public functions from tensors to tensors: each has a gradient, or says that it has none."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hp_context
import hp_expert
import hp_platform
from hp_expert.batch import ExpertBatch
from hp_platform.testing import run_in_threads

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "hp_platform", "hp_expert", "hp_context"
Outputs = Tensor | Iterable[Tensor]

EXPERTS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
PERMUTATION = hp_expert.sort_by_expert(EXPERTS)


def batch(x: Tensor) -> ExpertBatch:
    """Return rows of two slots each, sorted for four experts."""
    dispatcher = hp_expert.LocalDispatcher(4)
    rows, state = dispatcher.prepare(x, EXPERTS)
    return dispatcher.finish_dispatch(rows, state)


def weight(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    """Return a sequence of four tokens with two heads."""
    return x.view(1, 4, 2, 4)


ALONE: dict[str, Callable[[Tensor], Outputs]] = {
    "hp_platform.float64_norms": lambda x: hp_platform.float64_norms([x]),
    "hp_platform.linear": lambda x: hp_platform.linear(x, weight(3, 8)),
    "hp_platform.sync_hook": hp_platform.sync_hook,
    "hp_platform.wait_tensor": hp_platform.wait_tensor,
    "hp_expert.document_balance_loss": lambda x: hp_expert.document_balance_loss(
        x.softmax(1), EXPERTS, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    ),
    "hp_expert.from_hf": lambda x: hp_expert.from_hf(
        hp_expert.to_hf({"experts.w1": x.view(2, 4, 4)}),
        {"experts.w1": weight(2, 4, 4)},
    ).values(),
    "hp_expert.gather_slots": lambda x: hp_expert.gather_slots(x, PERMUTATION),
    "hp_expert.global_balance_loss": lambda x: hp_expert.global_balance_loss(
        x.softmax(1), EXPERTS, num_experts=8
    ),
    "hp_expert.routed_swiglu": lambda x: hp_expert.routed_swiglu(
        batch(x), weight(4, 3, 8), weight(4, 3, 8), weight(4, 8, 3)
    ),
    "hp_expert.routed_swiglu_fused": lambda x: hp_expert.routed_swiglu_fused(
        batch(x), weight(4, 6, 8), weight(4, 8, 3)
    ),
    "hp_expert.router_z_loss": hp_expert.router_z_loss,
    "hp_expert.sequence_balance_loss": lambda x: hp_expert.sequence_balance_loss(
        x.softmax(1)[None], EXPERTS[None], num_experts=8
    ),
    "hp_expert.sum_slots": lambda x: hp_expert.sum_slots(x.repeat(2, 1), PERMUTATION),
    "hp_expert.to_hf": lambda x: hp_expert.to_hf({"experts.w1": x.view(2, 4, 4)}).values(),
    "hp_expert.ExpertBatch.at_slots": lambda x: batch(x).at_slots(x[:, :2].reshape(8), default=0.0),
    "hp_expert.ExpertBatch.sum_over_slots": lambda x: batch(x).sum_over_slots(x.repeat(2, 1)),
    "hp_context.masked_attention": lambda x: hp_context.masked_attention(
        heads(x), heads(x), heads(x), mask=hp_context.Causal()
    ),
    "hp_context.token_loss": lambda x: hp_context.token_loss(
        x, torch.arange(4), num_tokens=torch.tensor(4)
    ),
}
OVER_RANKS: dict[str, Callable[[Tensor, dist.ProcessGroup], Outputs]] = {
    "hp_platform.all_gather_uneven": lambda x, g: hp_platform.all_gather_uneven(
        x, sizes=[4], group=g
    ),
    "hp_platform.all_to_all": lambda x, g: hp_platform.all_to_all(x, group=g),
    "hp_platform.all_to_all_lazy": lambda x, g: hp_platform.wait_tensor(
        hp_platform.all_to_all_lazy(x, group=g)
    ),
    "hp_platform.launch_all_gather": lambda x, g: hp_platform.launch_all_gather(x, group=g).wait(),
    "hp_platform.launch_all_to_all": lambda x, g: hp_platform.launch_all_to_all(x, group=g).wait(),
    "hp_platform.reduce_scatter_uneven": lambda x, g: hp_platform.reduce_scatter_uneven(
        x, sizes=[4], group=g
    ),
    "hp_context.head_to_seq": lambda x, g: hp_context.head_to_seq(heads(x), group=g),
    "hp_context.seq_to_head": lambda x, g: hp_context.seq_to_head(heads(x), group=g),
    "hp_context.shard_sequence": lambda x, g: hp_context.shard_sequence(x[None], g),
    "hp_context.unshard_sequence": lambda x, g: hp_context.unshard_sequence(x[None], g),
}

OTHERS = {
    **dict.fromkeys(
        ("hp_platform.isend", "hp_platform.irecv", "hp_platform.isend_irecv"),
        "it takes two ranks, and says that it has none",
    ),
    "hp_platform.submit_weight_grad": "a gradient is what it is about",
    **dict.fromkeys(
        ("hp_expert.clip_grad_norm_", "hp_expert.grad_norm"), "it is about gradients that are there"
    ),
    **dict.fromkeys(
        (
            "hp_expert.load_imbalance",
            "hp_context.count_tokens",
            "hp_context.shift_labels",
            "hp_expert.ExpertBatch.positions",
            "hp_expert.ExpertBatch.row_at",
            "hp_expert.ExpertBatch.slot_at",
            "hp_expert.ExpertBatch.valid",
        ),
        "numbers and places are integers",
    ),
    "hp_expert.ExpertBatch.weight_at": "it is for backwards that somebody writes",
    "hp_expert.ExpertBatch.weight_gradient": "it is for backwards that somebody writes",
}
"""Functions that are not tried, and why."""


def public(package: str) -> set[str]:
    """Return functions from tensors to tensors, and methods of `ExpertBatch`, by their API file."""
    text = (ROOT / "packages" / package.replace("_", "-") / "api.txt").read_text()
    functions = re.findall(
        r"^def (\w+)\(.*\bTensor\b.*\) -> .*\b(?:Tensor|Pending)\b", text, re.MULTILINE
    )
    [methods] = re.findall(r"^class ExpertBatch\b.*\n((?: .*\n)+)", text, re.MULTILINE) or [""]
    of_batch = re.findall(r"^    def (\w+)\(.* -> .*\bTensor\b", methods, re.MULTILINE)
    return {f"{package}.{name}" for name in functions} | {
        f"{package}.ExpertBatch.{name}" for name in of_batch
    }


def says_that_it_has_none(name: str) -> bool:
    package, *path = name.split(".")
    found = importlib.import_module(package)
    for part in path:
        found = getattr(found, part)
    return re.search("gradient|differentiable|[Aa]utograd", inspect.getdoc(found) or "") is not None


def test_every_public_function_from_tensors_to_tensors_is_looked_at() -> None:
    every = set().union(*map(public, PACKAGES))
    assert ALONE.keys() | OVER_RANKS.keys() | OTHERS.keys() == every
    assert len(every) == len(ALONE) + len(OVER_RANKS) + len(OTHERS)
    for name in ("isend", "irecv", "isend_irecv"):
        assert says_that_it_has_none(f"hp_platform.{name}")


@pytest.mark.parametrize("name", [*ALONE, *OVER_RANKS])
def test_it_has_a_gradient_or_says_that_it_has_none(name: str) -> None:
    def rank_main(group: dist.ProcessGroup) -> bool:
        x = torch.arange(32.0, dtype=torch.float64).view(4, 8).div(32).requires_grad_()
        found = ALONE[name](x) if name in ALONE else OVER_RANKS[name](x, group)
        outputs = [found] if isinstance(found, Tensor) else [*found]
        if not any(output.requires_grad for output in outputs):
            return False
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        assert x.grad is not None
        return bool(x.grad.any())

    [has_gradient] = run_in_threads(rank_main, world_size=1)
    assert has_gradient or says_that_it_has_none(name)
