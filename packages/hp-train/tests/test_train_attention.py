"""Attention of packed documents: sequence by sequence on a CPU, all at once on a GPU."""

from __future__ import annotations

import pytest
import torch

from hp_context import Attention, Causal, Documents, Mask, PositionMask, SlidingWindow
from hp_dry import DryDevice
from hp_dry.trace import HostWait, Launch
from hp_trainer.model.attention import _of_batch, _Same, attend

DOCUMENTS = (Documents((5, 1, 18)), Documents((20, 4)))


def launched(mask: Mask, dtype: torch.dtype, documents: tuple[Mask, ...] = DOCUMENTS) -> list[int]:
    """Kernels of attention, forward and backward, in two layers; and what the host waits for."""
    with DryDevice() as gpu:
        q, k, v = (
            torch.empty(2, 24, heads, 64, device="cuda", dtype=dtype, requires_grad=True)
            for heads in (4, 2, 2)
        )
        for _ in range(2):
            y = attend(Attention(mask), q, k, v, documents)
            assert y.shape == (2, 24, 4 * 64)
            y.backward(torch.empty_like(y))
        names = [each.what for each in gpu.trace.events if isinstance(each, Launch)]
        waits = sum(isinstance(each, HostWait) for each in gpu.trace.events)
    numbers = ["_flash_attention_forward", "_flash_attention_backward", "copy to device"]
    return [*(sum(number in name for name in names) for number in numbers), waits]


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3)], ids=str)
def test_a_microbatch_is_one_kernel_each_way_and_its_numbers_are_copied_once(mask: Mask) -> None:
    documents = (Documents((5, 1, 18)), Documents((20, 3, 1) if mask == Causal() else (19, 5)))
    assert launched(mask, torch.bfloat16, documents) == [2, 2, 1, 0]


def test_nothing_that_was_copied_to_a_device_is_found_on_the_next() -> None:
    documents = (Documents((7, 17)), Documents((3, 21)))
    first, second = (launched(Causal(), torch.bfloat16, documents) for _ in range(2))
    assert first == second == [2, 2, 1, 0]


def test_what_the_kernel_does_not_take_goes_sequence_by_sequence() -> None:
    assert launched(Causal(), torch.float32)[:2] == [0, 0]
    odd = PositionMask(lambda query, key: (query - key) % 2 == 0)
    assert launched(Causal() & odd, torch.bfloat16)[:2] == [0, 0]


def test_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    y = attend(Attention(Causal()), q, k, v, DOCUMENTS)
    for row, each in enumerate(DOCUMENTS):
        start = 0
        for length in each.lengths:
            at = slice(start, start + length)
            start += length
            q_d, k_d, v_d = (x[row : row + 1, at] for x in (q, k, v))
            alone = attend(Attention(Causal()), q_d, k_d, v_d)
            torch.testing.assert_close(y[row : row + 1, at], alone, rtol=1e-12, atol=1e-12)


def test_documents_of_equal_lengths_in_another_microbatch_are_compared_anew() -> None:
    """A rank that took them for known would not take part where another rank has other lengths."""
    first, second = (tuple(Documents(each.lengths) for each in DOCUMENTS) for _ in range(2))
    assert first == second
    assert _of_batch(_Same(first)) is _of_batch(_Same(first))
    assert _of_batch(_Same(first)) is not _of_batch(_Same(second))
