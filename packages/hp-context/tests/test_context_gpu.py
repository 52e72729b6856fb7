"""Every kernel of CUDA against plain torch in float64, and the modes on NCCL."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hp_context.kernels as k_module
from hp_context import (
    Attention,
    BlockKind,
    Causal,
    ContextParallel,
    Documents,
    EachSequence,
    HeadTail,
    Mask,
    SlidingWindow,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_context.attention.softmax import Merge, for_backward
from hp_context.kernels import Kernel, block_backward, block_forward, choose_kernel, varlen
from hp_context.kernels.varlen import Lengths
from hp_context.masks import block_tensor
from hp_platform import RankInfo, backend_for, initialize, shutdown
from hp_platform.testing import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Block:
    kernel: Kernel
    kind: BlockKind
    dtype: torch.dtype
    sizes: tuple[int, int] = (64, 64)  # of heads: q and k, v
    lengths: tuple[int, int] = (192, 192)
    heads: tuple[int, int] = (4, 2)
    heads_first: bool = True
    softcap: float | None = None


FULL, CAUSAL, PARTIAL = BlockKind.FULL, BlockKind.CAUSAL, BlockKind.PARTIAL
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = [
    Block(Kernel.CUDA_FLASH, FULL, BF16, lengths=(100, 333)),
    Block(Kernel.CUDA_FLASH, CAUSAL, BF16, heads_first=False),
    Block(Kernel.CUDA_FLASH, CAUSAL, FP16, sizes=(128, 128), lengths=(77, 77), heads=(4, 1)),
    Block(Kernel.CUDA_FLASH, FULL, BF16, sizes=(192, 192)),
    Block(Kernel.CUDA_FLASH, FULL, BF16, lengths=(1, 64)),
    Block(Kernel.CUDA_EFFICIENT, PARTIAL, BF16, lengths=(100, 333)),
    Block(Kernel.CUDA_EFFICIENT, PARTIAL, FP16, heads=(6, 2), heads_first=False),
    Block(Kernel.CUDA_EFFICIENT, PARTIAL, FP32, lengths=(65, 31)),
    Block(Kernel.CUDA_EFFICIENT, CAUSAL, FP32, lengths=(77, 77), heads_first=False),
    Block(Kernel.CUDA_EFFICIENT, CAUSAL, BF16, sizes=(192, 128)),
    Block(Kernel.CUDA_EFFICIENT, FULL, FP32, sizes=(64, 32), lengths=(33, 129), heads=(4, 4)),
    Block(Kernel.CUDA_EFFICIENT, FULL, BF16, sizes=(512, 512)),
    Block(Kernel.CUDA_FLEX, FULL, BF16, lengths=(100, 333), softcap=0.9),
    Block(Kernel.CUDA_FLEX, CAUSAL, BF16, softcap=0.9, heads_first=False),
    Block(Kernel.CUDA_FLEX, PARTIAL, FP32, sizes=(64, 32), lengths=(65, 231), softcap=0.9),
    Block(Kernel.CUDA_FLEX, PARTIAL, BF16, lengths=(4100, 4200)),
    Block(Kernel.REFERENCE, FULL, BF16, sizes=(60, 60)),
    Block(Kernel.REFERENCE, CAUSAL, torch.float64),
]


def tensors(block: Block) -> list[Tensor]:
    """q, k, v and the gradient of the output, as views of longer sequences."""
    generator = torch.Generator("cuda").manual_seed(0)
    result = []
    for heads, length, size in (
        (block.heads[0], block.lengths[0], block.sizes[0]),
        (block.heads[1], block.lengths[1], block.sizes[0]),
        (block.heads[1], block.lengths[1], block.sizes[1]),
        (block.heads[0], block.lengths[0], block.sizes[1]),
    ):
        shape = (2, heads, length + 5, size) if block.heads_first else (2, length + 5, heads, size)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=block.dtype)
        result.append((x if block.heads_first else x.transpose(1, 2))[:, :, 3 : length + 3])
    return result


def mask_of(block: Block) -> Tensor | None:
    if block.kind is not PARTIAL:
        return None
    rows, columns = (torch.arange(n, device="cuda") for n in block.lengths)
    return (rows[:, None] % 7 != 3) & ((rows[:, None] + columns) % 3 != 0) & (columns > 20)


def results(block: Block, qkvg: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Out, weights' sum, dq, dk, dv with two blocks of keys where the kind allows."""
    q, k, v, grad = qkvg
    half = k.size(2) // 2
    parts = [slice(None)] if block.kind is CAUSAL else [slice(half), slice(half, None)]
    merge = Merge()
    for part in parts:
        merge.add(
            *block_forward(
                q,
                k[:, :, part],
                v[:, :, part],
                kind=block.kind,
                mask=None if mask is None else mask[:, part],
                scale=0.2,
                softcap=block.softcap,
            )
        )
    out, lse = merge.result()
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for part in parts:
        grads = block_backward(
            q,
            k[:, :, part],
            v[:, :, part],
            grad_out=grad,
            out=out.to(q.dtype),
            lse=for_backward(lse),
            kind=block.kind,
            mask=None if mask is None else mask[:, part],
            scale=0.2,
            softcap=block.softcap,
        )
        dq += grads[0]
        dk[:, :, part] += grads[1]
        dv[:, :, part] += grads[2]
    return [out, for_backward(lse), dq, dk, dv]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_kernel_agrees_with_plain_torch_in_float64(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkvg, mask = tensors(block), mask_of(block)
    assert choose_kernel(qkvg[0], qkvg[2], mask=mask, softcap=block.softcap) is block.kernel
    actual = results(block, qkvg, mask)
    monkeypatch.setattr(k_module, "choose_kernel", lambda *_, **__: Kernel.REFERENCE)
    expected = results(block, [x.double() for x in qkvg], mask)
    for a, b in zip(actual, expected, strict=True):
        assert a.isfinite().all()
        error = float((a.double() - b).abs().max() / b.abs().max())
        assert error <= BOUNDS.get(block.dtype, 1e-12)


def test_queries_that_see_nothing_have_no_output_and_no_gradient() -> None:
    block = Block(Kernel.CUDA_EFFICIENT, PARTIAL, BF16)
    out, _, dq, *_ = results(block, tensors(block), mask_of(block))
    for x in (out, dq):
        assert torch.equal(x[:, :, 3::7], torch.zeros_like(x[:, :, 3::7]))


def packed(
    mask: Mask, sizes: tuple[int, int], *, heads: tuple[int, int] = (4, 2), sinks: bool = False
) -> list[list[Tensor]]:
    """Out, dq, dk, dv in bfloat16 in one call, and in float64 by plain torch."""
    generator = torch.Generator("cuda").manual_seed(0)
    size, value_size = sizes
    shapes = [(heads[0], size), (heads[1], size), (heads[1], value_size), (heads[0], value_size)]
    whole = [torch.randn(2, 320, *each, generator=generator, device="cuda") for each in shapes]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v, grad = (x.bfloat16().to(dtype).requires_grad_() for x in whole)
        scores = torch.linspace(-1, 1, heads[0], dtype=dtype, device="cuda") if sinks else None
        out = masked_attention(q, k, v, mask=mask, sinks=scores)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    return results


EACH = EachSequence((Documents((1, 100, 19, 200)), Documents((320,))))


@pytest.mark.parametrize("mask", [Causal() & EACH, EACH, SlidingWindow(33) & EACH], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_call_of_many_segments_agrees_with_plain_torch(
    mask: Mask, sizes: tuple[int, int], *, sinks: bool
) -> None:
    for a, b in zip(*packed(mask, sizes, sinks=sinks), strict=True):
        assert a.isfinite().all()
        assert float((a.double() - b).abs().max() / b.abs().max()) <= 3e-2


def test_segments_without_queries_or_keys_have_output_and_gradients_of_zero() -> None:
    """See Note [Segments without queries or keys]."""
    q, k, v, grad = torch.randn(4, 48, 2, 64, device="cuda", dtype=torch.bfloat16)
    starts, key_starts = (
        torch.tensor(x, device="cuda", dtype=torch.int32)
        for x in ([0, 16, 32, 32, 48], [0, 16, 16, 32, 48])
    )
    for window in ((-1, -1), (-1, 0), (5, 0)):
        lengths = Lengths(starts, key_starts, (16, 16), window)
        out, lse = varlen.forward(q, k, v, lengths=lengths, scale=0.2)
        dq, dk, dv = varlen.backward(
            q, k, v, grad_out=grad, out=out, lse=lse, lengths=lengths, scale=0.2
        )
        assert lse[:, 16:32].isinf().all()
        for x, at in ((out, slice(16, 32)), (dq, slice(16, 32)), (dk, slice(16, 32))):
            assert torch.equal(x[at], torch.zeros_like(x[at]))
            assert x.isfinite().all()
        assert dv.isfinite().all()


def modes(address: str) -> list[float]:
    """The largest error of outputs and gradients in bfloat16, for each mode."""
    shutdown()
    info = RankInfo.from_env()
    assert info is not None
    sharers = -(-info.world_size // torch.cuda.device_count())
    backend = backend_for(torch.device("cuda"), ranks_per_device=sharers)
    runtime = initialize(info, device_type="cuda", init_method=address, backend=backend)
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, 512, heads, 64, generator=generator).to(runtime.device)
        for heads in (4, 2, 2, 4)
    )
    worst = []
    for mask in (Causal(), Causal() & Documents((100, 412)), SlidingWindow(100)):
        for degree, ring in ((None, False), (1, False), (None, True)):
            wholes = []
            for dtype in (torch.bfloat16, torch.float64):
                sinks = torch.linspace(-1, 1, 4, dtype=dtype, device=runtime.device)
                core = ContextParallel(degree, ring=ring, layout=HeadTail())
                attention = core.apply(Attention(mask, sinks=sinks), group)
                leaves = [
                    shard_sequence(x.to(dtype), group, layout=HeadTail()).requires_grad_()
                    for x in (q, k, v)
                ]
                out = attention(*leaves)
                part = shard_sequence(grad.to(dtype), group, layout=HeadTail())
                grads = torch.autograd.grad(out, leaves, part)
                wholes.append(
                    [unshard_sequence(x, group, layout=HeadTail()) for x in (out.detach(), *grads)]
                )
            pairs = zip(*wholes, strict=True)
            worst += [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return worst


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one a rank")
def test_the_modes_run_on_nccl(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"file://{tmp_path_factory.mktemp('nccl')}/store"
    for worst in run_distributed(modes, address, world_size=2, timeout=120):
        assert max(worst) <= 3e-2


def test_a_mask_of_positions_is_made_on_the_device_of_q() -> None:
    mask = block_tensor(SlidingWindow(3), range(8), range(8), device=torch.device("cuda"))
    assert mask.is_cuda
