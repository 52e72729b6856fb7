"""Splitting a sequence over ranks and undoing it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from hp_context import (
    Contiguous,
    Deal,
    HeadTail,
    SequenceLayout,
    head_to_seq,
    local_positions,
    seq_to_head,
    shard_sequence,
    unshard_sequence,
)
from hp_context.batch import to_positions, to_ranks
from hp_platform.testing import run_distributed, run_in_threads

LAYOUTS = [Contiguous(), HeadTail()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_tokens_labels_and_positions_are_split_alike_and_put_together_again(
    dtype: torch.dtype, layout: SequenceLayout
) -> None:
    tokens = torch.arange(48).view(2, 24).to(dtype)
    whole_positions = torch.arange(24)

    def rank(group: ProcessGroup) -> None:
        part = shard_sequence(tokens, group, layout=layout)
        assert part.shape == (2, 6)
        assert part.is_contiguous()
        positions = local_positions(24, group, layout=layout)
        assert torch.equal(part, tokens[:, positions])
        expected = shard_sequence(whole_positions, group, seq_dim=0, layout=layout)
        assert torch.equal(positions, expected)
        assert torch.equal(unshard_sequence(part, group, layout=layout), tokens)

    run_in_threads(rank, world_size=4)


def test_each_rank_has_one_chunk_of_each_half_under_head_tail() -> None:
    runs = HeadTail().runs(12, 3)
    assert runs == tuple((range(2 * i, 2 * i + 2), range(10 - 2 * i, 12 - 2 * i)) for i in range(3))


def test_layouts_are_values() -> None:
    assert len({HeadTail(), HeadTail(), Contiguous()}) == 2


@pytest.mark.parametrize("seq_dim", [0, 1, -1])
def test_the_sequence_may_be_any_dim(seq_dim: int) -> None:
    tokens = torch.arange(144).view(12, 12)

    def rank(group: ProcessGroup) -> None:
        part = shard_sequence(tokens, group, seq_dim=seq_dim, layout=HeadTail())
        assert part.size(seq_dim) == 4
        whole = unshard_sequence(part, group, seq_dim=seq_dim, layout=HeadTail())
        assert torch.equal(whole, tokens)

    run_in_threads(rank, world_size=3)


def over_two_axes(shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("gather", "heads"))
    tokens = torch.arange(48).view(2, 24)
    group = dist.group.WORLD
    assert group is not None
    for layout in LAYOUTS:
        expected = shard_sequence(tokens, group, layout=layout)
        part = shard_sequence(tokens, mesh, layout=layout, ulysses_degree=shape[1])
        assert torch.equal(part, expected)
        positions = local_positions(24, mesh, layout=layout, ulysses_degree=shape[1])
        assert torch.equal(part, tokens[:, positions])
        leaf = part.double().requires_grad_()
        whole = unshard_sequence(leaf, mesh, layout=layout, ulysses_degree=shape[1])
        assert torch.equal(whole, tokens.double())
        (whole.sum() * (dist.get_rank() + 1)).backward()
        assert leaf.grad is not None
        assert leaf.grad.unique().tolist() == [10.0]  # 1 + 2 + 3 + 4
    parts = (range(3),), (range(3, 4), range(9, 12)), (range(4, 9),), (range(12, 24),)
    part = shard_sequence(tokens, mesh, layout=Deal(parts), ulysses_degree=shape[1])
    whole = unshard_sequence(part, mesh, layout=Deal(parts), ulysses_degree=shape[1])
    assert torch.equal(whole, tokens)
    with pytest.raises(ValueError, match=r"mesh.ndim \(2\) must equal 1"):
        shard_sequence(tokens, mesh)
    with pytest.raises(ValueError, match=r"must equal the size of the inner axis heads"):
        local_positions(24, mesh, ulysses_degree=shape[1] + 1)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_a_mesh_of_two_axes_stands_for_all_its_ranks(shape: tuple[int, int]) -> None:
    run_distributed(over_two_axes, shape, world_size=4)


def test_head_tail_needs_an_even_part() -> None:
    def rank(group: ProcessGroup) -> None:
        message = r"sequence length \(6\) must be divisible by 2 times .* \(2\); pad it by 2"
        with pytest.raises(ValueError, match=message):
            shard_sequence(torch.zeros(1, 6), group, layout=HeadTail())
        with pytest.raises(ValueError, match=message):
            unshard_sequence(torch.zeros(1, 3), group, layout=HeadTail())
        with pytest.raises(ValueError, match=message):
            local_positions(6, group, layout=HeadTail())

    run_in_threads(rank, world_size=2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reordering_there_and_back_is_the_identity_with_its_gradient(
    layout: SequenceLayout,
) -> None:
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    back = to_ranks(to_positions(x, layout, num_ranks=3, seq_dim=1), layout, num_ranks=3, seq_dim=1)
    assert torch.equal(back, x)
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad(back, x, weight)
    assert torch.equal(grad, weight)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_of_a_part_is_the_sum_over_the_ranks_that_saw_it(
    layout: SequenceLayout,
) -> None:
    def rank(group: ProcessGroup) -> Tensor:
        part = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        (unshard_sequence(part, group, layout=layout).sum() * (group.rank() + 1)).backward()
        assert part.grad is not None
        return part.grad

    for grad in run_in_threads(rank, world_size=3):
        assert grad.tolist() == [[6.0, 6.0]]


def test_a_length_that_does_not_divide_names_the_padding() -> None:
    def rank(group: ProcessGroup) -> None:
        message = r"sequence length \(10\) must be divisible by .* \(4\); pad it by 2"
        with pytest.raises(ValueError, match=message):
            shard_sequence(torch.zeros(1, 10), group)
        with pytest.raises(ValueError, match=message):
            local_positions(10, group)

    run_in_threads(rank, world_size=4)


@pytest.mark.parametrize(("seq_dim", "head_dim"), [(1, 2), (2, 1), (0, 2), (2, 0)])
def test_an_exchange_there_and_back_is_the_identity(seq_dim: int, head_dim: int) -> None:
    def rank(group: ProcessGroup) -> None:
        torch.manual_seed(group.rank())
        shape = [2, 2, 2, 5]
        shape[seq_dim], shape[head_dim] = 3, 8
        x = torch.randn(shape)
        exchanged = seq_to_head(x, group=group, seq_dim=seq_dim, head_dim=head_dim)
        assert (exchanged.size(seq_dim), exchanged.size(head_dim)) == (12, 2)
        back = head_to_seq(exchanged, group=group, seq_dim=seq_dim, head_dim=head_dim)
        assert torch.equal(back, x)

    run_in_threads(rank, world_size=4)


def test_exchanged_positions_are_in_rank_order_and_heads_are_this_rank_s() -> None:
    def rank(group: ProcessGroup) -> None:
        positions = local_positions(6, group)
        x = positions[None, :, None, None] * 10 + torch.arange(4)[None, None, :, None]
        exchanged = seq_to_head(x.double(), group=group)
        mine = torch.tensor([2 * group.rank(), 2 * group.rank() + 1])
        expected = torch.arange(6)[:, None] * 10 + mine
        assert torch.equal(exchanged[0, :, :, 0], expected.double())

    run_in_threads(rank, world_size=2)


@pytest.mark.parametrize("index", [(0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3)])
def test_replicated_heads_get_the_sum_of_their_gradients(index: tuple[int, ...]) -> None:
    num_heads = max(index) + 1

    def rank(group: ProcessGroup) -> None:
        torch.manual_seed(group.rank())
        x = torch.randn(2, 3, num_heads, 5, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, 6, 2, 5, dtype=torch.float64)
        y = seq_to_head(x, group=group, head_index=index)
        (grad,) = torch.autograd.grad(y, x, weight)
        plain = seq_to_head(x[:, :, torch.tensor(index)], group=group)
        assert torch.equal(y, plain)
        (expected,) = torch.autograd.grad(plain, x, weight)
        assert (grad - expected).abs().max() < 1e-14

    run_in_threads(rank, world_size=2)
