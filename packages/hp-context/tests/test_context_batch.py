"""A batch is split so that a model sees what it would see of the whole."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context import (
    Contiguous,
    HeadTail,
    SequenceLayout,
    documents_of,
    shard_batch,
    shard_sequence,
    shift_labels,
)
from hp_platform.testing import RankError, run_in_threads

SEQ = 16
IDS = torch.arange(2 * SEQ).view(2, SEQ)
LABELS = IDS + 100


def parts(
    batch: dict[str, Any], layout: SequenceLayout | None = None, world_size: int = 2
) -> list[dict[str, Any]]:
    def split(group: ProcessGroup) -> dict[str, Any]:
        return shard_batch(batch, group, layout=Contiguous() if layout is None else layout)

    return run_in_threads(split, world_size=world_size)


def whole(found: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([part[name] for part in found], 1)


def test_positions_are_made_and_labels_shifted_before_the_split() -> None:
    found = parts({"input_ids": IDS, "labels": LABELS})
    assert torch.equal(whole(found, "input_ids"), IDS)
    assert torch.equal(whole(found, "position_ids"), torch.arange(SEQ)[None])
    # The last token of the first part predicts the first of the second one.
    assert torch.equal(whole(found, "shift_labels")[:, :-1], LABELS[:, 1:])
    assert (whole(found, "shift_labels")[:, -1] == -100).all()
    assert all(torch.equal(part["labels"], part["shift_labels"]) for part in found)


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()])
def test_everything_along_the_sequence_is_split_alike(layout: SequenceLayout) -> None:
    packed = torch.cat([torch.arange(5), torch.arange(11)])[None]
    embeds = torch.randn(2, SEQ, 3)
    batch: dict[str, Any] = {
        "inputs_embeds": embeds,
        "position_ids": packed,
        "token_type_ids": IDS,
        "pixel_values": torch.zeros(3, 4),
        "use_cache": False,
    }
    found = parts(batch, layout)
    for rank, part in enumerate(found):
        for name in ("inputs_embeds", "position_ids", "token_type_ids"):

            def expected(group: ProcessGroup, name: str = name) -> Tensor:
                return shard_sequence(batch[name], group, layout=layout)

            assert torch.equal(part[name], run_in_threads(expected, world_size=2)[rank])
        assert part["pixel_values"] is batch["pixel_values"]
        assert part["use_cache"] is False
        assert part.keys() == batch.keys()


def test_padding_on_the_right_becomes_ignored_labels() -> None:
    mask = torch.ones(2, SEQ, dtype=torch.int64)
    mask[1, 11:] = 0
    found = parts({"input_ids": IDS, "labels": LABELS, "attention_mask": mask})
    assert all("attention_mask" not in part for part in found)
    targets = whole(found, "shift_labels")
    assert torch.equal(targets[0], shift_labels(LABELS)[0])
    assert torch.equal(targets[1, :10], LABELS[1, 1:11])
    assert (targets[1, 10:] == -100).all()


PACKED = torch.cat([torch.arange(5), torch.arange(11)])[None]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padding on the left": (
        {"attention_mask": (torch.arange(SEQ) > 2).expand(2, -1)},
        r"0 on the right only: .*EachSequence\(masks\) .* Causal\(\) & Documents\(\(3, 13\)\)",
    ),
    "a mask of four dims": (
        {"attention_mask": torch.ones(2, 1, SEQ, SEQ)},
        r"attention_mask \(\(2, 1, 16, 16\)\) must be \[B, 16\], 0 at padding",
    ),
    "documents and a mask": (
        {"attention_mask": torch.ones(2, SEQ), "position_ids": PACKED.expand(2, -1)},
        "attention_mask must be left out where position_ids pack documents",
    ),
    "positions of three axes": (
        {"position_ids": torch.zeros(3, 2, SEQ)},
        r"position_ids \(\(3, 2, 16\)\) must be \[B, 16\]",
    ),
    "a length that ranks cannot share": (
        {"input_ids": IDS[:, :-1]},
        r"sequence length \(15\) must be divisible by the number of ranks \(2\); pad it by 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_exactly_is_refused(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(RankError, match=message):
        parts({"input_ids": IDS} | change)


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(RankError, match=r"batch \(\['labels'\]\) must have input_ids or inputs_em"):
        parts({"labels": LABELS})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_documents_are_what_position_ids_say(lengths: list[int]) -> None:
    packed = torch.cat([torch.arange(length) for length in lengths])
    assert documents_of(packed).lengths == tuple(lengths)
    assert documents_of(packed[None]).lengths == tuple(lengths)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 2, 3], r"\(1 at global position 0\) must count up by 1 from 0 in each document"),
        ([0, 1, 3], r"\(3 after 1 at global position 2\)"),
        ([0, 1, 1], r"\(1 after 1 at global position 2\)"),
        ([[0, 1], [0, 1]], r"position_ids \(\(2, 2\)\) must be \[S\] or \[1, S\]"),
    ],
)
def test_other_position_ids_are_no_documents(positions: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents_of(torch.tensor(positions))
