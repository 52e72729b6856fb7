"""A loss that goes through the logits tile by tile is that of all logits, and holds one tile."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_plan.costs.memory import buffer_bytes
from hp_plan.costs.modules import whole_model
from hp_platform import WeightGradQueue
from hp_platform.testing import LiveBytes, run_distributed, watch_operators
from hp_trainer.config import Config
from hp_trainer.config.options import with_keys
from hp_trainer.layout import vocabulary
from hp_trainer.layout.ranks import StageLayout, chunk
from hp_trainer.layout.vocabulary import LogitTile, logit_tile
from hp_trainer.model import Microbatch, TransformerStage, linear_cross_entropy
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.layers import WeightCasts
from hp_trainer.model.loss import loss_of, tiled_cross_entropy
from hp_trainer.model.parameters import named_parameters

Found = tuple[Tensor, Tensor, Tensor]
TILES = [LogitTile(40, 70), LogitTile(100, 1000), LogitTile(7, 1), LogitTile(1, 1000)]


def drawn(
    tokens: int = 100, rows: int = 1000, dim: int = 16, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Input and output matrix in fp64, and targets, some of them not to be learned."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (
        torch.randn(n, dim, generator=generator, dtype=torch.float64) * scale
        for n in (tokens, rows)
    )
    targets = torch.randint(rows, (tokens,), generator=generator)
    targets[::7] = -1
    return x, weight, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Found:
    """Loss and gradients by torch alone."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = (x @ weight.to(x.dtype).t()).to(torch.promote_types(x.dtype, torch.float32))
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    (0.3 * loss).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def tiled(x: Tensor, weight: Tensor, targets: Tensor, **settings: Any) -> Found:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = tiled_cross_entropy(x, weight, targets, **settings)
    (0.3 * loss).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest, relative to the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_tiles_have_the_loss_and_the_gradients_of_all_logits(tile: LogitTile, scale: float) -> None:
    # With the larger scale most exponentials are 0, and without what they are divided by infinite.
    given = drawn(scale=scale)
    for actual, expected in zip(tiled(*given, tile=tile), plain(*given), strict=True):
        assert error(actual, expected) < 1e-12


def test_narrow_tiles_are_no_further_from_the_truth_than_narrow_logits() -> None:
    x, weight, targets = drawn()
    truth = plain(x, weight, targets)
    narrow = x.bfloat16(), weight.float(), targets
    for casts in (None, WeightCasts()):
        found = tiled(*narrow, tile=TILES[0], casts=casts)
        assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.float32]
        for ours, theirs, true in zip(found, plain(*narrow), truth, strict=True):
            assert error(ours, true) <= 1.2 * error(theirs, true)


def test_a_weight_gradient_that_is_put_off_has_the_same_bits() -> None:
    x, weight, targets = drawn()
    expected = tiled(x, weight, targets, tile=TILES[0])
    queue = WeightGradQueue()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with queue.defer("loss"):
        (0.3 * tiled_cross_entropy(x, weight, targets, tile=TILES[0])).backward()
    assert queue.pending() == 1
    assert x.grad is not None
    assert torch.equal(x.grad, expected[1])
    queue.flush("loss")
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected[2])


def of_a_rank(tile: LogitTile) -> tuple[list[float], list[int]]:
    """Errors of loss and gradients where ranks have rows each, and sums forward and backward."""
    x, weight, targets = drawn(scale=5.0)
    loss, grad_x, grad_weight = plain(x, weight, targets)
    mine = chunk(range(len(weight)), dist.get_world_size(), dist.get_rank())
    part = weight[mine.start : mine.stop].clone().requires_grad_()
    x.requires_grad_()
    sums = [0, 0]

    def count(phase: int, name: str, *_: object) -> None:
        sums[phase] += name.startswith("c10d::")

    with watch_operators(partial(count, 0)):
        found = tiled_cross_entropy(
            x, part, targets, tile=tile, first=mine.start, group=dist.group.WORLD
        )
    with watch_operators(partial(count, 1)):
        (0.3 * found).backward()
    assert x.grad is not None
    assert part.grad is not None
    dist.all_reduce(x.grad)
    wanted = grad_weight[mine.start : mine.stop]
    errors = [error(found.detach(), loss), error(x.grad, grad_x), error(part.grad, wanted)]
    return errors, sums


@pytest.mark.parametrize("tile", TILES[:2])
def test_ranks_that_share_out_the_vocabulary_sum_twice_however_many_tiles(tile: LogitTile) -> None:
    for errors, sums in run_distributed(of_a_rank, tile, world_size=3):
        assert max(errors) < 1e-13
        assert sums == [2, 0]


def test_only_logits_that_take_much_go_in_tiles() -> None:
    assert logit_tile(8192, 2048, size=2) is None  # 64 MiB in fp32
    for tokens, rows, size in (
        (8192, 2049, 2),
        (8192, 151_936, 2),
        (65_536, 32_000, 8),
        (1, 1 << 28, 4),
    ):
        tile = logit_tile(tokens, rows, size=size)
        assert tile is not None
        assert tile.tokens * tile.rows * max(size, 4) <= vocabulary.TILE_BYTES
        assert tile.tokens <= tokens
        # Tiles are of about the same size, and not many.
        assert (
            0.9 * -(-rows // tile.rows)
            <= rows * tile.tokens * max(size, 4) / vocabulary.TILE_BYTES + 1
        )


def test_a_stage_returns_the_loss_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_keys(Config(), {"model.dim": 16, "model.num_layers": 1}).model
    stage = TransformerStage(config, 32, layers=range(1), first=True, last=True)
    initialize_parameters(named_parameters(stage), config, seed=0)
    tokens, targets = torch.randint(32, (2, 2, 8)).unbind()
    logits = stage(tokens, microbatch=Microbatch(2))
    expected = loss_of(logits, targets)
    assert loss_of(expected, targets) is expected
    for most in (vocabulary.TILE_BYTES, 200):
        monkeypatch.setattr(vocabulary, "TILE_BYTES", most)
        loss = stage(tokens, microbatch=Microbatch(2, targets=targets))
        assert loss.shape == ()
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("dim", [2048, 4096])
def test_a_large_vocabulary_takes_little_beside_its_gradient(dim: int) -> None:
    """Those of Qwen3: all logits would take 4.6 GiB, and as much for each copy."""
    tokens, rows = 8192, 151_936
    with FakeTensorMode():
        x = torch.empty(tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(rows, dim, requires_grad=True)
        targets, casts = torch.empty(tokens, dtype=torch.int64), WeightCasts()
        casts.of(weight, x.dtype)
        with LiveBytes() as live:
            linear_cross_entropy(x, weight, targets, casts=casts).backward()
    assert weight.grad is not None
    assert live.peak - weight.grad.nbytes <= 300 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [vocabulary.TILE_BYTES, 1 << 16])
def test_a_plan_knows_what_a_loss_holds(
    dtype: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "TILE_BYTES", most)
    tokens, rows, dim = 64, 1024, 48
    keys = {"train.dtype": dtype, "train.microbatch_size": 1, "data.seq_len": tokens}
    config = with_keys(Config(), keys | {"model.dim": dim})
    work = whole_model(config, rows)
    x = torch.randn(tokens, dim).to(getattr(torch, dtype)).requires_grad_()
    weight, casts = torch.randn(rows, dim, requires_grad=True), WeightCasts()
    casts.of(weight, x.dtype)
    targets = torch.arange(tokens)
    with LiveBytes() as live:
        loss = linear_cross_entropy(x, weight, targets, casts=casts)
        kept = live.now
        loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    with_head, without = (
        buffer_bytes(config, [part], StageLayout(), active_stages=2)
        for part in (work, replace(work, logits=0))
    )
    held = live.peak - kept - x.grad.nbytes - weight.grad.nbytes
    assert held <= 1.1 * (with_head - without)
    assert held > (with_head - without) / 2
