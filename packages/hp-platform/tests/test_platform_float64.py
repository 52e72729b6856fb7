"""Norms in float64: those of a copy in float64, without the copy."""

import math

import pytest
import torch

from hp_platform import float64_norms
from hp_platform.testing import watch_operators

SIZES = (0, 1, 1000, 1 << 17, (1 << 19) + 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_a_copy(dtype: torch.dtype, norm_type: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    tensors.append(tensors[-1][:-5].view(-1, 8).t())  # of other strides than a flat one
    found = float64_norms(tensors, norm_type)
    for x, norm in zip(tensors, found, strict=True):
        copy = x.double() if x.numel() else torch.zeros(1, dtype=torch.float64)
        torch.testing.assert_close(
            norm, torch.linalg.vector_norm(copy, norm_type), rtol=1e-12, atol=0
        )
        assert norm.dtype == torch.float64


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float, norm_type: float) -> None:
    x = torch.ones(1 << 18)
    x[-1] = value
    assert not math.isfinite(float64_norms([x], norm_type)[0])


def test_a_norm_has_the_same_bits_alone_and_in_a_list() -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in SIZES]
    for x, norm in zip(tensors, float64_norms(tensors), strict=True):
        assert torch.equal(float64_norms([x])[0], norm)


def test_no_list_has_no_norms() -> None:
    assert float64_norms([]) == []


def test_no_more_is_cast_at_once_than_a_mebibyte() -> None:
    cast: list[int] = []

    def see(name: str, args: tuple[object, ...], _kwargs: object) -> None:
        if name.startswith("aten::_foreach_norm"):
            assert isinstance(args[0], (list, tuple))
            cast.extend(x.numel() * 8 for x in args[0])

    with watch_operators(see):
        float64_norms([torch.ones(5, 1 << 20)])
    assert sum(cast) == 5 << 23
    assert max(cast) <= 1 << 20
