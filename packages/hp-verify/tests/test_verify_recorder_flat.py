"""Flat tensors that `hp-verify -- JOB` finds parameters in, and rules for what nothing tells."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hp_base.errors import ConfigError
from hp_verify.recording.owners import Owners
from hp_verify.recording.parts import Reference
from hp_verify.recording.rules import read_rules
from hp_verify.recording.slices import Run, Slice, composed, parts_of_run, whole


def laid(slices: Sequence[Slice], values: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What slices say that a tensor is, each written into an empty parameter, and only once."""
    result = {name: torch.full_like(weight, math.nan) for name, weight in weights.items()}
    for part in slices:
        place = result[part.name][tuple(slice(*span) for span in part.box)]
        assert place.isnan().all()
        place.copy_(part.of(values))
    return result


def same(found: Tensor, expected: Tensor, first: int = 0, size: int | None = None) -> bool:
    """Whether a run of values is there, and nothing else."""
    size = expected.numel() - first if size is None else size
    flat, wanted = found.reshape(-1), expected.reshape(-1)
    is_run = torch.equal(flat[first : first + size], wanted[first : first + size])
    return is_run and int((~flat.isnan()).sum()) == size


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_of_values_is_boxes_of_its_parameter(shape: list[int], data: st.DataObject) -> None:
    weight = torch.randn(shape)
    first = data.draw(st.integers(0, weight.numel() - 1))
    size = data.draw(st.integers(1, weight.numel() - first))
    values = weight.reshape(-1)[first : first + size]

    parts = list(parts_of_run("w", tuple(shape), first, size))

    assert same(laid(parts, values, {"w": weight})["w"], weight, first, size)
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(st.integers(0, 23), st.integers(1, 24), st.integers(0, 3))
def test_a_run_of_a_shard_is_boxes_of_the_whole(first: int, size: int, at: int) -> None:
    whole_weight = torch.randn(6, 8)
    columns = whole_weight[:, [4, 5, 2, 3]]  # two runs of columns, as fused matrices are cut
    size = min(size, 24 - first)
    own = [
        Slice("w", (6, 8), ((0, 6), (0, 2)), ((0, 6), (4, 6))),
        Slice("w", (6, 8), ((0, 6), (2, 4)), ((0, 6), (2, 4))),
    ]
    flat = torch.cat([torch.zeros(at), columns.reshape(-1)[first : first + size]])

    found = laid(list(composed(own, Run("w", (6, 4), first, size, at))), flat, {"w": whole_weight})

    taken = ~found["w"].isnan()
    assert int(taken.sum()) == size
    assert torch.equal(found["w"][taken], whole_weight[taken])


def model() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "embed": torch.randn(10, 4, generator=generator),
        "norm": torch.ones(4),
        "up": torch.randn(6, 4, generator=generator),
        "bias": torch.zeros(6),
        "down": torch.randn(4, 6, generator=generator),
        "last": torch.ones(4),
    }


def test_parameters_that_lie_end_to_end_are_found_and_constants_between_them() -> None:
    weights = model()
    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])

    found = laid(Reference(lambda: weights).runs(flat), flat, weights)

    assert all(same(found[name], weights[name]) for name in weights)


def test_parameters_are_found_in_the_opposite_order_and_with_padding() -> None:
    weights = model()
    flat = torch.cat([weight.reshape(-1) for weight in reversed(weights.values())])
    flat = torch.cat([flat, torch.zeros(3)])

    found = laid(Reference(lambda: weights).runs(flat), flat, weights)

    assert all(same(found[name], weights[name]) for name in weights)


def test_half_of_a_buffer_is_found_where_it_is_cut_in_a_row() -> None:
    weights = model()
    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])
    half = flat[:57]  # in the fourth row of `up`

    found = laid(Reference(lambda: weights).runs(half), half, weights)

    assert same(found["embed"], weights["embed"])
    assert same(found["norm"], weights["norm"])
    assert same(found["up"], weights["up"], 0, len(half) - 44)


def test_values_rounded_to_another_dtype_are_found() -> None:
    weights = model()
    flat = weights["up"].to(torch.bfloat16).reshape(-1)

    (part,) = Reference(lambda: weights).runs(flat)

    assert (part.name, part.box) == ("up", whole((6, 4)))


def test_values_of_no_parameter_are_not_found() -> None:
    assert Reference(model).runs(torch.randn(40)) == []


def test_constants_without_neighbours_are_not_guessed() -> None:
    assert Reference(model).runs(torch.ones(4)) == []


class Model(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))


def learned(rules: str = "", rank: int = 0, **parameters: Tensor) -> tuple[Owners, Model]:
    path = Path(rules) if rules else None
    owners = Owners(Reference(model), read_rules(path) if path else None, rank, 2)
    there = Model(parameters or model())
    owners.learn(there, dict(there.named_parameters()))
    return owners, there


def test_a_view_of_a_parameter_is_found_in_memory() -> None:
    owners, there = learned()
    shard = there.get_parameter("norm").detach()[1:3]  # ones alone: no value tells
    shard.requires_grad_()

    name, slices = owners.of(shard, "?")

    assert name == "norm"
    assert [(part.name, part.box) for part in slices] == [("norm", ((1, 3),))]


def test_a_view_of_several_parameters_in_one_buffer_is_found_in_memory() -> None:
    weights = model()
    buffer = torch.cat([weight.reshape(-1) for weight in weights.values()])
    owners, there = learned()
    at = 0
    for name, weight in weights.items():
        there.get_parameter(name).data = buffer[at : at + weight.numel()].view(weight.shape)
        at += weight.numel()

    _, slices = owners.of(buffer[38:50], "?")

    assert [(part.name, part.box) for part in slices] == [
        ("embed", ((9, 10), (2, 4))),
        ("norm", ((0, 4),)),
        ("up", ((0, 1), (0, 4))),
        ("up", ((1, 2), (0, 2))),
    ]


def test_a_copy_of_many_parameters_is_found_by_values() -> None:
    owners, _ = learned()
    flat = torch.cat([weight.reshape(-1) for weight in model().values()])

    _, slices = owners.of(flat, "?")

    assert {part.name for part in slices} == model().keys()


def test_what_nothing_tells_of_has_a_name_to_be_listed_by() -> None:
    owners, _ = learned()

    assert owners.of(torch.randn(7), "of an optimizer, number 3") == (
        "of an optimizer, number 3",
        [],
    )


RULES = """
[groups]
tp = [[1, 0]]

[[parameter]]
name = 'my_(up|down)'
reference = '\\1'
placement = ["shard 0 over tp"]
"""


def test_a_rule_says_where_a_parameter_lies(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    other = torch.randn(3, 4)

    owners, there = learned(str(tmp_path / "rules.toml"), rank=0, my_up=other)

    name, slices = owners.of(there.get_parameter("my_up"), "?")
    assert name == "up"
    assert [(part.name, part.box) for part in slices] == [("up", ((3, 6), (0, 4)))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[parameter]]\nname = '('", "name ("),
        ("[[parameter]]\nname = 'a'\nplacement = ['cut 0']", "must be 'shard DIM'"),
        ("[[parameter]]\nname = 'a'\nplacement = ['shard 0 over tp']", "no group tp"),
        ("[[parameter]]\nnames = 'a'", "names"),
        ("[[parameter", "rules.toml"),
    ],
)
def test_a_file_that_is_not_one_of_rules_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_rules(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'my_up'\nplacement = ['shard 0']", "no parameter my_up"),
        ("name = 'my_up'\nreference = 'up'\nplacement = ['shard 1']", "would be its part"),
        ("name = 'my_up'\nreference = 'up'\nplacement = ['shard 2']", "of shape (6, 4)"),
    ],
)
def test_a_rule_that_does_not_fit_is_told(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(f"[[parameter]]\n{text}")

    with pytest.raises(ConfigError) as caught:
        learned(str(tmp_path / "rules.toml"), my_up=torch.randn(3, 4))
    assert said in str(caught.value)
