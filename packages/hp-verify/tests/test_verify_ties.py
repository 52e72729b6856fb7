"""The rule of ties for any job: a router's choice that flips by rounding, or by a mistake."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.jobs import report
from hp_verify.recording.begin import recording
from hp_verify.recording.request import Request

TOKENS, WIDTH = 5, 4


class Router(nn.Module):
    """Takes the better two of three experts by their scores; two are nearly tied."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.base = [1.0, 0.5, 0.5 - gap]
        self.weight = nn.Parameter(torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.flatten(0, 1) @ self.weight.T + torch.tensor(self.base, dtype=x.dtype)
        return logits, logits.topk(2).indices


class Model(nn.Module):
    """A table, a router, and experts that scale by their number."""

    def __init__(self, gap: float, before: float) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.scale = nn.Identity()
        self.router = Router(gap)
        self.before = before

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale(self.table(ids) * self.before)
        _, chosen = self.router(x)
        scaled: Tensor = x.flatten(0, 1) * (1 + chosen.sum(-1, keepdim=True))
        return scaled


def train(gap: float, before: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model(gap, before).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([[0, 1, 2], [3, 4, 0]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _work(request: Request, gap: float, before: float, dtype: torch.dtype) -> None:
    with recording(request):
        train(gap, before, dtype)


def recorded(
    folder: Path, gap: float, *, before: float = 1.0, reference: str = "", dtype: torch.dtype
) -> Recording:
    folder.mkdir()
    request = Request(str(folder), reference=reference, steps=2)
    run_distributed(partial(_work, request, gap, before, dtype), world_size=1)
    return join(folder)


def compared(
    tmp_path: Path, gap: float, *, before: float = 1.0, dtype: torch.dtype = torch.float32
) -> Comparison:
    """Compare a job whose gap has the other sign with its reference."""
    expected = recorded(tmp_path / "reference", gap, dtype=dtype)
    theirs = str(tmp_path / "reference")
    actual = recorded(tmp_path / "job", -gap, before=before, reference=theirs, dtype=dtype)
    return compare(actual, expected, Floor(expected, []))


def test_what_follows_from_a_tie_is_excused(tmp_path: Path) -> None:
    found = compared(tmp_path, 1e-6)

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
    found = compared(tmp_path, gap, dtype=dtype)

    assert found.flip is not None
    assert not found.is_excused
    assert not found.is_equal


def test_a_difference_before_the_choice_is_not_excused(tmp_path: Path) -> None:
    found = compared(tmp_path, 1e-6, before=1.001)

    assert found.first is not None
    assert str(found.first).startswith("step 1, forward scale")
    assert found.flip is not None
    assert not found.is_equal


def test_equal_choices_are_no_flip(tmp_path: Path) -> None:
    expected = recorded(tmp_path / "reference", 1e-6, dtype=torch.float32)
    theirs = str(tmp_path / "reference")
    actual = recorded(tmp_path / "job", 1e-6, reference=theirs, dtype=torch.float32)

    found = compare(actual, expected, Floor(expected, []))

    assert found.is_equal
    assert found.flip is None
