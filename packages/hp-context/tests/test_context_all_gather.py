"""The all-gather K/V mode equals attention in one process, and moves what it says it moves."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.testing import record_exchanges, run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

BSHD, BNSD = (1, 2), (2, 1)
EVERYTHING, IN_ORDER = Full(), Contiguous()


@dataclass(frozen=True)
class Case:
    mask: Mask = EVERYTHING
    layout: SequenceLayout = IN_ORDER
    heads: tuple[int, int] = (4, 4)
    seq: int = 24
    dims: tuple[int, int] = BSHD
    dtype: torch.dtype = torch.float64
    value_size: int = 8
    degree: int | None = 1
    foreign: bool = False


def lonely(query: Tensor, key: Tensor) -> Tensor:
    """Queries 5, 12, 19, ... see nothing."""
    return (query % 7 != 5) & ((query + key) % 3 != 0)


def inputs(case: Case, seed: int = 0) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    heads, kv_heads = case.heads
    for count, size in (
        (heads, 8),
        (kv_heads, 8),
        (kv_heads, case.value_size),
        (heads, case.value_size),
    ):
        shape = [2, 0, 0, size]
        shape[case.dims[0]], shape[case.dims[1]] = case.seq, count
        result.append(torch.randn(shape, dtype=torch.float64, generator=generator).to(case.dtype))
    return result


def backward(out: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def alone(case: Case, seed: int = 0) -> list[Tensor]:
    q, k, v, grad = inputs(case, seed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seq_dim, head_dim = case.dims
    out = masked_attention(q, k, v, mask=case.mask, seq_dim=seq_dim, head_dim=head_dim)
    return backward(out, grad, leaves)


class Foreign(nn.Module):
    """Somebody else's attention, [B, H, S, D] inside."""

    def __init__(self, dims: tuple[int, int], *, is_causal: bool = False) -> None:
        super().__init__()
        self.dims, self.is_causal = dims, is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (x.movedim(self.dims, (2, 1)) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, None if self.is_causal else bias, 0.0, self.is_causal, enable_gqa=True
        )
        return out.movedim((2, 1), self.dims)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def core(case: Case) -> nn.Module:
    seq_dim, head_dim = case.dims
    if case.foreign:
        parallel = ContextParallel(
            case.degree,
            seq_dim=seq_dim,
            head_dim=head_dim,
            mask=case.mask,
            mask_kwarg_name="bias",
            layout=case.layout,
        )
        return parallel.apply(Foreign(case.dims), world())
    parallel = ContextParallel(case.degree, seq_dim=seq_dim, head_dim=head_dim, layout=case.layout)
    return parallel.apply(Attention(case.mask, seq_dim=seq_dim, head_dim=head_dim), world())


def shard(x: Tensor, case: Case) -> Tensor:
    return shard_sequence(x, world(), seq_dim=case.dims[0], layout=case.layout)


def unshard(x: Tensor, case: Case) -> Tensor:
    return unshard_sequence(x, world(), seq_dim=case.dims[0], layout=case.layout)


def split(cases: list[Case]) -> list[list[Tensor]]:
    results = []
    for case in cases:
        q, k, v, grad = (shard(x, case) for x in inputs(case))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mine = backward(core(case)(*leaves), grad, leaves)
        results.append([unshard(x, case) for x in mine])
    return results


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def assert_equal(cases: list[Case], *, ranks: int, bound: float = 1e-12) -> None:
    expected = [alone(case) for case in cases]
    for results in run_distributed(split, cases, world_size=ranks):
        for case, whole, single in zip(cases, results, expected, strict=True):
            assert max(errors(whole, single)) <= bound, case


MASKS = [
    Full(),
    Causal(),
    SlidingWindow(5),
    SlidingWindow(3, 2),
    Causal() & Documents((1, 7, 3, 13)),
    PositionMask(lonely),
    Causal() & PositionMask(lonely),
]
LAYOUTS = [Contiguous(), HeadTail()]
RATIOS = [(4, 4), (4, 2), (3, 1)]


@pytest.mark.sample("2", "3")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_outputs_and_gradients_equal_one_process(ranks: int) -> None:
    assert_equal(
        [Case(mask, layout, heads) for mask in MASKS for layout in LAYOUTS for heads in RATIOS],
        ranks=ranks,
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_other_dims_and_head_sizes_equal_one_process(ranks: int) -> None:
    assert_equal(
        [
            Case(mask, layout, (4, 2), dims=dims, value_size=size)
            for mask in (Causal(), Causal() & Documents((1, 7, 3, 13)))
            for layout in LAYOUTS
            for dims, size in ((BNSD, 8), (BSHD, 5), (BNSD, 3))
        ],
        ranks=ranks,
    )


def test_long_documents_and_windows_are_cut_and_still_equal_one_process() -> None:
    masks = [
        Causal() & Documents((100, 70, 2, 3, 145, 192)),
        Documents((200, 312)),
        SlidingWindow(63),
        SlidingWindow(70, 10) & Documents((300, 212)),
    ]
    assert_equal(
        [Case(mask, layout, (2, 1), seq=512) for mask in masks for layout in LAYOUTS], ranks=2
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_strange_module_gets_all_keys_and_its_rows_of_the_mask(ranks: int) -> None:
    assert_equal(
        [
            Case(mask, layout, (4, 2), dims=dims, value_size=size, foreign=True)
            for mask in (Full(), Causal(), Causal() & Documents((1, 7, 3, 13)))
            for layout in LAYOUTS
            for dims, size in ((BSHD, 8), (BNSD, 5))
        ],
        ranks=ranks,
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_puts_head_tail_parts_in_order_for_the_core(ranks: int) -> None:
    assert_equal(
        [
            Case(mask, HeadTail(), heads, dims=dims, degree=None, foreign=foreign)
            for mask in (Causal(), Causal() & Documents((1, 7, 3, 13)))
            for heads, dims in (((4, 4), BSHD), ((4, 1), BNSD))
            for foreign in (False, True)
        ],
        ranks=ranks,
    )


def test_the_hybrid_mode_equals_one_process() -> None:
    assert_equal(
        [
            Case(mask, layout, heads, degree=2, foreign=foreign)
            for mask in (Full(), Causal(), Causal() & Documents((1, 7, 3, 13)))
            for layout in LAYOUTS
            for heads in ((4, 4), (4, 1), (6, 2))
            for foreign in (False, True)
        ],
        ranks=4,
    )


def over_mesh(shape: tuple[int, int], degree: int) -> list[Tensor]:
    case = Case(Causal(), HeadTail())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("gather", "heads"))
    with pytest.raises(
        ValueError, match=rf"must equal the size of the inner axis heads \({degree}"
    ):
        ContextParallel(degree + 1).apply(Attention(), mesh)
    with pytest.raises(ValueError, match="must have one named axis, or two"):
        ContextParallel(degree).apply(Attention(), init_device_mesh("cpu", shape))
    q, k, v, grad = (shard(x, case) for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parallel = ContextParallel(degree, layout=case.layout)
    first, second = (parallel.apply(Attention(Causal()), mesh) for _ in "ab")
    mine = backward(first(*leaves), grad, leaves)
    assert torch.equal(mine[0], second(*leaves))
    return [unshard(x, case) for x in mine]


@pytest.mark.parametrize(("shape", "degree"), [((2, 2), 2), ((4, 1), 1), ((1, 4), 4)])
def test_a_mesh_of_two_axes_stands_for_both(shape: tuple[int, int], degree: int) -> None:
    expected = alone(Case(Causal()))
    for whole in run_distributed(over_mesh, shape, degree, world_size=4):
        assert max(errors(whole, expected)) <= 1e-12


def test_ulysses_is_bit_equal_under_head_tail_too() -> None:
    case = Case(Causal(), HeadTail(), dtype=torch.float32, degree=None)
    assert_equal([case], ranks=2, bound=0.0)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-2)], ids=str
)
def test_narrow_types_come_close(dtype: torch.dtype, bound: float) -> None:
    cases = [Case(Causal(), layout, (4, 2), dtype=dtype) for layout in LAYOUTS]
    assert_equal(cases, ranks=4, bound=bound)


def test_queries_that_see_nothing_give_and_get_nothing() -> None:
    case = Case(PositionMask(lonely), HeadTail())
    for ((out, dq, dk, dv),) in run_distributed(split, [case], world_size=2):
        for x in (out, dq):
            assert torch.equal(x[:, 5::7], torch.zeros_like(x[:, 5::7]))
        assert all(x.isfinite().all() for x in (dk, dv))


def recomputed(cases: list[Case], use_reentrant: bool) -> list[list[Tensor]]:
    """Two microbatches in flight, the core recomputed, backward in the order of forward."""
    results = []
    for case in cases:
        attend = core(case)
        batches = [[shard(x, case) for x in inputs(case, seed)] for seed in (0, 1)]
        leaves = [[x.requires_grad_() for x in batch[:3]] for batch in batches]
        outs = [checkpoint(attend, *qkv, use_reentrant=use_reentrant) for qkv in leaves]
        for out, qkv, batch in zip(outs, leaves, batches, strict=True):
            out.backward(batch[3])
            grads = [x.grad for x in qkv if x.grad is not None]
            results.append([unshard(x, case) for x in (out.detach(), *grads)])
    return results


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_microbatches_in_flight_do_not_meet(use_reentrant: bool) -> None:
    cases = [
        Case(Causal(), layout, (4, 2), degree=degree, foreign=foreign)
        for layout in LAYOUTS
        for degree in (1, 2)
        for foreign in (False, True)
    ]
    expected = [alone(case, seed) for case in cases for seed in (0, 1)]
    for results in run_distributed(recomputed, cases, use_reentrant, world_size=4):
        for whole, single in zip(results, expected, strict=True):
            assert max(errors(whole, single)) <= 1e-12


def test_reruns_are_bit_equal() -> None:
    case = Case(Causal(), HeadTail(), (4, 1), dtype=torch.float32)
    first, second = (run_distributed(split, [case], world_size=4)[0][0] for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def counted(case: Case) -> list[tuple[Counter[str], int]]:
    """Collectives and bytes that this rank sends to others, in forward and in backward."""
    q, k, v, grad = (shard(x, case) for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = core(case)
    attend(*leaves)  # compares notes between ranks
    with record_exchanges() as forward:
        out = attend(*leaves)
    with record_exchanges() as back:
        torch.autograd.grad(out, leaves, grad)
    return [
        (Counter(e.kind for e in way), sum(e.num_bytes for e in way)) for way in (forward, back)
    ]


PART = 2 * 2 * (24 // 4) * (8 + 8)  # batch, key/value heads, positions, k and v: numbers of a rank


def test_keys_travel_once_each_way_for_a_strange_module() -> None:
    for layout in LAYOUTS:
        case = Case(Causal(), layout, (4, 2), dtype=torch.bfloat16, foreign=True)
        for forward, back in run_distributed(counted, case, world_size=4):
            assert forward == ({"all_gather": 1}, 3 * PART * 2)
            assert back == ({"all_to_all": 1}, 3 * PART * 4)


def test_all_keys_are_gathered_again_in_backward_and_their_gradients_go_home() -> None:
    case = Case(Full(), HeadTail(), (4, 2), dtype=torch.bfloat16)
    for forward, back in run_distributed(counted, case, world_size=4):
        assert forward == ({"all_gather": 1}, 3 * PART * 2)
        assert back == ({"all_gather": 1, "all_to_all": 1}, 3 * PART * 2 + 3 * PART * 4)


def test_gradients_of_keys_that_nobody_sees_stay_away() -> None:
    """Of each rank before it a rank sees the head only; three quarters of all is sent densely."""
    case = Case(Causal(), HeadTail(), (4, 2), dtype=torch.bfloat16)
    for rank, (forward, back) in enumerate(run_distributed(counted, case, world_size=4)):
        seen = rank * PART // 2 + (3 - rank) * PART
        assert forward == ({"all_gather": 1}, 3 * PART * 2)
        gathered_and_home = {"all_gather": 1, "all_to_all": 1}
        assert back == (gathered_and_home, 3 * PART * 2 + seen * 4)


def test_contiguous_causal_keys_go_to_later_ranks_alone() -> None:
    case = Case(Causal(), Contiguous(), (4, 2), dtype=torch.bfloat16)
    for rank, (forward, back) in enumerate(run_distributed(counted, case, world_size=4)):
        later, earlier = (3 - rank) * PART, rank * PART
        assert forward == ({"all_to_all": 1}, later * 2)
        assert back == ({"all_to_all": 2}, later * 2 + earlier * 4)


def test_a_window_sends_what_it_reaches() -> None:
    """Two keys before a query, one behind: two to the next rank, one to the rank before."""
    case = Case(SlidingWindow(2, 1), Contiguous(), (4, 2), dtype=torch.bfloat16)
    row = PART // 6
    for rank, (forward, back) in enumerate(run_distributed(counted, case, world_size=4)):
        keys = 2 * row * (rank < 3) + row * (rank > 0)
        home = 2 * row * (rank > 0) + row * (rank < 3)
        assert forward == ({"all_to_all": 1}, keys * 2)
        assert back == ({"all_to_all": 2}, keys * 2 + home * 4)


def under_autocast() -> list[Tensor]:
    case = Case(Causal(), HeadTail(), dtype=torch.float32)
    q, k, v, grad = (shard(x, case) for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = core(case)(*leaves)
    assert out.dtype == torch.bfloat16
    mine = backward(out, grad.bfloat16(), leaves)
    return [unshard(x, case) for x in mine]


def test_autocast_means_what_it_means_to_torch_s_attention() -> None:
    expected = alone(Case(Causal(), dtype=torch.float32))
    for whole in run_distributed(under_autocast, world_size=2):
        assert [x.dtype for x in whole] == [torch.bfloat16, *[torch.float32] * 3]
        assert max(errors(whole, expected)) <= 4e-2


def saved() -> list[int]:
    """Bytes that forward keeps for backward."""
    case = Case(Causal(), HeadTail())
    q, k, v, _ = (shard(x, case) for x in inputs(case))
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        core(case)(*(x.requires_grad_() for x in (q, k, v)))
    return kept


def test_forward_keeps_its_own_part_alone() -> None:
    own = 2 * 4 * (24 // 4) * 8 * 8
    for kept in run_distributed(saved, world_size=4):
        assert sorted(kept) == [own // 8, own, own, own, own]
