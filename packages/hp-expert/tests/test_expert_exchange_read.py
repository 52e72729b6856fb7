"""The numbers of an exchange of rows in a dry run are those of a real one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_expert import AllToAllDispatcher, ExchangeRead, TensorSlicedDispatcher
from hp_expert.dispatch.tensor_summed import TensorSummedDispatcher
from hp_platform import new_group
from hp_platform.dry_device import answering
from hp_platform.testing import run_distributed

TOKENS, CHOICES, EXPERTS, DIM = 6, 2, 8, 4
CHOSEN = ((0, 1), (0, 5), (2, 3), (7, 0), (6, 7), (4, 5))
"""Experts of each token, the same on all ranks; every two neighbours belong to some token."""


@pytest.mark.parametrize("kind", ["plain", "deduplicated", "sliced", "summed"])
def test_what_the_host_reads_is_what_the_model_says(kind: str) -> None:
    run_distributed(partial(_compare, kind), world_size=4, timeout=60)


def _compare(kind: str) -> None:
    experts = torch.tensor(CHOSEN)
    reads: list[tuple[Tensor, object]] = []

    def note(copy: Tensor, purpose: object) -> Tensor:
        reads.append((copy.clone(), purpose))
        return copy

    with answering(note):
        _dispatcher(kind).prepare(torch.ones(TOKENS, DIM), experts, torch.ones(TOKENS, CHOICES))
    [(copy, purpose)] = reads
    assert isinstance(purpose, ExchangeRead)
    assert purpose.num_tokens == TOKENS
    assert "6 tokens" in str(purpose)
    slots = experts.flatten().bincount(minlength=EXPERTS).tolist()
    num_local = EXPERTS // purpose.num_ranks
    ranks = experts // num_local
    rows = [int((ranks == rank).any(1).sum()) for rank in range(purpose.num_ranks)]
    expected = purpose.numbers(slots, rows, like=copy)
    assert expected.shape == copy.shape
    if kind == "plain":  # nobody tells rows that are not deduplicated
        copy[..., 3:5] = expected[..., 3:5]
    torch.testing.assert_close(expected, copy, rtol=0, atol=0)


def _dispatcher(kind: str) -> Any:
    everyone = new_group([range(4)], name="all")
    assert everyone is not None
    if kind == "summed":
        return TensorSummedDispatcher(everyone, EXPERTS)
    if kind != "sliced":
        return AllToAllDispatcher(everyone, EXPERTS, deduplicate=kind == "deduplicated")
    ep = new_group([[0, 2], [1, 3]], name="ep")
    tp = new_group([[0, 1], [2, 3]], name="tp")
    assert ep is not None
    assert tp is not None
    over_ep = AllToAllDispatcher(ep, EXPERTS, deduplicate=True)
    return TensorSlicedDispatcher(over_ep, tp, sliced=True)
