"""`hp-verify --same-start` and `--rules`: jobs that begin with other weights, in hidden parts."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording
from hp_verify.recording.request import Request
from integration_tests.jobs.recorded import record


class Gathered(torch.autograd.Function):
    """Features of all ranks; every rank computes the same loss of them."""

    @staticmethod
    def forward(_ctx: object, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


class Shared(torch.autograd.Function):
    """What all ranks use, each for its own features."""

    @staticmethod
    def forward(_ctx: object, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.mixer = nn.Linear(8, 16)
        self.out = nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.out(self.mixer(self.embed(tokens)).relu())
        return mixed


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.hidden = nn.Linear(8, 16 // dist.get_world_size())
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.hidden(Shared.apply(self.table(tokens)))  # type: ignore[no-untyped-call]
        logits: Tensor = self.head(Gathered.apply(mixed).relu())  # type: ignore[no-untyped-call]
        return logits


def train(*, cut: bool) -> None:
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    torch.manual_seed(5 + dist.get_rank() if cut else 1)  # as somebody else's weights
    model = Cut() if cut else Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        tokens = torch.randint(30, (4, 9), generator=generator)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


RULES = """
[groups]
tp = [[{order}]]

[[parameter]]
name = 'hidden\\.(weight|bias)'
reference = 'mixer.\\1'
placement = ["shard 0 over tp"]
"""


def recorded(request: Request, *, cut: bool) -> Recording:
    return record(request, partial(train, cut=cut), ranks=1 + cut)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Recording]:
    folder = str(tmp_path_factory.mktemp("rules") / "reference")
    return folder, recorded(Request(folder, steps=2), cut=False)


def judged(reference: tuple[str, Recording], tmp_path: Path, order: str) -> Comparison:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.format(order=order) if order else "")
    folder, expected = reference
    asked = Request(str(tmp_path / "job"), reference=folder, steps=2, start=True, rules=str(rules))
    return compare(recorded(asked, cut=True), expected, Floor(expected, []))


def test_a_rule_puts_hidden_parts_together(
    reference: tuple[str, Recording], tmp_path: Path
) -> None:
    comparison = judged(reference, tmp_path, "0, 1")

    assert comparison.first is None, comparison.differences
    assert {"gradient", "weight", "optimizer state exp_avg"} <= comparison.largest.keys()
    # Of its features a rank has a part, which its tokens do not tell.
    assert {name.rpartition(" ")[2] for name in comparison.unaligned} == {"mixer"}


def test_ranks_in_the_wrong_order_are_found(
    reference: tuple[str, Recording], tmp_path: Path
) -> None:
    comparison = judged(reference, tmp_path, "1, 0")

    assert comparison.first is not None
    assert (comparison.first.phase, comparison.first.name) == ("forward", "out")


@pytest.mark.sample
def test_without_a_rule_hidden_parts_are_listed(
    reference: tuple[str, Recording], tmp_path: Path
) -> None:
    comparison = judged(reference, tmp_path, "")

    assert "first weight mixer.weight" in comparison.unaligned
    assert "gradient mixer.weight" in comparison.unaligned


def train_flat() -> None:
    """ZeRO-1 by hand: each rank updates half of a row of all values, rounded up to float32."""
    torch.manual_seed(1)
    model = Whole()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    row = torch.cat([p.detach().reshape(-1) for p in parameters])
    size = len(row) // ranks
    mine = nn.Parameter(row[rank * size : (rank + 1) * size].clone())
    optimizer = torch.optim.AdamW([mine], lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        tokens = torch.randint(30, (4, 9), generator=generator)[rank::ranks]
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        grads = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]) / ranks
        dist.all_reduce(grads)
        mine.grad = grads[rank * size : (rank + 1) * size].clone()
        optimizer.step()
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine.detach())
        nn.utils.vector_to_parameters(torch.cat(parts), parameters)
        model.zero_grad()


def test_parts_of_a_row_of_all_values_are_found_in_a_job_of_no_library(
    reference: tuple[str, Recording], tmp_path: Path
) -> None:
    folder, expected = reference
    asked = Request(str(tmp_path / "job"), reference=folder, steps=2)

    comparison = compare(record(asked, train_flat, ranks=2), expected, Floor(expected, []))

    assert comparison.first is None, comparison.differences
    assert comparison.unaligned == {}


def train_drawn() -> None:
    """FSDP2 of a model made on meta: on a CPU each rank draws its shard from the first number on.

    So a rank's shard of the second matrix has the values of its shard of the reference's first.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        rows = torch.randn(4, 8, generator=generator).chunk(dist.get_world_size())
        model(rows[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_are_given_by_name_where_a_ranks_own_are_those_of_another_by_chance(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "reference")
    expected = record(Request(folder, steps=2), train_drawn, ranks=1)
    asked = Request(str(tmp_path / "job"), reference=folder, steps=2, start=True)

    comparison = compare(record(asked, train_drawn, ranks=2), expected, Floor(expected, []))

    assert comparison.first is None, comparison.differences
    assert comparison.unaligned == {}
