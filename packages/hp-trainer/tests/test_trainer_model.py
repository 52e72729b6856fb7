import math
import re

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hp_expert import ExpertTensorParallel, GroupedExperts
from hp_platform.testing import run_distributed
from hp_trainer.config import ModelConfig, TrainConfig
from hp_trainer.layout.parameter import local_shape
from hp_trainer.layout.ranks import StageLayout
from hp_trainer.layout.schedules import split_layers
from hp_trainer.model import DropoutKey, Microbatch, TransformerStage, add_loss
from hp_trainer.model.block import Block
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.layers import RMSNorm, _RMSNormAgain, _RMSNormOnCPU, dropout
from hp_trainer.model.parameters import declared, named_parameters
from hp_trainer.model.recompute import Recompute
from hp_trainer.training.optimizer import changed_rate, learning_rate

CONFIG = ModelConfig(dim=16, num_layers=4, expert_hidden=8, num_experts=4, init_std=0.2)


def _stage(config: ModelConfig, layers: range, *, seed: int = 0) -> TransformerStage:
    last = layers.stop == config.num_layers
    stage = TransformerStage(config, 32, layers=layers, first=layers.start == 0, last=last)
    initialize_parameters(named_parameters(stage), config, seed=seed)
    return stage


def test_stages_in_a_row_are_the_whole_model() -> None:
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    microbatch = Microbatch(2)
    whole = _stage(CONFIG, range(4))(tokens, microbatch=microbatch)
    x = tokens
    for layers in (range(1), range(1, 3), range(3, 4)):
        x = _stage(CONFIG, layers)(x, microbatch=microbatch)
    assert torch.equal(x, whole)
    assert whole.shape == (2, 8, 32)


def test_parameters_keep_their_global_names_and_values_on_any_stage() -> None:
    whole = dict(_stage(CONFIG, range(4)).named_parameters())
    parts: dict[str, nn.Parameter] = {}
    for layers in (range(2), range(2, 4)):
        parts |= dict(_stage(CONFIG, layers).named_parameters())
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def _part_of_experts() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape of what a rank has of each parameter, by its declaration and by what cuts it."""
    experts = GroupedExperts(4, 8, 6, bias=True)
    whole, rank = declared(experts), dist.get_rank()
    alone = [dist.new_group([index]) for index in range(2)][rank]
    assert dist.group.WORLD is not None
    ExpertTensorParallel(sliced=True).apply(experts, (alone, dist.group.WORLD))
    place = StageLayout(dp_shard=2, etp=2)
    index = {"ep": 0, "etp": rank, "expert_shard": 0}
    return [
        (local_shape(whole[name].shape, whole[name].spec, place, index), tuple(tensor.shape))
        for name, tensor in experts.named_parameters()
    ]


def test_experts_declare_as_cut_what_is_cut() -> None:
    """Their biases too; what is taken for a copy is summed over ranks."""
    for found in run_distributed(_part_of_experts, world_size=2):
        assert len(found) == 6
        assert all(declaration == part for declaration, part in found), found


def test_the_seed_decides_the_weights() -> None:
    a, b = (_stage(CONFIG, range(1), seed=s).embedding for s in (0, 1))
    assert a is not None
    assert b is not None
    assert not torch.equal(a.weight, b.weight)
    assert float(a.weight.detach().std()) == pytest.approx(CONFIG.init_std, rel=0.1)


def test_no_position_sees_a_later_one() -> None:
    stage = _stage(CONFIG, range(4))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    other = tokens.clone()
    other[0, 5:] = 7
    a, b = (stage(t, microbatch=Microbatch(1)) for t in (tokens, other))
    assert torch.equal(a[0, :5], b[0, :5])
    assert not torch.equal(a[0, 5], b[0, 5])


def test_rms_norm_gives_unit_mean_square() -> None:
    norm = RMSNorm(64, eps=1e-8)
    nn.init.ones_(norm.weight)
    y = norm(torch.randn(3, 64) * 7)
    assert torch.allclose(y.square().mean(-1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("function", [_RMSNormOnCPU, _RMSNormAgain])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_rms_norm_has_the_gradients_of_torchs(
    function: type[torch.autograd.Function], dtype: torch.dtype, bound: float
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 5, 3, 64, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(64, generator=generator).to(wide).requires_grad_()
    x.requires_grad_()
    found = []
    for run in (function.apply, lambda x, w, eps: F.rms_norm(x.to(wide), (64,), w, eps).to(dtype)):
        y = run(x, weight, 1e-5)
        found.append((y.detach(), *torch.autograd.grad(y, (x, weight), grad)))
    for actual, expected in zip(*found, strict=True):
        assert actual.dtype == expected.dtype
        assert float((actual - expected).abs().max() / expected.abs().max()) <= bound


def test_dropout_is_a_function_of_seed_step_place_and_sequence() -> None:
    x = torch.ones(4, 8, 16)
    key = DropoutKey(0, 3, torch.arange(4), torch.arange(8))
    y = dropout(x, 0.25, key, "a")
    assert torch.equal(y, dropout(x, 0.25, key, "a"))
    late = DropoutKey(0, 3, torch.arange(4), torch.arange(4, 8))
    assert torch.equal(y[:, 4:], dropout(x[:, 4:], 0.25, late, "a"))
    assert torch.equal(
        y[2:], dropout(x[2:], 0.25, DropoutKey(0, 3, torch.arange(2, 4), key.positions), "a")
    )
    for other in (
        dropout(x, 0.25, key, "b"),
        dropout(x, 0.25, key._replace(step=4), "a"),
        dropout(x, 0.25, key._replace(seed=1), "a"),
    ):
        assert not torch.equal(y, other)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float((y == 0).double().mean()) == pytest.approx(0.25, abs=0.06)


def test_nothing_is_dropped_outside_training() -> None:
    x = torch.randn(2, 3, 4)
    assert dropout(x, 0.5, None, "a") is x


def test_an_added_loss_acts_like_a_term_of_the_sum() -> None:
    x = torch.randn(3, requires_grad=True)
    w = torch.tensor(2.0, requires_grad=True)
    add_loss(x * 1.0, 3.0 * w).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    assert w.grad is not None
    assert float(w.grad) == 3.0


def test_balance_losses_are_collected_in_training_only() -> None:
    stage = _stage(CONFIG, range(4))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    microbatch = Microbatch(2, DropoutKey(0, 0, torch.arange(2), torch.arange(8)))
    stage(tokens, microbatch=microbatch)
    assert len(microbatch.balance_losses) == CONFIG.num_layers
    idle = Microbatch(2)
    stage(tokens, microbatch=idle)
    assert idle.balance_losses == {}


@pytest.mark.parametrize("part", ["attention", "feed_forward", "full"])
def test_what_is_computed_again_gives_the_same_gradients_and_keeps_less(part: Recompute) -> None:
    def run(part: Recompute) -> tuple[dict[str, torch.Tensor], int, list[torch.Tensor]]:
        stage = _stage(CONFIG, range(4))
        for block in stage.modules():
            if isinstance(block, Block):
                block.recompute = part
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return x

        tokens = torch.randint(32, (2, 64), generator=torch.Generator().manual_seed(0))
        microbatch = Microbatch(2, DropoutKey(0, 0, torch.arange(2), torch.arange(64)))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = stage(tokens, microbatch=microbatch).square().sum()
        num_bytes = sum(kept.values())
        loss.backward()
        grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        return grads, num_bytes, list(microbatch.balance_losses.values())

    (plain, all_bytes, losses), (again, fewer_bytes, same_losses) = run("none"), run(part)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert fewer_bytes < 0.8 * all_bytes
    assert all(map(torch.equal, losses, same_losses))


def test_tied_embeddings_share_one_parameter() -> None:
    config = ModelConfig(dim=16, num_layers=1, tie_embeddings=True)
    stage = _stage(config, range(1))
    assert "output.weight" not in dict(stage.named_parameters())
    logits = stage(torch.zeros(1, 4, dtype=torch.int64), microbatch=Microbatch(1))
    assert logits.shape == (1, 4, 32)


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (7, 3), (5, 1), (9, 4)])
def test_layers_are_shared_out_evenly(layers: int, stages: int) -> None:
    runs = split_layers(layers, stages)
    assert [i for run in runs for i in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_layers_are_shared_out_as_given() -> None:
    assert split_layers(7, 3, (4, 2, 1)) == [range(4), range(4, 6), range(6, 7)]


@pytest.mark.parametrize("sizes", [(4, 3), (4, 2, 2)])
def test_sizes_of_other_stages_or_layers_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one for each of num_stages \(3\), which sum to"):
        split_layers(7, 3, sizes)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_layers \(2\) must be at least num_stages \(3\)"):
        split_layers(2, 3)


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(config.min_learning_rate_ratio)
    assert math.isfinite(learning_rate(10**6, config))


def test_a_resumed_run_says_where_its_learning_rate_is_another_and_how_to_keep_it() -> None:
    before = TrainConfig(steps=150, warmup_steps=10, learning_rate=3e-3)
    saved = msgspec.structs.asdict(before)
    assert changed_rate(saved, before, 83) == []
    assert changed_rate(saved, msgspec.structs.replace(before, log_every=3), 83) == []
    longer = msgspec.structs.replace(before, steps=300)
    (line,) = changed_rate(saved, longer, 150)
    old, new = learning_rate(150, before), learning_rate(150, longer)
    assert new > 2 * old
    assert (
        f"step 151 is {new:.3g}, and would have been {old:.3g}: train.steps was 150, is 300" in line
    )
    # As the line says.
    options = re.findall(r"--train\.(\w+) (\S+)", line)
    kept = msgspec.structs.replace(longer, **{k: type(saved[k])(float(v)) for k, v in options})
    assert learning_rate(150, kept) == pytest.approx(old, rel=1e-2)
    assert learning_rate(290, kept) == learning_rate(150, kept)
    (line,) = changed_rate(saved, msgspec.structs.replace(before, learning_rate=1e-5), 83)
    assert "train.learning_rate was 0.003, is 1e-05" in line
    assert changed_rate({"steps": "many"}, before, 83) == []
