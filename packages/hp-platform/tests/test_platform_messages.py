"""What ranks tell each other is JSON of the form that is expected, or an error on all of them."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_platform import PeerError, all_gather_json
from hp_platform.failures import messages
from hp_platform.failures.messages import as_form
from hp_platform.testing import run_distributed, run_in_threads


class Told(NamedTuple):
    """A named tuple with all that a form may be made of."""

    rank: int
    share: float
    name: str
    box: tuple[tuple[int, ...], tuple[int, bool]]
    by_rank: dict[int, list[str]]
    dim: int | None
    others: list[Told]


def _told(rank: int) -> Told:
    box = ((rank, 2), (3, rank == 0))
    return Told(rank, 0.1 * rank, "\u00e4\ud800", box, {rank: ["x"] * rank}, rank or None, [])


def _gather_all(group: ProcessGroup) -> list[Told]:
    mine = _told(group.rank())
    return all_gather_json(mine._replace(others=[mine]), of=Told, group=group)


def test_every_rank_has_what_every_rank_gave_in_its_types() -> None:
    expected = [_told(rank)._replace(others=[_told(rank)]) for rank in range(3)]
    for found in run_in_threads(_gather_all, world_size=3):
        assert found == expected
        assert repr(found) == repr(expected)


def test_floats_come_as_they_are() -> None:
    def main(group: ProcessGroup) -> list[float]:
        value = [math.pi, 1e-320, math.inf, -0.0, 2.0][group.rank()]
        return all_gather_json(value, of=float, group=group)

    found = run_in_threads(main, world_size=5)[3]
    assert repr(found) == "[3.141592653589793, 1e-320, inf, -0.0, 2.0]"


def _error(value: Any, of: Any, group: ProcessGroup) -> str:
    try:
        all_gather_json(value, of=of, group=group)
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_is_no_json_on_one_rank_is_an_error_on_all() -> None:
    def main(group: ProcessGroup) -> str:
        value = {1, 2} if group.rank() == 1 else [1, 2]
        return _error(value, list[int], group)

    first, second = run_in_threads(main, world_size=2)
    assert first.startswith("PeerError: rank 1 failed before telling each other: ValueError: value")
    assert second.startswith("ValueError: value (set) must be JSON")


def test_more_than_the_limit_on_one_rank_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 8)

    def main(group: ProcessGroup) -> str:
        return _error("x" * 6 * (1 + group.rank()), str, group)

    first, second = run_in_threads(main, world_size=2)
    assert first.startswith("PeerError: rank 1 failed")
    assert second == "ValueError: JSON of value (14 bytes) must have at most 8 bytes"


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        (int, True),
        (bool, 1),
        (float, "1"),
        (list[int], {"a": 1}),
        (dict[int, int], {"a": 1}),
        (dict[str, int], [["a", 1]]),
        (tuple[int, str], [1, "a", 2]),
        (tuple[int, str], [1, 2]),
        (tuple[int, ...], "12"),
        (Told, {"rank": 1}),
        (list[int | None], ["a"]),
    ],
)
def test_another_form_than_expected_is_an_error_that_names_its_rank(of: Any, wrong: Any) -> None:
    def main(group: ProcessGroup) -> str:
        return _error(wrong, of, group)

    for error in run_in_threads(main, world_size=1):
        assert error.startswith(f"PeerError: what rank 0 sent must be {of}: ")


@pytest.mark.parametrize(
    ("of", "values", "wrong"),
    [
        (list[float], [1, 2.5, "x"], "'x'"),
        (dict[str, tuple[int, ...]], {"a": [1], "b": [], "c": [2, 0.5]}, "0.5"),
        (list[tuple[int, str]], [[1, "a"], [2, "b", 3]], "'b', 3"),
        (list[list[bool]], [[True], [False, 0]], "'0'"),
    ],
)
def test_of_many_values_the_wrong_one_is_named(of: Any, values: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)):
        as_form(of, values)


def test_values_of_one_form_stay_apart() -> None:
    lists: Any = {"a": [[1, 2], []], "b": [], "c": [[3]]}
    assert as_form(dict[str, list[list[int]]], lists) == lists
    assert as_form(dict[int, tuple[float, ...]], {"7": [1], "8": []}) == {7: (1.0,), 8: ()}
    assert as_form(list[tuple[()]], [[], []]) == [(), ()]


def _hears(told: bytes, size: int) -> str:
    """Rank 1 sends bytes of its own making as the exchange of rank 0 would have them."""
    group = dist.group.WORLD
    assert group is not None
    if group.rank() == 0:
        return _error("here", str, group)
    lengths = torch.empty(2, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, torch.tensor([size]))
    if size == len(told):
        size = 1 << max(12, (size - 1).bit_length())
        row = torch.frombuffer(bytearray(told.ljust(size, b"\0")), dtype=torch.uint8)
        dist.all_gather_into_tensor(torch.empty(2 * len(row), dtype=torch.uint8), row)
    return ""


@pytest.mark.parametrize("told", [b"\xff\xfe\x00\x01ab", b'{"a":"b', b"[" * 100_000, b"9" * 9999])
def test_bytes_that_are_no_json_are_an_error(told: bytes) -> None:
    error = run_distributed(_hears, told, len(told), world_size=2)[0]
    assert error.startswith("PeerError: what rank 1 sent must be <class 'str'>: ")


@pytest.mark.parametrize("size", [0, -7, 1 << 62])
def test_an_impossible_size_is_an_error_before_memory_is_taken(size: int) -> None:
    error = run_distributed(_hears, b"x", size, world_size=2)[0]
    assert error.startswith(f"PeerError: bytes that rank 1 sends ({size}) must be in [1, ")
