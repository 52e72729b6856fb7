"""Layouts are those of torch's placements; every matrix has one owner, and work is balanced."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hp_optim import Layout, Split
from hp_optim.layout import Indices, indices, meet
from hp_optim.newton_schulz import flops
from hp_optim.plan import Plan, make_plan
from hp_platform.testing import run_distributed

CUTS: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = [
    ((4,), (Shard(0),), (10, 3)),
    ((4,), (Shard(0),), (5, 3)),
    ((4,), (Shard(0),), (2, 3)),
    ((2, 2), (Shard(0), Shard(1)), (7, 5)),
    ((2, 2), (Shard(0), Shard(0)), (9, 2)),
    ((2, 2), (Replicate(), Shard(1)), (4, 3)),
    ((2, 2), (Shard(0), Shard(2)), (3, 4, 5)),
]


def compare_with_torch() -> int:
    """Compare layouts with what torch cuts; return the number of those."""
    for sizes, placements, shape in CUTS:
        mesh = init_device_mesh("cpu", sizes)
        whole = torch.arange(torch.Size(shape).numel()).view(shape).double()
        cut = distribute_tensor(whole, mesh, placements)
        layout = Layout.of(cut)
        assert layout.ranks == (0, 1, 2, 3)
        held = layout.held[torch.distributed.get_rank()]
        here = whole
        for dim, numbers in enumerate(held):
            here = here.index_select(dim, torch.tensor(list(numbers), dtype=torch.long))
        assert torch.equal(here, cut.to_local())
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="must not be partial"):
        Layout.of(DTensor.from_local(torch.ones(2, 2), mesh, [torch.distributed.tensor.Partial()]))
    strange = DTensor.from_local(
        torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
    )
    with pytest.raises(ValueError, match=r"local shape \(3, 2\) of \(8, 2\) must equal \(2, 2\)"):
        Layout.of(strange)
    return len(CUTS)


def test_layouts_are_what_torch_cuts() -> None:
    assert run_distributed(compare_with_torch, world_size=4) == [len(CUTS)] * 4


@pytest.mark.parametrize(
    ("held", "wanted", "here", "there"),
    [
        (range(4, 8), range(6), range(2), range(4, 6)),
        (range(4), range(6, 9), range(0), range(0)),
        (range(3, 9), range(0, 12, 2), range(1, 6, 2), range(2, 5)),
        (range(2, 6), (9, 5, 2), (0, 3), (2, 1)),
        ((0, 1, 6, 7), range(1, 7), range(1, 3), (0, 5)),
    ],
)
def test_what_two_sets_of_indices_share(
    held: Indices, wanted: Indices, here: Indices, there: Indices
) -> None:
    found = meet(held, wanted)
    assert [*map(len, found)] == [len(here), len(there)]
    assert found in {(here, there), (indices(here), indices(there))} or not len(here)
    assert [held[i] for i in found[0]] == [wanted[i] for i in found[1]]


def test_a_layout_with_a_part_too_few_or_too_many_is_refused() -> None:
    rows, cols = range(4), range(3)
    with pytest.raises(
        ValueError, match=r"different parts \(9\) must equal those of the whole \(12"
    ):
        Layout((4, 3), (0, 1), ((range(2), cols), (range(2, 3), cols)))
    with pytest.raises(ValueError, match=r"\(18\) must equal"):
        Layout((4, 3), (0, 1), ((rows, cols), (range(2), cols)))


def sharded(shape: tuple[int, ...], ranks: int, dim: int = 0, copies: int = 1) -> Layout:
    size = -(-shape[dim] // ranks)
    held = [
        tuple(
            range(length)[index * size : (index + 1) * size] if d == dim else range(length)
            for d, length in enumerate(shape)
        )
        for _ in range(copies)
        for index in range(ranks)
    ]
    return Layout(shape, tuple(range(ranks * copies)), tuple(held))


def plan(*layouts: Layout, elements: int = 1000) -> Plan:
    return make_plan(layouts, [Split()] * len(layouts), steps=5, elements=elements)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_owners_have_equal_work(ranks: int) -> None:
    """Of the matrices of a dense model of 14 layers."""
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)] * 14
    made = plan(*(sharded(shape, ranks) for shape in shapes))
    loads = [Fraction(0)] * ranks
    for matrix, owner in made.owners.items():
        loads[owner] += flops(matrix.shape, 5)
    assert len(made.owners) == len(shapes)
    assert max(loads) <= Fraction(21, 20) * sum(loads) / ranks
    assert len(made.shared) > 3


def test_every_piece_travels_once_to_its_owner_and_back_to_all_that_have_it() -> None:
    layouts = [sharded((10, 6), 4), sharded((4, 6, 5), 4, dim=1), sharded((3, 8), 4, dim=1)]
    made = plan(*layouts, elements=20)
    for number in range(len(made.shared)):
        buckets = [made.bucket(number, me) for me in range(4)]
        for one in range(4):
            for other in range(4):
                assert buckets[one].sent[other] == buckets[other].received[one]
                assert buckets[one].returned[other] == buckets[other].applied[one]
        for matrix in made.shared[number]:
            for name in ("sent", "applied"):
                pieces = [p for b in buckets for rank in getattr(b, name) for p in rank]
                assert sum(p.numel for p in pieces if p.matrix == matrix) == (
                    len(matrix.rows) * len(matrix.cols)
                )


def test_of_copies_the_nearest_sends_and_all_get_the_update() -> None:
    made = plan(sharded((8, 4), 2, copies=2), sharded((8, 4), 2, copies=2))
    first, second = made.owners
    assert (made.owners[first], made.sources(first)) == (0, [0, 1])
    assert (made.owners[second], made.sources(second)) == (1, [0, 1])
    assert [len(made.bucket(0, me).sent[0]) for me in range(4)] == [1, 1, 0, 0]
    assert [len(made.bucket(0, me).applied[0]) for me in range(4)] == [1, 1, 1, 1]


def test_experts_over_ranks_do_not_travel_and_copies_of_them_share_the_work() -> None:
    made = plan(sharded((6, 4, 4), 2))
    assert made.shared == ()
    assert [made.owners[matrix] for matrix in made.alone] == [0, 0, 0, 1, 1, 1]
    made = plan(sharded((8, 4, 4), 2, copies=2))
    assert made.alone == ()
    assert sorted(made.owners.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not any(
        made.bucket(0, me).sent[other] for me in range(4) for other in {*range(4)} - {me}
    )


def test_plans_differ_in_their_digests() -> None:
    one, other = plan(sharded((8, 4), 2)), plan(sharded((8, 6), 2))
    assert one.digest() == plan(sharded((8, 4), 2)).digest() != other.digest()
