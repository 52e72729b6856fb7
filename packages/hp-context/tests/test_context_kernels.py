"""One block of attention, its gradients from the whole, and blocks put together again."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

import hp_context.kernels as k_module
from hp_context import BlockKind, Causal, Full, Mask, PositionMask, SlidingWindow
from hp_context.attention.softmax import Forward, Merge, Scores, for_backward
from hp_context.kernels import Kernel, block_backward, block_forward, cuda_efficient, cuda_flash
from hp_context.kernels import flex as flex_kernel
from hp_context.kernels import reference as reference_kernel
from hp_context.kernels.reference import Dropout, Scoring
from hp_context.masks import block_tensor
from hp_context.masks.blocks import plan
from hp_platform.testing import watch_operators

SCALE = 0.3


def tensors(
    *,
    queries: int = 12,
    keys: int = 12,
    kv_heads: int = 2,
    value_size: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    return [
        torch.randn(2, heads, seq, size, dtype=torch.float64).to(dtype)
        for heads, seq, size in (
            (4, queries, 8),
            (kv_heads, keys, 8),
            (kv_heads, keys, value_size),
            (4, queries, value_size),
        )
    ]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The definition; 0 and -inf for a query that sees nothing."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return weights @ v, lse


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def by_blocks(
    qkv: list[Tensor], grad: Tensor, mask: Mask, cuts: list[int]
) -> tuple[list[Tensor], Tensor]:
    """Out, dq, dk, dv and the log-sum-exp from blocks of keys."""
    q, k, v = qkv
    query, merge, blocks = range(q.size(2)), Merge(), []
    for start, stop in pairwise(cuts):
        key = range(start, stop)
        kind = mask.block(query, key)
        if kind is BlockKind.EMPTY:
            continue
        partial = block_tensor(mask, query, key) if kind is BlockKind.PARTIAL else None
        blocks.append((key, kind, partial))
        part = (x[:, :, start:stop] for x in (k, v))
        merge.add(*block_forward(q, *part, kind=kind, mask=partial, scale=SCALE))
    out, lse = merge.result()
    dq, dk, dv = (torch.zeros_like(x) for x in qkv)
    for key, kind, partial in blocks:
        k_b, v_b = (x[:, :, key.start : key.stop] for x in (k, v))
        part_dq, part_dk, part_dv = block_backward(
            q,
            k_b,
            v_b,
            grad_out=grad,
            out=out,
            lse=for_backward(lse),
            kind=kind,
            mask=partial,
            scale=SCALE,
        )
        dq += part_dq
        dk[:, :, key.start : key.stop] += part_dk
        dv[:, :, key.start : key.stop] += part_dv
    return [out, dq, dk, dv], lse


def lonely(query: Tensor, key: Tensor) -> Tensor:
    """Queries 3, 10, 17, ... see nothing; the others a few keys."""
    return (query % 7 != 3) & ((query + key) % 3 == 0)


MASKS = [Full(), Causal(), SlidingWindow(4), SlidingWindow(9) & PositionMask(lonely)]


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "window", "some see nothing"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_size", [8, 5], ids=["torch's kernel", "plain torch"])
@pytest.mark.parametrize("cuts", [[0, 12], [0, 5, 12], [0, 1, 4, 9, 12]], ids=len)
def test_blocks_of_keys_make_up_attention_and_its_gradients(
    cuts: list[int], value_size: int, kv_heads: int, mask: Mask
) -> None:
    *qkv, grad = tensors(kv_heads=kv_heads, value_size=value_size)
    leaves = [x.clone().requires_grad_() for x in qkv]
    allowed = block_tensor(mask, range(12), range(12))
    expected, expected_lse = softmax_attention(leaves[0], leaves[1], leaves[2], allowed)
    gradients = torch.autograd.grad(expected, leaves, grad)
    actual, lse = by_blocks(qkv, grad, mask, cuts)
    for a, b in zip(actual, [expected.detach(), *gradients], strict=True):
        assert error(a, b) <= 1e-13
    assert torch.allclose(lse, expected_lse.detach(), rtol=1e-13)


def test_queries_that_see_nothing_have_no_output_and_no_gradient() -> None:
    *qkv, grad = tensors()
    (out, dq, dk, dv), lse = by_blocks(qkv, grad, PositionMask(lonely), [0, 5, 12])
    for x in (out, dq):
        assert torch.equal(x[:, :, [3, 10]], torch.zeros_like(x[:, :, [3, 10]]))
    assert lse[:, :, [3, 10]].eq(-torch.inf).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_a_row_may_see_nothing_in_the_first_tiles_of_a_long_block() -> None:
    """The kernel of the CPU goes through keys in tiles of several hundred."""
    *qkv, grad = tensors(queries=8, keys=1100)
    mask = PositionMask(lambda query, key: key > 1080 + query)
    actual, _ = by_blocks(qkv, grad, mask, [0, 1100])
    leaves = [x.clone().requires_grad_() for x in qkv]
    allowed = block_tensor(mask, range(8), range(1100))
    expected, _ = softmax_attention(leaves[0], leaves[1], leaves[2], allowed)
    gradients = torch.autograd.grad(expected, leaves, grad)
    for a, b in zip(actual, [expected.detach(), *gradients], strict=True):
        assert error(a, b) <= 1e-13


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_narrow_types_are_merged_in_float32(dtype: torch.dtype, bound: float) -> None:
    q, k, v, _ = tensors(dtype=dtype)
    merge = Merge()
    for start in (0, 4, 8):
        part = (x[:, :, start : start + 4] for x in (k, v))
        merge.add(*block_forward(q, *part, kind=BlockKind.FULL, mask=None, scale=SCALE))
    out, lse = merge.result()
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    expected, _ = softmax_attention(
        q.double(), k.double(), v.double(), torch.ones(12, 12, dtype=torch.bool)
    )
    assert error(out, expected) <= bound


def by_kernel(
    kernel: Kernel, kind: BlockKind, monkeypatch: pytest.MonkeyPatch, softcap: float | None = None
) -> list[Tensor]:
    """Out, weights' sum, dq, dk, dv of one block whose queries see others besides."""
    q, k, v, grad = tensors()
    mask = block_tensor(MASKS[-1], range(12), range(12)) if kind is BlockKind.PARTIAL else None
    monkeypatch.setattr(k_module, "choose_kernel", lambda *_, **__: kernel)
    terms: dict[str, Any] = {"kind": kind, "mask": mask, "scale": SCALE, "softcap": softcap}
    out, lse = block_forward(q, k, v, **terms)
    others = torch.linspace(-1.0, 3.0, lse.numel(), dtype=lse.dtype).view_as(lse)
    whole: dict[str, Any] = {
        "out": out + grad.flip(0),
        "lse": torch.logaddexp(for_backward(lse), others),
    }
    grads = block_backward(q, k, v, grad_out=grad, **whole, **terms)
    return [out, lse.exp(), *grads]


@pytest.mark.parametrize("kind", [BlockKind.FULL, BlockKind.CAUSAL, BlockKind.PARTIAL])
def test_torch_s_kernel_and_plain_torch_agree(
    kind: BlockKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, _, v, _ = tensors()
    assert k_module.choose_kernel(q, v, mask=None) is Kernel.CPU_FLASH
    actual = by_kernel(Kernel.CPU_FLASH, kind, monkeypatch)
    for a, b in zip(actual, by_kernel(Kernel.REFERENCE, kind, monkeypatch), strict=True):
        assert error(a, b) <= 1e-13


@pytest.mark.parametrize("kind", [BlockKind.FULL, BlockKind.CAUSAL, BlockKind.PARTIAL])
@pytest.mark.parametrize("softcap", [None, 0.9])
def test_flex_attention_and_plain_torch_agree(
    softcap: float | None, kind: BlockKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own definition, with all scores in memory: torch refuses backward on the CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    actual = by_kernel(Kernel.CUDA_FLEX, kind, monkeypatch, softcap)
    expected = by_kernel(Kernel.REFERENCE, kind, monkeypatch, softcap)
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) <= 1e-13


def test_flex_attention_takes_soft_caps_and_large_masks_of_cuda_alone() -> None:
    q = torch.empty(1, 4, 8, 64, device="meta")
    small, large = (torch.empty(1 << n, 1 << 12, device="meta") for n in (4, 12))
    assert not flex_kernel.applies(q, q, mask=large, softcap=2.0)  # no CUDA
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=q.dtype, size=q.size)
    cases = [(None, None), (None, 2.0), (small, None), (large, None)]
    taken = [flex_kernel.applies(cast("Any", on_cuda), q, mask=m, softcap=c) for m, c in cases]
    assert taken == [False, True, False, True]
    wide = torch.empty(1, 4, 8, 512, device="meta")
    assert not flex_kernel.applies(cast("Any", on_cuda), wide, mask=None, softcap=2.0)


def test_an_expanded_gradient_is_taken() -> None:
    q, k, v, _ = tensors()
    grad = torch.ones((), dtype=torch.float64).expand(q.shape)
    out, lse = block_forward(q, k, v, kind=BlockKind.FULL, mask=None, scale=SCALE)
    a, b = (
        block_backward(
            q, k, v, grad_out=g, out=out, lse=lse, kind=BlockKind.FULL, mask=None, scale=SCALE
        )
        for g in (grad, grad.contiguous())
    )
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_empty_merge_has_no_result() -> None:
    with pytest.raises(RuntimeError, match="must follow at least one"):
        Merge().result()


def test_efficient_attention_gets_what_its_backward_takes_for_granted() -> None:
    """On tensors without storage: the operators of CUDA run nowhere else, but can be traced."""
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in tensors(queries=40, keys=24))
    mask = torch.ones(40, 24, dtype=torch.bool, device="meta")
    seen = []

    def see(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del kwargs
        if name == "aten::_scaled_dot_product_efficient_attention_backward":
            seen.append([x for x in args if isinstance(x, Tensor)])

    with watch_operators(see):
        terms: Any = {"mask": mask, "causal": False, "scoring": Scoring(SCALE)}
        out, lse = cuda_efficient.forward(q, k, v, **terms)
        assert (out.shape, lse.shape) == ((2, 4, 40, 8), (2, 4, 40))
        dq, dk, dv = cuda_efficient.backward(q, k, v, grad_out=grad, out=out, lse=lse, **terms)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert (dk.dtype, dv.dtype) == (torch.float32, torch.float32)
    assert len(seen) == 2  # query heads that share a key head
    for _, q_m, _, _, bias, out_m, lse_m, *_ in seen:
        assert q_m.shape == (2, 2, 40, 8)
        assert out_m.transpose(1, 2).is_contiguous()
        assert lse_m.shape == (2, 2, 64)
        assert lse_m.is_contiguous()
        assert bias.shape == (2, 2, 40, 24)
        assert bias.stride(2) % 16 == 0


def test_flash_attention_of_cuda_takes_the_arguments_it_is_given() -> None:
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in tensors())
    terms: Any = {"mask": None, "causal": True, "scoring": Scoring(SCALE)}
    out, lse = cuda_flash.forward(q, k, v, **terms)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    grads = cuda_flash.backward(q, k, v, grad_out=grad, out=out, lse=lse, **terms)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_what_is_not_known_to_be_right_goes_to_plain_torch() -> None:
    q, k, v, _ = tensors()
    dropout = Dropout(0.1, 3).of_block(range(12), range(12))
    choices = [
        k_module.choose_kernel(q, v, mask=None),
        k_module.choose_kernel(q, v, mask=None, softcap=2.0),
        k_module.choose_kernel(q, v, mask=None, dropout=dropout),
        k_module.choose_kernel(q, v[..., :5], mask=None),
        k_module.choose_kernel(q.to("meta"), v.to("meta"), mask=None),
    ]
    assert choices == [Kernel.CPU_FLASH, *[Kernel.REFERENCE] * 4]
    del k


@pytest.mark.parametrize("kind", [BlockKind.FULL, BlockKind.CAUSAL, BlockKind.PARTIAL])
@pytest.mark.parametrize("tile", [1, 100, 1000])
def test_plain_torch_goes_by_tiles_of_queries(
    kind: BlockKind, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, grad = tensors()
    mask = block_tensor(MASKS[-1], range(12), range(12)) if kind is BlockKind.PARTIAL else None
    dropout = Dropout(0.3, 3).of_block(range(12), range(12))
    results = []
    for size in (1 << 24, tile):
        monkeypatch.setattr(reference_kernel, "TILE", size)
        terms: dict[str, Any] = {
            "kind": kind,
            "mask": mask,
            "scale": SCALE,
            "softcap": 0.9,
            "dropout": dropout,
        }
        out, lse = block_forward(q, k, v, **terms)
        grads = block_backward(q, k, v, grad_out=grad, out=out, lse=for_backward(lse), **terms)
        results.append([out, lse.exp(), *grads])
    for a, b in zip(*results, strict=True):
        assert error(a, b) <= 1e-13


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_queries_for_which_there_is_no_block_are_written_too(sinks: Tensor | None) -> None:
    q, keys, values = torch.randn(3, 1, 2, 8, 4).unbind()
    forward = Forward(q, Scores(Causal(), scale=0.5))
    runs = plan(Causal(), [range(4), range(8, 12)], [range(4, 8)])  # the first see no key
    forward.add_keys(keys[:, :, 4:], values[:, :, 4:], runs)
    out, lse = torch.full((1, 2, 8, 4), torch.nan), torch.full((1, 2, 8), torch.nan)
    forward.write(out, lse, sinks)
    assert not out[:, :, :4].any()
    empty = torch.full((2,), -torch.inf) if sinks is None else sinks
    assert torch.equal(lse[0, :, :4], empty[:, None].expand(2, 4))
    assert out[:, :, 4:].isfinite().all()
    assert lse[:, :, 4:].isfinite().all()
