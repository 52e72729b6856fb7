"""Shapes are worked out once for operands of one form, where that is safe."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_dry import DryDevice
from hp_dry.trace import Launch

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x + x.T,
    "mm": lambda x: x @ x.T,
    "transposed": lambda x: x.T.clone(),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "topk": lambda x: x.topk(2),
    "split": lambda x: x.split(2),
    "view": lambda x: x.view(-1),
    "contiguous": lambda x: x.contiguous(),
    "bool": lambda x: x > x.T,
    "half": lambda x: x.to(torch.float16),
    "scalar": lambda x: (x.mul(2), x.mul(2.0), x.long().mul(2), x.long().mul(2.0)),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "cat": lambda x: torch.cat((x, x)),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0),
    "random": torch.rand_like,
    "complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj() * 2,
    "in place": lambda x: x.add_(1),
}


def _form(out: object) -> object:
    if isinstance(out, Tensor):
        return out.shape, out.stride(), out.dtype, out.device, out.is_conj()
    assert isinstance(out, list | tuple)
    return [_form(x) for x in out]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_call_makes_what_the_first_one_made(name: str) -> None:
    operation = OPERATIONS[name]
    with DryDevice() as device:
        x = torch.ones(4, 4, device="cuda")
        seen = []
        for _ in range(3):
            start, before = len(device.trace.events), device.storages.live_bytes
            out = operation(x)
            made = device.storages.live_bytes - before
            launches = [
                (event.what, event.num_kernels, event.num_bytes, event.flops)
                for event in device.trace.events[start:]
                if isinstance(event, Launch)
            ]
            seen.append((_form(out), made, launches))
            del out
    assert seen[0] == seen[1] == seen[2]


def test_results_are_new_tensors_each_time() -> None:
    with DryDevice() as device:
        x = torch.ones(4, 4, device="cuda")
        first, second = x * 2, x * 2
        assert device.block_of(first) != device.block_of(second)
        assert device.block_of(x.T) == device.block_of(x.T) == device.block_of(x)


def test_a_gradient_goes_through_what_was_made_again() -> None:
    with DryDevice():
        weight = torch.ones(4, 4, device="cuda", requires_grad=True)
        for _ in range(2):
            ((weight * 2) @ weight).sum().backward()
            assert weight.grad is not None
            assert weight.grad.shape == weight.shape


def test_other_strides_scalars_and_default_dtypes_are_other_forms() -> None:
    with DryDevice():
        x = torch.ones(4, 8, device="cuda")
        assert (x * 2).stride() == (8, 1)
        assert (x.T * 2).stride() == (1, 8)
        whole = torch.ones(4, dtype=torch.int64, device="cuda")
        assert (whole * 2).dtype == torch.int64
        assert (whole * 2.0).dtype == torch.float32
        assert (whole / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
