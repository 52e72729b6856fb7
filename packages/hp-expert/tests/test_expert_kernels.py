"""Triton's kernels against torch's, on CUDA or in Triton's interpreter."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_expert import permute, sort_by_expert, sum_slots
from hp_expert.kernels import kernels_for, torch_rows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and "triton" not in sys.modules:
    # Read when Triton is imported, and when it decorates a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# With CUDA all of this file is a test on the GPU.
pytestmark = [pytest.mark.gpu] if CUDA else []
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(name="triton_rows", scope="module")
def _triton_rows() -> ModuleType:
    pytest.importorskip("triton")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported without TRITON_INTERPRET=1, and there is no CUDA")
    return importlib.import_module("hp_expert.kernels.triton_rows")


def problem(dtype: torch.dtype, num_choices: int, width: int, *, holes: bool) -> dict[str, Tensor]:
    """Rows, indices and weights; with holes, a position without a slot and slots without one."""
    torch.manual_seed(num_choices + width)
    num_tokens = 5
    num_slots = num_tokens * num_choices
    num_positions = num_slots - 2 if holes else num_slots
    order = torch.randperm(num_slots)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(num_slots))
    slot = order[:num_positions].clone()
    if holes:
        inverse[slot[0]], slot[0] = -1, -1
        inverse.masked_fill_(inverse >= num_positions, -1)
    tensors = {
        "x": torch.randn(num_tokens, width).to(dtype),
        "rows": torch.randn(num_positions, width).to(dtype),
        "weights": torch.rand(num_tokens, num_choices),
        "slot": slot,
        "token": slot.div(num_choices, rounding_mode="floor"),
        "inverse": inverse.view(num_tokens, num_choices),
    }
    return {name: t.to(DEVICE) for name, t in tensors.items()}


def assert_same(actual: Tensor, expected: Tensor, *, weighted: bool = False) -> None:
    """The same bits; in the interpreter, which cuts bf16 off instead of rounding, one unit.

    On CPU torch multiplies with a weight and adds without rounding in between, and takes 16 bits of
    a weight for bf16.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == torch.bfloat16 and not CUDA:
        atol = 2**-15 if weighted else 0
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=atol)
    elif weighted and not CUDA:
        unit = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=4 * unit)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("width", [1, 37, 64, 2056])
@pytest.mark.parametrize("num_choices", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_bits_of_torch(
    triton_rows: ModuleType, dtype: torch.dtype, num_choices: int, width: int, *, holes: bool
) -> None:
    p = problem(dtype, num_choices, width, holes=holes)
    x, rows, inverse, weights = p["x"], p["rows"], p["inverse"], p["weights"]
    for given in (None, weights):
        assert_same(
            triton_rows.sum_rows(rows, inverse, given, holes=holes),
            torch_rows.sum_rows(rows, inverse, given, holes=holes),
            weighted=given is not None,
        )
    assert_same(
        triton_rows.gather_rows(x, p["token"], holes=holes),
        torch_rows.gather_rows(x, p["token"], holes=holes),
    )
    actual = triton_rows.sum_rows_backward(x, rows, p["slot"], weights, holes=holes)
    expected = torch_rows.sum_rows_backward(x, rows, p["slot"], weights, holes=holes)
    assert_same(actual[0], expected[0])
    # The sum over the width has another order.
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)


def test_what_does_not_exist_is_never_read(triton_rows: ModuleType) -> None:
    p = problem(torch.float32, 2, 16, holes=True)
    rows, inverse, weights, slot = p["rows"], p["inverse"], p["weights"], p["slot"]
    rows[slot < 0] = torch.nan
    weights[inverse < 0] = torch.nan
    for kernels in (triton_rows, torch_rows):
        y = kernels.sum_rows(rows, inverse, weights, holes=True)
        grad_rows, grad_weights = kernels.sum_rows_backward(p["x"], rows, slot, weights, holes=True)
        assert y.isfinite().all()
        assert (grad_rows[slot < 0] == 0).all()
        assert (grad_weights[inverse < 0] == 0).all()
        assert grad_rows.isfinite().all()
        assert grad_weights.isfinite().all()


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_to_move_is_fine(triton_rows: ModuleType, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 8, device=DEVICE)
    rows = x.new_empty(0, 8)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    nowhere = torch.full((num_tokens, 2), -1, device=DEVICE)
    weights = torch.rand(num_tokens, 2, device=DEVICE)
    assert triton_rows.gather_rows(x, none, holes=False).shape == (0, 8)
    assert torch.equal(triton_rows.sum_rows(rows, nowhere, weights, holes=True), x * 0)
    grads = triton_rows.sum_rows_backward(x, rows, none, weights, holes=True)
    assert grads[0].shape == (0, 8)
    assert torch.equal(grads[1], weights * 0)


def test_rows_need_not_be_contiguous(triton_rows: ModuleType) -> None:
    p = problem(torch.float32, 2, 16, holes=False)
    transposed = p["rows"].t().contiguous().t()
    assert not transposed.is_contiguous()
    expected = torch_rows.sum_rows(p["rows"], p["inverse"], holes=False)
    assert torch.equal(triton_rows.sum_rows(transposed, p["inverse"], holes=False), expected)
    expanded = p["x"][0].expand_as(p["x"])
    expected = torch_rows.gather_rows(expanded, p["token"], holes=False)
    assert torch.equal(triton_rows.gather_rows(expanded, p["token"], holes=False), expected)


def test_gradients_of_transposed_rows_and_weights_are_right(triton_rows: ModuleType) -> None:
    p = problem(torch.float32, 2, 16, holes=False)
    x, rows, slot, weights = p["x"], p["rows"], p["slot"], p["weights"]
    expected = torch_rows.sum_rows_backward(x, rows, slot, weights, holes=False)
    rows, weights = (t.t().contiguous().t() for t in (rows, weights))
    actual = triton_rows.sum_rows_backward(x, rows, slot, weights, holes=False)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_permutations_use_the_kernels_and_their_gradients_are_right(
    triton_rows: ModuleType, monkeypatch: pytest.MonkeyPatch, *, weighted: bool
) -> None:
    used: list[str] = []

    def kernels_of(rows: Tensor) -> Any:
        used.append("rows" if rows.ndim == 2 else "values")
        return triton_rows if rows.ndim == 2 else torch_rows

    monkeypatch.setattr(permute, "kernels_for", kernels_of)
    permutation = sort_by_expert(torch.tensor([[3, 0], [1, 3], [0, 1]], device=DEVICE))
    kind: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE, "requires_grad": True}
    rows, x = torch.randn(6, 3, **kind), torch.randn(3, 3, **kind)
    if weighted:
        weights = torch.rand(3, 2, **kind)
        assert torch.autograd.gradcheck(lambda r, w: sum_slots(r, permutation, w), (rows, weights))
    else:
        assert torch.autograd.gradcheck(lambda r: sum_slots(r, permutation), (rows,))
        assert torch.autograd.gradcheck(lambda t: permute.gather_slots(t, permutation), (x,))
    assert "rows" in used


def test_kernels_compile_for_hopper_and_move_words_of_16_bytes(triton_rows: ModuleType) -> None:
    del triton_rows
    script = Path(__file__).with_name("compile_expert_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        [kernel, dtype]
        for kernel in ("gather_rows", "sum_rows", "sum_rows_backward")
        for dtype in ("bf16", "fp32", "fp64")
    ]
    for _, dtype, *accesses in lines:
        wide = "v2.b64" if dtype == "fp64" else "v4.b32"
        assert {access.partition("global.")[2] for access in accesses} == {wide}
        assert {access[:2] for access in accesses} == {"ld", "st"}


def test_cpu_takes_the_torch_path() -> None:
    assert kernels_for(torch.empty(2, 2)) is torch_rows


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_cuda_takes_the_kernels_for_rows_and_torch_for_values(triton_rows: ModuleType) -> None:
    assert kernels_for(torch.empty(2, 2, device="cuda")) is triton_rows
    assert kernels_for(torch.empty(2, device="cuda")) is triton_rows
