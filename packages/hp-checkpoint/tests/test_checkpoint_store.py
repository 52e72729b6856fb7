"""Boxes of tensors that cover them, and what a rank alone saves and loads."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_checkpoint import Box, Checkpoint, coverage_error, load, rename, save, sources_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[Box]]:
    """A shape and boxes that often tile it: the shape cut into pieces, some changed or dropped."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    pieces = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offsets, sizes = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if sizes[dim] < 2:
            pieces.append(Box(offsets, sizes))
            continue
        cut = draw(st.integers(1, sizes[dim] - 1))
        first = (*sizes[:dim], cut, *sizes[dim + 1 :])
        rest = (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])
        moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
        pieces += [Box(offsets, first), Box(moved, rest)]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(pieces) - 1))
        pieces[at] = Box(tuple(draw(st.integers(0, 3)) for _ in shape), pieces[at].sizes)
    return shape, draw(st.permutations(pieces))


@given(boxes())
def test_coverage_is_that_every_element_is_in_one_box(case: tuple[list[int], list[Box]]) -> None:
    shape, pieces = case
    margin = [n + 10 for n in shape]
    count = torch.zeros(margin, dtype=torch.int64)
    for offsets, sizes in pieces:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    expected = torch.zeros(margin, dtype=torch.int64)
    expected[tuple(slice(0, n) for n in shape)] = 1
    assert (coverage_error(shape, pieces) is None) == bool((count == expected).all())


def test_many_chunks_are_checked_quickly() -> None:
    pieces = [Box((i, j), (1, 1)) for i in range(200) for j in range(50)]
    assert coverage_error([200, 50], pieces) is None
    assert coverage_error([200, 50], [*pieces[:-1], pieces[0]]) is not None


def _saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint of a rank alone."""
    return save(
        folder,
        "saved",
        lambda: sources_of(tensors),
        commit=lambda staging: rename(staging, lambda _: "saved"),
        group=None,
    )


def test_a_rank_alone_saves_and_loads_without_a_group(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4).t(), "step": torch.tensor(7), "none": torch.empty(0, 2)}
    path = _saved(tmp_path, tensors)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(checkpoint, found, group=None)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError, match="which no rank wants"):
        load(checkpoint, {"w": found["w"]}, group=None)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.verify()


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.float32, torch.float64),
        (torch.uint8, torch.bool),
    ],
    ids=str,
)
def test_nothing_is_read_as_another_dtype(
    tmp_path: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    """Least of all where the bytes would fit."""
    tensors = {"w": torch.ones(3, 4, dtype=saved)}
    path = _saved(tmp_path, tensors)
    found = torch.zeros(3, 4, dtype=wanted)
    with pytest.raises(CheckpointError, match=rf"dtype \({wanted}\) must equal .*\({saved}\)"):
        load(Checkpoint.open(path), {"w": found}, group=None)
    assert not found.any()
