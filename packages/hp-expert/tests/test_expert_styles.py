"""Spreading experts over ranks: which rank keeps what, by whose hand, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from hp_expert import (
    AllToAllDispatcher,
    BaseExpertParallel,
    ExpertBatch,
    ExpertParallel,
    ExpertRanks,
    GroupedExperts,
    LocalDispatcher,
    MoE,
    TensorParallel,
    TopKRouter,
)
from hp_platform.testing import run_distributed, run_in_threads

EXPERTS, DIM, HIDDEN = 8, 4, 6


def numbered(device: str = "cpu") -> GroupedExperts:
    """All weights of an expert are its index."""
    experts = GroupedExperts(EXPERTS, DIM, HIDDEN, device=device)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.arange(EXPERTS).view(-1, 1, 1).expand_as(parameter))
    return experts


def test_each_rank_keeps_its_run_of_experts() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = numbered()
        experts.w3.requires_grad_(False)
        assert ExpertParallel().apply(experts, group) is experts
        assert experts.first_expert == 2 * group.rank()
        assert (experts.num_local_experts, experts.num_experts) == (2, EXPERTS)
        for name, parameter in experts.named_parameters():
            assert parameter[:, 0, 0].tolist() == [experts.first_expert, experts.first_expert + 1]
            assert parameter.is_leaf
            assert parameter.requires_grad == (name != "w3")
            # The rest of the whole parameter can be freed.
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        assert list(experts.state_dict()) == ["w1", "w2", "w3"]
        assert f"here {2 * group.rank()}..{2 * group.rank() + 1}" in repr(experts)

    run_in_threads(rank_main, world_size=4)


def test_parameters_on_the_meta_device_are_spread_without_memory() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = GroupedExperts(EXPERTS, DIM, HIDDEN, device="meta")
        ExpertParallel().apply(experts, group)
        assert experts.w1.shape == (4, HIDDEN, DIM)
        assert experts.w2.device.type == "meta"
        experts.to_empty(device="cpu")
        experts.reset_parameters()
        assert experts(torch.ones(8, DIM), torch.ones(8, dtype=torch.int64)).shape == (8, DIM)

    run_in_threads(rank_main, world_size=2)


class Model(nn.Module):
    """Two layers with experts, under the names that a plan would match."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(TopKRouter(DIM, EXPERTS, 2), GroupedExperts(EXPERTS, DIM, HIDDEN)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def by_plan() -> float:
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = model(x)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"layers.*.experts": ExpertParallel()})
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    assert all(isinstance(p, DTensor) and p.to_local().shape[0] == 4 for p in experts)
    return float((model(x) - expected).abs().max())


def test_torch_applies_the_style_by_its_plan() -> None:
    assert max(run_distributed(by_plan, world_size=4)) < 1e-6


def test_one_call_spreads_all_experts_of_a_model() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = Model()
        ExpertParallel().apply(model, group)
        assert all(p.shape[0] == 4 for n, p in model.named_parameters() if "experts" in n)

    run_in_threads(rank_main, world_size=2)


def test_parameters_that_layers_share_stay_shared() -> None:
    def tied() -> Model:
        torch.manual_seed(0)
        model = Model()
        first, second = (part for part in model.modules() if isinstance(part, GroupedExperts))
        first.w3 = first.w1
        second.w1, second.w2 = first.w1, first.w2
        return model

    def gradients(model: Model, rank: int) -> list[Tensor]:
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(rank))
        model(x).square().sum().backward()
        experts = [p.grad for n, p in model.named_parameters() if "experts" in n]
        return [gradient for gradient in experts if gradient is not None]

    model, spread = tied(), [tied(), tied()]
    expected = [gradients(model, rank) for rank in range(2)][-1]  # of both, they add up

    def rank_main(group: dist.ProcessGroup) -> None:
        ExpertParallel().apply(spread[group.rank()], group)
        actual = gradients(spread[group.rank()], group.rank())
        assert len(actual) == len(expected) == 3
        for part, whole in zip(actual, expected, strict=True):
            assert torch.allclose(part, whole.chunk(2)[group.rank()], rtol=1e-4, atol=1e-5)

    run_in_threads(rank_main, world_size=2)


@pytest.mark.parametrize("style", [ExpertParallel(), TensorParallel()])
def test_parameters_that_nobody_knows_how_to_cut_are_refused_before_anything_changes(
    style: BaseExpertParallel,
) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = numbered()
        experts.scales = nn.Parameter(torch.ones(EXPERTS, 1))
        with pytest.raises(ValueError, match=r"parameter \(scales\) must be one of"):
            style.apply(experts, group)
        assert experts.w1.shape[0] == EXPERTS
        assert experts.ranks is None

    run_in_threads(rank_main, world_size=2, timeout=20)


def test_a_group_of_one_exchanges_nothing() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = numbered()
        ExpertParallel().apply(experts, group)
        assert experts.dispatcher == LocalDispatcher(EXPERTS)

    run_in_threads(rank_main, world_size=1)


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_refused_on_every_rank() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        model = Model()
        with pytest.raises(ValueError, match=r"num_experts \(8\) must be divisible .* \(3\)"):
            ExpertParallel().apply(model, group)
        assert all(p.shape[0] == 8 for n, p in model.named_parameters() if "experts" in n)

    run_in_threads(rank_main, world_size=3)


def test_experts_are_spread_only_once() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = numbered()
        ExpertParallel().apply(experts, group)
        with pytest.raises(ValueError, match="only once"):
            ExpertParallel().apply(experts, group)

    run_in_threads(rank_main, world_size=2)


def test_a_module_without_experts_is_refused() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"module \(Linear\) must contain GroupedExperts"):
            ExpertParallel().apply(nn.Linear(2, 2), group)

    run_in_threads(rank_main, world_size=1)


def test_a_mesh_of_two_axes_is_refused() -> None:
    run_distributed(two_axes, world_size=2)


def two_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match=r"mesh.ndim \(2\) must equal 1"):
        ExpertParallel().apply(numbered(), mesh)


def test_a_copied_module_shares_the_group() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = numbered()
        ExpertParallel().apply(experts, group)
        duplicate = copy.deepcopy(experts)
        assert isinstance(duplicate.dispatcher, AllToAllDispatcher)
        assert duplicate.dispatcher.group is group
        assert duplicate.w1.data_ptr() != experts.w1.data_ptr()

    run_in_threads(rank_main, world_size=2)


class Recording(ExpertParallel):
    """A style of one's own that looks at what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        ranks: ExpertRanks,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        self.seen.append("dispatch")
        batch, state = super().dispatch(x, experts, weights, ranks=ranks, num_experts=num_experts)
        return batch, (state, "mine")

    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        self.seen.append("combine")
        assert state[1] == "mine"
        return super().combine(y, state[0], ranks=ranks, num_experts=num_experts)


def test_a_style_of_ones_own_overrides_dispatch_and_combine() -> None:
    x, counts = torch.randn(8, DIM), torch.tensor([1, 2, 0, 3, 0, 0, 1, 1])
    expected = numbered()(x, counts)

    def rank_main(group: dist.ProcessGroup) -> None:
        style, experts = Recording(), numbered()
        style.apply(experts, group)
        assert torch.allclose(copy.deepcopy(experts)(x, counts), expected)
        assert style.seen == ["dispatch", "combine"]

    run_in_threads(rank_main, world_size=2)


class Replicated(BaseExpertParallel):
    """All experts on every rank: nothing is partitioned, nothing travels."""

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        del experts, ranks

    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        ranks: ExpertRanks,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        del ranks
        local = LocalDispatcher(num_experts)
        rows, state = local.prepare(x, experts, weights)
        return local.finish_dispatch(rows, state), None

    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        del state, ranks, num_experts
        return y


def test_a_style_of_ones_own_may_do_without_ranks() -> None:
    torch.manual_seed(0)
    moe, x = (
        MoE(TopKRouter(DIM, EXPERTS, 2), GroupedExperts(EXPERTS, DIM, HIDDEN)),
        torch.randn(3, 5, DIM),
    )
    expected, _ = moe(x)

    def rank_main(group: dist.ProcessGroup) -> None:
        replicated = copy.deepcopy(moe)
        Replicated().apply(replicated, group)
        assert torch.equal(replicated(x)[0], expected)

    run_in_threads(rank_main, world_size=2)
