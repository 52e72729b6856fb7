"""Parts of parameters, found in a reference by their values, and by names and shapes."""

import math

import pytest
import torch

from hp_verify.recording.parts import Reference
from hp_verify.recording.slices import Slice


def reference() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "q.weight": torch.randn(6, 4, generator=generator),
        "k.weight": torch.randn(4, 4, generator=generator),
        "experts.up": torch.randn(3, 5, 4, generator=generator),
        "q.bias": torch.zeros(6),
        "norm.weight": torch.ones(4),
    }


def found(name: str, values: torch.Tensor) -> list[Slice]:
    slices, _ = Reference(reference).find({name: values})
    return slices.get(name, [])


def put_together(name: str, values: torch.Tensor, target: str) -> torch.Tensor:
    """Write what slices hold into an empty tensor, and return it."""
    result = torch.full_like(reference()[target], math.nan)
    for part in found(name, values):
        if part.name == target:
            result[tuple(slice(*span) for span in part.box)] = part.of(values)
    return result


def test_rows_of_a_matrix_are_found_whatever_they_are_called() -> None:
    whole = reference()["q.weight"]

    result = put_together("other.name", whole[2:5].clone(), "q.weight")

    assert torch.equal(result[2:5], whole[2:5])
    assert result.isnan().sum() == 3 * 4


def test_fused_and_reordered_matrices_are_taken_apart() -> None:
    whole = reference()
    fused = torch.cat([whole["k.weight"][:2], whole["q.weight"][[4, 0, 1]]])

    keys = put_together("qkv.weight", fused, "k.weight")
    queries = put_together("qkv.weight", fused, "q.weight")

    assert torch.equal(keys[:2], whole["k.weight"][:2])
    assert torch.equal(queries[[4, 0, 1]], whole["q.weight"][[4, 0, 1]])


def test_columns_are_found() -> None:
    whole = reference()["q.weight"]

    result = put_together("q.weight", whole[:, 1:3].clone(), "q.weight")

    assert torch.equal(result[:, 1:3], whole[:, 1:3])


@pytest.mark.parametrize(
    "cut", [(slice(1, 3),), (slice(None), slice(2, 4))], ids=["experts", "rows"]
)
def test_stacked_experts_are_found_by_expert_and_by_row(cut: tuple[slice, ...]) -> None:
    whole = reference()["experts.up"]

    result = put_together("up", whole[cut].clone(), "experts.up")

    assert torch.equal(result[cut], whole[cut])


def test_one_expert_of_a_stack_is_found() -> None:
    whole = reference()["experts.up"]

    result = put_together("experts.1.weight", whole[1].clone(), "experts.up")

    assert torch.equal(result[1], whole[1])
    assert result[0].isnan().all()


def test_constants_follow_what_their_module_is_called() -> None:
    whole = reference()
    mine = {"layer.q.weight": whole["q.weight"][3:].clone(), "layer.q.bias": torch.zeros(3)}

    slices, _ = Reference(lambda: whole).find(mine)

    (bias,) = slices["layer.q.bias"]
    assert (bias.name, bias.box) == ("q.bias", ((3, 6),))


def test_what_is_not_the_references_is_not_found() -> None:
    assert found("new.weight", torch.randn(7, 4)) == []


def test_what_neither_values_nor_names_tell_is_paired_by_shape_in_order() -> None:
    whole = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(3, 2), "c": torch.randn(4)}
    mine = {"x.weight": torch.randn(3, 2), "y.weight": torch.randn(3, 2), "z": torch.randn(5)}

    slices, renaming = Reference(lambda: whole).find(mine)

    assert {name: parts[0].name for name, parts in slices.items()} == {
        "x.weight": "a.weight",
        "y.weight": "b.weight",
    }
    assert renaming("y") == "b"


def test_shapes_that_are_not_as_many_here_and_there_are_not_paired() -> None:
    whole = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(3, 2)}

    slices, _ = Reference(lambda: whole).find({"x.weight": torch.randn(3, 2)})

    assert slices == {}


@pytest.mark.parametrize("is_found", [True, False])
def test_of_a_job_that_is_given_weights_names_tell_unless_all_its_values_do(
    is_found: bool,
) -> None:
    whole = {name: torch.randn(3, 2) for name in ("a.weight", "b.weight", "c.weight")}
    whole["d.weight"] = torch.ones(2)
    mine = {"a.weight": whole["b.weight"].clone(), "d.weight": torch.ones(2)}
    mine["b.weight"] = whole["a.weight"].clone() if is_found else torch.randn(3, 2)
    mine["other.weight"] = whole["c.weight"].clone()

    slices, _ = Reference(lambda: whole, are_given=True).find(mine)

    assert {name: parts[0].name for name, parts in slices.items()} == {
        "a.weight": "b.weight" if is_found else "a.weight",
        "b.weight": "a.weight" if is_found else "b.weight",
        "d.weight": "d.weight",
        "other.weight": "c.weight",
    }
