"""What the families of models have in common: stages, packing, multi-token prediction."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from hp_context import Documents
from hp_platform.testing import Comparison, compare, run_distributed
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.model import Ahead, DropoutKey, Microbatch, Stage, TransformerStage, look_ahead
from hp_trainer.model.block import Block
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import declared, named_parameters
from hp_trainer.model.prediction import PredictionModule
from hp_trainer.model.rotary import rotation
from hp_trainer.model.spreading import cut_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


FAMILIES = [
    f"debug-{name}"
    for name in ("llama3", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss")
]
VOCABULARY, LENGTH = 32, 24


def _model(name: str, **settings: object) -> ModelConfig:
    """A debug preset with weights large enough that everything matters, and one layer more."""
    model = resolve(name, env={}).config.model
    given = {"num_layers": model.num_layers + 1, "init_std": 0.2, "tie_embeddings": False}
    return replace(model, **(given | settings))


def _stage(model: ModelConfig, layers: range) -> TransformerStage:
    last = layers.stop == model.num_layers
    stage = TransformerStage(
        model,
        VOCABULARY,
        layers=layers,
        first=layers.start == 0,
        last=last,
        compute_dtype=torch.float64,
    ).double()
    initialize_parameters(named_parameters(stage), model, seed=0)
    for name, parameter in stage.named_parameters():  # biases and sinks begin with zero
        if parameter.ndim == 1 or ".b" in name:
            values = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(len(name))
            )
            parameter.data.add_(values, alpha=0.1)
    return stage


def _batch(num_sequences: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (num_sequences, LENGTH + 1), generator=generator)
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def _ahead(model: ModelConfig, tokens: Tensor, targets: Tensor) -> Ahead:
    """What is predicted ahead in one step with these sequences."""
    learned, counts = targets >= 0, []
    for depth in range(1, model.num_mtp_modules + 1):
        learned = learned[:, :-1] & (targets[:, depth:] >= 0)
        counts.append(int(learned.sum()))
    return look_ahead(tokens, targets, tuple(counts))


def _gradients(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    named = (item for stage in stages for item in stage.named_parameters())
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def _run(model: ModelConfig, cuts: list[range]) -> dict[str, Tensor]:
    """Loss, losses inside and gradients of a model that is cut into stages."""
    tokens, targets = _batch()
    microbatch = Microbatch(
        2,
        DropoutKey(0, 0, torch.arange(2), torch.arange(LENGTH)),
        ahead=_ahead(model, tokens, targets) if model.num_mtp_modules else None,
    )
    stages = [_stage(model, layers) for layers in cuts]
    x = tokens
    for stage in stages:
        x = stage(x, microbatch=microbatch)
    loss = F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
    loss.backward()
    inner = [*microbatch.balance_losses.values(), *microbatch.prediction_losses]
    found = {"loss": loss.detach(), "inner": torch.stack(inner) if inner else torch.zeros(1)}
    return found | _gradients(stages)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_do_not_depend_on_the_cut_into_stages(name: str) -> None:
    model = _model(name)
    whole = _run(model, [range(model.num_layers)])
    cut = _run(model, [range(1), range(1, 2), range(2, model.num_layers)])
    comparison = compare(cut, whole)
    assert comparison.ok, comparison
    assert all(bool(value.isfinite().all()) for value in whole.values())


def _cut_over_two(name: str) -> Comparison:
    """Loss and gradients of a rank that has half of the matrices and of the positions."""
    model, group = _model(name), dist.group.WORLD
    assert group is not None
    rank, dims = group.rank(), {}
    whole, stage = _stage(model, range(model.num_layers)), _stage(model, range(model.num_layers))
    for each, tensor in declared(stage).items():
        dims[each] = tensor.spec.tp_dim
    cut_tensors(stage, range(rank * VOCABULARY // 2, (rank + 1) * VOCABULARY // 2), group)

    def mine(each: str, tensor: Tensor) -> Tensor:
        dim = dims[each]
        return tensor if dim is None else tensor.chunk(2, dim)[rank]

    for part in stage.modules():
        if isinstance(part, Stage | Block):
            part.sequence_ranks = group
    for each, parameter in stage.named_parameters():
        parameter.data.copy_(mine(each, whole.get_parameter(each).data))
    tokens, targets = _batch()
    losses = []
    for module in (whole, stage):
        microbatch = Microbatch(
            2,
            positions=torch.arange(LENGTH),
            targets=targets,
            ahead=_ahead(model, tokens, targets) if model.num_mtp_modules else None,
        )
        loss = module(tokens, microbatch=microbatch) / targets.numel()
        loss.backward()
        losses.append(loss.detach())
    found, wanted = _gradients([stage]), _gradients([whole])
    for each, grad in found.items():
        if dims[each] is None:
            dist.all_reduce(grad)
    parts = {each: mine(each, grad) for each, grad in wanted.items()}
    wanted = parts | {"loss": losses[0]}
    return compare(found | {"loss": losses[1]}, wanted, bound=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_tensor_parallel_ranks_compute_what_one_does(name: str) -> None:
    for comparison in run_distributed(_cut_over_two, name, world_size=2):
        assert comparison.ok, comparison


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_a_gradient(name: str) -> None:
    model = _model(name)
    found = _run(model, [range(model.num_layers)])
    assert [n for n, grad in found.items() if n != "inner" and not grad.any()] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_what_they_are_alone(name: str) -> None:
    model = _model(name, num_mtp_modules=0)
    stage = _stage(model, range(model.num_layers))
    tokens, _ = _batch(1)
    packed = stage(tokens, microbatch=Microbatch(1, documents=(Documents((9, LENGTH - 9)),)))
    alone = [stage(part, microbatch=Microbatch(1)) for part in (tokens[:, :9], tokens[:, 9:])]
    comparison = compare({"y": packed}, {"y": torch.cat(alone, dim=1)}, bound=1e-12)
    assert comparison.ok, comparison
    assert not torch.allclose(packed, stage(tokens, microbatch=Microbatch(1)))


def test_a_window_hides_what_is_too_far_back() -> None:
    model = _model("debug-mixtral", sliding_window=4, num_layers=1)
    stage = _stage(model, range(1))
    tokens, _ = _batch(1)
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % VOCABULARY
    a, b = (stage(t, microbatch=Microbatch(1))[0] for t in (tokens, other))
    # Which tokens share an expert changes, and with it the order of sums of the others.
    changed = [i for i in range(LENGTH) if not torch.allclose(a[i], b[i], rtol=1e-5, atol=1e-6)]
    assert changed == [8, 9, 10, 11]


def test_every_other_layer_may_see_all() -> None:
    model = resolve("gpt-oss-20b", env={}).config.model
    assert [model.has_window(i) for i in range(4)] == [True, False, True, False]
    assert not any(replace(model, sliding_window=0).has_window(i) for i in range(4))


def _plain_prediction(stage: TransformerStage, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """The mean loss of each module by the paper's formula, token by token where it matters."""
    assert stage.embedding is not None
    assert stage.norm is not None
    assert stage.output is not None
    embedded = stage.embedding(tokens)
    turn = rotation(stage.config, torch.arange(LENGTH))
    h = embedded
    idle = Microbatch(1)
    for block in stage.layers.values():
        h = block(h, rotation=turn, microbatch=idle)
    h = stage.norm(h)
    losses = []
    for depth, module in enumerate(stage.mtp, start=1):
        assert isinstance(module, PredictionModule)
        span = LENGTH - depth
        later = torch.stack([embedded[:, i + depth] for i in range(span)], dim=1)
        pair = torch.cat((module.embedding_norm(later), module.hidden_norm(h[:, :span])), dim=-1)
        x = module.projection(pair)
        shorter = turn._replace(cos=turn.cos[:span], sin=turn.sin[:span])
        h = module.norm(module.block(x, rotation=shorter, microbatch=idle))
        chances = stage.output(h).log_softmax(-1)
        picked = [chances[:, i].gather(1, targets[:, i + depth, None]) for i in range(span)]
        losses.append(-torch.stack(picked).mean())
    return losses


def test_the_loss_of_prediction_modules_is_that_of_the_paper() -> None:
    model = _model("debug-deepseek-v3", num_mtp_modules=2, mtp_weight=0.3, balance_coefficient=0.0)
    stage = _stage(model, range(model.num_layers))
    tokens, targets = _batch()
    microbatch = Microbatch(2, ahead=_ahead(model, tokens, targets))
    logits = stage(tokens, microbatch=microbatch)
    expected = _plain_prediction(stage, tokens, targets)
    assert torch.stack(microbatch.prediction_losses).tolist() == pytest.approx(
        [float(loss.detach()) / 2 for loss in expected], rel=1e-12
    )
    logits.mul(0).sum().backward()
    actual = _gradients([stage])
    stage.zero_grad()
    (sum(expected, torch.zeros(())) * 0.15).backward()
    comparison = compare(actual, _gradients([stage]), bound=1e-11)
    assert comparison.ok, comparison


def test_nothing_is_predicted_across_the_end_of_a_document() -> None:
    model = _model("debug-deepseek-v3", num_mtp_modules=2, balance_coefficient=0.0)
    stage = _stage(model, range(model.num_layers))
    tokens, targets = _batch(1)
    losses = []
    for first in (0, 1):  # tokens of the second document, which must not matter to the first
        tokens[:, 9:] = first
        targets[:, 9:] = -1
        targets[:, 8] = -1
        ahead = _ahead(model, tokens, targets)
        microbatch = Microbatch(1, ahead=ahead, documents=(Documents((9, LENGTH - 9)),))
        stage(tokens, microbatch=microbatch)
        losses.append(torch.stack(microbatch.prediction_losses))
    assert torch.allclose(losses[0], losses[1], rtol=1e-13, atol=0)
    assert bool((losses[0] > 0).all())


def test_nothing_is_predicted_ahead_outside_training() -> None:
    stage = _stage(_model("debug-deepseek-v3"), range(4))
    microbatch = Microbatch(2)
    stage(_batch()[0], microbatch=microbatch)
    assert microbatch.prediction_losses == []
