"""One device per operator, found where there is only one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hp_platform import _internals
from integration_tests.layouts.stand_in_device import STAND_IN, watch_devices

CPU = torch.device("cpu")


def there(*shape: int) -> Tensor:
    """A tensor of the stand-in."""
    return torch.ones(*shape, device=STAND_IN)


def test_what_is_made_on_a_device_stays_there_and_says_so() -> None:
    with watch_devices() as found:
        x, host = there(2), torch.ones(2)
        assert (x.device, host.device) == (STAND_IN, CPU)
        for y in (x + x, x.view(2, 1), torch.zeros_like(x), x.new_zeros(3), x.clone(), x[0], x * 2):
            assert y.device == STAND_IN
        for y in (torch.arange(3, device=x.device), torch.tensor([1], device=x.device)):
            assert y.device == STAND_IN
        for y in (torch.tensor([1]), host + 1, torch.empty_like(x, device="cpu")):
            assert y.device == CPU
        assert x.to(STAND_IN) is x
        assert host.to(x).device == host.to(x.device).device == STAND_IN
        assert x.to("cpu").device == x.cpu().device == CPU
        assert x.to(torch.float64).device == x.to("cpu:0", torch.float64).device == STAND_IN
        assert host.cpu() is host
        assert host.copy_(x).device == CPU
        with torch.device("meta"):
            module = nn.Linear(2, 2)
        assert {p.device for p in module.to_empty(device=STAND_IN).parameters()} == {STAND_IN}
    assert found == []
    assert x.device == CPU  # nothing is left of it


def test_what_backward_makes_is_on_the_device() -> None:
    with watch_devices() as found:
        x = there(3).requires_grad_()
        (x * x).sum().cpu().backward()
        assert x.grad is not None
        assert x.grad.device == STAND_IN
    assert found == []


OPERATORS: dict[str, tuple[bool, Callable[[], object]]] = {
    "a vector of the host": (True, lambda: there(2) + torch.ones(2)),
    "a product": (True, lambda: there(2, 2) @ torch.ones(2, 2)),
    "a product with a scalar": (True, lambda: torch.dot(there(1), torch.ones(()).expand(1))),
    "a scalar of the host": (False, lambda: there(2) * torch.tensor(2.0)),
    "a scalar of the host in a result there": (False, lambda: there(2).add_(torch.tensor(2.0))),
    "a result on the host": (True, lambda: torch.ones(1).add_(there(1))),
    "a scalar to fill with": (False, lambda: there(2).fill_(torch.tensor(2.0))),
    "a mask of the host": (True, lambda: there(2).masked_fill_(torch.ones(2).bool(), 0.0)),
    "indices of the host": (False, lambda: there(2)[torch.tensor([1, 0])]),
    "values of the host": (True, lambda: _index_put(there(2), torch.ones(2))),
    "one value of the host": (False, lambda: _index_put(there(2), torch.tensor(1.0))),
    "rows added from the host": (
        True,
        lambda: there(2).index_add_(0, torch.tensor([0]), there(1)),
    ),
    "a foreach with a scalar": (True, lambda: torch._foreach_mul_([there(2)], torch.tensor(2.0))),
    "a copy": (False, lambda: there(2).copy_(torch.ones(2))),
    "a read by numpy": (True, lambda: there(2).numpy()),
}


def _index_put(x: Tensor, values: Tensor) -> None:
    x[torch.tensor([0, 1])] = values


@pytest.mark.parametrize("name", OPERATORS)
def test_what_cuda_refuses_is_found_and_what_it_takes_is_not(name: str) -> None:
    refused, operator = OPERATORS[name]
    with watch_devices() as found:
        operator()
    assert len(found) == refused, found
    if refused:
        line = re.compile(rf"\S+: .* on the host.*, at .*{Path(__file__).name}:\d+")
        assert line.fullmatch(found[0]), found


@pytest.mark.parametrize("device", [CPU, STAND_IN])
def test_a_fused_update_takes_no_count_of_steps_from_the_host(device: torch.device) -> None:
    with watch_devices() as found:
        weight = nn.Parameter(there(4))
        adam = torch.optim.AdamW([weight], fused=True)
        adam.state[weight] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        weight.grad = there(4)
        adam.step()
    named = [text for text in found if text.startswith("aten::_fused_adamw_")]
    assert len(found) == len(named) == (device == CPU)


def test_the_device_below_is_that_of_torch() -> None:
    with watch_devices():
        assert _internals.device_of(there(1)) == CPU
