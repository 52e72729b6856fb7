"""The rule of ties for any job: a router's choice that flips by rounding, or by a mistake."""

import math
from array import array
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.findings import UPDATE, Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.comparing.ties import first_flip
from hp_verify.jobs import report
from hp_verify.recording.begin import begin
from hp_verify.recording.events import GRADIENT, RATE, Choice
from hp_verify.recording.request import Request
from hp_verify.recording.samples import Samples, choices_in

TOKENS, WIDTH = 5, 4


class Router(nn.Module):
    """Takes the better two of three experts by their scores; two are nearly tied."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.base = [1.0, 0.5, 0.5 - gap]
        self.weight = nn.Parameter(torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = x.flatten(0, 1) @ self.weight.T + torch.tensor(self.base, dtype=x.dtype)
        return logits, logits.topk(2).indices


class OffRouter(Router):
    """A router with a mistake: scores of its first expert, which all tokens take, are too large."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits, _ = super().forward(x)
        logits = logits * torch.tensor([1.01, 1.0, 1.0])
        return logits, logits.topk(2).indices


class ScatteringRouter(Router):
    """A router that gives the scores of what it chose as well, and zero for what it did not."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits, chosen = super().forward(x)
        weights = torch.zeros_like(logits).scatter(1, chosen, logits.gather(1, chosen))
        return logits, weights, chosen


class Model(nn.Module):
    """A table, a router, and experts that scale by their number."""

    def __init__(self, router: Router, before: float) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.scale = nn.Identity()
        self.router = router
        self.before = before

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale(self.table(ids) * self.before)
        *_, chosen = self.router(x)
        scaled: Tensor = x.flatten(0, 1) * (1 + chosen.sum(-1, keepdim=True))
        return scaled


def train(
    router: Router, before: float, dtype: torch.dtype, *, rate: float = 0.1, steps: int = 2
) -> None:
    torch.manual_seed(0)
    model = Model(router, before).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        model(torch.tensor([[0, 1, 2], [3, 4, 0]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _work(request: Request, work: Callable[[], None]) -> None:
    with closing(begin(request)):
        work()


def recorded(
    folder: Path,
    router: Router,
    *,
    before: float = 1.0,
    reference: str = "",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Recording:
    folder.mkdir()
    request = Request(str(folder), reference=reference, steps=2)
    work = partial(train, router, before, dtype, **options)
    run_distributed(partial(_work, request, work), world_size=1)
    return join(folder)


def compared(
    tmp_path: Path,
    job: Router,
    reference: Router,
    *,
    before: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Comparison:
    """Compare a job with its reference."""
    expected = recorded(tmp_path / "reference", reference, dtype=dtype)
    theirs = str(tmp_path / "reference")
    asked: dict[str, Any] = {"before": before, "reference": theirs, "dtype": dtype}
    actual = recorded(tmp_path / "job", job, **asked, **options)
    return compare(actual, expected, Floor(expected, []))


def test_what_follows_from_a_tie_is_excused(tmp_path: Path) -> None:
    found = compared(tmp_path, Router(-1e-6), Router(1e-6))

    assert found.first is not None
    assert found.flip is not None
    assert (found.flip.step, found.flip.name, found.flip.tokens) == (1, "router", 6)
    assert found.flip.margin == pytest.approx(1e-6, rel=0.1)
    assert found.is_excused
    assert found.is_equal
    lines = report(found).splitlines()
    assert "first other choice: step 1, router: 6 tokens choose other experts, scores" in lines[-3]
    assert lines[-2] == "excused: it follows from that choice, which rounding decides"
    assert lines[-1].startswith("equal over 2 steps")


@pytest.mark.parametrize(
    ("gap", "dtype"),
    [(1e-2, torch.float32), (1e-14, torch.float64)],
    ids=["scores are apart", "float64"],
)
def test_another_choice_that_is_no_tie_is_an_error(
    gap: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = compared(tmp_path, Router(-gap), Router(gap), dtype=dtype)

    assert found.flip is not None
    assert not found.is_excused
    assert not found.is_equal


def test_a_difference_before_the_choice_is_not_excused(tmp_path: Path) -> None:
    found = compared(tmp_path, Router(-1e-6), Router(1e-6), before=1.001)

    assert found.first is not None
    assert str(found.first).startswith("step 1, forward scale")
    assert found.flip is not None
    assert not found.is_equal


@pytest.mark.parametrize(
    ("option", "found_in"), [({"rate": 0.2}, RATE), ({"steps": 1}, UPDATE)], ids=str
)
def test_what_follows_from_no_choice_is_not_excused_by_one(
    option: dict[str, Any], found_in: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, Router(-1e-6), Router(1e-6), **option)

    assert found.first is not None
    assert found.first.phase == found_in
    assert "forward" in {difference.phase for difference in found.differences}
    assert found.flip is not None
    assert not found.is_equal


@pytest.mark.parametrize("kind", ["who", "times"])
def test_a_tie_excuses_neither_copies_that_differ_nor_gradients_that_are_doubled(
    kind: str, tmp_path: Path
) -> None:
    expected = recorded(tmp_path / "reference", Router(1e-6))
    reference = str(tmp_path / "reference")
    actual = recorded(tmp_path / "job", Router(-1e-6), reference=reference)
    gradient = actual.steps[1].tensors[GRADIENT]["table.weight"]
    sums, norm = expected.steps[1].tensors[GRADIENT]["table.weight"].rows[""]
    if kind == "who":
        gradient.disagree, gradient.who = 1.0, "rank-00000 and rank-00001"
    else:
        gradient.rows[""] = tuple(2.001 * x for x in sums), 2.001 * norm

    found = compare(actual, expected, Floor(expected, []))

    assert found.flip is not None
    assert not found.is_excused
    assert found.first is not None
    assert (found.first.phase, found.first.name) == (GRADIENT, "table.weight")


def test_equal_choices_are_no_flip(tmp_path: Path) -> None:
    found = compared(tmp_path, Router(1e-6), Router(1e-6))

    assert found.is_equal
    assert found.flip is None


def test_scores_that_differ_are_not_excused_by_the_choice_among_them(tmp_path: Path) -> None:
    found = compared(tmp_path, OffRouter(-1e-6), Router(1e-6))

    assert found.flip is not None
    assert str(found.first).startswith("step 1, forward router:[0]")
    assert not found.is_excused


def test_what_a_router_makes_of_its_choice_is_excused(tmp_path: Path) -> None:
    found = compared(tmp_path, ScatteringRouter(-1e-6), ScatteringRouter(1e-6))

    assert str(found.first).startswith("step 1, forward router:[1]")
    assert found.is_excused


def test_a_tie_with_scores_that_are_no_numbers_is_none() -> None:
    known = array("i", (0, 2, 1)).tobytes()
    scores = array("d", (1.0, math.nan, 0.5)).tobytes()
    choices = [
        Choice(
            1, "router", 0, "a", 0, "float32", "", 2, array("i", some).tobytes(), 3, known, scores
        )
        for some in ((0, 1), (0, 2))
    ]

    flip = first_flip(1, {"router": {("a", 0): choices[0]}}, {"router": {("a", 0): choices[1]}})

    assert flip is not None
    assert flip.margin == math.inf


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4)], ids=["samples", "tokens", "heads"])
def test_choices_are_known_by_sample_and_place(shape: tuple[int, ...]) -> None:
    scores = torch.arange(math.prod(shape) * 5).view(*shape, 5).double().sin()
    chosen = scores.topk(2).indices
    samples = Samples(torch.tensor([[1, 2, 3], [4, 5, 6]]), 0, None)

    found = [*choices_in({"logits": scores, "chosen": chosen}, samples)]

    assert [(choice.row, choice.first, choice.place) for choice in found] == [
        (name, 0, "logits") for name in samples.names
    ]
    for choice, wanted in zip(found, chosen.sort().values, strict=True):
        assert array("i", choice.chosen).tolist() == wanted.flatten().tolist()
