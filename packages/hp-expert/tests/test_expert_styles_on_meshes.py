"""Styles on meshes of one and two axes: what parameters become, and what is refused everywhere."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from hp_expert import (
    BaseExpertParallel,
    ExpertBatch,
    ExpertParallel,
    ExpertRanks,
    ExpertTensorParallel,
    GroupedExperts,
    LocalDispatcher,
    TensorParallel,
)
from hp_expert.placement import ExpertMesh
from hp_platform import PeerError, new_group
from hp_platform.testing import run_distributed, run_in_threads

EXPERTS, DIM, HIDDEN = 8, 4, 6
TP = {"w1": Shard(1), "w3": Shard(1), "b1": Shard(1), "b3": Shard(1), "w2": Shard(2)}


def drawn(num_experts: int = EXPERTS, hidden: int = HIDDEN) -> GroupedExperts:
    experts = GroupedExperts(num_experts, DIM, hidden, bias=True, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return experts


def grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("ep", "tp"))


def placements_of(name: str, axes: tuple[str, ...]) -> list[Placement]:
    tp = TP.get(name, Replicate())
    return [Shard(0) if axis == "ep" else tp for axis in axes]


def become_dtensors() -> None:
    whole = dict(drawn().named_parameters())
    mesh, swapped = grid(), grid("tp", "ep")
    cases: list[tuple[BaseExpertParallel, DeviceMesh, tuple[str, ...]]] = [
        (ExpertParallel(), mesh["ep"], ("ep",)),
        (TensorParallel(), mesh["tp"], ("tp",)),
        (ExpertTensorParallel(), mesh, ("ep", "tp")),
        (ExpertTensorParallel(), swapped, ("tp", "ep")),
        (ExpertTensorParallel(ep="x", tp="y"), grid("x", "y"), ("ep", "tp")),
    ]
    for style, on, axes in cases:
        experts = drawn()
        experts.w3.requires_grad_(False)
        assert style.apply(experts, on) is experts
        for name, p in experts.named_parameters():
            assert isinstance(p, DTensor)
            assert p.device_mesh == on
            assert list(p.placements) == placements_of(name, axes)
            assert p.is_leaf
            assert p.requires_grad == (name != "w3")
            assert p.shape == whole[name].shape
            assert torch.equal(p.full_tensor(), whole[name])
        has_ep = "ep" in axes
        assert experts.num_local_experts == (4 if has_ep else 8)
        place = on.get_local_rank(axes.index("ep")) if has_ep else 0
        assert experts.first_expert == 4 * place


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on gathers of two axes
def test_parameters_become_dtensors_of_the_whole() -> None:
    run_distributed(become_dtensors, world_size=4)


def keep_what_they_have() -> None:
    """A rank keeps its part of its own values, which others do not see."""
    experts = drawn()
    with torch.no_grad():
        experts.w1.fill_(dist.get_rank())
    ExpertTensorParallel().apply(experts, grid())
    w1 = experts.w1
    assert isinstance(w1, DTensor)
    assert (w1.to_local() == dist.get_rank()).all()
    assert w1.to_local().untyped_storage().nbytes() == w1.to_local().numel() * 8


def test_values_are_not_sent() -> None:
    run_distributed(keep_what_they_have, world_size=4)


def from_meta() -> Tensor:
    experts = GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True, device="meta", dtype=torch.float64)
    ExpertTensorParallel().apply(experts, grid())
    assert all(p.device.type == "meta" for p in experts.parameters())
    experts.to_empty(device="cpu")
    ranks = experts.ranks
    assert ranks is not None
    values = drawn()
    for (name, mine), value in zip(experts.named_parameters(), values.parameters(), strict=True):
        part = value.detach().chunk(2)[ranks.ep_rank]
        if name in TP:
            part = part.chunk(2, TP[name].dim)[ranks.tp_rank]
        held = mine.detach()
        assert isinstance(held, DTensor)
        held.to_local().copy_(part)
    x, counts = torch.ones(8, DIM, dtype=torch.float64), torch.ones(8, dtype=torch.int64)
    y: Tensor = experts(x, counts)
    return y.detach()


def test_parameters_on_the_meta_device_become_dtensors_without_memory() -> None:
    expected = drawn()(torch.ones(8, DIM, dtype=torch.float64), torch.ones(8, dtype=torch.int64))
    for actual in run_distributed(from_meta, world_size=4):
        assert torch.allclose(actual, expected, rtol=1e-12)


def gradients_on(on: ExpertMesh, style: BaseExpertParallel) -> list[Tensor]:
    experts = drawn()
    style.apply(experts, on)
    x = torch.randn(9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    y = experts(x, torch.tensor([1, 2, 0, 3, 0, 0, 1, 2]))
    (y * torch.cos(x.detach())).sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in experts.parameters())]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found if t is not None]


def on_mesh_and_groups() -> None:
    mesh = grid()
    ep, tp = mesh["ep"], mesh["tp"]
    cases: list[tuple[BaseExpertParallel, ExpertMesh, ExpertMesh]] = [
        (ExpertParallel(), ep, ep.get_group()),
        (TensorParallel(), tp, tp.get_group()),
        (ExpertTensorParallel(), mesh, (ep.get_group(), tp.get_group())),
    ]
    for style, on_mesh, on_groups in cases:
        mine, theirs = gradients_on(on_mesh, style), gradients_on(on_groups, style)
        assert len(mine) == 2 + 6
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_mesh_and_its_groups_give_the_same_bits() -> None:
    run_distributed(on_mesh_and_groups, world_size=4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": drawn()}) for _ in range(2))


def by_plan() -> None:
    model = Model()
    parallelize_module(model, grid()["ep", "tp"], {"layers.*.experts": ExpertTensorParallel()})
    for p in model.parameters():
        assert isinstance(p, DTensor)
        assert p.device_mesh.ndim == 2


def test_torch_applies_a_style_of_two_axes_by_its_plan() -> None:
    run_distributed(by_plan, world_size=4)


def refused_meshes() -> None:
    mesh, experts = grid(), drawn()
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    for style, on, message in (
        (ExpertParallel(), mesh, r"mesh.ndim \(2\) must equal 1"),
        (TensorParallel(), mesh, r"mesh.ndim \(2\) must equal 1"),
        (ExpertTensorParallel(), mesh["ep"], r"mesh_dim_names \(.*'ep'.*\) must be \('ep', 'tp'\)"),
        (ExpertTensorParallel(), grid("ep", "cp"), r"mesh_dim_names .* must be \('ep', 'tp'\)"),
        (ExpertTensorParallel(ep="dp"), mesh, r"mesh_dim_names .* must be \('dp', 'tp'\)"),
        (ExpertTensorParallel(), cube, r"select them with mesh\['ep', 'tp'\]"),
        (ExpertTensorParallel(), init_device_mesh("cpu", (4,)), "mesh_dim_names"),
    ):
        with pytest.raises(ValueError, match=message):
            style.apply(experts, on)
    with pytest.raises(TypeError, match="must be a mesh of two axes or a pair of groups"):
        ExpertTensorParallel().apply(experts, mesh["ep"].get_group())
    pair = (mesh["ep"].get_group(), mesh["ep"].get_group())
    with pytest.raises(ValueError, match="rows and columns of one grid"):
        ExpertTensorParallel().apply(experts, pair)
    assert experts.ranks is None
    assert not any(isinstance(p, DTensor) for p in experts.parameters())


def test_meshes_that_do_not_fit_are_refused_on_every_rank() -> None:
    run_distributed(refused_meshes, world_size=4)


def test_a_hidden_dim_that_cannot_be_cut_is_refused_on_every_rank() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = drawn(hidden=7)
        message = r"hidden \(7\) must be divisible by the size of the tensor group \(2\)"
        with pytest.raises(ValueError, match=message):
            TensorParallel().apply(experts, group)
        assert experts.w1.shape[1] == 7

    run_in_threads(rank_main, world_size=2)


def test_experts_are_spread_once_whatever_the_style() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        for first in (TensorParallel(), ExpertParallel()):
            experts = drawn()
            first.apply(experts, group)
            with pytest.raises(ValueError, match="only once"):
                TensorParallel().apply(copy.deepcopy(experts), group)

    run_in_threads(rank_main, world_size=2)
    run_in_threads(rank_main, world_size=1)


def test_ranks_with_other_experts_are_refused_on_every_rank() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = drawn(num_experts=4 * (1 + (group.rank() == 2)))
        with pytest.raises(ValueError, match=r"experts \(.*must equal those of rank"):
            ExpertParallel().apply(experts, group)
        assert experts.ranks is None

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_ranks_with_experts_of_other_dtypes_are_refused_on_every_rank() -> None:
    """Their rows would be refused, or computed in another precision, on some ranks only."""

    def rank_main(group: dist.ProcessGroup) -> None:
        experts = drawn().to(torch.float32 if group.rank() == 2 else torch.float64)
        with pytest.raises(ValueError, match=r"experts \(.*float.*must equal those of rank"):
            ExpertParallel().apply(experts, group)

    run_in_threads(rank_main, world_size=4, timeout=20)


def crossed() -> None:
    """The first ep group has the first rank of one tp group and the last of the other."""
    ep, tp = new_group([[0, 3], [1, 2]], name="ep"), new_group([[0, 1], [2, 3]], name="tp")
    assert ep is not None
    assert tp is not None
    with pytest.raises(ValueError, match="rows and columns of one grid"):
        ExpertTensorParallel().apply(drawn(), (ep, tp))


def test_groups_that_cross_each_other_are_refused_on_every_rank() -> None:
    run_distributed(crossed, world_size=4, timeout=20)


def refused_by_the_last() -> int:
    ep = new_group([[0, 2], [1, 3]], name="ep")
    assert ep is not None
    module = nn.ModuleList() if dist.get_rank() == 3 else drawn()
    if dist.get_rank() % 2 == 0:
        ExpertParallel().apply(module, ep)
        return 3
    with pytest.raises((ValueError, PeerError), match="must contain GroupedExperts") as caught:
        ExpertParallel().apply(module, ep)
    return getattr(caught.value, "rank", 3)


def test_the_rank_that_refuses_is_named_by_its_place_among_all() -> None:
    assert run_distributed(refused_by_the_last, world_size=4, timeout=20) == [3, 3, 3, 3]


def test_what_one_rank_refuses_no_rank_does() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        module = nn.ModuleList([drawn()]) if group.rank() else nn.ModuleList()
        kind = PeerError if group.rank() else ValueError
        with pytest.raises(kind, match="must contain GroupedExperts"):
            ExpertParallel().apply(module, group)

    run_in_threads(rank_main, world_size=4, timeout=20)


class OwnPartition(ExpertParallel):
    """Experts from the last to the first: rank 0 has the last ones."""

    def partition(self, experts: GroupedExperts, ranks: ExpertRanks) -> None:
        with torch.no_grad():
            for p in experts.parameters():
                p.copy_(p.flip(0))
        super().partition(experts, ranks)


class OwnCombine(ExpertParallel):
    """Doubles what comes back."""

    def combine(self, y: Tensor, state: Any, *, ranks: ExpertRanks, num_experts: int) -> Tensor:
        return 2 * super().combine(y, state, ranks=ranks, num_experts=num_experts)


class OwnDispatch(ExpertTensorParallel):
    """Negates what is sent."""

    def dispatch(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        ranks: ExpertRanks,
        num_experts: int,
    ) -> tuple[ExpertBatch, Any]:
        return super().dispatch(-x, experts, weights, ranks=ranks, num_experts=num_experts)


def own_styles() -> None:
    x, counts = torch.randn(8, DIM, dtype=torch.float64), torch.tensor([1, 2, 0, 3, 0, 0, 1, 1])
    mesh = grid()
    apart = drawn()
    with torch.no_grad():
        for p in apart.parameters():
            p.copy_(p.flip(0))
    cases: list[tuple[BaseExpertParallel, DeviceMesh, Tensor]] = [
        (OwnPartition(), mesh["ep"], apart(x, counts)),
        (OwnCombine(), mesh["ep"], 2 * drawn()(x, counts)),
        (OwnDispatch(), mesh, drawn()(-x, counts)),
    ]
    for style, on, expected in cases:
        experts = drawn()
        style.apply(experts, on)
        assert torch.allclose(experts(x, counts), expected, rtol=1e-11)


def test_each_part_of_a_style_can_be_overridden_alone() -> None:
    torch.manual_seed(0)
    run_distributed(own_styles, world_size=4)


def test_a_style_takes_a_dispatcher_of_ones_own() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        made: list[int] = []

        def make(over: dist.ProcessGroup, num_experts: int) -> LocalDispatcher:
            assert over is group
            made.append(num_experts)
            return LocalDispatcher(num_experts)

        experts = drawn()
        ExpertParallel(dispatcher=make).apply(experts, group)
        assert experts.dispatcher == LocalDispatcher(EXPERTS)
        assert made == [EXPERTS]

    run_in_threads(rank_main, world_size=1)
